"""Where candidates of a node are built, checked and raced, by compilers and the worker process.

In: a node, configurations, cases, rules of a race. Out: binaries, error ratios, samples; or a `CandidateProblem`.
Guarantee: one text is compiled once; nothing is timed while something compiles; a kernel that has killed a worker is
never run again; after a loss the worker starts anew with what the next request needs.
``Bench`` is what a job sees of it, so that recorded timings can take its place (``replay``).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from autofuse.codegen.knobs import CONTRACT, Knob, Rank, Sizes, default_config
from autofuse.codegen.templates import LOOP
from autofuse.errors import AutofuseError, CompilerError, CompilerNotReady
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, Candidate, Config, KernelRecord
from autofuse.tuner.backends import Backend
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.timing import RaceResult, RaceRules
from autofuse.tuner.worker_process import CandidateProblem, Lost, WorkerProcess

LETHAL = ("crash", "timeout")  # outcomes that kill a worker


@dataclass(frozen=True)
class Built:
    """A candidate with its binary."""

    candidate: Candidate
    record: KernelRecord
    seconds: float  # of compilation; 0.0 where the binary was known

    @property
    def digest(self) -> str:
        return self.record.key.digest


class Bench(Protocol):
    """What a job needs for the candidates of its node."""

    @property
    def variants(self) -> tuple[str, str]:
        """Names of the generic and of the specialised form."""

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        """The knobs for these sizes. Raises LoweringError where the node has no loop form."""

    def default(self, values: Sequence[int]) -> Config:
        """The configuration from which the search starts for these sizes."""

    def rank(self, values: Sequence[int]) -> Rank | None:
        """What a model expects configurations to cost for these sizes; None where there is no model."""

    def build(
        self, candidates: Sequence[Candidate], values: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[Built | CandidateProblem]:
        """Binaries, in order, for the sizes ``values`` and ``others``; specialised ones are for ``values`` alone."""

    def complete(self, built: Built, values: Sequence[int], others: Sequence[Sequence[int]]) -> Built:
        """The candidate with the binary to keep, for all sizes of its bucket. Raises CandidateProblem."""

    def check(self, built: Built, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        """The largest error over eager's own; the first ``least`` cases run in any case. Raises CandidateProblem."""

    def compare_bits(self, built: Built, cases: Sequence[CheckCase], elements: int, budget_seconds: float) -> str:
        """How results differ from eager's in bits, in the cases or in so many elements more; "" where they do not."""

    def has_passed(self, built: Built) -> bool:
        """Whether the same binary has passed all cases of another bucket."""

    def note_passed(self, built: Built) -> None:
        """Note that the binary has passed all cases of a bucket."""

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        """Race eager, which comes first in the result, and the candidates in order. Raises CandidateProblem."""


class BenchmarkProvider:
    """The compilers, the worker and known binaries of one device; shared by all jobs of a daemon."""

    def __init__(
        self,
        backend: Backend,
        worker: WorkerProcess,
        *,
        compilers: Callable[[], int] = lambda: 1,
        stored: Callable[[str], KernelRecord | None] = lambda digest: None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """``compilers``: how many may run at a time; ``stored``: looks up a kernel by its digest; ``rest`` is called
        before each piece of work, to yield the machine."""
        self.worker = worker
        self.lethal: set[str] = set()
        self.passed: set[str] = set()  # digests that passed all cases of some bucket
        self.rest = rest
        self.backend = backend
        self.compilers = compilers
        self._stored = stored
        self._records: dict[str, KernelRecord] = {}
        self._failures: dict[str, Exception] = {}
        self._loaded: set[tuple[str, str]] = set()  # (node, digest) pairs that the present worker holds
        self._opened: str | None = None
        self._generation = 0

    def bench(
        self,
        fusion_id: str,
        form: NodeForm,
        threads: int,
        bucket: Bucket,
        printer: str = LOOP,
        is_strict: bool = False,
    ) -> NodeBenchmarks:
        """The bench of a node; ``printer``: the name of the template of its kernels; ``is_strict``: for a strict job,
        whose kernels round as often as eager."""
        return NodeBenchmarks(self, fusion_id, form, threads, bucket, printer, is_strict)

    # ---- compilers ------------------------------------------------------------------------------

    def build_all(
        self,
        form: NodeForm,
        printer: str,
        candidates: Sequence[Candidate],
        constants: Sizes,
        sizes: Sequence[Sizes],
    ) -> list[Built | CandidateProblem]:
        """Build the candidates; their binaries or problems, in order."""

        def one(candidate: Candidate) -> Built | CandidateProblem:
            try:
                return self.build(form, printer, candidate, constants, sizes)
            except CandidateProblem as problem:
                return problem
            except CompilerNotReady:  # no fault of the candidate
                raise
            except CompilerError as error:
                return CandidateProblem("compile_error", str(error)[:500])
            except AutofuseError as error:
                return CandidateProblem("refused", str(error)[:500])

        count = self.compilers()
        if count == 1 or len(candidates) <= 1:
            found = []
            for candidate in candidates:
                self.rest()
                found.append(one(candidate))
            return found
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, candidates))

    def build(
        self,
        form: NodeForm,
        printer: str,
        candidate: Candidate,
        constants: Sizes,
        sizes: Sequence[Sizes],
        is_final: bool = False,
    ) -> Built:
        """A candidate's binary, compiled if it is not known. Raises CompilerError and CandidateProblem, each time."""
        recipe = self.backend.recipe(form, printer, candidate.config, constants, sizes, is_final)
        digest = recipe.key.digest
        if digest in self._failures:
            raise self._failures[digest]
        seconds = 0.0
        record = self._records.get(digest) or self._stored(digest)
        if record is None:
            began = time.monotonic()
            try:
                record = recipe.make()
            except CompilerNotReady:
                raise
            except (CompilerError, CandidateProblem) as error:
                self._failures[digest] = error.with_traceback(None)
                raise
            seconds = time.monotonic() - began
        self._records[digest] = record
        return Built(candidate, record, seconds)

    # ---- the worker -----------------------------------------------------------------------------

    def ask(self, node: NodeBenchmarks, do: str, needed: Sequence[Built], **arguments: Any) -> dict[str, Any]:
        """Ask the worker to ``do`` something with a node, after giving it the node and the kernels ``needed``."""
        self.rest()
        if self.worker.generation != self._generation or self.worker.pid is None:
            self.worker.start()
            self._generation = self.worker.generation
            self._loaded.clear()
            self._opened = None
        if self._opened != node.key:
            reply = self.worker.ask("open", node=node.key, form=node.form.to_json(), threads=node.threads)
            if reply["is_new"]:  # opened for the first time, or forgotten by the worker over many others
                self._loaded = {(key, digest) for key, digest in self._loaded if key != node.key}
            self._opened = node.key
        for built in needed:
            if (node.key, built.digest) not in self._loaded:
                binary = base64.b64encode(built.record.binary).decode()
                self.worker.ask("load", digest=built.digest, name=built.record.name, binary=binary)
                self._loaded.add((node.key, built.digest))
        return self.worker.ask(do, **arguments)


class NodeBenchmarks:
    """The provider as one job sees it (`Bench`)."""

    def __init__(
        self,
        provider: BenchmarkProvider,
        fusion_id: str,
        form: NodeForm,
        threads: int,
        bucket: Bucket,
        printer: str = LOOP,
        is_strict: bool = False,
    ) -> None:
        self.form = form
        self.threads = threads
        self.key = f"{fusion_id}/{threads}"
        self._is_strict = is_strict
        self._printer = printer
        self._provider = provider
        self._high = self._named([high for _, high in bucket.ranges])

    def _named(self, values: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.form.symbols, values, strict=True))

    @property
    def variants(self) -> tuple[str, str]:
        return self._provider.backend.generic, self._provider.backend.specialised

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        found = self._provider.backend.knobs(self.form, self._printer, self._named(values), self._high)
        return (CONTRACT, *found) if self._is_strict else found

    def default(self, values: Sequence[int]) -> Config:
        return default_config(self.knobs(values))

    def rank(self, values: Sequence[int]) -> Rank | None:
        return self._provider.backend.rank(self.form, self._printer, self._named(values))

    def build(
        self, candidates: Sequence[Candidate], values: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[Built | CandidateProblem]:
        sizes = [self._named(v) for v in (values, *others)]
        generic = [c for c in candidates if not is_specialised(c)]
        special = [c for c in candidates if is_specialised(c)]
        provider, node = self._provider, (self.form, self._printer)
        built = dict(zip(generic, provider.build_all(*node, generic, {}, sizes), strict=True))
        built |= dict(zip(special, provider.build_all(*node, special, sizes[0], sizes[:1]), strict=True))
        return [built[c] for c in candidates]

    def complete(self, built: Built, values: Sequence[int], others: Sequence[Sequence[int]]) -> Built:
        sizes = [self._named(v) for v in (values, *others)]
        constants = sizes[0] if is_specialised(built.candidate) else {}
        try:
            whole = self._provider.build(self.form, self._printer, built.candidate, constants, sizes, is_final=True)
        except CompilerNotReady:
            raise
        except CompilerError as error:
            raise CandidateProblem("compile_error", str(error)[:500]) from None
        return Built(built.candidate, whole.record, built.seconds + whole.seconds)

    def check(self, built: Built, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        self._refuse_lethal(built)
        rows, digest = _rows(cases), built.digest
        with self._blaming([built]):
            reply = self._provider.ask(
                self, "check", [built], digest=digest, cases=rows, budget_seconds=budget_seconds, least=least
            )
        return float(reply["error_ratio"])

    def compare_bits(self, built: Built, cases: Sequence[CheckCase], elements: int, budget_seconds: float) -> str:
        self._refuse_lethal(built)
        rows, digest = _rows(cases), built.digest
        with self._blaming([built]):
            reply = self._provider.ask(
                self,
                "compare_bits",
                [built],
                digest=digest,
                cases=rows,
                elements=elements,
                budget_seconds=budget_seconds,
            )
        return str(reply["difference"])

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        for item in built:
            self._refuse_lethal(item)
        digests = [item.digest for item in built]
        with self._blaming(built):
            reply = self._provider.ask(self, "race", built, digests=digests, values=list(values), rules=asdict(rules))
        return RaceResult(**{name: reply[name] for name in ("samples", "dropped", "threads", "device", "host")})

    def has_passed(self, built: Built) -> bool:
        return built.digest in self._provider.passed

    def note_passed(self, built: Built) -> None:
        self._provider.passed.add(built.digest)

    def _refuse_lethal(self, built: Built) -> None:
        if built.digest in self._provider.lethal:
            raise CandidateProblem("crash", "this kernel has killed a worker before")

    def _blaming(self, built: Sequence[Built]) -> _Blame:
        return _Blame(self._provider, [item.digest for item in built])


class _Blame:
    """Notes a kernel as lethal where the worker was lost while it ran alone."""

    def __init__(self, provider: BenchmarkProvider, digests: list[str]) -> None:
        self._provider = provider
        self._digests = digests

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Lost) and len(self._digests) == 1:
            self._provider.lethal.add(self._digests[0])


def _rows(cases: Sequence[CheckCase]) -> list[list[Any]]:
    """Cases as the worker reads them."""
    return [[list(case.values), case.kind, case.shifted] for case in cases]


def is_specialised(candidate: Candidate) -> bool:
    return candidate.variant.endswith("_specialised")
