"""Records one step at a time: puts the mode and the module watcher in place, and takes them away again.

In: ``begin`` at the call of a root, ``enter_root`` and ``exit_root`` around root calls, ``end`` at a later call. Out:
the events of the step. Begin and end are in different calls, so no ``with`` statement can hold them. Guarantee:
everything belongs to the thread that began; a script that raises in mid-step leaves a mode that is taken off at the
next call of a root; where the mode cannot be taken off yet it stops recording, which costs 3 us an op.
"""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import _get_sequence_nr

from autofuse.observer import module_calls
from autofuse.observer.device_timer import EventTimer
from autofuse.observer.mode import ENTER, EXIT, MARK, ROOT_ENTER, ROOT_EXIT, ObserverMode, attach, detach
from autofuse.observer.module_calls import CallRunner, thread

_MAX_LEFTOVERS = 8


class StepRecorder:
    """The recorder of one run; at most one step is being recorded, in one thread."""

    def __init__(self, max_events: int, max_seconds: float, timer: EventTimer | None = None) -> None:
        self._max_events = max_events
        self._max_seconds = max_seconds
        self._timer = timer
        self._mode: ObserverMode | None = None
        self._thread = 0
        self._open_root: str | None = None
        self._answer_before: Any = module_calls.OUTSIDE
        self._leftovers: list[tuple[int, ObserverMode]] = []  # (thread, mode) still to be taken off
        self._paths: dict[str, tuple[weakref.ref[torch.nn.Module], dict[int, str]]] = {}
        self._roots_of_step: list[str] = []
        self.began = 0.0
        self.fault: str | None = None  # why nothing is recorded any more
        self.passed = 0  # calls that went through modes without being recorded
        self.timing_seconds = 0.0  # spent on events of GPUs

    @property
    def is_recording(self) -> bool:
        """Is a step being recorded, in whichever thread?"""
        return self._mode is not None

    @property
    def is_mine(self) -> bool:
        """Is a step being recorded in this thread?"""
        return self._mode is not None and self._thread == threading.get_ident()

    @property
    def saw_backward(self) -> bool:
        return self._mode is not None and self._mode.saw_backward

    def begin(self) -> bool:
        """Start recording in this thread; False where torch is tracing, or profiling for the user, or after a fault."""
        self.clean_up()
        # Under a mode each call passes the dispatcher twice and would stand twice in the user's own profile.
        if self._mode is not None or self.fault is not None or torch.autograd._profiler_enabled():
            return False
        timer = self._timer if self._timer is not None and self._timer.is_active else None
        mode = ObserverMode(self._max_events, self._max_seconds, timer)
        if not attach(mode):
            return False
        mode.recording = True
        self._mode = mode
        self._thread = threading.get_ident()
        self._roots_of_step = []
        self.began = time.perf_counter()
        module_calls.acquire()
        return True

    def enter_root(self, root: str, module: torch.nn.Module | None) -> None:
        """A root call begins in the recorded thread; modules inside are watched until ``exit_root``."""
        mode = self._mode
        if mode is None or not mode.recording:
            return
        self.exit_root()  # one that an exception left open
        name = root.split(":")[0].rpartition(".")[2] if module is None else type(module).__name__
        if module is not None and root not in self._roots_of_step:
            self._roots_of_step.append(root)
            self._learn_paths(root, module)
        mode.events.append((MARK, ROOT_ENTER, (root, name, torch.is_grad_enabled()), _get_sequence_nr()))
        self._open_root = root
        self._answer_before = thread.answer
        thread.answer = self._watch

    def exit_root(self) -> None:
        """The root call is over."""
        if self._open_root is None:
            return
        self._open_root = None
        if thread.answer == self._watch:
            thread.answer = self._answer_before
        if self._mode is not None:
            self._mode.events.append((MARK, ROOT_EXIT, None, _get_sequence_nr()))

    def end(self) -> list[Any]:
        """Stop recording; the events of the step. From another thread, the step is given up and this is empty."""
        mode = self._mode
        if mode is None:
            return []
        mode.recording = False
        self._mode = None
        module_calls.release()
        self.fault = self.fault or mode.fault
        self.timing_seconds += mode.timing_ns / 1e9
        self._leftovers.append((self._thread, mode))
        if self._thread != threading.get_ident():
            del self._leftovers[:-_MAX_LEFTOVERS]
            self._open_root = None
            return []
        self.exit_root()
        self.clean_up()
        events, mode.events = mode.events, []
        return events

    def clean_up(self) -> None:
        """Take modes that are no longer needed off this thread's stack, where they can be reached."""
        if not self._leftovers:
            return
        here = threading.get_ident()
        kept = []
        for owner, mode in self._leftovers:
            if owner == here and detach(mode):
                self.passed += mode.passed
            else:
                kept.append((owner, mode))
        self._leftovers = kept[-_MAX_LEFTOVERS:]

    def paths(self) -> dict[int, str]:
        """Path of every module of the roots that took part, by identity: ``GPT.blocks.0.attn``."""
        found: dict[int, str] = {}
        for root in self._roots_of_step:
            found.update(self._paths[root][1])
        return found

    def _learn_paths(self, root: str, module: torch.nn.Module) -> None:
        known = self._paths.get(root)
        if known is not None and known[0]() is module:
            return
        name = type(module).__name__
        paths = {id(child): f"{name}.{path}" if path else name for path, child in module.named_modules()}
        self._paths[root] = (weakref.ref(module), paths)

    def _watch(self, module: torch.nn.Module) -> CallRunner | None:
        if get_eval_frame_callback() is not None:  # in the user's compiled region: leave its calls as they are
            return None
        return partial(self._run_watched, module)

    def _run_watched(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        mode = self._mode
        if mode is None or not mode.recording:
            return module._call_impl(*args, **kwargs)
        events = mode.events
        events.append((MARK, ENTER, (id(module), type(module).__name__), _get_sequence_nr()))
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            events.append((MARK, EXIT, None, _get_sequence_nr()))
