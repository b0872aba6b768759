"""Runs the traces of a root, and makes new ones; all failures of a capture are handled here.

In: a call of a captured root. Out: its result, from code that was traced before, from the trace of an earlier run, or
through Dynamo. Guarantee: where a trace fails, the original module computes the result, with eager's random numbers. An
exception that eager raises as well is the user's own error, not a failed capture.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from autofuse.capture.traced import ROOT_FILE, TracedElsewhere
from autofuse.observer.capture_policy import may_trace_again
from autofuse.observer.root_tracker import RootTracker, Target, has_plain_call
from autofuse.observer.signatures import tensors_by_path
from autofuse.preserve_rng import keep_generators
from autofuse.runtime.roots.life import RootLife
from autofuse.runtime.roots.patched_classes import replaced_operator
from autofuse.runtime.roots.policy import RootPolicy
from autofuse.runtime.roots.services import Capturer, RootServices
from autofuse.runtime.roots.step_clock import Account
from autofuse.runtime.roots.steps import Shape
from autofuse.runtime.roots.traces import MAX_LEARNT, RootTraces
from autofuse.script_signals import is_of_handler

if TYPE_CHECKING:
    from autofuse.capture.dynamo import CapturedRoot


class TracedCalls:
    """Of one root."""

    def __init__(
        self, services: RootServices, traces: RootTraces, account: Account, policy: RootPolicy, life: RootLife
    ) -> None:
        self.kept_graphs = 0  # that earlier runs had traced
        self._services = services
        self._context = services.context
        self._tracker = services.tracker
        self._clock = services.tools.clock
        self._traces = traces
        self._account = account
        self._policy = policy
        self._life = life
        self._traced = 0  # times that a graph was
        self._spent_at_trace = 0.0  # in eager, when one was traced last

    def run(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape) -> Any:
        """Run a call captured."""
        for direct in shape.direct:
            if direct.fits(module, args, kwargs):
                shape.is_new = False
                return direct.run(module, *args, **kwargs)
        captured = self._traces.captured
        assert captured is not None
        if (
            shape.learnt >= MAX_LEARNT
        ):  # the shape was traced often enough: its graph breaks, or every call needs a new trace
            return captured.settled(module, *args, **kwargs)
        self._traces.note_classes(module)  # as they are before the trace: another thread may change them meanwhile
        with contextlib.suppress(TracedElsewhere):  # the next call may be traced
            result = self.trace(captured, module, args, kwargs, shape)
            if self._life.state == "captured":
                self._traces.learn(captured.direct, shape, module, args, kwargs)
            return result
        return self._tracker.call_original(module, args, kwargs)

    def run_recorded(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape | None) -> Any:
        """Run a call during CUDA graph capture: nothing is traced, observed, held out or measured."""
        captured = self._traces.captured
        if shape is not None and not shape.is_new and captured is not None:
            return captured.settled(module, *args, **kwargs)
        return self._tracker.call_original(module, args, kwargs)

    def may_trace(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape) -> bool:
        """Whether a shape may run captured: it fits an existing graph, or calls in eager have paid for one more."""
        if any(direct.fits(module, args, kwargs) for direct in shape.direct):
            return True
        ledger = self._account.ledger
        if self._traced and not self._policy.is_asked:
            expected = ledger.trace_seconds / self._traced
            spent = ledger.eager_seconds - self._spent_at_trace
            if not may_trace_again(spent, expected, self._services.budget()):
                return False
        # A lazy module's parameters, and their initial values, are made by eager.
        return not (isinstance(module, torch.nn.Module) and any(map(is_lazy, module.parameters())))

    def take_kept(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read a trace of an earlier run. If none fits, the root is observed again, because tracing costs more."""
        context, capturer = self._context, self._traces.capturer
        assert capturer is not None
        graphs, began = len(context.routers), self._clock()
        with capturer.capture_settings(context.settings.capture.recompile_limit):
            direct = self._traces.find_kept(module, args, kwargs)
        self._account.note("tracing", self._clock() - began)
        if direct is not None:
            self.kept_graphs += len(context.routers) - graphs
            context.disturbances += 1
            return
        self._policy.trace_bytes = 0
        self._life.reopen()

    # ---- a call that may trace -------------------------------------------------------------------------

    def trace(
        self, captured: CapturedRoot, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape
    ) -> Any:
        """Run a call for which the shape or something else is new."""
        context, capturer = self._context, self._traces.capturer
        assert capturer is not None
        problem = _untraceable(module)
        if problem:
            self._life.release(problem)
            return self._tracker.call_original(module, args, kwargs)
        graphs, paused = len(context.routers), context.paused_seconds
        read, planned = capturer.graphs_read(), context.planning_seconds
        breaks, ran = capturer.graph_breaks(), context.graph_calls()
        restore_generators = keep_generators()
        failure: Exception | None = None
        began = self._clock()
        try:
            with capturer.capture_settings(context.settings.capture.recompile_limit):
                result = self._trace_or_read(capturer, captured, module, args, kwargs)
        except TracedElsewhere:
            self._account.note("tracing", self._clock() - began)
            raise
        except Exception as error:
            is_ours = isinstance(error, capturer.CAPTURE_ERRORS) or capturer.graphs_read() != read or was_ours(error)
            if not is_ours or is_of_handler(error):
                raise
            failure = error
        if failure is not None:  # outside of the handler: what the module raises is not chained to our failure
            restore_generators()  # part of the call may have run
            self._account.note("tracing", self._clock() - began)
            try:
                result = self._tracker.call_original(module, args, kwargs)
                # Only now: an exception that eager raises as well is the user's own error.
                self._life.fail(failure, capturer.graphs_read() != read)
                return result
            finally:
                failure = None  # its traceback holds this frame
        shape.is_new = False
        if len(context.routers) != graphs:
            seconds = self._clock() - began - (context.paused_seconds - paused)
            self._account.note("tracing", seconds - (context.planning_seconds - planned))
            self.kept_graphs += capturer.graphs_read() - read
            self._traced += 1
            self._spent_at_trace = self._account.ledger.eager_seconds
            context.disturbances += 1
        elif not self._traced and context.graph_calls() == ran and (why := capturer.why_no_graph(module, breaks)):
            self._account.note("tracing", self._clock() - began)
            self._life.find_nothing(why)
        return result

    def _trace_or_read(
        self, capturer: Capturer, captured: CapturedRoot, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module by an earlier run's trace where one fits, else through Dynamo."""
        dims = self._traces.dynamic_dims()
        if not isinstance(module, torch.nn.Module):  # may have done part of its work, which must not be repeated
            capturer.mark_dynamic(tensors_by_path(args, kwargs), dims)
            with capturer.suppressed_errors():
                return captured.trace(module, *args, **kwargs)
        tensors = tensors_by_path(args, kwargs)
        direct = self._traces.find_kept(module, args, kwargs)
        if direct is not None:
            capturer.note_read()
            return direct.run(module, *args, **kwargs)
        capturer.mark_dynamic(tensors, dims)
        watching = captured.traces.watching(dims) if captured.traces is not None else contextlib.nullcontext()
        with watching, capturer.suppressed_behind_breaks():
            return captured.trace(module, *args, **kwargs)


def _untraceable(module: Target) -> str:
    """Names that the script has replaced and a trace would misread or run twice; "" for none."""
    if isinstance(module, torch.nn.Module) and not has_plain_call(type(module)):
        return f"{type(module).__qualname__}.__call__ is not torch's"  # its wrapper of ours would be traced too
    return replaced_operator()


def ran_forward(error: BaseException) -> bool:
    """Whether the module had begun to run, captured or not, when this was raised: then it is the user's exception."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code in _ITS_OWN or code.co_filename.startswith(ROOT_FILE):
            return True
        trace = trace.tb_next
    return False


def was_ours(error: BaseException) -> bool:
    """Whether this was raised where nothing of the script runs: in Dynamo's tracer, or in a graph of all of a root.

    Eager then tells whether it is the script's own.
    """
    trace, is_in_root = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.endswith(_TRACER):
            return True
        if file.startswith(ROOT_FILE):
            is_in_root = True
        elif is_in_root and file.endswith(_GRAPHS):
            return True
        elif is_in_root and not file.startswith(_CALLS_GRAPHS):
            is_in_root = False  # behind a graph break: part of the module's work is done
        trace = trace.tb_next
    return False


_TRACER = os.path.join("torch", "_dynamo", "convert_frame.py")
_GRAPHS = os.path.join("autofuse", "runtime", "graphs", "router.py")
_CALLS_GRAPHS = (
    *(os.path.join(os.path.dirname(torch.__file__), name) for name in ("_", f"autograd{os.sep}")),
    os.path.join(Path(__file__).parents[2], ""),
)
# The traced call handles its own failures.
_ITS_OWN = {RootTracker.call_original.__code__, TracedCalls.trace.__code__}
