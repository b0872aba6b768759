"""Hosts of a fleet, each a daemon in a process of its own with a store of its own, over one server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autofuse.daemon import control
from autofuse.db.store import Store
from autofuse.errors import DaemonError
from autofuse.ir.records import Decision, TuneRequest
from autofuse.settings.layers import Settings, load
from tests.postgres import Postgres
from tests.tuner.nodes import chain_form, request

FORM = chain_form()
PATIENCE_SECONDS = 60.0


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

    def stop(self) -> None:
        with contextlib.suppress(DaemonError):
            control.stop(self.settings)

    def decision(self, asked: TuneRequest) -> Decision | None:
        with Store.open(self.settings.run.store, readonly=True) as store:
            found = [d.decision for d in store.results.history(asked.key.fusion_id) if d.decision.key == asked.key]
        return found[-1] if found else None

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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
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


def on_server(url: str, query: str) -> list[tuple[object, ...]]:
    import sqlalchemy

    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        rows = [tuple(row) for row in connection.execute(sqlalchemy.text(query))]
    engine.dispose()
    return rows


def test_what_one_host_has_tuned_another_takes_over_without_a_search(
    hosts: Callable[..., Host], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = request(FORM, (700,), calls=1)
    first, second = hosts(url, **{"tuner.trials": 8}), hosts(url, **{"tuner.trials": 8})
    began = time.monotonic()
    first.ask(asked)
    first.start()
    wait_until(lambda: first.decision(asked))
    searched = time.monotonic() - began
    wait_until(lambda: on_server(url, "SELECT 1 FROM decisions"))
    first.stop()
    began = time.monotonic()
    second.ask(asked)
    second.start()
    wait_until(lambda: second.decision(asked))
    took = time.monotonic() - began
    found, theirs = second.decision(asked), first.decision(asked)
    assert found is not None and theirs is not None
    with capsys.disabled():
        print(
            f"\nfirst: {theirs.reason} {theirs.speedup:.2f}x, {first.tried(asked)} candidates, {theirs.trials} tried, "
            f"{theirs.tuning_seconds:.2f} s of {searched:.2f}; second: {found.reason} {found.speedup:.2f}x, "
            f"{second.tried(asked)} candidates, {found.trials} tried, {found.tuning_seconds:.2f} s of {took:.2f}: {found.detail}"
        )
    print(second.log)
