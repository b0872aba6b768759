"""The background thread of a script, which alone touches the store.

In: records posted by the script. Out: decisions and kernels in memory, refreshed plans. Guarantee: the script never
waits for the store, except where it asked to (``wait`` mode). The thread imports no package that the script might
import at the same time: two threads in one import circle can see a half-initialised module. A failing store is reported
in one line and then no longer used; the script goes on with what is in memory.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from autofuse.errors import AutofuseError
from autofuse.hidden_thread import HiddenThread
from autofuse.ir.records import Decision, Event, RunStart, TuneRequest
from autofuse.locks import make_condition, make_event, make_lock

if TYPE_CHECKING:
    from autofuse.db.store import Store

TICK_SECONDS = {"wait": 0.1}  # seconds between two reads of the store, by mode
CALM_TICK_SECONDS = 0.25
FLUSH_SECONDS = 1.0
PATIENCE_SECONDS = 1.0
BUSY_SECONDS = 2.0  # seconds that another process may lock the store before this run goes on without it
# A thread that runs Python code makes another one wait 5 ms for the GIL whenever that returns from an operator. So work
# is done in pieces, with pauses in between in which the script finds the GIL free.
BREATH_SECONDS = 0.0003
AT_ONCE = 16  # requests written in one piece while the script runs
MOST_SHARE = 0.02  # share of the time, for counting that is repeated


def yield_gil() -> None:
    """Release the GIL between two pieces of background work."""
    time.sleep(BREATH_SECONDS)


class DutyCycle:
    """Spaces repeated work that takes long after many shapes, so that it takes a small share of the time."""

    def __init__(self, share: float = MOST_SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._next = -math.inf

    def is_due(self) -> bool:
        return self._clock() >= self._next

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the work inside of this context."""
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._next = now + (now - began) / self._share


class StoreThread:
    """Owns the store's connection and the thread that uses it."""

    def __init__(
        self,
        connect: Callable[[], Store],
        is_new: bool,
        start: RunStart,
        *,
        collect: Callable[[Store, int, bool], None],
        absorb: Callable[[Store], bool],
        report: Callable[[str, str], None],
    ) -> None:
        """``connect`` opens the store, which this run makes where it ``is_new``.

        ``collect(store, run_id, final)`` writes what the run counted; ``absorb(store)`` reads decisions and
        kernels, True if anything was new; ``report(kind, message)`` says one line to the person.
        """
        self._connect = connect
        self._start = start
        self._collect = collect
        self._absorb = absorb
        self._report = report
        self._store: Store | None = None
        self._stop = make_event()
        self._wake = make_event()
        self._ready = make_event()
        self._requests: list[TuneRequest] = []
        self._events: list[Event] = []
        self._decisions: list[Decision] = []
        self._lock = make_lock()
        self._open_work: int | None = None  # requests of this run not finished; None: not known
        self._pid = os.getpid()
        self._is_new = is_new
        self._broken = False
        self._patience = PATIENCE_SECONDS
        self._stale = False  # decisions have not been read for all devices in use
        self._absorbed_again = make_event()
        self._flushed = make_condition()
        self._posted = 0
        self._written = 0
        self.run_id: int | None = None
        self.has_leftovers = False  # requests of earlier runs wait in the store
        self.thread = HiddenThread(self._run)

    def start(self) -> None:
        self.thread.start()

    @property
    def usable(self) -> bool:
        """Whether the store is open, or still being opened; not in a forked child, which has no such thread."""
        return not self._broken and self._pid == os.getpid()

    @property
    def is_ready(self) -> bool:
        """Whether earlier runs' findings are in memory, or will never be."""
        return self._is_new or not self.usable or self._ready.is_set()

    def wait_ready(self, seconds: float) -> bool:
        """Wait until earlier runs' findings are in memory; for a store that this run makes there is no wait.

        All callers together wait PATIENCE_SECONDS at most: a locked store may take long.
        """
        if self.is_ready:
            return True
        began = time.monotonic()
        is_ready = self._ready.wait(min(seconds, self._patience))
        self._patience = max(0.0, self._patience - (time.monotonic() - began))
        return is_ready

    def absorb_again(self, seconds: float) -> bool:
        """Read decisions and kernels again, because more devices are in use; wait for that, so long at most."""
        if not self.thread.is_alive() or self.thread.is_current:
            return False
        self._absorbed_again.clear()
        self._stale = True
        self._wake.set()
        return self._absorbed_again.wait(seconds)

    def post_requests(self, requests: list[TuneRequest]) -> int:
        """Queue work for the daemon; returns a ticket for `written`."""
        with self._lock:
            self._requests.extend(requests)
            self._posted += 1
            ticket = self._posted
        self._wake.set()
        return ticket

    def post_event(self, event: Event) -> None:
        if self.usable:
            with self._lock:
                self._events.append(event)

    def post_decision(self, decision: Decision) -> None:
        """Store a decision of the script's own; it stands once it has been read again."""
        if self.usable:
            with self._lock:
                self._decisions.append(decision)
            self._wake.set()

    def wait_written(self, ticket: int, seconds: float) -> bool:
        """Wait until the requests of a ticket are in the store."""
        with self._flushed:
            return self._flushed.wait_for(lambda: self._written >= ticket or self._broken, seconds)

    def open_work(self) -> int | None:
        """Requests of this run that the daemon has not finished, as of the last tick."""
        return self._open_work

    def stop(self, seconds: float = 10.0) -> None:
        """Write the remaining records and end the thread."""
        self._stop.set()
        self._wake.set()
        if self.thread.is_alive():
            self.thread.join(seconds)
            if self.thread.is_alive():
                self._broken = True
                problem = f"expected the store to take the last rows within {seconds:g} s, found it busy"
                self._report("store_unusable", f"{problem}; the results of this run are incomplete.")

    # ---- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            self._loop()
        except (AutofuseError, OSError) as error:
            self._fail(f"{error}")
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._ready.set()
            self._absorbed_again.set()
            with self._flushed:
                self._flushed.notify_all()
            if self._store is not None:
                self._store.close()

    def _open(self) -> None:
        self._store = self._connect()
        self.run_id = self._store.runs.start(self._start)
        self.has_leftovers = not self._is_new and self._store.queue.length().queued > 0
        self._absorb(self._store)
        self._ready.set()

    def _loop(self) -> None:
        assert self._store is not None and self.run_id is not None
        flushed_at = time.monotonic()
        version = self._store.data_version()
        while True:
            stopping = self._stop.is_set()
            self._write_posted(self._store, self.run_id)
            found = self._store.data_version()
            if found != version or self._stale:
                version, self._stale = found, False
                # In this order: a caller that sees no open work finds the decisions in memory.
                left = self._count_open(self._store)
                self._absorb(self._store)
                self._open_work = left
                if not self._stale:
                    self._absorbed_again.set()
            if stopping or time.monotonic() - flushed_at >= FLUSH_SECONDS:
                self._collect(self._store, self.run_id, stopping)
                flushed_at = time.monotonic()
            if stopping:
                self._write_posted(self._store, self.run_id)
                return
            self.thread.hide()
            self._wake.wait(TICK_SECONDS.get(self._start.mode, CALM_TICK_SECONDS))
            self._wake.clear()

    def _write_posted(self, store: Store, run_id: int) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
            events, self._events = self._events, []
            decisions, self._decisions = self._decisions, []
            ticket = self._posted
        while requests:
            piece, requests = requests[:AT_ONCE], requests[AT_ONCE:]
            store.queue.add(piece)
            if requests:
                yield_gil()
            else:
                self._open_work = self._count_open(store)
        for event in events:
            store.notes.add_event(run_id, event)
        for decision in decisions:
            store.results.put_decision(decision, run_id)
            self._stale = True  # it is read as those of the daemon are
        if ticket != self._written:
            with self._flushed:
                self._written = ticket
                self._flushed.notify_all()

    def _count_open(self, store: Store) -> int:
        status = store.queue.length(run_id=self.run_id)  # for all devices
        return status.queued + status.running

    def _fail(self, message: str) -> None:
        self._broken = True
        self._report("store_unusable", f"{message} The script goes on; nothing is stored or tuned in this run.")
