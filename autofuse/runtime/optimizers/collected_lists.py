"""The lists of tensors that a step of Adam begins with, collected in C.

In: a parameter group whose states are made. Out: what torch's ``_init_group`` appends to its lists, in a sixth of the
time: of 100 small parameters a fused step took most of its time there. Guarantee: torch's own method does it where
anything is unusual: a state is not made, a gradient is sparse, a tensor is complex or of a class of its own, a list is
not empty, the group asks for what torch checks there, a mode of the script is active.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autofuse.locks import make_lock
from autofuse.observer.script_modes import modes_are_active

if TYPE_CHECKING:
    from autofuse.wrapper.native_library import Runner

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)  # the second has inherited the method since torch 2.9
_LISTS = ("params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
_STATES = ("exp_avg", "exp_avg_sq", "step")
_CHECKED = ("amsgrad", "differentiable", "capturable")  # with these, torch does more than to append


class CollectedLists:
    """Replaces torch's methods, until it is closed."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, Callable[..., bool], Callable[..., bool]]] = []  # class, torch's method, ours
        self._lock = make_lock()  # the session may end while its background thread installs
        self._is_open = True

    def install(self, runner: Runner) -> None:
        with self._lock:
            for owner in _CLASSES if self._is_open and not self._replaced else ():
                original = vars(owner).get("_init_group")
                if original is None or tuple(inspect.signature(original).parameters) != ("self", "group", *_LISTS):
                    continue
                owner._init_group = self._replacement(original, runner)
                self._replaced.append((owner, original, owner._init_group))

    @property
    def is_installed(self) -> bool:
        return bool(self._replaced)

    def close(self) -> None:
        """Put torch's methods back, for good; where something else has taken our place, ours only calls torch's."""
        with self._lock:
            self._is_open = False
            for owner, original, ours in self._replaced:
                if vars(owner).get("_init_group") is ours:
                    owner._init_group = original
            self._replaced = []

    def _replacement(self, original: Callable[..., bool], runner: Runner) -> Callable[..., bool]:
        collect = runner.collect(*_STATES)

        @functools.wraps(original)
        def init_group(
            optimizer: Any,
            group: dict[str, Any],
            params_with_grad: list[Tensor],
            grads: list[Tensor],
            exp_avgs: list[Tensor],
            exp_avg_sqs: list[Tensor],
            max_exp_avg_sqs: list[Tensor],
            state_steps: list[Tensor],
        ) -> bool:
            lists = (params_with_grad, grads, exp_avgs, exp_avg_sqs, state_steps)
            found = None
            if self._is_open and not any(lists) and _is_usual(group, optimizer.state):
                found = collect((group["params"], optimizer.state))
            if found is None:
                return original(optimizer, group, *lists[:4], max_exp_avg_sqs, state_steps)
            for listed, collected in zip(lists, found, strict=True):
                listed += collected
            return False  # none is complex

        return init_group


def _is_usual(group: dict[str, Any], states: Any) -> bool:
    if torch.compiler.is_compiling() or modes_are_active():
        return False
    if any(group.get(name, True) for name in _CHECKED) or isinstance(group.get("lr"), Tensor):
        return False
    return type(states) in (dict, defaultdict) and type(group.get("params")) is list
