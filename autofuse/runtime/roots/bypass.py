"""Calls of a root that skip the handler, because they stay in eager for their size.

In: calls of sizes that lost to eager. Out: modules whose calls the tracker runs by itself from then on; for functions,
which may be called with other shapes elsewhere, single shapes. A call of another size ends this.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from autofuse.observer.root_tracker import QuietCalls, RootTracker, Target
from autofuse.runtime.roots.graph_trial import GraphTrial

_SHAPE = operator.attrgetter("shape")

MAX_SKIPPED = 1024  # shapes of a function that skip the handler one by one
QUIET_AFTER = 64  # after so many consecutive calls of sizes that stay in eager, calls skip the handler


class Bypass:
    """The calls of one root that skip the handler."""

    def __init__(self, tracker: RootTracker, trial: GraphTrial) -> None:
        self.is_small = False  # counting the root's calls has a visible cost
        self._tracker = tracker
        self._trial = trial
        self._left_alone = 0  # consecutive calls that stayed in eager for their size
        self._released: set[QuietCalls] = set()  # modules whose calls skip the handler, or have skipped it
        self._skipped: set[tuple[Any, ...]] = set()  # shapes of a function's calls that skip it

    @property
    def calls(self) -> int:
        """Calls that the handler did not see."""
        return sum(attached.calls for attached in self._released)

    def leave_alone(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], all_eager: bool) -> None:
        """Note a call of a size that stays in eager; ``all_eager``: all sizes do."""
        self._left_alone += 1
        if all_eager:
            is_quiet = self.is_small or self._left_alone >= QUIET_AFTER
        elif self._trial.on_gpu:  # the few warm-up calls of a CUDA graph would be missed
            is_quiet = False
        elif isinstance(module, torch.nn.Module):  # not where these calls end the steps of other roots
            is_quiet = self._left_alone >= 4 * QUIET_AFTER and not torch.is_grad_enabled()
        else:
            is_quiet = False
            self._skip(module, args, kwargs)
        if is_quiet and self._tracker.is_installed:
            self._released.add(self._tracker.release(module))

    def wake(self, module: Target) -> None:
        """Called at a call of another size: the handler sees the next ones."""
        self._left_alone = 0
        if self._released:
            self._tracker.wake(module)

    def _skip(self, function: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls of a function with shapes like these skip the handler from now on: 1 us each in place of 8."""
        if kwargs or len(self._skipped) >= MAX_SKIPPED or not self._tracker.is_installed:
            return
        try:
            self._skipped.add(tuple(map(_SHAPE, args)))
        except Exception:  # arguments other than tensors
            return
        attached = self._tracker.attach(function)
        attached.skips = self._skips
        self._released.add(attached)
        self._trial.skips_lost = True

    def _skips(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        opened = self._trial.opened
        if kwargs or (opened is not None and opened.shape is not None):  # ends an open step
            return False
        try:
            return tuple(map(_SHAPE, args)) in self._skipped
        except Exception:
            return False
