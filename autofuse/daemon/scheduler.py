"""Yielding: when the daemon may work, beside whom, and for how long.

In: the scripts of this machine, how busy it is, what we have used. Out: rests before pieces of work and within them.
Guarantee: beside running scripts one daemon of a user works at a time, and what all of them take from scripts that
fill all cores stays within the account of each script (`throttle.room_beside`). A compiler or a worker that would take
longer stands still meanwhile, imports included. Nobody rests while a script waits for the result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from autofuse.daemon.peers import Peers, Script
from autofuse.daemon.throttle import CpuThrottle, MachineLoad, allowed_percent, cpu_seconds, room_beside
from autofuse.settings.groups import TunerSettings
from autofuse.tuner.ipc import Interrupted

SCRIPTS_SECONDS = 1.0  # for so long the list of running scripts is not read again
SAVED_SECONDS = 30.0  # for so long what our kernels have saved is not read again


class Scheduler:
    """Decides when one daemon works, and for how long."""

    def __init__(
        self,
        settings: TunerSettings,
        peers: Peers,
        *,
        is_urgent: Callable[[], bool],
        is_stopping: Callable[[], bool],
        saved: Callable[[list[Script]], Mapping[int, float]] = lambda scripts: {},
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        load: MachineLoad | None = None,
    ) -> None:
        """``saved``: by process number, the seconds that kernels which were decided while a script ran have saved
        it. ``load``: of this machine, looked at where None."""
        self._settings = settings
        self._peers = peers
        self.is_urgent = is_urgent
        self.is_stopping = is_stopping
        self._find_saved = saved
        self._now = clock
        self._scripts: list[Script] = []
        self._scripts_at = self._saved_at = float("-inf")
        self._saved: Mapping[int, float] = {}
        self._others = load or MachineLoad(cpu_seconds)
        # The CPU time of our imports is charged if a script runs.
        self._owed = cpu_seconds() if self.scripts() else 0.0
        self._share = CpuThrottle(self._percent, cpu_seconds, clock, sleep, self)

    def clock(self) -> float:
        """Seconds of a monotonic clock without the rests, each taken off when it ends."""
        return self._now() - self._share.rested_seconds

    def scripts(self) -> list[Script]:
        """The running scripts, as of the last SCRIPTS_SECONDS."""
        if self._now() - self._scripts_at > SCRIPTS_SECONDS:
            self._scripts, self._scripts_at = self._peers.scripts(), self._now()
        return self._scripts

    def may_begin(self) -> bool:
        """Whether work may begin: someone waits for it, no script runs, or we have the turn or can take it now."""
        return self.is_urgent() or not self.scripts() or self._peers.take_turn()

    def end(self) -> None:
        """End a piece of work: report the time that it took, and give up the turn."""
        self._pay()
        self._peers.give_turn()

    def rest(self, ahead_seconds: float = 0.0) -> None:
        """Rest as needed before a step of work; ``ahead_seconds``: CPU time that a long step is expected to take.

        Raises Interrupted where the daemon is to end.
        """
        self._share.rest(self._must_yield, ahead_seconds)
        if self.is_stopping():
            raise Interrupted

    def tend(self, group: int) -> float:
        """Halt a working process group of ours where we have taken too much; for how many seconds."""
        if threading.current_thread() is not threading.main_thread() or not self._must_yield():
            return 0.0
        if not self.scripts() or not self._others.is_full():
            return 0.0  # a halt in the middle spoils a race, and here we hold up nobody
        return self._share.rest(self._must_yield, halted=partial(halted, group))

    def _must_yield(self) -> bool:
        """Whether to yield: to a script, or to other processes that keep the machine busy."""
        if self.is_stopping() or self.is_urgent():
            return False
        return bool(self.scripts()) or self._others.is_busy()

    def _percent(self) -> float:
        scripts = self.scripts()
        age = time.time() - min(script.began for script in scripts) if scripts else None
        return allowed_percent(self._settings.cpu_percent, age, self._others.is_full())

    # ---- the account ----------------------------------------------------------------------------

    def charge(self, seconds: float) -> None:
        if self.scripts() and not self.is_urgent() and self._others.is_full():
            self._owed += seconds

    def room(self) -> float:
        scripts = self.scripts()
        if not scripts:
            return float("inf")
        if not self._peers.take_turn():
            return float("-inf")
        if not self._others.is_full():
            return float("inf")
        self._pay()
        if self._now() - self._saved_at > SAVED_SECONDS:
            self._saved, self._saved_at = self._find_saved(scripts), self._now()
        spent = self._peers.spent() + self._owed
        return room_beside(scripts, time.time(), spent, self._settings.busy_percent, self._saved)

    def _pay(self) -> None:
        """Add what we took to the sum that all daemons share, if we have the turn."""
        if self._owed and self._peers.has_turn:
            self._peers.add_spent(self._owed)
            self._owed = 0.0


@contextlib.contextmanager
def halted(group: int) -> Iterator[None]:
    """Halt the processes of a group; they go on at the end."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGCONT)
