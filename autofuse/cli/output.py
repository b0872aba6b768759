"""Where text goes: results to stdout, everything else to stderr, nothing ever into a script's own streams.

``say`` never fails: a closed or full stderr must not change how a script ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def say(text: str) -> None:
    """One line on stderr. The script may have put its own object in ``sys.stderr``: ours is the interpreter's.

    Written past its buffer: text that could not be written would stay there, and the interpreter's last flush would
    turn the script's exit code into 120.
    """
    with contextlib.suppress(Exception):
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), f"autofuse: {text}\n".encode(errors="backslashreplace"))


def one_line(error: BaseException) -> str:
    """An error as a sentence: its first line, or its type where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def out_console() -> Console:
    """For results, on stdout."""
    from rich.console import Console  # rich costs 50 ms: only commands that draw pay it

    return Console(highlight=False)


def err_console() -> Console:
    """For progress, on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)
