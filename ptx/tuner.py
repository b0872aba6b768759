"""Stands in for the tuning daemon where nothing can be timed: answers each request with a kernel, unraced.

In: the store that a session asks. Out: decisions, whose kernels are those that the daemon's own printers and
`TritonBackend` make, compiled for sm_80 and stored as PTX in place of machine code. Guarantee: of a group the program
with generated products is taken where there is one; what cannot be compiled stays eager's, with its reason.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from autofuse.codegen.templates import LOOP
from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.compile import compiled_kernels
from autofuse.codegen.triton.source import Assumptions, TritonSource
from autofuse.daemon.request_tuner import part_request
from autofuse.db.store import Store
from autofuse.errors import AutofuseError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import EAGER, Candidate, Decision, KernelRecord, TuneRequest
from autofuse.ir.shape import Dim
from autofuse.optim.form import StepForm, form_of_request
from autofuse.optim.triton_printer import print_triton_step
from autofuse.optim.tune_step import TRITON_MULTI
from autofuse.strategies.enumeration import TILED, is_group, strategies_of
from autofuse.tuner.backends import TritonBackend
from autofuse.tuner.benchmark_provider import BenchmarkProvider, Built
from autofuse.tuner.strategy_provider import STRATEGY, StrategyBenchmarks
from autofuse.tuner.worker_process import CandidateProblem, WorkerProcess

POLL_SECONDS = 0.02
_GAIN = {"unfused_us": 2.0, "fused_us": 1.0, "speedup": 2.0, "speedup_low": 1.9, "speedup_high": 2.1}  # invented


def as_ptx(source: TritonSource, target: str, assumptions: Sequence[Assumptions], reads_code: bool = False) -> Artifact:
    """An artifact whose images are PTX, which a driver takes too; no code is read of them. Raises CompilerError."""
    images = []
    for number, assumed, kernel, resources in compiled_kernels(source, target, assumptions):
        text = kernel.asm["ptx"].encode() + b"\0"
        name, used = kernel.metadata.name, resources
        images.append(Image(number, name, assumed, used.threads, used.shared_bytes, used, text))
    return Artifact(source, target, tuple(images))


class UnracedTuner:
    """A thread that answers the requests for GPUs in a store, until it is closed."""

    def __init__(self, store: Path) -> None:
        self._path = store
        self._provider: BenchmarkProvider | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.answers: list[Decision] = []
        self.failure: BaseException | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with Store.open(self._path) as store:
                while not self._is_over.is_set():
                    request = store.queue.take("cuda:")
                    if request is None:
                        self._is_over.wait(POLL_SECONDS)
                        continue
                    kernel, decision = self._answer(request)
                    if kernel is not None:
                        store.kernels.put(kernel)
                    store.results.put_decision(decision, request.run_id)
                    store.queue.finish(request.key, "done")
                    self.answers.append(decision)
        except BaseException as error:  # told by who waits for the answers
            self.failure = error

    def _answer(self, request: TuneRequest) -> tuple[KernelRecord | None, Decision]:
        try:
            candidate, kernel = self._kernel(request)
        except (AutofuseError, CandidateProblem) as error:
            return None, Decision.of(None, request, Candidate(EAGER, ()), "compile_failed", str(error))
        made = Decision.of(None, request, candidate, "won", "unraced", compile_key=kernel.key.digest)
        return kernel, replace(made, **_GAIN)

    def _kernel(self, request: TuneRequest) -> tuple[Candidate, KernelRecord]:
        if self._provider is None:
            nobody = cast(WorkerProcess, None)  # nothing is checked or timed
            self._provider = BenchmarkProvider(TritonBackend(request.key.device, as_ptx), nobody)
        form = form_of_request(request.node)
        if isinstance(form, StepForm):
            recipe = self._backend.recipe_of(print_triton_step(form, ()), (Assumptions(is_aligned=True),))
            return Candidate(TRITON_MULTI, ()), recipe.make()
        if is_group(form):
            return self._program(request, form)
        return self._of_node(request, form)

    @property
    def _backend(self) -> TritonBackend:
        assert self._provider is not None
        return cast(TritonBackend, self._provider.backend)

    def _of_node(self, request: TuneRequest, form: NodeForm, printer: str = LOOP) -> tuple[Candidate, KernelRecord]:
        assert self._provider is not None
        values, *others = (shape.symbol_values for shape in request.shapes)
        bench = self._provider.bench(request.key.fusion_id, form, 0, request.bucket, printer)
        candidate = Candidate(self._backend.generic, bench.default(values))
        (built,) = bench.build([candidate], values, others)
        if isinstance(built, CandidateProblem):
            raise built
        return candidate, bench.complete(cast(Built, built), values, others).record

    def _program(self, request: TuneRequest, form: NodeForm) -> tuple[Candidate, KernelRecord]:
        """A group: generated products where there is a printer for them, else the parts around aten's."""
        assert self._provider is not None

        def tuned(part: NodeForm, printer: str, sizes: Sequence[Dim]) -> KernelRecord | None:
            return self._of_node(part_request(request, form, part, printer, sizes), part, printer)[1]

        strategies = sorted(strategies_of(form, has_tiles=True), key=lambda found: found.name != TILED)
        for strategy in strategies:
            bench = StrategyBenchmarks(
                self._provider, request.key.fusion_id, form, 0, request.bucket, [strategy], tuned
            )
            if bench.names:
                candidate = Candidate(STRATEGY, bench.default(()))
                (built,) = bench.build([candidate], ())
                return candidate, cast(Built, built).record
        raise CandidateProblem("no_way", "no program of the group has a generated kernel")
