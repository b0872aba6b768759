"""The queue of tuning requests between scripts and the daemon, and the daemon's heartbeat.

In: requests of many scripts. Out: the request with the largest expected saving.
Guarantee: a request is handed to one daemon at a time; merging never loses a shape that some run saw.

A script sends counters so far of its run, again and again: the newest of a run replace its older ones and
runs add up, so that sending a request twice counts nothing twice.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, func, or_, select, update
from sqlalchemy.dialects.sqlite import insert

from autofuse.db import models
from autofuse.db.base import (
    StoreBase,
    as_tuples,
    bucket_of,
    clean,
    key_of,
    now,
    put_bucket,
    put_key,
    put_node,
    record_of,
    shapes_json,
    upsert,
)  # fmt: skip
from autofuse.db.rows import DaemonState, Outcome, QueueStatus, RequestRow
from autofuse.errors import StoreError
from autofuse.ir.records import DecisionKey, ObservedShape, TuneRequest

MAX_ATTEMPTS = 3  # daemons that may die over one request before it counts as failed
_NO_RUN = 0  # a request made outside of a run


class TuneQueue(StoreBase):
    """The part of the store that scripts and the daemon share."""

    def add_requests(self, requests: Iterable[TuneRequest], *, force: bool = False) -> int:
        """Queue requests and return how many of them wait now that did not before.

        A key that is queued or in work merges the observed shapes and calls and keeps its state. One that is
        decided or has failed is ignored, unless ``force`` asks for it anew.
        """
        requests = list(requests)
        if not requests:
            return 0
        with self._write() as connection:
            return sum(_add_request(connection, request, force) for request in requests)

    def next_request(self, *devices: str, versions: str | None = None, pid: int | None = None) -> TuneRequest | None:
        """Take the queued request with the largest expected saving, or None; ``pid`` (ours) works on it now.

        ``devices``: keys of devices, or their beginnings that end with a colon (``cuda:``).
        """
        table, key, bucket, node = models.Request, models.DecisionKeyRow, models.BucketRow, models.Node
        query = (
            select(table, key, bucket.ranges, node.form)
            .join(key, table.key == key.digest)
            .join(bucket, table.bucket_id == bucket.id)
            .join(node, bucket.fusion_id == node.fusion_id)
            .where(table.status == "queued", _is_one_of(key.device, devices))
            .order_by(table.expected_saving_us.desc(), table.calls.desc(), table.created_at, table.key)
            .limit(1)
        )
        if versions is not None:
            query = query.where(key.versions == versions)
        with self._read() as connection:  # an idle daemon asks often: it must not take the write lock
            if connection.execute(query).first() is None:
                return None
        with self._write() as connection:
            row = connection.execute(query).first()
            if row is None:
                return None
            connection.execute(
                update(table)
                .where(table.key == row.key)
                .values(status="running", pid=pid or os.getpid(), host=socket.gethostname(), updated_at=now())
            )
            shapes = _merged_shapes(connection, row.key)
        return TuneRequest(
            key=key_of(row),
            node=row.form,
            bucket=bucket_of(row.ranges),
            shapes=shapes,
            calls=row.calls,
            unfused_us=row.unfused_us,
            estimated_speedup=row.estimated_speedup,
            run_id=row.run_id,
        )

    def finish_request(self, key: DecisionKey, status: Outcome, message: str = "") -> None:
        """Note what became of a request: done, failed, or requeued for later. Errors: StoreError if unknown."""
        state = "queued" if status == "requeued" else status
        with self._write() as connection:
            done = connection.execute(
                update(models.Request)
                .where(models.Request.key == key.digest)
                .values(status=state, pid=None, host="", message=clean(message), updated_at=now())
            )
            if done.rowcount == 0:
                raise StoreError(f"expected a request for {key.fusion_id[:12]} [{key.bucket}], found none")

    def requeue_stale(self, pid_is_alive: Callable[[int], bool]) -> int:
        """Queue again what daemons of this host had in work when they died; return how many.

        A request over which MAX_ATTEMPTS daemons died has failed: it may be what kills them.
        """
        table = models.Request
        query = select(table.key, table.pid, table.attempts).where(
            table.status == "running", table.host == socket.gethostname()
        )
        requeued = 0
        with self._write() as connection:
            for digest, pid, attempts in connection.execute(query).all():
                if pid is not None and pid_is_alive(pid):
                    continue
                lost = attempts + 1 >= MAX_ATTEMPTS
                message = f"{attempts + 1} daemons ended while they worked on it" if lost else ""
                connection.execute(
                    update(table)
                    .where(table.key == digest)
                    .values(
                        status="failed" if lost else "queued",
                        pid=None,
                        host="",
                        attempts=attempts + 1,
                        message=message,
                        updated_at=now(),
                    )
                )
                requeued += not lost
        return requeued

    def queue_length(self, *devices: str, run_id: int | None = None) -> QueueStatus:
        """How many requests are in which state, for these devices; of those that a run asked for, with ``run_id``."""
        table, key = models.Request, models.DecisionKeyRow
        query = select(table.status, func.count()).join(key, table.key == key.digest).group_by(table.status)
        if devices:
            query = query.where(_is_one_of(key.device, devices))
        if run_id is not None:
            query = query.where(table.key.in_(select(models.RequestRun.key).where(models.RequestRun.run_id == run_id)))
        with self._read() as connection:
            counts = {row[0]: row[1] for row in connection.execute(query)}
        return QueueStatus(**counts)

    def requests(self, fusion_id: str | None = None) -> list[RequestRow]:
        """Requests in the order of the queue."""
        table, key = models.Request, models.DecisionKeyRow
        query = (
            select(key, table.status, table.calls, table.expected_saving_us, table.message, table.updated_at)
            .join(key, table.key == key.digest)
            .order_by(table.expected_saving_us.desc(), table.calls.desc(), table.created_at, table.key)
        )
        if fusion_id is not None:
            query = query.where(key.fusion_id == fusion_id)
        with self._read() as connection:
            return [
                RequestRow(key_of(row), row.status, row.calls, row.expected_saving_us, row.message, row.updated_at)
                for row in connection.execute(query)
            ]

    # ---- the daemon -----------------------------------------------------------------------------

    def heartbeat(self, state: DaemonState) -> None:
        """Replace what the daemon says of itself."""
        at = now()
        row = {"id": 1, "state": asdict(replace(state, heartbeat_at=at)), "heartbeat_at": at}
        with self._write() as connection:
            upsert(connection, models.Daemon, [row], ["id"], ["state", "heartbeat_at"])

    def daemon_state(self) -> DaemonState | None:
        """What the last daemon of this store said last, None if there never was one."""
        with self._read() as connection:
            state = connection.execute(select(models.Daemon.state)).scalar_one_or_none()
        return None if state is None else record_of(DaemonState, state)


# ---- merging ------------------------------------------------------------------------------------------


def _add_request(connection: Connection, request: TuneRequest, force: bool) -> bool:
    """Insert or merge one request; whether it waits now and did not before."""
    table = models.Request
    digest = put_key(connection, request.key)
    old = connection.execute(select(table).where(table.key == digest)).one_or_none()
    decided = connection.execute(select(models.DecisionRow.id).where(models.DecisionRow.key == digest).limit(1)).first()
    closed = decided is not None or (old is not None and old.status == "failed")
    waits = old is not None and old.status in ("queued", "running")
    if closed and not force and not waits:
        return False
    if old is None:
        put_node(connection, request.key.fusion_id, request.node, "", _operations(request.node), "")
        connection.execute(
            insert(table).values(
                key=digest,
                bucket_id=put_bucket(connection, request.key.fusion_id, request.bucket),
                calls=0,
                unfused_us=0.0,
                estimated_speedup=1.0,
                expected_saving_us=0.0,
                status="queued",
                host="",
                attempts=0,
                message="",
                created_at=now(),
                updated_at=now(),
            )
        )
    calls = _merge(connection, digest, request)
    merged = replace(request, calls=calls, unfused_us=request.unfused_us or (old.unfused_us if old else 0.0))
    values: dict[str, Any] = {
        "calls": calls,
        "unfused_us": merged.unfused_us,
        "estimated_speedup": merged.estimated_speedup,
        "expected_saving_us": merged.expected_saving_us,
        "run_id": request.run_id or (old.run_id if old else None),
        "updated_at": now(),
    }
    if not waits:
        values |= {"status": "queued", "attempts": 0, "message": ""}
    connection.execute(update(table).where(table.key == digest).values(**values))
    return not waits


def _merge(connection: Connection, digest: str, request: TuneRequest) -> int:
    """Store what the run of ``request`` saw so far; the calls of all runs."""
    table = models.RequestRun
    row = {
        "key": digest,
        "run_id": request.run_id or _NO_RUN,
        "calls": request.calls,
        "shapes": shapes_json(request.shapes),
    }
    upsert(connection, table, [row], ["key", "run_id"], ["calls", "shapes"])
    return connection.execute(select(func.sum(table.calls)).where(table.key == digest)).scalar_one()


def _merged_shapes(connection: Connection, digest: str) -> tuple[ObservedShape, ...]:
    """The shapes of all runs, most frequent first."""
    counts: Counter[tuple[int, ...]] = Counter()
    for shapes in connection.execute(select(models.RequestRun.shapes).where(models.RequestRun.key == digest)).scalars():
        for values, calls in shapes:
            counts[as_tuples(values)] += calls
    return tuple(ObservedShape(values, calls) for values, calls in counts.most_common())


def _operations(node: Mapping[str, Any]) -> str:
    """Short names of a node's operations, as ``NodeUse.operations`` has them."""
    targets = [str(op.get("target", "")) for op in node.get("operations", [])]
    return " + ".join(target.split(".")[1] if target.count(".") else target for target in targets)


def _is_one_of(column: Any, devices: Sequence[str]) -> Any:
    return or_(*(column.startswith(d, autoescape=True) if d.endswith(":") else column == d for d in devices))
