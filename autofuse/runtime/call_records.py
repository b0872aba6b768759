"""Single calls of graphs as they ran: when each node began and how long it took, for `autofuse trace`.

In: timed calls. Out: of each graph the quickest timed call on eager's kernels and the quickest on its present ones, of
the plan that is called most; at the end of the run one event for each graph. Guarantee: what is told was recorded.
Nodes on a GPU run beside the host that launches them: their median device times are told, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from autofuse.ir.records import CALL_RECORD, Event

if TYPE_CHECKING:
    from autofuse.runtime.plans import NodeState, Plan
    from autofuse.wrapper.graph_call import Program

MOST_NODES = 20_000  # of all graphs of a run; further graphs are left out

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

    def __getitem__(self, index: int) -> float:
        return 0.0

    def __setitem__(self, index: int, seconds: float) -> None:
        self.stretches.append(Stretch(index, perf_counter(), seconds))

    def times(self, count: int) -> list[float]:
        """Seconds of each of ``count`` slots."""
        found = [0.0] * count
        for stretch in self.stretches:
            found[stretch.slot] += stretch.seconds
        return found


@dataclass(frozen=True)
class CallRecord:
    """One call of a graph."""

    began: float  # by ``perf_counter``
    seconds: float
    stretches: Sequence[Stretch]
    fused: frozenset[int]  # slots on kernels


class CallRecords:
    """Of one graph."""

    def __init__(self) -> None:
        self.first_at = 0.0  # when its first timed call began
        self.eager: CallRecord | None = None
        self.fused: CallRecord | None = None
        self.plan: Plan | None = None

    def add(self, plan: Plan, watch: Stopwatch, ended: float) -> None:
        """Keep a timed call that is quicker than those before, of the plan that is called most."""
        self.first_at = self.first_at or watch.began
        if self.plan is not plan:
            if self.plan is not None and self.plan.count >= plan.count:
                return
            self.plan, self.eager, self.fused = plan, None, None
        fused = frozenset(index for index, node in enumerate(plan.nodes) if node.tag and not node.covered)
        record, before = CallRecord(watch.began, ended - watch.began, watch.stretches, fused), self.fused
        if not fused:
            self.eager = min(self.eager or record, record, key=_seconds)
        elif before is None or before.fused != fused:
            self.fused = record
        else:
            self.fused = min(before, record, key=_seconds)


class RecordedGraph(Protocol):
    """A routed graph."""

    program: Program
    phase: str
    times: int
    on_gpu: bool
    records: CallRecords

    def calls(self) -> int: ...


def _seconds(record: CallRecord) -> float:
    return record.seconds


def post_records(
    routers: Iterable[RecordedGraph],
    speedup_of: SpeedupOf,
    sources: Callable[[str], str],
    post: Callable[[Event], None],
) -> None:
    """Post one event for each graph of which a call was timed, in the order of their first calls."""
    left = MOST_NODES
    for router in sorted(routers, key=lambda router: router.records.first_at):
        plan = router.records.plan
        if plan is None or len(plan.nodes) > left:
            continue
        left -= len(plan.nodes)
        message = f"a call of a graph, {router.phase}, {len(plan.nodes)} nodes"
        post(Event(CALL_RECORD, message, _told(router, plan, speedup_of, sources)))


def _told(router: RecordedGraph, plan: Plan, speedup_of: SpeedupOf, sources: Callable[[str], str]) -> dict[str, Any]:
    records, slots = router.records, [node.slot.node for node in plan.nodes]
    eager = (
        records.eager if not (router.on_gpu and records.fused) else None
    )  # a GPU's medians are of the present kernels
    return {
        "phase": router.phase,
        "times": router.times,  # calls in a step
        "calls": router.calls(),
        "sizes": dict(zip(map(str, router.program.symbols), plan.key, strict=True)),
        "nodes": [[node.label, node.operation_names, sources(node.fusion_id)] for node in slots],
        "eager": None if eager is None else _call(eager, plan, speedup_of),
        "fused": None if records.fused is None else _call(records.fused, plan, speedup_of),
        "is_recorded": not router.on_gpu,
    }


def _call(record: CallRecord, plan: Plan, speedup_of: SpeedupOf) -> dict[str, Any]:
    """``nodes``: rows of slot, begin and duration in us, and the kernel's speedup in its race, null for eager's."""
    found = list(_medians(plan)) or list(_recorded(record))
    total_us = sum(span.us for span in found) if _is_on_gpu(plan) else record.seconds * 1e6
    rows = [
        [
            span.slot, round(span.start_us, 3), round(span.us, 3),
            round(speedup_of(plan.nodes[span.slot]), 3) if span.slot in record.fused else None,
        ]
        for span in found
    ]  # fmt: skip
    return {"us": round(total_us, 3), "nodes": rows}


class _Span(NamedTuple):
    slot: int
    start_us: float  # from the call's begin
    us: float


def _is_on_gpu(plan: Plan) -> bool:
    return any(node.slot.device.type != "cpu" for node in plan.nodes)


def _medians(plan: Plan) -> Iterator[_Span]:
    """Of the nodes of GPUs, one after another."""
    at = 0.0
    for index, node in enumerate(plan.nodes):
        us = plan.live_us(index) if node.slot.device.type != "cpu" and not node.covered else 0.0
        if us:
            yield _Span(index, at, us)
            at += us


def _recorded(record: CallRecord) -> Iterator[_Span]:
    for stretch, start in zip(record.stretches, _starts(record.stretches), strict=True):
        yield _Span(stretch.slot, (start - record.began) * 1e6, (stretch.end - start) * 1e6)


def _starts(stretches: Sequence[Stretch]) -> list[float]:
    """When each began. Where one overlaps earlier ones it is a group around them, and begins no later than they do:
    a stretch is noted some 0.1 us after its end."""
    starts: list[float] = []
    open_ones: list[int] = []  # of those that no group has taken in yet
    for number, stretch in enumerate(stretches):
        start = stretch.end - stretch.seconds
        while open_ones and stretches[open_ones[-1]].end > start:
            start = min(start, starts[open_ones.pop()])
        starts.append(start)
        open_ones.append(number)
    return starts
