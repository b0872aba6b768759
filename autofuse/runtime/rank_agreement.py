"""Ranks of one job change the kernel of an optimizer's step at the same step, or none of them does.

In: the step that this rank is at, the kernel that it could run, and what it holds. Out: whether to run the kernel from
this step on. Each rank of a data-parallel job steps a replica of its own from equal gradients: where one rank runs a
kernel that differs from torch's in the last bit and another one torch's, the replicas drift apart, and nothing notices.

Rank 0 offers a kernel in the job's own store, with three steps: at the first, all compare what they hold; at the
second, rank 0 decides; at the third, all change. The others acknowledge at the first step if they have loaded the
kernel, by a fingerprint of their parameters: it is rank 0's if they mean the same parameters at the same step.
Guarantee: one value in the store decides, whoever writes it first; there is no collective, so nothing can hang; a rank
waits for that value for some seconds at most.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from autofuse.job_ranks import told_ranks
from autofuse.preserve_rng import untouched

FIRST_LEAD = 16  # steps from an offer to the first of its steps, and between those; twice as many at each attempt
MOST_ATTEMPTS = 12  # over 196,000 steps: of short steps, a busy machine makes thousands before each rank has the kernel
POLL_STEPS = 8  # between looks for an offer: one takes a tenth of a millisecond
WAIT_SECONDS = 10.0  # for a decision that should have been there for many steps
_PREFIX = "autofuse"
_TENSORS, _ELEMENTS = 16, 64  # at most so many of each go into a fingerprint


class Store(Protocol):
    """The part of torch's stores of key and value that is used here."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Ranks(NamedTuple):
    """The ranks of this job."""

    rank: int
    size: int
    store: Store


class Offer(NamedTuple):
    """A kernel of rank 0's, and the steps at which all compare, rank 0 decides and all change to it."""

    kernel: str
    compared_at: int
    decided_at: int
    begins_at: int


def group_size() -> int:
    """The number of ranks of the script's process group; 1 where it has none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 1
    return int(distributed.get_world_size())


def is_alone() -> bool:
    """Whether the script is no rank of a job: ranks would be slower in different steps, and wait for each other."""
    return told_ranks() is None and group_size() <= 1


def current_ranks() -> Ranks | None:
    """The ranks of the script's job; None where it is a process by itself. A connection of our own is made."""
    size = group_size()
    if size < 2:
        return None
    distributed = sys.modules["torch.distributed"]
    with untouched():
        from torch.distributed.distributed_c10d import _get_default_store
    own = _get_default_store().clone()  # a wait on the script's would hold ours up
    return Ranks(distributed.get_rank(), size, distributed.PrefixStore(_PREFIX, own))


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Of some elements of some of these tensors, to the bit.

    Distributed tensors are left out: to read an element of one may be a collective.
    """
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter)]
    found = hashlib.sha256()
    for tensor in plain[:: -(-len(plain) // _TENSORS) or 1]:
        row = tensor.detach()
        while row.dim() > 1 and row.numel():
            row = row[0]
        found.update(bytes(row.reshape(-1)[:_ELEMENTS].contiguous().cpu().view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


class Agreement:
    """Of one optimizer's parameter group; ``topic`` is the same on all ranks."""

    def __init__(self, ranks: Ranks, topic: str) -> None:
        self._ranks = ranks
        self._topic = topic
        self._attempt = 0
        self._offer: Offer | None = None
        self._held = ""  # rank 0: the fingerprint of what it held at the step of comparison
        self._has_answered = False  # rank 0: decided; others: acknowledged
        self._next_poll = 0

    def is_due(self, step: int, ready: str, held: Callable[[], str]) -> bool:
        """Whether to run the kernel ``ready`` from this step on. To be asked at each step until it is.

        ``ready``: the name of what this rank could run, "" for nothing yet. ``held()``: the `fingerprint` of what it
        holds before this step. Raises what the store raises.
        """
        if self._attempt >= MOST_ATTEMPTS:
            return False
        offer = self._offer = self._offer or self._find_offer(step, ready)
        if offer is None:
            return False
        self._answer(offer, step, ready, held)
        if step < offer.begins_at:
            return False
        is_agreed = self._decision() == "yes"
        self._attempt, self._offer, self._held, self._has_answered = self._attempt + 1, None, "", False
        return is_agreed

    def _key(self, what: str) -> str:
        return f"{self._topic}/{self._attempt}/{what}"

    def _find_offer(self, step: int, ready: str) -> Offer | None:
        store = self._ranks.store
        if self._ranks.rank == 0:
            if not ready:
                return None
            lead = FIRST_LEAD << self._attempt
            offer = Offer(ready, step + lead, step + 2 * lead, step + 3 * lead)
            store.set(self._key("offer"), json.dumps(offer))
            return offer
        if step < self._next_poll:
            return None
        self._next_poll = step + POLL_STEPS
        return Offer(*json.loads(store.get(self._key("offer")))) if store.check([self._key("offer")]) else None

    def _answer(self, offer: Offer, step: int, ready: str, held: Callable[[], str]) -> None:
        """Rank 0 decides when that is due; the others acknowledge at the step of comparison if they are ready."""
        if self._has_answered:
            return
        ranks = self._ranks
        if ranks.rank == 0:
            if step == offer.compared_at:
                self._held = held()
            elif step >= offer.decided_at:
                self._has_answered = True
                agreeing = ranks.store.add(self._key(f"acknowledged/{self._held}"), 0) if self._held else 0
                ranks.store.compare_set(self._key("decision"), "", "yes" if agreeing == ranks.size - 1 else "no")
        elif ready == offer.kernel and step == offer.compared_at:
            self._has_answered = True
            ranks.store.add(self._key(f"acknowledged/{held()}"), 1)

    def _decision(self) -> str:
        """The decision; "no" for all ranks where it has not been made in time."""
        store, key = self._ranks.store, self._key("decision")
        try:
            store.wait([key], timedelta(seconds=WAIT_SECONDS))
        except RuntimeError:  # rank 0 is slow, or gone
            return store.compare_set(key, "", "no").decode()
        return store.get(key).decode()
