"""Peak memory of single steps, with autofuse and in eager, for ``observe.memory``.

In: steps of captured roots. Out: for each signature of a root, the peak of a step's tensors above the memory held when
the step began, once with the captured graph and once held out; an ``Event`` for the report. Guarantee: one step of each
kind is measured per signature, from the third of its settled steps on, and again for larger inputs; a measured step is
not timed. A profiler that the script starts takes precedence: the step under way is dropped.

How: torch's own profiler is told of each allocation. Kineto's profiler takes 2 s for its first start and may print to
stderr (torch 2.13); the older one does neither.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy, _profiler_enabled
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState, profiler

from autofuse.ir.records import PEAK_MEMORY, Event

log = logging.getLogger(__name__)

LARGER = 1.1  # a signature is measured again with so many times the elements
MAX_OPEN = 16  # signatures with one of the two steps measured
_ERROR = 2  # c10's log level


class AllocationLog:
    """What the calling thread allocates and frees between ``begin`` and ``end``; autograd's threads are included."""

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None  # whose allocations are watched now
        self._level: ctypes.c_int | None = None
        self._said = 0  # the log level before
        self._own_start: Callable[..., Any] = profiler._enable_profiler
        self.fault: str | None = None
        os.register_at_fork(after_in_child=self.give_up)

    def begin(self) -> bool:
        """Begin to watch; False while another profiler runs, or where torch lacks what is needed."""
        self.give_up()
        if self._owner is not None or self.fault is not None or _profiler_enabled():
            return False
        try:
            if self._level is None:
                self._level = _log_level()
            self._said = self._level.value
            # Silence torch's log of unknown sizes, for blocks that were allocated before: it is not the script's
            # output.
            self._level.value = max(self._said, _ERROR)
            _enable_profiler_legacy(
                ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
            )
        except Exception as error:
            self._fail(error)
            return False
        self._owner = threading.current_thread()
        self._own_start, profiler._enable_profiler = profiler._enable_profiler, self._yield
        return True

    def end(self, on_gpu: bool) -> int | None:
        """The peak above the memory held at the beginning, in bytes; None where nothing was watched."""
        if self._owner is not threading.current_thread():
            return None
        held = peak = 0
        for thread in self._stop():
            for event in thread:
                if event.kind() == "memory_alloc":
                    held += event.cuda_memory_usage() if on_gpu else event.cpu_memory_usage()
                    peak = max(peak, held)
        return peak

    def _stop(self) -> Any:
        self._restore()
        try:
            return _disable_profiler_legacy()
        except Exception as error:  # something else has switched it off
            self._fail(error)
            return ()

    def _restore(self) -> None:
        self._owner = None
        profiler._enable_profiler = self._own_start
        if self._level is not None:
            self._level.value = self._said

    def _fail(self, error: Exception) -> None:
        self.fault = f"{type(error).__name__}: {error}"
        log.debug("no peaks of memory: %s", self.fault)
        if self._level is not None:
            self._level.value = self._said

    def give_up(self) -> None:
        """Drop the measurement of this thread, or of a thread that has ended."""
        if self._owner is threading.current_thread():
            self._stop()
        elif self._owner is not None and not self._owner.is_alive():  # its profiler ended with the thread
            self._restore()

    def _yield(self, *args: Any, **kwargs: Any) -> Any:
        """Stop for a profiler that the script starts: two at a time on one thread are an error."""
        self.give_up()
        return self._own_start(*args, **kwargs)


def _log_level() -> ctypes.c_int:
    library = next(Path(torch.__file__).parent.glob("lib/*c10.*"))
    return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")


class RootPeaks:
    """Chooses the watched steps of one root, and stores their peaks."""

    def __init__(self, allocations: AllocationLog, root: str, name: str, post: Callable[[Event], None]) -> None:
        self._allocations = allocations
        self._root, self._name = root, name
        self._post = post
        # By signature and elements (some signatures have no sizes), then by whether it was held out.
        self._peaks: dict[tuple[str, int], dict[bool, int]] = {}
        self._largest = 0  # elements of the signatures done so far
        self._last = -1  # number of the last call watched

    def begin(self, signature: str, elements: int, number: int) -> bool | None:
        """Watch the step that call ``number`` begins: True if it is to be held out, False if not, None: not watched.

        Never two in a row: the second would seem to free what the first one leaves allocated.
        """
        if number <= self._last + 1 or elements < LARGER * self._largest:
            return None
        known = self._peaks.get((signature, elements), {})
        if not known and len(self._peaks) >= MAX_OPEN:
            return None
        if not self._allocations.begin():
            return None
        self._last = number
        return False in known

    def is_half_known(self, signature: str, elements: int) -> bool:
        """Whether one of the two steps has been watched: the next calls must be seen one by one."""
        return (signature, elements) in self._peaks

    def end(self, signature: str, elements: int, held_out: bool, on_gpu: bool, is_changed: bool) -> None:
        """End the step; its peak is dropped where the next step will run other code."""
        peak = self._allocations.end(on_gpu)
        if peak is None or is_changed:
            return
        known = self._peaks.setdefault((signature, elements), {})
        known[held_out] = peak
        if len(known) < 2:
            return
        del self._peaks[signature, elements]
        self._largest = max(self._largest, elements)
        data = {"root": self._root, "name": self._name, "signature": signature, "elements": elements}
        data |= {"eager_bytes": known[True], "routed_bytes": known[False]}
        self._post(Event(PEAK_MEMORY, f"peak memory of a step of {self._name}", data))
