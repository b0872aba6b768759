"""Bounded history: details of old runs are deleted, data that later runs learn from stays.

In: how old, how many bytes and runs; or the number of a run. Out: of how many runs the details were removed.
Guarantee: decisions, kernels, roots' verdicts and requests stay; what goes are single steps, operators, shapes,
refusals and events, which only reports of that very run show. The newest run with steps keeps them, and so does any
that may still be running. Totals stay, but for runs beyond so many (`old_runs`) and those that a person removes, whose
command line goes as well. Details go in pieces, each in a transaction of its own: no script beside waits for long, and
one that ends may remove some and leave the rest to others.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, Connection, ScalarSelect, and_, delete, exists, func, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute

from autofuse.db import kernel_cache, models, old_runs
from autofuse.db.base import StoreFile, now
from autofuse.db.run_log import REMOVED
from autofuse.ir.commands import script_of

LONGEST_RUN_SECONDS = 30 * 86400.0  # an older run without an end was killed
RUNS = 200  # removed in a transaction
PIECE = 20_000  # timed steps in a transaction of some 30 ms
_DETAILS = (
    models.Op, models.DimHistogramRow, models.Capture, models.NodeUseRow, models.RefusalRow, models.StepSeries,
    models.EventRow,
)  # fmt: skip


class StoreHistory:
    """Deletes the details of old runs."""

    def __init__(self, file: StoreFile) -> None:
        self._file = file

    def prune(self, days: float, most_bytes: int, most_runs: int, most_pieces: int | None = None) -> int:
        """Remove the details of runs older than ``days``, then of the oldest ones until ``most_bytes`` suffice.

        Command lines of runs older than ``days`` are cut to the script's name; of runs before the newest ``most_runs``
        all goes, but for verdicts that stand. Binaries of kernels, which have a bound of their own, do not count.
        ``most_pieces``: the most transactions for details. Returns the number of runs whose details are gone.
        """
        self._shorten_commands(days)
        self._forget_runs(days, most_runs, most_pieces)
        count = pieces = 0
        for run_id, started_at in self._with_details():
            if now() - started_at <= days * 86400.0 and self._has_room(most_bytes):
                break
            is_left = True
            while is_left:
                if pieces == most_pieces:
                    return count
                with self._file.write() as connection:
                    is_left = _remove_piece(connection, run_id)
                pieces += 1
            count += 1
        return count

    def remove(self, run_ids: Iterable[int]) -> None:
        """Remove runs, which must be over, from all lists, with their details, totals, settings and command lines.

        Their rows stay, empty: what later runs know of modules, and what was asked to be tuned, hangs on them.
        """
        run, total = models.Run, models.RunTotal
        numbers = list(run_ids)
        with self._file.write() as connection:
            connection.execute(delete(total).where(total.run_id.in_(numbers)))
            gone = {run.command: REMOVED, run.settings: {}, run.finished_at: func.coalesce(run.finished_at, now())}
            connection.execute(update(run).where(run.id.in_(numbers)).values(gone))
        for run_id in numbers:
            while self._remove_some(run_id):
                pass

    def _remove_some(self, run_id: int) -> bool:
        with self._file.write() as connection:
            return _remove_piece(connection, run_id)

    def _forget_runs(self, days: float, most_runs: int, most_pieces: int | None) -> None:
        """Remove runs before the newest ``most_runs``, RUNS in a transaction, and old events of no run."""
        run = models.Run
        oldest_kept = select(run.id).order_by(run.id.desc()).limit(1).offset(max(most_runs, 1) - 1).scalar_subquery()
        old = select(run.id).where(_is_over(), run.id < oldest_kept, run.id != func.coalesce(_newest_with_steps(), 0))
        with self._file.read() as connection:
            runs = old_runs.removable(connection, old)
            has_events = old_runs.has_old_events(connection, days)
        if has_events:
            with self._file.write() as connection:
                old_runs.remove_events(connection, days)
        for first in range(0, len(runs), RUNS)[:most_pieces]:
            piece = runs[first : first + RUNS]
            for run_id in piece:
                while self._remove_some(run_id):
                    pass
            with self._file.write() as connection:
                old_runs.remove(connection, piece)

    def _shorten_commands(self, days: float) -> None:
        """Cut old command lines to the script's name, since arguments may be private.

        All that later runs lose is the duration of such a run (`RunLog.last_seconds`).
        """
        run, trial, limit = models.Run, models.SettingTrialRow, now() - days * 86400.0
        self._shorten(run.id, run.command, and_(run.started_at < limit, _is_over()))
        self._shorten(trial.id, trial.workload, trial.at < limit)

    def _shorten(
        self, number: InstrumentedAttribute[int], text: InstrumentedAttribute[str], is_old: ColumnElement[bool]
    ) -> None:
        with self._file.read() as connection:
            found = connection.execute(select(number, text).where(is_old, text.contains(" "))).all()
        changed = [(row_id, script_of(command)) for row_id, command in found if command != script_of(command)]
        if changed:
            with self._file.write() as connection:
                for row_id, script in changed:
                    connection.execute(update(number.class_).where(number == row_id).values({text: script}))

    def _has_room(self, most_bytes: int) -> bool:
        with self._file.read() as connection:
            used = _used_bytes(connection)  # known at once, unlike the kernels' bytes
            return used <= most_bytes or used - kernel_cache.size_bytes(connection) <= most_bytes

    def size_bytes(self) -> int:
        """Bytes in use, without those of kernels and Triton's files."""
        with self._file.read() as connection:
            return _used_bytes(connection) - kernel_cache.size_bytes(connection)

    def compact(self) -> None:
        """Give free pages back to the file system; needs room for a second copy of the store meanwhile."""
        self._file.outside_transactions("VACUUM")

    def _with_details(self) -> list[tuple[int, float]]:
        """Ids and starts of runs that are over and have details, oldest first, without the newest run with steps."""
        run = models.Run
        has_details = or_(*(exists().where(table.run_id == run.id) for table in _DETAILS))
        is_not_newest = run.id != func.coalesce(_newest_with_steps(), 0)
        query = select(run.id, run.started_at).where(has_details, _is_over(), is_not_newest)
        with self._file.read() as connection:
            return [(row.id, row.started_at) for row in connection.execute(query.order_by(run.id))]


def _newest_with_steps() -> ScalarSelect[int]:
    return select(func.max(models.StepSeries.run_id)).scalar_subquery()


def _is_over() -> ColumnElement[bool]:
    run = models.Run
    return or_(run.finished_at.is_not(None), run.started_at < now() - LONGEST_RUN_SECONDS)


def _used_bytes(connection: Connection) -> int:
    pages, free, size = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _remove_piece(connection: Connection, run_id: int) -> bool:
    """Delete a piece of a run's details; whether more are left."""
    sample, series = models.StepSampleRow, models.StepSeries
    of_run = select(series.id).where(series.run_id == run_id)
    some = select(sample.id).where(sample.series_id.in_(of_run)).limit(PIECE)
    if connection.execute(delete(sample).where(sample.id.in_(some))).rowcount == PIECE:
        return True
    ops = select(models.Op.id).where(models.Op.run_id == run_id)
    connection.execute(delete(models.OpShape).where(models.OpShape.op_id.in_(ops)))
    for table in _DETAILS:
        connection.execute(delete(table).where(table.run_id == run_id))
    return False
