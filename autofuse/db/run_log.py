"""What scripts write into the store and reports read from it: runs, steps, nodes, profiles.

In: records of one run. Out: the same records again, by run. Each method is one short transaction.
Guarantee: ``add_`` appends rows; ``put_`` takes counters so far and replaces the older ones of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Row, func, select, update
from sqlalchemy.dialects.sqlite import insert

from autofuse.db import models
from autofuse.db.base import (
    NodeText,
    StoreBase,
    as_tuples,
    bucket_of,
    clean,
    key_text,
    now,
    put_buckets,
    put_nodes,
    record_of,
    shapes_json,
    shapes_of,
    upsert,
)  # fmt: skip
from autofuse.db.rows import NodeRow, RunRow
from autofuse.db.thinning import Thinning
from autofuse.errors import StoreError
from autofuse.ir.records import (
    DeviceInfo,
    DimHistogram,
    NodeUse,
    OpProfile,
    RunStart,
    RunTotals,
    StepSample,
)  # fmt: skip


class RunLog(StoreBase):
    """The part of the store that runs fill."""

    _device_key: str | None = None  # of the run this object started, the default of roots()
    _versions: str | None = None
    # Buckets by node, label and source: their rows are never deleted, and a script counts its nodes every second.
    _buckets: Mapping[tuple[str, str, str], int] = MappingProxyType({})
    _thinning: tuple[int, Thinning] | None = None  # of the run that samples were added to last

    # ---- runs -----------------------------------------------------------------------------------

    def start_run(self, start: RunStart) -> int:
        """Begin a run and return its id (counting from 1)."""
        device = start.device
        with self._write() as connection:
            row = {"key": device.key}  # a run's device is its CPU; what tells GPUs apart is in their keys
            row |= {name: getattr(device, name) for name in ("kind", "name", "cores", "isa")}
            upsert(connection, models.Device, [row], ["key"], [])
            device_id = connection.execute(select(models.Device.id).where(models.Device.key == device.key)).scalar_one()
            values = {
                "device_id": device_id,
                "command": clean(start.command),
                "versions": start.versions,
                "mode": start.mode,
                "pid": start.pid,
                "settings": dict(start.settings),
                "machine": start.machine,
                "started_at": now(),
            }
            run_id = connection.execute(insert(models.Run).values(**values).returning(models.Run.id)).scalar_one()
        self._device_key, self._versions = device.key, start.versions
        return run_id

    def update_totals(self, run_id: int, totals: RunTotals) -> None:
        """Replace the counters of a run."""
        with self._write() as connection:
            _put_totals(connection, run_id, totals)

    def finish_run(self, run_id: int, totals: RunTotals) -> None:
        """Replace the counters of a run and note its end."""
        with self._write() as connection:
            _put_totals(connection, run_id, totals)
            connection.execute(update(models.Run).where(models.Run.id == run_id).values(finished_at=now()))

    def run(self, run_id: int) -> RunRow:
        """One run. Errors: StoreError for an id that the store does not hold."""
        with self._read() as connection:
            row = connection.execute(_runs().where(models.Run.id == run_id)).one_or_none()
        if row is None:
            newest = self.latest_run()
            known = "found an empty one" if newest is None else f"found ids up to {newest.id}"
            raise StoreError(f"expected run {run_id} in the store {self.path}, {known}; leave --run out for the newest")
        return _run_of(row)

    def runs(self, limit: int | None = None) -> list[RunRow]:
        """Runs, newest first."""
        with self._read() as connection:
            return [_run_of(row) for row in connection.execute(_runs().limit(limit))]

    def latest_run(self, *, with_steps: bool = False, command: str | None = None) -> RunRow | None:
        """The newest run; of those that made at least one step, or ran ``command``, where asked for."""
        query = _runs()
        if command is not None:
            query = query.where(models.Run.command == clean(command))
        series = select(models.StepSeries.run_id).join(
            models.StepSampleRow, models.StepSampleRow.series_id == models.StepSeries.id
        )
        with self._read() as connection:
            timed = set(connection.execute(series.distinct()).scalars()) if with_steps else set()
            for row in connection.execute(query):
                run = _run_of(row)
                # Graphs of torch.compile(backend="autofuse") make steps, but no module's steps that could be timed.
                if not with_steps or run.id in timed or run.totals.steps > 0:
                    return run
        return None

    def last_seconds(self, command: str) -> float:
        """How long the last run of ``command`` took that has ended and did not wait for tuning; 0.0 without one."""
        table = models.Run
        query = (
            select(table.started_at, table.finished_at)
            .where(table.command == clean(command), table.finished_at.is_not(None), table.mode != "wait")
            .order_by(table.id.desc())
            .limit(1)
        )
        with self._read() as connection:
            row = connection.execute(query).first()
        return max(0.0, row.finished_at - row.started_at) if row is not None else 0.0

    def fused_calls(self, run_id: int) -> dict[tuple[str, str], int]:
        """Calls of nodes that ran a fused kernel in a run so far, by node and bucket's label."""
        use, bucket = models.NodeUseRow, models.BucketRow
        query = (
            select(bucket.fusion_id, bucket.label, func.sum(use.fused_calls))
            .join(bucket, use.bucket_id == bucket.id)
            .where(use.run_id == run_id)
            .group_by(bucket.fusion_id, bucket.label)
        )
        with self._read() as connection:
            return {(row[0], row[1]): int(row[2]) for row in connection.execute(query)}

    # ---- steps ----------------------------------------------------------------------------------

    def add_step_samples(self, run_id: int, samples: Iterable[StepSample]) -> None:
        """Append timed steps; ``step_us`` of 0 and less marks one that is not to be compared.

        Of a long run one in so many is kept (`thinning`).
        """
        samples = list(samples)
        if not samples:
            return
        table = models.StepSeries
        names = {(sample.root, sample.signature) for sample in samples}
        with self._write() as connection:
            rows = [{"run_id": run_id, "root": root, "signature": signature} for root, signature in sorted(names)]
            upsert(connection, table, rows, ["run_id", "root", "signature"], [])
            found = connection.execute(select(table.root, table.signature, table.id).where(table.run_id == run_id))
            ids = {(root, signature): series_id for root, signature, series_id in found}
            thinning = self._thinning_of(connection, run_id)
            numbered = [(ids[sample.root, sample.signature], sample) for sample in samples]
            kept = [(number, sample) for number, sample in numbered if thinning.keeps(sample, number)]
            if not kept:
                return
            rows = [
                {
                    "series_id": number,
                    "held_out": sample.held_out,
                    "fused_nodes": sample.fused_nodes,
                    "call_index": sample.index,
                    "step_us": sample.step_us,
                    "elements": sample.elements,
                }
                for number, sample in kept
            ]
            connection.execute(insert(models.StepSampleRow), rows)
            thinning.added(connection, [sample.held_out for _, sample in kept])

    def _thinning_of(self, connection: Connection, run_id: int) -> Thinning:
        if self._thinning is None or self._thinning[0] != run_id:
            self._thinning = run_id, Thinning(connection, run_id)
        return self._thinning[1]

    def step_samples(self, run_id: int) -> list[StepSample]:
        """The timed steps of a run in the order in which they were stored."""
        series, sample = models.StepSeries, models.StepSampleRow
        query = (
            select(
                series.root,
                series.signature,
                sample.held_out,
                sample.fused_nodes,
                sample.call_index,
                sample.step_us,
                sample.elements,
            )
            .join(series, sample.series_id == series.id)
            .where(series.run_id == run_id)
            .order_by(sample.id)
        )
        with self._read() as connection:
            return [StepSample(*row) for row in connection.execute(query)]

    # ---- nodes ----------------------------------------------------------------------------------

    def put_node_uses(self, run_id: int, uses: Iterable[NodeUse]) -> None:
        """Replace the counters of nodes in buckets of this run."""
        uses = list(uses)
        new = {_identity(use): use for use in uses if _identity(use) not in self._buckets}
        known = dict(self._buckets)  # of this transaction, until it is committed
        with self._write() as connection:
            if new:
                put_nodes(
                    connection, (NodeText(u.fusion_id, u.node, u.operations, u.label, u.source) for u in new.values())
                )
                numbers = put_buckets(connection, ((use.fusion_id, use.bucket) for use in new.values()))
                known |= {key: numbers[use.fusion_id, use.bucket.label] for key, use in new.items()}
            rows = [
                {
                    "run_id": run_id,
                    "bucket_id": known[_identity(use)],
                    "calls": use.calls,
                    "fused_calls": use.fused_calls,
                    "live_us": use.live_us,
                    "time_share": use.time_share,
                    "shapes": shapes_json(use.shapes),
                    "source": use.source,
                }
                for use in uses
            ]
            counters = ["calls", "fused_calls", "live_us", "time_share", "shapes", "source"]
            upsert(connection, models.NodeUseRow, rows, ["run_id", "bucket_id"], counters)
        self._buckets = known

    def node_uses(self, run_id: int | None = None, fusion_id: str | None = None) -> list[NodeUse]:
        """Uses of nodes, those with the largest share of time first."""
        use, bucket, node = models.NodeUseRow, models.BucketRow, models.Node
        query = (
            select(
                node.fusion_id, node.form, node.label, node.operations, bucket.ranges, use.calls, use.fused_calls,
                use.live_us, use.time_share, use.shapes, use.source,
            )
            .join(bucket, use.bucket_id == bucket.id)
            .join(node, bucket.fusion_id == node.fusion_id)
            .order_by(use.time_share.desc(), use.calls.desc(), use.id)
        )  # fmt: skip
        if run_id is not None:
            query = query.where(use.run_id == run_id)
        if fusion_id is not None:
            query = query.where(node.fusion_id == fusion_id)
        with self._read() as connection:
            return [
                NodeUse(
                    fusion_id=row.fusion_id,
                    node=row.form,
                    label=row.label,
                    operations=row.operations,
                    bucket=bucket_of(row.ranges),
                    calls=row.calls,
                    fused_calls=row.fused_calls,
                    live_us=row.live_us,
                    time_share=row.time_share,
                    shapes=shapes_of(row.shapes),
                    source=row.source,
                )
                for row in connection.execute(query)
            ]

    def nodes(self, fusion_id: str | None = None) -> list[NodeRow]:
        """All nodes that the store knows, or the one with ``fusion_id``, by label."""
        node = models.Node
        query = select(node.fusion_id, node.label, node.operations, node.form, node.source)
        if fusion_id is not None:
            query = query.where(node.fusion_id == fusion_id)
        with self._read() as connection:
            return [NodeRow(*row) for row in connection.execute(query.order_by(node.label, node.fusion_id))]

    # ---- profiles -------------------------------------------------------------------------------

    def put_op_profiles(self, run_id: int, profiles: Iterable[OpProfile]) -> None:
        """Replace the counters of ops of this run, one row for each set of shapes."""
        profiles = list(profiles)
        ops = [
            {
                "run_id": run_id,
                "overload": profile.overload,
                "module": profile.module,
                "phase": profile.phase,
                "dtypes": key_text(profile.dtypes),
                "device": profile.device,
            }
            for profile in profiles
        ]
        identity = ["run_id", "overload", "module", "phase", "dtypes", "device"]
        table = models.Op
        with self._write() as connection:
            upsert(connection, table, ops, identity, [])
            found = connection.execute(
                select(table.overload, table.module, table.phase, table.dtypes, table.device, table.id).where(
                    table.run_id == run_id
                )
            )
            ids: dict[tuple[Any, ...], int] = {tuple(row[:5]): row[5] for row in found}
            shapes = [
                {
                    "op_id": ids[op["overload"], op["module"], op["phase"], op["dtypes"], op["device"]],
                    "shapes": key_text(profile.shapes),
                    "strides": key_text(profile.strides),
                    "producers": list(profile.producers),
                    "calls": profile.calls,
                    "time_us": profile.time_us,
                }
                for op, profile in zip(ops, profiles, strict=True)
            ]
            upsert(
                connection, models.OpShape, shapes, ["op_id", "shapes", "strides"], ["producers", "calls", "time_us"]
            )

    def op_profiles(self, run_id: int) -> list[OpProfile]:
        """What the observer saw in a run, the most expensive first."""
        op, shape = models.Op, models.OpShape
        query = (
            select(op, shape.shapes, shape.strides, shape.producers, shape.calls, shape.time_us)
            .join(shape, shape.op_id == op.id)
            .where(op.run_id == run_id)
            .order_by(shape.time_us.desc(), shape.id)
        )
        with self._read() as connection:
            return [
                OpProfile(
                    overload=row.overload,
                    module=row.module,
                    phase=row.phase,
                    shapes=as_tuples(json.loads(row.shapes)),
                    dtypes=as_tuples(json.loads(row.dtypes)),
                    strides=as_tuples(json.loads(row.strides)),
                    device=row.device,
                    calls=row.calls,
                    time_us=row.time_us,
                    producers=tuple(row.producers),
                )
                for row in connection.execute(query)
            ]

    def put_dim_histograms(self, run_id: int, histograms: Iterable[DimHistogram]) -> None:
        """Replace the histograms of dims of this run."""
        rows = [
            {
                "run_id": run_id,
                "owner": item.owner,
                "argument": item.argument,
                "dim": item.dim,
                "counts": [list(pair) for pair in item.counts],
                "tail_calls": item.tail_calls,
            }
            for item in histograms
        ]
        with self._write() as connection:
            upsert(
                connection,
                models.DimHistogramRow,
                rows,
                ["run_id", "owner", "argument", "dim"],
                ["counts", "tail_calls"],
            )

    def dim_histograms(self, run_id: int) -> list[DimHistogram]:
        """The histograms of dims of a run, in the order of their first appearance."""
        table = models.DimHistogramRow
        query = (
            select(table.owner, table.argument, table.dim, table.counts, table.tail_calls)
            .where(table.run_id == run_id)
            .order_by(table.id)
        )
        with self._read() as connection:
            return [
                DimHistogram(owner, argument, dim, as_tuples(counts), tail)
                for owner, argument, dim, counts, tail in connection.execute(query)
            ]


# ---- rows -------------------------------------------------------------------------------------------


def _identity(use: NodeUse) -> tuple[str, str, str]:
    return use.fusion_id, use.bucket.label, use.source


def _put_totals(connection: Connection, run_id: int, totals: RunTotals) -> None:
    row = {"run_id": run_id, "values": asdict(totals), "updated_at": now()}
    upsert(connection, models.RunTotal, [row], ["run_id"], ["values", "updated_at"])


def _runs() -> Any:  # a Select, whose number of type arguments differs between SQLAlchemy 2.0 and 2.1
    run, device, total = models.Run, models.Device, models.RunTotal
    return (
        select(
            run.id, run.command, run.versions, run.mode, run.pid, run.settings, run.started_at, run.finished_at,
            run.machine, run.steps_one_in, device.kind, device.name, device.cores, device.isa,
            total.values.label("totals"),
        )
        .join(device, run.device_id == device.id)
        .outerjoin(total, total.run_id == run.id)
        .order_by(run.id.desc())
    )  # fmt: skip


def _run_of(row: Row[Any]) -> RunRow:
    return RunRow(
        id=row.id,
        command=row.command,
        device=DeviceInfo(row.kind, row.name, row.cores, row.isa),
        versions=row.versions,
        mode=row.mode,
        pid=row.pid,
        settings=row.settings,
        started_at=row.started_at,
        finished_at=row.finished_at,
        totals=record_of(RunTotals, row.totals or {}),
        machine=row.machine,
        steps_one_in=row.steps_one_in,
    )
