"""Graphs before and after fusion, as a report shows them: nodes, edges, depth, kernels, FLOPs, bytes.

In: the events of a run, one for each captured graph too (``runtime/graphs/metrics_log.py``). Out: one `GraphLine`
for each different graph, and their sum for a step. Guarantee: a graph that was captured again for other sizes is one
line, with the sizes of its most frequent capture; an event of another version's format is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from autofuse.db.rows import EventRow
from autofuse.fusion.stats import FusionStats
from autofuse.ir.records import GRAPH_METRICS
from autofuse.report import wording
from autofuse.report.table import plain_table

MAX_GRAPHS = 12
MAX_PATTERNS = 12


@dataclass(frozen=True)
class Size:
    """The size of one call of a graph, or of a step of all graphs."""

    nodes: float
    edges: float
    depth: float  # edges on the longest path
    kernels: float
    flops: float
    nbytes: float  # bytes read and written

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Size:
        return cls(*(float(data["bytes" if item.name == "nbytes" else item.name]) for item in fields(cls)))

    def to_json(self) -> dict[str, float]:
        values = {("bytes" if item.name == "nbytes" else item.name): getattr(self, item.name) for item in fields(self)}
        return {name: int(value) if float(value).is_integer() else value for name, value in values.items()}


@dataclass(frozen=True)
class GraphLine:
    """A captured graph, before fusion and as planned."""

    phase: str  # "forward", "backward", "inference"
    source: str  # the graph's first source line
    captures: int  # how often it was captured, for different sizes
    calls: int
    before: Size
    after: Size
    times: int = 1  # calls in a step: a block that the model repeats is captured once
    fusion: FusionStats = field(default_factory=FusionStats)  # the planner's counts


@dataclass(frozen=True)
class GraphSum:
    """All graphs of a run: kernels, FLOPs and bytes of a mean step; nodes, edges and depth once per repetition."""

    steps: int
    before: Size
    after: Size


def graph_lines(events: Iterable[EventRow]) -> list[GraphLine]:
    """The graphs of a run in the order of their first capture."""
    lines: dict[tuple[str, str], GraphLine] = {}
    most: dict[tuple[str, str], int] = {}
    for row in events:
        if row.event.kind != GRAPH_METRICS:
            continue
        data = row.event.data
        try:
            key = (str(data["phase"]), str(data["operators"]))
            times = int(data.get("times", 1))
            calls = int(data["calls"])
            before, after = Size.from_json(data["before"]), Size.from_json(data["after"])
            fusion = FusionStats.from_json(data["fusion"]) if "fusion" in data else FusionStats()
        except (KeyError, TypeError, ValueError):
            continue
        known = lines.get(key)
        if known is None:
            lines[key], most[key] = (
                GraphLine(key[0], str(data.get("source", "")), 1, calls, before, after, times, fusion),
                calls,
            )
            continue
        lines[key] = replace(known, captures=known.captures + 1, calls=known.calls + calls)
        if calls > most[key]:
            most[key], lines[key] = calls, replace(lines[key], before=before, after=after, fusion=fusion)
    return list(lines.values())


def sum_graphs(lines: Sequence[GraphLine]) -> GraphSum | None:
    """The sum of all graphs, None without any. Its steps are those of the most frequent graph that is not backward."""
    if not lines:
        return None
    lines = _that_ran(lines)
    steps = max((line.calls // line.times for line in lines if line.phase != "backward"), default=0)
    weights = [line.calls / steps if steps else float(line.times) for line in lines]
    times = [float(line.times) for line in lines]
    before, after = ([getattr(line, name) for line in lines] for name in ("before", "after"))
    return GraphSum(steps, _add(before, weights, times), _add(after, weights, times))


def sum_fusion(lines: Sequence[GraphLine]) -> FusionStats:
    """The sum of the planner's counts, with each graph once."""
    return sum((line.fusion for line in _that_ran(lines)), FusionStats())


def _that_ran(lines: Sequence[GraphLine]) -> Sequence[GraphLine]:
    """All graphs where none has run. A backward graph may be there for the loss alone and for all outputs."""
    return [line for line in lines if line.calls] or lines


def _add(sizes: Sequence[Size], weights: Sequence[float], times: Sequence[float]) -> Size:
    def weighted(name: str, by: Sequence[float] = weights) -> float:
        return float(sum(getattr(size, name) * weight for size, weight in zip(sizes, by, strict=True)))

    return Size(
        nodes=weighted("nodes", times),
        edges=weighted("edges", times),
        depth=weighted("depth", times),
        kernels=weighted("kernels"),
        flops=weighted("flops"),
        nbytes=weighted("nbytes"),
    )


# ---- for people ----------------------------------------------------------------------------------------


def graph_table(lines: Sequence[GraphLine]) -> Table:
    """The table of graphs, before and after fusion, a row for each and one for their sum."""
    more = len(lines) - MAX_GRAPHS
    caption = "before → after all that can be fused; what is measured to pay will be. One call, at the captured sizes"
    if more > 0:
        caption += f"; and {wording.plural(more, 'graph')} more: autofuse report --json"
    table = plain_table("Graphs", caption)
    table.add_column("graph", ratio=1, overflow="fold")
    for column in ("nodes", "edges", "depth", "kernels", "FLOPs", "bytes moved"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines[:MAX_GRAPHS]:
        name = Text(line.phase)
        of_each = f", {line.times} in each step" if line.times > 1 else ""
        name.append(f"\n{wording.plural(line.calls, 'call')}{of_each}", "dim")
        if line.source:
            name.append(f"\n{line.source.split(' ', 1)[0]}", "dim")
        table.add_row(name, *_cells(line.before, line.after))
    total = sum_graphs(lines)
    if total is not None and len(lines) > 1:
        table.add_section()
        name = Text("a step", "bold")
        name.append(f"\nmean of {total.steps:,}", "dim")
        table.add_row(name, *_cells(total.before, total.after))
    return table


def fusion_text(lines: Sequence[GraphLine]) -> str:
    """The planned fusions in sentences; empty where no graph has a fused kernel."""
    stats = sum_fusion(lines)
    if not stats.applied:
        return ""
    text = (
        f"Planned: {wording.plural(stats.applied, 'fused kernel')}, {wording.percent(stats.efficiency)} fewer launches"
    )
    if stats.dynamic:
        text += f"; {stats.dynamic:,} of them for sizes that are only known when they run"
    named = sorted(stats.patterns_used.items(), key=lambda item: -item[1])
    patterns = ", ".join(f"{name} ({count:,})" for name, count in named[:MAX_PATTERNS])
    return f"{text}." + (f" Patterns: {patterns}." if patterns else "")


def _cells(before: Size, after: Size) -> Iterator[Text]:
    for name in ("nodes", "edges", "depth", "kernels"):
        yield _change(getattr(before, name), getattr(after, name), "{:,.0f}".format)
    yield Text(wording.amount(before.flops))
    yield _change(before.nbytes, after.nbytes, wording.amount)


def _change(before: float, after: float, shown: Any) -> Text:
    """A cell such as ``22 → 10``, with the change in percent below."""
    text = Text(f"{shown(before)} → {shown(after)}")
    if before and round(100 * (after / before - 1)):
        text.append(f"\n{100 * (after / before - 1):+.0f} %", "green" if after < before else "yellow")
    return text
