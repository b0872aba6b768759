"""Throttling: the daemon takes little, and less while a script runs.

In: a share of one core, a clock of CPU seconds, an account. Out: rests between pieces of work and within them, low
priority for the process.
Guarantee: over any few seconds the daemon, its compilers and its worker use at most their share beside a running
script, and beside one that fills all cores no more than its account allows; nothing here fails where the system does
not allow it.

A second of our work beside a script that fills all cores costs it a second: its threads wait for the one that we hold
up. So the account (`room_beside`) is about a part of the script's time, whatever we would gain in a hurry.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import psutil

from autofuse.daemon.peers import Script
from autofuse.tuner.machine_load import OTHERS_SHARE, busy_seconds

BURST_SECONDS = 0.25  # CPU time that may be used at once before the share counts
NAP_SECONDS = 0.05
LONG_NAP_SECONDS = 0.5  # while the account fills: a look costs 0.3 ms, and the script may end
SLICE_SECONDS = 0.05  # CPU time that an overdrawn account must hold again before work goes on
LEAST_PERCENT = 1.0  # of one core
FULL_PERCENT = 10.0  # of one core: the most beside a script that fills all cores, whatever the account holds
LONGEST_EXPECTED_SECONDS = 3600.0  # the most of a script's expected length that counts in advance: it may end before
SAVED_SHARE = 0.25  # the part of the time that kernels have saved a script which may be spent on more kernels
SETTLED_SECONDS = 120.0  # a script of this age is expected to go on
LOOK_SECONDS = 0.5
_IDLE_IO = 3  # ionice's class "idle"
_TICKS = os.sysconf("SC_CLK_TCK")
_KNOWS_CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()


class Account(Protocol):
    """The CPU time that may be used beside scripts."""

    def charge(self, seconds: float) -> None:
        """Charge CPU seconds that were used since the last call."""

    def room(self) -> float:
        """The CPU seconds that are left; negative if overdrawn."""


class _Free:
    def charge(self, seconds: float) -> None:
        return None

    def room(self) -> float:
        return float("inf")


class CpuThrottle:
    """Rests so that CPU time stays within a share of the wall clock (a token bucket) and within an account."""

    def __init__(
        self,
        percent: Callable[[], float],
        cpu_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        account: Account | None = None,
    ) -> None:
        """``percent``: the share of one core that is allowed now; ``cpu_seconds``: used so far by all processes that
        count."""
        self._percent = percent
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self._sleep = sleep
        self._account = account or _Free()
        self._tokens = BURST_SECONDS
        self._share = percent() / 100.0
        self._seen = (clock(), cpu_seconds())
        self.rested_seconds = 0.0

    def rest(
        self,
        is_needed: Callable[[], bool],
        ahead_seconds: float = 0.0,
        halted: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> float:
        """Sleep until share and account allow work, or no rest ``is_needed`` any more; the seconds rested.

        ``ahead_seconds``: CPU time that the account must hold for the work that follows; ``halted`` is a context that
        is entered for as long as a rest lasts.
        """
        self._look()
        if not is_needed():
            self._tokens = BURST_SECONDS  # time used while no script was disturbed is not owed
            return 0.0
        if self._tokens >= 0.0 and self._account.room() >= ahead_seconds:
            return 0.0
        began = self._clock()
        enough = max(ahead_seconds, SLICE_SECONDS)
        with halted():
            while is_needed() and (nap := self._nap(enough)):
                self._sleep(nap)
                self._look()
        rested = self._clock() - began
        self.rested_seconds += rested
        return rested

    def _nap(self, enough: float) -> float:
        """How long to sleep before looking again; 0 where work may go on."""
        if self._account.room() < enough:
            return LONG_NAP_SECONDS
        return min(NAP_SECONDS, max(0.001, -self._tokens / self._share)) if self._tokens < 0.0 else 0.0

    def _look(self) -> None:
        at, used = self._clock(), self._cpu_seconds()
        self._share = max(self._percent(), LEAST_PERCENT) / 100.0
        earned = (at - self._seen[0]) * self._share
        now_used = max(0.0, used - self._seen[1])
        self._tokens = min(BURST_SECONDS, self._tokens + earned - now_used)
        self._seen = (at, used)
        if now_used:
            self._account.charge(now_used)


def room_beside(
    scripts: Sequence[Script], now: float, spent: float, percent: float, saved: Mapping[int, float] | None = None
) -> float:
    """CPU seconds that daemons may still take beside these scripts, so that none is slowed by more than ``percent``.

    ``spent``: CPU seconds that daemons have taken so far; for a script only those since its start count. ``saved``: by
    process number, the seconds that kernels which were decided while a script ran have saved it; SAVED_SHARE of them is
    added. The share of a script's expected length is available from its start: a long script has the longest use of
    early results, and a short one does not pay for results that come too late.
    """

    def left(script: Script) -> float:
        seconds = max(0.0, now - script.began, min(script.expected_seconds, LONGEST_EXPECTED_SECONDS))
        earned = percent / 100.0 * seconds + SAVED_SHARE * (saved or {}).get(script.pid, 0.0)
        return earned - max(0.0, spent - script.spent)

    return min((left(script) for script in scripts), default=float("inf"))


def young_share(age_seconds: float) -> float:
    """The part of its share that the daemon takes beside a script of this age, in seconds, while cores are idle.

    Kernels that are tuned beside a script that ends within a minute come too late for it. The next run has them as
    early if they are tuned after the script has ended.
    """
    return min(1.0, age_seconds / SETTLED_SECONDS) if age_seconds >= 0.0 else 1.0  # negative: the clock was set back


def allowed_percent(percent: float, script_age: float | None, is_full: bool) -> float:
    """The allowed percentage of a core beside a script of this age in seconds, if any; ``is_full``: no core is idle."""
    if script_age is None:
        return percent
    return min(percent, FULL_PERCENT) if is_full else young_share(script_age) * percent


def cpu_seconds(pid: int | None = None) -> float:
    """CPU seconds of a process, ours where None, of its children that have ended and of all its living descendants.

    So compilers count while they run. Takes 0.2 ms for three processes; reading all processes of the machine takes
    milliseconds.
    """
    total, queue = 0.0, [pid or os.getpid()]
    while queue:
        process = Path("/proc", str(queue.pop()))
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15]) / _TICKS  # utime, stime, cutime, cstime
            queue += _children(process)
    return total


def _children(process: Path) -> list[int]:
    if not _KNOWS_CHILDREN:
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(int(process.name)).children()]
    tasks = (process / "task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


class MachineLoad:
    """Whether processes that are not ours keep the machine busy, and whether a core is idle."""

    def __init__(
        self,
        own_cpu_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._own = own_cpu_seconds
        self._clock = clock
        self._look_seconds = look_seconds
        self._seen = (clock(), busy_seconds(), own_cpu_seconds())
        self._is_busy = self._is_full = self.has_looked = False

    def is_busy(self) -> bool:
        """Whether other processes keep the machine busy, as measured at most ``look_seconds`` ago."""
        self._look()
        return self._is_busy

    def is_full(self) -> bool:
        """Whether all cores are busy, with our own processes or others."""
        self._look()
        return self._is_full

    def _look(self) -> None:
        now = self._clock()
        elapsed = now - self._seen[0]
        if elapsed >= self._look_seconds:
            seen = (now, busy_seconds(), self._own())
            everything = seen[1] - self._seen[1]
            others = everything - (seen[2] - self._seen[2])
            self._is_busy = others > OTHERS_SHARE * elapsed
            self._is_full = everything > ((os.cpu_count() or 1) - OTHERS_SHARE) * elapsed
            self._seen, self.has_looked = seen, True


def lower_priority(nice: int, pid: int = 0) -> None:
    """Lower a process's priority (0: this one's) for CPU and disk; its children inherit it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, pid) + nice))
    if nice >= 10:
        # Batch: a script's thread that wakes up gets its core back at once. Not SCHED_IDLE: beside a script whose
        # threads spin on every core the process would get nothing at all, and no kernel would ever be tuned.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
        with contextlib.suppress(OSError, ValueError, AttributeError, psutil.Error):
            psutil.Process(pid or None).ionice(_IDLE_IO)
        # Where the kernel schedules by session, our session weighs as much as the script's, whatever our nice value is.
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(nice))
