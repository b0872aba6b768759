"""The ways of a node as candidates: built from the winners of their parts, then checked and raced like any kernel.

In: the ways of a form, and a function that tunes one part. Out: what a `Job` asks of a bench, with one knob: the way.
Guarantee: parts are tuned before anything of the node is timed; a part that eager wins runs eager's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autofuse.codegen.knobs import Knob
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, Candidate, Config, KernelRecord, make_config
from autofuse.ir.shape import Dim
from autofuse.strategies.bundle import pack
from autofuse.strategies.strategy import LOOP, Way
from autofuse.tuner.benchmark_provider import Built, NodeWorkshop, Workshop
from autofuse.tuner.worker_process import CandidateProblem

WAY = "way"  # the variant, and its only knob
TunePart = Callable[[NodeForm, str, tuple[Dim, ...]], KernelRecord | None]  # form, printer, its sizes in the node's


def _has_products(way: Way) -> bool:
    """Whether one of its parts is a generated product, or on a GPU an attention."""
    return any(part.printer != LOOP for part in way.parts)


class WayWorkshop(NodeWorkshop):
    """Programs of several kernels and vendor's calls as candidates for one node."""

    def __init__(
        self,
        workshop: Workshop,
        fusion_id: str,
        form: NodeForm,
        threads: int,
        bucket: Bucket,
        ways: Sequence[Way],
        tune_part: TunePart,
    ) -> None:
        """Raises what the tuning of a part raises."""
        super().__init__(workshop, fusion_id, form, threads, bucket)
        self._built: dict[str, KernelRecord] = {}
        for way in ways:
            kernels, current = [], way
            for index in reversed(range(len(way.parts))):
                part = way.kernels[index]
                kernel = tune_part(part.node.form, way.parts[index].printer, way.sizes_of(index))
                if kernel is None:
                    current = current.without(index)
                else:
                    kernels.append(kernel)
            if _has_products(way) and not _has_products(current):
                continue  # aten's are faster: this is another way by now
            if kernels or current.has_vendor:  # else it is what eager does
                # A part may be a way of aten's operators alone, which is for all processors.
                targets = [kernel.key.target for kernel in kernels if ":" in kernel.key.target]
                target = targets[0] if targets else workshop.backend.generic
                self._built[way.name] = pack(current, kernels[::-1], target)
        self.names = tuple(self._built)

    @property
    def variants(self) -> tuple[str, str]:
        return WAY, WAY

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        if not self.names:
            raise LoweringError("no_way", "expected a way that differs from eager, found that eager wins every part")
        return (Knob(WAY, self.names, self.names[0], "which program runs the node"),)

    def default(self, values: Sequence[int]) -> Config:
        return make_config({WAY: self.names[0]})

    def build(
        self, candidates: Sequence[Candidate], values: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[Built | CandidateProblem]:
        return [Built(c, self._built[str(dict(c.config)[WAY])], 0.0) for c in candidates]

    def complete(self, built: Built, values: Sequence[int], others: Sequence[Sequence[int]]) -> Built:
        return built  # its parts were completed for their buckets
