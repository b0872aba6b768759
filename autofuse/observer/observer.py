"""The observer's interface for the session: it takes every call of a root, and returns what was learnt.

In: calls of roots (``on_root_call``, ``before_root_call``, ``after_root_call``). Out: dynamic dims, ops in a forward,
the ratio of backward to forward, ``OpProfile`` and ``DimHistogram`` records, and the cost of observing. Guarantee:
nothing is raised into the script; the first fault of our own ends the observation (``fault`` says why). Once every root
is decided, a call costs one comparison.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from autofuse.dynamo_skip import mark_all_below
from autofuse.ir.records import DimHistogram, OpProfile
from autofuse.locks import make_rlock
from autofuse.observer.calibration import OpCost, measure_op_cost
from autofuse.observer.config import ObserverConfig
from autofuse.observer.device_timer import EventTimer, LateTimes
from autofuse.observer.op_statistics import OpStatistics
from autofuse.observer.profile import LateTime, RootTotals, aggregate
from autofuse.observer.sampler import Sampler
from autofuse.observer.signatures import call_signature, tensor_leaves
from autofuse.observer.statistics import PendingCalls, ShapeStatistics
from autofuse.observer.step import StepRecorder

_OTHER_CALLS = 8  # this many times more calls of other roots, and the anchor is thought to be called no more
_KEPT_SAMPLES = 16  # sampled steps of a root whose medians are given


class _Root:
    """What is known of one root."""

    def __init__(self, key: str, config: ObserverConfig) -> None:
        self.shapes = ShapeStatistics(key, config.max_shapes, config.max_sizes)
        self.pending: PendingCalls[tuple[Any, ...]] = PendingCalls(self.shapes, 2 * config.max_shapes)
        self.samples: deque[RootTotals] = deque(maxlen=_KEPT_SAMPLES)
        self.calls = 0
        self.waited_in_vain = 0  # sampled steps in a row that waited for a backward which never came
        self.seconds: deque[float] = deque(maxlen=_KEPT_SAMPLES)  # of the last calls that were not sampled


class Observer:
    """Watches roots within the limits of ``config``. Safe to call from any thread."""

    def __init__(self, config: ObserverConfig | None = None, timer: EventTimer | None = None) -> None:
        """``timer`` gives the times of calls on GPUs; without one they are times of their launches."""
        self._config = config or ObserverConfig()
        self._sampler = Sampler(self._config)
        self._late = None if timer is None else LateTimes(timer)  # of sampled calls on GPUs
        self._recorder = StepRecorder(self._config.max_events_per_step, self._config.max_step_seconds, timer)
        self._ops = OpStatistics(self._config)
        self._roots: dict[str, _Root] = {}
        self._lock = make_rlock()
        self._anchor: str | None = None  # root whose next call ends the step
        self._anchor_calls = 0
        self._other_calls = 0  # of other roots since the anchor's last call
        self._began_in_inference = False
        self._entered = False  # a root call of the step is in progress
        self._wants_backward = False  # gradients are on in the anchor's calls
        self._stopped = False
        self._others_seconds = 0.0
        self.fault: str | None = None  # why the observation ended early
        self.untimed_calls = 0  # sampled calls on a GPU, counted in the profiles, whose times are not known
        self.skipped_calls = 0  # root calls whose arguments could not be described
        self.untracked_calls = 0  # calls of roots beyond ``max_owners``
        began = time.perf_counter()
        self._op_cost: OpCost = measure_op_cost() if self._config.enabled else OpCost.typical()
        self._sampler.spend(time.perf_counter() - began)

    # ---- told by the session ----------------------------------------------------------------------

    def on_root_call(
        self, root: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], signature: tuple[Any, ...] | None = None
    ) -> None:
        """Count the shapes of a root call. About 2 us for shapes seen before.

        ``signature``: of a caller who knows it, and spends what this takes by itself.
        """
        if self._stopped:
            return
        began = time.perf_counter()
        try:
            known = self._roots.get(root) or self._add_root(root)
            if known is None:
                self.untracked_calls += 1
                return
            known.calls += 1
            shapes = call_signature(args, kwargs) if signature is None else signature
            if not known.pending.hit(shapes):
                leaves = tensor_leaves(args, kwargs)
                with self._lock:
                    known.pending.learn(shapes, leaves)
        except Exception:  # an argument that does not let itself be described is no reason to stop
            self.skipped_calls += 1
        if self._late:
            self._late.collect()
        if signature is None:
            self._sampler.spend(time.perf_counter() - began)

    def count_unseen(self, root: str, calls: int) -> None:
        """Count calls since the last one that was told, of which nothing is known: their shapes are taken for its."""
        known = self._roots.get(root)
        if known is None or not calls:
            return
        known.calls += calls
        known.pending.repeat(calls)
        self._sampler.count(root, calls)

    def spend(self, seconds: float) -> None:
        """What others have taken to watch a call; it leaves sampled steps what they may take."""
        self._others_seconds += seconds

    def before_root_call(self, root: str, module: torch.nn.Module | None = None) -> None:
        """A root is about to run eagerly in this thread: end a sampled step here, begin one, or do nothing.

        ``module`` gives the paths of modules in the profiles their names; without it they are class names.
        """
        if self._stopped:
            return
        recorder = self._recorder
        if not recorder.is_recording:
            if self._sampler.is_idle and self._sampler.knows(root):
                return
            if not self._sampler.wants(root):
                return
        began = time.perf_counter()
        try:
            self._step_to(root, module)
        except Exception:
            self._give_up()
        self._sampler.spend(time.perf_counter() - began)

    def after_root_call(self, root: str, seconds: float | None) -> bool:
        """The root call is over and took this long; False for one that was sampled, whose time is of no use.

        None: the device has not told the time yet; ``on_root_seconds`` follows.
        """
        if self._entered and self._recorder.is_mine:
            self._entered = False
            try:
                self._recorder.exit_root()
            except Exception:
                self._give_up()
            return False
        if seconds is not None:
            self.on_root_seconds(root, seconds)
        return True

    def on_root_seconds(self, root: str, seconds: float) -> None:
        """What a call took that was not sampled."""
        known = self._roots.get(root)
        if known is not None:
            known.seconds.append(seconds)

    def decide(self, root: str) -> None:
        """The root is captured or stays eager for good: stop sampling it."""
        with self._lock:
            self._sampler.decide(root)
            self.end_step(root)

    def end_step(self, root: str) -> None:
        """The session need not tell of this root's next calls, so a step of it that is recorded would never end."""
        if root != self._anchor or not self._recorder.is_mine or self._stopped:
            return
        with self._lock:
            began = time.perf_counter()
            try:
                self._finish_step()
            except Exception:
                self._give_up()
            self._sampler.spend(time.perf_counter() - began)

    def reopen(self, root: str) -> None:
        """The root is open again, for its sizes are others: sample it again. Times of calls so far are forgotten."""
        self._sampler.reopen(root)
        known = self._roots.get(root)
        if known is not None:
            known.seconds.clear()

    def stop(self) -> None:
        """End the observation; its results stay readable."""
        if self._stopped:
            return
        self._stopped = True
        began = time.perf_counter()
        try:
            if self._recorder.is_recording:
                self._finish_step()
            self._recorder.clean_up()
            if self._late is not None:
                self._late.close()
        except Exception:
            self._give_up()
        self._sampler.spend(time.perf_counter() - began)

    # ---- asked by the session ---------------------------------------------------------------------

    def ops_in_forward(self, root: str) -> int | None:
        """Aten calls in one forward of the root, median of the sampled steps; None before the first."""
        counts = [totals.ops_per_call for totals in self.samples(root) if totals.calls]
        return round(median(counts)) if counts else None

    def ops_in_backward(self, root: str) -> int:
        """Aten calls in one backward pass of the root, the most that a sampled step has seen."""
        return max((round(t.backward_ops / t.calls) for t in self.samples(root) if t.calls), default=0)

    def backward_ratio(self, root: str) -> float | None:
        """Time of backward over time of forward, median of the sampled steps; None before the first.

        0.0 for a root that ran without gradients. Steps whose backward was not seen although gradients were on do
        not count, nor do steps with times that the device has not told.
        """
        ratios = [
            totals.backward_ns / totals.forward_ns
            for totals in self.samples(root)
            if totals.forward_ns
            and not (totals.late or totals.untimed)
            and (totals.backward_ns or not totals.wants_backward)
        ]
        return median(ratios) if ratios else None

    def sampled_steps(self, root: str) -> int:
        """Steps of the root that were sampled so far."""
        return self._sampler.sampled_steps(root)

    def samples(self, root: str) -> list[RootTotals]:
        """What the root took in each of its last sampled steps, the oldest first."""
        known = self._roots.get(root)
        return list(known.samples) if known else []

    def dynamic_dims(self, root: str) -> tuple[tuple[str, int], ...]:
        """(argument path, dim) of each dim of the root's arguments that had more than one size."""
        with self._lock:
            known = self._roots.get(root)
            return known.shapes.dynamic_dims() if known else ()

    def varying_sizes(self, root: str) -> int:
        """How many sizes of the root's arguments vary, those that vary alike counted once."""
        seen, _ = zip(*self.shapes(root), strict=True) if self.calls(root) else ((), ())
        shapes = [dict(shape) for shape in seen]
        dims = {
            tuple(sizes[dim] if dim < len(sizes) else -1 for sizes in (shape.get(path, ()) for shape in shapes))
            for path, dim in self.dynamic_dims(root)
        }
        return len(dims)

    def shapes(self, root: str) -> list[tuple[tuple[tuple[str, tuple[int, ...]], ...], int]]:
        """Exact argument shapes of the root's calls with their counts, most frequent first."""
        with self._lock:
            known = self._roots.get(root)
            return known.pending.flush().shapes() if known else []

    def calls(self, root: str) -> int:
        """Calls of the root so far."""
        known = self._roots.get(root)
        return known.calls if known else 0

    def typical_seconds(self, root: str) -> float | None:
        """Median time of the root's last calls that were not sampled; None before the first."""
        known = self._roots.get(root)
        return median(known.seconds) if known and known.seconds else None

    def profiles(self) -> list[OpProfile]:
        """What was seen of each op, longest total time first."""
        with self._lock:
            return self._ops.profiles()

    def histograms(self) -> list[DimHistogram]:
        """Sizes of every dim of every argument, of roots and of ops."""
        with self._lock:
            found = [record for known in self._roots.values() for record in known.pending.flush().histograms()]
            return found + self._ops.histograms()

    @property
    def tail_calls(self) -> int:
        """Sampled op calls that no profile holds."""
        return self._ops.tail_calls

    @property
    def cost_seconds(self) -> float:
        """What observing has cost so far, by its own measurement."""
        return self._sampler.cost_seconds + self._others_seconds

    @property
    def is_sampling(self) -> bool:
        """Is a step being recorded right now?"""
        return self._recorder.is_recording

    # ---- inside -------------------------------------------------------------------------------------

    def _add_root(self, root: str) -> _Root | None:
        with self._lock:
            if len(self._roots) >= self._config.max_owners:
                return None
            return self._roots.setdefault(root, _Root(root, self._config))

    def _step_to(self, root: str, module: torch.nn.Module | None) -> None:
        """Move on to this call: end the step that it ends, begin one where none is in progress, and mark the call."""
        recorder = self._recorder
        with self._lock:
            if recorder.is_recording and not recorder.is_mine:
                if time.perf_counter() - recorder.began > self._config.max_step_seconds:
                    self._finish_step()  # its thread calls no roots any more
                return
            if recorder.is_recording:
                # A mode that came before an inference_mode block may not go inside of it: the block's end would bring
                # its dispatch key back, and the next operator would look for a mode in vain.
                if torch.is_inference_mode_enabled() and not self._began_in_inference:
                    self._other_calls += 1
                    return
                if self._is_over(root):
                    self._finish_step()
                    if not self._sampler.wants(root):
                        return
                else:
                    self._sampler.count(root)
            if not recorder.is_recording:
                if self._late or not recorder.begin():  # one step at a time is waited for
                    return
                self._anchor, self._anchor_calls, self._other_calls = root, 0, 0
                self._began_in_inference = torch.is_inference_mode_enabled()
                self._wants_backward = torch.is_grad_enabled() and not self._runs_forward_only(root)
            if root == self._anchor:
                self._anchor_calls, self._other_calls = self._anchor_calls + 1, 0
            else:
                self._other_calls += 1
            self._entered = True
            recorder.enter_root(root, module)

    def _is_over(self, root: str) -> bool:
        """Does the step in progress end with this call?

        A root that runs several times before one backward (a recurrent cell, accumulated losses) stays in one step
        until the backward was seen, or there would be no telling what backward costs.
        """
        if time.perf_counter() - self._recorder.began > self._config.max_step_seconds:
            return True
        if root != self._anchor:
            return self._other_calls >= _OTHER_CALLS * self._config.max_calls_per_step
        waits = self._wants_backward and not self._recorder.saw_backward
        return not waits or self._anchor_calls >= self._config.max_calls_per_step

    def _runs_forward_only(self, root: str) -> bool:
        known = self._roots.get(root)
        return known is not None and known.waited_in_vain >= 2

    def _finish_step(self) -> None:
        recorder, anchor = self._recorder, self._anchor
        self._anchor, self._entered = None, False
        began = time.perf_counter()
        passed, timing = recorder.passed, recorder.timing_seconds
        known = self._roots.get(anchor) if anchor is not None else None
        if known is not None and self._wants_backward:
            known.waited_in_vain = 0 if recorder.saw_backward else known.waited_in_vain + 1
        events = recorder.end()
        learnt = False
        if events:
            paths = recorder.paths()
            profile = aggregate(events, lambda identity, name: paths.get(identity, name))
            learnt = self._ops.add(profile)
            self.untimed_calls += profile.untimed
            for call in profile.late:
                assert self._late is not None
                self._late.add(call.stretch, partial(self._add_late, call))
            for root, totals in profile.roots.items():
                owner = self._roots.get(root) or self._add_root(root)
                if owner is not None and totals.calls:
                    owner.samples.append(totals)
                    if root != anchor:
                        self._sampler.credit(root, learnt)
        if recorder.fault is not None:
            self.fault = recorder.fault
            self._stopped = True
        in_ops = len(events) * self._op_cost.recorded_seconds
        in_ops += (recorder.passed - passed) * self._op_cost.passed_seconds
        in_ops += recorder.timing_seconds - timing
        self._sampler.spend(in_ops)  # the time spent here is accounted for by the caller
        if anchor is not None:
            self._sampler.finish_step(anchor, in_ops + time.perf_counter() - began, learnt)

    def _add_late(self, call: LateTime, nanoseconds: int | None) -> None:
        self.untimed_calls += nanoseconds is None
        call.add(nanoseconds)

    def _give_up(self) -> None:
        self.fault = self.fault or traceback.format_exc(limit=3)
        self._stopped = True
        try:
            self._recorder.end()
        except Exception:  # nothing more can be done; the mode no longer records
            return


mark_all_below(Observer.on_root_call, Observer.before_root_call, Observer.after_root_call)
