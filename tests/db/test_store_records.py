"""Every record that goes into a store comes out equal, in a process that opens it later."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_records import DEVICE, FORM, VERSIONS, decision, key, measurement, request, start, steps, use
from stores import another

from autofuse.db.decision_file import lines_of
from autofuse.db.proposals import Proposal
from autofuse.db.rows import DaemonState, SettingTrial
from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.records import (
    Bucket,
    Candidate,
    DeviceInfo,
    DimHistogram,
    Event,
    Measurement,
    OpProfile,
    Refusal,
    RootRecord,
    RunTotals,
    StepSample,
    make_config,
)  # fmt: skip


def test_run_and_totals(both: Store) -> None:
    first, second = both.runs.start(start()), both.runs.start(start("other.py"))
    assert (first, second) == (1, 2)
    both.runs.update_totals(first, RunTotals(steps=3))
    both.runs.finish(first, RunTotals(steps=5, fused_calls=7, exit_code=3))
    with another(both) as reader:
        run = reader.runs.get(first)
        assert (run.command, run.device, run.mode, run.settings) == ("train.py", DEVICE, "wait", {"tune": "wait"})
        assert run.totals == RunTotals(steps=5, fused_calls=7, exit_code=3)
        assert run.finished_at is not None and run.finished_at >= run.started_at
        assert reader.runs.get(second).finished_at is None
        assert [row.id for row in reader.runs.recent()] == [2, 1]
        with pytest.raises(StoreError, match=r"expected run 9 .* found ids up to 2"):
            reader.runs.get(9)


def test_latest_run_with_steps_skips_runs_that_timed_none(both: Store) -> None:
    assert both.runs.latest() is None
    timed, _ = both.runs.start(start()), both.runs.start(start())
    both.steps.add(timed, steps(2))
    latest, latest_timed = both.runs.latest(), both.runs.latest(with_steps=True)
    assert latest is not None and latest.id == 2
    assert latest_timed is not None and latest_timed.id == timed


def test_command_with_bytes_that_are_not_utf8(both: Store) -> None:
    run_id = both.runs.start(start(os.fsdecode(b"caf\xe9.py")))
    assert both.runs.get(run_id).command == "caf\\udce9.py"


@given(
    st.lists(
        st.builds(
            StepSample, st.text("ABé", max_size=2), st.text(max_size=4).filter(lambda t: t.isprintable()),
            st.booleans(), st.integers(0, 1 << 40), st.integers(0, 1 << 60),
            st.floats(allow_nan=False),
        ),
        max_size=20,
    )
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_steps_come_back_equal_and_in_order(both: Store, samples: list[StepSample]) -> None:
    run_id = both.runs.start(start())
    both.steps.add(run_id, samples[:5])
    both.steps.add(run_id, samples[5:])
    assert both.steps.of_run(run_id) == samples


configs = st.dictionaries(st.sampled_from(["unroll", "threads", "omp"]), st.integers(-9, 9) | st.booleans() | st.text())


@given(st.lists(configs, min_size=1, max_size=5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_measurements_come_back_equal(both: Store, points: list[dict[str, int | str | bool]]) -> None:
    before = len(both.results.measurements("a" * 64))
    made = [
        Measurement(Candidate("c_specialised", make_config(point)), "crash", (3, 4), message="SIGSEGV")
        for point in points
    ]
    both.results.put_measurements(key(), made)
    stored = both.results.measurements("a" * 64)[before:]
    assert [(row.key, row.measurement) for row in stored] == [(key(), item) for item in made]


def test_node_uses_keep_the_last_counters_of_a_run(both: Store) -> None:
    run_id, other = both.runs.start(start()), both.runs.start(start())
    both.nodes.put_uses(run_id, [use(calls=1), use("b" * 64, share=0.5)])
    both.nodes.put_uses(run_id, [use(calls=9)])
    both.nodes.put_uses(other, [use(calls=5)])
    assert both.nodes.uses(run_id) == [use("b" * 64, share=0.5), use(calls=9)]
    assert both.nodes.uses(other) == [use(calls=5)]
    assert len(both.nodes.uses(fusion_id="a" * 64)) == 2
    assert [node.fusion_id[0] for node in both.nodes.known()] == ["a", "b"]


def test_profiles_keep_the_last_counters_of_a_run(both: Store) -> None:
    run_id = both.runs.start(start())
    small = OpProfile(
        "aten.add.Tensor", "blocks.0", "forward", ((4, 8), (8,)), ("float32",) * 2, ((8, 1), (1,)), "cpu", 3, 9.0
    )
    large = replace(small, shapes=((4, 16), (16,)), calls=1, time_us=4.0, producers=("aten.mm.default",))
    backward = replace(small, phase="backward", time_us=1.0)
    both.profiles.put_ops(run_id, [small, large, backward])
    both.profiles.put_ops(run_id, [replace(small, calls=6, time_us=18.0)])
    assert both.profiles.ops(run_id) == [replace(small, calls=6, time_us=18.0), large, backward]

    histogram = DimHistogram("Model", "args[0]", 1, ((64, 9), (128, 3)), 1)
    both.profiles.put_dims(run_id, [histogram, replace(histogram, dim=0)])
    both.profiles.put_dims(run_id, [replace(histogram, tail_calls=2)])
    assert both.profiles.dims(run_id) == [replace(histogram, tail_calls=2), replace(histogram, dim=0)]


def test_roots_are_known_across_runs_of_the_same_device(both: Store) -> None:
    root = RootRecord("Model[8x8]", "Model", "observing", "not_yet", dynamic_dims=(("args[0]", 1),))
    captured = replace(root, state="captured", reason="paid_off", capture_seconds=5.0)
    first = both.runs.start(start())
    for record in (root, replace(root, calls=5), captured):
        both.roots.put(first, record)
    elsewhere = both.runs.start(start(device=DeviceInfo("cpu", "Other", 8, "avx2")))
    both.roots.put(elsewhere, replace(root, state="eager"))

    later = both.runs.start(start())
    both.roots.put(later, replace(root, calls=2))
    assert both.roots.known() == {"Model[8x8]": captured}, "a run too short to decide anything takes nothing back"
    with another(both) as reader:
        assert reader.roots.known()["Model[8x8]"].state == "eager"
        assert reader.roots.known(DEVICE.key, VERSIONS)["Model[8x8]"] == captured
        assert reader.roots.known(DEVICE.key, "torch 9") == {}
        assert [change.state for change in reader.roots.changes("Model[8x8]")] == [
            "observing",
            "captured",
            "eager",
            "observing",
        ]
        assert reader.roots.of_run(first) == [captured]


def test_logs_only_grow(both: Store) -> None:
    run_id = both.runs.start(start())
    refusal = Refusal("random_op", False, "bernoulli", "eager's stream is kept", 0, "train.py:3")
    both.notes.add_refusals(run_id, [refusal])
    both.notes.add_refusals(run_id, [refusal, replace(refusal, accepted=True)])
    assert len(both.notes.refusals(run_id)) == 3 and both.notes.refusals(run_id)[0] == refusal
    both.notes.add_event(run_id, Event("fallback", "x", {"node": "af_1"}))
    both.notes.add_event(None, Event("daemon_start", "y"))
    assert [row.event.kind for row in both.notes.events()] == ["fallback", "daemon_start"]
    assert [row.event for row in both.notes.events(run_id)] == [Event("fallback", "x", {"node": "af_1"})]
    assert [row.event.kind for row in both.notes.events(limit=1)] == ["daemon_start"]


def test_setting_trials_the_newest_stands(both: Store) -> None:
    run_id = both.runs.start(start())
    trial = SettingTrial("malloc", "1GiB", 80.0, 70.0, 1.14, 1.1, 1.2, "on", "won", DEVICE.key, "train.py")
    both.trials.put(replace(trial, ratio=1.0, decision="off"), run_id)
    both.trials.put(trial)
    both.trials.put(replace(trial, workload="other.py"))
    assert both.trials.standing(DEVICE.key, workload="train.py") == [trial]
    assert len(both.trials.standing()) == 2
    assert [row.decision for row in both.trials.standing(run_id=run_id)] == ["off"]


def test_decisions_keep_history_and_the_newest_stands(both: Store) -> None:
    first = both.results.put_decision(decision(speedup=1.2))
    second = both.results.put_decision(decision("b" * 64))
    third = both.results.put_decision(decision(speedup=1.8))
    assert both.results.decisions(DEVICE.key, VERSIONS) == [
        (second, decision("b" * 64)),
        (third, decision(speedup=1.8)),
    ]
    assert both.results.decisions(DEVICE.key, VERSIONS, since_id=second) == [(third, decision(speedup=1.8))]
    assert both.results.decisions(DEVICE.key, VERSIONS, since_id=third) == []
    assert both.results.decisions("cpu:other", VERSIONS) == []
    assert [row.id for row in both.results.history("a" * 64)] == [first, third]


def test_what_is_new_comes_in_pieces(both: Store) -> None:
    both.results.put_measurements(key("b" * 64), [measurement(unroll=1)])
    both.results.put_measurements(key(), [measurement(unroll=2), measurement(unroll=4)])
    for name in "abc":
        both.results.put_decision(decision(name * 64))
    since, sizes = 0, []
    while rows := both.results.measurements_since(since, 2):
        sizes += [dict(row.measurement.candidate.config)["unroll"] for _, row in rows]
        since = rows[-1][0]
    assert sizes == [1, 2, 4]
    ((first, _), (second, _)) = both.results.decisions(most=2)
    assert [found for _, found in both.results.decisions(since_id=second, most=2)] == [decision("c" * 64)]
    assert [row.id for row in both.results.history(newest=2)] == [second, second + 1] and first < second


def test_decisions_that_a_file_names(both: Store, tmp_path: Path) -> None:
    slower = replace(decision(), candidate=Candidate("c_generic", make_config({"unroll": 8})))
    number = both.results.put_decision(decision())
    both.results.put_decision(slower)
    named = [decision(), decision("b" * 64)]
    (tmp_path / "named.jsonl").write_text("\n".join(lines_of(named)))
    found = both.results.named_in(tmp_path / "named.jsonl")
    assert found.rows == ((number, decision()),) and found.missing == (key("b" * 64),)


def test_what_became_of_proposals(both: Store) -> None:
    keys = [key(name * 64) for name in "abc"]
    made = Proposal.of(decision())
    both.results.put_decision(decision("c" * 64))
    assert both.proposals.put(dict.fromkeys(keys, made)) == 2, "on one there is a decision"
    assert both.proposals.get(keys[0]) == made and both.proposals.get(keys[2]) is None
    both.proposals.close(keys[0], "overridden", "words")
    assert both.proposals.put({keys[0]: made}) == 0 and both.proposals.get(keys[0]) is None
    assert both.proposals.verdicts(keys) == {keys[0].digest: "overridden", keys[1].digest: "open"}
    assert both.proposals.counts() == {"overridden": 1, "open": 1}
    assert both.proposals.line(keys[0]) == "words" and both.proposals.line(keys[2]) == ""


def test_marks_say_how_far_rows_went(both: Store) -> None:
    assert both.marks.get("a server", "decisions") == 0
    both.marks.put("a server", "decisions", 7)
    both.marks.put("a server", "decisions", 9)
    both.marks.put("another", "decisions", 1)
    assert both.marks.get("a server", "decisions") == 9 and both.marks.get("another", "measurements") == 0
    with another(both) as reader:
        assert reader.marks.get("another", "decisions") == 1


def test_a_decision_on_a_part_counts_for_the_run_that_asked_for_the_group(both: Store) -> None:
    run_id, other = both.runs.start(start()), both.runs.start(start())
    both.queue.add([request("a" * 64, run_id=run_id)])
    asked = both.results.put_decision(decision("a" * 64))
    part = both.results.put_decision(decision("b" * 64), run_id)
    nobodys = both.results.put_decision(decision("c" * 64), 77)  # a run that is deleted
    assert [row.id for row in both.results.history(run_id=run_id)] == [asked, part]
    assert both.results.history(run_id=other) == []
    assert [row.run_id for row in both.results.history() if row.id == nobodys] == [None]


def test_daemon_state(both: Store) -> None:
    assert both.daemon.state() is None
    both.daemon.heartbeat(DaemonState(1, "host", 5.0, "idle"))
    both.daemon.heartbeat(DaemonState(1, "host", 5.0, "tuning", "af_1 s0=4", 3, 2, 1, {"rss": 9}))
    state = both.daemon.state()
    assert state is not None and state.heartbeat_at > 0
    assert replace(state, heartbeat_at=0.0) == DaemonState(1, "host", 5.0, "tuning", "af_1 s0=4", 3, 2, 1, {"rss": 9})


def test_data_version_tells_of_others_writes(store: Store, path: Path) -> None:
    version = store.data_version()
    store.results.put_decision(decision())
    assert store.data_version() == version
    with Store.open(path) as other:
        other.results.put_decision(decision())
    assert store.data_version() != version


def test_refused_rows_change_nothing(both: Store) -> None:
    with pytest.raises(StoreError, match="refused a request"):
        both.steps.add(77, steps(1))  # no such run
    run_id = both.runs.start(start())
    with pytest.raises(StoreError):
        both.notes.add_refusals(run_id, [Refusal("a", True, "b", "c"), Refusal("a", True, "b", "c", 1 << 70)])
    assert both.notes.refusals(run_id) == []


def test_closed_and_readonly_stores_say_so(store: Store, path: Path) -> None:
    with Store.open(path, readonly=True) as reader, pytest.raises(StoreError, match="opened for reading only"):
        reader.results.put_decision(decision())
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.runs.recent()


def test_store_imports_neither_torch_nor_alembic(path: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from autofuse.db.store import Store\n"
        f"for _ in range(2): Store.open(Path({str(path)!r})).close()\n"
        "assert 'alembic' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bucket_and_form_survive(both: Store) -> None:
    exact = Bucket(((4, 4), (65, 128)))
    both.results.put_decision(decision(of=exact))
    assert both.results.decisions()[0][1].bucket == exact
    both.results.put_measurements(key(), [measurement(unroll=2)])
    run_id = both.runs.start(start())
    both.nodes.put_uses(run_id, [use()])
    assert both.nodes.known("a" * 64)[0].form == FORM
