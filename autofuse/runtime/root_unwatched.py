"""Calls of a root in eager that are only counted, between calls that are watched.

In: the calls of a root that is neither captured nor decided, and what it takes to watch one: 50 us and more, which is
seen in a call of a millisecond. Out: how many of the next ones are not looked at, at 2 to 5 us each. Guarantee: every
call is counted, with the shapes of the watched one before it; it counts as long as watched ones take, and never longer
than the clock says. A shape that stays, or takes its turn, is noticed at a watched call: the next one comes at most 16
calls later, or, where watching takes more than its share of the root's time, as many later as it takes to pay for it.
"""

from __future__ import annotations

import random
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

from autofuse.runtime.account import Account
from autofuse.runtime.root_policy import RootPolicy
from autofuse.runtime.trial import Trial

if TYPE_CHECKING:
    from autofuse.runtime.roots import Roots

WATCHED_AT_FIRST = 64
SHORT_SECONDS = 2e-3  # of calls that take less,
COUNTED = 12  # so many, or up to a third more, are counted between two that are watched
LONGEST = 4096  # whatever watching takes
SAMPLING_SHARE, WATCHING_SHARE = 0.7, 0.2  # of what observing may take: for sampled steps, for watched calls
_KEPT = 16


class Unwatched:
    """Of one root."""

    def __init__(self, roots: Roots, key: str, policy: RootPolicy, account: Account, trial: Trial) -> None:
        self.left = 0  # calls that are not looked at: the root counts them down
        self._observer = roots.observer
        self._share = WATCHING_SHARE * roots.session.settings.observe.max_overhead_percent / 100.0
        self._key = key
        self._policy = policy
        self._account = account
        self._trial = trial
        self._began: float | None = None  # None while calls are watched
        self._calls = 0  # from then on, with those that are left
        self._costs = deque[float](maxlen=_KEPT)  # seconds, of the last watched calls
        # Sizes that take turns, however many, each have their turn to be watched only where no turn is like the last.
        self._random = random.Random(0)

    def watched(self, seconds: float) -> None:
        """So much was taken to watch a call, beside what the observer knows of."""
        self._costs.append(seconds)
        self._observer.spend(seconds)

    def begin(self, now: float) -> bool:
        """Whether the call that begins now, after one that was watched, and some that follow are only counted."""
        if self._policy.observed_calls < WATCHED_AT_FIRST or self._policy.is_asked:
            return False
        if self._trial.on_gpu or self._trial.verdicts.any_lost or self._observer.is_sampling:
            return False
        calls = self._count()
        if not calls:
            return False
        self._began, self._calls, self.left = now, calls, calls - 1
        return True

    def _count(self) -> int:
        """How many calls are to be counted before one is watched; 0 where watching costs too little to be seen."""
        typical = self._observer.typical_seconds(self._key)
        if not typical:
            return 0
        affordable = self._share * typical
        cost = median(self._costs) if self._costs else 0.0
        calls = LONGEST if cost >= LONGEST * affordable else int(cost / affordable)
        calls = max(calls, COUNTED if typical < SHORT_SECONDS else 0)
        return calls and self._random.randint(calls, calls + max(calls // 3, 1))

    def stop(self) -> None:
        """The next call is not one of those that are only counted."""
        self._calls -= self.left
        self.left = 0

    def end(self, now: float) -> bool:
        """The next call is watched; False where those before it were too."""
        if self._began is None:
            return False
        self._trial.total_us += (now - self._began) * 1e6
        self.settle(now)
        return True

    def settle(self, now: float) -> None:
        """Account for the calls that were only counted so far."""
        if self._began is None:
            return
        self.stop()
        self._policy.observed_calls += self._calls
        self._account.ledger.count_unwatched(self._calls, now - self._began)
        self._observer.count_unseen(self._key, self._calls)
        self._began = None
