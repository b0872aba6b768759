"""Timing that can be trusted: interleaved rounds, paired ratios, a margin that noise cannot give.

In: callables of equal meaning. Out: samples per callable, and the comparison of each with the first.
Guarantee: all samples are kept; candidates take turns inside each round, in an order that rotates, so a
drift of the machine hits all alike; a switch needs the margin and an interval above 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from time import perf_counter

MIN_SAMPLE_SECONDS = 40e-6  # shorter calls are repeated inside a sample
MAX_REPEATS = 64


@dataclass(frozen=True)
class Comparison:
    """A candidate against eager, from the same rounds."""

    median_us: float
    eager_us: float
    speedup: float  # median of the paired ratios eager / candidate
    low: float  # 95 % interval of that median
    high: float
    sure_low: float  # lower end of a 99 % interval: what decides, so that two finalists together err below 1 %


def measure_rounds(
    calls: Sequence[Callable[[], object]],
    rounds: int,
    *,
    budget_seconds: float = 2.0,
    clock: Callable[[], float] = perf_counter,
) -> list[list[float]]:
    """Seconds a call, one sample per round for each callable; after 3 rounds a spent budget ends the race."""
    repeats = []
    for call in calls:  # one call to warm up, one to learn how long it takes
        call()
        began = clock()
        call()
        seconds = max(clock() - began, 1e-9)
        repeats.append(max(1, min(MAX_REPEATS, round(MIN_SAMPLE_SECONDS / seconds))))
    samples: list[list[float]] = [[] for _ in calls]
    started = clock()
    for number in range(rounds):
        for position in range(len(calls)):
            index = (position + number) % len(calls)
            call, times = calls[index], repeats[index]
            began = clock()
            for _ in range(times):
                call()
            samples[index].append((clock() - began) / times)
        if number >= 2 and clock() - started > budget_seconds:
            break
    return samples


def compare(eager: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """Paired comparison of samples from the same rounds."""
    ratios = sorted(e / c for e, c in zip(eager, candidate, strict=True))
    low, high = median_interval(ratios)
    sure_low, _ = median_interval(ratios, 2.58)
    return Comparison(
        median_us=statistics.median(candidate) * 1e6,
        eager_us=statistics.median(eager) * 1e6,
        speedup=statistics.median(ratios),
        low=low,
        high=high,
        sure_low=sure_low,
    )


def median_interval(ordered: Sequence[float], deviations: float = 1.96) -> tuple[float, float]:
    """Interval of the median of sorted samples (95 % at 1.96 standard deviations of its rank).

    By order statistics, so no assumption on the shape of the noise.
    """
    n = len(ordered)
    half = deviations * sqrt(n) / 2
    low = max(0, int(n / 2 - half))
    high = min(n - 1, int(n / 2 + half + 0.999999))
    return ordered[low], ordered[high]


def wins(comparison: Comparison, margin: float) -> bool:
    """Whether to switch from eager: the median by the margin, and the whole interval above 1."""
    return comparison.speedup >= 1.0 + margin and comparison.sure_low > 1.0
