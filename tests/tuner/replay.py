"""Replay: the whole job on recorded timings, so that the quality of search and decision is testable anywhere.

In: what each configuration took, from the store or made up, and the noise to add. Out: a `Bench` that answers as a
real one would, and what the best recorded configuration would have gained (the oracle).
Guarantee: equal recordings and seeds give equal answers; simulated seconds pass on ``clock``, nobody waits for them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

from autofuse.codegen.knobs import Knob, Rank
from autofuse.db.rows import StoredMeasurement
from autofuse.ir.records import Bucket, Candidate, CompileKey, Config, KernelRecord, make_config
from autofuse.tuner.benchmark_provider import Bench, Built
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.outcome import WAVE
from autofuse.tuner.search import ConfigSearch
from autofuse.tuner.timing import Call, RaceResult, RaceRules, race
from autofuse.tuner.worker_process import CandidateProblem

COMPILE_SECONDS = 0.1
CHECK_SECONDS = 0.01
LARGE = tuple(Knob(f"k{i}", (1, 2, 4, 8), 1, "") for i in range(5))  # 1024 configurations


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
        rank: Rank | None = None,
    ) -> None:
        """``times_us``: a call of each configuration; others fail to compile. ``noise``: of log-normal samples.
        ``problems``: configurations that fail their check, and how. ``differing``: those whose bits are not eager's,
        and in which comparison of bits this shows first. ``rank``: what a model expects."""
        self._knobs = tuple(knobs)
        self._times_us = dict(times_us)
        self._eager_us = eager_us
        self._noise = noise
        self._random = random.Random(seed)
        self._problems = dict(problems or {})
        self._differing = dict(differing or {})
        self._rank = rank
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

    def rank(self, values: Sequence[int]) -> Rank | None:
        return self._rank

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


def whole_space(knobs: tuple[Knob, ...]) -> list[Config]:
    names = [knob.name for knob in knobs]
    spaces = itertools.product(*(knob.choices for knob in knobs))
    return [make_config(dict(zip(names, values, strict=True))) for values in spaces]


def bowl(seed: int) -> dict[Config, float]:
    """Times with one optimum somewhere, each knob with a weight of its own, and 3 % of roughness."""
    chance = random.Random(seed)
    best = [chance.randrange(4) for _ in LARGE]
    weights = [chance.uniform(1.0, 8.0) for _ in LARGE]
    times = {}
    for config in whole_space(LARGE):
        places = [knob.choices.index(value) for knob, (_, value) in zip(LARGE, config, strict=True)]
        distance = sum(w * (p - b) ** 2 for w, p, b in zip(weights, places, best, strict=True))
        times[config] = (1000.0 + 10.0 * distance) * chance.uniform(1.0, 1.03)
    return times


def trials_until_near(
    knobs: Sequence[Knob], times: Mapping[Config, float | None], rank: Rank | None, budget: int, seed: int
) -> int:
    """Trials of one search until one of them is within 5 % of the best; one more than it has where none is.

    The search is asked in waves, as a job does it, and told times with 2 % of noise. ``times``: of the whole space,
    None where a configuration fails; ``seed``: of the sampler and of the noise.
    """
    chance = random.Random(seed)
    search, tried = ConfigSearch(knobs, [], budget, seed, rank), 0
    enough = 1.05 * min(us for us in times.values() if us is not None)
    while configs := search.ask(WAVE):
        for config in configs:
            us, tried = times[config], tried + 1
            if us is not None and us <= enough:
                return tried
            search.tell(config, None if us is None else us * chance.lognormvariate(0.0, 0.02))
    return min(budget, len(times)) + 1


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
