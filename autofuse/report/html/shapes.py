"""Which sizes a run saw, and what fusion gained for each: the columns of the report's chart of shapes.

In: the steps of a run by signature. Out: a `ShapeColumn` for each size, or range of sizes, of the dim that varies most.
Guarantee: a column's speedup is that of its own pairs of steps; one without any has none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autofuse.report import wording
from autofuse.report.statistics import Speedup, StepRow, summarise

MOST_COLUMNS = 14
_SIZES = re.compile(r"torch\.Size\(\[([\d, -]*)\]\)")


@dataclass(frozen=True)
class ShapeColumn:
    """Steps of neighbouring sizes."""

    label: str  # "65–128", or a whole signature
    steps: int  # routed and held out
    time_share: float  # of the run's routed time, 0..1
    speedup: Speedup
    eager_us: float | None  # the medians of its largest signature
    fused_us: float | None


def varying_dim(rows: Sequence[StepRow]) -> tuple[int, int] | None:
    """(number of the tensor, dim) of the size that takes the most values; None where no size varies."""
    values: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        for place, size in _sizes(row.signature).items():
            values.setdefault(place, set()).add(size)
    varying = [place for place, sizes in values.items() if len(sizes) > 1]
    return max(varying, key=lambda at: (len(values[at]), -at[0], -at[1]), default=None)


def shape_columns(rows: Sequence[StepRow]) -> list[ShapeColumn]:
    """In the order of their sizes; by signature where no size varies."""
    place = varying_dim(rows)
    if place is None:
        return [_column(wording.signature(row.signature), [row]) for row in rows[:MOST_COLUMNS]]
    by_size: dict[int, list[StepRow]] = {}
    for row in rows:
        if (size := _sizes(row.signature).get(place)) is not None:
            by_size.setdefault(size, []).append(row)
    sizes = sorted(by_size)
    if len(sizes) <= MOST_COLUMNS:
        return [_column(f"{size:,}" if size >= 0 else "any", by_size[size]) for size in sizes]
    columns = []
    for start in range(MOST_COLUMNS):
        part = sizes[len(sizes) * start // MOST_COLUMNS : len(sizes) * (start + 1) // MOST_COLUMNS]
        label = f"{part[0]:,}–{part[-1]:,}" if len(part) > 1 else f"{part[0]:,}"
        columns.append(_column(label, [row for size in part for row in by_size[size]]))
    return columns


def _sizes(signature: str) -> dict[tuple[int, int], int]:
    """The sizes of a call's tensors by number and dim."""
    found = {}
    for number, text in enumerate(_SIZES.findall(signature)):
        for dim, size in enumerate(part for part in text.replace(" ", "").split(",") if part):
            found[number, dim] = int(size)
    return found


def _column(label: str, rows: Sequence[StepRow]) -> ShapeColumn:
    largest = max(rows, key=lambda row: row.time_share)
    return ShapeColumn(
        label=label,
        steps=sum(row.routed + row.held_out for row in rows),
        time_share=sum(row.time_share for row in rows),
        speedup=summarise([ratio for row in rows for ratio in row.ratios]),
        eager_us=largest.held_out_us,
        fused_us=largest.routed_us,
    )
