"""A thread of ours that a script does not find among its own.

In: a function. Out: a daemon thread that runs it. Guarantee: ``threading.enumerate()`` and ``active_count()`` leave it
out, so a script that waits until all other threads have ended does not wait for ours, and what a script has given to
``threading.settrace`` and ``setprofile`` does not see it. A library that the function calls may ask for
``threading.current_thread()``, which lists the thread that asks; `hide` takes it off the list again.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable

from autofuse.locks import make_event

_running: set[int] = set()  # their numbers


def hides(ident: int | None) -> bool:
    """Whether the thread of this number is one of ours."""
    return ident in _running


class HiddenThread:
    """Runs ``target()`` once, beside the script."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._pid = 0  # of the process in which it was started; a forked child has no such thread
        self._ident: int | None = None
        self._ended = make_event()

    def start(self) -> None:
        self._pid = os.getpid()
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._ident = threading.get_ident()
        _running.add(self._ident)
        try:
            self._target()
        finally:
            self.hide()
            _running.discard(self._ident)
            self._ended.set()

    def hide(self) -> None:
        """Undo what ``threading.current_thread()`` has noted of this thread, on which it is called."""
        listed: dict[int | None, threading.Thread] = getattr(threading, "_active", {})
        listed.pop(self._ident, None)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._ident == threading.get_ident()

    def is_alive(self) -> bool:
        return self._pid == os.getpid() and not self._ended.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, so long at most; None: however long that takes."""
        if self.is_alive():
            self._ended.wait(seconds)
