"""What fusion gained in a run, from its timed steps: pairs of held-out and routed steps.

In: ``StepSample`` rows in the order in which they ran. Out: speedups with intervals, seconds saved, break-even.
Guarantee: only steps of the same root, close to each other in time and in size, are compared, so that neither a mix of
shapes nor a machine that drifts can make a gain; equal input gives equal output (the bootstrap has a fixed seed).

The definitions, which the reports state as well:
- A **routed** step ran at least one fused kernel; a **held-out** step ran the original module. Steps that were
  disturbed (capture, waiting for tuning) have ``step_us`` of 0 and count for nothing. The first routed step of each
  root and signature and the first held-out step of each root are warm-up and dropped. (Not the first held-out step of
  each signature: it has run routed before, so its shapes are warm, and 1 % of the calls spread over many lengths would
  leave nothing to compare.)
- A **pair** is a held-out step over the median of the up to 6 nearest routed steps within 64 calls. They have the same
  signature; where a root has too many for that, their inputs have up to a quarter more or fewer elements, and their
  times are taken in proportion.
- Of a long run one in ``one_in`` routed steps is kept, evenly, and stands for as many; a held-out step that is kept
  stands for ``held_out_one_in`` of them.
- **Hot** are the signatures that together make up the first 80 % of the routed time.
- The **speedup** is the median over the pairs of all hot signatures; its 95 % interval is bootstrapped.
"""

from __future__ import annotations

import bisect
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autofuse.ir.records import StepSample
from autofuse.ir.steps import PAIR_STEPS, PAIR_WINDOW, at_size, held_out_one_in, is_close

HOT_SHARE = 0.8
PAUSE = 10.0  # times the median step: what a step took longer, the script spent between two calls
MIN_PAIRS_FOR_INTERVAL = 5  # with fewer pairs there is no 95 % interval, whatever a bootstrap gives
MOST_BALANCES = 400
_RESAMPLES = 2000
_MAX_DRAWS = 400_000  # so that the bootstrap of a long run takes under half a second


@dataclass(frozen=True)
class Speedup:
    """Eager's time over the fused time: above 1 is faster. All None where nothing could be compared."""

    median: float | None = None
    low: float | None = None  # 95 % interval, None with too few pairs
    high: float | None = None
    pairs: int = 0

    @property
    def is_gain(self) -> bool:
        """Whether the interval, or the median where there is none, lies above 1."""
        bound = self.low if self.low is not None else self.median
        return bound is not None and bound > 1.0


@dataclass(frozen=True)
class StepRow:
    """The steps of one root with one signature."""

    root: str
    signature: str
    routed: int  # number of steps
    held_out: int
    routed_us: float | None  # median times
    held_out_us: float | None
    time_share: float  # of the routed time of the run, 0..1
    hot: bool
    speedup: Speedup
    ratios: tuple[float, ...] = ()  # of the pairs, in the order in which they ran


@dataclass(frozen=True)
class Balance:
    """What fusion had saved when a step ended, its costs taken off."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Gain:
    """The gain by fusion in a run, from its steps."""

    rows: tuple[StepRow, ...] = ()  # those with the most routed time first
    speedup: Speedup = field(default_factory=Speedup)
    held_out_steps: int = 0
    routed_steps: int = 0
    seconds_saved: float | None = None  # None where nothing could be compared
    break_even_step: int | None = None  # index of the first step at which the costs were saved
    balance: tuple[
        Balance, ...
    ] = ()  # step after step, at most `MOST_BALANCES` of them; all costs count from the start


@dataclass(frozen=True)
class _Series:
    """The steps of one root with one signature that can be compared, without warm-up."""

    root: str
    signature: str
    routed: list[StepSample]
    held_out: list[StepSample]

    @cached_property
    def longest_us(self) -> float:
        """As much of a captured step counts. A step ends when its root is called again, which may be hours later."""
        return PAUSE * statistics.median(step.step_us for step in self.routed) if self.routed else 0.0

    @property
    def routed_total_us(self) -> float:
        return math.fsum(min(step.step_us, self.longest_us) for step in self.routed)


def measure_gain(samples: Sequence[StepSample], cost_seconds: float, one_in: int = 1) -> Gain:
    """Compare the steps of a run, of which one in ``one_in`` is stored; ``cost_seconds``: what fusion has cost."""
    series = sorted(_series(samples), key=lambda item: -item.routed_total_us)
    total_us = math.fsum(item.routed_total_us for item in series)
    rows: list[StepRow] = []
    hot_ratios: list[float] = []
    before_us = 0.0
    for item in series:
        ratios = pair_ratios(item.routed, item.held_out)
        hot = bool(item.routed) and before_us < HOT_SHARE * total_us
        before_us += item.routed_total_us
        hot_ratios += ratios if hot else []
        rows.append(_row(item, total_us, hot, ratios, one_in))
    known = {(row.root, row.signature): row.speedup.median for row in rows if row.speedup.median is not None}
    saved, break_even, balance = _savings(samples, series, known, cost_seconds, one_in)
    return Gain(
        rows=tuple(rows),
        speedup=summarise(hot_ratios),
        held_out_steps=sum(row.held_out for row in rows),
        routed_steps=sum(row.routed for row in rows),
        seconds_saved=saved,
        break_even_step=break_even,
        balance=balance,
    )


def pair_ratios(routed: Sequence[StepSample], held_out: Iterable[StepSample]) -> list[float]:
    """For each held-out step with routed steps near it: its time over the median time of the nearest ones."""
    ordered = sorted(routed, key=lambda step: step.index)
    indices = [step.index for step in ordered]
    ratios = []
    for step in held_out:
        left = bisect.bisect_left(indices, step.index - PAIR_WINDOW)
        right = bisect.bisect_right(indices, step.index + PAIR_WINDOW)
        close = [other for other in ordered[left:right] if is_close(other.elements, step.elements)]
        near = sorted(close, key=lambda other: (abs(other.index - step.index), other.index))[:PAIR_STEPS]
        if near:
            near_us = [at_size(other.step_us, other.elements, step.elements) for other in near]
            ratios.append(step.step_us / statistics.median(near_us))
    return ratios


def summarise(ratios: Sequence[float], seed: int = 0) -> Speedup:
    """Median of the ratios with the 2.5 % and 97.5 % points of bootstrapped medians."""
    if not ratios:
        return Speedup()
    median = statistics.median(ratios)
    if len(ratios) < MIN_PAIRS_FOR_INTERVAL:
        return Speedup(median, None, None, len(ratios))
    draw = random.Random(seed)
    resamples = max(200, min(_RESAMPLES, _MAX_DRAWS // len(ratios)))
    ordered = sorted(ratios)
    medians = sorted(statistics.median(draw.choices(ordered, k=len(ordered))) for _ in range(resamples))
    low, high = medians[int(0.025 * resamples)], medians[min(resamples - 1, int(0.975 * resamples))]
    return Speedup(median, low, high, len(ratios))


# ---- parts --------------------------------------------------------------------------------------------


def _is_valid(step: StepSample) -> bool:
    return step.step_us > 0.0 and math.isfinite(step.step_us)


def _series(samples: Iterable[StepSample]) -> list[_Series]:
    found: dict[tuple[str, str], _Series] = {}
    warm_roots: set[str] = set()
    for step in samples:
        if not _is_valid(step):
            continue
        item = found.setdefault((step.root, step.signature), _Series(step.root, step.signature, [], []))
        if step.held_out:
            if step.root in warm_roots:
                item.held_out.append(step)
            warm_roots.add(step.root)
        elif step.fused_nodes > 0:
            item.routed.append(step)
    for item in found.values():
        del item.routed[:1]
    return [item for item in found.values() if item.routed or item.held_out]


def _row(item: _Series, total_us: float, hot: bool, ratios: Sequence[float], one_in: int) -> StepRow:
    return StepRow(
        root=item.root,
        signature=item.signature,
        routed=len(item.routed) * one_in,
        held_out=len(item.held_out) * held_out_one_in(one_in),
        routed_us=statistics.median(step.step_us for step in item.routed) if item.routed else None,
        held_out_us=statistics.median(step.step_us for step in item.held_out) if item.held_out else None,
        time_share=item.routed_total_us / total_us if total_us else 0.0,
        hot=hot,
        speedup=summarise(ratios),
        ratios=tuple(ratios),
    )


def _savings(
    samples: Sequence[StepSample],
    series: Iterable[_Series],
    known: Mapping[tuple[str, str], float],
    cost_seconds: float,
    one_in: int,
) -> tuple[float | None, int | None, tuple[Balance, ...]]:
    """Seconds that the routed steps of compared signatures saved, the step that had saved the costs, the way there."""
    if not known:
        return None, None, ()
    longest_us = {id(step): item.longest_us for item in series for step in item.routed}
    saved_us, break_even = 0.0, None
    balance = [Balance(0, -cost_seconds)]
    for step in samples:
        ratio = known.get((step.root, step.signature))
        if ratio is None or id(step) not in longest_us:
            continue
        saved_us += min(step.step_us, longest_us[id(step)]) * (ratio - 1.0) * one_in
        balance.append(Balance(step.index, saved_us / 1e6 - cost_seconds))
        if break_even is None and saved_us > 0.0 and saved_us >= cost_seconds * 1e6:
            break_even = step.index
    return saved_us / 1e6, break_even if saved_us > 0.0 else None, _thinned(balance)


def _thinned(balance: Sequence[Balance]) -> tuple[Balance, ...]:
    """Evenly, with the first and the last."""
    every = -(-len(balance) // MOST_BALANCES)
    return (*balance[:-1:every], *balance[-1:])
