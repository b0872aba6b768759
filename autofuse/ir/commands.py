"""The part of a command line that identifies a script.

In: a command, as `RunStart` has it: words that ``shlex.join`` has joined. Out: the command without its arguments.
Guarantee: no arguments are kept, which change from run to run and may be private; the function is idempotent.
"""

from __future__ import annotations

import os
import shlex


def script_of(command: str) -> str:
    """``-m pkg.mod``, or the file name of a script; quoted as a shell wants it."""
    words = _words(command)
    if not words:
        return ""
    return shlex.join(words[:2] if words[0] == "-m" else [os.path.basename(words[0])])


def _words(command: str) -> list[str]:
    """Older versions quoted nothing: where no quote opens at the name, blanks end it, and an apostrophe is its own."""
    if command.removeprefix("-m ").startswith("'"):
        try:
            return shlex.split(command)
        except ValueError:  # one that was never closed: an older line all the same
            pass
    return command.split()
