"""Noise does not switch; real gains are found; races are fair and end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from autofuse.tuner.comparison import bounds, compare, quiet_pairs, verdict, wins
from autofuse.tuner.job import CLOSE, FINALISTS, LONGER, SCREEN_ROUNDS
from autofuse.tuner.timing import RaceRules, race

MARGIN = 0.03


class Machine:
    """A simulated clock that calls advance, with jitter, rare long calls and a speed that drifts."""

    def __init__(self, seed: int, jitter: float, spikes: float, drift: float) -> None:
        self.random = random.Random(seed)
        self.jitter, self.spikes, self.drift = jitter, spikes, drift
        self.now, self.speed = 0.0, 1.0

    def clock(self) -> float:
        return self.now

    def call(self, microseconds: float) -> Callable[[], None]:
        def pass_time() -> None:
            self.speed *= self.random.lognormvariate(0.0, self.drift)
            seconds = microseconds * 1e-6 * self.speed * self.random.lognormvariate(0.0, self.jitter)
            self.now += seconds * (self.random.uniform(1.5, 20.0) if self.random.random() < self.spikes else 1.0)

        return pass_time


def tune(machine: Machine, eager_us: float, candidates_us: list[float], rounds: int) -> bool:
    """What a job does: screen all, race the finalists anew, switch or not."""
    calls = [machine.call(us) for us in (eager_us, *candidates_us)]
    screen = race(calls, RaceRules(SCREEN_ROUNDS, SCREEN_ROUNDS, 1e9, MARGIN), machine.clock)
    found = {i: compare(screen.samples[0], screen.samples[i]).speedup for i in range(1, len(calls))}
    best = max(found.values())
    finalists = sorted((i for i in found if found[i] >= best * (1 - CLOSE)), key=lambda i: -found[i])[:FINALISTS]
    rules = RaceRules(rounds, LONGER * rounds, 1e9, MARGIN)
    final = race([calls[0], *(calls[i] for i in finalists)], rules, machine.clock)
    winner = max((compare(final.samples[0], s) for s in final.samples[1:]), key=lambda c: c.speedup)
    return wins(winner, MARGIN)


NOISES = [(0.01, 0.01, 0.0), (0.05, 0.05, 0.01), (0.2, 0.1, 0.02), (0.5, 0.2, 0.05)]


@pytest.mark.parametrize("noise", NOISES, ids=["quiet", "usual", "loud", "hopeless"])
@pytest.mark.parametrize("candidates", [1, 4])
def test_equal_candidates_switch_in_less_than_1_of_100_tries(
    noise: tuple[float, float, float], candidates: int
) -> None:
    tries = 1000
    switched = sum(tune(Machine(s, *noise), 150.0, [150.0] * candidates, 10) for s in range(tries))
    assert switched < 0.01 * tries


def test_real_gains_are_found() -> None:
    found = [tune(Machine(seed, 0.05, 0.05, 0.01), 150.0, [180.0, 150.0 / 1.1, 300.0], 15) for seed in range(100)]
    assert sum(found) >= 97


def test_a_gain_below_the_margin_is_none() -> None:
    assert not any(tune(Machine(seed, 0.01, 0.0, 0.0), 150.0, [150.0 / 1.01], 15) for seed in range(100))


@pytest.mark.parametrize("count", [6, 9, 15, 40])
def test_bounds_are_wrong_as_seldom_as_they_say(count: int) -> None:
    chance = random.Random(count)
    below = above = 0
    for _ in range(2000):
        low, high = bounds(sorted(chance.lognormvariate(0.0, 0.3) for _ in range(count)), 0.025)
        below += high < 1.0
        above += low > 1.0
    assert max(below, above) <= 0.025 * 2000 * 1.4


def test_few_rounds_give_no_strong_bound() -> None:
    comparison = compare([2.0] * 9, [1.0] * 9)
    assert comparison.speedup == 2.0 and verdict(comparison, MARGIN) == "open" and not wins(comparison, MARGIN)
    assert wins(compare([2.0] * 10, [1.0] * 10), MARGIN)


def test_disturbed_rounds_are_left_out_whomever_they_hit() -> None:
    pairs = [(1.0, 1.0)] * 15 + [(30.0, 1.0)] * 5 + [(1.0, 30.0)] * 5
    assert quiet_pairs(pairs) == [(1.0, 1.0)] * 15
    assert len(quiet_pairs(pairs[10:])) == 10
    comparison = compare([e for e, _ in pairs], [c for _, c in pairs])
    assert comparison.speedup == 1.0 and comparison.rounds == 25


def test_everyone_takes_turns_and_losers_leave() -> None:
    machine = Machine(1, 0.01, 0.0, 0.0)
    order: list[int] = []

    def call(index: int, microseconds: float) -> Callable[[], None]:
        step = machine.call(microseconds)
        return lambda: (order.append(index), step())[1]  # type: ignore[func-returns-value]

    calls = [call(i, us) for i, us in enumerate([200.0, 100.0, 500.0])]
    result = race(calls, RaceRules(12, 12, 1e9, MARGIN), machine.clock)
    assert [len(s) for s in result.samples] == [12, 12, 3] and result.dropped == [False, False, True]
    rounds = [order[i : i + 3] for i in range(6, 15, 3)]  # behind two calls each to warm up
    assert all(sorted(r) == [0, 1, 2] for r in rounds) and len({tuple(r) for r in rounds}) > 1


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = Machine(1, 0.0, 0.0, 0.0)
    count = itertools.count()
    step = machine.call(2.0)
    result = race([lambda: (next(count), step())[1]], RaceRules(5, 5, 1e9, MARGIN), machine.clock)  # type: ignore[func-returns-value]
    assert next(count) == 2 + 5 * 50 and result.samples[0] == pytest.approx([2e-6] * 5)


def test_a_spent_budget_ends_a_race_after_three_rounds() -> None:
    machine = Machine(1, 0.0, 0.0, 0.0)
    result = race([machine.call(1e6), machine.call(1e6)], RaceRules(20, 80, 0.5, MARGIN), machine.clock)
    assert [len(s) for s in result.samples] == [3, 3]


def test_an_open_race_goes_on_and_a_decided_one_does_not() -> None:
    decided = Machine(1, 0.01, 0.0, 0.0)
    result = race([decided.call(150.0), decided.call(100.0)], RaceRules(10, 40, 1e9, MARGIN), decided.clock)
    assert len(result.samples[0]) == 10
    close = Machine(1, 0.1, 0.0, 0.0)
    result = race([close.call(150.0), close.call(145.0)], RaceRules(10, 40, 1e9, MARGIN), close.clock)
    assert len(result.samples[0]) > 10
