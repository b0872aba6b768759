"""Hosts of a fleet, each a daemon in a process of its own with a store of its own, over one server."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy

from autofuse.cli.app import parse
from autofuse.codegen.version import versions
from autofuse.daemon import control
from autofuse.daemon.files import DaemonFiles
from autofuse.db.fleet_exchange import FleetExchange
from autofuse.db.fleet_server import FleetServer
from autofuse.db.store import Store
from autofuse.detached import python_module
from autofuse.errors import DaemonError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Candidate, Decision, DecisionKey, TuneRequest
from autofuse.settings.layers import Settings, load
from autofuse.tuner.strategy_provider import STRATEGY
from tests.postgres import PASSWORD, Postgres, running_postgres
from tests.tuner.nodes import chain_form, group_form, request

FORM = chain_form()
PATIENCE_SECONDS = 60.0


@functools.cache
def apart() -> tuple[str, ...]:
    """The beginning of a command that runs in a network of its own, where that is allowed."""
    command = ("unshare", "--net")
    try:
        return () if subprocess.run([*command, "true"], capture_output=True, check=False).returncode else command
    except OSError:
        return ()


class Host:
    """A host: settings that name a store and perhaps a server."""

    def __init__(self, folder: Path, url: str, **values: object) -> None:
        cli = {"run.store": folder / "store.sqlite3", "run.profile": "quick", "tuner.shared_folder": folder / "shared"}
        cli |= {"fleet.url": url, "fleet.poll_seconds": 0.2, **values}
        self.settings: Settings = load(cli, environ={}, cwd=folder)

    def ask(self, *requests: TuneRequest) -> None:
        with Store.open(self.settings.run.store) as store:
            store.queue.add(requests)

    def start(self) -> None:
        assert control.ensure_running(self.settings) is not None

    def serve(self, *options: str, prefix: Sequence[str] = ()) -> None:
        """Start the daemon by its command; ``prefix``: the beginning of that."""
        command, environment = python_module("autofuse")
        command = [*prefix, *command, "daemon", "serve", *options, *self.settings.as_arguments()]
        with DaemonFiles(self.settings).open_log(1 << 20) as output:
            subprocess.Popen(command, env=environment | self.settings.as_variables(), stderr=output, stdout=output)
        wait_until(lambda: control.running_pid(self.settings))

    def stop(self) -> None:
        with contextlib.suppress(DaemonError):
            control.stop(self.settings)

    def decision(self, asked: TuneRequest) -> Decision | None:
        """The decision, if it is made; the daemon does not yield while somebody asks."""
        control.urgent_path(self.settings).touch()
        with Store.open(self.settings.run.store, readonly=True) as store:
            found = [d.decision for d in store.results.history(asked.key.fusion_id) if d.decision.key == asked.key]
        return found[-1] if found else None

    def decided(self) -> dict[DecisionKey, Decision]:
        """All decisions, those on parts of groups too."""
        with Store.open(self.settings.run.store, readonly=True) as store:
            return {decision.key: decision for _, decision in store.results.decisions()}

    def measured(self) -> int:
        """How many measurements there are of all nodes and parts."""
        with Store.open(self.settings.run.store, readonly=True) as store:
            return len(store.results.measurements_since(0, 10_000))

    def tried(self, asked: TuneRequest) -> int:
        """How many candidates were measured for a request."""
        with Store.open(self.settings.run.store, readonly=True) as store:
            rows = store.results.measurements(asked.key.fusion_id)
        return len({row.measurement.candidate for row in rows if row.key == asked.key})

    @property
    def log(self) -> str:
        return control.log_path(self.settings).read_text()

    def complaints(self) -> list[str]:
        return [line for line in self.log.splitlines() if "goes on with its own store" in line]


Make = Callable[..., Host]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Make]:
    made: list[Host] = []

    def make(url: str, **values: object) -> Host:
        folder = tmp_path / f"host {len(made)}"
        folder.mkdir(mode=0o700)
        made.append(Host(folder, url, **values))
        return made[-1]

    yield make
    for host in made:
        host.stop()


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.url(postgres.new_database())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def on_server(url: str, query: str) -> list[tuple[Any, ...]]:
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        rows = [tuple(row) for row in connection.execute(sqlalchemy.text(query))]
    engine.dispose()
    return rows


def count(url: str, table: str) -> int:
    return int(on_server(url, f"SELECT count(*) FROM {table}")[0][0])


def test_what_one_host_has_tuned_another_takes_over_without_a_search(hosts: Make, postgres: Postgres) -> None:
    """Both daemons have networks and stores of their own; all that they share is the server. Two chains and a group."""
    name = postgres.new_database()
    url = postgres.socket_url(name)
    group = request(group_form(), (700,), calls=1)
    asked = [*(request(chain_form(length), (700,), calls=1) for length in (4, 6)), group]
    first, second = (hosts(url, **{"tuner.trials": 4, "tuner.job_seconds": 60.0}) for _ in range(2))
    for host in (first, second):
        host.ask(*asked)
        host.serve(prefix=apart())
        wait_until(lambda host=host: all(map(host.decision, asked)))
        if host is first:
            wait_until(lambda: count(url, "decisions") == len(first.decided()) > len(asked))
            first.stop()
    for one in asked:
        theirs, ours = first.decision(one), second.decision(one)
        assert theirs is not None and ours is not None
        assert first.tried(one) > 1 and theirs.trials > 1, "a search"
        # Beside whatever else runs here, eager may win a race.
        if theirs.reason == "won":
            assert second.tried(one) == 1 and ours.trials == 1
            assert ours.detail.startswith("as another host of the fleet found")
        if ours.reason == "won":
            assert ours.candidate == theirs.candidate
            with Store.open(second.settings.run.store) as store:
                kernel = store.kernels.get(ours.compile_key or "")
            assert kernel is not None, "of its own, under its own seal"
    theirs, ours = first.decision(group), second.decision(group)
    assert theirs is not None and ours is not None and theirs.candidate.variant == STRATEGY, "it wins by far"
    if ours.reason == "won":
        assert ours.candidate == theirs.candidate and set(second.decided()) <= set(first.decided())
        of_parts = [key for key in second.decided() if key not in {one.key for one in asked}]
        assert of_parts and all("another host" in second.decided()[key].detail for key in of_parts)
    wait_until(lambda: count(url, "measurements") == first.measured() + second.measured())
    assert count(url, "decisions") == len(first.decided()), "who takes over adds measurements only"
    for number, host in enumerate((first, second), 1):  # for those who look: pytest -s
        made = [found for one in asked if (found := host.decision(one)) is not None]
        tried, seconds = [host.tried(one) for one in asked], [round(found.tuning_seconds, 2) for found in made]
        print(f"host {number}: candidates {tried}, seconds {seconds}")
    assert count(url, "kernels") == 0 and not first.complaints() and not second.complaints()


def test_a_worker_tunes_what_other_hosts_ask_for(hosts: Make, url: str, tmp_path: Path) -> None:
    """Stopped in the middle it gives the request back; the next one ends it."""
    asked = request(FORM, (700,), calls=1)
    worker = hosts(url, **{"tuner.idle_exit_seconds": 0.5})
    with Store.open(tmp_path / "asking.db") as store, contextlib.closing(FleetServer(url)) as server:
        exchange = FleetExchange(store, server, cpu_device(), [versions()])
        store.queue.add([asked])
        exchange.push()
        worker.serve("--fleet-worker")
        wait_until(lambda: exchange.queue.length().running == 1)
        worker.stop()  # while its worker imports torch
        assert exchange.queue.length().queued == 1
        assert on_server(url, "SELECT attempts FROM requests") == [(0,)]
        worker.serve("--fleet-worker")
        wait_until(lambda: worker.decision(asked) and exchange.queue.length().done == 1)
        assert exchange.pull() == 1
        found, theirs = store.proposals.get(asked.key), worker.decision(asked)
        assert found is not None and theirs is not None and found.candidate == theirs.candidate
    time.sleep(1.0)  # longer than it may be idle
    assert control.running_pid(worker.settings) is not None, "it stays"


def test_a_worker_without_a_server_is_a_mistake(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(["daemon", "serve", "--fleet-worker", "--store", str(tmp_path / "store.db")]) == 2
    assert "expected a server in fleet.url for --fleet-worker" in capfd.readouterr().err


def test_tuning_in_the_foreground_takes_part(hosts: Make, url: str) -> None:
    asked = request(FORM, (700,), calls=1)
    first, second = hosts(url), hosts(url)
    with Store.open(first.settings.run.store) as store:
        store.results.put_decision(Decision.of(None, asked, Candidate("eager"), "no_gain", ""))
    assert control.drain(first.settings).done == 0  # what it has found is sent at its end
    second.ask(asked)
    assert control.drain(second.settings).done == 1
    found = second.decision(asked)
    assert found is not None and found.detail == "as another host of the fleet found"


def test_a_server_that_is_killed_in_the_middle(hosts: Make, tmp_path: Path) -> None:
    """The daemon goes on with one line; what it finds meanwhile is sent when the server is back."""
    with running_postgres() as own:
        url = own.url(own.new_database())
        host = hosts(url)
        asked = request(FORM, (700,), calls=1)
        host.ask(asked)
        host.start()
        wait_until(lambda: count(url, "requests") == 1)
        own.kill()
        wait_until(lambda: host.decision(asked))
        time.sleep(1.0)  # several tries
        assert len(host.complaints()) == 1
        assert all(PASSWORD not in line for line in host.log.splitlines())
        own.start()
        wait_until(lambda: count(url, "decisions") == 1)
        wait_until(lambda: "answers again" in host.log)


def status_of(host: Host, capfd: pytest.CaptureFixture[str]) -> str:
    assert parse(["daemon", "status", "--store", str(host.settings.run.store)]) == 0
    return capfd.readouterr().out


def test_the_password_is_in_no_argument_and_in_no_record(
    hosts: Make, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    host = hosts(url)
    host.start()
    pid = control.running_pid(host.settings)
    assert pid is not None
    assert PASSWORD not in " ".join(psutil.Process(pid).cmdline())
    assert PASSWORD in psutil.Process(pid).environ()["AUTOFUSE_FLEET_URL"]
    wait_until(lambda: count(url, "runs") == 1)
    capfd.readouterr()
    wait_until(lambda: "fleet: the server answers" in status_of(host, capfd))
    assert PASSWORD not in str(host.settings.for_records()) + str(host.settings.as_dict()) + repr(host.settings)
    assert PASSWORD not in host.log
