"""Calls of a root in eager that are only counted, between calls that are watched.

In: the calls of a root that is neither captured nor decided, and what it takes to watch one: 50 us and more, which is
seen in a call of a millisecond. Out: how many of the next ones are not looked at, at 2 to 5 us each. Guarantee: every
call is counted, with the shapes of the watched one before it; it counts as long as watched ones take, and never longer
than the clock says. A shape that stays, or takes its turn, is noticed at a watched call: the next one comes at most 16
calls later, or, where watching takes more than its share of the root's time, as many later as it takes to pay for it
(100 to 200 where calls take 1 ms), and at once where they have taken longer than such calls do. The counting itself is
on no account.
"""

from __future__ import annotations

import random
from collections import deque
from statistics import median

from autofuse.runtime.graph_trial import GraphTrial
from autofuse.runtime.root_policy import RootPolicy
from autofuse.runtime.root_services import RootServices
from autofuse.runtime.step_clock import Account

WATCHED_AT_FIRST = 64
SHORT_SECONDS = 2e-3  # of calls that take less,
COUNTED = 12  # so many, or up to a third more, are counted between two that are watched
LONGEST, LONGEST_SECONDS = 4096, 10.0  # whatever watching takes
LATE = 4.0  # times as long as the calls are expected to take, with all between them: the next one is watched
# Of what observing may take: for sampled steps, for watched calls, of short ones, where counting them is seen as well.
SAMPLING_SHARE, WATCHING_SHARE, SHORT_SHARE = 0.6, 0.3, 0.1
_KEPT = 16


class CountedCalls:
    """Of one root."""

    def __init__(
        self, services: RootServices, key: str, policy: RootPolicy, account: Account, trial: GraphTrial
    ) -> None:
        self.taken = 0  # calls that were only counted
        self._left = 0  # that are to be
        self._observer = services.observer
        self._clock = services.tools.clock
        self._most = services.context.settings.observe.max_overhead_percent / 100.0
        self._key = key
        self._policy = policy
        self._account = account
        self._trial = trial
        self._began: float | None = None  # None while calls are watched
        self._until = 0.0  # calls that begin later are watched, however many are left
        self._calls = 0  # since it began, with those that are left
        self._costs = deque[float](maxlen=_KEPT)  # seconds, of the last watched calls
        self._begun = 0.0  # seconds that were taken to begin to count
        # Sizes that take turns, however many, each have their turn to be watched only where no turn is like the last.
        self._random = random.Random(0)

    def takes(self) -> bool:
        """Whether this call is only counted, which is done then. First of all that is asked of a call: 0.3 us."""
        if self._left <= 0 or self._observer.is_sampling:
            return False
        clock = self._clock
        if clock() > self._until:
            self.stop()
            return False
        self._left -= 1
        self.taken += 1
        return True

    def watched(self, seconds: float, spent: float) -> None:
        """So much was taken to watch a call. ``spent``: what was on the observer's account before, who knew of some."""
        seconds += self._begun - (self._observer.cost_seconds - spent)
        self._begun = 0.0
        self._costs.append(max(seconds, 0.0))
        self._observer.spend(max(seconds, 0.0))

    def begin(self, now: float) -> bool:
        """Whether the call that begins now, after one that was watched, and some that follow are only counted."""
        if self._policy.observed_calls < WATCHED_AT_FIRST or self._policy.is_asked:
            return False
        if self._trial.on_gpu or self._trial.verdicts.any_lost or self._observer.is_sampling:
            return False
        typical = self._observer.typical_seconds(self._key)
        calls = self._count(typical) if typical else 0
        if not typical or not calls:
            return False
        self._began, self._calls, self._left = now, calls, calls - 1
        self._until = now + min(LATE * calls * typical, LONGEST_SECONDS)
        self._begun = self._clock() - now
        return True

    def _count(self, typical: float) -> int:
        """How many calls are to be counted before one is watched; 0 where watching costs too little to be seen."""
        is_short = typical < SHORT_SECONDS
        affordable = (SHORT_SHARE if is_short else WATCHING_SHARE) * self._most * typical
        cost = median(self._costs) if self._costs else 0.0
        calls = LONGEST if cost >= LONGEST * affordable else int(cost / affordable)
        calls = max(calls, COUNTED if is_short else 0)
        return calls and self._random.randint(calls, calls + max(calls // 3, 1))

    def stop(self) -> None:
        """The next call is not one of those that are only counted."""
        self._calls -= self._left
        self._left = 0

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
