"""The exchange of one daemon, without a daemon: what it says, when it waits, what it borrows."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tests.postgres
from autofuse.codegen.version import versions
from autofuse.daemon import fleet as fleet_module
from autofuse.daemon.fleet import CLOSE_SECONDS, FIRST_SECONDS, LONGEST_PAUSE_SECONDS, Fleet, Lent, retry_seconds
from autofuse.db.fleet_exchange import FleetExchange
from autofuse.db.fleet_queue import FleetQueue
from autofuse.db.fleet_server import FleetServer
from autofuse.db.rows import QueueStatus
from autofuse.db.store import Store
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Candidate, Decision
from autofuse.settings.groups import FleetSettings
from tests.postgres import PASSWORD, Postgres
from tests.tuner.nodes import chain_form, request

Make = Callable[..., Fleet]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Make]:
    made: list[Fleet] = []

    def make(url: str, name: str = "one", lease_seconds: float = 60.0, lent: Lent | None = None) -> Fleet:
        Store.open(tmp_path / f"{name}.db").close()
        settings = FleetSettings(url=url, poll_seconds=0.05)
        made.append(Fleet(settings, tmp_path / f"{name}.db", cpu_device(), [versions()], lease_seconds, lent))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def silent_port() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    made.listen()
    return made


def test_without_a_server_there_is_no_thread(fleet: Make) -> None:
    one = fleet("")
    assert one._thread is None and not one.may_help
    one.wait()
    one.begin_own(request(chain_form(), (700,)).key)
    one.end_own()
    one.close()


def test_a_daemon_without_a_server_imports_no_psycopg() -> None:
    code = "import sys, autofuse.daemon.loop; assert not {'psycopg', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("in_ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_postgresql_tests_are_skipped_but_not_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch, in_ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(tests.postgres, "programs", lambda: None)
    monkeypatch.setenv("CI", in_ci)
    with pytest.raises(outcome, match="PostgreSQL is not installed; type: apt-get install postgresql"):
        tests.postgres.need_postgres()


def test_trouble_is_said_once_and_nobody_waits_for_long(
    fleet: Make, postgres: Postgres, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = postgres.new_database()
    postgres.sql("UPDATE alembic_version SET version_num = '0999'", database=newer)
    monkeypatch.setattr(fleet_module, "LONGEST_PAUSE_SECONDS", 0.1)
    with silent_port() as silent:
        for url, words in (
            ("mysql://someone:w0rd@db/fleet", "expected fleet.url=postgresql+psycopg://USER@HOST/DATABASE"),
            (postgres.url(newer), "pip install --upgrade autofuse"),
            (f"postgresql+psycopg://someone:w0rd@127.0.0.1:{silent.getsockname()[1]}/fleet", "timeout"),
        ):
            caplog.clear()
            with caplog.at_level(logging.INFO, "autofuse.daemon"):
                began = time.monotonic()
                one = fleet(url, name=f"host of {words[:5]}")
                one.wait()
                assert time.monotonic() - began < FIRST_SECONDS
                wait_until(lambda: [r for r in caplog.records if "its own store" in r.getMessage()])
                time.sleep(0.5)  # several more tries
            (line,) = [r.getMessage() for r in caplog.records if "its own store" in r.getMessage()]
            assert words in line and "\n" not in line and PASSWORD not in line and one.state == line


def test_a_request_is_borrowed_by_an_idle_loop_alone(fleet: Make, postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    server = FleetServer(url)
    queue, asked = FleetQueue(server), request(chain_form(), (700,))
    one = fleet(url, lease_seconds=1.0)
    with Store.open(tmp_path / "asking.db") as store:
        exchange = FleetExchange(store, server, cpu_device(), [versions()])
        store.queue.add([asked])
        exchange.push()
        time.sleep(0.3)
        assert queue.length() == QueueStatus(queued=1), "nobody has said that it is idle"
        found = None
        while found is None:
            found = one.borrow()
        assert found.key == asked.key and found.node == asked.node
        time.sleep(1.5)  # longer than a lease that is not renewed
        assert queue.lease("another", exchange.run_id, [cpu_device().key], [versions()]) is None
        one.give_back(asked.key, "done")
        wait_until(lambda: queue.length().done == 1)
    server.close()


def test_a_gpus_request_goes_to_an_idle_host_that_has_one(fleet: Make, postgres: Postgres, tmp_path: Path) -> None:
    """With a model of GPU that nobody sells: leases are all that it is used for here."""
    url = postgres.url(postgres.new_database())
    made = request(chain_form(), (700,))
    asked = replace(made, key=replace(made.key, device="cuda:Fake:132:sm_90:80GiB"))
    rounds: list[bool] = []  # of the host without one: whether it sees that somebody asks for the GPU that it has

    def other_gpu(is_asked_for: Callable[[str], bool]) -> list[str]:
        rounds.append(is_asked_for("cuda:Other:108:sm_80:40GiB"))
        return [cpu_device().key, "cuda:Other:108:sm_80:40GiB"]

    def its_gpu(is_asked_for: Callable[[str], bool]) -> list[str]:
        return [cpu_device().key, *([asked.key.device] if is_asked_for(asked.key.device) else [])]

    with (
        contextlib.closing(FleetServer(url)) as server,
        Store.open(tmp_path / "asking.db") as store,
    ):
        exchange = FleetExchange(store, server, cpu_device(), [versions()])
        store.queue.add([asked])
        exchange.push()
        without, cpu_alone = fleet(url, lent=other_gpu), fleet(url, name="two")
        while len(rounds) < 5:
            assert without.borrow() is None and cpu_alone.borrow() is None
            time.sleep(0.01)
        assert not any(rounds) and exchange.queue.length() == QueueStatus(queued=1)
        having, found = fleet(url, name="three", lent=its_gpu), None
        while found is None:
            found = having.borrow()
        assert found.key == asked.key and found.node == asked.node
        assert without.borrow() is None and cpu_alone.borrow() is None
        having.give_back(asked.key, "done")
        wait_until(lambda: exchange.queue.length() == QueueStatus(done=1))


def test_own_work_goes_first(fleet: Make, postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    server = FleetServer(url)
    queue = FleetQueue(server)
    one = fleet(url)
    assert one.borrow() is None
    with Store.open(tmp_path / "asking.db") as store:
        exchange = FleetExchange(store, server, cpu_device(), [versions()])
        store.queue.add([request(chain_form(), (700,))])
        exchange.push()
    wait_until(lambda: queue.length().running == 1)  # leased ahead
    one.begin_own(request(chain_form(3), (700,)).key)
    wait_until(lambda: queue.length().queued == 1)
    server.close()


def test_helpers_leave_alone_what_a_host_works_on(fleet: Make, postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    server, asked = FleetServer(url), request(chain_form(), (700,))
    queue = FleetQueue(server)
    one, helper = fleet(url), fleet(url, name="two")
    with Store.open(tmp_path / "one.db") as store:
        store.queue.add([asked])
    one.begin_own(asked.key)
    wait_until(lambda: queue.length().running == 1)
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert helper.borrow() is None
    one.end_own()  # given up: there is no decision
    found = None
    while found is None:
        found = helper.borrow()
    assert found.key == asked.key
    server.close()


def test_a_host_knows_what_others_work_on_of_what_it_would_do_next(
    fleet: Make, postgres: Postgres, tmp_path: Path
) -> None:
    url = postgres.url(postgres.new_database())
    asked, unasked = request(chain_form(), (700,)), request(chain_form(3), (700,))
    one, two = fleet(url), fleet(url, name="two")
    for name in ("one", "two"):
        with Store.open(tmp_path / f"{name}.db") as store:
            store.queue.add([asked])
    one.begin_own(asked.key)
    wait_until(lambda: two.is_elsewhere(asked.key))
    assert not two.is_elsewhere(unasked.key) and not one.is_elsewhere(asked.key)
    one.end_own()
    wait_until(lambda: not two.is_elsewhere(asked.key))
    one.begin_own(asked.key)
    wait_until(lambda: two.is_elsewhere(asked.key))
    database = url.rpartition("/")[2]
    postgres.sql(
        f"ALTER DATABASE {database} ALLOW_CONNECTIONS false",
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'",
    )
    wait_until(lambda: not two.is_elsewhere(asked.key))  # without a server nothing is known


def test_a_server_that_is_halted_holds_up_nobody(fleet: Make, postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    one, asked = fleet(url), request(chain_form(), (700,))
    one.wait()
    assert one.state == "the server answers"
    with postgres.halted():
        began = time.monotonic()
        one.begin_own(asked.key)
        one.end_own()
        assert one.borrow() is None
        one.close()
        assert time.monotonic() - began < CLOSE_SECONDS + 20.0, "it never answers"
    assert one.state == ""


def test_results_are_sent_before_a_daemon_ends(fleet: Make, postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.url(postgres.new_database())
    one = fleet(url)
    one.wait()
    asked = request(chain_form(), (700,))
    with Store.open(tmp_path / "one.db") as store:
        store.results.put_decision(Decision.of(None, asked, Candidate("eager"), "no_gain", "words"))
    one.close()
    other = fleet(url, name="two")
    other.wait()
    with Store.open(tmp_path / "two.db") as store:
        assert store.proposals.get(asked.key) is not None, "known before the first job"


@pytest.mark.parametrize(("failures", "longest"), [(1, 10.0), (3, 40.0), (9, LONGEST_PAUSE_SECONDS)])
def test_hosts_that_fail_together_do_not_come_back_together(failures: int, longest: float) -> None:
    drawn = [retry_seconds(5.0, failures) for _ in range(200)]
    assert longest / 2 <= min(drawn) < max(drawn) <= longest
    assert max(drawn) - min(drawn) > longest / 4
