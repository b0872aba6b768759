"""Simulated A/A and A/B tests of whole jobs: noise does not switch, whatever its kind; real gains are found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from autofuse.codegen.knobs import Knob
from autofuse.ir.records import Config, make_config
from autofuse.tuner.benchmark_provider import Built
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.timing import Call, RaceResult, RaceRules, race
from autofuse.tuner.tune_node import Job
from tests.tuner.nodes import chain_form, request
from tests.tuner.replay import RecordedBench

TRIES = 250
LIMITS = JobLimits(trials=24, rounds=15, margin=0.03, job_seconds=1e9)
EAGER_US = 150.0
FORM = chain_form(1)


@dataclass(frozen=True)
class Noise:
    """What keeps two equal samples from being equal; all factors."""

    jitter: float = 0.02  # log-normal, of each sample by itself
    spikes: float = 0.0  # share of samples that a heavy tail hits: Pareto with an infinite variance
    wander: float = 0.0  # of the machine's speed from sample to sample: it remembers, and comes back to 1
    drift: float = 0.0  # of the machine's speed from sample to sample, for good
    neighbour: float = 0.0  # what another process takes while it runs: phases of some rounds
    first: float = 0.0  # what the first one in a round takes longer
    after: float = 0.0  # what whoever runs behind eager takes longer
    place: float = 0.0  # log-normal, of a callable's memory, for as long as a race lasts


NOISES = {
    "quiet": Noise(0.01),
    "heavy tails": Noise(0.05, spikes=0.1),
    "wandering speed": Noise(wander=0.05),
    "drifting speed": Noise(drift=0.03),
    "phases of another process": Noise(0.03, neighbour=1.5),
    "first in a round": Noise(first=0.08),
    "behind eager": Noise(after=0.05),
    "place in memory": Noise(place=0.01),
    "a shared machine": Noise(0.05, 0.05, 0.03, 0.01, 0.7, 0.03, 0.02, 0.005),
    "hopeless": Noise(0.3, 0.3, 0.1, 0.05, 3.0, 0.1, 0.05, 0.01),
}


class NoisySampler:
    """Samples of callables that take ``times_us`` (`timing.Sampler`)."""

    def __init__(self, times_us: Sequence[float], noise: Noise, chance: random.Random) -> None:
        self._times_us = times_us
        self._noise = noise
        self._chance = chance
        self._places = [chance.lognormvariate(0.0, noise.place) for _ in times_us]
        self._speed, self._wander, self._is_busy = 1.0, 0.0, False

    def prepare(self, calls: Sequence[Call]) -> None:
        return None

    def round(self, order: Sequence[int]) -> list[float]:
        before = [None, *order]
        return [self._sample(index, *at) for index, at in zip(order, enumerate(before), strict=False)]

    def _sample(self, index: int, position: int, before: int | None) -> float:
        noise, chance = self._noise, self._chance
        self._speed *= chance.lognormvariate(0.0, noise.drift)
        self._wander = 0.9 * self._wander + chance.gauss(0.0, noise.wander)
        self._is_busy = self._is_busy != (chance.random() < 0.1)
        seconds = self._times_us[index] * 1e-6 * self._places[index] * self._speed
        seconds *= chance.lognormvariate(self._wander, noise.jitter)
        seconds *= 1.0 + noise.neighbour * self._is_busy * chance.random()
        seconds *= 1.0 + noise.first * (position == 0) + noise.after * (before == 0)
        return seconds * (chance.paretovariate(1.5) if chance.random() < noise.spikes else 1.0)

    def note(self, result: RaceResult) -> None:
        return None


class NoisyBench(RecordedBench):
    """Candidates by number; those of `special_us` where sizes are built in."""

    def __init__(self, times_us: Sequence[float], special_us: float, noise: Noise, seed: int) -> None:
        names = tuple(range(len(times_us)))
        configs = [make_config({"number": n}) for n in names]
        super().__init__(
            (Knob("number", names, 0, ""),), dict(zip(configs, times_us, strict=True)), EAGER_US, seed=seed
        )
        self._special_us, self._shape, self._chance = special_us, noise, random.Random(seed)

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        times = [self._special_us if b.candidate.variant == self.variants[1] else self._us(b) for b in built]
        sampler = NoisySampler([EAGER_US, *times], self._shape, self._chance)
        return race([lambda: None] * (1 + len(times)), rules, self.clock, sampler)

    def _us(self, built: Built) -> float:
        config: Config = built.candidate.config
        return EAGER_US / self.true_speedup(config)


def tune(times_us: Sequence[float], special_us: float, noise: Noise, seed: int, calls: int = 1) -> Outcome:
    bench = NoisyBench(times_us, special_us, noise, seed)
    return Job(request(FORM, (700,), calls=calls), bench, LIMITS, (), bench.clock).run()


def share(name: str, times_us: Sequence[float], tries: int = TRIES) -> float:
    """Of jobs that leave eager."""
    found = [tune(times_us, 1e9, NOISES[name], seed).decisions[0].reason == "won" for seed in range(tries)]
    return sum(found) / tries


def special_wins(name: str, tries: int) -> float:
    """Share of jobs in which the winner with sizes built in, which is as fast as without, takes its place."""
    found = [tune([75.0], 75.0, NOISES[name], seed, calls=1000) for seed in range(tries)]
    assert all(outcome.decisions[0].reason == "won" for outcome in found) or name == "hopeless"
    return sum(len(outcome.decisions) > 1 for outcome in found) / tries


@pytest.mark.parametrize("name", NOISES)
def test_identical_candidates_switch_in_less_than_1_of_100_tries(name: str) -> None:
    assert share(name, [EAGER_US] * 4) < 0.01


@pytest.mark.parametrize("name", NOISES)
def test_a_kernel_does_not_lose_to_itself_with_sizes_built_in(name: str) -> None:
    assert special_wins(name, 101) < 0.01


@pytest.mark.parametrize("name", [n for n in NOISES if n != "hopeless"])
def test_a_gain_of_a_tenth_is_found_in_most_tries(name: str) -> None:
    assert share(name, [EAGER_US * 1.3, EAGER_US / 1.1, EAGER_US], 50) > 0.5


def test_a_gain_that_noise_hides_is_undecided_and_no_tie() -> None:
    """It is not said to miss the margin; a true tie hardly ever is, so that few races are run again for nothing."""
    rough = Noise(jitter=0.3)
    found = [tune([EAGER_US / 1.1], 1e9, rough, seed).decisions[0] for seed in range(60)]
    unsure = [decision for decision in found if decision.reason == "undecided"]
    assert len(unsure) > 10 and all(d.speedup >= 1.03 and "to be sure of it" in d.detail for d in unsure)
    ties = [tune([EAGER_US], 1e9, Noise(jitter=0.05), seed).decisions[0].reason for seed in range(60)]
    assert ties.count("undecided") <= 3


def test_a_gain_below_the_margin_is_none() -> None:
    assert share("quiet", [EAGER_US / 1.01], 100) == 0.0


def test_sizes_built_in_win_where_they_gain() -> None:
    found = [tune([100.0], 90.0, NOISES["heavy tails"], seed, calls=1000) for seed in range(20)]
    assert sum(len(outcome.decisions) > 1 for outcome in found) >= 18


class SlowStart(NoisySampler):
    """Eager is slow in the first rounds of each race; the second candidate equals the first in one race."""

    races = 0

    def __init__(self, times_us: Sequence[float], noise: Noise, chance: random.Random) -> None:
        super().__init__(times_us, noise, chance)
        SlowStart.races += 1
        self._is_first, self._rounds = SlowStart.races == 1, 0

    def round(self, order: Sequence[int]) -> list[float]:
        self._rounds += 1
        eager, first, second = 300e-6 if self._rounds > 3 else 600e-6, 100e-6, 105e-6 if self._is_first else 150e-6
        return [(eager, first, second)[index] for index in order]


def test_who_left_a_race_early_does_not_decide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.NoisySampler", SlowStart)
    monkeypatch.setattr(SlowStart, "races", 0)
    decision = tune([100.0, 105.0], 1e9, Noise(), 0).decisions[0]
    assert decision.reason == "won" and dict(decision.candidate.config) == {"number": 0}


def test_eager_stays_where_it_leads_and_says_so() -> None:
    assert tune([300.0, 310.0], 1e9, Noise(), 0).decisions[0].reason == "no_gain"
    assert tune([EAGER_US * 1.02, EAGER_US * 1.25], 1e9, Noise(0.05), 0).decisions[0].reason in (
        "no_gain",
        "below_margin",
    )


if __name__ == "__main__":  # as a table, of more tries: one candidate, four, sizes built in; a gain of a tenth
    for name in NOISES:
        gain = [EAGER_US * 1.3, EAGER_US / 1.1, EAGER_US]
        same = [share(name, [EAGER_US] * count, 1000) for count in (1, 4)]
        row = (*same, special_wins(name, 1000), share(name, gain, 200))
        print(f"{name:28s}" + "".join(f"{x:8.3f}" for x in row), flush=True)


@pytest.mark.parametrize("eager_seconds", [0.1, 0.3, 0.6])
def test_long_calls_are_decided_too(eager_seconds: float) -> None:
    """Ten rounds of four alike take longer than is left: fewer of them are raced, and for as long as that takes."""
    names = tuple(range(4))
    times = {make_config({"number": n}): eager_seconds * 1e6 * (0.3 + 0.003 * n) for n in names}
    bench = RecordedBench((Knob("number", names, 0, ""),), times, eager_seconds * 1e6)
    limits = replace(LIMITS, job_seconds=eager_seconds * 22)
    (decision,) = Job(request(FORM, (700,), calls=1), bench, limits, (), bench.clock).run().decisions
    assert decision.reason == "won" and decision.speedup > 3.0
