"""What scripts write into the store and reports read from it: runs and their timed steps.

In: records of one run. Out: the same records again, by run. Each method is one short transaction.
Guarantee: ``add_`` appends rows; ``put_`` takes counters so far and replaces the older ones of the same run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from autofuse.db import models
from autofuse.db.base import Database, clean, now, record_of, upsert
from autofuse.db.rows import RunRow
from autofuse.db.thinning import Thinning
from autofuse.errors import StoreError
from autofuse.ir.records import DeviceInfo, RunStart, RunTotals, StepSample

REMOVED = ""  # the command of a run that a person has removed; every other run has one


class RunLog:
    """Runs, with their totals."""

    def __init__(self, file: Database) -> None:
        self.started: RunStart | None = None  # the last run that this object has begun
        self._file = file

    def start(self, start: RunStart) -> int:
        """Begin a run and return its id (counting from 1)."""
        device = start.device
        with self._file.write() as connection:
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
        self.started = start
        return run_id

    def update_totals(self, run_id: int, totals: RunTotals) -> None:
        """Replace the counters of a run."""
        with self._file.write() as connection:
            _put_totals(connection, run_id, totals)

    def finish(self, run_id: int, totals: RunTotals) -> None:
        """Replace the counters of a run and note its end."""
        with self._file.write() as connection:
            _put_totals(connection, run_id, totals)
            connection.execute(update(models.Run).where(models.Run.id == run_id).values(finished_at=now()))

    def get(self, run_id: int) -> RunRow:
        """One run. Errors: StoreError for an id that the store does not hold."""
        with self._file.read() as connection:
            row = connection.execute(_runs().where(models.Run.id == run_id)).one_or_none()
        if row is None:
            newest = self.latest()
            known = "found an empty one" if newest is None else f"found ids up to {newest.id}"
            raise StoreError(f"expected run {run_id} in the store {self._file.path}, {known}; type: autofuse runs")
        return _run_of(row)

    def recent(self, limit: int | None = None) -> list[RunRow]:
        """Runs, newest first."""
        with self._file.read() as connection:
            return [_run_of(row) for row in connection.execute(_runs().limit(limit))]

    def latest(self, *, with_steps: bool = False, command: str | None = None) -> RunRow | None:
        """The newest run, on request of runs with steps or of this ``command`` only; None where there is none."""
        query = _runs()
        if command is not None:
            query = query.where(models.Run.command == clean(command))
        series = select(models.StepSeries.run_id).join(
            models.StepSampleRow, models.StepSampleRow.series_id == models.StepSeries.id
        )
        with self._file.read() as connection:
            timed = set(connection.execute(series.distinct()).scalars()) if with_steps else set()
            for row in connection.execute(query):
                run = _run_of(row)
                # Steps of torch.compile(backend="autofuse") are counted, but belong to no module and are not timed.
                if not with_steps or run.id in timed or run.totals.steps > 0:
                    return run
        return None

    def last_seconds(self, command: str) -> float:
        """Seconds of the last run of ``command`` that has ended and did not wait for tuning; 0.0 without one."""
        table = models.Run
        query = (
            select(table.started_at, table.finished_at)
            .where(table.command == clean(command), table.finished_at.is_not(None), table.mode != "wait")
            .order_by(table.id.desc())
            .limit(1)
        )
        with self._file.read() as connection:
            row = connection.execute(query).first()
        return max(0.0, row.finished_at - row.started_at) if row is not None else 0.0


class StepLog:
    """Timed steps of runs."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._thinning: tuple[int, Thinning] | None = None  # id and thinning of the run that got samples last

    def add(self, run_id: int, samples: Iterable[StepSample]) -> None:
        """Append timed steps; a ``step_us`` of 0 or less marks a step that is not to be compared.

        Of a long run only one step in so many is kept (`thinning`).
        """
        samples = list(samples)
        if not samples:
            return
        table = models.StepSeries
        names = {(sample.root, sample.signature) for sample in samples}
        with self._file.write() as connection:
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

    def of_run(self, run_id: int) -> list[StepSample]:
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
        with self._file.read() as connection:
            return [StepSample(*row) for row in connection.execute(query)]


# ---- rows -------------------------------------------------------------------------------------------


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
        .where(run.command != REMOVED)
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
