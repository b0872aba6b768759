"""A step as a Chrome trace, for https://ui.perfetto.dev: where its time goes in eager, and with kernels.

In: the store and a run, which recorded single steps (``runtime/graphs/step_records.py``). Out: an object in the Trace
Event Format of Chrome: complete events ("X") with times in us, metadata ("M") for names; a process for each step.
Guarantee: what was measured is told from what was put together. A recorded step is one that ran, gaps included. Where
none on eager's kernels was recorded, its lane is an estimate: each kernel's time times its speedup in its race. The
optimizer's part is the median of its race.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autofuse.db.rows import EventRow
from autofuse.db.store import Store
from autofuse.errors import UsageError
from autofuse.ir.records import STEP_RECORD
from autofuse.report import wording
from autofuse.report.report import Report, load_report

MOST_SHAPES = 40  # of whole steps
RECORDED, ESTIMATED, MEDIANS = "recorded", "estimated from races", "medians"
LANES = ("eager's kernels", "with fused kernels")


@dataclass(frozen=True)
class Span:
    """One node in a call. Times in us from the begin of the step."""

    slot: int  # of the node in its graph
    start: float
    duration: float
    speedup: float | None = None  # of its kernel, in its race; None where eager's kernels ran


@dataclass(frozen=True)
class Call:
    """One call of a graph."""

    graph: int
    start: float
    duration: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Lane:
    """The calls of a step."""

    how: str  # RECORDED, ESTIMATED or MEDIANS
    calls: tuple[Call, ...]

    @property
    def end(self) -> float:
        return self.calls[-1].start + self.calls[-1].duration


@dataclass(frozen=True)
class Graph:
    """A graph that a step calls."""

    phase: str
    sizes: Mapping[str, int]
    nodes: tuple[tuple[str, str, str], ...]  # label, operations, source


@dataclass(frozen=True)
class Step:
    """A step that a run has recorded."""

    count: int  # how often its first graph ran with these sizes
    graphs: tuple[Graph, ...]
    eager: Lane
    fused: Lane  # that on eager's kernels where none of its nodes ran on a kernel


def trace_of(store: Store, run_id: int | None = None) -> dict[str, Any]:
    """The trace of run ``run_id``, by default of the run that a report is about.

    Errors: StoreError for an id that the store does not hold; UsageError where the run left nothing to draw.
    """
    report = load_report(store, run_id)
    if report.run is None:
        raise UsageError(f"expected a run in {report.store}, found none; type: autofuse run SCRIPT.py")
    steps = steps_of(store.notes.events(report.run.id))
    if not steps:
        ended = "has not ended yet" if report.run.finished_at is None else "kept no step of a captured graph"
        raise UsageError(
            f"expected a run with a captured graph, found that run {report.run.id} {ended}; why: autofuse report "
            f"--run {report.run.id}"
        )
    return _document(report, steps)


def steps_of(events: Iterable[EventRow]) -> list[Step]:
    """What a run has recorded, the most time first; events of another version's format are left out."""
    found = []
    for row in events:
        if row.event.kind == STEP_RECORD:
            with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):
                found.append(_step(row.event.data))
    return found


def _step(data: Mapping[str, Any]) -> Step:
    how = RECORDED if data["is_recorded"] else MEDIANS
    graphs = tuple(_graph(graph) for graph in data["graphs"])
    fused = _lane(data["fused"], how) if data["fused"] else None
    if data["eager"]:
        eager = _lane(data["eager"], how)
    elif fused is not None:
        eager = in_eager(fused)
    else:
        raise ValueError("no step was recorded")
    for call in (*eager.calls, *(fused.calls if fused else ())):
        if any(span.slot >= len(graphs[call.graph].nodes) for span in call.spans):
            raise ValueError("a node without a name")
    return Step(int(data["calls"]), graphs, eager, fused or eager)


def _graph(data: Mapping[str, Any]) -> Graph:
    nodes = tuple((str(label), str(operations), str(source)) for label, operations, source in data["nodes"])
    return Graph(str(data["phase"]), dict(data["sizes"]), nodes)


def _lane(calls: Iterable[Mapping[str, Any]], how: str) -> Lane:
    return Lane(how, tuple(_call(call) for call in calls))


def _call(data: Mapping[str, Any]) -> Call:
    begin = float(data["start"])
    spans = [
        Span(int(slot), begin + float(start), float(us), None if speedup is None else float(speedup))
        for slot, start, us, speedup in data["nodes"]
    ]
    ordered = sorted(spans, key=lambda span: (span.start, -span.duration))
    return Call(int(data["graph"]), begin, float(data["us"]), tuple(ordered))


def in_eager(fused: Lane) -> Lane:
    """What the step would be in eager: kernels stretched by their speedups, all else as it was recorded."""
    kernels = sorted(
        (span.start + span.duration, span.duration * (span.speedup - 1.0))
        for call in fused.calls
        for span in call.spans
        if span.speedup is not None
    )
    ends = [end for end, _ in kernels]
    sums = [0.0, *itertools.accumulate(more for _, more in kernels)]

    def stretched(start: float, duration: float) -> tuple[float, float]:
        begin, end = (at + sums[bisect.bisect_right(ends, at)] for at in (start, start + duration))
        return begin, end - begin

    calls = [
        Call(
            call.graph,
            *stretched(call.start, call.duration),
            tuple(Span(span.slot, *stretched(span.start, span.duration)) for span in call.spans),
        )
        for call in fused.calls
    ]
    return Lane(ESTIMATED, tuple(calls))


# ---- the document ----------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where slices go."""

    process: int
    thread: int


def _document(report: Report, steps: Sequence[Step]) -> dict[str, Any]:
    run = report.run
    assert run is not None
    events: list[dict[str, Any]] = []
    for process, step in enumerate(steps, 1):
        sizes = ", ".join(f"{name}={size}" for graph in step.graphs[:1] for name, size in graph.sizes.items())
        events.append(
            _name("process", _Place(process, 0), f"a step{f' with {sizes}' * bool(sizes)}, ran {step.count} times")
        )
        for thread, (name, lane) in enumerate(zip(LANES, (step.eager, step.fused), strict=True), 1):
            place = _Place(process, thread)
            events += [_name("thread", place, f"{name} ({lane.how})"), _order(place)]
            events += _slices(place, step.graphs, lane)
            events += _optimizers(place, report, lane.end)
    last = _Place(len(steps) + 1, 1)
    events += [_name("process", last, "whole steps, by the shapes of the input"), *_whole_steps(last, report)]
    events += [_name("thread", last, MEDIANS), _order(last)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run.id,
            "command": run.command,
            "device": run.device.name,
            "versions": run.versions,
            RECORDED: "one step as it ran, the quickest of those that were timed",
            ESTIMATED: "the recorded step with kernels, each kernel stretched by its speedup in its race",
            MEDIANS: "of several calls, drawn one after another",
        },
    }


def _slices(place: _Place, graphs: Sequence[Graph], lane: Lane) -> Iterator[dict[str, Any]]:
    """The calls of a step, and in each its nodes."""
    for call in lane.calls:
        graph = graphs[call.graph]
        about = {"time": lane.how, "sizes": dict(graph.sizes)}
        yield _slice(place, f"graph {call.graph + 1}, {graph.phase}", lane.how, (call.start, call.duration), about)
        for span, after in itertools.zip_longest(call.spans, call.spans[1:]):
            label, operations, source = graph.nodes[span.slot]
            args = {"node": label, "source": source, "time": lane.how, "runs on": _runs_on(span, after)}
            if span.speedup is not None:
                args["speedup in its race"] = wording.times(span.speedup)
            yield _slice(place, operations or label, lane.how, (span.start, span.duration), args)


def _runs_on(span: Span, after: Span | None) -> str:
    if span.speedup is not None:
        return "a fused kernel"
    is_around = after is not None and after.start < span.start + span.duration
    return "its parts, one by one" if is_around else "eager's kernels"


def _optimizers(place: _Place, report: Report, at: float) -> Iterator[dict[str, Any]]:
    """Steps of optimizers, which belong to no graph, with the medians of their races."""
    for line in report.nodes:
        if line.node.startswith("af_optimizer_") and line.unfused_us:
            is_fused = LANES[place.thread - 1] == LANES[1] and line.decision == "fused"
            duration = (line.fused_us if is_fused else None) or line.unfused_us
            args = {"node": line.node, "time": "median of its race"}
            yield _slice(place, line.operations, MEDIANS, (at, duration), args)
            at += duration


def _whole_steps(place: _Place, report: Report) -> Iterator[dict[str, Any]]:
    """Held out in eager, and with kernels."""
    at = 0.0
    for row in report.steps[:MOST_SHAPES]:
        for name, duration, count in (
            ("eager", row.held_out_us, row.held_out),
            ("with kernels", row.routed_us, row.routed),
        ):
            if duration:
                args = {"input": wording.signature(row.signature), "steps": count}
                yield _slice(place, f"step {name}", MEDIANS, (at, duration), args)
                at += duration


def _slice(place: _Place, name: str, category: str, span: tuple[float, float], args: dict[str, Any]) -> dict[str, Any]:
    """A complete event; ``span``: begin and duration in us. In whole nanoseconds, so that rounding keeps slices inside
    of each other."""
    begin, end = round(span[0] * 1000), round((span[0] + span[1]) * 1000)
    return {
        "ph": "X", "pid": place.process, "tid": place.thread, "name": name, "cat": category, "ts": begin / 1000,
        "dur": (end - begin) / 1000, "args": args,
    }  # fmt: skip


def _name(what: str, place: _Place, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": place.process, "tid": place.thread, "name": f"{what}_name", "args": {"name": name}}


def _order(place: _Place) -> dict[str, Any]:
    order = {"sort_index": place.thread}
    return {"ph": "M", "pid": place.process, "tid": place.thread, "name": "thread_sort_index", "args": order}
