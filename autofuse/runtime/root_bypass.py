"""Calls of a root that skip the handler, because they stay in eager for their size.

In: calls of sizes that lost to eager. Out: whole modules whose calls the tracker runs by itself from then on, and for
functions, which others may call with other shapes, single shapes. A call of another size wakes them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from autofuse.observer.root_tracker import QuietCalls, RootTracker, Target
from autofuse.runtime.graph_trial import GraphTrial

_SHAPE = operator.attrgetter("shape")

MAX_SKIPPED = 1024  # shapes of a function that skip the handler one by one
QUIET_AFTER = 64  # calls one after the other whose sizes stay in eager: then they skip the handler


class Bypass:
    """Past the handler, for one root."""

    def __init__(self, tracker: RootTracker, trial: GraphTrial) -> None:
        self.is_small = False  # counting the root's calls costs what can be seen
        self._tracker = tracker
        self._trial = trial
        self._left_alone = 0  # calls one after the other that stayed in eager for their size
        self._released: set[QuietCalls] = set()  # modules whose calls skip the handler, or did
        self._skipped: set[tuple[Any, ...]] = set()  # shapes of a function's calls that do, while others do not

    @property
    def calls(self) -> int:
        """That the handler did not see."""
        return sum(attached.calls for attached in self._released)

    def leave_alone(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], all_eager: bool) -> None:
        """A call of a size that stays in eager; ``all_eager``: as those of all sizes do."""
        self._left_alone += 1
        if all_eager:
            is_quiet = self.is_small or self._left_alone >= QUIET_AFTER
        elif self._trial.on_gpu:  # the few calls that warm up a CUDA graph would go unseen
            is_quiet = False
        elif isinstance(module, torch.nn.Module):  # not where others' steps end with these
            is_quiet = self._left_alone >= 4 * QUIET_AFTER and not torch.is_grad_enabled()
        else:
            is_quiet = False
            self._skip(module, args, kwargs)
        if is_quiet and self._tracker.is_installed:
            self._released.add(self._tracker.release(module))

    def wake(self, module: Target) -> None:
        """A call of another size: the handler sees the next ones."""
        self._left_alone = 0
        if self._released:
            self._tracker.wake(module)

    def _skip(self, function: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls of a function with shapes like these skip the handler from now on: 1 us each in place of 8."""
        if kwargs or len(self._skipped) >= MAX_SKIPPED or not self._tracker.is_installed:
            return
        try:
            self._skipped.add(tuple(map(_SHAPE, args)))
        except Exception:  # not of tensors alone
            return
        attached = self._tracker.attach(function)
        attached.skips = self._skips
        self._released.add(attached)
        self._trial.skips_lost = True

    def _skips(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        opened = self._trial.opened
        if kwargs or (opened is not None and opened.shape is not None):  # a step that this call ends
            return False
        try:
            return tuple(map(_SHAPE, args)) in self._skipped
        except Exception:
            return False
