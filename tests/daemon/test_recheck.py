"""Old decisions are raced again while no script runs: kept, changed, and never more of it than is allowed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.daemon import recheck
from autofuse.daemon.loop import TuningLoop
from autofuse.daemon.recheck import LOOK_SECONDS, RECHECK_SECONDS, Rechecks
from autofuse.db.store import Store
from autofuse.ir.device import cpu_device
from autofuse.ir.records import EAGER, Candidate, Decision, NodeUse, ObservedShape, RunStart, TuneRequest
from autofuse.tuner.benchmark_provider import NodeBenchmarks
from autofuse.tuner.search import ConfigSearch
from tests.tuner.loops import count_searches, fast_candidates, quick_loop, slow_candidates
from tests.tuner.nodes import chain_form, request


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TuningLoop]:
    with quick_loop(tmp_path_factory.mktemp("host"), is_urgent=False) as made:
        yield made


@pytest.fixture
def store(loop: TuningLoop) -> Iterator[Store]:
    with Store.open(loop.settings.run.store) as opened:
        yield opened


def tuned_long_ago(loop: TuningLoop, store: Store, asked: TuneRequest) -> Decision:
    """What was decided forty days ago, on a node that a script has used today."""
    store.queue.add([asked])
    assert loop.drain(lambda done, total: None).left == 0
    forty_days = 40 * recheck.DAY_SECONDS
    with sqlite3.connect(store.path) as raw:
        raw.execute("UPDATE decisions SET at = at - ?", (forty_days,))
    raw.close()
    run = store.runs.start(RunStart("train.py", cpu_device(), asked.key.versions, "off", 1, {}))
    use = NodeUse(asked.key.fusion_id, asked.node, "a", "b", asked.bucket, 9, 9, 1.0, 0.5, asked.shapes, "")
    store.nodes.put_uses(run, [use])
    return history(store, asked)[-1]


def begin_rechecks(loop: TuningLoop) -> None:
    """As a daemon that has just started."""
    loop._rechecks = Rechecks(loop._store, 30.0, loop._devices.keys, loop.queue.versions, "")


def history(store: Store, asked: TuneRequest) -> list[Decision]:
    return [row.decision for row in store.results.history() if row.decision.key == asked.key]


def test_a_winner_that_wins_again_is_kept_without_a_search(
    loop: TuningLoop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_candidates(monkeypatch)
    asked = request(chain_form(8, 256), (700,), calls=1)
    before = tuned_long_ago(loop, store, asked)
    assert before.reason == "won"
    monkeypatch.setattr(ConfigSearch, "__init__", lambda *_, **__: pytest.fail("a search was begun"))
    begin_rechecks(loop)
    assert loop._has_worked() and not loop._has_worked(), "it is of today now"
    first, again = history(store, asked)
    assert first == before and again.candidate == before.candidate and again.trials == 1
    assert again.detail.startswith(f"raced again after 40 days; before, it gained {before.speedup:.2f}x; ")
    assert store.queue.length().done == 1


def test_a_winner_that_no_longer_wins_gives_way(
    loop: TuningLoop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_candidates(monkeypatch)
    asked = request(chain_form(7, 256), (700,), calls=1)
    assert tuned_long_ago(loop, store, asked).reason == "won"
    monkeypatch.undo()
    slow_candidates(monkeypatch)
    searches = count_searches(monkeypatch)
    begin_rechecks(loop)
    while loop._has_worked():
        pass
    found = history(store, asked)[-1]
    assert searches and found.candidate.variant == EAGER and found.reason == "no_gain"
    assert found.detail.startswith("raced again after 40 days; before, it gained ")


def test_what_fails_leaves_the_decision_as_it_was(
    loop: TuningLoop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(chain_form(6, 256), (700,), calls=1)
    before = tuned_long_ago(loop, store, asked)
    monkeypatch.setattr(NodeBenchmarks, "race", lambda *_: 1 / 0)
    begin_rechecks(loop)
    while loop._has_worked():
        pass
    assert history(store, asked) == [before] and store.queue.length().failed == 0


def test_what_was_undecided_is_raced_again_once_the_script_has_ended(loop: TuningLoop, store: Store) -> None:
    """Also where no run has used it since; once by one daemon."""
    asked = request(chain_form(5, 256), (700,), calls=1)
    store.queue.add([asked])
    assert loop.drain(lambda done, total: None).left == 0
    first = history(store, asked)[-1]
    undecided = replace(first, candidate=Candidate(EAGER), reason="undecided", speedup=1.1, compile_key=None)
    store.results.put_decision(undecided)
    begin_rechecks(loop)
    assert loop._has_worked()
    found = history(store, asked)[-1]
    assert found.reason in ("won", "undecided") and found != undecided, "on a busy machine, this race is as unsure"
    assert found.detail.startswith("raced again while no script ran; before, 1.10x was not sure; ")
    store.results.put_decision(undecided)
    while loop._has_worked():
        pass
    assert history(store, asked)[-1].reason == "undecided"


def test_what_was_raced_on_one_thread_is_raced_on_all_once_no_script_runs(
    loop: TuningLoop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_candidates(monkeypatch)
    begin_rechecks(loop)
    asked = request(chain_form(10, 256), (700,), calls=1, threads=2)
    store.queue.add([asked])
    assert loop.drain(lambda done, total: None).left == 0
    before = replace(history(store, asked)[-1], raced_threads=1)
    assert before.reason == "won"
    store.results.put_decision(before)
    loop._rechecks.look_again()
    while loop._has_worked():
        pass
    *_, last, again = history(store, asked)
    assert last == before and again.reason == "won", "once by one daemon"
    words = f"raced again because others used the cores; before, it gained {before.speedup:.2f}x; "
    assert again.detail.startswith(words)


def test_a_search_for_the_sizes_that_come_now(loop: TuningLoop, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(chain_form(9, 256), (1000,), calls=1)
    store.queue.add([asked])
    assert loop.drain(lambda done, total: None).left == 0
    store.results.put_decision(
        replace(history(store, asked)[-1], reason="won")
    )  # on a busy machine it may be undecided
    run = store.runs.start(RunStart("train.py", cpu_device(), asked.key.versions, "off", 1, {}))
    shapes = (ObservedShape((520,), 2 * recheck.DRIFT_CALLS),)
    use = NodeUse(asked.key.fusion_id, asked.node, "a", "b", asked.bucket, 9, 9, 1.0, 0.5, shapes, "")
    store.nodes.put_uses(run, [use])
    searches = count_searches(monkeypatch)
    begin_rechecks(loop)
    while loop._has_worked():
        pass
    again = history(store, asked)[-1]
    assert searches and again.detail.startswith("raced again because calls have 0.52 times the sizes; before, ")
    measured = store.results.measurements(asked.key.fusion_id)
    assert {item.measurement.symbol_values for item in measured} >= {(520,)}


def test_never_beyond_its_time_and_seldom_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now: list[float] = [0.0]
    asked: list[float] = []
    with Store.open(tmp_path / "store.sqlite3") as store:
        for name in ("take", "take_drifted"):
            monkeypatch.setattr(store.old_decisions, name, lambda *_, **__: asked.append(now[0]))
        rechecks = Rechecks(store, 30.0, ["cpu:"], ["v"], "", clock=lambda: now[0])
        for at in (0.0, 1.0, LOOK_SECONDS - 1.0, LOOK_SECONDS, LOOK_SECONDS + 1.0):
            now[0] = at
            assert rechecks.next() is None
        assert asked == [0.0] * 4 + [LOOK_SECONDS] * 4, "undecided, old, for other sizes, on fewer threads"
        rechecks.look_again()
        assert rechecks.next() is None and len(asked) == 12
        rechecks.charge(RECHECK_SECONDS)
        now[0] = 9 * LOOK_SECONDS
        assert rechecks.next() is None and len(asked) == 12
        assert Rechecks(store, 0.0, ["cpu:"], ["v"], "").next() is None and len(asked) == 12
