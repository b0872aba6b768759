"""The queue of a fleet: the requests of all hosts, leased to one daemon at a time.

In: requests as `TuneQueue.add` merges them, with the host's run on the server as their run. Out: the open request with
the largest expected saving that no other daemon holds.
Guarantee: a request is held by one daemon at a time. A lease that is not renewed ends, by the server's clock; after
MAX_ATTEMPTS of them the request fails, for it may be what kills daemons. Nobody waits for a row that another one holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, select, update

from autofuse.db import models
from autofuse.db.base import clean, now
from autofuse.db.fleet_server import CLOCK, FleetServer
from autofuse.db.rows import RequestEnd
from autofuse.db.tune_queue import MAX_ATTEMPTS, TuneQueue, taken
from autofuse.ir.records import DecisionKey, TuneRequest

LEASE_SECONDS = 60.0


class FleetQueue(TuneQueue):
    """The requests on a server. ``holder``: the name of one daemon, unlike any other's."""

    def __init__(self, server: FleetServer, lease_seconds: float = LEASE_SECONDS) -> None:
        super().__init__(server)
        self._server = server
        self._seconds = lease_seconds

    def lease(
        self, holder: str, run_id: int, devices: Collection[str], versions: Collection[str]
    ) -> TuneRequest | None:
        """Lease the request with the largest expected saving for these devices and versions; None where none waits."""
        with self._server.share() as connection:
            _end_late_leases(connection)
            kinds = [largest_waiting(device, one) for device in devices for one in versions]
            waiting = [row for kind in kinds if (row := connection.execute(kind).first()) is not None]
            if not waiting:
                return None
            best = max(waiting, key=lambda row: (row.expected_saving_us, row.calls))
            return taken(connection, best.key, {"pid": run_id, "host": holder, "lease_until": CLOCK + self._seconds})

    def is_asked_for(self, device: str, versions: Collection[str]) -> bool:
        """Whether a request for a device and one of these versions waits."""
        with self._server.read() as connection:
            return any(connection.execute(_waiting(device, one)).first() is not None for one in versions)

    def reserve(self, holder: str, run_id: int, key: DecisionKey) -> bool:
        """Lease this request, which a host works on for itself; False where another daemon has it, or it is done."""
        table = models.Request
        values = {"status": "running", "pid": run_id, "host": holder, "lease_until": CLOCK + self._seconds}
        with self._server.share() as connection:
            is_free = (table.key == key.digest) & (table.status == "queued")
            return connection.execute(update(table).where(is_free).values(**values)).rowcount > 0

    def held_by_others(self, holder: str, digests: Collection[str]) -> frozenset[str]:
        """Of these requests, the ones that other daemons work on."""
        table = models.Request
        is_theirs = (table.status == "running") & (table.host != holder)
        with self._server.read() as connection:
            found = connection.execute(select(table.key).where(table.key.in_(digests), is_theirs))
            return frozenset(found.scalars())

    def renew(self, holder: str, key: DecisionKey) -> bool:
        """Begin the lease anew; False where it has ended meanwhile."""
        with self._server.share() as connection:
            return _change(connection, holder, key, {"lease_until": CLOCK + self._seconds})

    def give_back(self, holder: str, key: DecisionKey, status: RequestEnd, message: str = "") -> bool:
        """End a lease with what became of the request; False, and no change, where it has ended already."""
        values = {
            "status": "queued" if status == "requeued" else status,
            "message": without_paths(message),
            "updated_at": now(),
            "pid": None,
            "host": "",
            "lease_until": None,
        }
        with self._server.share() as connection:
            return _change(connection, holder, key, values)


@dataclass(frozen=True)
class FleetCounts:
    """How much a server holds."""

    hosts: int
    decisions: int
    measurements: int


def counts(server: FleetServer) -> FleetCounts:
    """How much a server holds. Raises FleetError."""
    tables = (models.Run, models.DecisionRow, models.MeasurementRow)
    with server.read() as connection:
        return FleetCounts(*(connection.execute(select(func.count(table.id))).scalar_one() for table in tables))


def _change(connection: Connection, holder: str, key: DecisionKey, values: dict[str, Any]) -> bool:
    table = models.Request
    is_held = (table.key == key.digest) & (table.status == "running") & (table.host == holder)
    return connection.execute(update(table).where(is_held).values(**values)).rowcount > 0


def largest_waiting(device: str, versions: str) -> Any:
    """The statement that locks the queued request of a kind with the largest expected saving.

    One kind at a time, and in the index's own order: also where the server has no statistics yet, it reads one row.
    """
    return _waiting(device, versions).with_for_update(skip_locked=True)


def _waiting(device: str, versions: str) -> Any:
    table = models.Request
    return (
        select(table.key, table.expected_saving_us, table.calls)
        .where(table.status == "queued", table.device == device, table.versions == versions)
        .order_by(table.expected_saving_us.desc(), table.calls.desc())
        .limit(1)
    )


def late_leases() -> Any:
    """The statement that locks requests whose leases were not renewed."""
    table = models.Request
    is_late = (table.status == "running") & (table.lease_until < CLOCK)
    return select(table.key).where(is_late).with_for_update(skip_locked=True)


def _end_late_leases(connection: Connection) -> None:
    """Queue requests again whose leases were not renewed; those that lost too many fail."""
    table = models.Request
    digests = connection.execute(late_leases()).scalars().all()
    if not digests:
        return
    is_lost = table.attempts + 1 >= MAX_ATTEMPTS
    changes = {
        "status": case((is_lost, "failed"), else_="queued"),
        "message": case((is_lost, f"{MAX_ATTEMPTS} daemons did not come back from it"), else_=""),
        "attempts": table.attempts + 1,
        "updated_at": CLOCK,
        "pid": None,
        "host": "",
        "lease_until": None,
    }
    connection.execute(update(table).where(table.key.in_(digests)).values(**changes))


def without_paths(message: str) -> str:
    """The first line of a message; "" where it may name a folder of this host."""
    first = clean(message.partition("\n")[0]).replace("\0", "")
    return "" if "/" in first else first
