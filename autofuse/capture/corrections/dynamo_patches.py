"""What torch does while it traces for a script that has not asked for a trace: warnings, progress bars, measurements.

In: torch's functions, replaced when this module is imported. Out: the same functions for the script's own traces; for
ours, nothing that a script could see. Guarantee: a function that this torch lacks is left out.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.ctx_manager import GradModeVariable
from torch._guards import CompileContext
from torch.fx import _symbolic_trace

from autofuse.preserve_rng import is_only_thread


class _NotOfOurTraces(logging.Filter):
    """Filters torch's log lines about traces that the user never requested, unless torch's logs are turned on."""

    def __init__(self) -> None:
        super().__init__()
        self._tracing = threading.local()

    @property
    def is_active(self) -> bool:
        """Whether a root of ours is traced on this thread."""
        return getattr(self._tracing, "ours", False)

    def filter(self, record: logging.LogRecord) -> bool:
        ours = self.is_active and record.levelno >= logging.WARNING
        return not ours or logging.getLogger(record.name).isEnabledFor(logging.INFO)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Marks this thread as one that traces a root of ours."""
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
                for handler in logger.handlers:
                    handler.addFilter(self)  # which adds it once
        before = self.is_active
        self._tracing.ours = True
        try:
            yield
        finally:
            self._tracing.ours = before


not_of_our_traces = _NotOfOurTraces()


def _warn_those_who_trace(warn_once: Callable[..., None]) -> None:
    """Drop Dynamo's warnings about graph breaks: they are meant for users who requested the trace."""

    def warn(message: str, stacklevel: int = 1) -> None:
        if not not_of_our_traces.is_active:
            warn_once(message, stacklevel + 1)

    torch._dynamo.utils.warn_once = warn


def _time_guards_of_others(time_guards: Callable[..., float]) -> None:
    """Spare our traces Dynamo's measurement of new guards: it empties the caches first, 27 ms for a line in a log."""

    def latency(*args: Any) -> float:
        return 0.0 if not_of_our_traces.is_active else time_guards(*args)

    torch._dynamo.guards.profile_guard_manager = latency


_IS_SYMBOLIC_TRACING = getattr(_symbolic_trace.is_fx_symbolic_tracing, "__code__", None)


class _OnThisThread:
    """True on the thread that has made it, for code that asks in its own way whether it is being traced."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        if threading.get_ident() == self._thread:
            return True
        # "Whether torch.fx traces, and not to compile": its mark is the whole process's. Another thread that heard yes
        # could not call what the script has compiled by itself.
        return sys._getframe(1).f_code is _IS_SYMBOLIC_TRACING

    def __repr__(self) -> str:
        return repr(bool(self))


def _trace_on_one_thread(trace_session: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """While a root is traced, ``torch.compiler.is_compiling()`` holds on the thread that traces, not on all.

    Optimizers that are told so take their steps in tensors, which round in another way than Python's numbers.
    """

    @contextlib.contextmanager
    def session() -> Iterator[None]:
        with trace_session():
            if not_of_our_traces.is_active:  # the whole session's value is put back when it ends
                torch.compiler._is_compiling_flag = _OnThisThread()
            yield

    torch.compiler._compile_session_context = session


if hasattr(torch.compiler, "_compile_session_context") and hasattr(torch.compiler, "_is_compiling_flag"):
    _trace_on_one_thread(torch.compiler._compile_session_context)
if hasattr(torch._dynamo.utils, "warn_once"):
    _warn_those_who_trace(torch._dynamo.utils.warn_once)
if hasattr(torch._dynamo.guards, "profile_guard_manager"):
    _time_guards_of_others(torch._dynamo.guards.profile_guard_manager)


def _show_no_progress(bar: type) -> None:
    """The first progress bar of a process, shown or not, starts a thread of tqdm's that the script would find among
    its own; torch.fx makes one each time that it goes through a graph."""
    if hasattr(bar, "monitor_interval"):  # tqdm is installed
        torch.fx.interpreter.tqdm = type(bar.__name__, (bar,), {"monitor_interval": 0})


if hasattr(torch.fx.interpreter, "tqdm"):
    _show_no_progress(torch.fx.interpreter.tqdm)


def _keep_draws_of_others(trace_frame: Callable[..., Any]) -> None:
    """Dynamo puts torch's random generator back after a trace, which draws nothing: what other threads of the script
    have drawn meanwhile would be drawn again. (Python's ``random`` is put back in C++, and stays so.)"""
    put_back = torch.random.set_rng_state

    @functools.wraps(trace_frame)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if is_only_thread():
            return trace_frame(*args, **kwargs)
        thread = threading.get_ident()

        def put(state: torch.Tensor) -> None:
            if threading.get_ident() != thread:
                put_back(state)

        torch.random.set_rng_state = put
        try:
            return trace_frame(*args, **kwargs)
        finally:
            torch.random.set_rng_state = put_back

    torch._dynamo.convert_frame.trace_frame = traced


if hasattr(torch._dynamo.convert_frame, "trace_frame"):
    _keep_draws_of_others(torch._dynamo.convert_frame.trace_frame)


def _contexts_that_begin_when_entered(reconstruct: Callable[..., None]) -> None:
    """Before a graph break, Dynamo makes ``torch.no_grad()`` again as ``torch.set_grad_enabled(False)``, which switches
    gradients off at once, and for good where the context decorates a function."""

    def remade(variable: GradModeVariable, codegen: Any) -> None:
        if not not_of_our_traces.is_active or len(variable.target_values) != 1:
            reconstruct(variable, codegen)
            return
        name = "enable_grad" if variable.target_values[0] else "no_grad"
        codegen.add_push_null(lambda: codegen(AttrSource(codegen.tx.import_source("torch"), name)))
        codegen.extend_output(create_call_function(0, False))

    GradModeVariable.reconstruct = remade


_contexts_that_begin_when_entered(GradModeVariable.reconstruct)


# Beginnings of what torch warns of because it traces: it makes tensors of arrays of numpy and copies them, and it
# traces backward graphs in anomaly mode, which tells of each that fails.
_OF_TRACES = ("To copy construct from a tensor, it is recommended", "Error detected in ")


def _show_no_warnings_of_traces(show: Callable[[warnings.WarningMessage], None]) -> None:
    def show_message(message: warnings.WarningMessage) -> None:
        is_of_trace = not_of_our_traces.is_active and CompileContext.try_get() is not None
        if not is_of_trace or not str(message.message).startswith(_OF_TRACES):
            show(message)

    warnings._showwarnmsg = show_message  # type: ignore[attr-defined]


if hasattr(warnings, "_showwarnmsg"):
    _show_no_warnings_of_traces(warnings._showwarnmsg)
