"""The workshop: where candidates of a node are built, checked and raced, by compilers and the worker process.

In: a node, configurations, cases, rules of a race. Out: binaries, error ratios, samples; or a `CandidateProblem`.
Guarantee: one text is compiled once; nothing is timed while something compiles; a kernel that has killed a worker is
never run again; after a loss the worker starts anew with what the next request needs.
``Bench`` is what a job sees of it, so that recorded timings can take its place (``replay``).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from autofuse.codegen.c.build import Toolchain, compile_key, compile_source, flags_for
from autofuse.codegen.c.knobs import default_config, knobs_for
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.knobs import Knob
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import AutofuseError, CompilerError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Candidate, Config, KernelRecord
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.timing import RaceResult, RaceRules
from autofuse.tuner.worker_process import CandidateProblem, Lost, WorkerProcess

LETHAL = ("crash", "timeout")  # outcomes that cost a worker its life


@dataclass(frozen=True)
class Built:
    """A candidate with its binary."""

    candidate: Candidate
    record: KernelRecord
    seconds: float  # of the compiler; 0.0 where the binary was known

    @property
    def digest(self) -> str:
        return self.record.key.digest


class Bench(Protocol):
    """What a job needs for the candidates of its node."""

    def knobs(self) -> tuple[Knob, ...]:
        """What may vary. Raises LoweringError where the node has no loop form."""

    def default(self, values: Sequence[int]) -> Config:
        """Where to start for these sizes."""

    def build(self, candidates: Sequence[Candidate], values: Sequence[int]) -> list[Built | CandidateProblem]:
        """Binaries, in order; specialised ones have ``values`` built in."""

    def check(self, built: Built, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        """Largest error over eager's own. Raises CandidateProblem."""

    def has_passed(self, built: Built) -> bool:
        """Whether the same binary has passed all cases of another bucket."""

    def note_passed(self, built: Built) -> None:
        """All cases of a bucket are passed."""

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        """Eager first, then the candidates in order. Raises CandidateProblem."""


class Workshop:
    """Compilers, the worker and what is known of kernels; shared by all jobs of a daemon."""

    def __init__(
        self,
        toolchain: Toolchain,
        worker: WorkerProcess,
        *,
        compile_timeout_seconds: float = 60.0,
        compilers: Callable[[], int] = lambda: 1,
        stored: Callable[[str], KernelRecord | None] = lambda digest: None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """``compilers``: how many may run at a time; ``stored``: looks a kernel up by its digest; ``rest`` is called
        before each piece of work, to yield the machine."""
        self.worker = worker
        self.lethal: set[str] = set()
        self.passed: set[str] = set()  # digests
        self.rest = rest
        self._toolchain = toolchain
        self._compile_timeout_seconds = compile_timeout_seconds
        self._compilers = compilers
        self._stored = stored
        self._records: dict[str, KernelRecord] = {}
        self._failures: dict[str, str] = {}
        self._loops: dict[str, LoopKernel] = {}
        self._loaded: set[tuple[str, str]] = set()  # (node, digest) in the worker of this generation
        self._opened: str | None = None
        self._generation = 0

    def bench(self, fusion_id: str, form: NodeForm, threads: int) -> NodeWorkshop:
        return NodeWorkshop(self, fusion_id, form, threads)

    # ---- compilers ------------------------------------------------------------------------------

    def loop(self, fusion_id: str, form: NodeForm) -> LoopKernel:
        """The loop form of a node. Raises LoweringError."""
        if fusion_id not in self._loops:
            self._loops[fusion_id] = lower(form)
        return self._loops[fusion_id]

    def build_all(
        self, loop: LoopKernel, candidates: Sequence[Candidate], constants: Mapping[str, int]
    ) -> list[Built | CandidateProblem]:
        """Binaries of the candidates, in order."""

        def one(candidate: Candidate) -> Built | CandidateProblem:
            try:
                return self._build(loop, candidate, constants)
            except CompilerError as error:
                return CandidateProblem("compile_error", str(error)[:500])
            except AutofuseError as error:
                return CandidateProblem("refused", str(error)[:500])

        count = self._compilers()
        if count == 1 or len(candidates) == 1:
            found = []
            for candidate in candidates:
                self.rest()
                found.append(one(candidate))
            return found
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, candidates))

    def _build(self, loop: LoopKernel, candidate: Candidate, constants: Mapping[str, int]) -> Built:
        source = print_c(loop, candidate.config, constants)
        flags = flags_for(self._toolchain, candidate.config)
        key = compile_key(source.text, self._toolchain, flags)
        digest = key.digest
        if digest in self._failures:
            raise CompilerError(self._failures[digest])
        seconds = 0.0
        record = self._records.get(digest) or self._stored(digest)
        if record is None:
            began = time.monotonic()
            try:
                binary = compile_source(source.text, self._toolchain, flags, self._compile_timeout_seconds)
            except CompilerError as error:
                self._failures[digest] = str(error)
                raise
            seconds = time.monotonic() - began
            record = KernelRecord(key, source.name, source.text, binary)
        self._records[digest] = record
        return Built(candidate, record, seconds)

    # ---- the worker -----------------------------------------------------------------------------

    def ask(self, node: NodeWorkshop, do: str, needed: Sequence[Built], **arguments: Any) -> dict[str, Any]:
        """A request about a node, once the worker has the node and the kernels ``needed``."""
        self.rest()
        if self.worker.generation != self._generation or self.worker.pid is None:
            self.worker.start()
            self._generation = self.worker.generation
            self._loaded.clear()
            self._opened = None
        if self._opened != node.key:
            self.worker.ask("open", node=node.key, form=node.form.to_json(), threads=node.threads)
            self._opened = node.key
        for built in needed:
            if (node.key, built.digest) not in self._loaded:
                binary = base64.b64encode(built.record.binary).decode()
                self.worker.ask("load", digest=built.digest, name=built.record.name, binary=binary)
                self._loaded.add((node.key, built.digest))
        return self.worker.ask(do, **arguments)


class NodeWorkshop:
    """The workshop as one job sees it (`Bench`)."""

    def __init__(self, workshop: Workshop, fusion_id: str, form: NodeForm, threads: int) -> None:
        self.form = form
        self.threads = threads
        self.key = f"{fusion_id}/{threads}"
        self._fusion_id = fusion_id
        self._workshop = workshop

    def _loop(self) -> LoopKernel:
        return self._workshop.loop(self._fusion_id, self.form)

    def knobs(self) -> tuple[Knob, ...]:
        return knobs_for(self._loop())

    def default(self, values: Sequence[int]) -> Config:
        return default_config(self._loop(), dict(zip(self.form.symbols, values, strict=True)))

    def build(self, candidates: Sequence[Candidate], values: Sequence[int]) -> list[Built | CandidateProblem]:
        constants = dict(zip(self.form.symbols, values, strict=True))
        generic = [c for c in candidates if not is_specialised(c)]
        special = [c for c in candidates if is_specialised(c)]
        built = dict(zip(generic, self._workshop.build_all(self._loop(), generic, {}), strict=True))
        built |= dict(zip(special, self._workshop.build_all(self._loop(), special, constants), strict=True))
        return [built[c] for c in candidates]

    def check(self, built: Built, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        self._refuse_lethal(built)
        rows = [[list(case.values), case.kind, case.shifted] for case in cases]
        with self._blaming([built]):
            reply = self._workshop.ask(
                self, "check", [built], digest=built.digest, cases=rows, budget_seconds=budget_seconds, least=least
            )
        return float(reply["error_ratio"])

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        for item in built:
            self._refuse_lethal(item)
        digests = [item.digest for item in built]
        with self._blaming(built):
            reply = self._workshop.ask(self, "race", built, digests=digests, values=list(values), rules=asdict(rules))
        return RaceResult(reply["samples"], reply["dropped"], reply["threads"])

    def has_passed(self, built: Built) -> bool:
        return built.digest in self._workshop.passed

    def note_passed(self, built: Built) -> None:
        self._workshop.passed.add(built.digest)

    def _refuse_lethal(self, built: Built) -> None:
        if built.digest in self._workshop.lethal:
            raise CandidateProblem("crash", "this kernel has killed a worker before")

    def _blaming(self, built: Sequence[Built]) -> _Blame:
        return _Blame(self._workshop, [item.digest for item in built])


class _Blame:
    """Notes a kernel as lethal when the worker is lost over it alone."""

    def __init__(self, workshop: Workshop, digests: list[str]) -> None:
        self._workshop = workshop
        self._digests = digests

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Lost) and len(self._digests) == 1:
            self._workshop.lethal.add(self._digests[0])


def is_specialised(candidate: Candidate) -> bool:
    return candidate.variant == "c_specialised"
