"""The queue of tuning requests between scripts and the daemon, and the daemon's heartbeat.

In: requests of many scripts. Out: the request with the largest expected saving, or the one that a daemon prefers.
Guarantee: a request is handed to one daemon at a time; merging never loses a shape that some run saw.

A script sends counters so far of its run, again and again: the newest of a run replace its older ones and
runs add up, so that sending a request twice counts nothing twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, or_, select, true, update

from autofuse.db import models
from autofuse.db.base import (
    Database,
    NodeText,
    clean,
    key_of,
    now,
    put_buckets,
    put_keys,
    put_nodes,
    record_of,
    shapes_json,
    shapes_of,
    stored_bucket,
    upsert,
)  # fmt: skip
from autofuse.db.rows import DaemonState, QueueStatus, RequestEnd, RequestRow
from autofuse.errors import StoreError
from autofuse.ir.records import DecisionKey, ObservedShape, TuneRequest

NOT_READY = "not possible just now: "  # begins the message of a request whose failure may pass
NOT_READY_SECONDS = 60.0  # before the next try, each of which starts a process that imports torch
FAILED_SECONDS = 24 * 3600.0  # the same for other failures: a compiler may be mended, a machine less full
MAX_ATTEMPTS = 3  # daemons that may die over one request before it counts as failed
NO_RUN = 0  # of a request made outside of a run, or by one that is removed
_LOOKED_AT = 256  # requests with the largest expected savings, among which a daemon may prefer one


@dataclass(frozen=True)
class WaitingRequest:
    """What a daemon knows of a request before it takes it."""

    key: DecisionKey
    calls: int
    unfused_us: float
    estimated_speedup: float


Prefer = Callable[[WaitingRequest], float]


class TuneQueue:
    """The requests of scripts, for daemons."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def add(self, requests: Iterable[TuneRequest], *, force: bool = False) -> int:
        """Queue requests and return how many are newly queued.

        For a key that is queued or in work, shapes and calls are merged and the state stays. A key that is decided,
        with its kernel in the store, or that failed a short while ago, is ignored unless ``force`` asks for it again.
        """
        pieces: list[dict[str, TuneRequest]] = []
        for request in requests:
            digest = request.key.digest
            piece = next((piece for piece in pieces if digest not in piece), None)
            if piece is None:
                pieces.append(piece := {})
            piece[digest] = request
        if not pieces:
            return 0
        with self._file.write() as connection:
            return sum(_add_requests(connection, piece, force) for piece in pieces)

    def take(
        self,
        *devices: str,
        versions: Collection[str] = (),
        pid: int | None = None,
        kind: str = "",
        prefer: Prefer | None = None,
    ) -> TuneRequest | None:
        """Take the queued request with the largest expected saving, or None; ``pid`` (default: ours) works on it now.

        ``devices``: keys of devices, or prefixes of keys that end with a colon (``cuda:``); ``versions``: of keys, any
        if empty; ``kind``: the daemon's, whose lock tells later whether it still works; ``prefer``: take the request
        with the largest value of this instead.
        """
        table, key, bucket, node = models.Request, models.DecisionKeyRow, models.BucketRow, models.Node
        waiting = (  # joined with bucket and node: a row without them can never be taken
            select(key, table)
            .join(key, table.key == key.digest)
            .join(bucket, table.bucket_id == bucket.id)
            .join(node, bucket.fusion_id == node.fusion_id)
            .where(table.status == "queued", is_one_of(key.device, devices))
            .order_by(table.expected_saving_us.desc(), table.calls.desc(), table.created_at, table.key)
            .limit(1 if prefer is None else _LOOKED_AT)
        )
        if versions:
            waiting = waiting.where(key.versions.in_(versions))
        while True:
            with self._file.read() as connection:  # an idle daemon asks often: it must not take the write lock
                rows = connection.execute(waiting).all()
            if not rows:
                return None
            best = rows[0] if prefer is None else max(rows, key=lambda row: prefer(_waiting_of(row)))
            with self._file.write() as connection:
                request = taken(connection, best.key, {"pid": pid or os.getpid(), "host": kind})
            if request is not None:
                return request

    def finish(self, key: DecisionKey, status: RequestEnd, message: str = "") -> None:
        """Store how a request ended: done, failed, or requeued for later. Errors: StoreError if unknown."""
        state = "queued" if status == "requeued" else status
        with self._file.write() as connection:
            done = connection.execute(
                update(models.Request)
                .where(models.Request.key == key.digest)
                .values(status=state, pid=None, host="", message=clean(message), updated_at=now())
            )
            if done.rowcount == 0:
                raise StoreError(f"expected a request for {key.fusion_id[:12]} [{key.bucket}], found none")

    def requeue_failed(self, beginning: str = "") -> int:
        """Queue failed requests whose messages have this beginning again; return how many."""
        table = models.Request
        failed = (table.status == "failed") & table.message.startswith(beginning, autoescape=True)
        with self._file.write() as connection:
            again = {"status": "queued", "attempts": 0, "message": "", "updated_at": now()}
            return connection.execute(update(table).where(failed).values(**again)).rowcount

    def requeue_stale(self, is_served: Callable[[str], bool] = lambda kind: False) -> int:
        """Queue again the requests that daemons had in work when they died; return how many.

        ``is_served``: whether a daemon of a kind runs, in any container.

        A request over which MAX_ATTEMPTS daemons died fails instead: it may be what kills them.
        """
        table = models.Request
        query = select(table.key, table.attempts, table.host).where(table.status == "running")
        requeued = 0
        with self._file.write() as connection:
            for digest, attempts, kind in connection.execute(query).all():
                if is_served(kind):
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

    def length(self, *devices: str, run_id: int | None = None) -> QueueStatus:
        """How many requests are in each state, for these devices (none: all) and, with ``run_id``, of this run."""
        table, key = models.Request, models.DecisionKeyRow
        query = select(table.status, func.count()).join(key, table.key == key.digest).group_by(table.status)
        if devices:
            query = query.where(is_one_of(key.device, devices))
        if run_id is not None:
            query = query.where(table.key.in_(select(models.RequestRun.key).where(models.RequestRun.run_id == run_id)))
        with self._file.read() as connection:
            counts = {row[0]: row[1] for row in connection.execute(query)}
        return QueueStatus(**counts)

    def open_requests(self, known: Mapping[str, float], most: int) -> list[tuple[float, TuneRequest]]:
        """Open requests with the time of their last change, but for those that are ``known`` with it, by digest."""
        table = models.Request
        is_open = table.status.in_(("queued", "running"))
        with self._file.read() as connection:
            times = connection.execute(select(table.key, table.updated_at).where(is_open).order_by(table.updated_at))
            fresh = [row.key for row in times if known.get(row.key) != row.updated_at][:most]
            rows = connection.execute(_whole_requests().where(table.key.in_(fresh))).all()
            return [(row.updated_at, _request_of(connection, row)) for row in rows]

    def largest(self, most: int) -> list[str]:
        """Digests of the queued requests with the largest expected savings."""
        table = models.Request
        query = select(table.key).where(table.status == "queued").order_by(table.expected_saving_us.desc()).limit(most)
        with self._file.read() as connection:
            return list(connection.execute(query).scalars())

    def devices(self) -> list[str]:
        """The keys of all devices for which there are requests."""
        key = models.DecisionKeyRow
        query = select(key.device).join(models.Request, models.Request.key == key.digest).distinct()
        with self._file.read() as connection:
            return sorted(connection.execute(query).scalars())

    def requests(self, fusion_id: str | None = None) -> list[RequestRow]:
        """All requests, or those of one node, in the order of the queue."""
        table, key = models.Request, models.DecisionKeyRow
        query = (
            select(key, table.status, table.calls, table.expected_saving_us, table.message, table.updated_at)
            .join(key, table.key == key.digest)
            .order_by(table.expected_saving_us.desc(), table.calls.desc(), table.created_at, table.key)
        )
        if fusion_id is not None:
            query = query.where(key.fusion_id == fusion_id)
        with self._file.read() as connection:
            return [
                RequestRow(key_of(row), row.status, row.calls, row.expected_saving_us, row.message, row.updated_at)
                for row in connection.execute(query)
            ]


class DaemonLog:
    """What the daemons of a store report about themselves."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def heartbeat(self, state: DaemonState) -> None:
        """Replace the daemon's report."""
        at = now()
        row = {"id": 1, "state": asdict(replace(state, heartbeat_at=at)), "heartbeat_at": at}
        with self._file.write() as connection:
            upsert(connection, models.Daemon, [row], ["id"], ["state", "heartbeat_at"])

    def state(self) -> DaemonState | None:
        """The last report of any daemon of this store, None if there never was one."""
        with self._file.read() as connection:
            state = connection.execute(select(models.Daemon.state)).scalar_one_or_none()
        return None if state is None else record_of(DaemonState, state)


# ---- merging ------------------------------------------------------------------------------------------


def _add_requests(connection: Connection, requests: Mapping[str, TuneRequest], force: bool) -> int:
    """Insert or merge requests by their keys' digests; how many are newly queued.

    A few statements serve all requests: a script that asks for hundreds may run this in its own interpreter.
    """
    table = models.Request
    put_keys(connection, (request.key for request in requests.values()))
    # On a fleet's server others lease rows meanwhile; SQLite, with one writer at a time, has no locks of rows.
    before = select(table).where(table.key.in_(requests)).order_by(table.key).with_for_update()
    old = {row.key: row for row in connection.execute(before)}
    decided = _decided(connection, requests)
    waiting = {digest for digest, row in old.items() if row.status in ("queued", "running")}
    closed = decided | {digest for digest, row in old.items() if row.status == "failed" and not _may_pass_now(row)}
    if not force:
        requests = {d: request for d, request in requests.items() if d in waiting or d not in closed}
    if not requests:
        return 0
    _insert(connection, {d: request for d, request in requests.items() if d not in old})
    calls = _merge(connection, requests)
    rows = []
    for digest, request in requests.items():
        known = old.get(digest)
        unfused_us = request.unfused_us or (known.unfused_us if known else 0.0)
        merged = replace(request, calls=calls[digest], unfused_us=unfused_us)
        again = {} if digest in waiting else {"status": "queued", "attempts": 0, "message": ""}
        kept = {name: getattr(known, name) for name in ("status", "attempts", "message")} if known else {}
        rows.append(
            {
                "digest": digest,
                "calls": merged.calls,
                "unfused_us": merged.unfused_us,
                "estimated_speedup": merged.estimated_speedup,
                "expected_saving_us": merged.expected_saving_us,
                "run_id": request.run_id or (known.run_id if known else None),
                "updated_at": now(),
                **(again or kept),
            }
        )
    names = [name for name in rows[0] if name != "digest"]
    changes: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
    connection.execute(
        update(table).where(table.key == bindparam("of")).values(**changes),
        [{"of": row["digest"], **{f"new_{name}": row[name] for name in names}} for row in rows],
    )
    return len(requests.keys() - waiting)


def _decided(connection: Connection, digests: Iterable[str]) -> set[str]:
    """Digests of keys with a standing decision whose kernel, if any, is in the store: damaged ones were dropped."""
    table, kernel = models.DecisionRow, models.Kernel
    standing = select(func.max(table.id)).where(table.key.in_(digests)).group_by(table.key)
    query = (
        select(table.key)
        .outerjoin(kernel, table.compile_key == kernel.digest)
        .where(table.id.in_(standing), or_(table.compile_key.is_(None), kernel.binary.is_not(None)))
    )
    return set(connection.execute(query).scalars())


def _may_pass_now(row: Any) -> bool:
    """Whether a request that has failed is worth another try."""
    seconds = NOT_READY_SECONDS if row.message.startswith(NOT_READY) else FAILED_SECONDS
    return not 0.0 <= now() - row.updated_at <= seconds  # a time in the future comes from another clock


def _insert(connection: Connection, requests: Mapping[str, TuneRequest]) -> None:
    """Insert rows for new requests, without their counters."""
    if not requests:
        return
    put_nodes(connection, (NodeText(r.key.fusion_id, r.node, _operations(r.node)) for r in requests.values()))
    buckets = put_buckets(connection, ((r.key.fusion_id, r.bucket) for r in requests.values()))
    rows = [
        {
            "key": digest,
            "device": request.key.device,
            "versions": request.key.versions,
            "bucket_id": buckets[request.key.fusion_id, request.bucket.label],
            "calls": 0,
            "unfused_us": 0.0,
            "estimated_speedup": 1.0,
            "expected_saving_us": 0.0,
            "status": "queued",
            "host": "",
            "attempts": 0,
            "message": "",
            "created_at": now(),
            "updated_at": now(),
        }
        for digest, request in requests.items()
    ]
    connection.execute(insert(models.Request), rows)


def _merge(connection: Connection, requests: Mapping[str, TuneRequest]) -> dict[str, int]:
    """Store what each request's run saw so far; the calls of all runs, by digest."""
    table = models.RequestRun
    rows = [
        {"key": digest, "run_id": r.run_id or NO_RUN, "calls": r.calls, "shapes": shapes_json(r.shapes)}
        for digest, r in requests.items()
    ]
    upsert(connection, table, rows, ["key", "run_id"], ["calls", "shapes"])
    query = select(table.key, func.sum(table.calls)).where(table.key.in_(requests)).group_by(table.key)
    return {row[0]: int(row[1]) for row in connection.execute(query)}  # PostgreSQL's sums are decimals


def merged_shapes(connection: Connection, digest: str) -> tuple[ObservedShape, ...]:
    """The shapes of all runs, most frequent first."""
    counts: Counter[tuple[int, ...]] = Counter()
    for shapes in connection.execute(select(models.RequestRun.shapes).where(models.RequestRun.key == digest)).scalars():
        for shape in shapes_of(shapes):
            counts[shape.symbol_values] += shape.calls
    return tuple(ObservedShape(values, calls) for values, calls in counts.most_common())


def _waiting_of(row: Any) -> WaitingRequest:
    return WaitingRequest(key_of(row), row.calls, row.unfused_us, row.estimated_speedup)


def taken(connection: Connection, digest: str, by: Mapping[str, Any]) -> TuneRequest | None:
    """Mark a queued request as in work and return it; None if it is no longer queued, or is damaged and so fails."""
    table = models.Request
    row = connection.execute(_whole_requests().where(table.key == digest, table.status == "queued")).first()
    if row is None:
        return None
    changes: Mapping[str, Any]
    request = None
    try:
        request = _request_of(connection, row)
        changes = {"status": "running", **by}
    except (ValueError, TypeError) as error:  # a damaged row, or one that is not ours
        changes = {"status": "failed", "message": clean(f"not a request: {error}")}
    connection.execute(update(table).where(table.key == digest).values(**changes, updated_at=now()))
    return request


def _whole_requests() -> Any:
    table, key, bucket, node = models.Request, models.DecisionKeyRow, models.BucketRow, models.Node
    return (
        select(key, table, bucket.ranges, node.form)  # the key first: both have a device and versions
        .join(key, table.key == key.digest)
        .join(bucket, table.bucket_id == bucket.id)
        .join(node, bucket.fusion_id == node.fusion_id)
    )


def _request_of(connection: Connection, row: Any) -> TuneRequest:
    return TuneRequest(
        key=key_of(row),
        node=row.form,
        bucket=stored_bucket(row.ranges),
        shapes=merged_shapes(connection, row.key),
        calls=row.calls,
        unfused_us=row.unfused_us,
        estimated_speedup=row.estimated_speedup,
        run_id=row.run_id,
    )


def _operations(node: Mapping[str, Any]) -> str:
    """Short names of a node's operations, as ``NodeUse.operations`` has them."""
    targets = [str(op.get("target", "")) for op in node.get("operations", [])]
    return " + ".join(target.split(".")[1] if target.count(".") else target for target in targets)


def is_one_of(column: Any, devices: Sequence[str]) -> Any:
    """Whether a column is one of these keys, or begins with one that ends with a colon; any where there are none."""
    if not devices:
        return true()
    return or_(*(column.startswith(d, autoescape=True) if d.endswith(":") else column == d for d in devices))
