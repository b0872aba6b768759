"""What scripts write into the store of the parts of their graphs: nodes with their counters, profiles of operators.

In: records of one run. Out: the same records again, by run. Each method is one short transaction.
Guarantee: ``put_`` takes counters so far and replaces the older ones of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from sqlalchemy import func, select

from autofuse.db import models
from autofuse.db.base import (
    Database,
    NodeText,
    as_tuples,
    key_text,
    put_buckets,
    put_nodes,
    shapes_json,
    shapes_of,
    stored_bucket,
    upsert,
)  # fmt: skip
from autofuse.db.rows import NodeRow
from autofuse.ir.records import DimHistogram, NodeUse, OpProfile


class NodeLog:
    """Nodes, and how runs used them."""

    def __init__(self, file: Database) -> None:
        self._file = file
        # Row ids by node, bucket's label and source: a script counts nodes every second, and no such row is deleted.
        self._buckets: Mapping[tuple[str, str, str], int] = MappingProxyType({})

    def put_uses(self, run_id: int, uses: Iterable[NodeUse]) -> None:
        """Replace this run's counters of nodes in buckets."""
        uses = list(uses)
        new = {_identity(use): use for use in uses if _identity(use) not in self._buckets}
        known = dict(self._buckets)  # kept only once the transaction is committed
        with self._file.write() as connection:
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

    def uses(self, run_id: int | None = None, fusion_id: str | None = None) -> list[NodeUse]:
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
        with self._file.read() as connection:
            return [
                NodeUse(
                    fusion_id=row.fusion_id,
                    node=row.form,
                    label=row.label,
                    operations=row.operations,
                    bucket=stored_bucket(row.ranges),
                    calls=row.calls,
                    fused_calls=row.fused_calls,
                    live_us=row.live_us,
                    time_share=row.time_share,
                    shapes=shapes_of(row.shapes),
                    source=row.source,
                )
                for row in connection.execute(query)
            ]

    def known(self, fusion_id: str | None = None) -> list[NodeRow]:
        """All nodes that the store knows, or the one with ``fusion_id``, by label."""
        node = models.Node
        query = select(node.fusion_id, node.label, node.operations, node.form, node.source)
        if fusion_id is not None:
            query = query.where(node.fusion_id == fusion_id)
        with self._file.read() as connection:
            return [NodeRow(*row) for row in connection.execute(query.order_by(node.label, node.fusion_id))]

    def fused_calls(self, run_id: int) -> dict[tuple[str, str], int]:
        """How many calls ran a fused kernel in a run so far, by fusion_id and bucket's label."""
        use, bucket = models.NodeUseRow, models.BucketRow
        query = (
            select(bucket.fusion_id, bucket.label, func.sum(use.fused_calls))
            .join(bucket, use.bucket_id == bucket.id)
            .where(use.run_id == run_id)
            .group_by(bucket.fusion_id, bucket.label)
        )
        with self._file.read() as connection:
            return {(row[0], row[1]): int(row[2]) for row in connection.execute(query)}


class ProfileLog:
    """What the observer saw in runs: operators and sizes of dims."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def put_ops(self, run_id: int, profiles: Iterable[OpProfile]) -> None:
        """Replace this run's counters of operators, one row for each set of shapes."""
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
        with self._file.write() as connection:
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

    def ops(self, run_id: int) -> list[OpProfile]:
        """The operators that the observer saw in a run, the most expensive first."""
        op, shape = models.Op, models.OpShape
        query = (
            select(op, shape.shapes, shape.strides, shape.producers, shape.calls, shape.time_us)
            .join(shape, shape.op_id == op.id)
            .where(op.run_id == run_id)
            .order_by(shape.time_us.desc(), shape.id)
        )
        with self._file.read() as connection:
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

    def put_dims(self, run_id: int, histograms: Iterable[DimHistogram]) -> None:
        """Replace this run's histograms of dims."""
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
        with self._file.write() as connection:
            upsert(
                connection,
                models.DimHistogramRow,
                rows,
                ["run_id", "owner", "argument", "dim"],
                ["counts", "tail_calls"],
            )

    def dims(self, run_id: int) -> list[DimHistogram]:
        """The histograms of dims of a run, in the order of their first appearance."""
        table = models.DimHistogramRow
        query = (
            select(table.owner, table.argument, table.dim, table.counts, table.tail_calls)
            .where(table.run_id == run_id)
            .order_by(table.id)
        )
        with self._file.read() as connection:
            return [
                DimHistogram(owner, argument, dim, as_tuples(counts), tail)
                for owner, argument, dim, counts, tail in connection.execute(query)
            ]


def _identity(use: NodeUse) -> tuple[str, str, str]:
    return use.fusion_id, use.bucket.label, use.source
