"""One request from beginning to end: search, check, race, decide.

In: a `TuneRequest` and the bench of its node. Out: an `Outcome` with decisions, measurements and kernels to keep.
Guarantee: eager is in every race and wins ties; a candidate is timed only after it gave right results on one case,
and wins only after all cases; the race that decides is not the one that chose, and is run twice unless it is clear;
whatever a candidate does is a recorded outcome and costs the others nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from autofuse.errors import LoweringError
from autofuse.ir.buckets import dominant_shape, exact_bucket
from autofuse.ir.operation import NodeForm
from autofuse.ir.reasons import REFUSED
from autofuse.ir.records import (
    EAGER,
    Candidate,
    Config,
    Decision,
    KernelRecord,
    Measurement,
    ObservedShape,
    Status,
    TuneRequest,
)
from autofuse.tuner.benchmark_provider import Bench, Built
from autofuse.tuner.cases import CASE_BYTES, ESSENTIAL, CheckCase, call_bytes, first_cases, full_cases, is_empty
from autofuse.tuner.comparison import LEAST_PAIRS, Comparison, compare, confirms, is_clear, keeps_device_slower, wins
from autofuse.tuner.search import ConfigSearch
from autofuse.tuner.timing import PROBES, RaceResult, RaceRules
from autofuse.tuner.worker_process import CandidateProblem, Lost

WAVE = 4  # configurations that are built and screened together: the default and the likeliest changes to it
# Of the best configuration over the best of the first wave, a bold guess: over 30 nodes of a GPT the median was 0 %.
USUAL_GAIN = 0.05
# The same where the winners of other buckets of the node are in the first wave.
GAIN_OVER_NEIGHBOURS = 0.02
CALLS_PER_TRIAL = 1000  # trials that a profile grants say how long a kernel is meant to be used
TRIAL_SECONDS = 0.08  # of a trial that has to compile, on one core
SCREEN_ROUNDS = 5
THREADS_KNOB = "threads"  # of the code generator: the caller's thread count, or one
# A race whose winner is open goes on for up to this many times its rounds. On a simulated shared machine a gain of 10 %
# is found in 76 % of tries, with 4 in half of them.
LONGER = 6
# The same with the generic winner as the rival: the two are mostly alike, which no number of rounds decides, and with
# six times the rounds these races took half of a job's samples.
LONGER_AGAINST_WINNER = 2
FINALISTS = 4
CLOSE = 0.1  # finalists are within this share of the first: the noise of a screening
TAKES = 3  # winners that may turn out wrong before the rest is given up
SHAPES_BUILT = 4  # observed shapes whose divisibility the kept binary of a GPU makes use of
SPECIALISE_CALLS = 32  # calls of the dominant shape from which a kernel of its own can pay for its compilation


@dataclass(frozen=True)
class JobLimits:
    """What one job may use."""

    trials: int
    rounds: int
    margin: float
    job_seconds: float
    memory_bytes: int = 2 << 30
    case_bytes: int = CASE_BYTES
    wave: int = WAVE  # configurations that are built and screened together


@dataclass
class Outcome:
    """What a job found."""

    decisions: list[Decision] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    kernels: list[KernelRecord] = field(default_factory=list)


@dataclass
class _Entrant:
    """A candidate that ran and gave right results."""

    built: Built
    error_ratio: float
    comparison: Comparison | None = None
    dropped: bool = False
    threads: int = 0  # of the last race
    on_device: Comparison | None = None  # on a GPU: the device's time alone
    host_us: tuple[float, float] | None = None  # of eager and of this one, until a call is handed to a GPU
    seconds: float = 0.0  # of checking and racing

    @property
    def speedup(self) -> float:
        return self.comparison.speedup if self.comparison is not None else 0.0

    @property
    def device_speedup(self) -> float:
        """Of the device's time alone; the same as ``speedup`` but where a GPU waits for the host."""
        return self.on_device.speedup if self.on_device is not None else self.speedup

    @property
    def score(self) -> float:
        """What a search minimises. Kernels of a node are launched alike: behind a host that is slower than all of
        them they would look the same, so the device's time counts as much."""
        return 1.0 / math.sqrt(self.speedup * self.device_speedup)

    def trades(self, margin: float) -> bool:
        """Whether it saves the host's time at the cost of the device's."""
        slower = self.on_device is not None and keeps_device_slower(self.on_device, margin)
        return slower and self.speedup > 1.0


class Job:
    """Tunes one node in one bucket."""

    def __init__(
        self,
        request: TuneRequest,
        bench: Bench,
        limits: JobLimits,
        seeds: Iterable[Config] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``seeds``: winners of other buckets, nearest first; ``clock``: seconds that count against the job's."""
        self.request = request
        self.form = NodeForm.from_json(dict(request.node))
        self.limits = limits
        self._bench = bench
        self._seeds = list(seeds)
        self._clock = clock
        self._began = clock()
        self._outcome = Outcome()
        self._tried = 0

    def run(self) -> Outcome:
        """Tune. Raises only what stops the daemon itself."""
        values = self._timed_values()
        if is_empty(self.form, values):
            return self._give_up("too_small", "its outputs have no elements")
        if call_bytes(self.form, values) > self.limits.memory_bytes:
            return self._give_up("out_of_memory", "one call needs more memory than tuner.memory_bytes allows")
        try:
            self._bench.knobs(values)
        except LoweringError as error:
            return self._give_up(f"{REFUSED}{error.code}", str(error))
        entrants = self._explore(values)
        if not entrants:
            return self._give_up(*self._why_nothing_ran())
        winner, decision = self._decide(entrants, values)
        self._outcome.decisions.append(decision)
        if winner is not None:
            self._outcome.kernels.append(winner.built.record)
            self._specialise(winner)
        self._outcome.measurements += [self._measurement(e, values) for e in entrants if e.comparison is not None]
        return self._outcome

    def _timed_values(self) -> tuple[int, ...]:
        """The shape to time: the most frequent one, else the upper end of the bucket."""
        seen = [s for s in self.request.shapes if self.request.bucket.contains(s.symbol_values)]
        if seen:
            return max(seen, key=lambda s: s.calls).symbol_values
        return tuple(high for _, high in self.request.bucket.ranges)

    def _seconds_left(self) -> float:
        return self.limits.job_seconds - (self._clock() - self._began)

    # ---- exploring ------------------------------------------------------------------------------

    def _explore(self, values: tuple[int, ...]) -> list[_Entrant]:
        """Screen configurations, in waves; the entrants that ran, each binary once.

        Winners of other buckets make a first wave of their own, with the default: they are compiled already, and as a
        rule one of them wins.
        """
        variant = self._bench.variants[0 if self.form.symbols else 1]
        starts = list(dict.fromkeys([self._bench.default(values), *self._seeds]))
        wave = min(len(starts), self.limits.wave) if self._seeds else self.limits.wave
        search = ConfigSearch(self._bench.knobs(values), starts, self.limits.trials)
        entrants: dict[str, _Entrant] = {}
        failed: set[str] = set()
        while configs := search.ask(wave):
            wave = self.limits.wave
            wave_began = self._clock()
            candidates = [Candidate(variant, config) for config in configs]
            made = dict(zip(configs, self._build(candidates, values), strict=True))
            fresh: dict[str, Built] = {}
            for built in made.values():
                if built is not None and built.digest not in entrants and built.digest not in failed:
                    fresh.setdefault(built.digest, built)
            checked: list[_Entrant] = []
            for built in fresh.values():
                if (entrants or checked) and self._seconds_left() <= 0:
                    break
                entrant = self._first_check(built, values)
                checked += [entrant] if entrant is not None else []
            self._screen(checked, values)
            entrants |= {e.built.digest: e for e in checked if e.comparison is not None}
            failed |= fresh.keys() - entrants.keys()
            for config, built in made.items():
                known = entrants.get(built.digest) if built is not None else None
                # Relative to eager in the same rounds, so that screenings of different moments compare.
                search.tell(config, known.score if known is not None else None)
            if self._seconds_left() <= 0 or not self._pays(entrants.values(), self._clock() - wave_began):
                break
        self._tried = search.tried
        return list(entrants.values())

    def _pays(self, entrants: Iterable[_Entrant], wave_seconds: float) -> bool:
        """Whether another wave may save more than it costs, by what a configuration usually gains over the first few.

        The number of calls to come is not known: the profile's effort stands for it, unless more were seen already.
        """
        times_us = [e.comparison.median_us for e in entrants if e.comparison is not None]
        if not times_us:
            return True
        calls = max(self.request.calls, CALLS_PER_TRIAL * self.limits.trials)
        cost_seconds = max(wave_seconds, WAVE * TRIAL_SECONDS)
        gain = GAIN_OVER_NEIGHBOURS if self._seeds else USUAL_GAIN
        return calls * min(times_us) * 1e-6 * gain > cost_seconds

    def _build(self, candidates: Sequence[Candidate], values: tuple[int, ...]) -> list[Built | None]:
        found: list[Built | None] = []
        others = [case.values for case in first_cases(self.form, self.request.bucket, values)]
        for candidate, result in zip(candidates, self._bench.build(candidates, values, others), strict=True):
            if isinstance(result, CandidateProblem):
                self._fail(candidate, result.status, values, str(result), None)
                found.append(None)
            else:
                found.append(result)
        return found

    def _first_check(self, built: Built, values: tuple[int, ...]) -> _Entrant | None:
        began = self._clock()
        try:
            error = self._bench.check(built, first_cases(self.form, self.request.bucket, values), 0.0, 1)
        except CandidateProblem as problem:
            self._fail(built.candidate, problem.status, values, str(problem), built.digest)
            return None
        return _Entrant(built, error, seconds=self._clock() - began)

    def _screen(self, entrants: Sequence[_Entrant], values: tuple[int, ...]) -> None:
        budget = min(1.0, max(0.05, self._seconds_left() / 4))
        self._race(entrants, values, RaceRules(SCREEN_ROUNDS, SCREEN_ROUNDS, budget, self.limits.margin))

    def _race(self, entrants: Sequence[_Entrant], values: tuple[int, ...], rules: RaceRules) -> RaceResult | None:
        """Race against eager and note the comparisons; one by one where together they were too much for the worker.

        The race of all of them, None where there was none.
        """
        if not entrants:
            return None
        began = self._clock()
        try:
            result = self._bench.race([e.built for e in entrants], values, rules)
        except CandidateProblem as problem:
            alone_may_do = isinstance(problem, Lost) or problem.status == "out_of_memory"
            if alone_may_do and len(entrants) > 1:
                for entrant in entrants:
                    self._race([entrant], values, rules)
                return None
            for entrant in entrants:
                entrant.comparison = None
                self._fail(entrant.built.candidate, problem.status, values, str(problem), entrant.built.digest)
            return None
        for index, entrant in enumerate(entrants, 1):
            entrant.comparison = compare(result.samples[0], result.samples[index])
            entrant.dropped = result.dropped[index]
            entrant.threads = result.threads
            if result.device:
                entrant.on_device = compare(result.device[0], result.device[index])
                entrant.host_us = (median(result.host[0]) * 1e6, median(result.host[index]) * 1e6)
            entrant.seconds += (self._clock() - began) / len(entrants)
        return result

    # ---- deciding -------------------------------------------------------------------------------

    def _decide(self, entrants: list[_Entrant], values: tuple[int, ...]) -> tuple[_Entrant | None, Decision]:
        """The winner and its decision; None where eager stays."""
        for _ in range(TAKES):
            ran = (e for e in entrants if e.comparison is not None and not e.trades(self.limits.margin))
            # Who left a race early was slower than the leader, whatever eager took in those few rounds.
            ranked = sorted(ran, key=lambda e: (e.dropped, -e.speedup))
            if not ranked:
                break
            best = self._final(ranked, values)
            if best is None or best.trades(self.limits.margin):
                continue  # the finalists did not survive, or took the device longer than it had seemed
            assert best.comparison is not None
            if not wins(best.comparison, self.limits.margin):
                return None, self._stay_eager(*self._why_not(best.comparison), best.comparison)
            if not is_clear(best.comparison):
                first = best.comparison
                self._race([best], values, self._at_length())
                if best.comparison is None or best.trades(self.limits.margin):
                    continue
                if not confirms(best.comparison, self.limits.margin):
                    reason, seen = self._why_not(best.comparison)
                    return None, self._stay_eager(
                        reason, f"{seen}; a race before showed {first.speedup:.2f}x", best.comparison
                    )
            if self._complete(best, values) and self._full_check(best, values):
                return best, self._switch(best, self.request, values)
            best.comparison = None
        return None, self._none_left(entrants)

    def _none_left(self, entrants: Sequence[_Entrant]) -> Decision:
        traded = [e for e in entrants if e.comparison is not None and e.trades(self.limits.margin)]
        if not traded:
            return self._stay_eager(*self._why_nothing_ran())
        best = max(traded, key=lambda e: e.speedup)
        assert best.on_device is not None
        return self._stay_eager("device_slower", _on_device(best.on_device), best.comparison)

    def _final(self, ranked: Sequence[_Entrant], values: tuple[int, ...]) -> _Entrant | None:
        """The best of a race at length; as screened where not even the screening saw a chance."""
        ranked = self._of_default_threads(ranked)
        first = ranked[0]
        assert first.comparison is not None
        if first.comparison.high < 1.0:
            return first
        close = [e for e in ranked if e.dropped == first.dropped and e.speedup >= first.speedup * (1.0 - CLOSE)]
        finalists = self._that_fit(sorted(close, key=lambda e: -e.device_speedup)[:FINALISTS])
        self._race(finalists, values, self._at_length())
        ran = [e for e in finalists if e.comparison is not None]
        stayed = [e for e in ran if not e.dropped] or ran  # all left where eager leads
        top = max((e.speedup for e in stayed), default=0.0)
        alike = [e for e in stayed if e.speedup * (1.0 + self.limits.margin) >= top]
        return max(alike, key=lambda e: e.device_speedup, default=None)

    def _that_fit(self, finalists: Sequence[_Entrant]) -> Sequence[_Entrant]:
        """The first of them for whom a deciding race has time: with fewer than the least rounds none of them wins."""
        found = [e.comparison for e in finalists if e.comparison is not None]
        seconds = found[0].eager_us / 1e6
        for count, comparison in enumerate(found):
            seconds += comparison.median_us / 1e6
            if count and (1 + PROBES + LEAST_PAIRS) * seconds > self._at_length().longest_seconds:
                return finalists[:count]
        return finalists

    def _at_length(self, longer: int = LONGER) -> RaceRules:
        """A race that decides; ``longer``: times its rounds at most, while its winner is open."""
        rounds = max(LEAST_PAIRS, self.limits.rounds)
        budget = max(0.5, min(self.limits.job_seconds / 4, self._seconds_left()))
        return RaceRules(rounds, longer * rounds, budget, self.limits.margin, LEAST_PAIRS, self.limits.job_seconds)

    def _of_default_threads(self, ranked: Sequence[_Entrant]) -> Sequence[_Entrant]:
        """Those that use threads as the default does, where a busy machine was timed on one thread.

        A kernel that never uses more is as fast there, and slower on the machine that the script has to itself.
        """
        if all(e.threads in (0, self.request.key.threads) for e in ranked):
            return ranked
        usual = dict(self._bench.default(self._timed_values())).get(THREADS_KNOB)
        return [e for e in ranked if dict(e.built.candidate.config).get(THREADS_KNOB) == usual] or ranked

    def _complete(self, entrant: _Entrant, values: tuple[int, ...]) -> bool:
        """Make the winner fit for all sizes of its bucket."""
        inside = [s.symbol_values for s in self.request.shapes if self.request.bucket.contains(s.symbol_values)]
        try:
            entrant.built = self._bench.complete(entrant.built, values, inside[:SHAPES_BUILT])
        except CandidateProblem as problem:
            self._fail(entrant.built.candidate, problem.status, values, str(problem), entrant.built.digest)
            return False
        return True

    def _full_check(self, entrant: _Entrant, values: tuple[int, ...]) -> bool:
        known = self._bench.has_passed(entrant.built)
        cases = full_cases(
            self.form,
            self.request.bucket,
            self.request.shapes,
            values,
            is_known=known,
            most_bytes=self.limits.case_bytes,
        )
        if not self._check(entrant, cases, values):
            return False
        self._bench.note_passed(entrant.built)
        return True

    def _check(self, entrant: _Entrant, cases: Sequence[CheckCase], values: tuple[int, ...]) -> bool:
        began = self._clock()
        try:
            budget = max(0.1, self.limits.job_seconds / 8)
            error = self._bench.check(entrant.built, cases, budget, ESSENTIAL)
        except CandidateProblem as problem:
            self._fail(entrant.built.candidate, problem.status, values, str(problem), entrant.built.digest)
            return False
        finally:
            entrant.seconds += self._clock() - began
        entrant.error_ratio = max(entrant.error_ratio, error)
        return True

    def _why_not(self, comparison: Comparison) -> tuple[str, str]:
        seen = f"{comparison.speedup:.2f}x ({comparison.low:.2f} to {comparison.high:.2f})"
        if comparison.high < 1.0:
            return "no_gain", f"the best kernel is {seen}"
        return "below_margin", f"the best kernel is {seen}, a switch needs {1 + self.limits.margin:.2f}x for certain"

    def _why_nothing_ran(self) -> tuple[str, str]:
        found = {m.status: m.message for m in reversed(self._outcome.measurements) if m.status != "ok"}
        for status, reason in _REASONS.items():
            if status in found:
                return reason, found[status]
        return "no_candidates", "no candidate was made"

    def _switch(self, entrant: _Entrant, request: TuneRequest, values: tuple[int, ...]) -> Decision:
        assert entrant.comparison is not None
        at = f" at {list(values)}" if values else ""
        if entrant.threads not in (0, request.key.threads):
            at += " on one thread, for the machine was busy"
        return Decision(
            key=request.key,
            bucket=request.bucket,
            candidate=entrant.built.candidate,
            compile_key=entrant.built.digest,
            unfused_us=entrant.comparison.eager_us,
            fused_us=entrant.comparison.median_us,
            speedup=entrant.comparison.speedup,
            speedup_low=entrant.comparison.low,
            speedup_high=entrant.comparison.high,
            reason="won",
            detail=f"the fastest of {self._tried}, {entrant.comparison.rounds} paired rounds{at}",
            trials=self._tried,
            tuning_seconds=self._clock() - self._began,
        )

    def _stay_eager(self, reason: str, detail: str, comparison: Comparison | None = None) -> Decision:
        return Decision(
            key=self.request.key,
            bucket=self.request.bucket,
            candidate=Candidate(EAGER),
            compile_key=None,
            unfused_us=comparison.eager_us if comparison else 0.0,
            fused_us=comparison.median_us if comparison else 0.0,
            speedup=comparison.speedup if comparison else 1.0,
            speedup_low=comparison.low if comparison else 1.0,
            speedup_high=comparison.high if comparison else 1.0,
            reason=reason,
            detail=detail[:500],
            trials=self._tried,
            tuning_seconds=self._clock() - self._began,
        )

    def _give_up(self, reason: str, detail: str) -> Outcome:
        self._outcome.decisions.append(self._stay_eager(reason, detail))
        return self._outcome

    # ---- the dominant shape ---------------------------------------------------------------------

    def _specialise(self, generic: _Entrant) -> None:
        """A kernel with the sizes of the dominant shape built in, where it beats the generic winner as well."""
        values = dominant_shape(self.request.shapes)
        calls = max((s.calls for s in self.request.shapes), default=0)
        if values is None or calls < SPECIALISE_CALLS or not self.form.symbols or self._seconds_left() <= 0:
            return
        if len(set(self._bench.variants)) == 1:
            return  # strategies have no other form
        bucket = exact_bucket(values)
        request = replace(
            self.request,
            key=replace(self.request.key, bucket=bucket.label),
            bucket=bucket,
            shapes=(ObservedShape(values, calls),),
        )
        (built,) = self._build([Candidate(self._bench.variants[1], generic.built.candidate.config)], values)
        if built is None:
            return
        entrant, rival = _Entrant(built, 0.0), _Entrant(generic.built, 0.0)
        if not self._complete(entrant, values):
            return
        built = entrant.built
        cases = [
            *first_cases(self.form, bucket, values),
            *full_cases(self.form, bucket, (), values, most_bytes=self.limits.case_bytes),
        ]
        if not self._check(entrant, cases, values):
            return
        beats = self._beats(entrant, rival, values)
        if entrant.comparison is None or rival.comparison is None:
            return
        self._outcome.measurements.append(self._measurement(entrant, values))
        if beats:
            self._outcome.kernels.append(built.record)
            decision = self._switch(entrant, request, values)
            detail = f"sizes built in; the generic kernel takes {rival.comparison.median_us:.1f} us"
            self._outcome.decisions.append(replace(decision, detail=detail, trials=1, tuning_seconds=entrant.seconds))

    def _beats(self, entrant: _Entrant, rival: _Entrant, values: tuple[int, ...]) -> bool:
        """Whether a candidate beats eager and the rival, each as surely as eager alone has to be beaten."""
        for enough in (wins, confirms):
            rules = replace(self._at_length(LONGER_AGAINST_WINNER), incumbent=1)
            result = self._race([rival, entrant], values, rules)
            if result is None or entrant.comparison is None or entrant.trades(self.limits.margin):
                return False
            comparisons = (entrant.comparison, compare(result.samples[1], result.samples[2]))
            if not all(enough(c, self.limits.margin) for c in comparisons):
                return False
            if all(is_clear(c) for c in comparisons):
                return True
        return True

    # ---- records --------------------------------------------------------------------------------

    def _measurement(self, entrant: _Entrant, values: tuple[int, ...]) -> Measurement:
        assert entrant.comparison is not None
        c = entrant.comparison
        return Measurement(
            candidate=entrant.built.candidate,
            status="pruned" if entrant.dropped else "ok",
            symbol_values=values,
            median_us=c.median_us,
            eager_us=c.eager_us,
            speedup=c.speedup,
            speedup_low=c.low,
            speedup_high=c.high,
            error_ratio=entrant.error_ratio,
            host_us=entrant.host_us[1] if entrant.host_us else None,
            eager_host_us=entrant.host_us[0] if entrant.host_us else None,
            compile_key=entrant.built.digest,
            compile_seconds=entrant.built.seconds,
            measure_seconds=entrant.seconds,
            message="slower than the leader in nearly every round" if entrant.dropped else "",
        )

    def _fail(
        self, candidate: Candidate, status: Status, values: tuple[int, ...], message: str, digest: str | None
    ) -> None:
        self._outcome.measurements.append(
            Measurement(candidate, status, values, compile_key=digest, message=message[:500])
        )


def _on_device(c: Comparison) -> str:
    return f"fewer launches, but the device itself takes {c.median_us:.1f} us instead of {c.eager_us:.1f}"


_REASONS = {
    "wrong": "all_wrong",
    "crash": "crashed",
    "timeout": "timeout",
    "out_of_memory": "out_of_memory",
    "compile_error": "compile_failed",
    "pruned": "does_not_fit",
    "refused": "refused",
}
