"""A step as a Chrome trace, for https://ui.perfetto.dev: where its time goes in eager, and with kernels.

In: the store and a run, whose graphs left the records of single calls (``runtime/call_records.py``). Out: an object in
the Trace Event Format of Chrome: complete events ("X") with times in us, metadata ("M") for names.
Guarantee: what was measured is told from what was put together. Times inside of a call were recorded, in that call. The
calls of a step follow each other without the gaps between them, since they were recorded in different steps. Where no
call on eager's kernels was recorded, the eager lane is an estimate: each kernel's time times its speedup in its race.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofuse.db.rows import EventRow
from autofuse.db.store import Store
from autofuse.errors import UsageError
from autofuse.ir.records import CALL_RECORD
from autofuse.report import wording
from autofuse.report.report import Report, load_report

MOST_SLICES = 100_000  # of a lane; with more, a graph that a step repeats is drawn once
MOST_STEPS = 40
RECORDED, ESTIMATED, MEDIANS = "recorded", "estimated from races", "medians"
_LANES = {"eager": "eager's kernels", "fused": "with fused kernels"}


@dataclass(frozen=True)
class Span:
    """One node in a call; times in us from the call's begin."""

    index: int  # of the node
    start: float
    duration: float
    speedup: float | None = None  # of its kernel, in its race; None where eager's kernels ran


@dataclass(frozen=True)
class Call:
    """One call of a graph, on one lane."""

    how: str  # RECORDED, ESTIMATED or MEDIANS
    duration: float
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Graph:
    """A graph of which a call was recorded."""

    phase: str
    times: int  # calls in a step
    sizes: Mapping[str, int]
    nodes: tuple[tuple[str, str, str], ...]  # label, operations, source
    eager: Call
    fused: Call | None  # None: none of its nodes ran on a kernel


def trace_of(store: Store, run_id: int | None = None) -> dict[str, Any]:
    """The trace of run ``run_id``, by default of the run that a report is about.

    Errors: StoreError for an id that the store does not hold; UsageError where the run left nothing to draw.
    """
    report = load_report(store, run_id)
    if report.run is None:
        raise UsageError(f"expected a run in {report.store}, found none; type: autofuse run SCRIPT.py")
    graphs = graphs_of(store.notes.events(report.run.id))
    if not graphs:
        ended = "has not ended yet" if report.run.finished_at is None else "kept no call of a captured graph"
        raise UsageError(
            f"expected a run with a captured graph, found that run {report.run.id} {ended}; why: autofuse report "
            f"--run {report.run.id}"
        )
    return _document(report, graphs)


def graphs_of(events: Iterable[EventRow]) -> list[Graph]:
    """The graphs of a run in the order of a step; events of another version's format are left out."""
    found = []
    for row in events:
        if row.event.kind == CALL_RECORD:
            try:
                found.append(_graph(row.event.data))
            except (KeyError, TypeError, ValueError, IndexError):
                continue
    return found


def _graph(data: Mapping[str, Any]) -> Graph:
    measured = RECORDED if data["is_recorded"] else MEDIANS
    fused = _call(data["fused"], measured) if data["fused"] is not None else None
    if data["eager"] is not None:
        eager = _call(data["eager"], measured)
    elif fused is not None:
        eager = in_eager(fused)
    else:
        raise ValueError("no call was recorded")
    nodes = tuple((str(label), str(operations), str(source)) for label, operations, source in data["nodes"])
    return Graph(str(data["phase"]), max(1, int(data["times"])), dict(data["sizes"]), nodes, eager, fused)


def _call(data: Mapping[str, Any], how: str) -> Call:
    spans = [
        Span(int(index), float(start), float(us), None if speedup is None else float(speedup))
        for index, start, us, speedup in data["nodes"]
    ]
    return Call(how, float(data["us"]), tuple(sorted(spans, key=lambda span: (span.start, -span.duration))))


def in_eager(fused: Call) -> Call:
    """What the call would be in eager: kernels stretched by their speedups, all else as it was recorded."""
    kernels = sorted(
        (span.start + span.duration, span.duration * (span.speedup - 1.0))
        for span in fused.spans
        if span.speedup is not None
    )
    ends = [end for end, _ in kernels]
    sums = [0.0, *itertools.accumulate(more for _, more in kernels)]

    def moved(at: float) -> float:
        return at + sums[bisect.bisect_right(ends, at)]

    spans = []
    for span in fused.spans:
        start, end = moved(span.start), moved(span.start + span.duration)
        spans.append(Span(span.index, start, end - start))
    return Call(ESTIMATED, moved(fused.duration), tuple(spans))


# ---- the document ----------------------------------------------------------------------------------------


def _document(report: Report, graphs: Sequence[Graph]) -> dict[str, Any]:
    run = report.run
    assert run is not None
    lanes = {"eager": [graph.eager for graph in graphs], "fused": [graph.fused or graph.eager for graph in graphs]}
    events: list[dict[str, Any]] = [_name("process", 0, f"autofuse run {run.id}: {run.command}")]
    for thread, (lane, calls) in enumerate(lanes.items(), 1):
        hows = ", ".join(dict.fromkeys(call.how for call in calls))
        events += [_name("thread", thread, f"{_LANES[lane]} ({hows})"), _order(thread)]
        events += _lane(thread, graphs, calls, _optimizer(report, lane))
    events += [_name("thread", 3, f"whole steps by input ({MEDIANS})"), _order(3), *_steps(report)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run.id,
            "command": run.command,
            "device": run.device.name,
            "versions": run.versions,
            "recorded": "the quickest timed call of a graph; calls of a step are drawn without the gaps between them",
            "estimated from races": "the recorded call with kernels, each kernel stretched by its speedup in its race",
            "medians": "of several calls, drawn one after another",
        },
    }


def _lane(
    thread: int, graphs: Sequence[Graph], calls: Sequence[Call], optimizer: Sequence[tuple[str, float, dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The calls of a step one after another, and in each its nodes; then the optimizer's steps."""
    count = sum(graph.times * (1 + len(call.spans)) for graph, call in zip(graphs, calls, strict=True))
    at = 0.0
    for number, (graph, call) in enumerate(zip(graphs, calls, strict=True), 1):
        times = graph.times if count <= MOST_SLICES else 1
        for repeat in range(1, times + 1):
            which = f" {repeat} of {times}" if times > 1 else ""
            about = {"time": call.how, "calls in a step": graph.times, "sizes": dict(graph.sizes)}
            yield _slice(thread, f"graph {number}, {graph.phase}{which}", call.how, at, call.duration, about)
            for span, after in zip(call.spans, (*call.spans[1:], None), strict=True):
                label, operations, source = graph.nodes[span.index]
                args = {"node": label, "source": source, "time": call.how, "runs on": _runs_on(span, after)}
                if span.speedup is not None:
                    args["speedup in its race"] = wording.times(span.speedup)
                yield _slice(thread, operations or label, call.how, at + span.start, span.duration, args)
            at += call.duration
    for name, duration, args in optimizer:
        yield _slice(thread, name, MEDIANS, at, duration, args)
        at += duration


def _runs_on(span: Span, after: Span | None) -> str:
    if span.speedup is not None:
        return "a fused kernel"
    is_around = after is not None and after.start < span.start + span.duration
    return "its parts, one by one" if is_around else "eager's kernels"


def _optimizer(report: Report, lane: str) -> list[tuple[str, float, dict[str, Any]]]:
    """Steps of optimizers, which belong to no graph, with the medians of their races."""
    found = []
    for line in report.nodes:
        if line.node.startswith("af_optimizer_") and line.unfused_us:
            is_fused = lane == "fused" and line.decision == "fused" and line.fused_us
            duration = line.fused_us if is_fused and line.fused_us else line.unfused_us
            found.append((line.operations, duration, {"node": line.node, "time": "median of its race"}))
    return found


def _steps(report: Report) -> Iterator[dict[str, Any]]:
    """Whole steps, by the shapes of their inputs: held out in eager, and with kernels."""
    at = 0.0
    for row in report.steps[:MOST_STEPS]:
        for name, duration, count in (
            ("eager", row.held_out_us, row.held_out),
            ("with kernels", row.routed_us, row.routed),
        ):
            if duration:
                args = {"input": wording.signature(row.signature), "steps": count}
                yield _slice(3, f"step {name}", MEDIANS, at, duration, args)
                at += duration


def _slice(
    thread: int, name: str, category: str, start: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    """A complete event. In whole nanoseconds, so that rounding keeps slices inside of each other."""
    begin, end = round(start * 1000), round((start + duration) * 1000)
    return {
        "ph": "X", "pid": 1, "tid": thread, "name": name, "cat": category, "ts": begin / 1000,
        "dur": (end - begin) / 1000, "args": args,
    }  # fmt: skip


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": f"{what}_name", "args": {"name": name}}


def _order(thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
