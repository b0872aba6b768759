"""History is bounded by age and by bytes; what later runs learn from stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_records import decision, kernel, request, start, steps, use

from autofuse.cli.app import parse
from autofuse.db import history
from autofuse.db.store import Store
from autofuse.ir.records import Event, RootRecord, RunTotals

DAY = 86400.0


@pytest.fixture
def runs(store: Store) -> list[int]:
    """Three runs with all kinds of details, the second still running."""
    found = []
    for number in range(3):
        run_id = store.start_run(start(f"run{number}.py"))
        store.add_step_samples(run_id, steps(2000))
        store.put_node_uses(run_id, [use()])
        store.put_root(run_id, RootRecord("Model", "Model", "eager", "too_small"))
        store.add_event(run_id, Event("fallback", "an event"))
        if number != 1:
            store.finish_run(run_id, RunTotals(steps=2000))
        found.append(run_id)
    store.add_requests([request(run_id=found[0])])
    store.put_kernel(kernel())
    store.put_decision(decision())
    return found


def details(store: Store, run_id: int) -> list[int]:
    return [len(store.step_samples(run_id)), len(store.node_uses(run_id)), len(store.events(run_id))]


def test_details_of_old_runs_go_and_what_was_learnt_stays(
    store: Store, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.prune(90.0, 1 << 30) == 0
    began = history.now()
    monkeypatch.setattr(history, "now", lambda: began + 91 * DAY)
    monkeypatch.setattr(history, "LONGEST_RUN_SECONDS", 1000 * DAY)
    assert store.prune(90.0, 1 << 30) == 1
    assert [details(store, run_id) for run_id in runs] == [[0, 0, 0], [2000, 1, 1], [2000, 1, 1]]
    assert store.prune(90.0, 1 << 30) == 0, "once is enough"
    monkeypatch.setattr(history, "LONGEST_RUN_SECONDS", 30 * DAY)
    assert store.prune(90.0, 1 << 30) == 1, "one that was killed"
    assert details(store, runs[2]) == [2000, 1, 1], "the newest stays, however old"
    assert [run.totals.steps for run in store.runs()] == [2000, 0, 2000]
    assert store.last_seconds("run0.py") >= 0.0 and set(store.roots()) == {"Model"}
    assert len(store.decisions()) == 1 and store.get_kernel(kernel().key.digest) is not None
    assert store.queue_length().queued == 1


def test_the_oldest_go_until_the_bytes_are_few_enough(store: Store, runs: list[int]) -> None:
    before = store.history_bytes()
    assert store.prune(1e6, before) == 0
    assert store.prune(1e6, before - 1) == 1
    assert store.history_bytes() < before
    assert details(store, runs[0]) == [0, 0, 0]
    assert store.prune(1e6, 0) == 0, "the others are the newest, and one that runs"


def test_the_command_gives_the_room_back(
    path: Path, store: Store, runs: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store.close()
    before = path.stat().st_size
    assert parse(["store", "prune", "--store", str(path), "--set", "cache.history_bytes=0"]) == 0
    assert "Removed the details of 1 run;" in capsys.readouterr().out
    assert path.stat().st_size < before
    with Store.open(path) as opened:
        assert details(opened, runs[2]) == [2000, 1, 1]
