"""Planned graphs as bytes, so that a run on a kept trace imports and plans nothing.

In: routed graphs of one trace, forward and backward. Out: bytes; in a later run, the same graphs routed anew.
Guarantee: a plan is only used with the graphs of its own trace, under the same settings, patterns and code of autofuse.
A plan contains no kernels: routers query decisions as usual.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from autofuse.capture.traced import version
from autofuse.fusion.optimizer import FusionOptimizer
from autofuse.fusion.patterns import registered_patterns
from autofuse.ir.records import Refusal
from autofuse.runtime.graphs.choice import RouterHost
from autofuse.runtime.graphs.metrics_log import Described
from autofuse.runtime.graphs.plans import Timer
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.run_context import RunContext
from autofuse.wrapper.aten_call import overload
from autofuse.wrapper.graph_call import NodeSlot, link

if TYPE_CHECKING:
    from autofuse.runtime.graphs.rng_kernels import RngKernels


@dataclass(frozen=True)
class Planned:
    """One routed graph."""

    router: GraphRouter
    described: Described
    refusals: tuple[Refusal, ...]
    draws: bool  # masks of dropouts, from our generator


@dataclass(frozen=True)
class _Written:
    """A `Planned` as data."""

    phase: str
    times: int
    program: dict[str, Any]  # but for its functions
    described: Described
    refusals: tuple[Refusal, ...]
    draws: bool


_MOST_NUMBERS = 4096


class PlanCache:
    """The planner's part of `capture.kept.trace_cache`."""

    def __init__(
        self,
        context: RunContext,
        kernels: DeviceKernels,
        host: RouterHost,
        make_timer: Callable[[torch.device], Timer],
        draws: Callable[[], RngKernels],
    ) -> None:
        """``host``, ``make_timer``: for the routed graphs; ``draws()`` gives the `RngKernels`."""
        self._context = context
        self._kernels = kernels
        self._host = host
        self._make_timer = make_timer
        self._draws = draws

    def switches(self) -> dict[str, str]:
        """All settings that a plan depends on besides its graph, by name."""
        settings = self._context.settings
        path = settings.fusion.patterns
        found = {
            "autofuse": version(),
            "settings of fusion": settings.as_dict()["fusion"],
            "switches of fusion": FusionOptimizer.shared().switches,
            "run.check": settings.run.check,
            "patterns": (
                path.read_text() if path is not None and path.is_file() else "",
                registered_patterns(),
            ),
            "precision of products": torch.get_float32_matmul_precision(),
            "a C compiler": self._kernels.catalogue.toolchain is not None,
        }
        return {name: str(value) for name, value in found.items()}

    def to_bytes(self, plans: Mapping[str, Planned]) -> bytes:
        """Raises PicklingError where a graph holds tensors or modules, or runs on a GPU."""
        written = {}
        for name, planned in plans.items():
            program = planned.router.program
            if planned.router.on_gpu:
                raise pickle.PicklingError("a graph of a GPU")
            fields = {
                "slots": program.slots,
                "symbols": program.symbols,
                "source": program.source,
                "skips": program.skips,
                "reuse": program.reuse,
                "constants": program.constants,
                "native": program.native,
            }
            written[name] = _Written(
                planned.router.phase, planned.router.times, fields, planned.described, planned.refusals, planned.draws
            )
        buffer = io.BytesIO()
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(written)
        return buffer.getvalue()

    def from_bytes(self, data: bytes) -> Callable[[str], GraphRouter]:
        """A routed call for each graph, by its name in ``plans``."""
        written: dict[str, _Written] = pickle.loads(data)

        def route(name: str) -> GraphRouter:
            context, found = self._context, written[name]
            program = link(**found.program)
            for device in dict.fromkeys(slot.device for slot in program.slots):
                self._kernels.use_device(device)
            if found.draws:
                self._draws().prepare_generator()
            context.refusals.extend(found.refusals)
            router = GraphRouter(program, self._host, found.phase, perf_counter, self._make_timer, found.times)
            context.add_router(router)
            context.notes.add(router, found.described)
            FusionOptimizer.shared().count(found.described.fusion)
            if found.phase == "backward":
                for slot in _halves(written.get("forward")):
                    assert slot.half is not None
                    slot.half.pair.is_ready = True
            return router

        return route


def _halves(forward: _Written | None) -> list[NodeSlot]:
    return [slot for slot in forward.program["slots"] if slot.half is not None] if forward is not None else []


class _Pickler(pickle.Pickler):
    """Pickles operators by name, and only those tensors that the traced code made from numbers: others are inputs."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            name = f"{obj.namespace}.{obj._schema.name.split('::')[1]}.{obj._overloadname}"
            return overload, (name,)
        is_literal = type(obj) is torch.Tensor and not obj.requires_grad and obj.device.type == "cpu"
        if is_literal and obj.numel() <= _MOST_NUMBERS:
            return NotImplemented
        if isinstance(obj, torch.Tensor | torch.nn.Module | torch.Generator):
            raise pickle.PicklingError(f"a {type(obj).__name__} inside of a graph")
        return NotImplemented
