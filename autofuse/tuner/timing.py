"""Timing that can be trusted: interleaved rounds of eager and all candidates, every sample kept.

In: callables of equal meaning, eager first, the rules of the race, and a `Sampler`, which knows how time is taken: by
a clock on a CPU, by events on a GPU (`gpu_sampler`). Out: samples per callable.
Guarantee: all callables take turns within each round, in an order that is shuffled anew every other round and reversed
in the next, so that a drift of the machine, the place in a round or what the one before left in the caches hits all
alike; a sample is as many calls of one callable as of any other; a candidate leaves the race only when nearly all of
its samples are slower than nearly all of the leader's; a race goes on while its winner is open.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from autofuse.tuner.comparison import clearly_slower, compare, verdict

Call = Callable[[], object]
Clock = Callable[[], float]

MIN_SAMPLE_SECONDS = 100e-6  # shorter calls are repeated in a sample, since reading the clock takes 0.1 us
MAX_REPEATS = 64
MAX_SAMPLE_SECONDS = 10e-3  # of the slowest callable, even if the fastest then has fewer repeats than it needs
PROBES = 3  # trial calls, the quickest of which tells how long a call takes
MIN_ROUNDS = 3  # whatever the budget
OVERDRAFT = 4.0  # up to its least number of rounds, a race may take this many times its budget


@dataclass(frozen=True)
class RaceRules:
    """The rules by which a race goes on and ends."""

    rounds: int  # the least number, unless the budget is spent
    max_rounds: int  # the most, while the winner is open; equal to ``rounds``: never longer
    budget_seconds: float
    margin: float  # the share by which the winner must be faster
    least_rounds: int = MIN_ROUNDS  # even where the budget is spent, up to OVERDRAFT times over
    least_seconds: float = 0.0  # the time that these may take, however small the budget
    drop_factor: float = 1.15  # candidates this much slower than the leader leave after 3 rounds
    incumbent: int = 0  # index of the callable to beat: eager, or another, which then never leaves the race

    @property
    def longest_seconds(self) -> float:
        """The seconds that the least number of rounds may take."""
        return max(OVERDRAFT * self.budget_seconds, self.least_seconds)


@dataclass
class RaceResult:
    """The samples of a race: for each callable its seconds a call, in each round in which it took part."""

    samples: list[list[float]]
    dropped: list[bool] = field(default_factory=list)
    threads: int = 0  # of eager and the candidates; 0: not known
    device: list[list[float]] = field(default_factory=list)  # on a GPU: seconds of the device alone
    host: list[list[float]] = field(default_factory=list)  # on a GPU: seconds until the call was handed over


class Sampler(Protocol):
    """Takes the times of calls."""

    def prepare(self, calls: Sequence[Call]) -> None:
        """Warm up the calls, and find out how to take their samples."""

    def round(self, order: Sequence[int]) -> list[float]:
        """A sample of each callable in ``order``, given by indices, in seconds a call and in this order."""

    def note(self, result: RaceResult) -> None:
        """Add other times that were measured to the result of the race."""


class CallSampler:
    """Times calls by a clock; a call must return only when its work is done."""

    def __init__(self, clock: Clock = perf_counter) -> None:
        self._clock = clock
        self._calls: Sequence[Call] = ()
        self._repeats = 1

    def prepare(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._repeats = _repeats(calls, self._clock)

    def round(self, order: Sequence[int]) -> list[float]:
        return [_sample(self._calls[index], self._repeats, self._clock) for index in order]

    def note(self, result: RaceResult) -> None:
        return None


def race(
    calls: Sequence[Call], rules: RaceRules, clock: Clock = perf_counter, sampler: Sampler | None = None
) -> RaceResult:
    """Run the race; ``calls[0]`` is eager, which never leaves it."""
    enabled = gc.isenabled()
    gc.disable()  # a collection would be charged to the callable whose turn it is
    try:
        return _race(calls, rules, clock, sampler or CallSampler(clock))
    finally:
        if enabled:
            gc.enable()


def _race(calls: Sequence[Call], rules: RaceRules, clock: Clock, sampler: Sampler) -> RaceResult:
    began = clock()
    sampler.prepare(calls)
    result = RaceResult([[] for _ in calls], [False] * len(calls))
    order = list(range(len(calls)))
    shuffle = random.Random(0).shuffle
    number = 0
    while number < rules.max_rounds:
        if number % 2:
            order.reverse()  # the first comes last: each of two callables is before the other equally often
        else:
            shuffle(order)
        for index, seconds in zip(order, sampler.round(order), strict=True):
            result.samples[index].append(seconds)
        number += 1
        if number >= MIN_ROUNDS:
            order = _drop_losers(order, result, rules)
            is_enough = number >= rules.least_rounds
            budget = rules.budget_seconds if is_enough else rules.longest_seconds
            if clock() - began > budget or (number >= rules.rounds and _is_decided(order, result, rules)):
                break
    sampler.note(result)
    return result


def _repeats(calls: Sequence[Call], clock: Clock) -> int:
    """The number of calls in a sample, the same for all callables; each is called once to warm up.

    The first call of a sample finds the caches as another callable left them, and is slower by microseconds. Spread
    over fewer calls, this weighs more: with a number for each callable, one of four identical candidates of 3 us beat
    eager in 1.1 % of 730 jobs, with equal numbers in none of 644 (2 cores of an AMD EPYC, 2026-11-21).
    """
    seconds = []
    for call in calls:
        call()
        seconds.append(min(_sample(call, 1, clock) for _ in range(PROBES)))
    most = max(1, min(MAX_REPEATS, round(MAX_SAMPLE_SECONDS / max(seconds))))
    return max(1, min(most, round(MIN_SAMPLE_SECONDS / min(seconds))))


def _sample(call: Call, repeats: int, clock: Clock) -> float:
    began = clock()
    for _ in range(repeats):
        call()
    return max(clock() - began, 1e-9) / repeats


def _drop_losers(order: list[int], result: RaceResult, rules: RaceRules) -> list[int]:
    leader = min(order, key=lambda index: statistics.median(result.samples[index]))
    for index in order:
        stays = index in (0, rules.incumbent)
        if not stays and clearly_slower(result.samples[index], result.samples[leader], rules.drop_factor):
            result.dropped[index] = True
    return [index for index in order if not result.dropped[index]]


def _is_decided(order: list[int], result: RaceResult, rules: RaceRules) -> bool:
    """Whether more rounds cannot change the decision, because the fastest candidate has won or lost."""
    candidates = [index for index in order if index not in (0, rules.incumbent)]
    if not candidates or rules.max_rounds <= rules.rounds:
        return True
    # Decided only once in ``rounds`` rounds: each look is another chance to be wrong by noise.
    count = len(result.samples[0])
    if (count - rules.rounds) % max(1, rules.rounds) and count < rules.max_rounds:
        return False
    best = min(candidates, key=lambda index: statistics.median(result.samples[index]))
    found = compare(result.samples[rules.incumbent], result.samples[best])
    if rules.incumbent and found.speedup < 1.0:
        return True  # two kernels are mostly alike: one without a lead by now will not win by the margin
    return verdict(found, rules.margin) != "open"
