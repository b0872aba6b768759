"""One request from beginning to end: lower, search, compile, verify, race, decide.

In: a `TuneRequest`. Out: an `Outcome` with the decisions, all measurements and the kernels to keep.
Guarantee: eager is in every race and wins ties; a kernel is raced only after it was verified; nothing is
timed while something compiles; a candidate that kills the worker is recorded, never tried again, and does
not cost the others their chance.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from autofuse.codegen.build import Toolchain, compile_key, compile_source, flags_for
from autofuse.codegen.c_printer import print_c
from autofuse.codegen.knobs import default_config, knobs_for
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.lower import lower
from autofuse.errors import CompilerError, LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import (
    EAGER,
    Candidate,
    Config,
    Decision,
    KernelRecord,
    Measurement,
    Status,
    TuneRequest,
)
from autofuse.tuner.buckets import exact_bucket
from autofuse.tuner.search import ConfigSearch
from autofuse.tuner.timing import Comparison, wins
from autofuse.tuner.worker import CandidateError, Worker, WorkerLost

GENERIC, SPECIALISED = "c_generic", "c_specialised"
SCREEN_ROUNDS = 5
FINALISTS = 2
# A specialised kernel is worth its compilation where one exact shape has most of a bucket's many calls.
SPECIALISE_CALLS = 32
SPECIALISE_SHARE = 0.5


@dataclass(frozen=True)
class JobLimits:
    """What one job may use."""

    trials: int
    rounds: int
    margin: float
    job_seconds: float
    compile_timeout_seconds: float
    compile_jobs: int = 1  # compilers at a time


@dataclass
class Outcome:
    """What a job found."""

    decisions: list[Decision] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    kernels: list[KernelRecord] = field(default_factory=list)


class KernelMaker:
    """Compiles configurations of nodes, each text once."""

    def __init__(self, toolchain: Toolchain, known: Mapping[str, KernelRecord] | None = None) -> None:
        self._toolchain = toolchain
        self._known: dict[str, KernelRecord] = dict(known or {})
        self._failed: dict[str, str] = {}
        self._loops: dict[str, LoopKernel] = {}
        self.stored = lambda digest: None  # looks a kernel up in the store

    def loop(self, fusion_id: str, form: NodeForm) -> LoopKernel:
        """The loop form of a node. Raises LoweringError."""
        if fusion_id not in self._loops:
            self._loops[fusion_id] = lower(form)
        return self._loops[fusion_id]

    def make(self, loop: LoopKernel, config: Config, constants: Mapping[str, int], timeout: float) -> KernelRecord:
        """The kernel of a configuration. Raises CompilerError."""
        source = print_c(loop, config, dict(constants) or None)
        flags = flags_for(self._toolchain, config)
        key = compile_key(source.text, self._toolchain, flags)
        if key.digest in self._failed:
            raise CompilerError(self._failed[key.digest])
        if key.digest not in self._known:
            found = self.stored(key.digest)
            if found is None:
                try:
                    binary = compile_source(source.text, self._toolchain, flags, timeout)
                except CompilerError as error:
                    self._failed[key.digest] = str(error)
                    raise
                found = KernelRecord(key, source.name, source.text, binary)
            self._known[key.digest] = found
        return self._known[key.digest]


@dataclass
class _Entrant:
    """A candidate that may race."""

    candidate: Candidate
    record: KernelRecord
    error_ratio: float
    compile_seconds: float


class Job:
    """Tunes one node in one bucket."""

    def __init__(
        self,
        request: TuneRequest,
        maker: KernelMaker,
        worker: Worker,
        limits: JobLimits,
        seeds: Iterable[Config] = (),
        lethal: set[str] | None = None,
    ) -> None:
        """``seeds``: winners of neighbouring buckets; ``lethal``: digests that have killed a worker before."""
        self.request = request
        self.form = NodeForm.from_json(dict(request.node))
        self.maker, self.worker, self.limits = maker, worker, limits
        self._seeds = list(seeds)
        self._lethal = lethal if lethal is not None else set()
        self._outcome = Outcome()
        self._opened = -1
        self._began = time.monotonic()

    @property
    def fusion_id(self) -> str:
        return self.request.key.fusion_id

    def run(self) -> Outcome:
        """Tune; never raises for what a candidate does."""
        try:
            loop = self.maker.loop(self.fusion_id, self.form)
        except LoweringError as error:
            self._decide_eager(f"refused:{error.code}", str(error), 0.0)
            return self._outcome
        values = self._representative()
        generic = GENERIC if self.form.symbols else SPECIALISED
        best = self._search(loop, generic, {}, values)
        decision = self._conclude(best, values)
        self._outcome.decisions.append(decision)
        self._specialise(loop, decision)
        return self._outcome

    def _representative(self) -> tuple[int, ...]:
        """The shape to time: the most frequent one seen in the bucket, else its upper end."""
        if self.request.shapes:
            return max(self.request.shapes, key=lambda s: s.calls).symbol_values
        return tuple(high for _, high in self.request.bucket.ranges)

    # ---- search ------------------------------------------------------------------------------------------

    def _search(
        self, loop: LoopKernel, variant: str, constants: Mapping[str, int], values: tuple[int, ...]
    ) -> list[tuple[_Entrant, Comparison]]:
        """Screen configurations; the best few, raced once more at length, fastest first."""
        table = dict(zip(self.form.symbols, values, strict=True))
        seeds = [default_config(loop, table), *self._seeds]
        search = ConfigSearch(knobs_for(loop), seeds, self.limits.trials)
        entrants: dict[str, _Entrant] = {}
        by_digest: dict[str, Comparison] = {}
        while configs := search.ask(max(2, self.limits.compile_jobs)):
            compiled = self._compile(loop, variant, configs, constants)
            fresh = [e for e in compiled if e is not None and e.record.key.digest not in by_digest]
            verified = [e for e in fresh if self._verify(e, values)]
            for entrant, comparison in zip(verified, self._race(verified, values, SCREEN_ROUNDS), strict=True):
                if comparison is not None:
                    entrants[entrant.record.key.digest] = entrant
                    by_digest[entrant.record.key.digest] = comparison
            for config, made in zip(configs, compiled, strict=True):
                # Relative time, so that screenings at different moments compare.
                known = by_digest.get(made.record.key.digest) if made else None
                search.tell(config, 1.0 / known.speedup if known else None)
            if time.monotonic() - self._began > self.limits.job_seconds:
                break
        ranked = sorted(by_digest, key=lambda d: -by_digest[d].speedup)
        finalists = [entrants[d] for d in ranked[:FINALISTS] if by_digest[d].high > 1.0]
        final = self._race(finalists, values, self.limits.rounds)
        pairs = [(e, c) for e, c in zip(finalists, final, strict=True) if c is not None]
        pairs = pairs or [(entrants[d], by_digest[d]) for d in ranked[:1]]
        for digest, comparison in by_digest.items():
            refined = next((c for e, c in pairs if e.record.key.digest == digest), comparison)
            self._record(entrants[digest], "ok", values, refined)
        return sorted(pairs, key=lambda pair: -pair[1].speedup)

    def _compile(
        self, loop: LoopKernel, variant: str, configs: Sequence[Config], constants: Mapping[str, int]
    ) -> list[_Entrant | None]:
        def one(config: Config) -> _Entrant | None:
            began = time.monotonic()
            candidate = Candidate(variant, config)
            try:
                record = self.maker.make(loop, config, constants, self.limits.compile_timeout_seconds)
            except CompilerError as error:
                self._outcome.measurements.append(
                    Measurement(candidate, "compile_error", message=str(error)[:500])
                )
                return None
            return _Entrant(candidate, record, 0.0, time.monotonic() - began)

        if self.limits.compile_jobs == 1 or len(configs) == 1:
            return [one(config) for config in configs]
        with ThreadPoolExecutor(self.limits.compile_jobs) as pool:
            return list(pool.map(one, configs))

    # ---- the worker ----------------------------------------------------------------------------------------

    def _open_bench(self) -> None:
        if self._opened != self.worker.generation or self.worker.pid is None:
            self.worker.ask("open", self.fusion_id, self.request.node, self.request.key.threads)
            self._opened = self.worker.generation

    def _verify(self, entrant: _Entrant, values: tuple[int, ...]) -> bool:
        record = entrant.record
        if record.key.digest in self._lethal:
            self._fail(entrant, "crash", values, "this kernel killed a worker before")
            return False
        try:
            self._open_bench()
            shapes = self._verification_shapes(values)
            entrant.error_ratio = self.worker.ask(
                "check", self.fusion_id, record.key.digest, record.name, record.binary, shapes
            )
            return True
        except WorkerLost as error:
            self._lethal.add(record.key.digest)
            self._fail(entrant, error.status, values, str(error))
        except CandidateError as error:
            self._fail(entrant, error.status, values, str(error))
        return False

    def _verification_shapes(self, values: tuple[int, ...]) -> list[tuple[tuple[int, ...], str]]:
        """Several draws and awkward sizes: the shape itself, the bucket's ends, a prime inside, tiny sizes."""
        ranges = self.request.bucket.ranges
        shapes = [(values, "normal"), (values, "special")]
        for pick in ((lambda low, high: low), (lambda low, high: high), _prime_inside):
            shapes.append((tuple(pick(low, high) for low, high in ranges), "normal"))
        shapes += [(tuple(3 for _ in ranges), "large"), (tuple(2 for _ in ranges), "zeros")]
        return list(dict.fromkeys(shapes))

    def _race(
        self, entrants: Sequence[_Entrant], values: tuple[int, ...], rounds: int
    ) -> list[Comparison | None]:
        """Race against eager; one by one where racing together killed the worker."""
        if not entrants:
            return []
        digests = [e.record.key.digest for e in entrants]
        left = max(0.2, self.limits.job_seconds - (time.monotonic() - self._began))
        try:
            self._reload(entrants)
            _, comparisons = self.worker.ask("race", self.fusion_id, digests, values, rounds, min(2.0, left))
            return list(comparisons)
        except (WorkerLost, CandidateError) as error:
            if len(entrants) > 1:
                return [self._race([e], values, rounds)[0] for e in entrants]
            if isinstance(error, WorkerLost):
                self._lethal.add(digests[0])
            self._fail(entrants[0], error.status, values, str(error))
            return [None]

    def _reload(self, entrants: Sequence[_Entrant]) -> None:
        """After a loss, the new worker has none of the kernels."""
        if self._opened == self.worker.generation and self.worker.pid is not None:
            return
        self._open_bench()
        for e in entrants:
            self.worker.ask("check", self.fusion_id, e.record.key.digest, e.record.name, e.record.binary, [])

    # ---- the decision ----------------------------------------------------------------------------------------

    def _conclude(self, ranked: Sequence[tuple[_Entrant, Comparison]], values: tuple[int, ...]) -> Decision:
        if not ranked:
            return self._eager_decision(*self._why_nothing_ran())
        entrant, comparison = ranked[0]
        if not wins(comparison, self.limits.margin):
            detail = (
                f"the best kernel is {comparison.speedup:.2f}x ({comparison.low:.2f} to {comparison.high:.2f}), "
                f"a switch needs {1 + self.limits.margin:.2f}x"
            )
            return replace(self._eager_decision("below_margin", detail), **_numbers(comparison))
        self._outcome.kernels.append(entrant.record)
        return Decision(
            key=self.request.key,
            bucket=self.request.bucket,
            candidate=entrant.candidate,
            compile_key=entrant.record.key.digest,
            reason="won",
            detail=f"fastest of {len(self._outcome.measurements)} candidates, measured at {list(values)}",
            trials=len(self._outcome.measurements),
            tuning_seconds=time.monotonic() - self._began,
            **_numbers(comparison),
        )

    def _specialise(self, loop: LoopKernel, decision: Decision) -> None:
        """A kernel with the sizes of the dominant shape built in, where it beats the generic winner as well."""
        shapes = self.request.shapes
        total = sum(s.calls for s in shapes)
        if decision.reason != "won" or not self.form.symbols or not shapes:
            return
        hot = max(shapes, key=lambda s: s.calls)
        if hot.calls < SPECIALISE_CALLS or hot.calls < SPECIALISE_SHARE * total:
            return
        constants = dict(zip(self.form.symbols, hot.symbol_values, strict=True))
        (entrant,) = self._compile(loop, SPECIALISED, [decision.candidate.config], constants)
        if entrant is None or not self._verify_exact(entrant, hot.symbol_values):
            return
        generic = next(k for k in self._outcome.kernels if k.key.digest == decision.compile_key)
        rival = _Entrant(decision.candidate, generic, 0.0, 0.0)
        special, plain = self._race([entrant, rival], hot.symbol_values, self.limits.rounds)
        if special is None or plain is None:
            return
        self._record(entrant, "ok", hot.symbol_values, special)
        if not wins(special, self.limits.margin) or special.median_us > plain.median_us / (1 + self.limits.margin):
            return
        bucket = exact_bucket(hot.symbol_values)
        self._outcome.kernels.append(entrant.record)
        self._outcome.decisions.append(
            Decision(
                key=replace(self.request.key, bucket=bucket.label),
                bucket=bucket,
                candidate=entrant.candidate,
                compile_key=entrant.record.key.digest,
                reason="won",
                detail=f"sizes built in; the generic kernel takes {plain.median_us:.1f} us",
                trials=1,
                **_numbers(special),
            )
        )

    def _verify_exact(self, entrant: _Entrant, values: tuple[int, ...]) -> bool:
        record = entrant.record
        try:
            self._open_bench()
            shapes = [(values, "normal"), (values, "special"), (values, "large")]
            self.worker.ask("check", self.fusion_id, record.key.digest, record.name, record.binary, shapes)
            return True
        except (WorkerLost, CandidateError) as error:
            self._fail(entrant, error.status, values, str(error))
            return False

    def _why_nothing_ran(self) -> tuple[str, str]:
        statuses = [m.status for m in self._outcome.measurements]
        last = self._outcome.measurements[-1].message if statuses else "no candidate was made"
        for status, reason in _REASONS.items():
            if status in statuses:
                return reason, last
        return "no_candidate", last

    def _decide_eager(self, reason: str, detail: str, eager_us: float) -> None:
        self._outcome.decisions.append(replace(self._eager_decision(reason, detail), unfused_us=eager_us))

    def _eager_decision(self, reason: str, detail: str) -> Decision:
        return Decision(
            key=self.request.key,
            bucket=self.request.bucket,
            candidate=Candidate(EAGER),
            compile_key=None,
            unfused_us=0.0,
            fused_us=0.0,
            speedup=1.0,
            speedup_low=1.0,
            speedup_high=1.0,
            reason=reason,
            detail=detail[:500],
            trials=len(self._outcome.measurements),
            tuning_seconds=time.monotonic() - self._began,
        )

    def _record(self, entrant: _Entrant, status: Status, values: tuple[int, ...], c: Comparison) -> None:
        self._outcome.measurements.append(
            Measurement(
                candidate=entrant.candidate,
                status=status,
                symbol_values=values,
                median_us=c.median_us,
                eager_us=c.eager_us,
                speedup=c.speedup,
                speedup_low=c.low,
                speedup_high=c.high,
                error_ratio=entrant.error_ratio,
                compile_key=entrant.record.key.digest,
                compile_seconds=entrant.compile_seconds,
            )
        )

    def _fail(self, entrant: _Entrant, status: Status, values: tuple[int, ...], message: str) -> None:
        key = entrant.record.key.digest
        self._outcome.measurements.append(
            Measurement(entrant.candidate, status, values, compile_key=key, message=message[:500])
        )


_REASONS = {
    "wrong": "all_wrong",
    "crash": "crashed",
    "timeout": "timeout",
    "out_of_memory": "out_of_memory",
    "compile_error": "compile_failed",
    "refused": "refused",
}


def _numbers(c: Comparison) -> dict[str, float]:
    return {
        "unfused_us": c.eager_us,
        "fused_us": c.median_us,
        "speedup": c.speedup,
        "speedup_low": c.low,
        "speedup_high": c.high,
    }


def _prime_inside(low: int, high: int) -> int:
    """The largest prime of a range, its lower end where there is none."""
    for number in range(high, low - 1, -1):
        if number > 1 and all(number % d for d in range(2, int(number**0.5) + 1)):
            return number
    return low
