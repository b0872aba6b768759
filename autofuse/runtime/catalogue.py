"""What is decided and what is loaded, in memory: the script's side of the store.

In: decisions and kernels that the background thread read. Out: the choice for a node in one shape.
Guarantee: a look-up never blocks and never touches a file; of several decisions the narrowest bucket
wins, then the latest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from autofuse.ir.records import EAGER, Decision, KernelRecord
from autofuse.runtime.router import UNKNOWN, Choice


class DecisionTable:
    """Decisions by node and bucket."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, Decision]] = {}

    def __len__(self) -> int:
        return sum(len(decisions) for decisions in self._by_node.values())

    def update(self, decisions: Iterable[Decision]) -> int:
        """Take over decisions, later ones replacing earlier ones of the same bucket; returns how many."""
        count = 0
        for decision in decisions:
            buckets = dict(self._by_node.get(decision.key.fusion_id, {}))
            buckets[f"{decision.bucket.label} {decision.key.threads}"] = decision
            # Exact buckets first: they know the shape at hand.
            ordered = sorted(buckets.items(), key=lambda item: not item[1].bucket.is_exact)
            self._by_node[decision.key.fusion_id] = dict(ordered)
            count += 1
        return count

    def find(self, fusion_id: str, values: Sequence[int], threads: int) -> Decision | None:
        for decision in self._by_node.get(fusion_id, {}).values():
            if decision.key.threads == threads and decision.bucket.contains(values):
                return decision
        return None

    def kernels(self) -> list[str]:
        """Compile keys of all winners."""
        keys = (d.compile_key for buckets in self._by_node.values() for d in buckets.values())
        return list(dict.fromkeys(key for key in keys if key))


class KernelShelf:
    """Loaded kernels by compile key."""

    def __init__(self, load: Callable[[KernelRecord], Callable[..., None]]) -> None:
        self._load = load
        self._entries: dict[str, Callable[..., None]] = {}
        self._records: dict[str, KernelRecord] = {}
        self._missing: set[str] = set()  # asked for by the router, not read yet
        self._unusable: set[str] = set()
        self._lock = threading.Lock()

    def add(self, digest: str, record: KernelRecord | None) -> None:
        """Keep what the store gave for ``digest``; None where it had nothing."""
        if record is None:
            self._unusable.add(digest)
        else:
            self._records[digest] = record
        self._missing.discard(digest)

    def has(self, digest: str) -> bool:
        return digest in self._entries or digest in self._records or digest in self._unusable

    def entry(self, digest: str) -> Callable[..., None] | None:
        """The kernel's entry point, None where it is not here (yet); loading takes 0.2 ms, once."""
        found = self._entries.get(digest)
        if found is not None or digest in self._unusable:
            return found
        record = self._records.get(digest)
        if record is None:
            self._missing.add(digest)
            return None
        with self._lock:
            if digest not in self._entries:
                try:
                    self._entries[digest] = self._load(record)
                except Exception:
                    self._unusable.add(digest)
                    raise
            return self._entries[digest]

    def missing(self) -> list[str]:
        return list(self._missing)


def choose(table: DecisionTable, shelf: KernelShelf, fusion_id: str, values: Sequence[int], threads: int) -> Choice:
    """What the table says, as far as its kernel is here."""
    decision = table.find(fusion_id, values, threads)
    if decision is None:
        return UNKNOWN
    if decision.candidate.variant == EAGER or decision.compile_key is None:
        return Choice(known=True)
    entry = shelf.entry(decision.compile_key)
    if entry is None:
        # Known, but its kernel is not: eager until it is.
        return Choice(known=shelf.has(decision.compile_key))
    return Choice(known=True, entry=entry, tag=decision.compile_key)
