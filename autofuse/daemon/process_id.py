"""Which process it was: told from a later one of the same number, and from one of another machine or container.

In: a process number. Out: a `ProcessId`, which can be written down and asked later whether it still runs.
Guarantee: no clock that a person may set takes part: the kernel counts a process's start in ticks since the machine's.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process, for good."""

    pid: int
    ticks: int  # from the machine's start to its own
    machine: str  # which start of which machine, and which container's numbers

    @property
    def is_alive(self) -> bool:
        """Whether it runs; an ended process that its parent has not waited for (a zombie) does not."""
        if self.machine != this_machine():
            return False
        state, ticks = _stat(self.pid)
        return ticks == self.ticks and state not in "ZX"

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this user."""
        with contextlib.suppress(OSError):
            return os.stat(f"/proc/{self.pid}").st_uid == os.geteuid()
        return False


def process_id(pid: int) -> ProcessId:
    """Of a process that runs. Raises ProcessLookupError."""
    state, ticks = _stat(pid)
    if not state or state in "ZX":
        raise ProcessLookupError(f"expected process {pid} to run, found none")
    return ProcessId(pid, ticks, this_machine())


def start_ticks(pid: int) -> int:
    """When a process began, -1 where there is none."""
    return _stat(pid)[1]


@functools.cache
def this_machine() -> str:
    """This start of this machine, and the container whose process numbers we see."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, int]:
    """State and start of a process; "" and -1 where there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", -1
