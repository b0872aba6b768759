"""A root: observed in eager, captured when that pays, released when it does not.

In: calls of an outermost module. Out: the same results, from the original module or from its captured graph; a root
record. Guarantee: if autofuse fails, the original module computes the result; exceptions of the user's own code reach
the user.

This module sends each call to one part of the root, and decides when to capture. `root_life` has the root's states;
`root_observed` and `root_captured` have the calls in two of them; `root_unwatched`, `root_untimed` and `root_bypass`
have the cheapest calls; `graph_trial` has step times, and the sizes for which the root loses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from autofuse.gpu import capturing
from autofuse.ir.records import RootRecord
from autofuse.observer.held_out import Held
from autofuse.observer.release_policy import Loss
from autofuse.observer.root_tracker import Target
from autofuse.observer.signatures import call_signature, count_elements
from autofuse.runtime.optimizers.kept_casts import casts_are_kept
from autofuse.runtime.roots.bypass import Bypass
from autofuse.runtime.roots.captured import CapturedCalls
from autofuse.runtime.roots.device import RootDevice
from autofuse.runtime.roots.graph_trial import Costs, GraphTrial
from autofuse.runtime.roots.life import RootLife
from autofuse.runtime.roots.observed import ObservedCalls
from autofuse.runtime.roots.patched_classes import must_be_eager
from autofuse.runtime.roots.policy import BY_SIZE, RootPolicy
from autofuse.runtime.roots.repeated_values import shares_values
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.step_clock import Account
from autofuse.runtime.roots.steps import Shape
from autofuse.runtime.roots.traces import RootTraces
from autofuse.runtime.roots.tracing import TracedCalls, ran_forward
from autofuse.runtime.roots.untimed import UntimedCalls
from autofuse.runtime.roots.unwatched import CountedCalls
from autofuse.script_signals import held_back, is_of_handler

if TYPE_CHECKING:
    from autofuse.runtime.roots.peak_memory import RootPeaks

COSTS = Costs(brief=6.0, timed=12.0)  # hook and guards; where the call is timed, signature and statistics too


class Root:
    """All modules of one class and one set of parameter shapes."""

    def __init__(self, services: RootServices, key: str, name: str, peaks: RootPeaks | None) -> None:
        self.key = key
        self.name = name
        self.trial = trial = GraphTrial(services, key, COSTS, peaks, self.lose)
        self.account = account = Account(services.context, services.backwards)
        self.policy = policy = RootPolicy(services, key, account, trial.verdicts)
        self._bypass = Bypass(services.tracker, trial)
        self._unwatched = unwatched = CountedCalls(services, key, policy, account, trial)
        self.untimed = untimed = UntimedCalls(trial)
        self.life = life = RootLife(services, name, trial, unwatched, untimed)
        self.traces = traces = RootTraces(services, name, trial, life, untimed)
        self._device = device = RootDevice(services, trial)
        self._traced = traced = TracedCalls(services, traces, account, policy, life)
        self._observed = ObservedCalls(services, trial, account, policy, device, unwatched, life)
        self._captured = CapturedCalls(services, trial, account, device, traced, untimed, life)
        self._services = services
        self._observer = services.observer
        self._tracker = services.tracker
        self._clock = services.tools.clock
        self._seen = 0  # calls, without those that are only counted

    @property
    def state(self) -> str:
        """The state as in the root's record, with its reason."""
        return self.life.state

    @property
    def reason(self) -> str:
        return self.life.reason

    @property
    def detail(self) -> str:
        return self.life.detail

    @property
    def calls(self) -> int:
        """Calls that came here or were only counted."""
        return self._seen + self._unwatched.taken

    @property
    def all_calls(self) -> int:
        """All calls, with those of released modules."""
        return self.calls + self._bypass.calls

    @property
    def takes(self) -> Callable[[], bool]:
        """Whether a call is only counted and need not come here."""
        return self._unwatched.takes

    def close(self) -> None:
        """Called at the end of the run."""
        self._unwatched.settle(self._clock())

    # ---- a call --------------------------------------------------------------------------------------

    def call(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._unwatched.takes():
            return self._tracker.call_original(module, args, kwargs)
        try:
            return self._call(module, args, kwargs)
        except Exception as error:
            if ran_forward(error) or is_of_handler(error):
                raise
            self.life.give_up(module, error)
        return self._tracker.call_original(module, args, kwargs)

    def _call(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        untimed, is_eager_only = self.untimed, must_be_eager()
        if self._services.context.steps_in_autocast:
            is_eager_only = is_eager_only or casts_are_kept()
        if untimed.left > 0 and not is_eager_only and self.traces.classes.are_as_noted():
            direct = untimed.find(module, args, kwargs)
            if direct is not None:
                self._seen += 1
                return direct.run(module, *args, **kwargs)
        trial, life, clock = self.trial, self.life, self._clock
        now, spent = clock(), self._observer.cost_seconds
        if untimed.began is not None:
            untimed.end(now)
        was_watched = not self._unwatched.end(now)
        trial.end_step(now)
        self.account.end(now, not trial.on_gpu)
        self._seen += 1
        if life.state == "captured" and not self.traces.classes.are_as_noted():
            self.traces.forget()
        if is_eager_only:
            return self._run_eager(module, args, kwargs, now)
        if was_watched and life.state == "observing" and self._unwatched.begin(now):
            return self._tracker.call_original(module, args, kwargs)
        verdicts = trial.verdicts
        if verdicts.any_lost:
            if verdicts.is_lost(elements_of(args, kwargs)):
                return self._leave_alone(module, args, kwargs, now)
            self._welcome(module)
        if life.state == "observing":
            if capturing.is_capturing():
                return self._tracker.call_original(module, args, kwargs)
            entered, spent = self._watch(module, args, kwargs, now, spent)
            if life.state == "observing":
                return self._observed.call(module, args, kwargs, self.calls, entered, spent)
        if life.state == "captured":
            return self._captured.call(module, args, kwargs, self.calls, now)
        return self._run_eager(module, args, kwargs, now)

    def _run_eager(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], now: float) -> Any:
        """Run a call in eager, without comparing its time."""
        self.trial.begin(None, Held.NO, self.calls, now)
        return self._tracker.call_original(module, args, kwargs)

    def _leave_alone(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], now: float) -> Any:
        """Run a call of a size that stays in eager."""
        self._bypass.leave_alone(module, args, kwargs, self.life.state == "eager")
        if self.life.state == "observing":
            self._observer.end_step(self.key)  # which would go on until the next call of another size
        return self._run_eager(module, args, kwargs, now)

    def _welcome(self, module: Target) -> None:
        """Note a call of a size that did not lose, in a root that lost for other sizes."""
        self._bypass.wake(module)
        if self.life.state == "eager" and self.life.reason in BY_SIZE and not capturing.is_capturing():
            self.policy.reopen()
            self.trial.restart()
            self.life.reopen_sizes()

    # ---- decisions --------------------------------------------------------------------------------------

    def _watch(
        self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], now: float, spent: float
    ) -> tuple[float, float]:
        """Note an observed call, and capture or decline the root when that is due.

        ``now`` and ``spent``: when the call began and what was on the observer's account; both are returned less the
        time of the advice, which is not part of the cost of watching.
        """
        observer, life, clock = self._observer, self.life, self._clock
        signature = call_signature(args, kwargs)
        self.policy.observe(count_elements(signature))
        # Before the decision: the second call already tells which dims vary.
        observer.on_root_call(self.key, args, kwargs, signature)
        if self.policy.is_due():
            asked, noted = clock(), observer.cost_seconds
            self._decide(module, args, kwargs)
            now += clock() - asked
            spent += observer.cost_seconds - noted
        if life.state == "captured" and life.reason == "kept_trace":
            self._traced.take_kept(module, args, kwargs)
        return now, spent

    def _decide(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = self._device.find(module, args, kwargs)
        advice = self.policy.advise(module, self.life.failures)
        self.life.note(advice)
        if advice.capture and self._must_stay_equal(module):
            self.life.keep_equal()
        elif advice.capture:
            try:
                with held_back():
                    self._capture_for(device)
            except Exception as error:
                if is_of_handler(error):
                    raise
                self.life.fail(error, False)
        elif advice.final:
            self._bypass.is_small = advice.reason == "too_small"
            if advice.reason in BY_SIZE:
                self.trial.verdicts.lose_up_to(self.policy.reach(self._bypass.is_small))
            self.life.decline()

    def _must_stay_equal(self, module: Target) -> bool:
        return not self._services.context.settings.run.strict and shares_values(module)

    def _capture_for(self, device: torch.device) -> None:
        """Capture, unless the graph would have no kernel: none is known for the device, and none can be made."""
        kernels = self._services.kernels
        began = self._clock()
        kernels.use_device(device)
        is_useless = kernels.tunable(device) is None and not len(kernels.catalogue.table)
        self.account.note("imports", self._clock() - began)
        if is_useless and not self._services.context.settings.capture.at_once:
            self.life.await_kernels()
        else:
            self.capture()

    def ask_for(self, module: Target) -> None:
        """The script asks for its capture."""
        if self._must_stay_equal(module):
            self.life.keep_equal()
        else:
            self.capture()

    def capture(self) -> None:
        """Run the captured graph from the next call on."""
        began = self._clock()
        self._services.context.store_thread.wait_ready(2.0)  # dims that varied in earlier runs are known by then
        self.traces.load()
        self.account.note("imports", self._clock() - began)
        self.life.capture()

    def lose(self, shape: Shape, loss: Loss, is_short: bool, is_all: bool) -> None:
        """Give up sizes whose captured steps lose to held-out eager ones."""
        self._bypass.is_small = is_short
        self.life.lose(loss, shape.elements, is_all)

    def record(self) -> RootRecord:
        known, ledger = self._services.known.get(self.key), self.account.ledger
        state, reason, detail = self.life.told()
        # Captured before a step was sampled: take as many as an earlier run saw.
        operations = self._observer.ops_in_forward(self.key) or (known.operations if known is not None else 0)
        return RootRecord(
            root=self.key,
            name=self.name,
            state=state,
            reason=reason,
            detail=detail,
            calls=self.all_calls,
            eager_seconds=ledger.eager_seconds,
            operations=operations,
            capture_seconds=ledger.lost_seconds,
            predicted_capture_seconds=self.policy.predicted_seconds,
            dynamic_dims=self.traces.dynamic_dims(),
            kept_graphs=self._traced.kept_graphs,
            judged_elements=self.trial.verdicts.lost_elements,
            capture_causes=tuple((cause, seconds) for cause, seconds in ledger.lost().items() if seconds >= 5e-4),
            model_seconds=self.policy.model_seconds,
            gain=self.trial.gain or (known.gain if known is not None else 0.0),
        )


def elements_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The elements of a call's tensors; 1 where they are unknown, as for nested tensors."""
    return count_elements(call_signature(args, kwargs))
