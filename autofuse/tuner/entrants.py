"""Candidates on a node's bench: built, checked, raced; what every step of a job does with them.

In: configurations and the bench of a node. Out: `Entrant`s with their comparisons against eager.
Guarantee: an entrant has given right results before it is timed; what fails becomes a measurement, and costs the others
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, Candidate, Comparison, Measurement, ObservedShape, TuneRequest
from autofuse.tuner.benchmark_provider import Bench, Built
from autofuse.tuner.cases import ESSENTIAL, CheckCase, first_cases, strict_cases, strict_elements
from autofuse.tuner.comparison import LEAST_PAIRS, compare, keeps_device_slower
from autofuse.tuner.outcome import Clock, JobLimits, Outcome
from autofuse.tuner.timing import RaceResult, RaceRules
from autofuse.tuner.worker_process import CandidateProblem, Lost

SHAPES_BUILT = 4  # observed shapes whose divisibility a GPU's kept binary has images for
# A race whose winner is open goes on for up to this many times its rounds. On a simulated shared machine 6 finds a gain
# of 10 % in 76 % of tries, 4 in half of them.
LONGER = 6


@dataclass
class Entrant:
    """A candidate that ran and gave right results."""

    built: Built
    error_ratio: float
    comparison: Comparison | None = None
    dropped: bool = False
    threads: int = 0  # of the last race
    on_device: Comparison | None = None  # on a GPU: the device's time alone
    host_us: tuple[float, float] | None = None  # host time of a call on a GPU, of eager and of this candidate
    seconds: float = 0.0  # of checking and racing
    difference: str = ""  # how its bits differ from eager's, in a strict job, where it may not win for that

    @property
    def speedup(self) -> float:
        return self.comparison.speedup if self.comparison is not None else 0.0

    @property
    def device_speedup(self) -> float:
        """The speedup of the device's time alone; differs from ``speedup`` only where a GPU waits for the host."""
        return self.on_device.speedup if self.on_device is not None else self.speedup

    @property
    def score(self) -> float:
        """What a search minimises.

        Kernels of a node are launched alike, so behind a host that is slower than all of them they would look the same.
        Therefore the device's time counts as much.
        """
        return 1.0 / math.sqrt(self.speedup * self.device_speedup)

    def trades(self, margin: float) -> bool:
        """Whether the candidate saves host time at the cost of the device's."""
        slower = self.on_device is not None and keeps_device_slower(self.on_device, margin)
        return slower and self.speedup > 1.0

    def measurement(self, values: tuple[int, ...]) -> Measurement:
        """The measurement of the last race, at these sizes."""
        assert self.comparison is not None
        c = self.comparison
        message = self.difference or ("slower than the leader in nearly every round" if self.dropped else "")
        return Measurement(
            candidate=self.built.candidate,
            status="not_bit_equal" if self.difference else "pruned" if self.dropped else "ok",
            symbol_values=values,
            median_us=c.median_us,
            eager_us=c.eager_us,
            speedup=c.speedup,
            speedup_low=c.low,
            speedup_high=c.high,
            error_ratio=self.error_ratio,
            host_us=self.host_us[1] if self.host_us else None,
            eager_host_us=self.host_us[0] if self.host_us else None,
            compile_key=self.built.digest,
            compile_seconds=self.built.seconds,
            measure_seconds=self.seconds,
            message=message,
        )


class Contest:
    """The candidates of one job on their node's bench."""

    def __init__(
        self, request: TuneRequest, form: NodeForm, bench: Bench, limits: JobLimits, outcome: Outcome, clock: Clock
    ) -> None:
        self.request = request
        self.form = form
        self.bench = bench
        self.limits = limits
        self.outcome = outcome
        self.clock = clock

    def build(self, candidates: Sequence[Candidate], values: tuple[int, ...]) -> list[Built | None]:
        """Build candidates; their binaries in order, None for those that failed."""
        found: list[Built | None] = []
        others = [case.values for case in first_cases(self.form, self.request.bucket, values)]
        for candidate, result in zip(candidates, self.bench.build(candidates, values, others), strict=True):
            if isinstance(result, CandidateProblem):
                self.outcome.fail(candidate, result.status, str(result), values)
                found.append(None)
            else:
                found.append(result)
        return found

    def first_check(self, built: Built, values: tuple[int, ...]) -> Entrant | None:
        """Check the one case that a candidate has to pass before it is timed; None where it fails.

        In a strict job its bits are compared too, there and at the sizes that are timed.
        """
        began = self.clock.now()
        cases, difference = first_cases(self.form, self.request.bucket, values), ""
        try:
            error = self.bench.check(built, cases, 0.0, 1)
            if self.request.key.is_strict:
                difference = self.bench.compare_bits(built, [*cases, CheckCase(values, "normal")], 0, 0.0)
        except CandidateProblem as problem:
            self._fail(built, problem, values)
            return None
        return Entrant(built, error, seconds=self.clock.now() - began, difference=difference)

    def check(self, entrant: Entrant, cases: Sequence[CheckCase], values: tuple[int, ...]) -> bool:
        """Whether the entrant passes these cases too."""
        began = self.clock.now()
        try:
            budget = max(0.1, self.limits.job_seconds / 8)
            error = self.bench.check(entrant.built, cases, budget, ESSENTIAL)
        except CandidateProblem as problem:
            self._fail(entrant.built, problem, values)
            return False
        finally:
            entrant.seconds += self.clock.now() - began
        entrant.error_ratio = max(entrant.error_ratio, error)
        return True

    def keeps_bits(
        self, entrant: Entrant, bucket: Bucket, shapes: Sequence[ObservedShape], values: tuple[int, ...]
    ) -> bool:
        """Whether the entrant may win in ``bucket``: in a strict job only where all results are eager's to the bit."""
        if not self.request.key.is_strict:
            return True
        began = self.clock.now()
        cases = strict_cases(self.form, bucket, shapes, values, self.limits.case_bytes)
        try:
            budget = max(0.1, self.limits.job_seconds / 8)
            entrant.difference = self.bench.compare_bits(entrant.built, cases, strict_elements(self.form), budget)
        except CandidateProblem as problem:
            entrant.comparison = None
            self._fail(entrant.built, problem, values)
            return False
        finally:
            entrant.seconds += self.clock.now() - began
        return not entrant.difference

    def complete(self, entrant: Entrant, values: tuple[int, ...]) -> bool:
        """Build a winner's binary for all sizes of its bucket; whether that succeeded."""
        try:
            entrant.built = self.bench.complete(entrant.built, values, self.shapes_inside()[:SHAPES_BUILT])
        except CandidateProblem as problem:
            self._fail(entrant.built, problem, values)
            return False
        return True

    def race(self, entrants: Sequence[Entrant], values: tuple[int, ...], rules: RaceRules) -> RaceResult | None:
        """Race entrants against eager and note the comparisons; one by one where the worker cannot take all at once.

        Returns the result of the race of all, None where there was none.
        """
        if not entrants:
            return None
        began = self.clock.now()
        try:
            result = self.bench.race([e.built for e in entrants], values, rules)
        except CandidateProblem as problem:
            alone_may_do = isinstance(problem, Lost) or problem.status == "out_of_memory"
            if alone_may_do and len(entrants) > 1:
                for entrant in entrants:
                    self.race([entrant], values, rules)
                return None
            for entrant in entrants:
                entrant.comparison = None
                self._fail(entrant.built, problem, values)
            return None
        self.outcome.note_threads(result.threads, self.request)
        for index, entrant in enumerate(entrants, 1):
            entrant.comparison = compare(result.samples[0], result.samples[index])
            entrant.dropped = result.dropped[index]
            entrant.threads = result.threads
            if result.device:
                entrant.on_device = compare(result.device[0], result.device[index])
                entrant.host_us = (median(result.host[0]) * 1e6, median(result.host[index]) * 1e6)
            entrant.seconds += (self.clock.now() - began) / len(entrants)
        return result

    def at_length(self, longer: int = LONGER) -> RaceRules:
        """The rules of a race that decides; while its winner is open, it takes up to ``longer`` times its rounds."""
        rounds = max(LEAST_PAIRS, self.limits.rounds)
        budget = max(0.5, min(self.limits.job_seconds / 4, self.clock.left))
        return RaceRules(rounds, longer * rounds, budget, self.limits.margin, LEAST_PAIRS, self.limits.job_seconds)

    def shapes_inside(self) -> list[tuple[int, ...]]:
        """The observed shapes that lie in the request's bucket."""
        return [s.symbol_values for s in self.request.shapes if self.request.bucket.contains(s.symbol_values)]

    def _fail(self, built: Built, problem: CandidateProblem, values: tuple[int, ...]) -> None:
        self.outcome.fail(built.candidate, problem.status, str(problem), values, built.digest)
