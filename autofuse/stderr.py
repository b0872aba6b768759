"""``say``: prints one line on stderr, never fails and never disturbs the script.

In: text. Out: "autofuse: text" on the interpreter's own stderr. A closed or full stderr must not change how a script
ends. An object that the script put into ``sys.stderr`` is not used.
"""

from __future__ import annotations

import contextlib
import os
import sys


def plain(text: str) -> str:
    """Text without what moves a terminal's cursor, sets its title or hides other text: names may be of any origin."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def say(text: str) -> None:
    """Write past the stream's buffer: text that could not be written would stay there, and the interpreter's last
    flush would turn the script's exit code into 120."""
    with contextlib.suppress(Exception):
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), f"autofuse: {plain(text)}\n".encode(errors="backslashreplace"))
