"""The life of a root: observed in eager, captured when that pays, released when it does not.

In: calls of an outermost module. Out: the same results, from the original module or from its captured
graph; a root record. What its steps take, and what that says, is a `GraphTrial`'s. Guarantee: whatever autofuse
does wrong, the original module answers; what the user's own code raises, the user gets.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from autofuse.capture.traced import ROOT_FILE
from autofuse.gpu import capturing
from autofuse.gpu.devices import CPU
from autofuse.ir.records import RootRecord
from autofuse.observer.capture_policy import UNTUNED, may_trace_again
from autofuse.observer.device_timer import Stretch
from autofuse.observer.held_out import Held
from autofuse.observer.module_table import ModuleTable
from autofuse.observer.release_policy import Loss
from autofuse.observer.root_tracker import RootTracker, Target, has_plain_call
from autofuse.observer.signatures import call_signature, count_elements, has_plain_sizes, tensors_by_path
from autofuse.preserve_rng import keep_generators, untouched
from autofuse.runtime.graph_trial import Costs, GraphTrial
from autofuse.runtime.patched_classes import Classes, must_be_eager, replaced_operator
from autofuse.runtime.root_bypass import Bypass
from autofuse.runtime.root_policy import BY_SIZE, RootPolicy
from autofuse.runtime.root_services import RootServices
from autofuse.runtime.root_steps import Brief, Shape
from autofuse.runtime.root_unwatched import CountedCalls
from autofuse.runtime.step_clock import Account
from autofuse.startup import gc_pause

if TYPE_CHECKING:
    from autofuse.capture.dynamo import CapturedRoot
    from autofuse.capture.guarded_call import DirectCall, DirectCalls
    from autofuse.runtime.peak_memory import RootPeaks

log = logging.getLogger(__name__)

COSTS = Costs(brief=6.0, timed=12.0)  # hook and guards; where the call is timed, signature and statistics too
# Codes that a signature has learnt: one root may stand for several modules, or take flags beside its tensors.
MAX_DIRECT = 4
MAX_LEARNT = 32
MAX_FORGOTTEN = 8  # times that code is replaced and traced anew; a script that goes on so stays in eager


class Root:
    """All modules of one class and one set of parameter shapes."""

    def __init__(self, services: RootServices, key: str, name: str, peaks: RootPeaks | None) -> None:
        self._services = services
        self._context = services.context
        self.key = key
        self.name = name
        self.trial = GraphTrial(services, key, COSTS, peaks, self._lose)
        self._seen = 0  # calls, but those that are only counted
        self.account = account = Account(services.context, services.backwards)
        self.policy = RootPolicy(services, key, account, self.trial.verdicts)
        self._bypass = Bypass(services.tracker, self.trial)
        self._unwatched = CountedCalls(services, key, self.policy, account, self.trial)
        self.state = "observing"
        self.reason, self.detail = "not_yet", ""
        self.kept_graphs = 0
        self.failures = 0
        self._captured: CapturedRoot | None = None
        self._dynamo: ModuleType | None = None  # capture.dynamo, once something is captured
        self._fast_paths = ModuleTable[bool]()
        self._decided: tuple[str, str] | None = None  # why it was left in eager before; holds until it is captured
        self._spent_at_trace = 0.0  # in eager, when a graph was traced last
        self._traces = 0
        self._brief: Brief | None = None
        self._classes = Classes()
        self._has_breaks = False
        self._forgotten = 0  # times that what was traced was no more what it was
        self._device: torch.device | None = None

    @property
    def state(self) -> str:
        """As in its record."""
        return self._state

    @state.setter
    def state(self, state: str) -> None:
        self._state = state
        self.trial.is_on = state == "captured"
        self._unwatched.stop()

    @property
    def calls(self) -> int:
        """That came here, or were only counted."""
        return self._seen + self._unwatched.taken

    @property
    def takes(self) -> Callable[[], bool]:
        """Whether a call is only counted, and need not come here."""
        return self._unwatched.takes

    # ---- a call --------------------------------------------------------------------------------------

    def call(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._unwatched.takes():
            return self._services.tracker.call_original(module, args, kwargs)
        try:
            return self._call(module, args, kwargs)
        except Exception as error:
            if ran_forward(error):
                raise
            self._give_up(module, error)
        return self._services.tracker.call_original(module, args, kwargs)

    def _give_up(self, module: Target, error: BaseException) -> None:
        """Bookkeeping of ours has failed: the module is let go."""
        with contextlib.suppress(Exception):
            self.state, self.reason = "eager", "bookkeeping_failed"
            self.detail = f"{type(error).__name__}: {error}"[:300]
            self._brief = None
            if self._services.tracker.is_installed:
                self._services.tracker.release(module).is_final = True
            self._context.report_fallback(
                "bookkeeping_failed", f"{self.name} stays eager: autofuse failed to watch it", error
            )
            self._services.observer.decide(self.key)

    def _forget(self, detail: str) -> None:
        """What was traced is not what it was: it is traced anew once that pays, as a new shape is."""
        self._forgotten += 1
        log.info("%s: what was traced is forgotten: %s", self.name, detail)
        if self._forgotten > MAX_FORGOTTEN:
            self._release(f"{detail}, and others before")
        elif self._has_breaks:  # what Dynamo has compiled behind a break is not ours to let go
            self._release(f"{detail}, and its graph breaks")
        self.drop_traces()

    def drop_traces(self) -> bool:
        """Let go of what was traced, and of all that its guards hold; False where there is nothing."""
        shapes = self.trial.shapes
        if self._captured is None or all(shape.is_new and not shape.direct for shape in list(shapes.values())):
            return False
        assert self._dynamo is not None
        self._dynamo.reset_root(self._captured)
        self._captured = self._compile()
        self._brief, self._classes = None, Classes()
        for shape in list(shapes.values()):
            shape.forget()
        self._context.disturbances += 1
        return True

    def _release(self, detail: str) -> None:
        """Its modules run in eager from now on."""
        self.state, self.reason, self.detail = "eager", "code_replaced", detail
        self._context.say_once("code_replaced", f"{self.name} goes on in eager: {detail}")

    def _call(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        brief = self._brief
        is_hooked = must_be_eager()
        if brief is not None and brief.left > 0 and not is_hooked and self._classes.are_as_noted():
            direct = brief.find(module, args, kwargs)
            if direct is not None:
                self._seen += 1
                return direct.run(module, *args, **kwargs)
        now, spent = time.perf_counter(), self._services.observer.cost_seconds
        if brief is not None:
            self.trial.end_untimed(brief.began, now)
            self._brief = None
        was_watched = not self._unwatched.end(now)
        self.trial.end_step(now)
        self.account.end(now, not self.trial.on_gpu)
        self._seen += 1
        if self.state == "captured" and not self._classes.are_as_noted():
            self._forget(f"{self._classes.replaced()} was replaced after it was captured")
        if is_hooked:
            self.trial.begin(None, Held.NO, self.calls, now)
            return self._services.tracker.call_original(module, args, kwargs)
        if was_watched and self.state == "observing" and self._unwatched.begin(now):
            return self._services.tracker.call_original(module, args, kwargs)
        verdicts = self.trial.verdicts
        if verdicts.any_lost:
            elements = elements_of(args, kwargs)
            if verdicts.is_lost(elements):
                return self._leave_alone(module, args, kwargs, now)
            self._welcome(module)
        if self.state == "observing" and not capturing.is_capturing():
            signature = call_signature(args, kwargs)
            self.policy.observe(count_elements(signature))
            # Before the decision: the second call already tells which dims vary.
            self._services.observer.on_root_call(self.key, args, kwargs, signature)
            entered = now
            if self.policy.is_due():
                asked, noted = time.perf_counter(), self._services.observer.cost_seconds
                self._decide(module, args, kwargs)
                entered += time.perf_counter() - asked  # it is no part of what watching takes
                spent += self._services.observer.cost_seconds - noted
            if self.state == "captured" and self.reason == "kept_trace":
                self._take_kept(module, args, kwargs)
            if self.state == "observing":
                return self._observed(module, args, kwargs, entered, spent)
        if self.state == "captured":
            return self._routed(module, args, kwargs, now)
        if self.state == "eager":
            self.trial.begin(None, Held.NO, self.calls, now)
        return self._services.tracker.call_original(module, args, kwargs)

    def _leave_alone(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], now: float) -> Any:
        """A call of a size that stays in eager."""
        self._bypass.leave_alone(module, args, kwargs, self.state == "eager")
        if self.state == "observing":
            self._services.observer.end_step(self.key)  # which would go on until the next call of another size
        self.trial.begin(None, Held.NO, self.calls, now)
        return self._services.tracker.call_original(module, args, kwargs)

    def _welcome(self, module: Target) -> None:
        """A call of a size that did not lose, of a root some of whose sizes did."""
        self._bypass.wake(module)
        if self.state == "eager" and self.reason in BY_SIZE and not capturing.is_capturing():
            self._decided = self._decided or (self.reason, self.detail)
            self.state, self.reason, self.detail = "observing", "not_yet", ""
            self.policy.reopen()
            self.trial.restart()
            self._services.observer.reopen(self.key)

    def _routed(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], now: float) -> Any:
        """A call of a captured root; once all is known of its shape, 4 us of ours."""
        trial, has_gradients = self.trial, torch.is_grad_enabled()
        is_training = getattr(module, "training", False)
        signature = (call_signature(args, kwargs), is_training, has_gradients)
        shape = trial.shapes.get(signature)
        if capturing.is_capturing():
            return self._recorded(module, args, kwargs, shape)
        if self._device is None:
            self._find_device(module, args, kwargs)
        stretch = self._begin_stretch() if trial.on_gpu else None
        if shape is None:
            is_eager = not is_training and not has_gradients and self._has_fast_path(module)
            is_eager = is_eager or not has_plain_sizes(signature[0])  # Dynamo knows half of what nested tensors are
            shape = trial.new_shape(signature, is_eager)
        account = self.account
        is_untraced = shape.is_new and not shape.is_eager
        may_run = not is_untraced or self._may_trace(module, args, kwargs, shape)
        held = trial.choose(shape, self.calls) if may_run else Held.RESTING
        if held is Held.RESTING:
            trial.begin(shape, held, self.calls, now, stretch)
            account.begin(shape.elements, now, False)
            result = self._services.tracker.call_original(module, args, kwargs)
            try:
                account.returned(result, time.perf_counter())
            except Exception as error:
                self._give_up(module, error)
            return result
        is_settled = not account.ledger.is_open
        if held is Held.NO and is_settled and self._begin_brief(shape, now, has_gradients):
            return self._run(module, args, kwargs, shape, False)
        trial.begin(shape, held, self.calls, now, stretch)
        account.begin(shape.elements, now, True)
        began = time.perf_counter()
        result = self._run(module, args, kwargs, shape, held is not Held.NO)
        returned = time.perf_counter()
        try:
            # Without a backward pass the call is all there is of it: the rest of the script need not be compared.
            if not has_gradients or not _needs_gradients(result):
                trial.call_took(returned - began)
            if account.ledger.is_open:
                account.returned(result, returned)
        except Exception as error:
            self._give_up(module, error)
        return result

    def _may_trace(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape) -> bool:
        """Whether a shape may run captured: it fits a graph there is, or calls in eager have paid for one more."""
        if any(direct.fits(module, args, kwargs) for direct in shape.direct):
            return True
        ledger = self.account.ledger
        if self._traces and not self.policy.is_asked:
            expected = ledger.trace_seconds / self._traces
            spent = ledger.eager_seconds - self._spent_at_trace
            if not may_trace_again(spent, expected, self._services.budget()):
                return False
        # Of a lazy module eager makes the parameters, and the numbers that they begin with.
        return not (isinstance(module, torch.nn.Module) and any(map(is_lazy, module.parameters())))

    def _run(
        self,
        module: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: Shape,
        held_out: bool,
    ) -> Any:
        if held_out or shape.is_eager:
            return self._services.tracker.call_original(module, args, kwargs)
        for direct in shape.direct:
            if direct.fits(module, args, kwargs):
                shape.is_new = False
                return direct.run(module, *args, **kwargs)
        captured = self._captured
        assert captured is not None
        if shape.learnt >= MAX_LEARNT:  # its graph breaks, or it is never twice the same: traced often enough
            return captured.settled(module, *args, **kwargs)
        self._note_classes(module, None)  # as they are before the trace: another thread may change them meanwhile
        result = self._traced(captured.trace, module, args, kwargs, shape)
        if self.state == "captured":
            self._learn(captured.direct, shape, module, args, kwargs)
        return result

    def _begin_brief(self, shape: Shape, now: float, has_gradients: bool) -> bool:
        """Whether this call and some that follow need not be timed."""
        shapes = self.trial.shapes
        free = self.trial.free_calls(shape)
        if not free or not all(known.direct and not known.is_eager for known in shapes.values()):
            return False
        self.trial.skip(free)
        found = {id(direct.manager): direct for known in shapes.values() for direct in known.direct}
        self._brief = Brief(free, now, has_gradients, found.values())
        return True

    def _has_fast_path(self, module: Target) -> bool:
        """Whether torch itself runs other kernels for it in inference: padding becomes zeros there, nowhere else."""
        found = self._fast_paths.get(module)
        if found is None:
            children = torch.nn.Module.modules(module) if isinstance(module, torch.nn.Module) else ()
            found = any(isinstance(child, torch.nn.TransformerEncoder) for child in children)
            self._fast_paths.set(module, found)
        return found

    def _learn(
        self,
        direct: DirectCalls,
        shape: Shape,
        module: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """After a call through Dynamo: the code it ran, for the next one."""
        found: DirectCall | None = None
        try:
            found = direct.find(module, args, kwargs)
            shape.learnt += 1 if found is not None else MAX_LEARNT // 4
            self._has_breaks |= found is None
        except Exception as error:  # calls go on through Dynamo
            shape.learnt = MAX_LEARNT
            log.debug("%s: no direct calls: %s", self.name, error)
        try:
            self._note_classes(module, found)
            alive = [d for d in shape.direct if d.manager.cache_entry is not None and d is not found]
            shape.direct = (*([found] if found is not None else []), *alive)[:MAX_DIRECT]
        except Exception as error:  # here, for the call has its result: what is raised further up runs it again
            self._give_up(module, error)

    def _note_classes(self, module: Target, direct: DirectCall | None) -> None:
        """Of all objects that a trace has looked at, of the modules that hold them, and of what these hold.

        Where the graph breaks, the guards of what follows are not ours to find: only the last two are known there.
        """
        kinds: set[type] = direct.types() if direct is not None else set()
        if isinstance(module, torch.nn.Module):
            for child in torch.nn.Module.modules(module):
                kinds.add(type(child))
                kinds |= {type(value) for value in vars(child).values()}
        self._classes.note([*kinds, torch.nn.Parameter])  # and so torch.Tensor

    def _recorded(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape | None) -> Any:
        """A call that the script records in a CUDA graph: nothing is traced, observed, held out or measured."""
        if shape is not None and not shape.is_new and self._captured is not None:
            return self._captured.settled(module, *args, **kwargs)
        return self._services.tracker.call_original(module, args, kwargs)

    def _observed(
        self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], entered: float, spent: float
    ) -> Any:
        """``entered``: when the call came here, less advice; ``spent``: what was on the observer's account then."""
        observer = self._services.observer
        observer.before_root_call(self.key, module if isinstance(module, torch.nn.Module) else None)
        began = time.perf_counter()
        self.trial.begin(None, Held.NO, self.calls, began)
        self.account.begin(self.policy.last_elements, began, False)
        stretch = self._begin_stretch()
        result = None
        try:
            result = self._services.tracker.call_original(module, args, kwargs)
            return result
        finally:
            try:
                now = time.perf_counter()
                self._returned(result, began, now, stretch)
                self._unwatched.watched(began - entered + time.perf_counter() - now, spent)
            except Exception as error:
                self._give_up(module, error)

    def _returned(self, result: Any, began: float, now: float, stretch: Stretch | None) -> None:
        """An observed call is over; ``result``: None where it raised."""
        observer = self._services.observer
        seconds = now - began
        stretch = self._services.timer.end(stretch)
        was_plain = observer.after_root_call(self.key, None if stretch is not None else seconds)
        self.account.returned(result, now, not was_plain)
        if self.trial.on_gpu:
            self._add_on_gpu(seconds)
        if stretch is not None:
            self.trial.late.add(stretch, partial(self._add_device_time, seconds, was_plain))

    def _add_on_gpu(self, seconds: float) -> None:
        """A forward pass; the host's clock does not tell how long the device is busy with the backward pass."""
        ratio = self._services.observer.backward_ratio(self.key) if torch.is_grad_enabled() else None
        self.account.ledger.count(seconds * (1.0 + (ratio or 0.0)))

    def _add_device_time(self, host_seconds: float, was_plain: bool, nanoseconds: int | None) -> None:
        """What a call took is the larger of the host's time and the device's."""
        seconds = max(host_seconds, (nanoseconds or 0) / 1e9)
        if was_plain:
            self._services.observer.on_root_seconds(self.key, seconds)
        self._add_on_gpu(seconds - host_seconds)

    def _find_device(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        self._device = device = _device_of(module, args, kwargs)
        self.trial.on_gpu = device.type == "cuda"
        return device

    def _begin_stretch(self) -> Stretch | None:
        device = self._device
        if device is None or device.type != "cuda":
            return None
        return self._services.timer.begin(device.index)

    def _traced(
        self,
        trace: Callable[..., Any],
        module: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shape: Shape,
    ) -> Any:
        """A call which may trace, for its shape or something else is new: all that can go wrong goes wrong here."""
        context, dynamo = self._context, self._dynamo
        assert dynamo is not None
        problem = _untraceable(module)
        if problem:
            self._release(problem)
            return self._services.tracker.call_original(module, args, kwargs)
        graphs, paused = len(context.routers), context.paused_seconds
        read, planned = dynamo.graphs_read(), context.planning_seconds
        restore_generators = keep_generators()
        began = time.perf_counter()
        try:
            with dynamo.capture_settings(context.settings.capture.recompile_limit):
                if isinstance(module, torch.nn.Module):
                    result = self._traced_or_kept(trace, module, args, kwargs)
                else:  # which may have done half of its work, of which it must do nothing twice
                    dynamo.mark_dynamic(tensors_by_path(args, kwargs), self.dynamic_dims())
                    with dynamo.suppressed_errors():
                        result = trace(module, *args, **kwargs)
        except Exception as error:
            from_kept = dynamo.graphs_read() != read
            if not isinstance(error, dynamo.CAPTURE_ERRORS) and not from_kept:
                raise
            restore_generators()  # half of the call may have run
            self.account.note("tracing", time.perf_counter() - began)
            result = self._services.tracker.call_original(module, args, kwargs)
            self._fail(error, from_kept)  # only now: what eager raises as well is the user's own error
            return result
        shape.is_new = False
        if len(context.routers) != graphs:
            seconds = time.perf_counter() - began - (context.paused_seconds - paused)
            self.account.note("tracing", seconds - (context.planning_seconds - planned))
            self.kept_graphs += dynamo.graphs_read() - read
            self._traces += 1
            self._spent_at_trace = self.account.ledger.eager_seconds
            context.disturbances += 1
        return result

    def _traced_or_kept(
        self, trace: Callable[..., Any], module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The call by what an earlier run has traced, where that fits; else through Dynamo."""
        assert self._dynamo is not None and self._captured is not None
        traces, tensors, dims = self._captured.traces, tensors_by_path(args, kwargs), self.dynamic_dims()
        direct = self._find_kept(module, args, kwargs)
        if direct is not None:
            self._dynamo.note_read()
            return direct.run(module, *args, **kwargs)
        self._dynamo.mark_dynamic(tensors, dims)
        with traces.watching(dims) if traces is not None else contextlib.nullcontext():
            return trace(module, *args, **kwargs)

    def _find_kept(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectCall | None:
        """What an earlier run has traced, for this call."""
        captured = self._captured
        if captured is None or captured.traces is None:
            return None
        direct = captured.direct.find_adopted(module, args, kwargs)
        if direct is None:
            with untouched():
                direct = captured.traces.find(module, args, kwargs, tensors_by_path(args, kwargs))
            if direct is not None:
                captured.direct.adopt(direct)
        return direct

    def _take_kept(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Captured for a trace of an earlier run. If none fits, the root is observed on: to trace has another price."""
        context, dynamo = self._context, self._dynamo
        assert dynamo is not None
        graphs, began = len(context.routers), time.perf_counter()
        with dynamo.capture_settings(context.settings.capture.recompile_limit):
            direct = self._find_kept(module, args, kwargs)
        self.account.note("tracing", time.perf_counter() - began)
        if direct is not None:
            self.kept_graphs += len(context.routers) - graphs
            context.disturbances += 1
            return
        self.policy.trace_bytes = 0
        self.state, self.reason, self.detail = "observing", "not_yet", "no trace of an earlier run fits"
        self._services.observer.reopen(self.key)

    @property
    def all_calls(self) -> int:
        """With those of modules that were released."""
        return self.calls + self._bypass.calls

    def close(self) -> None:
        """The run is over."""
        self._unwatched.settle(time.perf_counter())

    # ---- decisions --------------------------------------------------------------------------------------

    def _decide(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = self._find_device(module, args, kwargs)
        advice = self.policy.advise(module, self.failures)
        self.reason, self.detail = advice.reason, advice.detail
        if advice.capture:
            try:
                self._capture_for(device)
            except Exception as error:
                self._fail(error, False)
        elif advice.final:
            self.state = "eager"
            self._bypass.is_small = advice.reason == "too_small"
            if advice.reason in BY_SIZE:
                self.trial.verdicts.lose_up_to(self.policy.reach(self._bypass.is_small))
            self._services.observer.decide(self.key)

    def _capture_for(self, device: torch.device) -> None:
        """Capture, unless there is nothing to run then: no kernel is known for the device yet, and none can be made."""
        kernels = self._services.kernels
        began = time.perf_counter()
        kernels.use_device(device)
        is_useless = kernels.tunable(device) is None and not len(kernels.catalogue.table)
        self.account.note("imports", time.perf_counter() - began)
        if not is_useless or self._context.settings.capture.at_once:
            self.capture()
            return
        self.reason, self.detail = "nothing_to_run", "no kernel is stored for this device, and none can be made for it"

    def capture(self) -> None:
        """From the next call on, run the captured graph."""
        began = time.perf_counter()
        self._context.store_thread.wait_ready(2.0)  # dims that varied in earlier runs are known by then
        # Here, because it brings Dynamo: 1 s that a script without a root worth capturing never pays.
        with gc_pause.paused(), untouched():
            from autofuse.capture import dynamo

            self._dynamo = dynamo
            if self._captured is None:
                self._captured = self._compile()
        self.account.note("imports", time.perf_counter() - began)
        self.state, self._decided = "captured", None
        self._services.observer.decide(self.key)

    def _compile(self) -> CapturedRoot:
        assert self._dynamo is not None
        services = self._services
        captured: CapturedRoot = self._dynamo.compile_root(
            self.name, services.backend, self.key, self._context.keeper, services.plan_cache()
        )
        return captured

    def _fail(self, error: BaseException, from_kept: bool) -> None:
        """``from_kept``: with graphs of an earlier run, which are given up: the next run traces anew."""
        error = getattr(error, "inner_exception", None) or error  # Dynamo's own says little
        self.failures += 1
        self.state, self.reason = "eager", "kept_graph_failed" if from_kept else "capture_failed"
        if from_kept and (kept := self._context.notes_folder) is not None:
            kept.prune(0)
        self._services.observer.decide(self.key)
        self.detail = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
        self._context.report_fallback("capture_failed", f"{self.name} stays eager: it could not be captured", error)

    def dynamic_dims(self) -> tuple[tuple[str, int], ...]:
        known = self._services.known.get(self.key)
        seen = self._services.observer.dynamic_dims(self.key)
        return tuple(dict.fromkeys([*(known.dynamic_dims if known else ()), *seen]))

    def _lose(self, shape: Shape, loss: Loss, is_short: bool, is_all: bool) -> None:
        """Sizes of which captured steps lose to held-out eager ones."""
        self._bypass.is_small = is_short
        self.detail = f"captured steps take {1 / loss.gain:.2f}x of eager's"
        if is_all:
            # What an untuned graph loses says nothing of a tuned one: the next run may capture it again.
            self.state, self.reason = "eager", UNTUNED if self._services.tuning.has_open() else loss.reason
        else:
            self.detail = f"calls of about {shape.elements} elements stay in eager: {self.detail}"

    def record(self) -> RootRecord:
        known, ledger = self._services.known.get(self.key), self.account.ledger
        state, reason, detail = self.state, self.reason, self.detail
        if state == "captured" and self.trial.is_resting:
            state, reason, detail = (
                "eager",
                UNTUNED,
                "captured steps are slower as long as kernels are still to be tuned",
            )
        if self._decided is not None and state != "captured":
            # Sizes of which nothing is known yet do not undo what is known of the others.
            state, (reason, detail) = "eager", self._decided
        # Captured before a step of it was sampled: as many as an earlier run saw.
        operations = self._services.observer.ops_in_forward(self.key) or (known.operations if known is not None else 0)
        return RootRecord(
            root=self.key,
            name=self.name,
            state=state,  # type: ignore[arg-type]
            reason=reason,
            detail=detail,
            calls=self.all_calls,
            eager_seconds=ledger.eager_seconds,
            operations=operations,
            capture_seconds=ledger.lost_seconds,
            predicted_capture_seconds=self.policy.predicted_seconds,
            dynamic_dims=self.dynamic_dims(),
            kept_graphs=self.kept_graphs,
            judged_elements=self.trial.verdicts.lost_elements,
            capture_causes=tuple((cause, seconds) for cause, seconds in ledger.lost().items() if seconds >= 5e-4),
            model_seconds=self.policy.model_seconds,
            gain=self.trial.gain or (known.gain if known is not None else 0.0),
        )


def _untraceable(module: Target) -> str:
    """What a script has replaced that a trace would take for torch's own, or do twice; "" for nothing."""
    if isinstance(module, torch.nn.Module) and not has_plain_call(type(module)):
        return f"{type(module).__qualname__}.__call__ is not torch's"  # what it puts around us would be traced as well
    return replaced_operator()


def ran_forward(error: BaseException) -> bool:
    """Whether the module had begun to run, captured or not, when this was raised: it is the user's then."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in _ITS_OWN or code.co_filename.startswith(ROOT_FILE):
            return True
        trace = trace.tb_next
    return False


# A trace knows what to do where it fails.
_ITS_OWN = {RootTracker.call_original.__code__, Root._traced.__code__}


def elements_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How large a call is; 1 where its tensors do not tell, as nested ones do not."""
    return count_elements(call_signature(args, kwargs))


def _device_of(module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where the parameters of a module live, a function's tensors; the CPU where there are none."""
    if isinstance(module, torch.nn.Module):
        found: torch.Tensor | None = next(module.parameters(), None)
    else:
        found = next(iter(tensors_by_path(args, kwargs).values()), None)
    return CPU if found is None or found.device.type == "cpu" else found.device


def _needs_gradients(result: Any) -> bool:
    """Whether a backward pass may follow, as far as a glance at a call's result tells."""
    if isinstance(result, torch.Tensor):
        if type(result) is torch.Tensor:
            return bool(result.requires_grad)
        with torch._C.DisableTorchFunction():  # a subclass is not told that it is looked at
            return bool(result.requires_grad)
    if isinstance(result, tuple | list):
        return any(_needs_gradients(item) for item in result)
    return result is not None
