"""What a run's kernels were worth on the script's own calls, next to their races.

In: the event that the run has left (`runtime/graphs/live_races.py`). Out: how many there are of each verdict, and the
kernels that were given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autofuse.db.rows import EventRow
from autofuse.ir.records import LIVE_RACES
from autofuse.report import wording


@dataclass(frozen=True)
class LiveVerdicts:
    """Kernels by what calls of the script showed of them, in which single nodes ran eager's operations."""

    confirmed: int  # faster than eager's operations
    slower: int  # and so given up: eager's operations run since
    unsure: int  # not told apart by 40 pairs of calls
    open: int  # too few pairs so far

    @property
    def sentence(self) -> str:
        """``14 kernels confirmed, 1 given up``."""
        words = {"confirmed": "confirmed", "slower": "given up", "unsure": "not told apart from eager", "open": "open"}
        found = [(getattr(self, name), text) for name, text in words.items() if getattr(self, name)]
        (count, text), rest = found[0], found[1:]
        return ", ".join([f"{wording.plural(count, 'kernel')} {text}", *(f"{n:,} {what}" for n, what in rest)])


def live_verdicts(events: Iterable[EventRow]) -> LiveVerdicts | None:
    """Of a run, by its events; None where no kernel was compared."""
    for row in events:
        if row.event.kind == LIVE_RACES:
            data: Mapping[str, Any] = row.event.data
            return LiveVerdicts(**{name: int(data.get(name, 0)) for name in LiveVerdicts.__dataclass_fields__})
    return None
