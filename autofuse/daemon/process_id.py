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
    """One process, told from all others that have or had its number."""

    pid: int
    ticks: int  # clock ticks from the machine's start to the process's
    machine: str  # the machine's boot and the PID namespace, see `this_machine`

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; a zombie, which has ended without being waited for, does not."""
        if self.machine != this_machine():
            return False
        state, ticks = _stat(self.pid)
        return ticks == self.ticks and state not in "ZX"

    @property
    def is_ours(self) -> bool:
        """Whether the process belongs to this user."""
        with contextlib.suppress(OSError):
            return os.stat(f"/proc/{self.pid}").st_uid == os.geteuid()
        return False


def process_id(pid: int) -> ProcessId:
    """The identity of a running process. Raises ProcessLookupError where ``pid`` does not run."""
    state, ticks = _stat(pid)
    if not state or state in "ZX":
        raise ProcessLookupError(f"expected process {pid} to run, found none")
    return ProcessId(pid, ticks, this_machine())


def start_ticks(pid: int) -> int:
    """Clock ticks from the machine's start to the process's; -1 where there is no such process."""
    return _stat(pid)[1]


@functools.cache
def this_machine() -> str:
    """The identity of this machine's boot and of our PID namespace (container), in which process numbers count."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start ticks of a process; "" and -1 where there is no such process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", -1
