"""Watches aten calls in the dispatcher and writes one small tuple for each; evaluation comes after the step.

In: every aten call of a sampled step, below autograd, forward and backward, autograd's own threads included. Out:
``ObserverMode.events``, a flat list of ``OpEvent`` tuples and module marks in the order in which they happened;
``profile.aggregate`` turns it into records when the step is over. A call on a GPU is timed by two events of its stream
where an ``EventTimer`` is given, a call on the CPU by the clock. Guarantee: the result of a call is unchanged, no
tensor is kept alive (only shapes and numbers), and no fault of ours is raised into the script: the first one switches
the mode off, with its reason.

Measured (one thread, AVX-512, torch 2.13, 2026-11): an op costs 4 to 6 us more in a loop of one small op, 3 us of them
torch's own for any mode; 10 us more in a real training step, where caches are cold, 6 to 7 us of them torch's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch._C import (
    _current_autograd_node,
    _current_graph_task_id,
    _get_dispatch_mode,
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from autofuse.dynamo_skip import mark_all_below
from autofuse.observer.device_timer import EventTimer

TensorSpec = tuple[torch.Size, torch.dtype, tuple[int, ...]] | None  # shape, dtype, strides; None: not describable

FORWARD_OR_OTHER = -1  # in place of a sequence number: the call was not made by autograd
NO_SEQUENCE = -2  # made in backward, but by no node that a forward call left behind


class OpEvent(NamedTuple):
    """What the hot path appends; a plain tuple in this order.

    The description is interned: one object per step for all calls that look alike. It keeps the garbage collector out
    (1 us an op when every call left its own shapes behind) and lets the sum-up compare by identity.
    """

    op: Any  # OpOverload or higher-order operator
    start: Any  # ns of the host's clock; on a GPU its Stretch, None where it could not be timed
    stop_ns: int | None  # None on a GPU
    sequence: int  # of the autograd node that runs, or FORWARD_OR_OTHER, or NO_SEQUENCE
    inputs: tuple[int, ...]  # identities of the input tensors, valid within the step only
    description: tuple[Any, ...]  # TensorSpec of each input, then output shape (or None), then device (or None)
    output: int | tuple[int, ...]  # identity of the output, or of the outputs


# Marks stand between the calls: (MARK, kind, payload, next sequence number).
MARK = None
ENTER, EXIT, ROOT_ENTER, ROOT_EXIT = range(4)

_MAX_LISTED = 8  # tensors described of each list argument; foreach calls list hundreds
_INFRA_KEYS = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_SEVERAL = (tuple, list)
_strided = torch.strided
_SCALARS = frozenset({int, float, bool, type(None), str, complex, torch.dtype, torch.device, torch.layout})


class ObserverMode(TorchDispatchMode):  # type: ignore[misc]  # torch is Any to mypy here
    """The dispatch mode of one sampled step. ``attach`` and ``detach`` put it on a thread's stack and take it off."""

    # Without this a higher-order operator (flex_attention, cond) raises while any mode is on.
    supports_higher_order_operators = True
    is_autofuse_observer = True

    def __init__(self, max_events: int = 40_000, max_seconds: float = 3600.0, timer: EventTimer | None = None) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.recording = False
        self.fault: str | None = None  # why the mode switched itself off
        self.saw_backward = False
        self.passed = 0  # calls that went through unrecorded: they cost time too
        self.timing_ns = 0  # spent on recording events for ``timer``
        self._timer = timer  # None where no GPU is in use
        self._room = max_events
        self._deadline_ns = perf_counter_ns() + int(max_seconds * 1e9)
        self._intern = dict[Any, Any]().setdefault

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, or Dynamo would skip every frame of the user's own ``torch.compile`` while we watch."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # False keeps torch from wrapping the handler (0.6 us a call); mark_all_below does the same for free.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The stack holds the modes below this one while this handler runs. Ours lies at the bottom, so anything here
        # is torch's own tracing (fake, proxy, functional): no real call, possibly symbolic sizes.
        if not self.recording or _len_torch_dispatch_stack():
            self.passed += 1
            return func(*args, **kwargs) if kwargs else func(*args)
        call = func._op if type(func) is OpOverload else func
        timer = self._timer
        gpu = -1 if timer is None else _gpu_of(args, kwargs, timer.index_of)
        if timer is not None and gpu >= 0:
            began = perf_counter_ns()
            stretch = timer.begin(gpu)
            launching = perf_counter_ns()
            out = call(*args, **kwargs) if kwargs else call(*args)
            launched = perf_counter_ns()
            start: Any = timer.end(stretch)
            stop: int | None = None
            now = perf_counter_ns()
            self.timing_ns += launching - began + now - launched
        else:
            start = perf_counter_ns()
            out = call(*args, **kwargs) if kwargs else call(*args)
            stop = now = perf_counter_ns()
        try:
            sequence = FORWARD_OR_OTHER
            if _current_graph_task_id() != -1:
                self.saw_backward = True
                node = _current_autograd_node()
                sequence = NO_SEQUENCE if node is None else node._sequence_nr()
            inputs: list[int] = []
            described: list[Any] = []
            for a in args:
                kind = type(a)
                if kind is _Tensor or kind is _Parameter:
                    inputs.append(id(a))
                    described.append((a.shape, a.dtype, a.stride()))
                elif kind not in _SCALARS:
                    _describe(a, inputs, described)
            if kwargs:
                for a in kwargs.values():
                    if type(a) not in _SCALARS:
                        _describe(a, inputs, described)
            if type(out) is _Tensor:
                output: int | tuple[int, ...] = id(out)
                described.append(out.shape)
                described.append(out.device)
            else:
                output = tuple([id(o) for o in out]) if type(out) in _SEVERAL else (id(out),)
                described.append(None)
                described.append(args[0].device if args and isinstance(args[0], _Tensor) else None)
            description = tuple(described)
            self.events.append(
                (func, start, stop, sequence, tuple(inputs), self._intern(description, description), output)
            )
            self._room -= 1
            if self._room < 0 or now > self._deadline_ns:
                self.recording = False
        except Exception as error:
            self._record_plainly(func, start, stop, error)
        return out

    def _record_plainly(self, func: Any, start: Any, stop: int | None, error: Exception) -> None:
        """An op whose tensors cannot be described (no strides, no device): count and time it.

        The first surprise of another kind ends the recording for good.
        """
        if isinstance(error, (RuntimeError, NotImplementedError, TypeError)):
            self.events.append((func, start, stop, FORWARD_OR_OTHER, (), (None, None), ()))
        else:
            self.recording = False
            self.fault = f"{type(error).__name__} while recording {func}: {error}"


def _gpu_of(args: Any, kwargs: Any, index_of: Callable[[Any], int]) -> int:
    """Index of the GPU that a call runs on, by its tensors, else by where its result is to be; -1: not on one."""
    for a in args:
        first = a[0] if type(a) in _SEVERAL and a else a
        if isinstance(first, _Tensor):
            index = index_of(first)
            if index >= 0:
                return index
    device = kwargs.get("device") if kwargs else None
    if not isinstance(device, torch.device) or device.type != "cuda" or device.index is None:
        return -1
    return int(device.index)


def _describe(value: Any, inputs: list[int], described: list[Any], depth: int = 0) -> None:
    """The slow path of an argument: lists, subclasses, sparse tensors."""
    if isinstance(value, _Tensor):
        inputs.append(id(value))
        spec: TensorSpec = None
        try:
            shape = value.shape
            # Subclasses may have symbolic sizes (jagged): hashing those would pin them down. Leave them out.
            if all(type(size) is int for size in shape):
                spec = (shape, value.dtype, value.stride() if value.layout is _strided else ())
        except (RuntimeError, NotImplementedError, TypeError):
            pass
        described.append(spec)
    elif isinstance(value, (list, tuple)) and depth < 2:
        for item in value[:_MAX_LISTED]:
            _describe(item, inputs, described, depth + 1)


mark_all_below(ObserverMode.__torch_dispatch__, ObserverMode._record_plainly, _describe, _gpu_of)


def attach(mode: ObserverMode) -> bool:
    """Put the mode at the bottom of this thread's stack; False while torch is tracing.

    The bottom, because the modes of the script come and go with ``with`` blocks that pop whatever is on top: a mode of
    ours above theirs would be taken for theirs.
    """
    if any(_get_dispatch_mode(key) is not None for key in _INFRA_KEYS):
        return False
    others = [_pop_torch_dispatch_stack(None) for _ in range(_len_torch_dispatch_stack())]
    _push_on_torch_dispatch_stack(mode)
    for other in reversed(others):
        _push_on_torch_dispatch_stack(other)
    return True


def detach(mode: ObserverMode) -> bool:
    """Take the mode off this thread's stack; False where it is not there, or not reachable now.

    Not reachable is a mode whose own handler is running further up this thread's Python stack: torch puts it back when
    that handler returns.
    """
    stack = [_get_dispatch_stack_at(index) for index in range(_len_torch_dispatch_stack())]
    if not any(entry is mode for entry in stack):
        return False
    above = []
    while True:
        top = _pop_torch_dispatch_stack(None)
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_on_torch_dispatch_stack(other)
    return True


def _detach_all_after_fork() -> None:
    """A forked child (a data-loader worker) is not watched, whatever step its parent was in."""
    for index in reversed(range(_len_torch_dispatch_stack())):
        mode = _get_dispatch_stack_at(index)
        if getattr(mode, "is_autofuse_observer", False):
            mode.recording = False
            detach(mode)


os.register_at_fork(after_in_child=_detach_all_after_fork)
