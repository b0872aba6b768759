"""Manners: the daemon takes little, and less while a script runs.

In: a share of one core, a clock of CPU seconds. Out: rests between pieces of work, low priority for the process.
Guarantee: over any few seconds the daemon, its compilers and its worker use at most their share beside a running
script; nothing here fails where the system does not allow it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import psutil

BURST_SECONDS = 0.25  # CPU time that may be used at once before the share counts
NAP_SECONDS = 0.05
LEAST_PERCENT = 1.0  # of one core
FULL_PERCENT = 10.0  # of one core, beside a script that fills them all: its threads wait for the one that we hold up
SETTLED_SECONDS = 120.0  # a script that has run for so long is taken for one that goes on
LOOK_SECONDS = 0.5
OTHERS_SHARE = 0.3  # of one core: more than a desktop at rest, less than any training
_IDLE_IO = 3  # ionice's class "idle"


class CpuShare:
    """Rests so that CPU time stays within a share of the wall clock (a token bucket)."""

    def __init__(
        self,
        percent: Callable[[], float],
        cpu_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``percent`` of one core, just now; ``cpu_seconds``: used so far by all that counts."""
        self._percent = percent
        self._cpu_seconds = cpu_seconds
        self._clock = clock
        self._sleep = sleep
        self._tokens = BURST_SECONDS
        self._share = percent() / 100.0
        self._seen = (clock(), cpu_seconds())
        self.rested_seconds = 0.0

    def rest(self, is_needed: Callable[[], bool]) -> None:
        """Sleep until the share allows to go on; at once where no rest ``is_needed`` (any more)."""
        self._account()
        if not is_needed():
            self._tokens = BURST_SECONDS  # what was used while nobody was disturbed is not owed
            return
        began = self._clock()
        while self._tokens < 0.0 and is_needed():
            self._sleep(min(NAP_SECONDS, max(0.001, -self._tokens / self._share)))
            self._account()
        self.rested_seconds += self._clock() - began

    def _account(self) -> None:
        at, used = self._clock(), self._cpu_seconds()
        self._share = max(self._percent(), LEAST_PERCENT) / 100.0
        earned = (at - self._seen[0]) * self._share
        self._tokens = min(BURST_SECONDS, self._tokens + earned - max(0.0, used - self._seen[1]))
        self._seen = (at, used)


def young_share(age_seconds: float) -> float:
    """The part of its share that the daemon takes beside a script of this age.

    What is tuned beside a script that ends within a minute comes too late for it, and no later for the next run if it
    is tuned when the script has ended; where the script fills all cores each second of it is lost.
    """
    return min(1.0, age_seconds / SETTLED_SECONDS) if age_seconds >= 0.0 else 1.0  # less: the clock was set back


def allowed_percent(percent: float, script_age: float | None, is_full: bool) -> float:
    """Of one core, beside a script of that age in seconds (None: no script runs); ``is_full``: no core is left."""
    if script_age is None:
        return percent
    return young_share(script_age) * (min(percent, FULL_PERCENT) if is_full else percent)


def cpu_seconds(*worker_pids: int) -> float:
    """CPU seconds of this process, of the children that have ended, and of living workers."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in worker_pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return float(total)


class OtherWork:
    """Whether processes that are not ours keep the machine busy, and whether a core is left."""

    def __init__(self, own_cpu_seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._own = own_cpu_seconds
        self._clock = clock
        self._seen = (clock(), busy_seconds(), own_cpu_seconds())
        self._is_busy = self._is_full = False

    def is_busy(self) -> bool:
        """As of the last LOOK_SECONDS; looks again when they are over."""
        self._look()
        return self._is_busy

    def is_full(self) -> bool:
        """Whether all cores work, on whatever it is."""
        self._look()
        return self._is_full

    def _look(self) -> None:
        now = self._clock()
        elapsed = now - self._seen[0]
        if elapsed >= LOOK_SECONDS:
            seen = (now, busy_seconds(), self._own())
            everything = seen[1] - self._seen[1]
            others = everything - (seen[2] - self._seen[2])
            self._is_busy = others > OTHERS_SHARE * elapsed
            self._is_full = everything > ((os.cpu_count() or 1) - OTHERS_SHARE) * elapsed
            self._seen = seen


def busy_seconds() -> float:
    """CPU seconds that all processors together have worked since the machine started."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def lower_priority(nice: int, pid: int = 0) -> None:
    """Let a process, 0 for this one, yield to everything: CPU, disk. Its children inherit it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, pid) + nice))
    if nice >= 10:
        # Batch: a script's thread that wakes up gets its core back at once. Not SCHED_IDLE: beside a script whose
        # threads spin on every core it would get nothing at all, and no kernel would ever be tuned.
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))
        with contextlib.suppress(OSError, ValueError, AttributeError, psutil.Error):
            psutil.Process(pid or None).ionice(_IDLE_IO)
        # Where the kernel groups processes by session, ours is as heavy as the script's whatever its nice value is.
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid or 'self'}/autogroup").write_text(str(nice))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
