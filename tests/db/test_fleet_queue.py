"""The queue on a server: one holder at a time, leases that end, counters of several hosts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import DEVICE, VERSIONS, key, request, start

from autofuse.db import fleet_queue, models, tune_queue
from autofuse.db.fleet_queue import FleetQueue
from autofuse.db.fleet_server import FleetServer
from autofuse.db.rows import QueueStatus
from autofuse.db.run_log import RunLog
from autofuse.db.tune_queue import MAX_ATTEMPTS
from autofuse.ir.records import DeviceInfo, TuneRequest
from tests.postgres import Postgres


class Daemon:
    """One daemon's connection and its name as a holder of leases."""

    def __init__(self, url: str, name: str, lease_seconds: float) -> None:
        self.server = FleetServer(url)
        self.queue = FleetQueue(self.server, lease_seconds)
        self.name = name
        self.run_id = RunLog(self.server).start(start())

    def lease(self) -> TuneRequest | None:
        return self.queue.lease(self.name, self.run_id, [DEVICE.key], [VERSIONS])


Make = Callable[..., Daemon]


@pytest.fixture
def daemon(postgres: Postgres) -> Iterator[Make]:
    url = postgres.url(postgres.new_database())
    with contextlib.ExitStack() as stack:

        def make(name: str, lease_seconds: float = 60.0) -> Daemon:
            made = Daemon(url, name, lease_seconds)
            stack.callback(made.server.close)
            return made

        yield make


def status(daemon: Daemon) -> QueueStatus:
    return daemon.queue.length()


def test_hosts_add_up_and_the_largest_saving_goes_first(daemon: Make) -> None:
    one, two = daemon("one"), daemon("two")
    one.queue.add([request(calls=10, run_id=one.run_id), request("b" * 64, calls=25, run_id=one.run_id)])
    assert one.queue.add([request(calls=12, run_id=one.run_id)]) == 0  # its counters so far, again
    two.queue.add([request(calls=20, run_id=two.run_id, shapes=((100, 20),))])
    found = two.lease()
    assert found is not None and found.key == key() and found.calls == 32
    assert {shape.symbol_values[0]: shape.calls for shape in found.shapes} == {128: 100, 100: 20}
    found = one.lease()
    assert found is not None and found.key == key("b" * 64)
    assert one.lease() is None


def test_of_two_takers_one_gets_it(daemon: Make) -> None:
    one, two = daemon("one"), daemon("two")
    one.queue.add([request()])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(Daemon.lease, [one, two]))
    assert sorted(item is not None for item in found) == [False, True]


def test_nobody_waits_for_a_row_that_another_one_holds(daemon: Make) -> None:
    """While a transaction has one row, another taker gets the next."""
    one, two = daemon("one"), daemon("two")
    one.queue.add([request(calls=99), request("b" * 64, calls=1)])
    with one.server.share() as connection:
        largest = models.Request.__table__.select().where(models.Request.key == key().digest).with_for_update()
        assert connection.execute(largest).first() is not None
        found = two.lease()
        assert found is not None and found.key == key("b" * 64)
        assert two.lease() is None
    assert two.lease() is not None


def test_asking_again_frees_nothing_that_is_taken_meanwhile(daemon: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another daemon tries to take the request while one is about to merge it."""
    one, two = daemon("one"), daemon("two")
    one.queue.add([request()])
    found: list[TuneRequest | None] = []
    decided = tune_queue._decided

    def take_first(*arguments: Any) -> set[str]:
        found.append(two.lease())
        return decided(*arguments)

    monkeypatch.setattr(tune_queue, "_decided", take_first)
    one.queue.add([request(calls=500)])
    assert found == [None] and status(one) == QueueStatus(queued=1)
    assert two.lease() is not None
    one.queue.add([request(calls=900)])
    assert found == [None, None] and status(one) == QueueStatus(running=1)


@given(st.integers(1, 12), st.integers(2, 4))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_request_is_taken_by_one_worker_at_a_time(daemon: Make, count: int, workers: int) -> None:
    """Workers take and give back at random times, while a host goes on asking."""
    daemons = [daemon(f"worker {number}") for number in range(workers)]
    host = daemon("host")
    requests = [request(f"{number:064d}", calls=number + 1) for number in range(count)]
    host.queue.add(requests)
    held: set[str] = set()
    times: dict[str, int] = dict.fromkeys((r.key.fusion_id for r in requests), 0)
    guard, wrong = threading.Lock(), []

    def work(one: Daemon) -> None:
        while (found := one.lease()) is not None:
            with guard:
                if found.key.fusion_id in held:
                    wrong.append(found.key.fusion_id)
                held.add(found.key.fusion_id)
                times[found.key.fusion_id] += 1
                is_first = times[found.key.fusion_id] == 1
            host_asks = request(found.key.fusion_id, calls=1000 + count)
            one.queue.add([host_asks])  # must not free what is in work
            with guard:
                held.discard(found.key.fusion_id)
            assert one.queue.give_back(one.name, found.key, "requeued" if is_first else "done")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, daemons))
    assert not wrong and set(times.values()) == {2}
    for one in [*daemons, host]:
        one.server.close()
    with host.server.share() as connection:  # for the next example
        for table in ("request_runs", "requests"):
            connection.exec_driver_sql(f"DELETE FROM {table}")


def test_what_a_host_works_on_for_itself_is_reserved(daemon: Make) -> None:
    one, two = daemon("one"), daemon("two")
    one.queue.add([request()])
    assert one.queue.reserve("one", one.run_id, key()) and not two.queue.reserve("two", two.run_id, key())
    assert two.lease() is None and not one.queue.reserve("one", one.run_id, key("b" * 64))
    assert one.queue.give_back("one", key(), "requeued") and two.lease() is not None


def test_a_lease_ends_unless_it_is_renewed(daemon: Make) -> None:
    one, two = daemon("one", lease_seconds=0.4), daemon("two")
    one.queue.add([request()])
    assert one.lease() is not None
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        assert one.queue.renew("one", key()) and two.lease() is None
        time.sleep(0.05)
    time.sleep(0.5)
    assert two.lease() is not None
    assert not one.queue.renew("one", key()) and not one.queue.give_back("one", key(), "done")
    assert status(two) == QueueStatus(running=1)
    assert two.queue.give_back("two", key(), "done") and status(two) == QueueStatus(done=1)


def test_a_request_that_daemons_do_not_come_back_from_fails(daemon: Make) -> None:
    one = daemon("one", lease_seconds=0.0)
    one.queue.add([request()])
    for _ in range(MAX_ATTEMPTS):
        assert one.lease() is not None
        time.sleep(0.01)
    assert one.lease() is None
    assert status(one) == QueueStatus(failed=1)
    assert "did not come back" in one.queue.requests()[0].message


def test_only_requests_for_ones_own_device_and_versions(daemon: Make) -> None:
    one = daemon("one")
    one.queue.add([request()])
    other = DeviceInfo("cpu", "Other", 8, "avx2")
    assert one.queue.lease("one", one.run_id, [other.key], [VERSIONS]) is None
    assert one.queue.lease("one", one.run_id, [DEVICE.key], ["torch 9"]) is None
    assert one.lease() is not None


def test_what_is_given_back_says_nothing_of_the_host(daemon: Make) -> None:
    one = daemon("one")
    one.queue.add([request()])
    assert one.lease() is not None
    assert one.queue.give_back("one", key(), "failed", "gcc died\n/home/someone/secret.c:1: error")
    assert [row.message for row in one.queue.requests()] == ["gcc died"]


def plan_of(daemon: Daemon, statement: Any) -> dict[str, Any]:
    """The innermost step of how the server carries out a statement, with what it met on the way."""
    with daemon.server.share() as connection:
        text = statement.compile(connection, compile_kwargs={"literal_binds": True})
        (step,) = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}").scalar_one()
    step = step["Plan"]
    while "Plans" in step:
        (step,) = step["Plans"]
    return step


def test_requests_of_other_kinds_and_leases_that_go_on_are_not_looked_through(daemon: Make, postgres: Postgres) -> None:
    one = daemon("one", lease_seconds=600.0)
    other, rare = DeviceInfo("cpu", "Other", 8, "avx2"), DeviceInfo("cpu", "Rare", 8, "avx2")
    asked = [request(f"{number:064d}", calls=number + 1) for number in range(1000)]
    one.queue.add(asked)
    one.queue.add(replace(item, key=replace(item.key, device=other.key), calls=9999) for item in asked)
    for _ in range(100):
        assert one.lease() is not None
    for device, versions, most in ((rare.key, VERSIONS, 0), (DEVICE.key, "torch 9", 0), (DEVICE.key, VERSIONS, 1)):
        step = plan_of(one, fleet_queue.largest_waiting(device, versions))
        assert step["Index Name"] == "ix_requests_queue" and step["Actual Rows"] <= most
        assert not step.get("Rows Removed by Filter")
    with one.server.write() as connection:
        connection.exec_driver_sql("ANALYZE requests")
    step = plan_of(one, fleet_queue.late_leases())
    assert step["Index Name"] == "ix_requests_lease" and step["Actual Rows"] == 0


def test_of_several_versions_the_largest_saving_goes_first(daemon: Make) -> None:
    one = daemon("one")
    asked = [replace(request(calls=n), key=replace(key(), versions=name)) for n, name in ((5, "a"), (7, "b"), (6, "c"))]
    one.queue.add(asked)
    taken = [one.queue.lease("one", one.run_id, [DEVICE.key], ["a", "b"]) for _ in range(3)]
    assert [found and found.calls for found in taken] == [7, 5, None]
