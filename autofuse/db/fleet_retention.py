"""What a fleet's server forgets: keys that nobody uses any more, old measurements, hosts that do not come back.

In: bounds, which each host has in its settings. Out: fewer rows, a piece of keys at a time.
Guarantee: a key goes whole, with all that hangs on it, or stays; none goes that a daemon works on. A piece is one short
transaction in a writer's turn, while nobody adds measurements. All keys are looked through once a day, by one daemon at
a time; where it ends, another one goes on. A role that may not delete forgets nothing, which is no error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from autofuse.db import models
from autofuse.db.base import upsert
from autofuse.db.fleet_server import ABOUT_ITSELF, CLOCK, FleetServer, nobody_appends
from autofuse.db.tune_queue import NO_RUN

DAY_SECONDS = 86_400.0  # after a sweep, before the next one
STALE_SECONDS = 600.0  # without a piece; the daemon that swept has ended by then
PIECE = 100  # keys in a transaction, of some 30 to 50 ms
SAMPLE = 2000  # keys whose ages stand for all: digests come in no order
SWEPT_TO, SWEPT_AT = "swept to", "swept at"  # the last key that was looked at, "" after the last of all; and when
_DELETED_FROM = (
    models.MeasurementRow, models.CandidateRow, models.DecisionRow, models.RequestRun, models.Request,
    models.DecisionKeyRow, models.BucketRow, models.Node, models.Run,
)  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """How much a server keeps."""

    days: float  # a key that nobody has asked for, measured or decided on for so long goes; so does a silent host
    keys: int  # beyond so many, those that were not used for the longest go before
    measurements: int  # of one key, the newest


class FleetRetention:
    """One daemon's part in keeping a server within its bounds."""

    def __init__(self, server: FleetServer, bounds: Bounds) -> None:
        self._server = server
        self._bounds = bounds
        self._swept_to: str | None = None  # while this daemon sweeps
        self._used_before = 0.0  # epoch seconds of the server; keys that were last used earlier go

    def begin(self) -> bool:
        """Begin a sweep, or go on with one that was left, if that is due. Raises FleetError."""
        with self._server.read() as connection:
            if not (_may_delete(connection) and _is_due(connection)):
                return False
            self._used_before = self._limit(connection)
        with self._server.write() as connection:
            if not _is_due(connection):
                return False  # another one was faster
            swept_to = _mark(connection, SWEPT_TO)
            _put_marks(connection, swept_to)
        self._swept_to = swept_to
        return True

    def step(self) -> int:
        """Look through the next keys, if this daemon sweeps; how many of them went. Raises FleetError."""
        if self._swept_to is None:
            return 0
        with self._server.write() as connection:
            if not nobody_appends(connection):
                return 0  # at the next round
            if _mark(connection, SWEPT_TO) != self._swept_to:
                self._swept_to = None  # this daemon was away for so long that another one has gone on
                return 0
            last_used = _last_used(connection, self._swept_to, PIECE)
            gone = _not_in_work(connection, [key for key, at in last_used.items() if at < self._used_before])
            _forget(connection, gone)
            kept = [key for key in last_used if key not in gone]
            _thin(connection, kept, self._bounds.measurements)
            silent_since = CLOCK - self._bounds.days * DAY_SECONDS
            _leave_out_hosts(connection, kept, silent_since)
            swept_to = list(last_used)[-1] if len(last_used) == PIECE else ""
            if not swept_to:
                connection.execute(delete(models.Run).where(_last_heard() < silent_since, _is_asked_by_none()))
            _put_marks(connection, swept_to)
        self._swept_to = swept_to or None
        return len(gone)

    def _limit(self, connection: Connection) -> float:
        """The time at which a key must have been used to stay."""
        limit = float(connection.execute(select(CLOCK)).scalar_one()) - self._bounds.days * DAY_SECONDS
        count = connection.execute(select(func.count(models.DecisionKeyRow.digest))).scalar_one()
        if count <= self._bounds.keys:
            return limit
        times = sorted(_last_used(connection, "", SAMPLE).values())
        return max(limit, times[(count - self._bounds.keys) * len(times) // count])


def last_sweep_seconds(server: FleetServer) -> float | None:
    """How long ago a daemon has looked through keys to forget some; None where none ever has. Raises FleetError."""
    with server.read() as connection:
        swept_at = _mark(connection, SWEPT_AT)
        return float(connection.execute(select(CLOCK)).scalar_one()) - float(swept_at) if swept_at else None


# ---- whose turn it is ---------------------------------------------------------------------------


def _may_delete(connection: Connection) -> bool:
    rights = [(table.__tablename__, "DELETE") for table in _DELETED_FROM]
    rights += [(models.FleetMark.__tablename__, right) for right in ("INSERT", "UPDATE")]
    query = select(and_(*(func.has_table_privilege(table, right) for table, right in rights)))
    return bool(connection.execute(query).scalar_one())


def _is_due(connection: Connection) -> bool:
    swept_at = float(_mark(connection, SWEPT_AT) or 0.0)
    pause = STALE_SECONDS if _mark(connection, SWEPT_TO) else DAY_SECONDS
    return float(connection.execute(select(CLOCK)).scalar_one()) - swept_at > pause


def _mark(connection: Connection, name: str) -> str:
    table = models.FleetMark
    query = select(table.value).where(table.server == ABOUT_ITSELF, table.name == name)
    return connection.execute(query).scalar_one_or_none() or ""


def _put_marks(connection: Connection, swept_to: str) -> None:
    at = float(connection.execute(select(CLOCK)).scalar_one())
    values = {SWEPT_TO: swept_to, SWEPT_AT: str(at)}
    rows = [{"server": ABOUT_ITSELF, "name": name, "value": value} for name, value in values.items()]
    upsert(connection, models.FleetMark, rows, ["server", "name"], ["value"])


# ---- keys ---------------------------------------------------------------------------------------


def _last_used(connection: Connection, after: str, most: int) -> dict[str, float]:
    """The next keys, and when each was last asked for, measured or decided on; 0 for what never was."""
    key, request, decision = models.DecisionKeyRow, models.Request, models.DecisionRow
    candidate, measurement = models.CandidateRow, models.MeasurementRow
    following = select(key.digest).where(key.digest > after).order_by(key.digest).limit(most)
    used = dict.fromkeys(connection.execute(following).scalars(), 0.0)
    measured = select(candidate.key, func.max(measurement.at)).join(
        measurement, measurement.candidate_id == candidate.id
    )
    told = (
        select(request.key, request.updated_at).where(request.key.in_(used)),
        select(decision.key, func.max(decision.at)).where(decision.key.in_(used)).group_by(decision.key),
        measured.where(candidate.key.in_(used)).group_by(candidate.key),
    )
    for rows in told:
        for digest, at in connection.execute(rows):
            used[digest] = max(used[digest], at)
    return used


def _not_in_work(connection: Connection, keys: Sequence[str]) -> list[str]:
    """Those of some keys that no daemon works on; their requests are locked. Nobody waits, neither we nor they."""
    table = models.Request
    of_keys = table.key.in_(keys)
    has_ended = or_(table.status != "running", table.lease_until.is_(None), table.lease_until < CLOCK)
    requests = set(connection.execute(select(table.key).where(of_keys)).scalars())
    locked = select(table.key).where(of_keys, has_ended).with_for_update(skip_locked=True)
    free = set(connection.execute(locked).scalars())
    return [key for key in keys if key in free or key not in requests]


def _forget(connection: Connection, keys: Collection[str]) -> None:
    """Delete keys with all that hangs on them, and the nodes that no other key is of."""
    if not keys:
        return
    request, bucket, node = models.Request, models.BucketRow, models.Node
    candidate, measurement = models.CandidateRow, models.MeasurementRow
    of_keys = select(candidate.id).where(candidate.key.in_(keys))
    connection.execute(delete(measurement).where(measurement.candidate_id.in_(of_keys)))
    for table in (candidate, models.DecisionRow, models.RequestRun):
        connection.execute(delete(table).where(table.key.in_(keys)))
    gone = delete(request).where(request.key.in_(keys)).returning(request.bucket_id)
    buckets = connection.execute(gone).scalars().all()
    connection.execute(delete(models.DecisionKeyRow).where(models.DecisionKeyRow.digest.in_(keys)))
    is_left = select(request.key).where(request.bucket_id == bucket.id).exists()
    empty = delete(bucket).where(bucket.id.in_(buckets), ~is_left).returning(bucket.fusion_id)
    nodes = connection.execute(empty).scalars().all()
    has_bucket = select(bucket.id).where(bucket.fusion_id == node.fusion_id).exists()
    connection.execute(delete(node).where(node.fusion_id.in_(nodes), ~has_bucket))


def _thin(connection: Connection, keys: Collection[str], most: int) -> None:
    """Of the measurements of each key, delete all but the newest."""
    candidate, measurement = models.CandidateRow, models.MeasurementRow
    place = func.row_number().over(partition_by=candidate.key, order_by=measurement.id.desc())
    placed = (
        select(measurement.id, place.label("place"))
        .join(candidate, measurement.candidate_id == candidate.id)
        .where(candidate.key.in_(keys))
        .subquery()
    )
    connection.execute(delete(measurement).where(measurement.id.in_(select(placed.c.id).where(placed.c.place > most))))


# ---- hosts --------------------------------------------------------------------------------------


def _last_heard() -> Any:
    return func.coalesce(models.Run.finished_at, models.Run.started_at)


def _is_asked_by_none() -> Any:
    """Of a host: that no request names it. One that fell silent during the sweep may be named until the next."""
    request = models.Request
    return ~select(request.key).where(request.run_id == models.Run.id).exists()


def _leave_out_hosts(connection: Connection, keys: Collection[str], silent_since: Any) -> None:
    """Delete what hosts that were not heard of since, or are gone already, have asked of these keys."""
    asked, request = models.RequestRun, models.Request
    heard_of = select(models.Run.id).where(_last_heard() >= silent_since)
    is_silent = asked.run_id.not_in(heard_of) & (asked.run_id != NO_RUN)
    connection.execute(delete(asked).where(asked.key.in_(keys), is_silent))
    named = update(request).where(request.key.in_(keys), request.run_id.not_in(heard_of))
    connection.execute(named.values(run_id=None))
