"""A report as one JSON object, for programs; ``schema_version`` changes when a key goes or changes its meaning.

In: a ``Report``. Out: a dict of plain values. Guarantee: always valid JSON (no NaN, no Infinity); every key is always
there, null where nothing was measured. Times end in ``_us`` (microseconds) or ``_seconds``; ``started_at`` and
``finished_at`` are UTC epoch seconds; shares are 0 to 1; speedups above 1 are faster.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from autofuse.db.rows import EventRow, RunRow, SettingTrial
from autofuse.ir.records import RootRecord
from autofuse.report.metrics import graphs_to_json
from autofuse.report.report import NodeLine, RefusalLine, Report, Totals
from autofuse.report.statistics import StepRow

SCHEMA_VERSION = 1


def report_to_json(report: Report) -> dict[str, Any]:
    """The object that ``autofuse report --json`` prints."""
    data = {
        "schema_version": SCHEMA_VERSION,
        "store": report.store,
        "run": None if report.run is None else _run(report.run),
        "totals": _totals(report.totals),
        "nodes": [_node(line) for line in report.nodes],
        "operators": [asdict(line) for line in report.operators],
        "steps": [_step(row) for row in report.steps],
        **graphs_to_json(report.graphs),
        "roots": [_root(root) for root in report.roots],
        "settings": [_setting(trial) for trial in report.settings],
        "refusals": [_refusal(line) for line in report.refusals],
        "events": [_event(row) for row in report.events],
        "queue": asdict(report.queue),
        "strict": None if report.strict is None else asdict(report.strict),
        "memory": [asdict(line) for line in report.memory],
    }
    finite: dict[str, Any] = _finite(data)
    return finite


def _run(run: RunRow) -> dict[str, Any]:
    return {
        "id": run.id,
        "command": run.command,
        "mode": run.mode,
        "device": asdict(run.device),
        "versions": run.versions,
        "pid": run.pid,
        "settings": dict(run.settings),
        "started_at": run.started_at,
        "finished_at": run.finished_at,
        "run_seconds": run.totals.run_seconds,
        "exit_code": run.totals.exit_code,
        "steps_one_in": run.steps_one_in,
    }


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "steps": totals.steps,
        "fused_calls": totals.fused_calls,
        "unfused_calls": totals.unfused_calls,
        "speedup_median": totals.speedup.median,
        "speedup_low": totals.speedup.low,
        "speedup_high": totals.speedup.high,
        "speedup_pairs": totals.speedup.pairs,
        "held_out_steps": totals.held_out_steps,
        "tuning_seconds": totals.tuning_seconds,
        "paused_seconds": totals.paused_seconds,
        "seconds_saved": totals.seconds_saved,
        "break_even_step": totals.break_even_step,
        "observer_overhead_percent": totals.observer_overhead_percent,
        "capture_seconds": totals.capture_seconds,
    }


def _node(line: NodeLine) -> dict[str, Any]:
    return {
        "node": line.node,
        "operations": line.operations,
        "bucket": line.bucket,
        "calls": line.calls,
        "time_share": line.time_share,
        "unfused_us": line.unfused_us,
        "fused_us": line.fused_us,
        "speedup": line.speedup,
        "speedup_low": line.speedup_low,
        "speedup_high": line.speedup_high,
        "variant": line.variant,
        "decision": line.decision,
        "reason": line.reason,
        "source": line.source,
    }


def _step(row: StepRow) -> dict[str, Any]:
    return {
        "root": row.root,
        "signature": row.signature,
        "steps": row.routed,
        "held_out_steps": row.held_out,
        "routed_us": row.routed_us,
        "held_out_us": row.held_out_us,
        "time_share": row.time_share,
        "hot": row.hot,
        "speedup": row.speedup.median,
        "speedup_low": row.speedup.low,
        "speedup_high": row.speedup.high,
    }


def _root(root: RootRecord) -> dict[str, Any]:
    return {
        "root": root.root,
        "name": root.name,
        "state": root.state,
        "reason": root.reason,
        "detail": root.detail,
        "calls": root.calls,
        "operations": root.operations,
        "eager_seconds": root.eager_seconds,
        "capture_seconds": root.capture_seconds,
        "predicted_capture_seconds": root.predicted_capture_seconds,
        "capture_causes": dict(root.capture_causes),
        "kept_graphs": root.kept_graphs,
        "dynamic_dims": [list(pair) for pair in root.dynamic_dims],
    }


def _setting(trial: SettingTrial) -> dict[str, Any]:
    return {
        "setting": trial.setting,
        "value": trial.value,
        "baseline_us": trial.baseline_us,
        "with_us": trial.with_us,
        "speedup": trial.ratio,
        "speedup_low": trial.low,
        "speedup_high": trial.high,
        "decision": trial.decision,
        "reason": trial.reason,
        "workload": trial.workload,
    }


def _refusal(line: RefusalLine) -> dict[str, Any]:
    return {
        "code": line.code,
        "accepted": line.accepted,
        "count": line.count,
        "bytes_saved": line.bytes_saved,
        "example": {
            "operations": line.example.operations,
            "detail": line.example.detail,
            "source": line.example.source,
        },
    }


def _event(row: EventRow) -> dict[str, Any]:
    return {"kind": row.event.kind, "message": row.event.message, "at": row.at, "data": dict(row.event.data)}


def _finite(value: Any) -> Any:
    """The value with null in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
