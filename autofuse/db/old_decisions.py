"""Decisions that were made long ago, or for other sizes than come now, and that scripts still use.

In: the age at which a decision is old, or how much sizes must have changed. Out: the decision of that kind that matters
most, with its request, which is in work from then on.
Guarantee: a decision stands until another one replaces it, whatever becomes of the work.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, select, update

from autofuse.db import models
from autofuse.db.base import Database, now, shapes_json, shapes_of
from autofuse.db.results import decision_of, decision_rows
from autofuse.db.tune_queue import is_one_of, merged_shapes, taken
from autofuse.ir.records import Decision, ObservedShape, TuneRequest

_LOOKED_AT = 256  # old decisions with the largest expected savings


@dataclass(frozen=True)
class OldDecision:
    """A standing decision and what it was asked for."""

    request: TuneRequest
    decision: Decision
    age_seconds: float
    drift: float = 1.0  # elements of a call since the decision, over those of the calls that it was made for


class OldDecisions:
    """The old decisions of one store."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def take(
        self,
        *devices: str,
        versions: Collection[str],
        age_seconds: float,
        reasons: Collection[str],
        known: Collection[str] = (),
        kind: str = "",
        is_used: bool = True,
        beside_others_since: float | None = None,
    ) -> OldDecision | None:
        """Take the most used decision of at least this age into work, the oldest among equals; None if there is none.

        ``devices``, ``versions``, ``kind``: as `TuneQueue.take` has them; ``reasons``: of the decisions that count;
        ``known``: digests of keys that do not; ``is_used``: only those count whose bucket a run has used since they
        were made; ``beside_others_since``: only those that were raced on fewer threads, for others used the cores;
        those made since that time (seconds since 1970) count at any age.
        """
        table, key = models.DecisionRow, models.DecisionKeyRow
        ours = key.versions.in_(versions) & is_one_of(key.device, devices)
        is_old = table.at < now() - age_seconds
        if beside_others_since is not None:
            is_old = (table.raced_threads > 0) & (is_old | (table.at >= beside_others_since))
        is_old &= table.reason.in_(reasons)
        with self._file.read() as connection:
            rows = connection.execute(_standing(is_used).where(ours, is_old).limit(_LOOKED_AT)).all()
        for row in rows:
            if row.key in known:
                continue
            with self._file.write() as connection:
                request = self._queued(connection, row.key, kind)
            if request is not None:
                return OldDecision(request, decision_of(row), now() - row.at)
        return None

    def take_drifted(
        self,
        *devices: str,
        versions: Collection[str],
        factor: float,
        calls: int,
        reasons: Collection[str],
        known: Collection[str] = (),
        kind: str = "",
    ) -> OldDecision | None:
        """Take the most used decision into work since which calls have other sizes than those that it was made for.

        ``factor``: by which the product of the symbols differs, in the geometric mean over the calls; ``calls``: since
        the decision, at least; others as `take` has them. The request gets the shapes of the runs since: the next race
        is for those, and a third one needs that they change again.
        """
        table, key = models.DecisionRow, models.DecisionKeyRow
        ours = key.versions.in_(versions) & is_one_of(key.device, devices) & table.reason.in_(reasons)
        with self._file.read() as connection:
            rows = connection.execute(_standing(is_used=True).where(ours).limit(_LOOKED_AT)).all()
            found = [(row, *_sizes_of(connection, row)) for row in rows if row.key not in known]
        for row, before, since in found:
            now_seen = [shape for shapes in since.values() for shape in shapes]
            drift = _mean_elements(now_seen) / _mean_elements(before)
            enough = before and sum(shape.calls for shape in now_seen) >= calls
            if not enough or 1 / factor < drift < factor:
                continue
            with self._file.write() as connection:
                request = self._queued(connection, row.key, kind, since)
            if request is not None:
                return OldDecision(request, decision_of(row), now() - row.at, drift)
        return None

    def _queued(
        self, connection: Connection, key: str, kind: str, since: dict[int, list[ObservedShape]] | None = None
    ) -> TuneRequest | None:
        """Take a decided request into work, with the shapes of these runs if any; None where another one has it."""
        table, asked = models.Request, models.RequestRun
        done = update(table).where(table.key == key, table.status == "done")
        if not connection.execute(done.values(status="queued")).rowcount:
            return None  # a script has asked meanwhile, or another daemon has taken it
        if since:
            connection.execute(delete(asked).where(asked.key == key))
            rows = [
                {"key": key, "run_id": run, "calls": sum(s.calls for s in shapes), "shapes": shapes_json(shapes)}
                for run, shapes in since.items()
            ]
            connection.execute(insert(asked), rows)
        return taken(connection, key, {"pid": os.getpid(), "host": kind})


# ---- sizes ---------------------------------------------------------------------------------------------------


def _sizes_of(connection: Connection, row: Any) -> tuple[tuple[ObservedShape, ...], dict[int, list[ObservedShape]]]:
    """The shapes that a decision was made for, and those of each run that has used its bucket since."""
    request, use, run = models.Request, models.NodeUseRow, models.Run
    query = (
        select(use.run_id, use.shapes)
        .join(request, request.bucket_id == use.bucket_id)
        .join(run, run.id == use.run_id)
        .where(request.key == row.key, run.started_at > row.at)
    )
    since = {found.run_id: list(shapes_of(found.shapes)) for found in connection.execute(query)}
    return merged_shapes(connection, row.key), {run_id: shapes for run_id, shapes in since.items() if shapes}


def _mean_elements(shapes: Iterable[ObservedShape]) -> float:
    """The product of the symbols' values, in the geometric mean over the calls; 1 without calls."""
    weighted = [(shape.calls, math.log(max(1, math.prod(shape.symbol_values)))) for shape in shapes]
    calls = sum(count for count, _ in weighted)
    return math.exp(sum(count * value for count, value in weighted) / calls) if calls else 1.0


# ---- queries -------------------------------------------------------------------------------------------------


def _standing(is_used: bool) -> Any:
    """Standing decisions, ``is_used``: whose buckets a run has used since, in the order in which they matter."""
    table, request, use, run = models.DecisionRow, models.Request, models.NodeUseRow, models.Run
    standing = select(func.max(table.id)).group_by(table.key)
    later = exists().where(use.bucket_id == request.bucket_id, use.run_id == run.id, run.started_at > table.at)
    found = (
        decision_rows()
        .join(request, request.key == table.key)
        .where(table.id.in_(standing), request.status == "done")
        .order_by(None)
        .order_by(request.expected_saving_us.desc(), table.at, table.id)
    )
    return found.where(later.correlate(request, table)) if is_used else found
