"""Calls of a root in eager that are only counted: of short ones, one in seventeen is watched once enough is known.

In: calls of shapes that are known. Out: their number, for all who count them. What a watched call costs, 20 us, is
seen in a call of less than 2 ms; counted, it costs 5. Guarantee: a shape that is new is watched; such calls count as
long as watched ones take, and never longer than the clock says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autofuse.observer.signatures import call_signature
from autofuse.runtime.account import Account
from autofuse.runtime.root_policy import RootPolicy
from autofuse.runtime.trial import Trial

if TYPE_CHECKING:
    from autofuse.runtime.roots import Roots

SHORT_SECONDS = 2e-3  # calls that take less
# One after the other, after one that is not timed, for it ends a watched step: 17 calls in all, a prime, so that where
# sizes take turns each has its turn to be watched.
COUNTED = 15
WATCHED_AT_FIRST = 64


class Unwatched:
    """Of one root."""

    def __init__(self, roots: Roots, key: str, policy: RootPolicy, account: Account, trial: Trial) -> None:
        self._observer = roots.observer
        self._key = key
        self._policy = policy
        self._account = account
        self._trial = trial
        self._began: float | None = None  # None while calls are watched
        self._calls = 0

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call is only counted, which is done then."""
        if self._began is None or self._calls >= COUNTED:
            return False
        if not self._observer.count_known(self._key, call_signature(args, kwargs)):
            return False
        self._calls += 1
        return True

    def end(self, now: float) -> bool:
        """The next call is watched; False where those before it were too."""
        began, self._began = self._began, None
        if began is None:
            return False
        self._trial.total_us += (now - began) * 1e6
        self._policy.observed_calls += self._calls
        self._account.ledger.count_unwatched(1 + self._calls, now - began)
        return True

    def begin(self, now: float) -> bool:
        """Whether the call that begins now is not timed, and those after it are counted."""
        if self._policy.observed_calls <= WATCHED_AT_FIRST or self._trial.on_gpu or self._trial.verdicts.any_lost:
            return False
        typical = None if self._observer.is_sampling else self._observer.typical_seconds(self._key)
        if typical is None or typical >= SHORT_SECONDS:
            return False
        self._began, self._calls = now, 0
        return True
