"""History is bounded by age and by bytes; what later runs learn from stays."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest
from store_records import decision, kernel, request, start, steps, use

from autofuse.cli.app import parse
from autofuse.db import history, old_runs, thinning
from autofuse.db.rows import SettingTrial
from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.commands import script_of
from autofuse.ir.records import Event, Refusal, RootRecord, RunTotals, StepSample
from autofuse.report.statistics import measure_gain
from autofuse.startup.script import Target

DAY = 86400.0
ALL = 1 << 30  # runs


@pytest.fixture
def runs(store: Store) -> list[int]:
    """Three runs with all kinds of details, the second still running."""
    found = []
    for number in range(3):
        run_id = store.runs.start(start(f"run{number}.py"))
        store.steps.add(run_id, steps(2000))
        store.nodes.put_uses(run_id, [use()])
        store.roots.put(run_id, RootRecord("Model", "Model", "eager", "too_small"))
        store.notes.add_event(run_id, Event("fallback", "an event"))
        if number != 1:
            store.runs.finish(run_id, RunTotals(steps=2000))
        found.append(run_id)
    store.queue.add([request(run_id=found[0])])
    store.kernels.put(kernel())
    store.results.put_decision(decision())
    return found


def details(store: Store, run_id: int) -> list[int]:
    return [len(store.steps.of_run(run_id)), len(store.nodes.uses(run_id)), len(store.notes.events(run_id))]


def test_details_of_old_runs_go_and_what_was_learnt_stays(
    store: Store, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.history.prune(90.0, 1 << 30, ALL) == 0
    began = history.now()
    monkeypatch.setattr(history, "now", lambda: began + 91 * DAY)
    monkeypatch.setattr(history, "LONGEST_RUN_SECONDS", 1000 * DAY)
    assert store.history.prune(90.0, 1 << 30, ALL) == 1
    assert [details(store, run_id) for run_id in runs] == [[0, 0, 0], [2000, 1, 1], [2000, 1, 1]]
    assert store.history.prune(90.0, 1 << 30, ALL) == 0, "once is enough"
    monkeypatch.setattr(history, "LONGEST_RUN_SECONDS", 30 * DAY)
    assert store.history.prune(90.0, 1 << 30, ALL) == 1, "one that was killed"
    assert details(store, runs[2]) == [2000, 1, 1], "the newest stays, however old"
    assert [run.totals.steps for run in store.runs.recent()] == [2000, 0, 2000]
    assert store.runs.last_seconds("run0.py") >= 0.0 and set(store.roots.known()) == {"Model"}
    assert len(store.results.decisions()) == 1 and store.kernels.get(kernel().key.digest) is not None
    assert store.queue.length().queued == 1


def test_the_oldest_go_until_the_bytes_are_few_enough(store: Store, runs: list[int]) -> None:
    before = store.history.size_bytes()
    assert store.history.prune(1e6, before, ALL) == 0
    assert store.history.prune(1e6, before - 1, ALL) == 1
    assert store.history.size_bytes() < before
    assert details(store, runs[0]) == [0, 0, 0]
    assert store.history.prune(1e6, 0, ALL) == 0, "the others are the newest, and one that runs"


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


def test_of_a_long_run_steps_are_thinned_and_the_gain_stays(store: Store) -> None:
    """Two roots whose sizes come in turns; eager takes 1.3 times as long, and all drifts."""
    draw = random.Random(0)

    def step(index: int) -> StepSample:
        root, held_out = ("A", "B")[index % 2], index % 50 == 7
        eager_us = 1000.0 * (1 + index / 40_000) * (2 if index % 4 == 0 else 1) * draw.gauss(1.0, 0.02)
        step_us = eager_us if held_out else eager_us / 1.3
        return StepSample(root, f"{index % 4}", held_out, 0 if held_out else 3, index // 2, step_us, 64)

    made = [step(index) for index in range(40_000)]
    run_id = store.runs.start(start())
    for first in range(0, 30_000, 700):
        store.steps.add(run_id, made[first : min(first + 700, 30_000)])
    kept, whole = store.steps.of_run(run_id), measure_gain(made[:30_000], 1.0)
    assert len(kept) <= 10_000
    assert {s for s in kept if s.held_out} == {s for s in made[:30_000] if s.held_out}
    one_in = store.runs.get(run_id).steps_one_in
    gain = measure_gain(kept, 1.0, one_in)
    assert one_in == 4 and gain.speedup.median == pytest.approx(whole.speedup.median, rel=0.01)
    assert gain.seconds_saved == pytest.approx(whole.seconds_saved, rel=0.02)
    assert gain.routed_steps == pytest.approx(whole.routed_steps, rel=0.01)
    assert gain.break_even_step == pytest.approx(whole.break_even_step, rel=0.05)
    for row, of_whole in zip(gain.rows, whole.rows, strict=True):
        assert row.routed == pytest.approx(of_whole.routed, rel=0.02), "no rhythm of the script's is lost"
    with Store.open(store.path) as other:  # as one that goes on with it
        other.steps.add(run_id, made[30_000:])
        assert len(other.steps.of_run(run_id)) <= 10_000 and other.runs.get(run_id).steps_one_in == 8


def test_however_long_a_run_is_its_gain_is_known(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a hundred of 40 million calls, five neighbourhoods at a time; eager takes 1.3 times as long."""
    monkeypatch.setattr(thinning, "MOST_STEPS", 380)
    draw = random.Random(0)

    def step(index: int) -> StepSample:
        held_out = index % 10 == 3
        step_us = draw.gauss(1000.0, 20.0) / (1.0 if held_out else 1.3)
        return StepSample("A", "sizes", held_out, 0 if held_out else 3, index, step_us, 64)

    stretches = [range(first, first + 640) for first in range(0, 40_000_000, 64_000)]
    run_id = store.runs.start(start())
    for number in range(0, len(stretches), 25):
        store.steps.add(run_id, [step(i) for stretch in stretches[number : number + 25] for i in stretch])
    kept, one_in = store.steps.of_run(run_id), store.runs.get(run_id).steps_one_in
    gain = measure_gain(kept, 1.0, one_in)
    held_out = sum(sample.held_out for sample in kept)
    assert held_out <= 380 and len(kept) - held_out <= 380
    assert one_in == 1024, "one in 128 held-out steps"
    assert gain.speedup.pairs == held_out - 1 and gain.speedup.median == pytest.approx(1.3, rel=0.01)
    assert gain.seconds_saved == pytest.approx(360_000 * 0.3e-3 / 1.3, rel=0.1)
    assert gain.held_out_steps == pytest.approx(40_000, rel=0.1)
    assert gain.routed_steps == pytest.approx(360_000, rel=0.1)


@pytest.mark.parametrize(("most", "one_in", "routed", "held_out"), [(300, 8, 245, 40), (50, 64, 31, 5)])
def test_a_long_run_of_many_roots_is_thinned_too(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int, one_in: int, routed: int, held_out: int
) -> None:
    """Each of which is called once: their calls have one number."""
    monkeypatch.setattr(thinning, "MOST_STEPS", most)
    run_id = store.runs.start(start())
    store.steps.add(run_id, [StepSample(f"root{n}", "sizes", n % 50 == 0, 3, 0, 100.0) for n in range(2000)])
    kept = [sample.held_out for sample in store.steps.of_run(run_id)]
    assert kept.count(False) == pytest.approx(routed, abs=3) and kept.count(True) == pytest.approx(held_out, abs=1)
    assert store.runs.get(run_id).steps_one_in == one_in


def test_an_ending_session_removes_a_little_and_leaves_the_rest(
    store: Store, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PIECE", 900)
    assert store.history.prune(1e6, 0, ALL, most_pieces=2) == 0
    assert details(store, runs[0]) == [200, 1, 1]
    assert store.history.prune(1e6, 0, ALL, most_pieces=2) == 1
    assert details(store, runs[0]) == [0, 0, 0] and details(store, runs[2]) == [2000, 1, 1]


def test_of_old_command_lines_the_scripts_name_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "examples/train.py --token s3cret"
    for command in (secret, "-m pkg.train --token s3cret", secret):
        store.runs.finish(store.runs.start(start(command)), RunTotals())
    running = store.runs.start(start(secret))
    store.trials.put(SettingTrial("s", "v", 2.0, 1.0, 2.0, 1.9, 2.1, "on", "won", "cpu", secret))
    began = history.now()
    monkeypatch.setattr(history, "now", lambda: began + 91 * DAY)
    monkeypatch.setattr(history, "LONGEST_RUN_SECONDS", 1000 * DAY)
    assert store.history.prune(1e6, 1 << 30, ALL) == 0 and store.runs.get(1).command == secret
    store.history.prune(90.0, 1 << 30, ALL, most_pieces=0)
    assert [run.command for run in store.runs.recent()] == [secret, "train.py", "-m pkg.train", "train.py"]
    (trial,) = store.trials.standing()
    assert trial.workload == "train.py" and store.runs.get(running).command == secret


def test_a_scripts_name_may_hold_blanks_and_quotes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [
        Target("my runs/train.py", ("--lr", "1")),
        Target("runs/my train.py", ("--note", "a b")),
        Target("bob's/train.py", ("--note", "it's")),
        Target("pkg.train", ("--note", "a b"), is_module=True),
    ]
    for target in targets:
        store.runs.finish(store.runs.start(start(target.command)), RunTotals())
    for older in ("bob's/train.py --note it's", "my runs/train.py --lr 1", "'my --lr 1"):
        store.runs.finish(store.runs.start(start(older)), RunTotals())
    began = history.now()
    monkeypatch.setattr(history, "now", lambda: began + 91 * DAY)
    names = ["train.py", "'my train.py'", "train.py", "-m pkg.train", "train.py", "my", shlex.quote("'my")]
    for _ in range(2):
        store.history.prune(90.0, 1 << 30, ALL, most_pieces=0)
        assert [run.command for run in reversed(store.runs.recent())] == names
    assert [script_of(target.command) for target in targets] == names[:4], "as long as the arguments are there, too"


def test_a_run_that_was_only_captured_loses_its_details_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = store.runs.start(start("short.py"))
    store.notes.add_refusals(run_id, [Refusal("size_limit", False, "add", "too large")])
    store.runs.finish(run_id, RunTotals())
    began = history.now()
    monkeypatch.setattr(history, "now", lambda: began + 91 * DAY)
    assert store.history.prune(90.0, 1 << 30, ALL) == 1
    assert not store.notes.refusals(run_id) and store.history.prune(90.0, 1 << 30, ALL) == 0


def test_a_removed_run_goes_whole_and_what_later_runs_use_stays(store: Store, runs: list[int]) -> None:
    store.roots.put(runs[0], RootRecord("Other", "Other", "eager", "slower_than_eager"))
    store.roots.put(runs[2], RootRecord("Other", "Other", "observing", "not_yet"))
    asked = store.queue.requests()
    before = (store.results.decisions(), store.nodes.known(), asked, store.roots.known())
    store.history.remove([runs[0]])
    assert [run.id for run in store.runs.recent()] == [runs[2], runs[1]]
    assert store.runs.latest(command="run0.py") is None and store.runs.last_seconds("run0.py") == 0.0
    with pytest.raises(StoreError, match="type: autofuse runs"):
        store.runs.get(runs[0])
    assert details(store, runs[0]) == [0, 0, 0]
    assert (store.results.decisions(), store.nodes.known(), store.queue.requests(), store.roots.known()) == before
    assert store.roots.known()["Other"].reason == "slower_than_eager"
    assert store.kernels.get(kernel().key.digest) is not None
    taken = store.queue.take()
    assert taken is not None and taken.shapes == request(run_id=runs[0]).shapes


def test_the_number_of_a_removed_run_is_not_given_again(store: Store, runs: list[int]) -> None:
    store.history.remove(runs)
    assert store.runs.recent() == [] and store.runs.latest() is None
    assert store.runs.start(start("next.py")) > max(runs)


@pytest.fixture
def many(store: Store) -> list[int]:
    """Thirty runs of two models, of which the third run alone knows that one is not worth fusing."""
    found = []
    for number in range(30):
        run_id = store.runs.start(start(f"run{number}.py"))
        store.steps.add(run_id, steps(5))
        store.roots.put(run_id, RootRecord("Model", "Model", "observing", ""))
        store.roots.put(run_id, RootRecord("Other", "Other", "eager" if number == 2 else "observing", ""))
        store.queue.add([request(run_id=run_id)])
        store.runs.finish(run_id, RunTotals(steps=5))
        found.append(run_id)
    return found


def test_runs_beyond_so_many_go_and_what_was_learnt_stays(store: Store, many: list[int]) -> None:
    known, asked = store.roots.known(), store.queue.requests()
    assert known["Other"].state == "eager" and asked[0].calls > 0
    store.history.prune(90.0, 1 << 30, 10)
    assert [run.id for run in store.runs.recent()] == [*many[:-11:-1], many[2]], "the newest, and one that knows more"
    assert store.roots.known() == known
    store.history.prune(90.0, 1 << 30, 10)
    assert len(store.runs.recent()) == 11, "once is enough"
    assert [row.calls for row in store.queue.requests()] == [row.calls for row in asked]
    taken = store.queue.take()
    assert taken is not None and taken.calls == asked[0].calls
    assert sum(shape.calls for shape in taken.shapes) == 30 * sum(shape.calls for shape in request().shapes)


def test_one_call_of_a_run_that_ends_removes_a_piece_only(
    store: Store, many: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RUNS", 5)
    store.history.prune(90.0, 1 << 30, 10, most_pieces=1)
    assert len(store.runs.recent()) == 25


def test_runs_that_may_still_be_running_stay(store: Store, runs: list[int]) -> None:
    store.history.prune(90.0, 1 << 30, 1)
    assert [run.id for run in store.runs.recent()] == [runs[2], runs[1]]
    assert details(store, runs[1]) == [2000, 1, 1]


def test_events_of_daemons_go_by_age_and_number(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_runs, "MOST_EVENTS", 3)
    for number in range(5):
        store.notes.add_event(None, Event("daemon", f"event {number}"))
    store.history.prune(90.0, 1 << 30, ALL)
    assert [row.event.message for row in store.notes.events()] == ["event 2", "event 3", "event 4"]
    began = old_runs.now()
    monkeypatch.setattr(old_runs, "now", lambda: began + 91 * DAY)
    store.history.prune(90.0, 1 << 30, ALL)
    assert not store.notes.events()
