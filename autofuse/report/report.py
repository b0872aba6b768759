"""The contents of a report as plain data: the terminal and JSON print this and add nothing.

In: a store and the id of a run. Out: a ``Report``. Guarantee: reads only; a store without runs, and a run in which
nothing was captured or fused, are reports too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from autofuse.db.rows import EventRow, QueueStatus, RequestRow, RunRow, SettingTrial
from autofuse.db.store import Store
from autofuse.ir.commands import script_of
from autofuse.ir.records import (
    DETAILS,
    EAGER,
    PEAK_MEMORY,
    Bucket,
    Decision,
    NodeUse,
    Refusal,
    RootRecord,
)  # fmt: skip
from autofuse.ir.strict import is_strict
from autofuse.report.decided import Decided, decided_of
from autofuse.report.live import LiveVerdicts, live_verdicts
from autofuse.report.metrics import GraphLine, graph_lines
from autofuse.report.operators import OperatorLine, operator_lines
from autofuse.report.statistics import Balance, Gain, Speedup, StepRow, measure_gain
from autofuse.report.strictness import StrictCost, given_up_us, strict_cost


@dataclass(frozen=True)
class Totals:
    """The numbers of a run; None for a number that could not be measured."""

    steps: int = 0
    fused_calls: int = 0
    unfused_calls: int = 0
    speedup: Speedup = field(default_factory=Speedup)  # of hot signatures, against held-out eager steps
    routed_steps: int = 0  # timed steps with fused kernels, warm-up not counted
    held_out_steps: int = 0  # timed eager steps, warm-up not counted
    tuning_seconds: float = 0.0  # of the daemon, for the decisions on this run's requests
    paused_seconds: float = 0.0  # that the script waited for tuning, by the clock
    capture_seconds: float = 0.0
    seconds_saved: float | None = None
    break_even_step: int | None = None
    observer_overhead_percent: float | None = None

    @property
    def fused_share(self) -> float:
        """Share of the nodes' calls that ran a fused kernel."""
        return self.fused_calls / max(1, self.fused_calls + self.unfused_calls)


@dataclass(frozen=True)
class NodeLine:
    """One node in one bucket. Times are those of a call, None if not measured."""

    node: str  # label
    fusion_id: str
    operations: str
    source: str
    bucket: str
    calls: int
    fused_calls: int
    time_share: float  # of the run's timed steps, 0..1
    unfused_us: float | None
    fused_us: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    variant: str | None  # what runs: "eager", "c_generic", ...; None while undecided
    decision: str  # "fused", "eager", or the state of its request: "queued", "running", "failed", "none"
    reason: str  # code, see `DecisionReason`
    detail: str


@dataclass(frozen=True)
class RefusalLine:
    """How often fusions were accepted or refused for one reason."""

    code: str
    accepted: bool
    count: int
    bytes_saved: int
    example: Refusal


@dataclass(frozen=True)
class MemoryLine:
    """The peak of a step's tensors above the memory held when the step began."""

    root: str
    name: str
    signature: str  # the input's
    eager_bytes: int
    routed_bytes: int

    @property
    def ratio(self) -> float:
        """The peak over eager's; below 1 is less."""
        return self.routed_bytes / max(1, self.eager_bytes)


@dataclass(frozen=True)
class Report:
    """Everything that a report shows of a run; ``run`` is None for a store without runs."""

    store: str
    run: RunRow | None = None
    totals: Totals = field(default_factory=Totals)
    nodes: tuple[NodeLine, ...] = ()  # largest share of time first
    operators: tuple[OperatorLine, ...] = ()  # those that the observer timed in eager; largest share of time first
    graphs: tuple[GraphLine, ...] = ()  # captured graphs, before and after fusion
    roots: tuple[RootRecord, ...] = ()
    settings: tuple[SettingTrial, ...] = ()  # trials of this script's process settings, never credited to fusion
    refusals: tuple[RefusalLine, ...] = ()  # most frequent first
    events: tuple[EventRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    balance: tuple[Balance, ...] = ()  # seconds saved less the costs, step after step
    queue: QueueStatus = field(default_factory=QueueStatus)  # the states of this run's requests
    strict: StrictCost | None = None  # None for a run that is not strict
    decided: Decided | None = None  # None for a store without runs
    live_races: LiveVerdicts | None = None  # None where no kernel was compared on the script's own calls
    memory: tuple[MemoryLine, ...] = ()  # one for each root, of its largest measured input; empty if not requested


def run_of(store: Store, run_id: int | None) -> RunRow | None:
    """The run that a report is about; None for a store without runs. Errors: as `load_report`."""
    if run_id is not None:
        return store.runs.get(run_id)
    return store.runs.latest(with_steps=True) or store.runs.latest()


def load_report(store: Store, run_id: int | None = None) -> Report:
    """The report of run ``run_id``; by default of the newest run with steps, else of the newest run.

    Errors: StoreError for an id that the store does not hold.
    """
    run = run_of(store, run_id)
    if run is None:
        return Report(str(store.path))
    roots, events = store.roots.of_run(run.id), store.notes.events(run.id)
    capture_seconds = run.totals.capture_seconds or sum(root.capture_seconds for root in roots)
    # In background mode the daemon goes on for later runs when this one has ended.
    until = run.finished_at if run.finished_at is not None and run.mode != "after" else float("inf")
    history = store.results.history(run_id=run.id)
    tuning_seconds = sum(row.decision.tuning_seconds for row in history if row.at <= until)
    cost = capture_seconds + tuning_cost(run.mode, tuning_seconds, run.totals.paused_seconds)
    gain = measure_gain(store.steps.of_run(run.id), cost, run.steps_one_in)
    uses, decided = store.nodes.uses(run.id), _decided(store, run)
    return Report(
        store=str(store.path),
        run=run,
        totals=_totals(run, gain, capture_seconds, tuning_seconds),
        nodes=tuple(_node_lines(store, run, uses, decided)),
        operators=tuple(operator_lines(store.profiles.ops(run.id))),
        graphs=tuple(graph_lines(events)),
        roots=tuple(roots),
        settings=tuple(trials_of(store.trials.standing(), run)),
        refusals=tuple(count_refusals(store.notes.refusals(run.id))),
        events=tuple(row for row in events if row.event.kind not in DETAILS),
        steps=gain.rows,
        balance=gain.balance,
        queue=store.queue.length(run_id=run.id),
        strict=_strict_cost(store, run, uses, decided) if is_strict(run.versions) else None,
        decided=decided_of(history, uses, decided, _of_others(store, run, uses, decided)),
        live_races=live_verdicts(events),
        memory=tuple(memory_lines(events)),
    )


def tuning_cost(mode: str, tuning_seconds: float, paused_seconds: float) -> float:
    """The seconds that tuning has cost the script, which must be saved, like those of capture, before fusion has paid.

    In ``wait`` mode it is what the script waited: the daemon's start and jobs without a decision count, too. A run of
    an older version has not counted that. In background mode it is what the daemon took, on processors that the script
    might have used. In ``after`` mode tuning begins when the script has ended.
    """
    return {"wait": paused_seconds or tuning_seconds, "after": 0.0}.get(mode, tuning_seconds)


def _totals(run: RunRow, gain: Gain, capture_seconds: float, tuning_seconds: float) -> Totals:
    counted = run.totals
    overhead = 100.0 * counted.observer_seconds / counted.run_seconds if counted.run_seconds > 0 else None
    return Totals(
        steps=counted.steps or gain.routed_steps + gain.held_out_steps,
        fused_calls=counted.fused_calls,
        unfused_calls=counted.unfused_calls,
        speedup=gain.speedup,
        routed_steps=gain.routed_steps,
        held_out_steps=gain.held_out_steps,
        tuning_seconds=tuning_seconds,
        paused_seconds=counted.paused_seconds,
        capture_seconds=capture_seconds,
        seconds_saved=gain.seconds_saved,
        break_even_step=gain.break_even_step,
        observer_overhead_percent=overhead,
    )


# ---- nodes --------------------------------------------------------------------------------------------


def _is_of(run: RunRow, device_key: str) -> bool:
    """Whether a decision for this device may be for a node of the run: for its CPU, or a GPU, which it does not name.

    Nodes of CPUs and nodes of GPUs never have the same fusion_id.
    """
    return device_key == run.device.key or not device_key.startswith("cpu:")


def _decided(store: Store, run: RunRow) -> dict[str, list[Decision]]:
    """The decisions that a run may use, by node, oldest first."""
    decided: dict[str, list[Decision]] = {}
    for _, decision in store.results.decisions(versions=run.versions):
        if _is_of(run, decision.key.device):
            decided.setdefault(decision.key.fusion_id, []).append(decision)
    return decided


def _of_others(
    store: Store, run: RunRow, uses: Iterable[NodeUse], decided: Mapping[str, Sequence[Decision]]
) -> dict[str, list[Decision]]:
    """The standing decisions of other versions on the run's nodes that have none of its own."""
    others: dict[str, list[Decision]] = {}
    open_ones = {use.fusion_id for use in uses} - set(decided)
    for _, decision in store.results.decisions() if open_ones else ():
        if decision.key.fusion_id in open_ones and _is_of(run, decision.key.device):
            others.setdefault(decision.key.fusion_id, []).append(decision)
    return others


def _strict_cost(
    store: Store, run: RunRow, uses: Iterable[NodeUse], decided: Mapping[str, Sequence[Decision]]
) -> StrictCost:
    gains = []
    for use in uses:
        decision = decision_for(use.bucket, decided.get(use.fusion_id, ()))
        if decision is not None:
            gains.append(given_up_us(use, decision, store.results.measurements(use.fusion_id)))
    return strict_cost(gains, run.totals.steps)


def _node_lines(
    store: Store, run: RunRow, uses: Iterable[NodeUse], decided: Mapping[str, Sequence[Decision]]
) -> list[NodeLine]:
    asked = {
        (r.key.fusion_id, r.key.bucket): r
        for r in store.queue.requests()
        if _is_of(run, r.key.device) and r.key.versions == run.versions
    }
    lines = [
        node_line(
            use, decision_for(use.bucket, decided.get(use.fusion_id, ())), asked.get((use.fusion_id, use.bucket.label))
        )
        for use in uses
    ]
    # Nodes outside of timed steps, as those of a script of one step, have no share: their own times order them.
    return sorted(lines, key=lambda line: (-line.time_share, -line.calls * (line.unfused_us or 0.0)))


def decision_for(bucket: Bucket, decisions: Sequence[Decision]) -> Decision | None:
    """The newest decision for a bucket, else for one that contains it; ``decisions`` is oldest first."""
    for decision in reversed(decisions):
        if decision.bucket == bucket:
            return decision
    for decision in reversed(decisions):
        wider = decision.bucket.ranges
        if len(wider) == len(bucket.ranges) and all(
            low <= inner_low and inner_high <= high
            for (low, high), (inner_low, inner_high) in zip(wider, bucket.ranges, strict=True)
        ):
            return decision
    return None


def node_line(use: NodeUse, decision: Decision | None, request: RequestRow | None) -> NodeLine:
    """The line of a node in a bucket: its use, and its decision or the state of its request."""
    if decision is not None:
        variant = decision.candidate.variant
        state, reason, detail = ("eager" if variant == EAGER else "fused"), decision.reason, decision.detail
    else:
        variant = None
        state = request.status if request is not None and request.status != "done" else "none"
        reason = {"queued": "waiting", "running": "tuning", "failed": "failed", "none": "not_asked"}[state]
        detail = request.message if request is not None else ""
    return NodeLine(
        node=use.label or f"node_{use.fusion_id[:12]}",
        fusion_id=use.fusion_id,
        operations=use.operations,
        source=use.source,
        bucket=use.bucket.label,
        calls=use.calls,
        fused_calls=use.fused_calls,
        time_share=use.time_share,
        unfused_us=decision.unfused_us if decision is not None else use.live_us or None,
        fused_us=decision.fused_us if decision is not None else None,
        speedup=decision.speedup if decision is not None else None,
        speedup_low=decision.speedup_low if decision is not None else None,
        speedup_high=decision.speedup_high if decision is not None else None,
        variant=variant,
        decision=state,
        reason=reason,
        detail=detail,
    )


# ---- the rest -----------------------------------------------------------------------------------------


def trials_of(trials: Iterable[SettingTrial], run: RunRow) -> list[SettingTrial]:
    """The trials of a run's script with whatever arguments, since these change from run to run."""
    script = script_of(run.command)
    return [trial for trial in trials if script_of(trial.workload) == script]


def memory_lines(events: Iterable[EventRow]) -> list[MemoryLine]:
    """The last measurement of each root, which had the largest input; events of other formats are left out."""
    names = [item.name for item in fields(MemoryLine)]
    lines: dict[str, MemoryLine] = {}
    for row in events:
        data = row.event.data
        if row.event.kind == PEAK_MEMORY and all(name in data for name in names):
            lines[data["root"]] = MemoryLine(**{name: data[name] for name in names})
    return sorted(lines.values(), key=lambda line: -line.eager_bytes)


def count_refusals(refusals: Iterable[Refusal]) -> list[RefusalLine]:
    """One line for each reason: refused fusions before accepted ones, frequent reasons before rare ones."""
    counts: Counter[tuple[bool, str]] = Counter()
    bytes_saved: Counter[tuple[bool, str]] = Counter()
    examples: dict[tuple[bool, str], Refusal] = {}
    for refusal in refusals:
        key = (refusal.accepted, refusal.code)
        counts[key] += 1
        bytes_saved[key] += refusal.bytes_saved
        examples.setdefault(key, refusal)
    return [
        RefusalLine(code, accepted, counts[accepted, code], bytes_saved[accepted, code], examples[accepted, code])
        for accepted, code in sorted(counts, key=lambda key: (key[0], -counts[key], key[1]))
    ]
