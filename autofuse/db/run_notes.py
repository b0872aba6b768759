"""What the store keeps of a run beside its counters: roots, refusals, events, trials of process settings.

In: records of one run. Out: the same records again. Each method is one short transaction.
Guarantee: histories are kept: changes of a root, refusals, events and trials are only ever appended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, func, insert, select

from autofuse.db import models
from autofuse.db.base import Database, add_event_row, clean, now, record_of, upsert
from autofuse.db.rows import EventRow, RootChange, SettingTrial
from autofuse.db.run_log import RunLog
from autofuse.ir.records import Event, Refusal, RootRecord


class RootLog:
    """The states of roots, and their history."""

    def __init__(self, file: Database, runs: RunLog) -> None:
        self._file = file
        self._runs = runs

    def put(self, run_id: int, record: RootRecord) -> None:
        """Replace what this run knows of a root; a change of state, reason or capture time is added to its history."""
        with self._file.write() as connection:
            row = {
                "run_id": run_id,
                "root": record.root,
                "state": record.state,
                "record": asdict(record),
                "updated_at": now(),
            }
            upsert(connection, models.Root, [row], ["run_id", "root"], ["state", "record", "updated_at"])
            _add_change(connection, run_id, record)

    def known(self, device_key: str | None = None, versions: str | None = None) -> dict[str, RootRecord]:
        """Each root's latest record over all runs of a device and versions, one after "observing" if there is any.

        Default: the device and versions of the run that this store object started; all where it started none.
        """
        if (started := self._runs.started) is not None:
            device_key, versions = device_key or started.device.key, versions or started.versions
        root, run, device = models.Root, models.Run, models.Device
        query = (
            select(root.root, root.record)
            .join(run, root.run_id == run.id)
            .join(device, run.device_id == device.id)
            .order_by(root.state != "observing", root.updated_at, root.id)  # a later row replaces an earlier one below
        )
        if device_key is not None:
            query = query.where(device.key == device_key)
        if versions is not None:
            query = query.where(run.versions == versions)
        with self._file.read() as connection:
            return {name: record_of(RootRecord, record) for name, record in connection.execute(query)}

    def of_run(self, run_id: int) -> list[RootRecord]:
        """The roots of one run, those that took most time first."""
        query = select(models.Root.record).where(models.Root.run_id == run_id)
        with self._file.read() as connection:
            records = [record_of(RootRecord, record) for record in connection.execute(query).scalars()]
        return sorted(records, key=lambda record: -record.eager_seconds)

    def changes(self, root: str) -> list[RootChange]:
        """The history of a root over all runs, oldest first."""
        table = models.Capture
        query = (
            select(table.run_id, table.root, table.state, table.reason, table.detail, table.capture_seconds, table.at)
            .where(table.root == root)
            .order_by(table.id)
        )
        with self._file.read() as connection:
            return [RootChange(*row) for row in connection.execute(query)]


class RunNotes:
    """Refusals and events of runs."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def add_refusals(self, run_id: int, refusals: Iterable[Refusal]) -> None:
        """Append fusions that were accepted or refused."""
        at = now()
        rows = [{**asdict(refusal), "run_id": run_id, "at": at} for refusal in refusals]
        if rows:
            with self._file.write() as connection:
                connection.execute(insert(models.RefusalRow), rows)

    def refusals(self, run_id: int) -> list[Refusal]:
        """The refusals and acceptances of a run, in order."""
        table = models.RefusalRow
        columns = [getattr(table, item.name) for item in fields(Refusal)]
        with self._file.read() as connection:
            rows = connection.execute(select(*columns).where(table.run_id == run_id).order_by(table.id))
            return [Refusal(**row._asdict()) for row in rows]

    def add_event(self, run_id: int | None, event: Event) -> None:
        """Append an event; ``run_id`` is None for those of the daemon or of the store."""
        with self._file.write() as connection:
            add_event_row(connection, run_id, event)

    def events(self, run_id: int | None = None, *, since: float = 0.0, limit: int | None = None) -> list[EventRow]:
        """Events of a run, or of everything, in order; ``since`` is UTC epoch seconds, ``limit`` keeps the newest."""
        table = models.EventRow
        query = select(table).where(table.at >= since).order_by(table.id.desc()).limit(limit)
        if run_id is not None:
            query = query.where(table.run_id == run_id)
        with self._file.read() as connection:
            rows = list(connection.execute(query))
        return [EventRow(Event(row.kind, row.message, row.data), row.run_id, row.at) for row in reversed(rows)]


class TrialLog:
    """Trials of process settings."""

    def __init__(self, file: Database) -> None:
        self._file = file

    def put(self, trial: SettingTrial, run_id: int | None = None) -> None:
        """Append a trial of a process setting; the newest of a device, workload, setting and value stands."""
        values = {**asdict(trial), "workload": clean(trial.workload), "run_id": run_id, "at": now()}
        with self._file.write() as connection:
            connection.execute(insert(models.SettingTrialRow).values(**values))

    def standing(
        self, device: str | None = None, *, workload: str | None = None, run_id: int | None = None
    ) -> list[SettingTrial]:
        """The standing trials, on request of a device, a workload or a run only; by setting, the newest last."""
        table = models.SettingTrialRow
        newest = select(func.max(table.id)).group_by(table.device, table.workload, table.setting, table.value)
        columns: list[Any] = [getattr(table, item.name) for item in fields(SettingTrial)]
        query = select(*columns).order_by(table.setting, table.id)
        if run_id is not None:
            newest = newest.where(table.run_id == run_id)
        if device is not None:
            query = query.where(table.device == device)
        if workload is not None:
            query = query.where(table.workload == clean(workload))
        with self._file.read() as connection:
            rows = connection.execute(query.where(table.id.in_(newest)))
            return [SettingTrial(**row._asdict()) for row in rows]


def _add_change(connection: Connection, run_id: int, record: RootRecord) -> None:
    table = models.Capture
    last = connection.execute(
        select(table.state, table.reason, table.capture_seconds)
        .where(table.run_id == run_id, table.root == record.root)
        .order_by(table.id.desc())
        .limit(1)
    ).one_or_none()
    if last is None or tuple(last) != (record.state, record.reason, record.capture_seconds):
        connection.execute(
            insert(table).values(
                run_id=run_id,
                root=record.root,
                state=record.state,
                reason=record.reason,
                detail=record.detail,
                capture_seconds=record.capture_seconds,
                at=now(),
            )
        )
