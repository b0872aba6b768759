"""What of a command line tells one script from another.

In: a command, as `RunStart` has it. Out: the script's name. Guarantee: nothing of its arguments, which change from run
to run and may hold what is nobody's business.
"""

from __future__ import annotations

import os


def script_of(command: str) -> str:
    """``-m pkg.mod``, or the file name of a script."""
    words = command.split()
    if not words:
        return ""
    return " ".join(words[:2]) if words[0] == "-m" else os.path.basename(words[0])
