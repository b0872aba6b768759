"""Decides for which sizes of calls a root stays in eager.

In: for each held-out call, eager's time over the captured graph's, and the size of the call. Out: whether a call of a
size should run in eager. A root that loses on tiny inputs may win on large ones, and the other way round: the first
sizes of a run must not decide for later ones. So calls are judged by magnitude.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple

# A verdict needs this many held-out calls; below that the difference may be noise.
PAIRS_BEFORE_RELEASE = 12
_KEPT = 64  # the last pairs of a magnitude
# So many held-out calls tell enough where each alone was slower by so much: six of a loser would all have to scatter by
# more than 10 % to the same side. Half as many where an earlier run has measured such a gain.
CLEAR_PAIRS = 6
CLEAR_GAIN = 1.1
CLEAR_SHORT_GAIN = 1.25  # of calls that scatter by what the caches hold
# So many pairs leave no doubt of a gain: four standard deviations more than half of them won, and most of the last.
# Half as many do where each of them gained as much as is clear of any call.
SURE_PAIRS, SURE_DEVIATIONS = 24, 4.0
LAST_PAIRS = 6


class Loss(NamedTuple):
    """Sizes that stay in eager from now on, with the reason."""

    reason: str  # see ``advise_release``
    gain: float  # eager's time over the captured graph's, median
    magnitudes: frozenset[int]


def magnitude(elements: int) -> int:
    """Calls of one magnitude have numbers of elements between the same two powers of four."""
    return (max(1, elements).bit_length() - 1) // 2


def advise_release(ratios: Sequence[float], is_short: bool, release_factor: float) -> str | None:
    """Why a captured root should go back to eager: "slower_than_eager", "no_gain", or None to keep it.

    ``ratios``: eager's time over the captured graph's, one for each held-out call; ``release_factor``: a loss of less
    is not worth a change. Where calls are short (``is_short``) the overhead is what is left of a small gain, and eager
    has it without a risk. A median alone says too little: over a dozen calls on a busy machine that of a root which
    gains 5 % falls below 1 in one case of six. So the calls that lost count too: two standard deviations more of them
    than half for the one reason, one for the other.
    """
    gain, lost = median(ratios), _lost(ratios)
    if gain < 1.0 / release_factor and lost >= 2.0:
        return "slower_than_eager"
    if is_short and gain < 1.0 and lost >= 1.0:
        return "no_gain"
    return None


def is_unsure(ratios: Sequence[float]) -> bool:
    """Whether it takes more held-out calls to tell which is faster, the captured graph or eager (`advise_release`)."""
    return abs(_lost(ratios)) < 2.0


def _lost(ratios: Sequence[float]) -> float:
    """By how many of a fair coin's standard deviations more than half of the held-out calls were the faster ones."""
    return (2 * sum(ratio < 1.0 for ratio in ratios) - len(ratios)) / sqrt(len(ratios))


class ReleasePolicy:
    """Those of one root. Threads may call it at once: what one goes through is a copy of what another adds to."""

    def __init__(self) -> None:
        self.any_lost = False
        self._ratios: dict[int, deque[float]] = {}  # of magnitudes that did not lose
        self._lost: set[int] = set()
        self._lost_up_to = -1  # magnitude below which, and at which, all lost: too small to be captured

    def is_lost(self, elements: int) -> bool:
        """Whether calls of so many elements stay in eager."""
        found = magnitude(elements)
        return found <= self._lost_up_to or found in self._lost

    @property
    def lost_elements(self) -> int:
        """Of the largest calls that stay in eager; 0 where none do."""
        largest = max(self._lost_up_to, *self._lost) if self._lost else self._lost_up_to
        return int(4 ** (largest + 1)) - 1

    def lose_up_to(self, elements: int) -> None:
        """All calls of at most this magnitude stay in eager."""
        self._lost_up_to = max(self._lost_up_to, magnitude(elements))
        self.any_lost = True

    def add(self, elements: int, ratio: float) -> None:
        """One more held-out call: eager's time over the captured graph's."""
        self._ratios.setdefault(magnitude(elements), deque(maxlen=_KEPT)).append(ratio)

    def clear(self) -> None:
        """The kernels changed: discard the measurements. Lost sizes stay lost."""
        self._ratios.clear()

    def ratios(self, elements: int) -> Sequence[float]:
        """What a call of so many elements is judged by: the pairs of its magnitude, all while these are few."""
        own = tuple(self._ratios.get(magnitude(elements), ()))
        if len(own) >= PAIRS_BEFORE_RELEASE:
            return own
        return tuple(ratio for ratios in tuple(self._ratios.values()) for ratio in tuple(ratios))

    def find_loss(self, elements: int, is_short: bool, release_factor: float) -> Loss | None:
        """After ``add``: what loses, all magnitudes that are judged together with this one, None while nothing does."""
        ratios = self.ratios(elements)
        if len(ratios) < PAIRS_BEFORE_RELEASE:
            return None
        reason = advise_release(ratios, is_short, release_factor)
        if reason is None:
            return None
        # Magnitudes with pairs enough of their own have been judged by those; of the others none goes that won its few.
        few = {m for m, its in tuple(self._ratios.items()) if len(its) < PAIRS_BEFORE_RELEASE and median(its) < 1.0}
        own = magnitude(elements)
        losers = {own} if len(self._ratios.get(own, ())) >= PAIRS_BEFORE_RELEASE else few
        return Loss(reason, median(ratios), frozenset(losers)) if losers else None

    def lose(self, loss: Loss) -> None:
        """These stay in eager from now on."""
        self._lost |= loss.magnitudes
        self.forget(loss.magnitudes)
        self.any_lost = True

    def forget(self, magnitudes: Iterable[int]) -> None:
        """What was measured of them is of no use any more."""
        for found in magnitudes:
            self._ratios.pop(found, None)

    def is_clear(self, elements: int, known_gain: float, is_short: bool = False) -> bool:
        """Whether calls of this magnitude need not be held out more often for now: by the last pairs they gain.

        The first calls of a graph are slower than those to come, so the first pairs say little.
        ``known_gain``: of the root in an earlier run, 0 if none.
        """
        enough = CLEAR_PAIRS // 2 if known_gain >= CLEAR_GAIN else CLEAR_PAIRS
        last = tuple(self._ratios.get(magnitude(elements), ()))[-enough:]
        return len(last) == enough and min(last) >= (CLEAR_SHORT_GAIN if is_short else CLEAR_GAIN)

    def is_sure(self, elements: int) -> bool:
        """Whether calls of this magnitude gain beyond doubt. No more than two of the last six may tell otherwise."""
        own = tuple(self._ratios.get(magnitude(elements), ()))
        last = own[-LAST_PAIRS:]
        is_gain = len(own) >= SURE_PAIRS and _lost(own) <= -SURE_DEVIATIONS
        is_gain = is_gain or (len(own) >= SURE_PAIRS // 2 and min(own[-SURE_PAIRS // 2 :]) >= CLEAR_SHORT_GAIN)
        return is_gain and 3 * sum(ratio < 1.0 for ratio in last) <= len(last)

    @property
    def gain(self) -> float:
        """Eager's time over the captured graph's, the median of what did not lose; 0 while too little is known."""
        ratios = [ratio for its in tuple(self._ratios.values()) for ratio in tuple(its)]
        enough = CLEAR_PAIRS if ratios and min(ratios) >= CLEAR_GAIN else PAIRS_BEFORE_RELEASE
        return median(ratios) if len(ratios) >= enough else 0.0
