"""A server that takes its time, or never answers: neither this host's store nor a script waits for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.codegen.version import versions
from autofuse.daemon import fleet as fleet_module
from autofuse.daemon.fleet import Fleet
from autofuse.db.fleet_queue import FleetQueue
from autofuse.db.fleet_server import FleetServer
from autofuse.db.store import Store
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Candidate, Decision, Measurement, TuneRequest
from autofuse.settings.groups import FleetSettings
from tests.postgres import Postgres
from tests.relay import Relay, relayed
from tests.tuner.nodes import chain_form, request

SECONDS = 30.0  # of patience


@pytest.fixture
def relay(postgres: Postgres) -> Iterator[Relay]:
    with relayed(postgres.port) as made:
        yield made


@pytest.fixture
def url(postgres: Postgres, relay: Relay) -> str:
    return postgres.url(postgres.new_database()).replace(f":{postgres.port}/", f":{relay.port}/")


Make = Callable[[], Fleet]


@pytest.fixture
def fleet(url: str, relay: Relay, tmp_path: Path) -> Iterator[Make]:
    made: list[Fleet] = []

    def make() -> Fleet:
        Store.open(tmp_path / "store.db").close()
        settings = FleetSettings(url=url, poll_seconds=0.05)
        made.append(Fleet(settings, tmp_path / "store.db", cpu_device(), [versions()]))
        made[-1].start()
        return made[-1]

    yield make
    relay.release()
    for one in made:
        one.close()


def ask(number: int) -> TuneRequest:
    return request(chain_form(number + 1), (700,))


def write_at_once(path: Path, number: int) -> None:
    """What a script and its daemon write; with no patience at all for whoever holds the store."""
    asked = ask(number)
    with Store.open(path, timeout_seconds=0.0) as store:
        store.queue.add([asked])
        store.results.put_measurements(asked.key, [Measurement(Candidate("c_generic"), "ok", (700,))])
        store.results.put_decision(Decision.of(None, asked, Candidate("eager"), "no_gain", ""))


def test_whatever_answer_is_outstanding_the_store_is_free(
    fleet: Make, relay: Relay, postgres: Postgres, url: str, tmp_path: Path
) -> None:
    """However long one takes. Answer by answer through the first rounds, in which rows of all kinds go up and down."""
    with contextlib.closing(FleetServer(url)) as server:
        queue = FleetQueue(server)
        queue.add([replace(ask(50), run_id=None)])
        one_decided = "SELECT 1 FROM decisions"
        relay.hold()
        one, number, found = fleet(), 0, None
        while number < 12 or found is None:
            assert relay.wait_held(SECONDS)
            if number < 12:
                write_at_once(tmp_path / "store.db", number)
            one.begin_own(ask(number).key)
            one.end_own()
            assert isinstance(one.state, str) and not one.is_elsewhere(ask(number).key)
            found = found or one.borrow()
            relay.step()
            number += 1
        assert found.key == ask(50).key
        relay.release()
        one.give_back(found.key, "done")
        one.close()
        assert len(postgres.sql(one_decided, database=url.rpartition("/")[2])) == 12


def test_a_daemon_that_begins_waits_no_longer_than_for_a_connection(
    fleet: Make, relay: Relay, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lets it in and then says nothing: after `fleet.connect_seconds` the daemon begins to work."""
    monkeypatch.setattr(fleet_module, "FIRST_SECONDS", 1e6)
    exchange = fleet_module.FleetExchange

    def silent(*arguments: object) -> object:
        server = arguments[1]
        assert isinstance(server, FleetServer)
        server.check()  # connected
        relay.hold()
        return exchange(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fleet_module, "FleetExchange", silent)
    one = fleet()
    one.wait()
    assert one.state == "not connected yet"
    with caplog.at_level(logging.INFO, "autofuse.daemon"):
        relay.release()
        one.close()
    assert not [r for r in caplog.records if "its own store" in r.getMessage()], "it is slow, not down"
