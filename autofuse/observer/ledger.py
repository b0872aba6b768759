"""Accounts, by the script's own clock, of a root's steps in eager and of the time lost to its captures.

In: steps, from one call of the root to the next: how large its inputs are, how long it was busy (forward and backward),
how long the whole step took, whether it was observed. Out: seconds in eager so far; seconds lost, by cause. Guarantee:
torch-free, no clock of its own, never more seconds than were reported. An observed step counts with the time of an
unobserved one.

The cost of a capture is the time that the script lost to it, whatever the cause: the sum, over the steps from the
capture until times have settled, of the excess over eager. A later trace opens the account again. Time between two
steps in which the script does something else is no loss: beyond the root's own time, at most one step's time counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from statistics import linear_regression, median

from autofuse.ir.steps import at_size, is_close

_KEPT = 64  # steps in eager that are remembered
_ANSWERS = 1024  # sizes whose typical times are
_NEAR = 9  # of a size, whose median is typical of it
_CALM_STEPS = 8  # so many in a row,
_UNCALM = 1  # of which but so many
_CALM = 1.15  # take longer than this many times eager's: settled
_LAST_STEP = 64  # after a trace that can still be slow for it
_LONGER = 2.0  # times as long as it was taken for
CAUSES = ("imports", "tracing", "planning", "slow steps")


@dataclass(frozen=True)
class EagerStep:
    """An unobserved step in eager."""

    elements: int  # of the root's inputs
    busy_seconds: float  # in the root's forward and backward
    seconds: float  # to the root's next call


class EagerTimes:
    """Eager's times of steps, by size."""

    def __init__(self) -> None:
        self._steps = deque[EagerStep](maxlen=_KEPT)
        self._known: dict[int, tuple[float, float]] = {}  # what `typical` has found since the last step

    def add(self, elements: int, busy_seconds: float, seconds: float) -> None:
        self._steps.append(EagerStep(elements, busy_seconds, max(busy_seconds, seconds)))
        self._known.clear()

    def busy(self, elements: int) -> float | None:
        """The root's own share of such a step; None before the first."""
        return self._typical(elements, attrgetter("busy_seconds"))

    def typical(self, elements: int) -> tuple[float, float] | None:
        """`busy`, and the seconds of the whole step. Every captured step asks: the answers are kept."""
        found = self._known.get(elements)
        if found is None:
            busy = self.busy(elements)
            whole = self._typical(elements, attrgetter("seconds"))
            if busy is None or whole is None:
                return None
            if len(self._known) >= _ANSWERS:
                self._known.clear()
            self._known[elements] = found = (busy, whole)
        return found

    def mean_busy(self) -> float:
        """Of the last steps of all sizes, 0.0 before the first."""
        steps = tuple(self._steps)
        return sum(step.busy_seconds for step in steps) / len(steps) if steps else 0.0

    def _typical(self, elements: int, seconds: Callable[[EagerStep], float]) -> float | None:
        steps = list(self._steps)
        if not steps:
            return None
        for is_like in (lambda n: n == elements, lambda n: is_close(n, elements)):
            near = [at_size(seconds(s), s.elements, elements) for s in reversed(steps) if is_like(s.elements)]
            if near:
                return median(near[:_NEAR])
        sizes = [s.elements for s in steps]
        middle = median(map(seconds, steps))
        if min(sizes) == max(sizes):
            return at_size(middle, sizes[0], elements)
        slope, start = linear_regression(sizes, [seconds(s) for s in steps])
        return start + slope * elements if slope > 0.0 and start + slope * elements > 0.0 else middle


class Ledger:
    """The account of one root."""

    def __init__(self) -> None:
        self.times = EagerTimes()
        self.eager_seconds = 0.0  # by the clock, in steps that ran in eager
        self.equal_seconds = 0.0  # what all its steps would have taken in eager, those since the capture too
        self._unknown: list[tuple[int, float]] = []  # observed steps before the first other one: size, busy seconds
        self._late: tuple[int, float, float] | None = None  # see `count_unwatched`
        self._lost = dict.fromkeys(CAUSES, 0.0)
        self._noted = dict.fromkeys(CAUSES, 0.0)  # of the open step
        self._behind = 0.0  # what settled steps take longer than in eager, together
        self._slow = 0.0  # of the steps since the last trace; those that were quicker count against those that were not
        self._recent = deque[bool](maxlen=_CALM_STEPS)
        self._steps = 0  # since the last trace
        self.is_open = False  # steps may still be slow for a trace

    # ---- eager ----------------------------------------------------------------------------------------

    def add_eager(
        self, elements: int, busy_seconds: float, seconds: float, is_observed: bool, counts: bool = True
    ) -> None:
        """A step has ended that ran in eager. ``counts``: False where someone else knows how long (`count`)."""
        if not is_observed:
            self.times.add(elements, busy_seconds, seconds)
        if not counts:
            return
        if not is_observed:
            self.count(busy_seconds)
            self._count_late(busy_seconds)
            unknown, self._unknown = self._unknown, []
            for size, took in unknown:
                self.count(min(took, self.times.busy(size) or took))
            return
        typical = self.times.busy(elements)
        if typical is None:
            self._unknown.append((elements, busy_seconds))
        else:
            self.count(min(busy_seconds, typical))

    def count_unwatched(self, calls: int, seconds: float) -> None:
        """So many steps in eager were not timed one by one, and took ``seconds`` together with all between them.

        They count as the timed ones before them. Where the clock says far more, either they have become long or the
        script did something else; the next timed step tells.
        """
        known = min(calls * self.times.mean_busy(), seconds)
        self.count(known)
        if seconds > _LONGER * known:
            before = self._late or (0, 0.0, 0.0)
            self._late = (before[0] + calls, before[1] + known, before[2] + seconds)

    def _count_late(self, busy_seconds: float) -> None:
        """A step after those that took long is known: as long as it they count, up to what the clock says."""
        if self._late is None:
            return
        (calls, counted, seconds), self._late = self._late, None
        if calls * busy_seconds > _LONGER * counted:
            self.count(min(calls * busy_seconds, seconds) - counted)

    def count(self, seconds: float) -> None:
        """So much was spent in eager."""
        self.eager_seconds += seconds
        self.equal_seconds += seconds

    # ---- what a capture takes ---------------------------------------------------------------------------

    def lose(self, cause: str, seconds: float) -> None:
        """Lost between two steps, or in a step that is not compared."""
        self._lost[cause] += seconds

    def note(self, cause: str, seconds: float) -> None:
        """So much of the open step went there; what the step as a whole lost is known at its end."""
        self._noted[cause] += seconds
        if not self.is_open or cause == "tracing":
            self._close()
            self.is_open, self._steps = True, 0
            self._recent.clear()

    def add_captured(self, elements: int, busy_seconds: float, seconds: float) -> None:
        """A step has ended that began captured, or with the capture."""
        self._late = None
        noted, self._noted = self._noted, dict.fromkeys(CAUSES, 0.0)
        typical = self.times.typical(elements)
        if typical is None:  # captured at its first call: nothing to compare with but what was noted
            for cause, taken in noted.items():
                self._lost[cause] += taken
            self._close()
            return
        busy, whole = typical
        self.equal_seconds += busy
        if not self.is_open:
            self._behind += min(max(seconds - whole, -busy), busy)
            return
        outside = (seconds - busy_seconds) - (whole - busy)
        lost = busy_seconds - busy + min(max(outside, busy - whole), whole)
        for cause, taken in noted.items():
            taken = min(taken, max(lost, 0.0))
            self._lost[cause] += taken
            lost -= taken
        self._slow += lost
        self._steps += 1
        self._recent.append(busy_seconds > _CALM * busy or seconds > _CALM * whole)
        is_calm = len(self._recent) == _CALM_STEPS and sum(self._recent) <= _UNCALM
        if is_calm or self._steps >= _LAST_STEP:
            self._close()

    def _close(self) -> None:
        self._lost["slow steps"] += max(self._slow, 0.0)
        self._slow, self.is_open = 0.0, False

    def lost(self) -> dict[str, float]:
        """Seconds by cause so far, including the open step's share."""
        found = {cause: self._lost[cause] + self._noted[cause] for cause in CAUSES}
        found["slow steps"] += max(self._slow, 0.0)
        return found

    @property
    def behind_seconds(self) -> float:
        """What the root has taken longer than eager since its steps settled, 0 where it gains."""
        return max(self._behind, 0.0)

    @property
    def trace_seconds(self) -> float:
        """Lost to traces: all but what came with the first capture of the process."""
        return self.lost_seconds - self.lost()["imports"]

    @property
    def noted_seconds(self) -> float:
        """Of the open step."""
        return sum(self._noted.values())

    @property
    def lost_seconds(self) -> float:
        return sum(self._lost.values()) + sum(self._noted.values()) + max(self._slow, 0.0)
