"""Where eager's time goes: the operators that the observer timed, the most expensive first.

In: the operator profiles of a run, one for each set of shapes. Out: one line for each operator, and their table.
Guarantee: shares are of the time of all operators that were timed, which are those of sampled steps in eager; a run
that was captured at once has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofuse.ir.records import OpProfile
from autofuse.report import wording
from autofuse.report.table import PlainTable, plain_table

MAX_OPERATORS = 12  # rows of the table; the JSON report has all operators


@dataclass(frozen=True)
class OperatorLine:
    """One operator, with all its overloads and shapes together."""

    operator: str  # "aten.mm"
    calls: int  # timed calls
    time_share: float
    time_us: float  # of all timed calls
    median_us: float  # of a call; each is taken to last as long as the mean for its shapes


def operator_lines(profiles: Iterable[OpProfile]) -> list[OperatorLine]:
    """One line for each operator, with all its overloads, the most expensive first."""
    by_name: dict[str, list[OpProfile]] = {}
    for profile in profiles:
        if profile.calls > 0:
            by_name.setdefault(".".join(profile.overload.split(".")[:2]), []).append(profile)
    total = sum(profile.time_us for found in by_name.values() for profile in found)
    lines = []
    for name, found in by_name.items():
        time_us = sum(profile.time_us for profile in found)
        lines.append(
            OperatorLine(
                operator=name,
                calls=sum(profile.calls for profile in found),
                time_share=time_us / total if total > 0 else 0.0,
                time_us=time_us,
                median_us=_median_us(found),
            )
        )
    return sorted(lines, key=lambda line: (-line.time_us, line.operator))


def _median_us(profiles: Sequence[OpProfile]) -> float:
    """The median time of a call, the lower one of two in the middle."""
    by_time = sorted(profiles, key=lambda profile: profile.time_us / profile.calls)
    left = (sum(profile.calls for profile in profiles) + 1) // 2
    for profile in by_time:
        left -= profile.calls
        if left <= 0:
            return profile.time_us / profile.calls
    return 0.0


def operator_table(lines: Sequence[OperatorLine]) -> PlainTable:
    more = len(lines) - MAX_OPERATORS
    timed = "operators of sampled steps in eager"
    table = plain_table(
        "Where eager's time goes",
        f"{timed}; and {wording.plural(more, 'more operator')}: autofuse report --json" if more > 0 else timed,
    )
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("operator", ratio=1, overflow="fold")
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("sampled", justify="right", no_wrap=True)
    for line in lines[:MAX_OPERATORS]:
        table.add_row(
            wording.percent(line.time_share), line.operator, f"{line.calls:,}",
            wording.microseconds(line.median_us), wording.microseconds(line.time_us),
        )  # fmt: skip
    return table
