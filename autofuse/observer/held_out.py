"""Which calls of a captured root stay on the original module, so that its gain is always measured and never assumed.

In: the calls of a root one by one, their sizes, whether the kernels in use have changed. Out: the purpose of each call
(`Held`). Guarantee: torch-free, no clock; the script's random generators are never touched; the same calls are held out
in every run and on every rank of a job, but for those that confirm new kernels.
"""

from __future__ import annotations

import hashlib
from enum import Enum

from autofuse.errors import SettingsError

_MANY_CALLS = 50  # free at a time where nothing is held out
_SHORT_EVERY = 2  # occasions, of which short calls take one, since theirs are two calls each
_SURE_EVERY = 4  # times as few are taken of calls that gain beyond doubt


class HeldOut:
    """Which calls run the original module, so that the gain is always measured and never assumed.

    One call in every ``round(1 / share)``, at a place in that stretch that a hash of (seed, stretch) picks: evenly
    spread, not in step with anything periodic in the script, and the same in every run. Never the first calls.
    """

    def __init__(self, share: float, seed: int = 0, skip_first: int = 8) -> None:
        if not 0.0 <= share <= 0.5:
            raise SettingsError(f"capture.held_out_share must be between 0 and 0.5, found {share}")
        self.period = max(2, round(1.0 / share)) if share else 0
        self._seed = seed
        self._skip_first = skip_first  # calls; from the first on, the number of a call
        self._has_begun = False
        self._calls = 0  # so far
        self.stretch = -1  # of the last call
        self._upcoming = -1  # the held-out call of that stretch

    def count_to(self, call: int) -> None:
        """The next call has this number, from 0. Ranks may capture at different calls; by the numbers they hold
        out the same ones."""
        if not self._has_begun:
            self._has_begun = True
            self._skip_first += call
        self._calls = call

    def next(self) -> bool:
        """Is the next call held out? Counts the call."""
        call = self._calls
        self._calls += 1
        if call < self._skip_first or not self.period:
            return False
        stretch = call // self.period
        if stretch != self.stretch:
            self.stretch = stretch
            self._upcoming = stretch * self.period + self._place(stretch)
        return call == self._upcoming

    def free(self, every: int = 1) -> int:
        """Coming calls before the next that is held out. ``every``: of so many stretches only one counts."""
        if not self.period:
            return _MANY_CALLS
        first = max(self._calls, self._skip_first)
        stretch = first // self.period
        while stretch % every or stretch * self.period + self._place(stretch) < first:
            stretch += 1
        return stretch * self.period + self._place(stretch) - self._calls

    def skip(self, calls: int) -> None:
        """Count calls that ``free`` has promised."""
        self._calls += calls

    def takes(self, call: int) -> bool:
        """Is the call with this running number (from 0) held out?"""
        if not self.period or call < self._skip_first:
            return False
        stretch, place = divmod(call, self.period)
        return self._place(stretch) == place

    def _place(self, stretch: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{stretch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.period


class Confirmation:
    """When more calls are held out: after the kernels in use have changed, until enough pairs tell what that gained.

    Otherwise a loser would stay for hundreds of calls, and a short run would end without a measured gain. A few times a
    root, so that plans which never stop changing do not keep it on eager; where the pairs leave it open, ``extensions``
    times as many follow, since twelve find a loss of 5 % on a machine that scatters by 10 % in half of the cases only.
    """

    def __init__(self, pairs: int = 12, every: int = 5, calm: int = 8, times: int = 3, extensions: int = 3) -> None:
        self._pairs, self._every, self._calm, self._extensions = pairs, every, calm, extensions
        self._times_left = times
        self._generation: int | None = None
        self._calls = 0  # since the kernels last changed
        self._is_begun = False
        self._left = 0  # pairs
        self._extensions_left = 0

    def extend(self) -> None:
        """The pairs so far leave it open which is faster."""
        if not self._left and self._extensions_left:
            self._left = self._pairs
            self._extensions_left -= 1

    def end(self) -> None:
        """The pairs so far tell enough."""
        self._left = self._extensions_left = 0

    @property
    def is_over(self) -> bool:
        """No call is held out until the kernels change."""
        return not self._left

    def next(self, generation: int, has_pair: bool) -> bool:
        """Is the next call held out? ``generation`` changes with the kernels; ``has_pair``: calls to compare with."""
        if generation != self._generation:
            self._generation, self._calls = generation, 0
            self._left = self._pairs if self._times_left else 0
            self._extensions_left, self._is_begun = self._extensions if self._left else 0, False
        if not self._left:
            return False
        self._calls += 1
        if self._calls <= self._calm or self._calls % self._every or not has_pair:
            return False
        if not self._is_begun:
            self._times_left -= 1
            self._is_begun = True
        self._left -= 1
        return True


class Held(Enum):
    """The purpose of a call."""

    NO = "no"  # the captured graph
    COLD = "cold"  # the original module, not to be compared: caches and branch predictors are full of the graph's code
    COMPARED = "compared"  # the original module
    RESTING = "resting"  # the original module, while the graph loses and kernels for it are still to come


def _occasions(is_short: bool, is_sure: bool) -> int:
    """Of how many one is taken."""
    return (_SHORT_EVERY if is_short else 1) * (_SURE_EVERY if is_sure else 1)


class HeldOutCalls:
    """Which calls of a root run the original module: a share of all, more of them while new kernels are confirmed.

    Where calls are short, a single one between calls of the graph finds none of its code in the caches and is slower
    by what a released module would never pay; so a held-out call is followed by another one, which is compared, and
    every second occasion of the share is left out. Where calls gain beyond doubt, a quarter of the share is taken.
    """

    def __init__(self, share: float, pairs: int) -> None:
        self._share = HeldOut(share)
        self._pairs = pairs
        self._times = 3 if share else 0
        self._confirmations: dict[int, Confirmation] = {}  # of each magnitude of sizes, for each is judged by itself
        self._last: dict[int, int] = {}  # call of each magnitude
        self._sure: set[int] = set()  # magnitudes that gain beyond doubt
        self._calls = 0
        self._follows = False

    def count_to(self, call: int) -> None:
        """The next call has this number, from 0."""
        self._share.count_to(call)

    def note_sure(self, magnitude: int, is_sure: bool) -> None:
        """Whether calls of a magnitude gain beyond doubt."""
        if is_sure:
            self._sure.add(magnitude)
        else:
            self._sure.discard(magnitude)

    def doubt(self) -> None:
        """What was measured holds no more."""
        self._sure.clear()

    def next(self, generation: int, is_new: bool, has_pair: bool, is_short: bool, magnitude: int = 0) -> Held:
        """What the next call is for.

        ``generation`` changes with the kernels; ``is_new``: its shape has not run yet; ``magnitude``: of its sizes.
        """
        self._calls += 1
        self._last[magnitude] = self._calls
        if self._follows:
            self._follows = False
            return Held.COMPARED if has_pair else Held.COLD
        is_taken = self._share.next() and (has_pair or not is_new)
        is_taken = is_taken and self._share.stretch % _occasions(is_short, magnitude in self._sure) == 0
        if not (is_taken or self._confirmation(magnitude).next(generation, has_pair)):
            return Held.NO
        self._follows = is_short
        return Held.COLD if is_short else Held.COMPARED

    def _confirmation(self, magnitude: int) -> Confirmation:
        found = self._confirmations.get(magnitude)
        if found is None:
            found = self._confirmations[magnitude] = Confirmation(self._pairs, times=self._times)
        return found

    def confirm_anew(self, magnitude: int = 0) -> None:
        """Calls of a magnitude run the graph again, which ran the original module for a while."""
        self._confirmations.pop(magnitude, None)
        self._sure.discard(magnitude)

    def extend(self, magnitude: int = 0) -> None:
        """More calls are needed to confirm the present kernels, once those foreseen are over; a few times."""
        self._confirmation(magnitude).extend()

    def end(self, magnitude: int = 0) -> None:
        """The present kernels gain beyond doubt: only the share of calls is held out from now on."""
        self._confirmation(magnitude).end()

    def free(self, compared: int) -> int:
        """Coming short calls that `next` need not be asked about: they run the graph.

        ``compared``: calls just before a held-out one, which it is compared with.
        """
        if self._follows:
            return 0
        recent = {found for found, call in tuple(self._last.items()) if call > self._calls - _MANY_CALLS}
        if not all(self._confirmation(magnitude).is_over for magnitude in recent):
            return 0
        return max(0, self._share.free(_occasions(True, bool(recent) and recent <= self._sure)) - compared)

    def skip(self, calls: int) -> None:
        """Count calls that ``free`` has promised."""
        self._share.skip(calls)
