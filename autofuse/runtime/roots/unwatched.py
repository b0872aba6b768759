"""Calls of a root in eager that are only counted, between calls that are watched.

In: the calls of a root that is neither captured nor decided, and the cost of watching one: 50 us and more, which shows
in a call of a millisecond. Out: how many of the next calls are only counted, at 2 to 5 us each. Guarantee: every call
is counted, with the shapes of the watched call before it. A counted call is taken to last as long as watched ones do,
and never longer than the clock says. A shape that stays, or that alternates with others, is noticed at a watched call.
The next watched call comes at most 16 calls later; where watching takes more than its share of the root's time, it
comes when it is paid for (100 to 200 calls later where calls take 1 ms); and at once where calls have taken longer than
expected. The cost of counting is on no account.
"""

from __future__ import annotations

import random
from collections import deque
from statistics import median

from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.policy import RootPolicy
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.step_clock import Account

WATCHED_AT_FIRST = 64
SHORT_SECONDS = 2e-3  # of calls shorter than this,
COUNTED = 12  # so many, or up to a third more, are counted between two watched ones,
LONGEST, LONGEST_SECONDS = 4096, 10.0  # whatever watching costs
LATE = 4.0  # after so many times the expected time of the calls and their gaps, the next one is watched
# Shares of observing's budget: for sampled steps, for watched calls, for short watched calls, where counting shows too.
SAMPLING_SHARE, WATCHING_SHARE, SHORT_SHARE = 0.6, 0.3, 0.1
_KEPT = 16


class CountedCalls:
    """Of one root."""

    def __init__(
        self, services: RootServices, key: str, policy: RootPolicy, account: Account, trial: GraphTrial
    ) -> None:
        self.taken = 0  # calls that were only counted
        self._left = 0  # calls that are to be counted
        self._observer = services.observer
        self._clock = services.tools.clock
        self._most = services.context.settings.observe.max_overhead_percent / 100.0
        self._key = key
        self._policy = policy
        self._account = account
        self._trial = trial
        self._began: float | None = None  # None while calls are watched
        self._until = 0.0  # calls that begin after this time are watched, however many are left
        self._calls = 0  # since the stretch began, including those left
        self._costs = deque[float](maxlen=_KEPT)  # seconds of the last watched calls
        self._begun = 0.0  # seconds spent to begin counting
        # The stretches vary in length, so that each of several alternating sizes is watched at some time.
        self._random = random.Random(0)

    def takes(self) -> bool:
        """Whether this call is only counted; if so, count it. This is the first test of each call: 0.3 us."""
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
        """Note the cost of watching a call. ``spent``: the observer's account before, which has part of the cost."""
        seconds += self._begun - (self._observer.cost_seconds - spent)
        self._begun = 0.0
        self._costs.append(max(seconds, 0.0))
        self._observer.spend(max(seconds, 0.0))

    def begin(self, now: float) -> bool:
        """Whether the present call, after a watched one, and some later calls are only counted."""
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
        """How many calls to count before the next watched one; 0 where the cost of watching does not show."""
        is_short = typical < SHORT_SECONDS
        affordable = (SHORT_SHARE if is_short else WATCHING_SHARE) * self._most * typical
        cost = median(self._costs) if self._costs else 0.0
        calls = LONGEST if cost >= LONGEST * affordable else int(cost / affordable)
        calls = max(calls, COUNTED if is_short else 0)
        return calls and self._random.randint(calls, calls + max(calls // 3, 1))

    def stop(self) -> None:
        """Stop counting: the next call is not only counted."""
        self._calls -= self._left
        self._left = 0

    def end(self, now: float) -> bool:
        """End the stretch: the next call is watched. False where calls were not being counted."""
        if self._began is None:
            return False
        self._trial.total_us += (now - self._began) * 1e6
        self.settle(now)
        return True

    def settle(self, now: float) -> None:
        """Account for the calls counted so far."""
        if self._began is None:
            return
        self.stop()
        self._policy.observed_calls += self._calls
        self._account.ledger.count_unwatched(self._calls, now - self._began)
        self._observer.count_unseen(self._key, self._calls)
        self._began = None
