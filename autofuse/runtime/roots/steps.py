"""Records of a root's calls: shapes, compared steps, the open step.

In: signatures and sizes of a root's calls. Out: recent steps of similar sizes; the code to run for a shape. Times in
microseconds, ``began`` and ``now`` in seconds of ``perf_counter``.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from autofuse.ir.steps import MAX_SIZE_RATIO, PAIR_STEPS, PAIR_WINDOW
from autofuse.observer.device_timer import Stretch
from autofuse.observer.held_out import Held

if TYPE_CHECKING:
    from autofuse.capture.guarded_call import DirectCall
    from autofuse.runtime.graphs.plans import Plan


class TimedStep(NamedTuple):
    """The fields of a `StepSample`, which is made of them in the background: making it at each step costs more."""

    root: str
    signature: str
    held_out: bool
    fused_nodes: int
    number: int
    step_us: float
    elements: int


class RanPlans(NamedTuple):
    """The plans that ran in a step of a root, as they were then."""

    fused_nodes: int
    versions: frozenset[tuple[int, int, bool]]  # of each plan its number, its version, whether it ran as a CUDA graph


class PlanLog:
    """The plans of all graphs that run in a step.

    A step ends with the next call of its root, which may never come: the model is gone. Then others' plans would gather
    here, and each of their calls would take longer.
    """

    MOST_CALLS = 4096
    MOST_PLANS = 512

    def __init__(self) -> None:
        self.plans: set[Plan] = set()
        self.is_full = False  # it was given up, and holds nothing
        self._calls = 0

    @property
    def ran(self) -> RanPlans | None:
        """The plans; None where more have run than in a step."""
        if self.is_full:
            return None
        return RanPlans(sum(plan.fused_nodes for plan in self.plans), frozenset(p.as_it_runs for p in self.plans))

    def add(self, plan: Plan) -> bool:
        """Note that a plan runs; False once it is full."""
        self._calls += 1
        self.plans.add(plan)
        self.is_full = self.is_full or self._calls > self.MOST_CALLS or len(self.plans) > self.MOST_PLANS
        if self.is_full:
            self.plans.clear()
        return not self.is_full


class OpenStep(NamedTuple):
    """A step that the next call of the root ends."""

    began: float
    shape: Shape | None  # None: nothing is captured now
    held: Held
    number: int  # of the call
    disturbances: int
    timed_calls: int  # of graphs, before the step
    held_calls: int
    stretch: Stretch | None  # of the root's stream, where the root runs on a GPU
    is_watched: bool = False  # its allocations are recorded, which takes time


class Sizes:
    """The recent times of captured steps of one signature, or of all signatures that differ in sizes alone."""

    def __init__(self, text: str, is_one: bool) -> None:
        self.text = text  # the signature, without sizes unless `is_one`
        self.is_one = is_one
        self.recent = deque[tuple[int, float]](maxlen=PAIR_STEPS if is_one else PAIR_WINDOW)  # (elements, us)

    def near(self, elements: int) -> list[float]:
        """Times of the last captured steps of similar size, newest first, in us, scaled to so many elements."""
        recent = tuple(self.recent)[::-1]  # another thread may add to it meanwhile
        if self.is_one:  # all of the same size
            return [us for _, us in recent]
        # `ir.steps.is_close` and `at_size`, without a call for each: every timed call asks.
        low, high = elements / MAX_SIZE_RATIO, elements * MAX_SIZE_RATIO
        close = (us if n == elements else us * elements / n for n, us in recent if low <= n <= high)
        return list(itertools.islice(close, PAIR_STEPS))


class Shape:
    """One signature of a captured root: shapes of its arguments, training mode, gradients."""

    __slots__ = (
        "direct", "elements", "is_eager", "is_new", "is_short", "learnt", "noted_at", "ran", "sizes",
    )  # fmt: skip

    def __init__(self, sizes: Sizes, elements: int, direct: tuple[DirectCall, ...], is_eager: bool) -> None:
        self.sizes = sizes
        self.elements = elements
        self.direct = direct
        self.is_eager = is_eager  # torch has a path of its own for it
        self.is_new = True
        self.is_short = False  # its known calls
        self.learnt = 0  # calls through Dynamo
        self.ran: RanPlans | None = None  # in a step, None where none was looked at
        self.noted_at = -1  # the session's disturbances at that step

    def forget(self) -> None:
        """Forget the shape's trace, and the step times with it."""
        self.direct, self.is_new, self.learnt, self.noted_at = (), True, 0, -1
        self.sizes.recent.clear()
