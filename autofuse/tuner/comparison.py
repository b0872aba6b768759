"""What paired timings show: a ratio, its interval, and whether it is enough to leave eager.

In: samples of eager and of a candidate from the same interleaved rounds. Out: a `Comparison` and a verdict.
Guarantee: intervals are of order statistics, exact for any noise whose rounds are independent (a median's rank is
binomial), so no shape of the noise is assumed. A switch needs the margin in the median and a strong bound above 1,
on samples that did not choose the candidate, and a second race that shows the same unless the first is clear: rounds
of one race share the memory that its callables were given, and whatever else lasts as long. Simulated A/A tests switch
in fewer than 1 of 100 tries.
Torch-free; the same rules run in the worker, to stop a race early, and in the daemon, to decide.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, inf
from typing import Literal

from autofuse.ir.records import Comparison

INTERVAL_TAIL = 0.025  # probability on each side of the 95 % interval that people see
# Probability on each side of the bound that decides. Up to six looks at a growing race and several finalists multiply
# it, but they see the same samples, and the margin comes on top: simulated A/A tests switch in at most 0.7 % of tries.
STRONG_TAIL = 0.001

# A round is disturbed where the product of both times is above twice that of the smallest ones. 1.1 is usual on a quiet
# machine.
DISTURBED = 2.0
LEAST_PAIRS = 10  # rounds; with fewer there is no strong bound
CLEAR = 1.25  # from this strong bound on, a gain is larger than what may favour one callable for a whole race

Verdict = Literal["won", "lost", "open"]


def compare(eager: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """Compare samples (seconds a call) round by round; eager may have more rounds than a candidate that was dropped."""
    pairs = quiet_pairs(list(zip(eager[: len(candidate)], candidate, strict=True)))
    ratios = sorted(e / c for e, c in pairs)
    low, high = bounds(ratios, INTERVAL_TAIL)
    strong_low, strong_high = bounds(ratios, STRONG_TAIL)
    return Comparison(
        median_us=statistics.median(c for _, c in pairs) * 1e6,
        eager_us=statistics.median(e for e, _ in pairs) * 1e6,
        speedup=statistics.median(ratios),
        # With fewer than 6 rounds there is no 95 % interval: take the range of the ratios.
        low=low if low > 0 else ratios[0],
        high=high if high < inf else ratios[-1],
        strong_low=strong_low,
        strong_high=strong_high,
        rounds=len(candidate),
    )


def quiet_pairs(pairs: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The rounds in which neither callable was disturbed, but at least ``LEAST_PAIRS`` of them.

    Beside other work a parallel region may wait for a core for milliseconds, and a kernel with fewer regions would win
    by that. A round is judged by the product of both times over their minima, which treats both callables alike.
    """
    if len(pairs) <= LEAST_PAIRS:
        return pairs
    quietest = min(e for e, _ in pairs) * min(c for _, c in pairs)
    ordered = sorted(pairs, key=lambda pair: pair[0] * pair[1])
    kept = sum(e * c <= DISTURBED * quietest for e, c in ordered)
    return ordered[: max(kept, LEAST_PAIRS)]


def bounds(ordered: Sequence[float], tail: float) -> tuple[float, float]:
    """Lower and upper bound of the median of sorted samples, each wrong with probability ``tail`` at most."""
    rank = _rank(len(ordered), tail)
    if rank == 0:
        return 0.0, inf
    return ordered[rank - 1], ordered[len(ordered) - rank]


@functools.lru_cache(maxsize=1024)
def _rank(count: int, tail: float) -> int:
    """The largest k for which the k-th smallest of ``count`` samples exceeds the median with probability <= ``tail``.

    It does where fewer than k samples are below the median, with probability P(Bin(count, 1/2) <= k - 1). 0 without
    such a k.
    """
    rank, chance = 0, 0.0
    while rank <= count:
        chance += comb(count, rank) / 2**count
        if chance > tail:
            return rank
        rank += 1
    return 0


def verdict(comparison: Comparison, margin: float) -> Verdict:
    """Whether the candidate beats eager by the margin; "open" where more rounds could still decide."""
    if comparison.speedup >= 1.0 + margin and comparison.strong_low > 1.0:
        return "won"
    return "lost" if comparison.strong_high < 1.0 + margin else "open"


def wins(comparison: Comparison, margin: float) -> bool:
    """Whether to switch from eager, which wins ties and races that are open at the end."""
    return verdict(comparison, margin) == "won"


def why_eager(comparison: Comparison, margin: float) -> str:
    """The reason code of a candidate that has run, was right and has not won."""
    if comparison.high < 1.0:
        return "no_gain"
    return "undecided" if comparison.speedup >= 1.0 + margin else "below_margin"


def is_clear(comparison: Comparison) -> bool:
    """Whether a win needs no second race."""
    return comparison.strong_low >= CLEAR


def confirms(comparison: Comparison, margin: float) -> bool:
    """Whether a second race confirms a win; a 95 % interval will do, since the first ruled out the noise of rounds."""
    return comparison.speedup >= 1.0 + margin and comparison.low > 1.0


@dataclass(frozen=True)
class Ruling:
    """Whether to switch from eager, and the comparisons of the race that decided."""

    is_won: bool
    comparisons: tuple[Comparison, ...]  # of the last race: with eager, and with other kernels that must be beaten
    unconfirmed: tuple[Comparison, ...] = ()  # of the first race, where the second did not confirm it


def decide(
    first: Sequence[Comparison], margin: float, race_again: Callable[[], Sequence[Comparison] | None]
) -> Ruling | None:
    """The rule of all switches: a candidate must win one race by the margin, and unless that is clear, a second one.

    ``first``: the candidate against each of its rivals, all of which it has to beat. Returns None where the second race
    had no result.
    """
    first = tuple(first)
    if not all(wins(c, margin) for c in first):
        return Ruling(False, first)
    if all(is_clear(c) for c in first):
        return Ruling(True, first)
    second = race_again()
    if second is None:
        return None
    is_won = all(confirms(c, margin) for c in second)
    return Ruling(is_won, tuple(second), () if is_won else first)


def keeps_device_slower(on_device: Comparison, margin: float) -> bool:
    """Whether a candidate takes the device longer than eager does, by more than the margin.

    Where the GPU waits for the script, a race decides by the larger of host and device time, and fewer launches win. A
    script that keeps the GPU busy sees the device's time alone, and must not lose by the switch.
    """
    return on_device.speedup < 1.0 - margin


def clearly_slower(samples: Sequence[float], leader: Sequence[float], factor: float) -> bool:
    """Whether the upper three quarters of the samples exceed the lower three quarters of the leader's by the factor."""
    ours, theirs = sorted(samples), sorted(leader)
    return ours[len(ours) // 4] > factor * theirs[len(theirs) - 1 - len(theirs) // 4]
