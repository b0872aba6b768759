"""A report as one JSON object, for programs; `json_types` says what is in it, `SCHEMA` says so to them.

In: a ``Report``. Out: a dict of plain values. Guarantee: valid JSON (no NaN, no Infinity) of the schema.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autofuse.db.rows import EventRow, RunRow, SettingTrial
from autofuse.fusion.stats import FusionStats
from autofuse.ir.records import RootRecord
from autofuse.report import json_types as as_type
from autofuse.report.metrics import GraphLine, GraphSum, Size, sum_fusion, sum_graphs
from autofuse.report.report import NodeLine, RefusalLine, Report, Totals
from autofuse.report.statistics import StepRow

SCHEMA = Path(__file__).with_name("report.schema.json")


def report_to_json(report: Report) -> dict[str, Any]:
    """The object that ``autofuse report --json`` prints."""
    total = sum_graphs(report.graphs)
    data = as_type.JsonReport(
        schema_version=as_type.SCHEMA_VERSION,
        store=report.store,
        run=None if report.run is None else _run(report.run),
        totals=_totals(report.totals),
        nodes=[_node(line) for line in report.nodes],
        operators=list(report.operators),
        steps=[_step(row) for row in report.steps],
        graphs=[_graph(line) for line in report.graphs],
        graph_sum=None if total is None else _graph_sum(total),
        fusion=_fusion(sum_fusion(report.graphs)),
        roots=[_root(root) for root in report.roots],
        settings=[_setting(trial) for trial in report.settings],
        refusals=[_refusal(line) for line in report.refusals],
        events=[_event(row) for row in report.events],
        queue=report.queue,
        strict=report.strict,
        decided=report.decided,
        live_races=report.live_races,
        memory=list(report.memory),
    )
    finite: dict[str, Any] = _finite(asdict(data))
    return finite


def _run(run: RunRow) -> as_type.JsonRun:
    return as_type.JsonRun(
        id=run.id,
        command=run.command,
        mode=run.mode,
        device=run.device,
        versions=run.versions,
        pid=run.pid,
        settings=dict(run.settings),
        started_at=run.started_at,
        finished_at=run.finished_at,
        run_seconds=run.totals.run_seconds,
        exit_code=run.totals.exit_code,
        steps_one_in=run.steps_one_in,
    )


def _totals(totals: Totals) -> as_type.JsonTotals:
    return as_type.JsonTotals(
        steps=totals.steps,
        fused_calls=totals.fused_calls,
        unfused_calls=totals.unfused_calls,
        speedup_median=totals.speedup.median,
        speedup_low=totals.speedup.low,
        speedup_high=totals.speedup.high,
        speedup_pairs=totals.speedup.pairs,
        held_out_steps=totals.held_out_steps,
        tuning_seconds=totals.tuning_seconds,
        paused_seconds=totals.paused_seconds,
        seconds_saved=totals.seconds_saved,
        break_even_step=totals.break_even_step,
        observer_overhead_percent=totals.observer_overhead_percent,
        capture_seconds=totals.capture_seconds,
    )


def _node(line: NodeLine) -> as_type.JsonNode:
    return as_type.JsonNode(
        node=line.node,
        operations=line.operations,
        bucket=line.bucket,
        calls=line.calls,
        time_share=line.time_share,
        unfused_us=line.unfused_us,
        fused_us=line.fused_us,
        speedup=line.speedup,
        speedup_low=line.speedup_low,
        speedup_high=line.speedup_high,
        variant=line.variant,
        decision=line.decision,
        reason=line.reason,
        source=line.source,
    )


def _step(row: StepRow) -> as_type.JsonStep:
    return as_type.JsonStep(
        root=row.root,
        signature=row.signature,
        steps=row.routed,
        held_out_steps=row.held_out,
        routed_us=row.routed_us,
        held_out_us=row.held_out_us,
        time_share=row.time_share,
        hot=row.hot,
        speedup=row.speedup.median,
        speedup_low=row.speedup.low,
        speedup_high=row.speedup.high,
    )


def _size(size: Size) -> as_type.JsonSize:
    return as_type.JsonSize(**size.to_json())


def _graph(line: GraphLine) -> as_type.JsonGraph:
    return as_type.JsonGraph(
        phase=line.phase,
        source=line.source,
        captures=line.captures,
        calls=line.calls,
        times=line.times,
        before=_size(line.before),
        after=_size(line.after),
        fusion=_fusion(line.fusion),
    )


def _graph_sum(total: GraphSum) -> as_type.JsonGraphSum:
    return as_type.JsonGraphSum(total.steps, _size(total.before), _size(total.after))


def _fusion(stats: FusionStats) -> as_type.JsonFusion:
    return as_type.JsonFusion(**stats.summary())


def _root(root: RootRecord) -> as_type.JsonRoot:
    return as_type.JsonRoot(
        root=root.root,
        name=root.name,
        state=root.state,
        reason=root.reason,
        detail=root.detail,
        calls=root.calls,
        operations=root.operations,
        eager_seconds=root.eager_seconds,
        capture_seconds=root.capture_seconds,
        predicted_capture_seconds=root.predicted_capture_seconds,
        capture_causes=dict(root.capture_causes),
        kept_graphs=root.kept_graphs,
        dynamic_dims=list(root.dynamic_dims),
    )


def _setting(trial: SettingTrial) -> as_type.JsonSetting:
    return as_type.JsonSetting(
        setting=trial.setting,
        value=trial.value,
        baseline_us=trial.baseline_us,
        with_us=trial.with_us,
        speedup=trial.ratio,
        speedup_low=trial.low,
        speedup_high=trial.high,
        decision=trial.decision,
        reason=trial.reason,
        workload=trial.workload,
    )


def _refusal(line: RefusalLine) -> as_type.JsonRefusal:
    return as_type.JsonRefusal(
        code=line.code,
        accepted=line.accepted,
        count=line.count,
        bytes_saved=line.bytes_saved,
        example=as_type.JsonExample(
            operations=line.example.operations,
            detail=line.example.detail,
            source=line.example.source,
        ),
    )


def _event(row: EventRow) -> as_type.JsonEvent:
    return as_type.JsonEvent(kind=row.event.kind, message=row.event.message, at=row.at, data=dict(row.event.data))


def _finite(value: Any) -> Any:
    """The value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
