"""Graphs of the user's own ``torch.compile(backend="autofuse")``: held out, judged by size and released like roots.

In: a Dynamo graph, and autofuse's callable for it. Out: one callable for Dynamo, which runs either of them. Held-out
and released calls run Dynamo's graph operator by operator, as Dynamo's ``eager`` backend does, so they give eager's
results. Dynamo owns the surrounding call and tests its guards before ours runs. Without gradients a call is timed by
itself. With gradients, the time from one call to the next is taken, as for roots: only so it includes the backward
pass. Guarantee: once its sizes are fully known, a call costs 0.2 us more than the callable that it runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _current_graph_task_id
from torch._C._autograd import _top_saved_tensors_default_hooks

from autofuse.gpu import capturing
from autofuse.ir.records import RootRecord
from autofuse.observer.held_out import Held
from autofuse.observer.release_policy import Loss
from autofuse.runtime.roots.graph_trial import Costs, GraphTrial
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.steps import Shape

Call = Callable[..., Any]
COSTS = Costs(brief=0.0, timed=0.0)  # extra cost of a call if its graph is not released: nothing
PROBE_EVERY = 31  # calls of a released graph whose sizes vary; a prime, because scripts alternate
FOR_GOOD = 1 << 62  # calls
UNTUNED = "slower_untuned"
LOST = ("slower_than_eager", "no_gain")  # reasons that later runs go by
_PLACE = re.compile(r'File "[^"]+", line \d+, in (\w+)')


class UserGraph:
    """All graphs of one code and kinds of inputs."""

    def __init__(self, services: RootServices, key: str, name: str, is_static: bool) -> None:
        self._services = services
        self._clock = services.tools.clock
        self.key = key
        self.name = name
        self.capture_seconds = 0.0
        self.state, self.reason, self.detail = "captured", "asked_for", "by torch.compile"
        self.trial = GraphTrial(services, key, COSTS, None, self._lose)
        self.trial.is_on = True
        self._is_static = is_static
        self._calls = 0  # watched calls, and those before them
        self._left = 0  # calls that are not watched
        self._free = 0  # of how many
        self._free_since: float | None = None  # whether they ran the captured graph
        self._is_released = False
        known = services.known.get(key)
        if known is not None and known.state == "eager" and known.reason in LOST and known.judged_elements:
            self.trial.verdicts.lose_up_to(known.judged_elements)
            self.reason, self.detail = known.reason, known.detail
            if is_static:
                self._release()

    @property
    def calls(self) -> int:
        return self._calls + self._free - self._left

    @property
    def is_lost(self) -> bool:
        """Whether only Dynamo's graph will run, so that autofuse need not compile it."""
        return self._is_released and self._is_static

    def keep_equal(self) -> None:
        """Stay in eager: other ranks compute the same, and may not run the same kernels at the same step."""
        self.state, self.reason, self.detail = "eager", "several_ranks", ""

    def around(self, captured: Call, original: Call, sizes: Sizes, has_gradients: bool, device: torch.device) -> Call:
        """The callable for Dynamo."""
        self.trial.on_gpu = device.type == "cuda"

        def call(*args: Any) -> Any:
            if self._left:
                self._left -= 1
                return (original if self._is_released else captured)(*args)
            return self._watched(captured, original, sizes, has_gradients, device, args)

        return call

    def _watched(
        self,
        captured: Call,
        original: Call,
        sizes: Sizes,
        has_gradients: bool,
        device: torch.device,
        args: tuple[Any, ...],
    ) -> Any:
        trial, clock = self.trial, self._clock
        now = clock()
        self._end_free(now)
        trial.end_step(now)
        self._calls += 1
        if capturing.is_capturing() or (has_gradients and _is_checkpointed()):
            return captured(*args)  # a checkpoint must get the same result twice
        symbols = sizes.of(args)
        shape = trial.shapes.get(symbols)
        if shape is None:
            shape = trial.new_shape(symbols)
            shape.elements = sizes.elements(args)
        verdicts = trial.verdicts
        if verdicts.any_lost:
            self._is_released = verdicts.is_lost(shape.elements)
            if self._is_released:
                self._leave_alone(PROBE_EVERY - 1)
                return original(*args)
        held = trial.choose(shape, self._calls)
        if held is Held.NO:
            free = trial.free_calls(shape)
            if free:
                trial.skip(free)
                self._left = self._free = free - 1
                self._free_since = now
                return captured(*args)
        stretch = self._services.timer.begin(device.index) if trial.on_gpu else None
        trial.begin(shape, held, self._calls, now, stretch)
        began = clock()
        result = (captured if held is Held.NO else original)(*args)
        if not has_gradients:
            trial.call_took(clock() - began)
        shape.is_new = shape.is_new and held is not Held.NO
        return result

    def _end_free(self, now: float) -> None:
        self._calls += self._free
        self._free = 0
        if self._free_since is not None:
            self.trial.end_untimed(self._free_since, now)
            self._free_since = None

    def _leave_alone(self, calls: int) -> None:
        self._free = self._left = FOR_GOOD if self._is_static else calls

    def _lose(self, shape: Shape, loss: Loss, is_short: bool, is_all: bool) -> None:
        self.detail = f"captured steps take {1 / loss.gain:.2f}x of eager's"
        # What an untuned graph loses says nothing of a tuned one: the next run may capture it again.
        self.reason = UNTUNED if self._services.tuning.has_open() else loss.reason
        if is_all:
            self._release()
        else:
            self.detail = f"calls of about {shape.elements} elements stay in eager: {self.detail}"

    def _release(self) -> None:
        self.state, self._is_released = "eager", True

    def record(self) -> RootRecord:
        return RootRecord(
            root=self.key,
            name=self.name,
            state=self.state,  # type: ignore[arg-type]
            reason=self.reason,
            detail=self.detail,
            calls=self.calls,
            capture_seconds=self.capture_seconds,
            judged_elements=self.trial.verdicts.lost_elements,
        )


class Sizes:
    """The sizes that vary from call to call of one graph."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._symbols = tuple(i for i, value in enumerate(inputs) if isinstance(value, int | torch.SymInt))
        # Parameters do not tell the size of a call.
        tensors = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self._tensors = [i for i in tensors if not isinstance(inputs[i], torch.nn.Parameter)] or tensors
        self.is_static = not self._symbols

    def of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """A key that is equal for calls with the same sizes."""
        return tuple([args[i] for i in self._symbols])

    def elements(self, args: Sequence[Any]) -> int:
        return max(1, sum(int(args[i].numel()) for i in self._tensors))


def _is_checkpointed() -> bool:
    return _top_saved_tensors_default_hooks(True) is not None or _current_graph_task_id() != -1


def graph_key(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, str]:
    """A key of a graph that is the same in every process, and a readable name: the function in which it begins."""
    places = (_PLACE.search(node.meta.get("stack_trace") or "") for node in module.graph.nodes)
    name = next((place.group(1) for place in places if place), "graph")
    kinds = [
        (tuple(map(str, t.shape)), str(t.dtype), t.requires_grad) if isinstance(t, torch.Tensor) else type(t).__name__
        for t in inputs
    ]
    text = f"{module.code}{kinds}{torch.is_grad_enabled()}"
    return f"graph {name}:{hashlib.sha256(text.encode()).hexdigest()[:16]}", name
