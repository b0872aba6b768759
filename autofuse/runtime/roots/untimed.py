"""Calls of a captured root with short steps that are neither timed nor held out, which saves 4 us each.

On a GPU it saves the two events of a call as well, with their queries: on an H100 they took 2.5 us of the stream, and
much more of the host.

In: a shape whose steps are known. Out: the code to run for the next calls, until one is to be held out. Guarantee: a
call only runs code whose guards hold for it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from autofuse.gpu import capturing
from autofuse.observer.root_tracker import Target
from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.steps import Shape

if TYPE_CHECKING:
    from autofuse.capture.guarded_call import DirectCall

LOOKED_AT = 64  # newest shapes of a root with many, whose code is tried; a call that fits none of it is timed


class UntimedCalls:
    """Of one root."""

    def __init__(self, trial: GraphTrial) -> None:
        self.left = 0  # calls that need not be timed
        self.began: float | None = None  # when the first of them began; None while calls are timed
        self._trial = trial
        self._has_gradients = False
        self._direct: tuple[DirectCall, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether calls are not timed now."""
        return self.began is not None

    def begin(self, shape: Shape, now: float, has_gradients: bool) -> bool:
        """Whether this call and some that follow need not be timed."""
        free = self._trial.free_calls(shape)
        if not free:
            return False
        newest = [shape, *islice(reversed(self._trial.shapes.values()), LOOKED_AT)]
        if not all(known.direct and not known.is_eager for known in newest):
            return False
        self._trial.skip(free)
        found = {id(direct.manager): direct for known in newest for direct in known.direct}
        self._direct, self._has_gradients = tuple(found.values()), has_gradients
        self.began, self.left = now, free
        return True

    def find(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectCall | None:
        """The code to run; None where this call differs from those before."""
        self.left -= 1
        if self._trial.on_gpu and capturing.is_capturing():
            return None
        if torch.is_grad_enabled() is self._has_gradients:
            for direct in self._direct:
                if direct.fits(module, args, kwargs):
                    return direct
        return None

    def end(self, now: float) -> None:
        """End untimed calls: the next call is timed."""
        began = self.began
        if began is not None:
            self._trial.end_untimed(began, now)
            self.stop()

    def stop(self) -> None:
        """End untimed calls and discard their time: the next call is timed."""
        self.left, self.began, self._direct = 0, None, ()
