"""Strategies of a node as candidates: built from the winners of their parts, then checked and raced like kernels.

In: the strategies of a form, and a function that tunes one part. Out: what a `Job` asks of a bench, with one knob: the
strategy.
Guarantee: parts are tuned before anything of the node is timed; a part that eager wins runs eager's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autofuse.codegen.knobs import Knob
from autofuse.codegen.templates import LOOP
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, Candidate, Config, KernelRecord, make_config
from autofuse.ir.shape import Dim
from autofuse.strategies.bundle import pack
from autofuse.strategies.strategy import Strategy
from autofuse.tuner.benchmark_provider import BenchmarkProvider, Built, NodeBenchmarks
from autofuse.tuner.worker_process import CandidateProblem

STRATEGY = "way"  # the stored name of the variant and of its only knob
TunePart = Callable[[NodeForm, str, tuple[Dim, ...]], KernelRecord | None]  # form, printer, sizes in the node's symbols


def _has_products(strategy: Strategy) -> bool:
    """Whether a part of the strategy is printed by a template: a matmul, convolution or attention."""
    return any(part.printer != LOOP for part in strategy.parts)


class StrategyBenchmarks(NodeBenchmarks):
    """The bench of one node whose candidates are strategies."""

    def __init__(
        self,
        provider: BenchmarkProvider,
        fusion_id: str,
        form: NodeForm,
        threads: int,
        bucket: Bucket,
        strategies: Sequence[Strategy],
        tune_part: TunePart,
    ) -> None:
        """Tune the parts of all strategies by ``tune_part``, and pack them. Raises what the tuning of a part raises."""
        super().__init__(provider, fusion_id, form, threads, bucket)
        self._built: dict[str, KernelRecord] = {}
        for strategy in strategies:
            kernels, current = [], strategy
            for index in reversed(range(len(strategy.parts))):
                part = strategy.kernels[index]
                kernel = tune_part(part.node.form, strategy.parts[index].printer, strategy.sizes_of(index))
                if kernel is None:
                    current = current.without(index)
                else:
                    kernels.append(kernel)
            if _has_products(strategy) and not _has_products(current):
                continue  # aten's are faster, and without them this is another strategy
            if kernels or current.has_extern:  # otherwise it runs what eager runs
                # A part may be a strategy without machine code, which has no processor as its target.
                targets = [kernel.key.target for kernel in kernels if ":" in kernel.key.target]
                target = targets[0] if targets else provider.backend.generic
                self._built[strategy.name] = pack(current, kernels[::-1], target)
        self.names = tuple(self._built)

    @property
    def variants(self) -> tuple[str, str]:
        return STRATEGY, STRATEGY

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        if not self.names:
            raise LoweringError(
                "no_way", "expected a strategy that differs from eager, found eager the fastest in every part"
            )
        return (Knob(STRATEGY, self.names, self.names[0], "which program runs the node"),)

    def rank(self, values: Sequence[int]) -> None:
        return None

    def default(self, values: Sequence[int]) -> Config:
        return make_config({STRATEGY: self.names[0]})

    def build(
        self, candidates: Sequence[Candidate], values: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[Built | CandidateProblem]:
        return [Built(c, self._built[str(dict(c.config)[STRATEGY])], 0.0) for c in candidates]

    def complete(self, built: Built, values: Sequence[int], others: Sequence[Sequence[int]]) -> Built:
        return built  # the parts were built for their whole buckets
