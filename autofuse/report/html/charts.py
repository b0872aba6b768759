"""The drawings of a report: pairs of steps, shapes, break-even, and a node before and after.

In: plain data of the report. Out: SVG without a size of its own, so that it fits its column. Colours are classes of the
page's style, so that light, dark and paper each have theirs. Guarantee: nothing is drawn that was not measured; values
beyond the drawn range stay at its edge and are counted in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from autofuse.report import wording
from autofuse.report.html.shapes import ShapeColumn
from autofuse.report.html.svg import drawing, element, line, rect, text, ticks, title
from autofuse.report.statistics import Balance, Speedup

MOST_DOTS = 600
MOST_BOXES = 12


# ---- pairs of steps --------------------------------------------------------------------------------------


def pairs_chart(ratios: Sequence[float], speedup: Speedup) -> Markup:
    """A dot for each held-out step: eager's time over the fused steps' near it. The interval is a band."""
    width, base, left, right = 520.0, 118.0, 14.0, 506.0
    shown = ratios[:: -(-len(ratios) // MOST_DOTS)] if ratios else []
    low, high = _span(ratios, speedup)

    def x(ratio: float) -> float:
        return left + (right - left) * (min(max(ratio, low), high) - low) / (high - low)

    parts = []
    if speedup.low is not None and speedup.high is not None:
        parts.append(rect(x(speedup.low), 12.0, x(speedup.high) - x(speedup.low), base - 12.0, class_="band"))
    for tick in ticks(low, high, 6):
        parts += [line(x(tick), base, x(tick), base + 4, class_="axis"), _label(x(tick), base + 17, f"{tick:g}x")]
    parts += [line(left, base, right, base, class_="axis"), line(x(1.0), 12.0, x(1.0), base, class_="even")]
    stacks: dict[int, int] = {}
    for ratio in sorted(shown):
        column = round(x(ratio) / 6.0)
        height = stacks[column] = stacks.get(column, 0) + 1
        kind = "dot gain" if ratio > 1.0 else "dot loss"
        y = base - 6.0 - 6.0 * ((height - 1) % 17)
        parts.append(element("circle", title(f"{ratio:.3f}x"), cx=column * 6.0, cy=y, r=2.6, class_=kind))
    if speedup.median is not None:
        parts.append(line(x(speedup.median), 8.0, x(speedup.median), base, class_="median"))
    parts.append(text(x(1.0) + 4, 20.0, "as fast as eager", class_="note"))
    outside = sum(not low <= ratio <= high for ratio in ratios)
    beyond = f"; {outside} beyond the edges" if outside else ""
    parts.append(_label((left + right) / 2, base + 34, f"eager's time of a step over the fused time{beyond}"))
    said = f"{wording.plural(len(ratios), 'pair')} of steps, median {wording.times(speedup.median)}"
    return drawing(width, base + 40, said, parts, class_="chart")


def _span(ratios: Sequence[float], speedup: Speedup) -> tuple[float, float]:
    """What the axis shows: all but the farthest hundredth on each side, 1, and the interval."""
    ordered = sorted(ratios)
    cut = len(ordered) // 100
    inner = ordered[cut : len(ordered) - cut] or [1.0]
    marks = [1.0, inner[0], inner[-1], *(value for value in (speedup.low, speedup.high) if value is not None)]
    low, high = min(marks), max(marks)
    margin = max(0.05, 0.06 * (high - low))
    return low - margin, high + margin


# ---- shapes -----------------------------------------------------------------------------------------------


def shapes_chart(columns: Sequence[ShapeColumn]) -> Markup:
    """Above, how many steps had each size; below, eager's time as 1 and the fused time beside it."""
    width, left, right, top, floor, even, bottom = 620.0, 44.0, 612.0, 20.0, 92.0, 128.0, 232.0
    slot = (right - left) / max(1, len(columns))
    most = max((column.steps for column in columns), default=1)
    known = [column.speedup for column in columns if column.speedup.median is not None]
    lowest = min((1.0 / (s.high or s.median or 1.0) for s in known), default=0.5)
    highest = max((1.0 / (s.low or s.median or 1.0) for s in known), default=1.0)
    low, high = min(0.9, lowest) - 0.04, max(1.0, highest) + 0.06

    def y(share: float) -> float:
        return even + (bottom - even) * (high - share) / (high - low)

    parts = [_label(left - 6, top + 8, f"{most:,}", text_anchor="end"), _label(left - 6, floor, "0", text_anchor="end")]
    for tick in ticks(low, high, 4):
        parts += [line(left, y(tick), right, y(tick), class_="grid"),
                  _label(left - 6, y(tick) + 4, f"{tick:g}", text_anchor="end")]  # fmt: skip
    parts.append(line(left, y(1.0), right, y(1.0), class_="even"))
    for number, column in enumerate(columns):
        middle = left + slot * (number + 0.5)
        height = (floor - top) * column.steps / max(1, most)
        steps = title(f"{column.label}: {wording.plural(column.steps, 'step')}")
        parts.append(rect(middle - slot * 0.36, floor - height, slot * 0.72, height, steps, class_="bar"))
        parts += _dumbbell(middle, column, y)
        parts.append(_tilted(middle, bottom + 16, column.label, len(columns)))
    parts += [text(left, 10.0, "steps of each size", class_="note"),
              text(left, even - 8, "time of a step: eager's is 1, lower is faster", class_="note")]  # fmt: skip
    said = "; ".join(f"{column.label}: {wording.times(column.speedup.median)}" for column in columns)
    return drawing(width, bottom + 48, f"Speedup by size. {said}", parts, class_="chart")


def _dumbbell(middle: float, column: ShapeColumn, y: Any) -> Iterator[Markup]:
    speedup = column.speedup
    if speedup.median is None:
        said = title(f"{column.label}: not compared, no held-out step lies near a fused one")
        yield element("circle", said, cx=middle, cy=y(1.0), r=4, class_="dot unknown")
        return
    fused = 1.0 / speedup.median
    said = title(
        f"{column.label}: {wording.times(speedup.median)} {wording.interval(speedup.low, speedup.high)}, "
        f"{wording.percent(column.time_share)} of the time; {wording.microseconds(column.eager_us)} to "
        f"{wording.microseconds(column.fused_us)}"
    )
    kind = "gain" if fused < 1.0 else "loss"
    thickness = 1.5 + 7.0 * min(1.0, column.time_share)
    yield line(middle, y(1.0), middle, y(fused), class_=f"bell {kind}", stroke_width=thickness)
    if speedup.low is not None and speedup.high is not None:
        high, low = y(1.0 / speedup.low), y(1.0 / speedup.high)
        yield line(middle, high, middle, low, class_="whisker")
        yield from (line(middle - 4, at, middle + 4, at, class_="whisker") for at in (high, low))
    yield element("circle", cx=middle, cy=y(1.0), r=4, class_="dot eager")
    yield element("circle", said, cx=middle, cy=y(fused), r=5, class_=f"dot {kind}")


def _tilted(x: float, y: float, words: str, columns: int) -> Markup:
    if columns <= 7:
        return _label(x, y, wording.shorten(words, 14))
    return text(
        x, y, wording.shorten(words, 14), class_="label", text_anchor="end", transform=f"rotate(-32 {x:.1f} {y:.1f})"
    )


# ---- break-even -------------------------------------------------------------------------------------------


def balance_chart(balance: Sequence[Balance], break_even: int | None) -> Markup:
    """Seconds saved less what capture and tuning cost, over the steps of the run."""
    width, height, left, right, top, bottom = 520.0, 196.0, 56.0, 506.0, 16.0, 152.0
    last = max(1, balance[-1].step)
    low, high = min(0.0, *(b.seconds for b in balance)), max(0.0, *(b.seconds for b in balance))
    span = (high - low) or 1.0
    low, high = low - 0.05 * span, high + 0.08 * span

    def x(step: float) -> float:
        return left + (right - left) * step / last

    def y(seconds: float) -> float:
        return bottom - (bottom - top) * (seconds - low) / (high - low)

    parts = []
    for tick in ticks(low, high, 4):
        parts += [line(left, y(tick), right, y(tick), class_="grid"),
                  _label(left - 6, y(tick) + 4, f"{tick:g} s", text_anchor="end")]  # fmt: skip
    for tick in sorted({round(tick) for tick in ticks(0.0, last, 5)}):
        parts.append(_label(x(tick), bottom + 16, f"{tick:,.0f}"))
    parts.append(line(left, y(0.0), right, y(0.0), class_="even"))
    points = [f"{x(b.step):.1f},{y(b.seconds):.1f}" for b in balance]
    parts.append(element("polyline", points=" ".join(points), class_="curve"))
    if break_even is not None and break_even <= last:
        at = x(break_even)
        anchor = "end" if at > (left + right) / 2 else "start"
        beside = at + (-6 if anchor == "end" else 6)
        parts += [
            line(at, top, at, bottom, class_="median"),
            element("circle", cx=at, cy=y(0.0), r=4, class_="dot gain"),
            text(beside, top + 10, f"paid back at step {break_even:,}", class_="note", text_anchor=anchor),
        ]
    else:
        below = y(balance[-1].seconds) + (18 if balance[-1].seconds > low + 0.3 * (high - low) else -8)
        parts.append(text(right, below, _not_yet(balance), class_="note", text_anchor="end"))
    parts.append(_label((left + right) / 2, bottom + 34, "step"))
    said = f"Seconds saved less the cost of capture and tuning: {balance[-1].seconds:.1f} s after {last:,} steps"
    return drawing(width, height, said, parts, class_="chart")


def _not_yet(balance: Sequence[Balance]) -> str:
    """How many more steps would pay the costs back, at the pace of the last half."""
    middle, last = balance[len(balance) // 2], balance[-1]
    pace = (last.seconds - middle.seconds) / max(1, last.step - middle.step)
    if pace <= 0:
        return "not paid back within this run"
    more = float(f"{-last.seconds / pace:.1g}")
    return f"not paid back within this run; about {more:,.0f} more steps would"


# ---- a node, before and after ------------------------------------------------------------------------------


def node_chart(
    form: Mapping[str, Any], before_us: float | None, after_us: float | None, in_their_place: str = "one kernel"
) -> Markup:
    """Eager's kernels as boxes with the tensors between them in memory, and what runs in their place."""
    operations = list(form.get("operations", []))
    shown = operations[:MOST_BOXES]
    rows = len(shown) + (len(operations) > len(shown))
    width, row, top = 560.0, 30.0, 46.0
    height = top + row * rows + 16
    parts = [
        _label(140.0, 18.0, "eager"), _label(420.0, 18.0, "fused"),
        text(140.0, 34.0, f"{wording.plural(len(operations), 'operation')}, {wording.microseconds(before_us)}",
             class_="note", text_anchor="middle"),
        text(420.0, 34.0, f"{in_their_place}, {wording.microseconds(after_us)}", class_="note", text_anchor="middle"),
        rect(310.0, top - 4, 220.0, row * rows + 4, class_="box fused", rx=8),
    ]  # fmt: skip
    places = {op.get("name"): number for number, op in enumerate(shown)}
    for number, op in enumerate(shown):
        y = top + row * number
        name = str(op.get("target", "?")).split(".")[1] if str(op.get("target", "")).count(".") else "?"
        where = title(str(op.get("source", "")) or name)
        parts.append(rect(50.0, y, 180.0, 22.0, where, class_="box eager", rx=5))
        parts += [_label(x, y + 15, wording.shorten(name, 24)) for x in (140.0, 420.0)]
        parts += _edges(op, number, places, top, row)
    if len(operations) > len(shown):
        words = f"and {len(operations) - len(shown)} more"
        parts += [_label(x, top + row * len(shown) + 15, words) for x in (140.0, 420.0)]
    said = f"{len(operations)} operations of eager become {in_their_place}"
    return drawing(width, height, said, parts, class_="chart")


def _edges(op: Mapping[str, Any], number: int, places: Mapping[Any, int], top: float, row: float) -> Iterator[Markup]:
    """A line from each operation that made an argument: straight from the one before, in an arc from earlier ones."""
    for maker in set(_makers(op.get("args", []))):
        source = places.get(maker)
        if source is None or source >= number:
            continue
        start, end = top + row * source + 22.0, top + row * number
        if number - source == 1:
            yield line(140.0, start, 140.0, end, class_="edge")
        else:
            bend = 230.0 + min(50.0, 9.0 * (number - source))
            path = f"M230 {start - 11:.1f} C{bend:.1f} {start - 11:.1f} {bend:.1f} {end + 11:.1f} 230 {end + 11:.1f}"
            yield element("path", d=path, class_="edge")


def _makers(argument: Any) -> Iterator[str]:
    """The names of the operations that an argument reads, also in lists of arguments."""
    if isinstance(argument, list):
        for item in argument:
            yield from _makers(item)
    elif isinstance(argument, dict) and "ref" in argument:
        yield str(argument["ref"])


def _label(x: float, y: float, words: str, **attributes: Any) -> Markup:
    return text(x, y, words, **{"class_": "label", "text_anchor": "middle", **attributes})
