"""Starts processes of ours that are not children of the script.

A script that waits for all of its children would wait for them too, and a script's handler for ended children would be
called. So a shell starts them, prints their process number and ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_PR_GET_CHILD_SUBREAPER = 37  # <linux/prctl.h>
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


def adopts_orphans() -> bool:
    """Whether processes whose parent has ended become this one's children: the first of a container, a subreaper."""
    if os.getpid() == 1:
        return True
    found = ctypes.c_int(0)
    try:
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    except (OSError, AttributeError):  # not Linux
        return False
    return bool(found.value)


def python_module(module: str) -> tuple[list[str], dict[str, str]]:
    """Command line and environment that run a module of ours as this process would find it."""
    source = str(Path(__file__).parent.parent)
    path = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    parts = [*(os.path.abspath(part) for part in path.split(os.pathsep) if part), source]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(parts)}
    # -P: nothing of the folder that somebody happens to be in
    return [sys.executable, "-P", "-m", module], environment
