"""Replay: the whole job on recorded timings, so that the quality of search and decision is testable anywhere.

In: what each configuration took, from the store or made up, and the noise to add. Out: a `Bench` that answers as a
real one would, and what the best recorded configuration would have gained (the oracle).
Guarantee: equal recordings and seeds give equal answers; simulated seconds pass on ``clock``, nobody waits for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from autofuse.codegen.knobs import Knob
from autofuse.db.rows import StoredMeasurement
from autofuse.ir.records import Bucket, Candidate, CompileKey, Config, KernelRecord
from autofuse.tuner.benchmark_provider import Bench, Built
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.timing import Call, RaceResult, RaceRules, race
from autofuse.tuner.worker_process import CandidateProblem

COMPILE_SECONDS = 0.1
CHECK_SECONDS = 0.01


class RecordedBench(Bench):
    """Plays back the times of one node in one bucket."""

    def __init__(
        self,
        knobs: Sequence[Knob],
        times_us: Mapping[Config, float],
        eager_us: float,
        *,
        noise: float = 0.02,
        seed: int = 0,
        problems: Mapping[Config, CandidateProblem] | None = None,
        differing: Mapping[Config, int] | None = None,
    ) -> None:
        """``times_us``: a call of each configuration; others fail to compile. ``noise``: of log-normal samples.
        ``problems``: configurations that fail their check, and how. ``differing``: those whose bits are not eager's,
        and in which comparison of bits this shows first."""
        self._knobs = tuple(knobs)
        self._times_us = dict(times_us)
        self._eager_us = eager_us
        self._noise = noise
        self._random = random.Random(seed)
        self._problems = dict(problems or {})
        self._differing = dict(differing or {})
        self._compared: dict[Config, int] = {}
        self._now = 0.0
        self.built: list[Config] = []  # in the order in which they were asked for

    def clock(self) -> float:
        """Simulated seconds so far."""
        return self._now

    @property
    def oracle(self) -> float:
        """The largest speedup that is there to find; 1.0 where eager is fastest."""
        fine = [us for config, us in self._times_us.items() if config not in self._problems]
        return max(1.0, self._eager_us / min(fine, default=self._eager_us))

    def true_speedup(self, config: Config) -> float:
        """What a configuration gains without noise."""
        return self._eager_us / self._times_us[config]

    # ---- Bench ----------------------------------------------------------------------------------

    @property
    def variants(self) -> tuple[str, str]:
        return "c_generic", "c_specialised"

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        return self._knobs

    def default(self, values: Sequence[int]) -> Config:
        return tuple(sorted((knob.name, knob.default) for knob in self._knobs))

    def build(
        self, candidates: Sequence[Candidate], values: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[Built | CandidateProblem]:
        found: list[Built | CandidateProblem] = []
        for candidate in candidates:
            self.built.append(candidate.config)
            self._now += COMPILE_SECONDS
            if candidate.config in self._times_us:
                key = CompileKey(repr(candidate), "recorded", "", "")
                found.append(Built(candidate, KernelRecord(key, "recorded", "", b""), COMPILE_SECONDS))
            else:
                found.append(CandidateProblem("compile_error", "not recorded"))
        return found

    def complete(self, built: Built, values: Sequence[int], others: Sequence[Sequence[int]]) -> Built:
        return built

    def check(self, built: Built, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        self._now += CHECK_SECONDS
        problem = self._problems.get(built.candidate.config)
        if problem is not None:
            raise problem
        return 1.0

    def compare_bits(self, built: Built, cases: Sequence[CheckCase], elements: int, budget_seconds: float) -> str:
        config = built.candidate.config
        self._compared[config] = self._compared.get(config, 0) + 1
        shows = self._differing.get(config, 1 << 30) <= self._compared[config]
        return "output 0 has other bits" if shows else ""

    def has_passed(self, built: Built) -> bool:
        return False

    def note_passed(self, built: Built) -> None:
        return None

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        times = [self._eager_us, *(self._times_us[item.candidate.config] for item in built)]
        return race([self._call(us) for us in times], rules, self.clock)

    def _call(self, microseconds: float) -> Call:
        def pass_time() -> None:
            self._now += microseconds * 1e-6 * self._random.lognormvariate(0.0, self._noise)

        return pass_time


def recorded_times(rows: Iterable[StoredMeasurement], bucket: Bucket) -> tuple[dict[Config, float], float]:
    """Times of each configuration and of eager in one bucket, from stored measurements, in microseconds.

    Each is taken relative to eager in its own rounds, for the machine drifts between them.
    """
    speedups: dict[Config, float] = {}
    eager: list[float] = []
    for row in rows:
        m = row.measurement
        if row.key.bucket == bucket.label and m.speedup is not None and m.eager_us is not None:
            speedups[m.candidate.config] = m.speedup
            eager.append(m.eager_us)
    typical = sorted(eager)[len(eager) // 2] if eager else 0.0
    return {config: typical / speedup for config, speedup in speedups.items()}, typical
