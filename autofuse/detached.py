"""Processes of ours that are no children of the script.

A script that waits for all of its children would wait for them too, and one that has a handler for their end would hear
of it. So a shell starts them, says their number and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_DETACH = '"$@" >&2 & echo $!'


def spawn(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes] | int, pass_fds: Sequence[int] = ()
) -> int:
    """The process number of ``command``, in a session of its own, whose output goes to ``stderr``. Raises OSError."""
    starter = subprocess.Popen(
        ["/bin/sh", "-c", _DETACH, "sh", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,  # outlives the script and its terminal
        pass_fds=pass_fds,
        cwd="/",
        env=environment,
    )
    answer, _ = starter.communicate()
    try:
        return int(answer)
    except ValueError:
        raise OSError(f"/bin/sh, which gave no process number but {answer[:80]!r}") from None


def python_module(module: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that run a module of ours as this process would find it."""
    source = str(Path(__file__).parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{source}" if path else source}
    # -P: nothing of the folder that somebody happens to be in
    return [sys.executable, "-P", "-m", module], environment
