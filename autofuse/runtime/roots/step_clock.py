"""Times a root's steps by the script's clock: when its forward and its backward pass begin and end.

In: a root's calls, as they begin and return. Out: entries in its `Ledger`. A module's code does not show the end of a
backward pass. A hook on the autograd node that made an output tells when backward reaches the module, and a callback of
the engine tells when it is over: 5 us per call, only while a root is observed or has just been captured. The hook is on
the autograd node, where scripts do not look; tensors stay as they are. The seconds of a backward pass through several
roots are divided among them, so that no second counts twice.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch._C import _current_graph_task_id

from autofuse.observer.ledger import Ledger
from autofuse.runtime.run_context import RunContext

_FOLLOWED = 4  # outputs of a call


class Step:
    """One step: from one call of a root to the next."""

    __slots__ = (
        *("backward", "began", "context", "elements", "forward", "is_captured", "is_observed"),
        *("noted", "paused", "planned"),
    )

    def __init__(self, elements: int, began: float, is_captured: bool, context: RunContext) -> None:
        self.elements = elements
        self.began = began
        self.is_captured = is_captured
        self.is_observed = False
        self.forward = 0.0  # this and the next field are without pauses for tuning
        self.backward = 0.0
        self.context = context
        self.paused = context.paused_seconds
        self.noted = context.noted_seconds + context.capture_seconds
        self.planned = context.planning_seconds

    @property
    def pauses(self) -> float:
        """Seconds of pauses for tuning so far."""
        return self.context.paused_seconds - self.paused


class BackwardClock:
    """Times the backward passes of all roots of a session."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._task = -1  # autograd's number of the timed pass
        self._began = self._paused = 0.0
        self._steps: list[Step] = []

    def follow(self, step: Step, result: Any) -> None:
        """Assign the backward pass through these outputs to the step."""
        self._task = -1  # no root is called in a backward pass: a pass that is still open has failed
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and getattr(compiled, "compiled_autograd_enabled", False):
            return  # Dynamo would trace the hook
        with torch._C.DisableTorchFunction():  # without calling the ``__torch_function__`` of subclasses
            for tensor in islice(_made_by_autograd(result), _FOLLOWED):
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_prehook(partial(self._reach, step))

    def _reach(self, step: Step, gradients: object) -> None:
        task = _current_graph_task_id()
        if self._task == -1:
            self._task, self._began, self._steps = task, self._clock(), []
            self._paused = step.context.paused_seconds
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))
        if task == self._task and step not in self._steps:
            self._steps.append(step)

    def _end(self, task: int) -> None:
        if task != self._task:
            return
        self._task = -1
        seconds = self._clock() - self._began - (self._steps[0].context.paused_seconds - self._paused)
        forward = sum(step.forward for step in self._steps)
        for step in self._steps:
            step.backward += seconds * (step.forward / forward if forward else 1.0 / len(self._steps))


class Account:
    """Of one root."""

    def __init__(self, context: RunContext, backwards: BackwardClock) -> None:
        self.ledger = Ledger()
        self._context = context
        self._backwards = backwards
        self._step: Step | None = None

    def begin(self, elements: int, began: float, is_captured: bool) -> None:
        self._step = Step(elements, began, is_captured, self._context)

    def note(self, cause: str, seconds: float) -> None:
        """Add a note to the step that is open or about to be."""
        self.ledger.note(cause, seconds)
        self._context.noted_seconds += seconds

    def returned(self, result: Any, now: float, is_observed: bool = False) -> None:
        """Note that the call of the open step has returned."""
        step = self._step
        if step is None:
            return
        step.forward, step.is_observed = now - step.began - step.pauses, is_observed
        if torch.is_grad_enabled():
            self._backwards.follow(step, result)

    def end(self, now: float, counts: bool = True) -> None:
        """End the step. ``counts``: whether its time counts as eager's; False where the device measures that."""
        step, self._step = self._step, None
        if step is None:
            return
        context, ledger = self._context, self.ledger
        busy = step.forward + step.backward
        whole = now - step.began - step.pauses  # tuning of an optimizer pauses outside of both
        if not step.is_captured:
            ledger.add_eager(step.elements, busy, whole, step.is_observed, counts)
            return
        planned = context.planning_seconds - step.planned
        if planned and ledger.is_open:
            self.note("planning", planned)
        # Time that other roots lost meanwhile is on their accounts.
        elsewhere = context.noted_seconds + context.capture_seconds - step.noted - ledger.noted_seconds
        ledger.add_captured(step.elements, busy, whole - max(elsewhere, 0.0))


def _made_by_autograd(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        if result.grad_fn is not None:
            yield result
    elif isinstance(result, dict):  # as results of Hugging Face's models; without calling the script's own methods
        for value in dict.values(result):
            yield from _made_by_autograd(value)
    elif isinstance(result, tuple):
        for value in tuple.__iter__(result):
            yield from _made_by_autograd(value)
    elif isinstance(result, list):
        for value in list.__iter__(result):
            yield from _made_by_autograd(value)
    elif hasattr(result, "__dataclass_fields__"):
        for name in result.__dataclass_fields__:
            yield from _made_by_autograd(getattr(result, name, None))
