"""How many of a run's timed steps are kept: all at first, then one in two, in four, and so on.

In: samples as a script hands them in. Out: those to be written, and rows to be deleted. Guarantee: a run has at most
``MOST_STEPS`` rows of captured steps and as many of held-out ones, which are a fiftieth of all, however long it takes;
what is kept is spread evenly over the run, whatever rhythm its shapes come in, and over its roots and signatures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, select, text, update

from autofuse.db import models
from autofuse.ir.records import StepSample

MOST_STEPS = 9000  # with the held-out ones between them ten thousand rows
_RANGE = 1 << 32
_GOLDEN = 2654435769  # _RANGE over the golden ratio: its multiples, modulo _RANGE, are even and have no period to meet
_MASK = (1 << 31) - 1  # products stay below SQLite's 2**63
_THINNEST = 1 << 30
_IS_NOT_KEPT = text(f"((call_index + series_id) & {_MASK}) * {_GOLDEN} % {_RANGE} >= :bound")  # `Thinning.keeps`


@dataclass
class Kind:
    """The captured steps of a run, or its held-out ones."""

    rows: int = 0
    one_in: int = 1


class Thinning:
    """Of one run."""

    def __init__(self, connection: Connection, run_id: int) -> None:
        self._run_id = run_id
        self._kinds = {False: Kind(), True: Kind()}  # by held_out
        sample, run = models.StepSampleRow, models.Run
        counted = select(sample.held_out, func.count()).where(sample.series_id.in_(_series(run_id)))
        for of_kind, count in connection.execute(counted.group_by(sample.held_out)):
            self._kinds[of_kind].rows = count
        one_in = connection.execute(select(run.steps_one_in).where(run.id == run_id)).scalar_one_or_none()
        self._kinds[False].one_in = one_in or 1

    def keeps(self, sample: StepSample, series_id: int) -> bool:
        """Whether a sample is to be written."""
        place = ((sample.index + series_id) & _MASK) * _GOLDEN % _RANGE
        return place < _RANGE // self._kinds[sample.held_out].one_in

    def added(self, connection: Connection, held_out: Iterable[bool]) -> None:
        """Samples of these kinds have been written: let go what is too much by now."""
        for of_kind in held_out:
            self._kinds[of_kind].rows += 1
        for is_held_out, kind in self._kinds.items():
            before = kind.one_in
            while kind.rows > MOST_STEPS and kind.one_in < _THINNEST:
                kind.one_in *= 2
                kind.rows -= self._delete(connection, is_held_out, kind.one_in)
            if kind.one_in != before and not is_held_out:
                run = update(models.Run).where(models.Run.id == self._run_id)
                connection.execute(run.values(steps_one_in=kind.one_in))

    def _delete(self, connection: Connection, held_out: bool, one_in: int) -> int:
        sample = models.StepSampleRow
        rows = delete(sample).where(sample.series_id.in_(_series(self._run_id)), sample.held_out == held_out)
        return connection.execute(rows.where(_IS_NOT_KEPT), {"bound": _RANGE // one_in}).rowcount


def _series(run_id: int) -> Any:
    return select(models.StepSeries.id).where(models.StepSeries.run_id == run_id)
