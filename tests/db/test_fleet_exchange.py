"""Two stores and a server: what goes up, what comes down, what stays at home."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Connection
from store_records import DEVICE, VERSIONS, decision, kernel, key, measurement, request, start, use

from autofuse.db import fleet_exchange, models
from autofuse.db.fleet_exchange import FleetExchange
from autofuse.db.fleet_server import FleetServer
from autofuse.db.results import TuneResults
from autofuse.db.rows import StoredMeasurement
from autofuse.db.store import Store
from autofuse.errors import FleetError
from autofuse.ir.records import EAGER, Candidate, Decision, Event
from tests.postgres import Postgres


class Host(NamedTuple):
    store: Store
    server: FleetServer
    exchange: FleetExchange


class Fleet(NamedTuple):
    one: Host
    two: Host
    server: FleetServer


def stays_eager(fusion_id: str = "a" * 64) -> Decision:
    return replace(
        decision(fusion_id),
        candidate=Candidate(EAGER),
        compile_key=None,
        reason="no_gain",
        speedup=0.9,
        speedup_high=0.95,
    )


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path) -> Iterator[Fleet]:
    url = postgres.url(postgres.new_database())
    with contextlib.ExitStack() as stack:

        def host(name: str) -> Host:
            store = stack.enter_context(Store.open(tmp_path / f"{name}.db"))
            server = stack.enter_context(contextlib.closing(FleetServer(url)))
            return Host(store, server, FleetExchange(store, server, DEVICE, [VERSIONS]))

        yield Fleet(host("one"), host("two"), stack.enter_context(contextlib.closing(FleetServer(url))))


def standing(fleet: Fleet) -> list[Decision]:
    return [found for _, found in TuneResults(fleet.server).decisions()]


def push_all(host: Host) -> int:
    total = 0
    while count := host.exchange.push():
        total += count
    return total


def test_requests_of_two_hosts_add_up_and_are_sent_once(fleet: Fleet) -> None:
    runs = [fleet.one.store.runs.start(start()) for _ in range(2)]
    fleet.one.store.queue.add([request(calls=10, run_id=runs[0]), request(calls=5, run_id=runs[0], fusion_id="b" * 64)])
    fleet.two.store.queue.add([request(calls=7)])
    assert push_all(fleet.one) == 2 and push_all(fleet.two) == 1
    assert push_all(fleet.one) == 0
    fleet.one.store.queue.add([request(calls=20, run_id=runs[1])])
    assert push_all(fleet.one) == 1
    rows = {row.key.fusion_id[0]: row.calls for row in fleet.one.exchange.queue.requests()}
    assert rows == {"a": 37, "b": 5}
    again = FleetExchange(fleet.one.store, fleet.one.server, DEVICE, [VERSIONS])  # the next daemon of the same store
    assert again.run_id == fleet.one.exchange.run_id != fleet.two.exchange.run_id
    again.push()
    assert {row.key.fusion_id[0]: row.calls for row in again.queue.requests()} == rows


def test_a_decision_goes_to_the_others_as_a_proposal(fleet: Fleet) -> None:
    fleet.one.store.queue.add([request()])
    fleet.one.store.results.put_measurements(key(), [measurement(unroll=4), measurement(unroll=8)])
    fleet.one.store.results.put_decision(decision())
    assert push_all(fleet.one) == 4
    assert fleet.two.exchange.pull() == 1 and fleet.two.exchange.pull() == 0
    found = fleet.two.store.proposals.get(key())
    assert found is not None and found.candidate == decision().candidate and found.speedup == decision().speedup
    assert fleet.two.store.results.decisions() == [], "it counts for nothing yet"
    assert fleet.one.exchange.pull() == 0, "one's own"
    assert fleet.one.exchange.queue.length().done == 1
    assert len(TuneResults(fleet.server).measurements("a" * 64)) == 2


def test_where_there_is_a_decision_nothing_happens(fleet: Fleet) -> None:
    fleet.one.store.results.put_decision(decision())
    fleet.two.store.results.put_decision(stays_eager())
    push_all(fleet.one)
    assert fleet.two.exchange.pull() == 0 and fleet.two.store.proposals.get(key()) is None


def test_only_what_was_measured_is_proposed(fleet: Fleet) -> None:
    crashed = replace(stays_eager(), reason="crashed", detail="signal 11")
    fleet.one.store.results.put_decision(crashed)
    fleet.one.store.results.put_decision(replace(crashed, key=key("b" * 64), reason="out_of_memory"))
    assert push_all(fleet.one) == 2 and standing(fleet) == []


def test_of_hosts_that_disagree_the_one_in_eager_is_believed(fleet: Fleet) -> None:
    other = replace(decision(), candidate=Candidate("c_generic", (("unroll", 8),)))
    for made in (decision(), other, stays_eager(), decision()):
        fleet.one.store.results.put_decision(made)
        push_all(fleet.one)
        expected = (
            stays_eager() if made == stays_eager() or standing(fleet)[0].candidate.variant == EAGER else decision()
        )
        assert standing(fleet) == [replace(expected, compile_key=None)]
    fleet.two.store.results.put_decision(decision())
    push_all(fleet.two)
    assert standing(fleet) == [stays_eager()]


@pytest.mark.parametrize(("verdict", "sent"), [("adopted", 0), ("overridden", 0), ("refused", 1)])
def test_who_takes_a_proposal_over_or_disagrees_adds_measurements(fleet: Fleet, verdict: str, sent: int) -> None:
    fleet.one.store.results.put_decision(decision())
    push_all(fleet.one)
    fleet.two.exchange.pull()
    fleet.two.store.results.put_measurements(key(), [measurement(unroll=4)])
    fleet.two.store.results.put_decision(stays_eager())
    fleet.two.store.proposals.close(key(), verdict, "words")  # type: ignore[arg-type]
    assert fleet.two.store.proposals.get(key()) is None and fleet.two.store.proposals.line(key()) == "words"
    assert push_all(fleet.two) == 1 + sent
    assert len(TuneResults(fleet.server).history()) == 1 + sent
    assert fleet.two.exchange.pull() == 0, "a closed proposal is not opened again"


def test_a_newer_decision_replaces_an_open_proposal(fleet: Fleet) -> None:
    fleet.one.store.results.put_decision(decision())
    push_all(fleet.one)
    assert fleet.two.exchange.pull() == 1
    fleet.one.store.results.put_decision(stays_eager())
    push_all(fleet.one)
    assert fleet.two.exchange.pull() == 1
    found = fleet.two.store.proposals.get(key())
    assert found is not None and found.candidate.variant == EAGER


@pytest.mark.parametrize(
    "damage",
    [
        """config = '["a"]'""",
        """config = '{"a": 1}'""",
        """config = '[["a", [1]]]'""",
        """config = '[[1, 1]]'""",
        """config = '7'""",
        """speedup = 'NaN'""",
        """reason = 'told'""",
    ],
)
def test_a_row_that_says_nothing_costs_itself_alone(fleet: Fleet, postgres: Postgres, damage: str) -> None:
    for name in "abc":
        fleet.one.store.results.put_decision(decision(name * 64))
    push_all(fleet.one)
    with fleet.server.write() as connection:
        connection.exec_driver_sql(f"UPDATE decisions SET {damage} WHERE key = '{key('b' * 64).digest}'")
        connection.exec_driver_sql("UPDATE decisions SET ranges = '{}'")  # those of the request count here
    assert fleet.two.exchange.pull() == 2
    assert [fleet.two.store.proposals.get(key(name * 64)) is not None for name in "abc"] == [True, False, True]


def test_nothing_that_names_the_host_goes_up(fleet: Fleet, postgres: Postgres, tmp_path: Path) -> None:
    store, run_id = fleet.one.store, fleet.one.store.runs.start(start("/home/someone/secret.py --token s3cret"))
    store.nodes.put_uses(run_id, [use()])
    store.queue.add([request(run_id=run_id)])
    failed = replace(measurement(), status="compile_error", message=f"{tmp_path}/x.c:1: error\nmore")
    store.results.put_measurements(key(), [failed, replace(failed, message="Segmentation fault\nin secret.py")])
    store.results.put_decision(replace(decision(), detail=f"{socket.gethostname()} found it in {tmp_path}"), run_id)
    store.kernels.put(kernel())
    store.notes.add_event(run_id, Event("fallback", "secret"))
    push_all(fleet.one)
    found = []
    for table in models.Base.metadata.sorted_tables:
        with fleet.server.read() as connection:
            found += [f"{table.name}: {row}" for row in connection.execute(table.select())]
    text = "\n".join(found)
    for secret in (socket.gethostname(), str(tmp_path), "s3cret", "secret", "someone", "train.py", "ELF", "void"):
        assert secret not in text, secret
    assert "Segmentation fault" in text
    assert not [line for line in found if line.startswith(("kernels", "events", "node_uses"))]


def test_rows_become_visible_in_the_order_of_their_ids(fleet: Fleet) -> None:
    """Else a reader that has seen the second would never ask for the first."""
    results, other, is_done = TuneResults(fleet.two.server), decision("b" * 64), threading.Event()

    def write_second() -> None:
        results.put_decision(other)
        is_done.set()

    with fleet.one.server.write() as connection:
        fleet_exchange.put_keys(connection, [key()])
        first = fleet_exchange.insert_decision(connection, replace(decision(), compile_key=None), None)
        thread = threading.Thread(target=write_second)
        thread.start()
        assert not is_done.wait(0.5), "the second waits for the first"
        assert standing(fleet) == []
    thread.join()
    assert [found for found, _ in TuneResults(fleet.server).decisions()] == [first, first + 1]


def test_what_a_lost_connection_has_cost_is_sent_again(fleet: Fleet, postgres: Postgres) -> None:
    for number in range(5):
        fleet.one.store.results.put_decision(decision(f"{number:064d}"))
    settle, calls = fleet.one.exchange._settle, []

    def lose(made: Decision) -> None:
        calls.append(made)
        if len(calls) == 3:
            postgres.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'autofuse'")
        settle(made)

    fleet.one.exchange._settle = lose  # type: ignore[method-assign]
    with pytest.raises(FleetError):
        fleet.one.exchange.push()
    push_all(fleet.one)
    with contextlib.suppress(FleetError):  # its connection was lost, too
        standing(fleet)
    assert len(standing(fleet)) == 5


def test_many_decisions_come_in_pieces(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_exchange, "PIECE", 3)
    for number in range(8):
        fleet.one.store.results.put_decision(decision(f"{number:064d}"))
    assert push_all(fleet.one) == 8
    assert fleet.two.exchange.pull() == 8


def test_what_is_of_no_use_here_is_looked_through_once_and_in_parts(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_exchange, "SPAN", 2)
    monkeypatch.setattr(fleet_exchange, "PIECE", 2)
    for number in range(5):
        fleet.one.store.results.put_decision(decision(f"{number:064d}"))
    push_all(fleet.one)
    looked: list[tuple[Any, ...]] = []
    decided = FleetExchange._decided

    def look(exchange: FleetExchange, *arguments: Any) -> Any:
        looked.append(arguments)
        return decided(exchange, *arguments)

    monkeypatch.setattr(FleetExchange, "_decided", look)
    stranger = FleetExchange(fleet.two.store, fleet.two.server, DEVICE, ["torch 9"])
    assert stranger.pull() == 0
    assert [ids for *_, since, until in looked for ids in [(since, until)]] == [(0, 2), (2, 4), (4, 5)]
    looked.clear()
    assert stranger.pull() == 0 and [ids for *_, ids, _ in looked] == [4], "fewer than PIECE are not worth a mark"
    fleet.one.store.results.put_decision(decision("9" * 64))
    push_all(fleet.one)
    assert stranger.pull() == 0 and stranger.pull() == 0
    assert len(looked) == 2, "then they are"
    assert fleet.two.exchange.pull() == 6


def test_measurements_wait_for_no_other_writer(fleet: Fleet) -> None:
    fleet.one.store.results.put_measurements(decision().key, [measurement(unroll=n) for n in (4, 2, 8)])
    with fleet.server.write():  # in which all others that take turns wait
        assert fleet.one.exchange._push_measurements() == 3
    found = TuneResults(fleet.server).measurements("a" * 64)
    assert [dict(row.measurement.candidate.config)["unroll"] for row in found] == [4, 2, 8]


# ---- what arrives twice --------------------------------------------------------------------------


def stored(fleet: Fleet) -> list[str]:
    return [
        str(dict(row.measurement.candidate.config)["unroll"])
        for row in TuneResults(fleet.server).measurements("a" * 64)
    ]


def test_measurements_whose_answer_was_lost_count_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has stored them, and the host does not know."""
    one = fleet.one
    one.store.results.put_measurements(key(), [measurement(unroll=4), measurement(unroll=8)])
    append = one.server.append

    @contextlib.contextmanager
    def lose() -> Iterator[Connection]:
        with append() as connection:
            yield connection
        raise FleetError("no answer")

    with monkeypatch.context() as cut:
        cut.setattr(one.server, "append", lose)
        with pytest.raises(FleetError, match="no answer"):
            one.exchange.push()
    assert stored(fleet) == ["4", "8"]
    one.store.results.put_measurements(key(), [measurement(unroll=2)])
    push_all(one)
    assert stored(fleet) == ["4", "8", "2"]


def test_two_daemons_of_a_store_send_the_same_measurements_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for CPUs and for GPUs, say; both have read how far the store's rows have gone."""
    one = fleet.one
    one.store.results.put_measurements(key(), [measurement(unroll=n) for n in (4, 8)])
    other = FleetExchange(one.store, fleet.two.server, DEVICE, [VERSIONS])
    since, both = one.store.results.measurements_since, threading.Barrier(2)

    def read(since_id: int, most: int) -> list[tuple[int, StoredMeasurement]]:
        found = since(since_id, most)
        both.wait()
        return found

    monkeypatch.setattr(one.store.results, "measurements_since", read)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(FleetExchange._push_measurements, [one.exchange, other])) == [2, 2]
    assert stored(fleet) == ["4", "8"]


def test_copies_of_a_store_send_what_each_has_measured(fleet: Fleet, tmp_path: Path) -> None:
    """Of a container's image, say: their names are one, and so are the numbers of their rows."""
    fleet.one.store.marks.own_name()
    fleet.one.store.close()
    shutil.copy(tmp_path / "one.db", tmp_path / "copy.db")
    for name, unroll in (("one", 4), ("copy", 8)):
        with Store.open(tmp_path / f"{name}.db") as store:
            store.results.put_measurements(key(), [measurement(unroll=unroll)])
            FleetExchange(store, fleet.two.server, DEVICE, [VERSIONS]).push()
    assert stored(fleet) == ["4", "8"]
