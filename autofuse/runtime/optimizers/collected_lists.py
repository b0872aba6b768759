"""The lists of tensors that a step of Adam begins with, collected in C.

In: a parameter group whose states are made. Out: what torch's ``_init_group`` appends to its lists, in a sixth of the
time: of 100 small parameters a fused step took most of its time there. Guarantee: torch's own method does it where
anything is unusual: a state is not made, a gradient is sparse, a tensor is complex or of a class of its own, a list is
not empty, the group asks for what torch checks there.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from autofuse.wrapper.native_library import Runner

_CLASSES = (torch.optim.Adam, torch.optim.AdamW)  # the second has inherited the method since torch 2.9
_LISTS = ("params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
_STATES = ("exp_avg", "exp_avg_sq", "step")
_CHECKED = ("amsgrad", "differentiable", "capturable")  # with these, torch does more than to append


class CollectedLists:
    """Replaces torch's methods."""

    def __init__(self) -> None:
        self._originals: dict[type, Callable[..., bool]] = {}

    def install(self, runner: Runner) -> None:
        for owner in _CLASSES:
            original = vars(owner).get("_init_group")
            if original is None or owner in self._originals:
                continue
            if tuple(inspect.signature(original).parameters) != ("self", "group", *_LISTS):
                continue
            self._originals[owner] = original
            owner._init_group = _replacement(original, runner)

    def uninstall(self) -> None:
        for owner, original in self._originals.items():
            owner._init_group = original  # type: ignore[attr-defined]
        self._originals = {}


def _replacement(original: Callable[..., bool], runner: Runner) -> Callable[..., bool]:
    collect = runner.collect(*_STATES)

    @functools.wraps(original)
    def init_group(
        self: Any,
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
        if not torch.compiler.is_compiling() and not any(lists) and _is_usual(group, self.state):
            found = collect((group["params"], self.state))
        if found is None:
            return original(self, group, *lists[:4], max_exp_avg_sqs, state_steps)
        for listed, collected in zip(lists, found, strict=True):
            listed += collected
        return False  # none is complex

    return init_group


def _is_usual(group: dict[str, Any], states: Any) -> bool:
    if any(group.get(name, True) for name in _CHECKED) or isinstance(group.get("lr"), Tensor):
        return False
    return type(states) in (dict, defaultdict) and type(group.get("params")) is list
