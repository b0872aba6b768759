"""How many of a run's timed steps are kept: all at first, then one in two, in four, and so on.

In: samples as a script hands them in. Out: those to be written, and rows to be deleted. Guarantee: a run has at most
``MOST_STEPS`` rows of captured steps and as many of held-out ones, however long it takes; what is kept is spread evenly
over the run, whatever rhythm its shapes come in, and over its roots and signatures; a held-out step that is kept keeps
captured ones near it. At first captured steps go one by one, then neighbourhoods go as a whole, with their held-out
steps (`ir/steps.py` says how many).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, delete, func, select, text, update

from autofuse.db import models
from autofuse.ir.records import StepSample
from autofuse.ir.steps import NEIGHBOURHOOD, THINNED_WITHIN, held_out_one_in

MOST_STEPS = 9000  # of each kind; with the held-out ones, a fiftieth of all by default, some ten thousand
_RANGE = 1 << 32
# _RANGE divided by the golden ratio, and _RANGE times the fractional part of the square root of two. Multiples of each,
# modulo _RANGE, are spread evenly, follow no period of a script, and do not depend on those of the other.
_OF_STEPS = 2654435769
_OF_NEIGHBOURHOODS = 1779033703
_MASK = (1 << 31) - 1  # products stay below SQLite's 2**63
_THINNEST = 1 << 30
_STEP = f"((call_index + series_id) & {_MASK}) * {_OF_STEPS} % {_RANGE}"
_NEIGHBOURHOOD = f"((call_index / {NEIGHBOURHOOD} + series_id) & {_MASK}) * {_OF_NEIGHBOURHOODS} % {_RANGE}"
_IS_NOT_KEPT = text(f"({_STEP} >= :of_steps OR {_NEIGHBOURHOOD} >= :of_neighbourhoods)")  # `Thinning.keeps`


class Thinning:
    """The thinning of one run's timed steps."""

    def __init__(self, connection: Connection, run_id: int) -> None:
        self._run_id = run_id
        self._rows = {False: 0, True: 0}  # by held_out
        sample, run = models.StepSampleRow, models.Run
        counted = select(sample.held_out, func.count()).where(sample.series_id.in_(_series(run_id)))
        for held_out, count in connection.execute(counted.group_by(sample.held_out)):
            self._rows[held_out] = count
        one_in = connection.execute(select(run.steps_one_in).where(run.id == run_id)).scalar_one_or_none()
        self._one_in = one_in or 1

    def keeps(self, sample: StepSample, series_id: int) -> bool:
        """Whether a sample is to be written."""
        of_steps, of_neighbourhoods = self._bounds(sample.held_out)
        return (
            ((sample.index + series_id) & _MASK) * _OF_STEPS % _RANGE < of_steps
            and ((sample.index // NEIGHBOURHOOD + series_id) & _MASK) * _OF_NEIGHBOURHOODS % _RANGE < of_neighbourhoods
        )  # fmt: skip

    def added(self, connection: Connection, held_out: Iterable[bool]) -> None:
        """Count written samples, each given by its ``held_out``; where rows are too many, halve what is kept."""
        for is_held_out in held_out:
            self._rows[is_held_out] += 1
        before = self._one_in
        while max(self._rows.values()) > MOST_STEPS and self._one_in < _THINNEST:
            self._one_in *= 2
            for is_held_out in self._rows:
                self._rows[is_held_out] -= self._delete(connection, is_held_out)
        if self._one_in != before:
            run = update(models.Run).where(models.Run.id == self._run_id)
            connection.execute(run.values(steps_one_in=self._one_in))

    def _bounds(self, held_out: bool) -> tuple[int, int]:
        """The bounds below which the scattered numbers of a kept step and of its neighbourhood lie (see `keeps`)."""
        of_steps = _RANGE if held_out else _RANGE // min(self._one_in, THINNED_WITHIN)
        return of_steps, _RANGE // held_out_one_in(self._one_in)

    def _delete(self, connection: Connection, held_out: bool) -> int:
        sample = models.StepSampleRow
        rows = delete(sample).where(sample.series_id.in_(_series(self._run_id)), sample.held_out == held_out)
        of_steps, of_neighbourhoods = self._bounds(held_out)
        bounds = {"of_steps": of_steps, "of_neighbourhoods": of_neighbourhoods}
        return connection.execute(rows.where(_IS_NOT_KEPT), bounds).rowcount


def _series(run_id: int) -> Any:
    return select(models.StepSeries.id).where(models.StepSeries.run_id == run_id)
