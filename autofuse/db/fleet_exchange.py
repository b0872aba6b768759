"""What a host's store and a fleet's server tell each other.

In: a store of this host and a server. Out: rows of each in the other: requests, measurements and decisions go up,
other hosts' decisions come down as proposals.
Guarantee: rows go up in pieces, each after the one before; a piece that was lost with the connection is sent again,
and counts once. Names of hosts, scripts and files stay here, and so do kernels: no host runs what another one has
built. Of two hosts that disagree, the one that stays in eager is believed; else the first decision stands.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import func, select, update

from autofuse.db import models
from autofuse.db.base import as_tuples, key_of, now, put_keys
from autofuse.db.decision_file import MEASURED
from autofuse.db.fleet_queue import LEASE_SECONDS, FleetQueue, without_paths
from autofuse.db.fleet_server import CLOCK, FleetServer
from autofuse.db.proposals import Proposal
from autofuse.db.results import insert_decision, insert_measurements
from autofuse.db.rows import StoredMeasurement
from autofuse.db.run_log import RunLog
from autofuse.db.store import Store
from autofuse.ir.records import EAGER, Candidate, Decision, DecisionKey, DeviceInfo, Measurement, RunStart

PIECE = 200  # rows of a kind in one round: a job of this host's is never far behind
NEXT = 32  # requests of this host's, among which is what it works on next
SPAN = 2000  # ids that one statement looks through, most of which may be of other devices
MODE = "fleet"  # of the run that stands for a host on the server


class FleetExchange:
    """The exchange between one store and one server."""

    def __init__(
        self,
        store: Store,
        server: FleetServer,
        device: DeviceInfo,
        versions: Collection[str],
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """``device``, ``versions``: of this host's decisions. Raises FleetError."""
        self._store = store
        self._server = server
        self._device = device
        self._versions = tuple(versions)
        self._name = server.check()
        self._sent: dict[str, float] = {}  # requests by digest, as of their last change: sending one twice does nothing
        self._own_name = store.marks.own_name()
        self.queue = FleetQueue(server, lease_seconds)
        self.run_id = self._host_run()

    def push(self) -> int:
        """Send what is new here; how many rows. Decisions follow their measurements, and end their requests."""
        return self._push_requests() + self._push_measurements() + self._push_decisions()

    def pull(self) -> int:
        """Fetch what other hosts have decided for devices like ours; how many proposals are new."""
        kept, newest = 0, self._newest()
        for device in {self._device.key, *self._store.queue.devices()}:
            kept += self._pull(device, newest)
        return kept

    def in_work_elsewhere(self, holder: str) -> frozenset[str]:
        """Digests of what this host would work on next, and other daemons work on now."""
        digests = self._store.queue.largest(NEXT)
        return self.queue.held_by_others(holder, digests) if digests else frozenset()

    def note_seen(self) -> None:
        """Say that this host is still there. One that was silent for long may be forgotten; then it begins anew."""
        table = models.Run
        with self._server.share() as connection:
            seen = update(table).where(table.id == self.run_id).values(finished_at=CLOCK)
            is_known = connection.execute(seen).rowcount > 0
        if not is_known:
            self.run_id = self._host_run()

    # ---- up -------------------------------------------------------------------------------------

    def _push_requests(self) -> int:
        rows = self._store.queue.open_requests(self._sent, PIECE)
        self.queue.add(replace(request, run_id=self.run_id) for _, request in rows)
        self._sent |= {request.key.digest: at for at, request in rows}
        return len(rows)

    def _push_measurements(self) -> int:
        since = self._store.marks.get(self._name, "measurements")
        rows = self._store.results.measurements_since(since, PIECE)
        by_key: dict[DecisionKey, dict[str, Measurement]] = {}
        for row_id, row in rows:
            sent = replace(row.measurement, compile_key=None, message=without_paths(row.measurement.message))
            by_key.setdefault(row.key, {})[self._origin(row_id, row)] = sent
        for key, measurements in by_key.items():
            with self._server.append() as connection:
                insert_measurements(connection, key, [*measurements.values()], [*measurements])
        if rows:
            self._store.marks.put(self._name, "measurements", rows[-1][0])
        return len(rows)

    def _origin(self, row_id: int, row: StoredMeasurement) -> str:
        """A name of a row of this store; the time is in it for stores that are copies of one another."""
        return hashlib.sha256(f"{self._own_name} {row_id} {row.at!r}".encode()).hexdigest()[:32]

    def _push_decisions(self) -> int:
        since = self._store.marks.get(self._name, "decisions")
        rows = self._store.results.decisions(since_id=since, most=PIECE)
        if not rows:
            return 0
        verdicts = self._store.proposals.verdicts(decision.key for _, decision in rows)
        own = [d for _, d in rows if verdicts.get(d.key.digest) not in ("adopted", "overridden")]
        for decision in own:
            if decision.reason in MEASURED:
                self._settle(replace(decision, compile_key=None, detail=""))
        self._store.marks.put(self._name, "decisions", rows[-1][0])
        return len(own)

    def _settle(self, decision: Decision) -> None:
        """Put a decision on the server, unless an earlier one stands against it, and end its request."""
        table, request, digest = models.DecisionRow, models.Request, decision.key.digest
        with self._server.write() as connection:
            newest = select(table.variant).where(table.key == digest).order_by(table.id.desc()).limit(1)
            standing = connection.execute(newest).scalar_one_or_none()
            if standing is None or (standing != EAGER and decision.candidate.variant == EAGER):
                put_keys(connection, [decision.key])
                insert_decision(connection, decision, None)
            is_open = (request.key == digest) & request.status.in_(("queued", "running"))
            done = {"status": "done", "pid": None, "host": "", "lease_until": None, "updated_at": now()}
            connection.execute(update(request).where(is_open).values(**done))

    # ---- down -----------------------------------------------------------------------------------

    def _newest(self) -> int:
        """The id of the newest decision of all; 0 where there is none. All up to it can be seen."""
        with self._server.read() as connection:
            return connection.execute(select(func.max(models.DecisionRow.id))).scalar() or 0

    def _pull(self, device: str, newest: int) -> int:
        mark, kept = f"decisions of {device}, {', '.join(self._versions)}", 0
        since = self._store.marks.get(self._name, mark)
        while since < newest:
            until = min(newest, since + SPAN)
            rows = self._decided(device, since, until)
            found = {key_of(row): proposal for row in rows if (proposal := _proposal_of(row)) is not None}
            kept += self._store.proposals.put(found)
            # Of what is of no use here too, or it would be looked through again each time; but not for every row of it.
            if rows or until - since >= PIECE:
                self._store.marks.put(self._name, mark, until)
            since = until
        return kept

    def _decided(self, device: str, since_id: int, until_id: int) -> Sequence[Any]:
        """Decisions after a row and up to another one, by growing id, as they stand on the server."""
        table, key = models.DecisionRow, models.DecisionKeyRow
        is_for_us = (key.device == device) & key.versions.in_(self._versions)
        query = (
            select(table.id, table.variant, table.config, table.reason, table.speedup, key)
            .join(key, table.key == key.digest)
            .where(table.id > since_id, table.id <= until_id, is_for_us)
            .order_by(table.id)
        )
        with self._server.read() as connection:
            return connection.execute(query).all()

    # ---- who we are -----------------------------------------------------------------------------

    def _host_run(self) -> int:
        """The run on the server that stands for this store, whose counters replace its older ones."""
        name, table = self._own_name, models.Run
        with self._server.read() as connection:
            query = select(table.id).where(table.machine == name, table.mode == MODE).order_by(table.id).limit(1)
            found = connection.execute(query).scalar_one_or_none()
        if found is not None:
            return int(found)
        start = RunStart("a host of the fleet", self._device, self._versions[0], MODE, 0, {}, name)
        return RunLog(self._server).start(start)


def _proposal_of(row: Any) -> Proposal | None:
    """What a row of the server proposes; None where it is nothing that can be proposed, whoever has written it."""
    pairs: list[Any] = row.config if isinstance(row.config, list) else [None]
    is_config = all(isinstance(pair, list) and len(pair) == 2 for pair in pairs) and all(
        isinstance(name, str) and isinstance(value, int | str) for name, value in pairs
    )
    if row.reason not in MEASURED or not is_config or not math.isfinite(row.speedup):
        return None
    return Proposal(Candidate(row.variant, as_tuples(pairs)), row.reason, row.speedup)
