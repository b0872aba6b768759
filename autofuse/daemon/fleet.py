"""A daemon's part in a fleet: the exchange with the server, in a thread of its own, between and beside jobs.

In: `fleet.url`; what the loop tells: that it is idle, that results were stored. Out: proposals in the local store;
requests of other hosts, leased, for a loop without work of its own.
Guarantee: no job and no script waits for the server, nor does the local store. Only a daemon that has just begun waits
for its first answer, hardly longer than `fleet.connect_seconds`: a server that is down is known at once. Where the
server cannot be used, one line says so, and the daemon goes on with its own store; it tries again after longer and
longer pauses. Without `fleet.url` there is no thread, and psycopg is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from autofuse.db.fleet_exchange import FleetExchange
from autofuse.db.fleet_queue import LEASE_SECONDS
from autofuse.db.fleet_retention import Bounds, FleetRetention
from autofuse.db.fleet_server import NO_ANSWER, FleetServer
from autofuse.db.rows import RequestEnd
from autofuse.db.store import Store
from autofuse.errors import FleetError, StoreError
from autofuse.ir.records import DecisionKey, DeviceInfo, TuneRequest
from autofuse.settings.groups import FleetSettings

log = logging.getLogger("autofuse.daemon")

# That a daemon which has just begun waits for what other hosts have found, from a server that has given a first answer.
# It takes 0.1 s, but on a machine that scripts fill it may take seconds, and a search costs more.
FIRST_SECONDS = 10.0
SLACK_SECONDS = 0.5  # for a connection's own timeout to be heard of first
LONGEST_PAUSE_SECONDS = 300.0  # between tries to reach a server that is down
KEEP_SECONDS = 3600.0  # between two looks whether the server holds what nobody uses
CLOSE_SECONDS = 3.0  # for the last results, when a daemon ends


# Keys of devices that may be used for other hosts now, given whether a request for one of them waits.
Lent = Callable[[Callable[[str], bool]], Sequence[str]]


def retry_seconds(poll_seconds: float, failures: int) -> float:
    """The pause after so many failures in a row; another one for each host: a server may have failed all at once."""
    longest = min(poll_seconds * 2.0**failures, LONGEST_PAUSE_SECONDS)
    return longest * secrets.SystemRandom().uniform(0.5, 1.0)


class Fleet:
    """What the loop sees of other hosts. All methods return at once, but `wait` and `close`."""

    def __init__(
        self,
        settings: FleetSettings,
        store: Path,
        device: DeviceInfo,
        versions: Collection[str],
        lease_seconds: float = LEASE_SECONDS,
        lent: Lent | None = None,
    ) -> None:
        """``device``: this host's CPU; ``versions``: of requests that this daemon can tune; ``lent``: the devices here
        for which it takes requests of other hosts, where not the CPU alone."""
        self._settings = settings
        self._store = store
        self._device = device
        self._versions = tuple(versions)
        self._lease_seconds = lease_seconds
        self._lent = lent or (lambda _: [device.key])
        self._holder = secrets.token_hex(8)  # of this daemon's leases
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._is_asking = threading.Event()  # the imports are done
        self._is_answered = threading.Event()  # or it is known that no answer will come
        self._first = threading.Event()  # the first proposals have come, or none will
        self._wants_work = False
        self._offered: TuneRequest | None = None  # leased, and not yet taken by the loop
        self._held: DecisionKey | None = None  # leased, and in work
        self._own: DecisionKey | None = None  # in work, of this host
        self._reserved: DecisionKey | None = None  # the same on the server, so that nobody else begins it
        self._elsewhere: frozenset[str] = frozenset()  # what this host would work on next, and others do now
        self._ended: list[tuple[DecisionKey, RequestEnd, str]] = []  # whose leases are to be given back
        self._failures = 0  # rounds in a row
        self._keep_at = 0.0  # of the monotonic clock
        self._said = ""
        self._thread: threading.Thread | None = None

    # ---- the loop's side ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the exchange, if there is a server."""
        if self._settings.url:
            self._thread = threading.Thread(target=self._run, name="autofuse fleet", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the first proposals have come, or it is known that the server is down or slow."""
        if self._thread is not None:
            self._is_asking.wait(FIRST_SECONDS)
            if self._is_answered.wait(self._settings.connect_seconds + SLACK_SECONDS):
                self._first.wait(FIRST_SECONDS)

    def begin_own(self, key: DecisionKey) -> None:
        """The loop works on a request of this host; what is leased and not begun goes back."""
        with self._lock:
            self._wants_work, self._own = False, key
        self._wake.set()

    def end_own(self) -> None:
        """It is done, or given up; results, if any, are stored."""
        with self._lock:
            self._own = None
        self._wake.set()

    @property
    def state(self) -> str:
        """For people: whether the server answers, or why not; "" without a server."""
        if self._thread is None:
            return ""
        return self._said or ("the server answers" if self._first.is_set() else "not connected yet")

    def is_elsewhere(self, key: DecisionKey) -> bool:
        """Whether another daemon was at work on it when the server was asked last: soon it may be a proposal."""
        return key.digest in self._elsewhere

    @property
    def may_help(self) -> bool:
        """Whether requests of other hosts may be borrowed."""
        return self._thread is not None and self._settings.help

    def borrow(self) -> TuneRequest | None:
        """A request of another host, to be worked on now; None where there is none, or none yet."""
        with self._lock:
            found, self._offered = self._offered, None
            self._held = found.key if found is not None else self._held
            if not self._wants_work:
                self._wants_work = True
                self._wake.set()
        return found

    def give_back(self, key: DecisionKey, status: RequestEnd, message: str = "") -> None:
        """End the lease of a borrowed request, after its results, if any, have been sent."""
        with self._lock:
            self._held = None
            self._ended.append((key, status, message))
        self._wake.set()

    def close(self) -> None:
        """Send the last results and give leases back, within CLOSE_SECONDS."""
        if self._thread is None:
            return
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)
        self._thread = None

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with (
                Store.open(self._store) as store,
                contextlib.closing(FleetServer(self._settings.url, self._settings.connect_seconds)) as server,
            ):
                self._exchange(store, server)
        except StoreError as error:
            self._say_down(error)
        except Exception:
            log.exception("the exchange with the fleet has failed; this host goes on with its own store")
        finally:
            self._is_asking.set()
            self._note_first()

    def _exchange(self, store: Store, server: FleetServer) -> None:
        settings = self._settings
        retention = FleetRetention(server, Bounds(settings.keep_days, settings.keep_keys, settings.keep_measurements))
        exchange: FleetExchange | None = None
        while True:
            is_last = self._closing.is_set()
            try:
                if exchange is None:
                    self._is_asking.set()
                    exchange = FleetExchange(store, server, self._device, self._versions, self._lease_seconds)
                    self._is_answered.set()
                self.exchange_once(exchange, is_last)
                if not is_last:
                    self._keep(exchange, retention)
            except StoreError as error:
                exchange = None  # what answers next may be another server
                self._elsewhere = frozenset()
                self._failures += 1
                self._say_down(error)
                if isinstance(error, FleetError) and error.is_lasting:
                    return
            else:
                if self._failures:
                    log.info("the fleet's server answers again")
                self._failures, self._said = 0, ""
            self._note_first()
            if is_last or not self._pause():
                return

    def _note_first(self) -> None:
        self._is_answered.set()
        self._first.set()

    def _pause(self) -> bool:
        """Wait for the next round; False where none would come to anything before the end."""
        if not self._failures:
            self._wake.wait(self._settings.poll_seconds)
            self._wake.clear()
            return True
        return not self._closing.wait(retry_seconds(self._settings.poll_seconds, self._failures))

    def exchange_once(self, exchange: FleetExchange, is_last: bool = False) -> None:
        """Fetch proposals, send what is new, end and renew leases, and take a new one where the loop is idle."""
        began = time.monotonic()
        if not is_last:
            new = exchange.pull()
            self._first.set()
            if new:
                log.info("%d proposals of other hosts (%.2f s)", new, time.monotonic() - began)
        with self._lock:
            ended, self._ended = self._ended, []
            if self._offered is not None and (is_last or not self._wants_work):
                ended.append((self._offered.key, "requeued", ""))
                self._offered = None
            if self._held is not None and is_last:
                ended.append((self._held, "requeued", ""))
        try:
            while exchange.push():
                pass
            while ended:
                exchange.queue.give_back(self._holder, *ended[0])
                ended.pop(0)
        finally:
            with self._lock:
                self._ended = ended + self._ended
        for key in self._leased():  # before new ones, which need no renewal yet
            exchange.queue.renew(self._holder, key)
        self._reserve(exchange, None if is_last else self._own)
        if not is_last:
            self._lease(exchange)
            self._elsewhere = exchange.in_work_elsewhere(self._holder)

    def _reserve(self, exchange: FleetExchange, own: DecisionKey | None) -> None:
        """Keep helpers from what this host works on; of what was decided, the request has ended with its decision."""
        if self._reserved is not None and self._reserved != own:
            exchange.queue.give_back(self._holder, self._reserved, "requeued")
            self._reserved = None
        if own is not None and self._reserved is None and exchange.queue.reserve(self._holder, exchange.run_id, own):
            self._reserved = own

    def _leased(self) -> list[DecisionKey]:
        with self._lock:
            offered = self._offered.key if self._offered is not None else None
            reserved = self._reserved if self._reserved == self._own else None
            return [key for key in (self._held, offered, reserved) if key is not None]

    def _lease(self, exchange: FleetExchange) -> None:
        with self._lock:
            if not self._wants_work or self._held is not None or self._offered is not None:
                return
        lent = self._lent(lambda device: exchange.queue.is_asked_for(device, self._versions))
        found = exchange.queue.lease(self._holder, exchange.run_id, lent, self._versions)
        with self._lock:
            self._offered = found

    def _keep(self, exchange: FleetExchange, retention: FleetRetention) -> None:
        """Now and then, say that this host is there, and ask whether the server is to forget; a piece of it if so."""
        if time.monotonic() >= self._keep_at:
            exchange.note_seen()
            if retention.begin():
                log.info("looking through the fleet's server for what nobody uses any more")
            self._keep_at = time.monotonic() + KEEP_SECONDS
        retention.step()

    def _say_down(self, error: StoreError) -> None:
        """One line for each kind of trouble, not one for each try: a server that goes away does so in several ways."""
        text = str(error)
        if not (text == self._said or (NO_ANSWER in text and NO_ANSWER in self._said)):
            log.warning("%s", text)
        self._said = text
