"""What a server forgets, who may do it, and that hosts beside it lose nothing that they use."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from store_records import DEVICE, VERSIONS, decision, key, measurement, request
from stores import url_of

from autofuse.db import fleet_retention
from autofuse.db.fleet_exchange import FleetExchange
from autofuse.db.fleet_queue import FleetQueue
from autofuse.db.fleet_retention import DAY_SECONDS, STALE_SECONDS, Bounds, FleetRetention
from autofuse.db.fleet_server import FleetServer
from autofuse.db.proposals import Proposal
from autofuse.db.results import TuneResults
from autofuse.db.store import Store
from tests.postgres import Postgres

DAYS = 30.0
WIDE = Bounds(DAYS, keys=1000, measurements=1000)
TABLES = "decision_keys", "requests", "request_runs", "candidates", "measurements", "decisions", "buckets", "nodes"


class Fleet:
    """A host and the server, whose rows can be made older."""

    def __init__(self, postgres: Postgres, store: Store, server: FleetServer, database: str) -> None:
        self.store, self.server = store, server
        self.exchange = FleetExchange(store, server, DEVICE, [VERSIONS])
        self.queue, self.results = FleetQueue(server), TuneResults(server)
        self._postgres, self._database = postgres, database

    def sql(self, *statements: str) -> list[tuple[object, ...]]:
        return self._postgres.sql(*statements, database=self._database)

    def age(
        self, days: float, *names: str, columns: tuple[str, ...] = ("requests", "decisions", "measurements")
    ) -> None:
        """Make all that was told of some nodes older."""
        seconds, digests = days * DAY_SECONDS, ", ".join(f"'{key(name * 64).digest}'" for name in names)
        statements = {
            "requests": f"UPDATE requests SET updated_at = updated_at - {seconds} WHERE key IN ({digests})",
            "decisions": f"UPDATE decisions SET at = at - {seconds} WHERE key IN ({digests})",
            "measurements": f"UPDATE measurements SET at = at - {seconds} WHERE candidate_id IN "
            f"(SELECT id FROM candidates WHERE key IN ({digests}))",
        }
        self.sql(*(statements[name] for name in columns))

    def tell(self, *names: str) -> None:
        """Send requests, measurements and decisions."""
        for name in names:
            of = name * 64
            self.store.queue.add([request(of)])
            self.store.results.put_measurements(key(of), [measurement(unroll=4), measurement(unroll=8)])
        while self.exchange.push():
            pass
        for name in names:
            self.store.results.put_decision(decision(name * 64))
        while self.exchange.push():
            pass

    def sweep(self, bounds: Bounds = WIDE) -> int:
        """A whole sweep; how many keys went."""
        self.sql("DELETE FROM fleet_marks WHERE starts_with(name, 'swept')")
        retention, gone = FleetRetention(self.server, bounds), 0
        assert retention.begin()
        while retention._swept_to is not None:
            gone += retention.step()
        return gone

    def left(self) -> str:
        return "".join(sorted(str(row[0])[0] for row in self.sql("SELECT fusion_id FROM decision_keys")))

    def counts(self) -> dict[str, int]:
        return {table: int(str(self.sql(f"SELECT count(*) FROM {table}")[0][0])) for table in TABLES}


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path) -> Iterator[Fleet]:
    name = postgres.new_database()
    with (
        Store.open(tmp_path / "one.db") as store,
        contextlib.closing(FleetServer(postgres.url(name))) as server,
    ):
        yield Fleet(postgres, store, server, name)


def test_what_nobody_has_used_for_long_goes_whole(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_retention, "PIECE", 2)
    fleet.tell("a", "b", "c", "d", "e")
    before = fleet.counts()
    fleet.age(DAYS + 1, "a", "c", "e")
    assert fleet.sweep() == 3 and fleet.left() == "bd"
    assert {table: 5 * count for table, count in fleet.counts().items()} == {t: 2 * n for t, n in before.items()}
    assert fleet.sweep() == 0
    fleet.store.queue.add([request("a" * 64)], force=True)
    assert fleet.exchange.push() == 1 and fleet.left() == "abd", "it may come back"


@pytest.mark.parametrize("newest", ["requests", "decisions", "measurements"])
def test_whatever_was_told_of_a_key_last_keeps_it(fleet: Fleet, newest: str) -> None:
    fleet.tell("a")
    fleet.age(DAYS + 1, "a", columns=tuple({"requests", "decisions", "measurements"} - {newest}))
    assert fleet.sweep() == 0
    fleet.age(DAYS + 1, "a", columns=(newest,))
    assert fleet.sweep() == 1


def test_a_node_stays_while_a_key_of_another_device_needs_it(fleet: Fleet) -> None:
    fleet.tell("a")
    other = replace(request("a" * 64), key=replace(key(), device="cpu:Other:8:avx2"))
    fleet.store.queue.add([other])
    fleet.exchange.push()
    fleet.age(DAYS + 1, "a")
    assert fleet.sweep() == 1
    left = fleet.counts()
    assert (left["decision_keys"], left["requests"], left["nodes"], left["buckets"]) == (1, 1, 1, 1)
    found = fleet.queue.lease("helper", fleet.exchange.run_id, ["cpu:Other:8:avx2"], [VERSIONS])
    assert found is not None and found.key == other.key


def test_beyond_so_many_keys_the_least_used_go(fleet: Fleet) -> None:
    fleet.tell(*"abcdef")
    for days, name in enumerate("cabfed"):
        fleet.age(days, name)
    assert fleet.sweep(replace(WIDE, keys=6)) == 0
    assert fleet.sweep(replace(WIDE, keys=4)) == 2 and fleet.left() == "abcf"


def test_of_one_key_the_newest_measurements_stay(fleet: Fleet) -> None:
    fleet.tell("a", "b")
    fleet.store.results.put_measurements(key(), [measurement(unroll=n) for n in (1, 2, 16)])
    fleet.exchange.push()
    assert fleet.sweep(replace(WIDE, measurements=2)) == 0
    found = [dict(row.measurement.candidate.config)["unroll"] for row in fleet.results.measurements("a" * 64)]
    assert found == [2, 16] and len(fleet.results.measurements("b" * 64)) == 2


def test_what_a_daemon_works_on_stays_until_its_lease_has_ended(fleet: Fleet) -> None:
    fleet.store.queue.add([request()])
    fleet.exchange.push()
    assert fleet.queue.lease("helper", fleet.exchange.run_id, [DEVICE.key], [VERSIONS]) is not None
    fleet.age(DAYS + 1, "a")
    assert fleet.sweep() == 0
    fleet.sql("UPDATE requests SET lease_until = 0")
    assert fleet.sweep() == 1 and not fleet.queue.give_back("helper", key(), "done")


def test_a_row_that_another_daemon_holds_is_left_for_the_next_sweep(fleet: Fleet, postgres: Postgres) -> None:
    fleet.tell("a", "b")
    fleet.age(DAYS + 1, "a", "b")
    with contextlib.closing(FleetServer(url_of(fleet.server))) as other:
        with other.share() as connection:  # as a lease does
            connection.exec_driver_sql(f"SELECT 1 FROM requests WHERE key = '{key().digest}' FOR UPDATE")
            assert fleet.sweep() == 1 and fleet.left() == "a"
        assert fleet.sweep() == 1


def test_while_somebody_adds_measurements_nothing_goes(fleet: Fleet) -> None:
    """Else a measurement could name a candidate that is gone."""
    fleet.tell("a")
    fleet.age(DAYS + 1, "a")
    retention = FleetRetention(fleet.server, WIDE)
    assert retention.begin()
    with contextlib.closing(FleetServer(url_of(fleet.server))) as other:
        with other.append():
            assert retention.step() == 0 and fleet.left() == "a"
        assert retention.step() == 1 and fleet.left() == ""


def test_one_daemon_sweeps_once_a_day_and_another_goes_on_where_it_ended(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_retention, "PIECE", 1)
    fleet.tell("a", "b", "c")
    fleet.age(DAYS + 1, "a", "b", "c")
    one, two = FleetRetention(fleet.server, WIDE), FleetRetention(fleet.server, WIDE)
    assert one.begin() and one.step() == 1
    assert not two.begin() and two.step() == 0, "one is at it"
    later = "UPDATE fleet_marks SET value = value::float - {} WHERE name = 'swept at'"
    fleet.sql(later.format(STALE_SECONDS + 1))
    assert two.begin() and two.step() == 1
    assert one.step() == 0 and len(fleet.left()) == 1, "it was away for too long"
    assert two.step() == 1 and two.step() == 0 and two.step() == 0
    assert not one.begin() and not two.begin()
    fleet.sql(later.format(DAY_SECONDS + 1))
    assert one.begin()
    seconds = fleet_retention.last_sweep_seconds(fleet.server)
    assert seconds is not None and 0.0 <= seconds < 60.0


def test_hosts_that_were_silent_for_long_are_forgotten_and_come_back_as_others(fleet: Fleet, tmp_path: Path) -> None:
    fleet.tell("a")
    with Store.open(tmp_path / "two.db") as store:
        other = FleetExchange(store, fleet.server, DEVICE, [VERSIONS])
        store.queue.add([request(calls=7)])
        other.push()
        other.note_seen()
        for exchange in (fleet.exchange, other):
            exchange.note_seen()
        fleet.sql(f"UPDATE runs SET finished_at = finished_at - {(DAYS + 1) * DAY_SECONDS} WHERE id = {other.run_id}")
        fleet.sweep()
        assert fleet.sql("SELECT id FROM runs") == [(fleet.exchange.run_id,)]
        assert fleet.sql("SELECT DISTINCT run_id FROM request_runs") == [(fleet.exchange.run_id,)]
        before = other.run_id
        other.note_seen()
        assert other.run_id != before
        store.queue.add([request("b" * 64, calls=7)])
        assert other.push() == 1 and fleet.left() == "ab"
    fleet.exchange.note_seen()
    assert fleet.sweep() == 0 and len(fleet.sql("SELECT id FROM runs")) == 2


def test_of_proposals_those_go_that_nobody_asks_for(both: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofuse.db.proposals.PIECE", 2)
    for name in "abcdef":
        both.proposals.put({key(name * 64): Proposal.of(decision(name * 64))})
    both.proposals.close(key(), "adopted", "words")
    both.queue.add([request("b" * 64)])
    assert both.proposals.forget(DAYS, 5) == 0
    assert both.proposals.forget(DAYS, 2) == 3
    left = [name for name in "abcdef" if both.proposals.get(key(name * 64))]
    assert left == ["e", "f"] and both.proposals.line(key()) == "words"
    with both.file.read() as connection:
        names = connection.exec_driver_sql("SELECT fusion_id FROM decision_keys ORDER BY 1").scalars().all()
    assert [name[0] for name in names] == ["a", "b", "e", "f"], "a verdict and a request are left"
    with both.file.write() as connection:
        connection.exec_driver_sql(f"UPDATE proposals SET at = at - {(DAYS + 1) * DAY_SECONDS}")
    assert both.proposals.forget(DAYS, 100) == 2 and both.proposals.counts() == {"adopted": 1}


def test_hosts_go_on_while_what_they_use_is_forgotten(postgres: Postgres, tmp_path: Path) -> None:
    """All that one asks for may go at any moment, and nobody sees an error."""
    url = postgres.url(postgres.new_database())
    is_over = threading.Event()

    def live(name: str) -> int:
        with Store.open(tmp_path / f"{name}.db") as store, contextlib.closing(FleetServer(url)) as server:
            exchange, taken = FleetExchange(store, server, DEVICE, [VERSIONS]), 0
            for number in range(8):
                of = f"{number % 4:064d}"
                store.queue.add([request(of, calls=number + 1)], force=True)
                store.results.put_measurements(key(of), [measurement(unroll=number)])
                store.results.put_decision(decision(of))
                while exchange.push():
                    pass
                found = exchange.queue.lease(name, exchange.run_id, [DEVICE.key], [VERSIONS])
                if found is not None:
                    taken += exchange.queue.give_back(name, found.key, "requeued")
                exchange.pull()
        return taken

    def forget() -> int:
        gone = 0
        with contextlib.closing(FleetServer(url)) as server:
            while not is_over.is_set():
                with server.share() as connection:
                    connection.exec_driver_sql("DELETE FROM fleet_marks WHERE starts_with(name, 'swept')")
                retention = FleetRetention(server, replace(WIDE, keys=1, measurements=1))
                retention.begin()
                gone += retention.step()
        return gone

    with ThreadPoolExecutor(3) as pool:
        forgotten = pool.submit(forget)
        try:
            lives = [pool.submit(live, name) for name in ("one", "two")]
            for found in lives:
                found.result()
        finally:
            is_over.set()
        assert forgotten.result() > 4, "most keys several times"
