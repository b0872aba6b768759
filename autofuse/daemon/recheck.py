"""Decisions that this daemon races again while no script runs.

Those that were undecided, mostly beside a script; old ones, for machines and what runs on them change; those that were
made for other sizes than come now; and those that were raced on one thread beside a script that uses more.

In: the store. Out: the next such decision, if it is time for one.
Guarantee: one daemon spends RECHECK_SECONDS on this at most, takes each key once, and asks the store seldom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autofuse.db.old_decisions import OldDecision
from autofuse.db.store import Store
from autofuse.tuner.proposed import RACED, UNDECIDED

RECHECK_SECONDS = 300.0  # of work of one daemon, so that an old store with thousands of decisions does not keep it up
LOOK_SECONDS = 600.0  # from a look that found none to the next
DAY_SECONDS = 86_400.0
# A bucket spans a factor of two a symbol. Kernels that are best at one end of it are seldom best at the other.
DRIFT = 1.4  # of a call's sizes, in the mean
DRIFT_CALLS = 1000  # since the decision: fewer cost less than the race
RACED_IN_DAEMON = ("won", *RACED)  # reasons of decisions that another race may change
STANDING = (*RACED_IN_DAEMON, "slower_live")


class Rechecks:
    """What one daemon races again."""

    def __init__(
        self,
        store: Store,
        days: float,
        devices: Sequence[str],
        versions: Sequence[str],
        kind: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``days``: the age from which on a decision is old, 0 for no race again; ``kind``: the daemon's."""
        self._old = store.old_decisions
        self._days = days
        self._devices = devices
        self._versions = versions
        self._kind = kind
        self._clock = clock
        self._taken: set[str] = set()  # digests of keys
        self._spent = 0.0
        # Where others always use the cores, decisions made beside them are raced again once, and then once a day.
        self._began = time.time()
        self._look_at = float("-inf")

    def next(self) -> OldDecision | None:
        """Take the next old decision into work; None where there is none, or enough was done."""
        if not self._days or self._spent >= RECHECK_SECONDS or self._clock() < self._look_at:
            return None
        found = self._take(0.0, (UNDECIDED,), is_used=False)
        found = found or self._take(self._days * DAY_SECONDS, STANDING, is_used=True)
        found = found or self._take_drifted()
        found = found or self._take(DAY_SECONDS, RACED_IN_DAEMON, is_used=False, beside_others_since=self._began)
        if found is None:
            self._look_at = self._clock() + LOOK_SECONDS
        else:
            self._taken.add(found.request.key.digest)
        return found

    def _take(
        self, age_seconds: float, reasons: Sequence[str], is_used: bool, beside_others_since: float | None = None
    ) -> OldDecision | None:
        return self._old.take(
            *self._devices,
            versions=self._versions,
            age_seconds=age_seconds,
            reasons=reasons,
            known=self._taken,
            kind=self._kind,
            is_used=is_used,
            beside_others_since=beside_others_since,
        )

    def _take_drifted(self) -> OldDecision | None:
        return self._old.take_drifted(
            *self._devices,
            versions=self._versions,
            factor=DRIFT,
            calls=DRIFT_CALLS,
            reasons=STANDING,
            known=self._taken,
            kind=self._kind,
        )

    def look_again(self) -> None:
        """There are new decisions."""
        self._look_at = float("-inf")

    def charge(self, seconds: float) -> None:
        """Count the time that one of them has taken."""
        self._spent += seconds
