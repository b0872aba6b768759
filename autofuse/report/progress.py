"""The bar a person sees while the script pauses for tuning: one line on stderr, only where that is a terminal.

In: the number of finished nodes, and what they save so far. Out: a line that is redrawn, and removed at the end.
Guarantee: nothing is imported, no thread is started and no stream is replaced, since all this happens inside of the
script; the line is never wider than the terminal; a stream that refuses output is ignored.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from autofuse.report import wording

WIDTHS = range(6, 31)  # of the bar, in characters
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

    def update(self, done: int, saving_us: Callable[[], float] = lambda: 0.0) -> None:
        """Draw the bar with ``done`` nodes, at most five times a second; ``saving_us()``: what they save in a call."""
        now = self._clock()
        if self._file is None or now - self._drawn < DRAW_SECONDS:
            return
        self._drawn = now
        text = line(done, self._total, now - self._began, saving_us(), _columns(self._file) - 1)
        _write(self._file, _CLEAR + text)

    def __enter__(self) -> TuningProgress:
        self.update(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            _write(self._file, _CLEAR)


def line(done: int, total: int, seconds: float, saving_us: float = 0.0, width: int = 79) -> str:
    """``autofuse: tuning 12/40 nodes ━━━━━─────── 0:12, 0:28 left, saves 1.84 ms a call``, or what of it fits."""
    done = min(max(done, 0), total)
    nodes = f"tuning {done}/{total} nodes"
    saves = f"saves {wording.microseconds(saving_us)}" if saving_us > 0.0 else ""
    left = f"{_time(seconds / done * (total - done))} left" if 0 < done < total else ""
    choices = (
        (f"autofuse: {nodes}", _time(seconds), left, f"{saves} a call" if saves else ""),
        (f"autofuse: {nodes}", left or _time(seconds), saves),
        (nodes, saves or left or _time(seconds)),
        (nodes,),
    )
    fitting = (text for head, *rest in choices if len(text := _joined(head, rest, width, done, total)) <= width)
    return next(fitting, nodes[: max(0, width)])


def _joined(head: str, rest: Sequence[str], width: int, done: int, total: int) -> str:
    """With a bar between them, where it has room."""
    tail = ", ".join(part for part in rest if part)
    room = min(width - len(head) - len(tail) - 2, WIDTHS[-1])
    full = room * done // total if total else room
    bar = f"{'━' * full}{'─' * (room - full)}" if room in WIDTHS else ""
    return " ".join(part for part in (head, bar, tail) if part)


def _time(seconds: float) -> str:
    """``0:12``, ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _columns(file: int) -> int:
    """Of the terminal; 80 where it does not know, or says 0."""
    with contextlib.suppress(OSError):
        return os.get_terminal_size(file).columns or 80
    return 80


def _terminal() -> int | None:
    """The descriptor of the interpreter's own stderr, if it is a terminal."""
    with contextlib.suppress(Exception):
        if sys.__stderr__ is not None and sys.__stderr__.isatty():
            return sys.__stderr__.fileno()
    return None


def _write(file: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(file, text.encode())
