"""Removes runs beyond so many: their rows, totals, and what newer runs know better; at last their names.

In: how many runs to keep. Out: which were removed. Guarantee: what later runs and daemons learn from stays: of each
root the verdict that stands for a device and versions, with its run; of each request the calls and shapes that the
removed runs saw, under no run's name; decisions and trials of process settings. Runs that may still be running stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import ColumnElement, Connection, Select, delete, func, insert, or_, select, update

from autofuse.db import models
from autofuse.db.base import now, shapes_json, shapes_of
from autofuse.db.tune_queue import NO_RUN
from autofuse.ir.records import ObservedShape

MOST_EVENTS = 10_000  # of no run: those of daemons


def removable(connection: Connection, among: Select[int]) -> list[int]:
    """Those of some runs that hold no verdict that stands, oldest first."""
    if connection.execute(among.limit(1)).first() is None:
        return []
    root = models.Root
    query = select(root.run_id).where(root.id.in_(_standing_verdicts()))
    holders = set(connection.execute(query).scalars())
    return [run_id for run_id in connection.execute(among.order_by(models.Run.id)).scalars() if run_id not in holders]


def remove(connection: Connection, runs: Iterable[int]) -> None:
    """Remove runs that are `removable` and whose details are gone."""
    gone = list(runs)
    _join_requests(connection, gone)
    for owned in (models.Root, models.RunTotal):
        connection.execute(delete(owned).where(owned.run_id.in_(gone)))
    for table in (models.Request, models.DecisionRow, models.SettingTrialRow):
        connection.execute(update(table).where(table.run_id.in_(gone)).values(run_id=None))
    connection.execute(delete(models.Run).where(models.Run.id.in_(gone)))


def has_old_events(connection: Connection, days: float) -> bool:
    """Whether there are events of no run that `remove_events` would delete."""
    return connection.execute(select(models.EventRow.id).where(_old_events(days)).limit(1)).first() is not None


def remove_events(connection: Connection, days: float) -> None:
    """Delete events of no run: those older than ``days``, and all but the newest MOST_EVENTS."""
    connection.execute(delete(models.EventRow).where(_old_events(days)))


def _old_events(days: float) -> ColumnElement[bool]:
    event = models.EventRow
    of_none = event.run_id.is_(None)
    newest = select(event.id).where(of_none).order_by(event.id.desc()).limit(1).offset(MOST_EVENTS)
    return of_none & or_(event.at < now() - days * 86400.0, event.id <= func.coalesce(newest.scalar_subquery(), 0))


def _standing_verdicts() -> Select[int]:
    """Ids of the rows of roots that `RootLog.known` chooses, for each device and versions."""
    root, run = models.Root, models.Run
    place = func.row_number().over(
        partition_by=(root.root, run.device_id, run.versions),
        order_by=((root.state != "observing").desc(), root.updated_at.desc(), root.id.desc()),
    )
    placed = select(root.id, place.label("place")).join(run, root.run_id == run.id).subquery()
    return select(placed.c.id).where(placed.c.place == 1)


def _join_requests(connection: Connection, gone: list[int]) -> None:
    """Add what the runs ``gone`` saw of requests to what no run's name stands for."""
    table = models.RequestRun
    keys = set(connection.execute(select(table.key).where(table.run_id.in_(gone))).scalars())
    for key in keys:
        is_joined = (table.key == key) & table.run_id.in_([*gone, NO_RUN])
        calls, counts = 0, Counter[tuple[int, ...]]()
        for row in connection.execute(select(table.calls, table.shapes).where(is_joined)):
            calls += row.calls
            for shape in shapes_of(row.shapes):
                counts[shape.symbol_values] += shape.calls
        connection.execute(delete(table).where(is_joined))
        shapes = shapes_json(ObservedShape(values, count) for values, count in counts.most_common())
        connection.execute(insert(table).values(key=key, run_id=NO_RUN, calls=calls, shapes=shapes))
