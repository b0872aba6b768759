"""Bounds are as good as they say; races are fair and end. Whole jobs under noise: `test_switches`."""

from __future__ import annotations

import itertools
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import sleep

import psutil
import pytest

from autofuse.tuner.comparison import bounds, compare, quiet_pairs, verdict, wins
from autofuse.tuner.node_bench import Cores, CpuRunner
from autofuse.tuner.timing import PROBES, CallSampler, RaceRules, race

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


def test_repeats_are_equal_however_the_first_calls_went() -> None:
    """A callable of 3 us whose first call in a sample is slow: with other repeats it would seem to be faster."""
    for seed in range(50):
        machine = Machine(seed, 0.3, 0.2, 0.0)
        turns: list[int] = []

        def call(index: int, step: Callable[[], None], turns: list[int] = turns) -> Callable[[], None]:
            return lambda: (turns.append(index), step())[1]  # type: ignore[func-returns-value]

        race(
            [call(i, machine.call(3.0)) for i in range(4)], RaceRules(6, 6, 1e9, MARGIN, drop_factor=1e9), machine.clock
        )
        assert len({turns.count(i) for i in range(4)}) == 1


def test_a_slow_one_does_not_make_samples_long() -> None:
    machine = Machine(1, 0.0, 0.0, 0.0)
    count = itertools.count()
    slow = machine.call(5e3)
    race([lambda: (next(count), slow())[1], machine.call(5.0)], RaceRules(5, 5, 1e9, MARGIN), machine.clock)  # type: ignore[func-returns-value]
    assert next(count) == 1 + PROBES + 5 * 2


def test_of_two_each_has_been_first_equally_often() -> None:
    firsts: list[int] = []
    before: dict[tuple[int, int], int] = {}

    class Orders(CallSampler):
        def round(self, order: Sequence[int]) -> list[float]:
            firsts.append(order[0])
            for pair in itertools.combinations(order, 2):
                before[pair] = before.get(pair, 0) + 1
            return [1.0] * len(order)

    race([lambda: None] * 4, RaceRules(20, 20, 1e9, MARGIN), lambda: 0.0, Orders())
    assert set(before.values()) == {10} and len(set(firsts)) == 4


def test_on_a_shared_machine_only_the_threads_own_time_counts() -> None:
    """Sleep stands for what others do with the core meanwhile."""
    medians = {}
    for is_shared in (False, True):
        calls = [lambda: sleep(0.01), lambda: None]
        samples = race(calls, RaceRules(5, 5, 1e9, MARGIN), sampler=CpuRunner().sampler(is_shared)).samples
        medians[is_shared] = statistics.median(samples[0])
    assert medians[False] >= 0.01 and medians[True] < 0.005


def test_where_others_have_the_cores_one_thread_is_usable() -> None:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        while any(psutil.Process(other.pid).cpu_times().user < 0.2 for other in others):
            sleep(0.02)
        assert Cores().usable_threads(os.cpu_count() or 1) == 1
    finally:
        for other in others:
            other.kill()
            other.wait()


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
    rounds = [order[i : i + 3] for i in range(3 * (1 + PROBES), 3 * (1 + PROBES) + 9, 3)]  # behind the calls to warm up
    assert all(sorted(r) == [0, 1, 2] for r in rounds) and len({tuple(r) for r in rounds}) > 1


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = Machine(1, 0.0, 0.0, 0.0)
    count = itertools.count()
    step = machine.call(2.0)
    result = race([lambda: (next(count), step())[1]], RaceRules(5, 5, 1e9, MARGIN), machine.clock)  # type: ignore[func-returns-value]
    assert next(count) == 1 + PROBES + 5 * 50 and result.samples[0] == pytest.approx([2e-6] * 5)


def test_a_spent_budget_ends_a_race_after_three_rounds() -> None:
    machine = Machine(1, 0.0, 0.0, 0.0)
    result = race([machine.call(1e6), machine.call(1e6)], RaceRules(20, 80, 0.5, MARGIN), machine.clock)
    assert [len(s) for s in result.samples] == [3, 3]


def test_the_least_rounds_have_their_time_however_small_the_budget() -> None:
    machine = Machine(1, 0.0, 0.0, 0.0)
    calls = [machine.call(1e6), machine.call(0.5e6)]
    rules = RaceRules(20, 80, 0.5, MARGIN, least_rounds=10, least_seconds=25.0)
    assert [len(s) for s in race(calls, rules, machine.clock).samples] == [10, 10]
    rules = RaceRules(20, 80, 0.5, MARGIN, least_rounds=10, least_seconds=15.0)
    assert [len(s) for s in race(calls, rules, machine.clock).samples] == [7, 7], "six seconds to prepare, 1.5 a round"


def test_an_open_race_goes_on_and_a_decided_one_does_not() -> None:
    decided = Machine(1, 0.01, 0.0, 0.0)
    result = race([decided.call(150.0), decided.call(100.0)], RaceRules(10, 40, 1e9, MARGIN), decided.clock)
    assert len(result.samples[0]) == 10
    close = Machine(1, 0.1, 0.0, 0.0)
    result = race([close.call(150.0), close.call(145.0)], RaceRules(10, 40, 1e9, MARGIN), close.clock)
    assert len(result.samples[0]) > 10


def test_a_rival_without_a_lead_does_not_make_a_race_long() -> None:
    for incumbent, rival, is_long in ((150.0, 151.5, False), (150.0, 146.0, True)):
        machine = Machine(3, 0.05, 0.0, 0.0)
        calls = [machine.call(300.0), machine.call(incumbent), machine.call(rival)]
        result = race(calls, RaceRules(15, 60, 1e9, MARGIN, drop_factor=1e9, incumbent=1), machine.clock)
        assert (len(result.samples[1]) > 15) is is_long
