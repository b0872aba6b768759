"""Whole steps as they ran, for `autofuse trace`: which calls of graphs are timed, and what is kept of them.

In: calls of graphs. Out: of the steps that come most often the quickest on eager's kernels and the quickest on their
present ones; at the end of the run one event for each. Guarantee: what is told was recorded in one step. Nodes on a GPU
run beside the host that launches them: their median device times are told, one after another.

A step is what runs from one forward graph to the next one that follows a backward graph, or that has run as often as a
step calls it. Two steps are alike if they call the same graphs with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from autofuse.ir.records import STEP_RECORD, Event
from autofuse.locks import make_lock

if TYPE_CHECKING:
    from autofuse.runtime.graphs.plans import NodeState, Plan
    from autofuse.wrapper.graph_call import Program

TIMED_FIRST = 32  # calls of graphs that are all timed: requests are ordered by what their nodes take
TIMED_ONE_IN = 31  # steps; a timed one runs in Python, which costs a short step as much again
TIMED_AT_EACH = 32  # after so many timed steps they come half as often,
TIMES_RARER = 4  # so many times at most, until there are new kernels
MOST_CALLS = 512  # of a step that is recorded
KEPT_STEPS = 8  # different ones
TOLD_STEPS = 3
MOST_NODES = 20_000  # in all calls of a step that is told

SpeedupOf = Callable[["NodeState"], float]


class Stretch(NamedTuple):
    """When a node ran."""

    slot: int
    end: float  # by ``perf_counter``
    seconds: float


class Stopwatch:
    """In place of the list of times in a timed call: the generated code adds a node's seconds when the node ends."""

    __slots__ = ("began", "stretches")

    def __init__(self) -> None:
        self.began = 0.0
        self.stretches: list[Stretch] = []

    def begin(self) -> None:
        """The plan is found, and whatever had to be waited for is over."""
        self.began = perf_counter()
        self.stretches.clear()

    def __getitem__(self, slot: int) -> float:
        return 0.0

    def __setitem__(self, slot: int, seconds: float) -> None:
        self.stretches.append(Stretch(slot, perf_counter(), seconds))

    def times(self, count: int) -> list[float]:
        """Seconds of each of ``count`` slots."""
        found = [0.0] * count
        for stretch in self.stretches:
            found[stretch.slot] += stretch.seconds
        return found


class RecordedGraph(Protocol):
    """A routed graph."""

    program: Program
    phase: str
    times: int
    on_gpu: bool


@dataclass(frozen=True)
class GraphCall:
    """A timed call of a graph."""

    graph: RecordedGraph
    plan: Plan
    began: float  # by ``perf_counter``
    seconds: float
    stretches: Sequence[Stretch]
    fused: frozenset[int]  # slots on kernels

    @classmethod
    def of(cls, graph: RecordedGraph, plan: Plan, watch: Stopwatch, ended: float) -> GraphCall:
        fused = frozenset(slot for slot, node in enumerate(plan.nodes) if node.tag and not node.covered)
        return cls(graph, plan, watch.began, ended - watch.began, watch.stretches, fused)


@dataclass
class _Kept:
    """Steps that are alike."""

    eager: tuple[GraphCall, ...] = ()  # the quickest; empty: none was recorded
    fused: tuple[GraphCall, ...] = ()
    number: int = 0  # of the last of them

    def add(self, step: tuple[GraphCall, ...], number: int) -> None:
        self.number = number
        if not any(call.fused for call in step):
            self.eager = min(self.eager or step, step, key=_seconds)
        elif [call.fused for call in step] != [call.fused for call in self.fused]:
            self.fused = step
        else:
            self.fused = min(self.fused, step, key=_seconds)

    @property
    def calls(self) -> int:
        """Of its first graph with these sizes."""
        return (self.fused or self.eager)[0].plan.count

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return self.calls * _seconds(self.fused or self.eager)


def _seconds(step: Sequence[GraphCall]) -> float:
    """From its first call to the end of its last one, pauses for tuning included."""
    return step[-1].began + step[-1].seconds - step[0].began


class StepRecords:
    """Of one session."""

    def __init__(self) -> None:
        self._calls = 0  # of graphs
        self._next = 0  # the call from which on a step is timed
        self._is_on = False
        self._in_step = 0  # calls of the present step
        self._seen: dict[RecordedGraph, int] = {}  # how often the step has called each graph
        self._was_backward = False
        self._step: list[GraphCall] = []
        self._steps = 0
        self._timed = 0  # steps since the last news
        self._kept: dict[tuple[tuple[int, int], ...], _Kept] = {}
        self._lock = make_lock()

    def is_due(self, graph: RecordedGraph) -> bool:
        """Whether the call of a graph that begins now is timed; called for each.

        Calls of several threads are taken for one thread's; one that would have to wait for another is not timed.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._is_due(graph)
        finally:
            self._lock.release()

    def _is_due(self, graph: RecordedGraph) -> bool:
        self._calls += 1
        is_backward = graph.phase == "backward"
        if not is_backward and (self._was_backward or self._seen.get(graph, 0) >= graph.times or not self._in_step):
            self._begin()
        self._was_backward = is_backward
        self._in_step += 1
        self._seen[graph] = self._seen.get(graph, 0) + 1
        if self._is_on and self._in_step > MOST_CALLS:
            self._leave()
        return self._is_on

    def add(self, call: GraphCall) -> None:
        """A timed call has ended."""
        self._step.append(call)

    def note_news(self) -> None:
        """There are new kernels: the next step is timed, and then as many as at first."""
        self._timed = self._next = 0

    def _begin(self) -> None:
        """A step begins."""
        if self._is_on:
            self._keep()
            self._leave()
        self._seen.clear()
        self._in_step = 0
        self._is_on = self._calls >= self._next or self._calls <= TIMED_FIRST

    def _leave(self) -> None:
        """Time no more calls for a while."""
        self._is_on = False
        self._step = []
        one_in = TIMED_ONE_IN << min(self._timed // TIMED_AT_EACH, TIMES_RARER)
        self._next = self._calls + (one_in - 1) * self._in_step
        self._timed += 1

    def _keep(self) -> None:
        """Keep the step that has ended, if all of it was timed."""
        step = tuple(self._step)
        if not step or len(step) != self._in_step:
            return
        self._steps += 1
        key = tuple((id(call.graph), call.plan.number) for call in step)
        self._kept.setdefault(key, _Kept()).add(step, self._steps)
        if len(self._kept) > KEPT_STEPS:
            rarest = min(self._kept, key=lambda key: (self._kept[key].number == self._steps, self._kept[key].calls))
            del self._kept[rarest]

    def post(self, speedup_of: SpeedupOf, sources: Callable[[str], str], post: Callable[[Event], None]) -> None:
        """One event for each kind of step that took most of the time; the last step ends with the run."""
        with self._lock:
            if self._is_on:
                self._keep()
                self._leave()
            steps = list(self._kept.values())
        for kept in sorted(steps, key=lambda kept: -kept.seconds)[:TOLD_STEPS]:
            step = kept.fused or kept.eager
            nodes = sum(len(call.plan.nodes) for call in step)
            if nodes <= MOST_NODES:
                message = f"a step of {len(step)} calls of graphs, {nodes} nodes"
                post(Event(STEP_RECORD, message, _told(kept, speedup_of, sources)))


def _told(kept: _Kept, speedup_of: SpeedupOf, sources: Callable[[str], str]) -> dict[str, Any]:
    graphs = list(dict.fromkeys(call.graph for call in kept.fused or kept.eager))
    plans = {call.graph: call.plan for call in kept.fused or kept.eager}
    on_gpu = any(graph.on_gpu for graph in graphs)
    is_eager_known = kept.eager and not (on_gpu and kept.fused)  # a GPU's medians are of the present kernels
    return {
        "calls": kept.calls,
        "is_recorded": not on_gpu,
        "graphs": [_graph(graph, plans[graph], sources) for graph in graphs],
        "eager": _lane(kept.eager, graphs, speedup_of) if is_eager_known else None,
        "fused": _lane(kept.fused, graphs, speedup_of) if kept.fused else None,
    }


def _graph(graph: RecordedGraph, plan: Plan, sources: Callable[[str], str]) -> dict[str, Any]:
    slots = [node.slot.node for node in plan.nodes]
    return {
        "phase": graph.phase,
        "sizes": dict(zip(map(str, graph.program.symbols), plan.key, strict=True)),
        "nodes": [[node.label, node.operation_names, sources(node.fusion_id)] for node in slots],
    }


def _lane(step: Sequence[GraphCall], graphs: Sequence[RecordedGraph], speedup_of: SpeedupOf) -> list[dict[str, Any]]:
    """The calls of a step. ``nodes``: rows of slot, begin and duration, and the kernel's speedup in its race, null for
    eager's kernels. Times in us, begins from that of the step or call."""
    found = []
    at = 0.0
    for call in step:
        spans = list(_medians(call.plan) if call.graph.on_gpu else _recorded(call))
        us = sum(span.us for span in spans) if call.graph.on_gpu else call.seconds * 1e6
        start = at if call.graph.on_gpu else max(at, (call.began - step[0].began) * 1e6)
        rows = [
            [span.slot, round(span.start_us, 3), round(span.us, 3),
             round(speedup_of(call.plan.nodes[span.slot]), 3) if span.slot in call.fused else None]
            for span in spans
        ]  # fmt: skip
        found.append({"graph": graphs.index(call.graph), "start": round(start, 3), "us": round(us, 3), "nodes": rows})
        at = start + us
    return found


class _Span(NamedTuple):
    slot: int
    start_us: float  # from the call's begin
    us: float


def _medians(plan: Plan) -> Iterator[_Span]:
    """Of the nodes of GPUs, one after another."""
    at = 0.0
    for slot, node in enumerate(plan.nodes):
        us = plan.live_us(slot) if node.slot.device.type != "cpu" and not node.covered else 0.0
        if us:
            yield _Span(slot, at, us)
            at += us


def _recorded(call: GraphCall) -> Iterator[_Span]:
    for stretch, start in zip(call.stretches, starts(call.stretches), strict=True):
        yield _Span(stretch.slot, (start - call.began) * 1e6, (stretch.end - start) * 1e6)


def starts(stretches: Sequence[Stretch]) -> list[float]:
    """When each began. Where one overlaps earlier ones it is a group around them, and begins no later than they do:
    a stretch is noted some 0.1 us after its end."""
    found: list[float] = []
    open_ones: list[int] = []  # of those that no group has taken in yet
    for number, stretch in enumerate(stretches):
        start = stretch.end - stretch.seconds
        while open_ones and stretches[open_ones[-1]].end > start:
            start = min(start, found[open_ones.pop()])
        found.append(start)
        open_ones.append(number)
    return found
