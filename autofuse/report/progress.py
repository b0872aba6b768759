"""The bar a person sees while the script pauses for tuning: one line on stderr, only where that is a terminal.

In: the number of finished nodes. Out: a line that is redrawn, and removed at the end. Guarantee: nothing is imported,
no thread is started and no stream is replaced, since all this happens inside of the script; a stream that refuses
output is ignored.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType

WIDTH = 30  # of the bar, in characters
DRAW_SECONDS = 0.2
_CLEAR = "\r\x1b[2K"


class TuningProgress:
    """A bar over the nodes of one pause. Use as a context manager; ``update(done)`` may go up to ``total``."""

    def __init__(self, total: int, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = clock()
        self._drawn = float("-inf")
        self._file = None if quiet else _terminal()

    def update(self, done: int) -> None:
        """Draw the bar with ``done`` nodes, at most five times a second."""
        now = self._clock()
        if self._file is None or now - self._drawn < DRAW_SECONDS:
            return
        self._drawn = now
        _write(self._file, _CLEAR + line(done, self._total, now - self._began))

    def __enter__(self) -> TuningProgress:
        self.update(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            _write(self._file, _CLEAR)


def line(done: int, total: int, seconds: float) -> str:
    """The text ``autofuse: tuning ━━━━━─────  12/40 nodes  0:00:12, about 0:00:28 left``."""
    done = min(max(done, 0), total)
    full = WIDTH * done // total if total else WIDTH
    left = f", about {_time(seconds / done * (total - done))} left" if 0 < done < total else ""
    return f"autofuse: tuning {'━' * full}{'─' * (WIDTH - full)}  {done}/{total} nodes  {_time(seconds)}{left}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _terminal() -> int | None:
    """The descriptor of the interpreter's own stderr, if it is a terminal."""
    with contextlib.suppress(Exception):
        if sys.__stderr__ is not None and sys.__stderr__.isatty():
            return sys.__stderr__.fileno()
    return None


def _write(file: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(file, text.encode())
