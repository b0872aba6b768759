"""The requests of a store that this daemon works on, and the heartbeat that tells how far it is.

In: requests in the store, of which each daemon takes those of its kind. Out: the next one, and what became of it.
Guarantee: the request that is expected to save most for its time goes first; one whose run has spent its tuning budget
is put aside, and queued again for a later run or the next daemon.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

import psutil

from autofuse.codegen.version import versions
from autofuse.daemon.files import DaemonFiles
from autofuse.daemon.scheduler import Scheduler
from autofuse.db.rows import DaemonState, RequestEnd
from autofuse.db.store import Store
from autofuse.db.tune_queue import NOT_READY, DaemonLog, Prefer
from autofuse.ir.records import DecisionKey, TuneRequest
from autofuse.ir.strict import strictly
from autofuse.settings.layers import Settings

HEARTBEAT_SECONDS = 5.0
CHANGE_SECONDS = 1.0  # where it does something else
UNPARK_SECONDS = 60.0


class RequestQueue:
    """The queue as one daemon sees it."""

    def __init__(
        self, settings: Settings, store: Store, scheduler: Scheduler, devices: Sequence[str], prefer: Prefer
    ) -> None:
        """``devices``: keys of devices, or prefixes of keys, whose requests are taken; ``prefer``: the request with the
        largest value goes first."""
        self.done = self.failed = 0
        self._budget_seconds = settings.tuner.budget_seconds  # for each run
        self._store = store
        self._scheduler = scheduler
        self._devices = tuple(devices)
        self._prefer = prefer
        self._files = DaemonFiles(settings)
        self.versions = (versions(), strictly(versions()))
        self._spent: dict[int, float] = {}  # seconds of work, by run
        self._parked: list[TuneRequest] = []  # requests of runs whose budget is spent
        self._parked_at = 0.0
        self._seen_version = -1
        self._looked_at = 0.0

    @property
    def queued(self) -> int:
        """The number of requests for these devices that wait, parked ones included."""
        return self._store.queue.length(*self._devices).queued + len(self._parked)

    def take_up(self) -> int:
        """Queue again what earlier daemons left in work or could not tune at that time; the number of requests."""

        def is_served(kind: str) -> bool:
            return kind != self._files.kind and self._files.is_served(kind)  # we hold our own kind's lock

        return self._store.queue.requeue_stale(is_served) + self._store.queue.requeue_failed(NOT_READY)

    def take(self) -> TuneRequest | None:
        """Take the next request, of whichever run; None where there is none."""
        queue, kind = self._store.queue, self._files.kind
        return queue.take(*self._devices, versions=self.versions, kind=kind, prefer=self._prefer)

    def next(self) -> TuneRequest | None:
        """Take the next request whose run has budget left, or None. Cheap while nothing in the store changes."""
        if self._store.was_moved:
            return None  # nobody waits for requests of a store that was put aside
        now = time.monotonic()
        version = self._store.data_version()
        if version == self._seen_version and now - self._looked_at < HEARTBEAT_SECONDS:
            return None
        if self._parked and (now - self._parked_at > UNPARK_SECONDS or self._scheduler.is_urgent()):
            self.unpark()
        while not self._scheduler.is_stopping() and self._scheduler.may_begin():
            request = self.take()
            if request is None:
                self._seen_version, self._looked_at = version, now
                return None
            if self._spent.get(request.run_id or 0, 0.0) < self._budget_seconds:
                return request
            self._parked.append(request)
            self._parked_at = now
        return None

    def finish(self, key: DecisionKey, status: RequestEnd, message: str = "") -> None:
        """Store how a request ended, and count it."""
        self._store.queue.finish(key, status, message)
        self.done += status == "done"
        self.failed += status == "failed"

    def charge(self, run_id: int | None, seconds: float) -> None:
        """Charge seconds of work on a request to the budget of its run."""
        self._spent[run_id or 0] = self._spent.get(run_id or 0, 0.0) + seconds

    def unpark(self) -> None:
        """Queue parked requests again: by now another run, with a budget of its own, may have asked for them."""
        while self._parked:
            self._store.queue.finish(self._parked[-1].key, "requeued", "the run's tuning budget was spent")
            self._parked.pop()


class Heartbeat:
    """Writes regularly to the store what this daemon does."""

    def __init__(self, log: DaemonLog, queue: RequestQueue, fleet: Callable[[], str] = lambda: "") -> None:
        """``fleet``: in words, whether a fleet's server answers."""
        self.job = ""  # the request in work, for people
        self._fleet = fleet
        self._log = log
        self._queue = queue
        self._started_at = time.time()
        self._beat_at = 0.0
        self._said = ("", "")

    def beat(self, state: str, at_once: bool = False) -> None:
        """Write ``state`` to the store, unless that was done within HEARTBEAT_SECONDS; ``at_once``: in any case.

        What it works on now is written within CHANGE_SECONDS: a write takes some ms of a script that waits.
        """
        said = (state, self.job if state == "tuning" else "")
        pause = HEARTBEAT_SECONDS if said == self._said else CHANGE_SECONDS
        if not at_once and time.monotonic() - self._beat_at <= pause:
            return
        self._beat_at, self._said = time.monotonic(), said
        self._log.heartbeat(
            DaemonState(
                pid=os.getpid(),
                host=socket.gethostname(),
                started_at=self._started_at,
                state=state,
                job=self.job if state == "tuning" else "",
                queued=self._queue.queued,
                done=self._queue.done,
                failed=self._queue.failed,
                data={"rss_bytes": psutil.Process().memory_info().rss, "fleet": self._fleet()},
            )
        )
