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

INTERVAL_TAIL = 0.025  # each side of the 95 % interval that people see
# Each side of the bound that decides. Looks at growing numbers of rounds (up to six) and several finalists multiply
# it, but they see the same samples, and the margin comes on top: simulated A/A tests switch in 0.7 % of tries at most.
STRONG_TAIL = 0.001

# Twice as slow together as in their quietest rounds: usual noise on a quiet machine is 1.1.
DISTURBED = 2.0
LEAST_PAIRS = 10  # fewer give no strong bound
CLEAR = 1.25  # the strong bound from which a gain is larger than anything that favours one callable for a whole race

Verdict = Literal["won", "lost", "open"]


def compare(eager: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """Compare samples (seconds a call) pair by pair; eager may have more rounds than a candidate that was dropped."""
    pairs = quiet_pairs(list(zip(eager[: len(candidate)], candidate, strict=True)))
    ratios = sorted(e / c for e, c in pairs)
    low, high = bounds(ratios, INTERVAL_TAIL)
    strong_low, strong_high = bounds(ratios, STRONG_TAIL)
    return Comparison(
        median_us=statistics.median(c for _, c in pairs) * 1e6,
        eager_us=statistics.median(e for e, _ in pairs) * 1e6,
        speedup=statistics.median(ratios),
        # With fewer than 6 rounds there is no 95 % interval: the range of what was seen says at least that.
        low=low if low > 0 else ratios[0],
        high=high if high < inf else ratios[-1],
        strong_low=strong_low,
        strong_high=strong_high,
        rounds=len(candidate),
    )


def quiet_pairs(pairs: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """The rounds in which neither was disturbed, at least ``LEAST_PAIRS`` of them.

    Beside other work a parallel region may wait for a core for milliseconds, and a kernel with fewer regions would win
    by that. A round is judged by the product of both times over their minima: a rule that is the same with the two
    exchanged, so it cannot favour either.
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
    """The largest k for which the k-th smallest of ``count`` samples is below the median but for ``tail``.

    It is above the median when fewer than k samples are below: P(Bin(count, 1/2) <= k - 1).
    """
    rank, chance = 0, 0.0
    while rank <= count:
        chance += comb(count, rank) / 2**count
        if chance > tail:
            return rank
        rank += 1
    return 0


def verdict(comparison: Comparison, margin: float) -> Verdict:
    """Whether the candidate beats eager by the margin; "open" where more rounds could still tell."""
    if comparison.speedup >= 1.0 + margin and comparison.strong_low > 1.0:
        return "won"
    return "lost" if comparison.strong_high < 1.0 + margin else "open"


def wins(comparison: Comparison, margin: float) -> bool:
    """Whether to switch from eager. Eager wins ties and whatever is open at the end."""
    return verdict(comparison, margin) == "won"


def is_clear(comparison: Comparison) -> bool:
    """Whether a win needs no second race."""
    return comparison.strong_low >= CLEAR


def confirms(comparison: Comparison, margin: float) -> bool:
    """Whether a second race bears a win out: the first has ruled out the noise of rounds, the usual bound will do."""
    return comparison.speedup >= 1.0 + margin and comparison.low > 1.0


@dataclass(frozen=True)
class Ruling:
    """Whether to switch from eager, and on which race that stands."""

    is_won: bool
    comparisons: tuple[Comparison, ...]  # of the last race: with eager, and with a kernel that is to be beaten as well
    unconfirmed: tuple[Comparison, ...] = ()  # of the first race, where the second did not bear it out


def decide(
    first: Sequence[Comparison], margin: float, race_again: Callable[[], Sequence[Comparison] | None]
) -> Ruling | None:
    """The rule of all switches: a race that is won by the margin and, unless it is clear, a second one like it.

    ``first``: a candidate against each of its rivals, all of which it has to beat. None where the second race gave no
    result.
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

    A GPU that waits for the script is used better by fewer launches, and a race decides by the larger of host and
    device time then. A script that keeps the GPU busy sees the device's time alone, and must not lose by the switch.
    """
    return on_device.speedup < 1.0 - margin


def clearly_slower(samples: Sequence[float], leader: Sequence[float], factor: float) -> bool:
    """Whether nearly all samples are slower than nearly all of the leader's, by the factor."""
    ours, theirs = sorted(samples), sorted(leader)
    return ours[len(ours) // 4] > factor * theirs[len(theirs) - 1 - len(theirs) // 4]
