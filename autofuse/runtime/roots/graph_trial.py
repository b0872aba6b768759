"""A captured graph against the original: which calls are held out, the times of both, and the sizes for which it loses.

In: calls of a root or of a graph, their shapes, and the clock. Out: the purpose of a call (`GraphTrial.choose`), step
samples, and a verdict for each magnitude of sizes (`ReleasePolicy`), reported to ``on_loss``. A step lasts from one
call to the next, because only so it includes the backward pass. Where a step is the call alone, the caller reports its
time (`GraphTrial.call_took`). Guarantee: steps in which anything changed are not compared.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from autofuse.ir.steps import PAIR_WINDOW
from autofuse.observer.device_timer import LateTimes, Stretch
from autofuse.observer.held_out import Held, HeldOutCalls
from autofuse.observer.release_policy import PAIRS_BEFORE_RELEASE, Loss, ReleasePolicy, is_unsure, magnitude
from autofuse.observer.signatures import count_elements, without_sizes
from autofuse.runtime.rank_agreement import is_alone
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.steps import OpenStep, RanPlans, Shape, Sizes, TimedStep

if TYPE_CHECKING:
    from autofuse.capture.guarded_call import DirectCall
    from autofuse.runtime.roots.peak_memory import RootPeaks

PAIRED = 3  # captured calls of a shape, at least, before a held-out one is compared with them
# So many calls before a held-out one are timed where signatures are few; where each is rarer, PAIRED times as many as
# there are signatures: within those, calls of all sizes that come in turn.
TIMED, FEW = 6, 4
# So many of them are not compared: the code that times has left the caches, which makes a step of 0.2 ms 0.1 ms longer.
WARMING = 3
MOST_FREE = 100  # calls in a row that are not timed: a new kernel is noticed after as many
SHORT_CALL_US = 5000.0  # shorter calls depend on whether their code is in the CPU's caches
# Up to so many signatures are compared only with themselves; with more, each is rare and is compared with similar ones.
MAX_EXACT = 16
# A graph that loses while its kernels are still being tuned rests for so many calls, each time for twice as many.
FIRST_REST = 256
LONGEST_REST = 1 << 14
# Short calls without a gain lose for good the third time: all pairs of one time lie within milliseconds, in which
# something else may have had a core. They rest for a quarter of a second, then for a second.
CHANCES, CHANCE_US = 3, 250_000.0
ASKED_EVERY = 32  # resting calls between tests whether kernels are still to come
MAX_SHAPES = 4096  # kept; an evicted shape counts as new if it comes again
OnLoss = Callable[[Shape, Loss, bool, bool], None]  # shape, loss, whether calls are short, whether all sizes have lost


class Costs(NamedTuple):
    """Extra cost of a captured call over a released one, in microseconds, with cold CPU caches."""

    brief: float  # of a call that is not timed
    timed: float


class GraphTrial:
    """Of one root or graph."""

    def __init__(
        self, services: RootServices, key: str, costs: Costs, peaks: RootPeaks | None, on_loss: OnLoss
    ) -> None:
        self._context = services.context
        self._tuning = services.tuning
        self._timer = services.timer
        self._known = services.known  # of earlier runs
        self.key = key
        self.is_on = False  # the captured graph is in use, and its steps are compared
        self.on_gpu = False
        self.skips_lost = False  # calls of sizes that lost do not come here
        self.total_us = 0.0
        self.opened: OpenStep | None = None
        self.shapes: dict[Any, Shape] = {}  # by signature
        self.verdicts = ReleasePolicy()
        self.gain = 0.0  # of the present kernels, see `ReleasePolicy.gain`; 0 while it is not known
        self.late = LateTimes(services.timer)  # steps whose device times are not known yet
        self._costs = costs
        self._peaks = peaks
        self._on_loss = on_loss
        self._sizes: dict[str, Sizes] = {}
        self._newest: Shape | None = None
        self._held_out = self._new_held_out()
        self._changes = Counter[int]()  # of the kernels that calls of each magnitude run
        self._resting: dict[int, int] = {}  # calls left, by magnitude
        self._awaiting: set[int] = set()  # magnitudes that rest until there are more kernels, or no longer
        self._chances = Counter[int]()  # that each magnitude has had, with all kernels there
        self._unsettled: tuple[Shape, Loss] | None = None  # the loss after which it rests, to be tried anew
        self._rests = Counter[int]()  # of each magnitude, for kernels
        self._warming = 0  # short steps that are not compared, after untimed ones
        self._is_marked = False  # plans of the open step are recorded
        self._is_watched = False  # allocations of the call that was chosen last are recorded
        self._call_us: float | None = None  # of the open step, where it has no backward pass

    def _new_held_out(self) -> HeldOutCalls:
        return HeldOutCalls(self._context.settings.capture.held_out_share, PAIRS_BEFORE_RELEASE)

    def restart(self) -> None:
        """Hold out calls again, as after a first capture."""
        self._held_out = self._new_held_out()

    # ---- a call ----------------------------------------------------------------------------------------

    def new_shape(self, signature: Any, is_eager: bool = False) -> Shape:
        if len(self.shapes) >= MAX_SHAPES:
            seldom = (key for key, known in tuple(self.shapes.items()) if not known.sizes.is_one)
            for old in list(itertools.islice(seldom, MAX_SHAPES // 4)):
                self.shapes.pop(old, None)
        text = str(signature)
        is_one = text in self._sizes or len(self._sizes) < MAX_EXACT
        text = text if is_one else str(without_sizes(signature))
        sizes = self._sizes.setdefault(text, Sizes(text, is_one))
        # The code of the last new shape may fit this one too: a graph with symbolic sizes does.
        direct: tuple[DirectCall, ...] = self._newest.direct if self._newest is not None else ()
        shape = self.shapes[signature] = self._newest = Shape(sizes, count_elements(signature), direct, is_eager)
        return shape

    def choose(self, shape: Shape, number: int) -> Held:
        """Choose the purpose of the next call, the ``number``-th."""
        context = self._context
        near = shape.sizes.near(shape.elements)
        has_pair = len(near) >= PAIRED
        shape.is_short = has_pair and near[0] < SHORT_CALL_US
        size = magnitude(shape.elements)
        if self._resting and self._rests_on(size):
            self._is_watched = False
            return Held.RESTING
        self._held_out.count_to(number - 1)
        held = self._held_out.next(self._changes[size], shape.is_new, has_pair, shape.is_short, size)
        self._is_watched = False
        if self._peaks is not None and held is Held.NO and has_pair and self._is_settled(shape):
            watch = self._peaks.begin(shape.sizes.text, shape.elements, number)
            self._is_watched, held = watch is not None, Held.COLD if watch else Held.NO
        if shape.noted_at != context.disturbances:
            context.mark_plans(self)
            self._is_marked = True
        return held

    def _rests_on(self, size: int) -> bool:
        left = self._resting.get(size, 0)
        if not left:
            return False
        left -= 1
        if size in self._awaiting and left % ASKED_EVERY == 0 and not self._tuning.expects_more():
            left = 0
        self._resting[size] = left
        if not left:
            del self._resting[size]
            self._awaiting.discard(size)
            self._unsettled = None
            self._held_out.confirm_anew(size)
        return True

    @property
    def is_resting(self) -> bool:
        """Whether calls of all sizes run the original module for now."""
        sizes = {magnitude(shape.elements) for shape in tuple(self.shapes.values())} if self._resting else set()
        return bool(sizes) and sizes <= {*self._resting}

    def _is_settled(self, shape: Shape) -> bool:
        """Whether the kernels of a shape are final."""
        return shape.noted_at == self._context.disturbances and not self._tuning.expects_more()

    def begin(self, shape: Shape | None, held: Held, number: int, now: float, stretch: Stretch | None = None) -> None:
        """Begin the chosen call, and with it a step; ``shape``: None where nothing is compared."""
        is_watched, self._is_watched = self._is_watched, False
        if held is Held.RESTING:
            shape, held = None, Held.NO
        context = self._context
        self.opened = OpenStep(
            now, shape, held, number, context.disturbances, context.timed_calls, context.held_calls, stretch, is_watched
        )
        if shape is not None and held is not Held.NO:
            context.held_out_calls += 1

    def call_took(self, seconds: float) -> None:
        """Note the time of the call, where the call is all of its step that is compared."""
        self._call_us = seconds * 1e6

    def free_calls(self, shape: Shape) -> int:
        """How many calls, including this one, need neither be timed nor held out; 0 for none."""
        if self._resting or self._is_watched or not shape.is_short:
            return 0
        if shape.noted_at != self._context.disturbances:
            return 0
        if self._peaks is not None and self._peaks.is_half_known(shape.sizes.text, shape.elements):
            return 0
        if (
            self.verdicts.any_lost and not self.skips_lost
        ):  # code that fits all sizes would also run the sizes that stay in eager
            return 0
        if any(len(sizes.recent) < PAIRED for sizes in tuple(self._sizes.values())):
            return 0
        signatures = len(self.shapes)
        timed = TIMED if signatures <= FEW else min(PAIRED * signatures, PAIR_WINDOW) + WARMING
        free = self._held_out.free(timed)
        return min(free, MOST_FREE) if free >= 2 else 0

    def skip(self, calls: int) -> None:
        """Skip so many of the free calls: `choose` is not called for them."""
        self._held_out.skip(calls)

    def end_untimed(self, began: float, now: float) -> None:
        """End a stretch of untimed calls."""
        us = (now - began) * 1e6
        self.total_us += us
        self._context.step_us_total += us
        self._warming = WARMING

    # ---- steps -----------------------------------------------------------------------------------------

    def end_step(self, now: float) -> None:
        """End the step, which lasts from one call to the next: by the host's clock, on a GPU by the root's stream."""
        if self.opened is not None:
            self._end(self.opened, now)
        if self.late:
            self.late.collect()

    def _end(self, opened: OpenStep, now: float) -> None:
        began, shape, held, _, disturbances, timed_calls, held_calls, stretch, is_watched = opened
        self.opened = None
        step_us = (now - began) * 1e6
        self.total_us += step_us
        ran = self._context.plans_since_mark(self) if self._is_marked else None
        self._is_marked = False
        if is_watched and self._peaks is not None and shape is not None:
            is_changed = disturbances != self._context.disturbances or not self.is_on
            self._peaks.end(shape.sizes.text, shape.elements, held is not Held.NO, self.on_gpu, is_changed)
        if shape is None or not self.is_on:  # an eager root costs the script no more than needed
            self._timer.end(stretch)
            return
        context = self._context
        is_disturbed = disturbances != context.disturbances
        if ran is not None and held is Held.NO:
            self._note(shape, ran)
            shape.noted_at = -1 if is_disturbed else disturbances
        is_left_out = is_disturbed or is_watched or held is Held.COLD or held_calls != context.held_calls
        if timed_calls != context.timed_calls:  # node by node, in Python
            is_left_out = is_left_out or (step_us if self._call_us is None else self._call_us) < SHORT_CALL_US
        if self._warming and held is Held.NO:
            self._warming -= 1
            is_left_out = is_left_out or shape.is_short
        if not self.on_gpu:
            self._add_step(opened, 0.0 if is_left_out else step_us)
            return
        stretch = self._timer.end(stretch)
        if is_left_out:
            self.late.add(None, lambda _: self._add_step(opened, 0.0))  # after those before it
        else:
            self.late.add(stretch, partial(self._add_late_step, opened))

    def _note(self, shape: Shape, ran: RanPlans) -> None:
        """Note which plans calls of a shape run. New kernels elsewhere in the process say nothing of this graph's."""
        if shape.ran is not None and ran.versions != shape.ran.versions:  # earlier measurements are no longer valid
            shape.sizes.recent.clear()
            self.verdicts.clear()
            self._held_out.doubt()
            self.gain = 0.0
            self._changes[magnitude(shape.elements)] += 1
        shape.ran = ran

    def _add_late_step(self, opened: OpenStep, nanoseconds: int | None) -> None:
        self._context.untimed_steps += nanoseconds is None
        self._call_us = None  # what the host took
        self._add_step(opened, (nanoseconds or 0) / 1e3)

    def _add_step(self, opened: OpenStep, step_us: float) -> None:
        """Add the time of a step; 0 stands for a step that is not compared."""
        _, shape, held, number, *_ = opened
        assert shape is not None
        held_out = held is not Held.NO
        if self._context.store_thread.usable:  # else nobody takes them
            fused = 0 if held_out or shape.ran is None else shape.ran.fused_nodes
            self._context.steps.append(
                TimedStep(self.key, shape.sizes.text, held_out, fused, number, step_us, shape.elements)
            )
        if step_us and self.is_on:
            self._context.step_us_total += step_us
            self.compare(shape, held_out, step_us if self._call_us is None else self._call_us)
        self._call_us = None

    def compare(self, shape: Shape, held_out: bool, us: float) -> None:
        """Find sizes whose captured steps lose to held-out eager ones."""
        if not held_out:
            shape.sizes.recent.append((shape.elements, us))
            return
        near = shape.sizes.near(shape.elements)
        if len(near) >= PAIRED:
            # A released root would be as fast as a held-out call without autofuse.
            outside_us = 0.0 if self._call_us is not None else self._costs.timed
            has_briefs = self.skips_lost or not self.verdicts.any_lost
            added_us = self._costs.brief if has_briefs else self._costs.timed
            captured_us = max(statistics.median(near) - outside_us, 0.0) + added_us  # never 0
            self.verdicts.add(shape.elements, max(us - outside_us, 0.0) / captured_us)
            is_sure = self.verdicts.is_sure(shape.elements) and is_alone()
            self._held_out.note_sure(magnitude(shape.elements), is_sure)
        self.gain = self.verdicts.gain or self.gain
        is_short = us < SHORT_CALL_US
        if self.verdicts.is_clear(shape.elements, self._known_gain, is_short):
            self._held_out.end(magnitude(shape.elements))
        ratios = self.verdicts.ratios(shape.elements)
        if len(ratios) < PAIRS_BEFORE_RELEASE:
            return
        loss = self.verdicts.find_loss(shape.elements, is_short, self._context.settings.capture.release_factor)
        if loss is not None and self._tuning.expects_more():
            self._awaiting |= loss.magnitudes
            self._rest(loss, self._rests, FIRST_REST, 1)
        elif loss is not None and self._has_chance(loss):
            self._unsettled = shape, loss
            self._rest(loss, self._chances, max(FIRST_REST, round(CHANCE_US / max(us, 1.0))), 2)
        elif loss is not None:
            self._lose(shape, loss, is_short)
        elif is_unsure(ratios):
            self._held_out.extend(magnitude(shape.elements))

    @property
    def _known_gain(self) -> float:
        known = self._known.get(self.key)
        return known.gain if known is not None else 0.0

    def _lose(self, shape: Shape, loss: Loss, is_short: bool) -> None:
        self.verdicts.lose(loss)
        # A shape that came once or twice does not count: it will never have a pair of samples.
        seen = [known for known in tuple(self.shapes.values()) if len(known.sizes.near(known.elements)) >= PAIRED]
        self._on_loss(shape, loss, is_short, all(self.verdicts.is_lost(known.elements) for known in seen))

    def conclude(self) -> None:
        """At the end of the run: the last loss holds where it could not be tried anew, or short scripts never learn."""
        if self._unsettled is not None:
            shape, loss = self._unsettled
            self._unsettled = None
            self._lose(shape, loss, True)

    def _has_chance(self, loss: Loss) -> bool:
        return loss.reason == "no_gain" and max(self._chances[size] for size in loss.magnitudes) < CHANCES - 1

    def _rest(self, loss: Loss, before: Counter[int], calls: int, doublings: int) -> None:
        """Run eager for so many calls, and for more where a magnitude has rested ``before``.

        A graph that loses before its kernels are tuned, or in one moment, may yet win.
        """
        self.verdicts.forget(loss.magnitudes)
        self.gain = 0.0  # later runs would read it as the gain of the kernels to come
        for size in loss.magnitudes:
            self._resting[size] = min(calls << doublings * before[size], LONGEST_REST)
        before.update(loss.magnitudes)
