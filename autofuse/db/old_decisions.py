"""Decisions that were made long ago and that scripts still use.

In: the age at which a decision is old. Out: the old decision that matters most, with its request, which is in work from
then on.
Guarantee: a decision stands until another one replaces it, whatever becomes of the work.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, func, select, update

from autofuse.db import models
from autofuse.db.base import Database, now
from autofuse.db.results import decision_of, decision_rows
from autofuse.db.tune_queue import is_one_of, taken
from autofuse.ir.records import Decision, TuneRequest

_LOOKED_AT = 256  # old decisions with the largest expected savings


@dataclass(frozen=True)
class OldDecision:
    """A standing decision and what it was asked for."""

    request: TuneRequest
    decision: Decision
    age_seconds: float


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
    ) -> OldDecision | None:
        """Take the most used decision of at least this age into work, the oldest among equals; None if there is none.

        ``devices``, ``versions``, ``kind``: as `TuneQueue.take` has them; ``reasons``: of the decisions that count;
        ``known``: digests of keys that do not; ``is_used``: only those count whose bucket a run has used since they
        were made.
        """
        table, key = models.DecisionRow, models.DecisionKeyRow
        ours = key.versions.in_(versions) & is_one_of(key.device, devices)
        is_old = (table.at < now() - age_seconds) & table.reason.in_(reasons)
        with self._file.read() as connection:
            rows = connection.execute(_standing(is_used).where(ours, is_old).limit(_LOOKED_AT)).all()
        for row in rows:
            if row.key in known:
                continue
            with self._file.write() as connection:
                done = update(models.Request).where(models.Request.key == row.key, models.Request.status == "done")
                if not connection.execute(done.values(status="queued")).rowcount:
                    continue  # a script has asked meanwhile, or another daemon has taken it
                request = taken(connection, row.key, {"pid": os.getpid(), "host": kind})
            if request is not None:
                return OldDecision(request, decision_of(row), now() - row.at)
        return None


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
