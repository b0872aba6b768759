"""Reports of a fabricated run: JSON keys and numbers, and what a person reads at 80 and 100 columns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from report_records import (
    COLD,
    DEVICE,
    GELU,
    HOT,
    LOSS,
    NORM,
    VERSIONS,
    decision,
    fill,
    key,
    real_steps,
    sample,
    use,
)  # fmt: skip
from rich.console import Console

from autofuse.db import thinning
from autofuse.db.rows import RequestRow, SettingTrial
from autofuse.db.store import Store
from autofuse.errors import StoreError
from autofuse.ir.records import EAGER, Bucket, Event, RootRecord, RunStart, RunTotals, TuneRequest
from autofuse.report import wording
from autofuse.report.as_json import report_to_json
from autofuse.report.json_types import SCHEMA_VERSION
from autofuse.report.report import Report, decision_for, load_report, node_line, tuning_cost
from autofuse.report.terminal import MAX_NODES, render_report

TOTALS = {
    "steps", "fused_calls", "unfused_calls", "speedup_median", "speedup_low", "speedup_high", "speedup_pairs",
    "held_out_steps", "tuning_seconds", "paused_seconds", "seconds_saved", "break_even_step",
    "observer_overhead_percent", "capture_seconds",
}  # fmt: skip
NODE = {
    "node", "operations", "bucket", "calls", "time_share", "unfused_us", "fused_us", "speedup", "speedup_low",
    "speedup_high", "variant", "decision", "reason", "source",
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def text_of(report: Report, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    render_report(report, console)
    return console.export_text()


def words_of(report: Report, width: int = 100) -> str:
    """The text on one line, frames left out, so that wrapping does not matter."""
    return " ".join(text_of(report, width).replace("│", " ").split())


def start(store: Store, mode: str = "background") -> int:
    return store.runs.start(RunStart("train.py", DEVICE, VERSIONS, mode, 1))


# ---- JSON ---------------------------------------------------------------------------------------------


def test_json_of_a_run(store: Store) -> None:
    run_id = fill(store)
    data = report_to_json(load_report(store))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data) == {
        "schema_version", "store", "run", "totals", "nodes", "steps", "graphs", "graph_sum", "fusion", "roots",
        "settings", "refusals", "events", "queue", "memory", "operators", "strict", "live_races", "decided",
    }  # fmt: skip
    assert data["schema_version"] == SCHEMA_VERSION == 1
    assert data["run"]["id"] == run_id and data["run"]["mode"] == "wait" and data["run"]["exit_code"] == 0

    totals = data["totals"]
    assert set(totals) == TOTALS
    assert (totals["steps"], totals["fused_calls"], totals["unfused_calls"]) == (400, 16560, 1104)
    assert totals["tuning_seconds"] == pytest.approx(3 * 6.5) and totals["paused_seconds"] == 21.5
    assert totals["capture_seconds"] == 5.4
    assert totals["observer_overhead_percent"] == pytest.approx(100 * 0.11 / 33.5)
    assert totals["speedup_median"] == pytest.approx(1.34, abs=0.04)
    assert 1.2 < totals["speedup_low"] <= totals["speedup_median"] <= totals["speedup_high"] < 1.5
    assert totals["held_out_steps"] == 15 and totals["speedup_pairs"] == 15
    assert totals["seconds_saved"] == pytest.approx(8, abs=1) and totals["break_even_step"] is None  # 26.9 s of cost

    assert [set(row) for row in data["nodes"]] == [NODE] * 4
    first, second, third, last = data["nodes"]
    assert first["node"] == GELU[1] and first["operations"] == "add + gelu + mul"
    assert first["bucket"] == "s0=8 s1=129..256" and first["calls"] == 2944 and first["time_share"] == 0.123
    assert first["unfused_us"] == 151.25 and first["fused_us"] == pytest.approx(151.25 / 2.16)
    assert (first["speedup"], first["speedup_low"]) == (2.16, 2.12)
    assert (first["variant"], first["decision"], first["reason"]) == ("c_specialised", "fused", "won")
    assert first["source"] == "train_lm.py:41 x = x + self.mlp(self.norm(x))"
    assert second["variant"] == "c_generic"
    assert third["bucket"] == "s0=8 s1=65..128" and third["decision"] == "queued" and third["reason"] == "waiting"
    assert third["unfused_us"] == 150.0 and third["fused_us"] is None and third["variant"] is None
    assert (last["decision"], last["variant"], last["reason"]) == ("eager", EAGER, "below_margin")

    assert [root["state"] for root in data["roots"]] == ["captured", "eager"]
    assert data["roots"][0]["capture_causes"] == {"imports": 1.1, "tracing": 4.25, "slow steps": 0.04}
    assert data["settings"][0]["speedup"] == 1.17 and data["settings"][0]["decision"] == "on"
    assert [(line["code"], line["accepted"], line["count"]) for line in data["refusals"]] == [
        ("single_op", False, 4), ("random_op", False, 1), ("fused", True, 9),
    ]  # fmt: skip
    assert data["events"][0]["kind"] == "kernel_unusable"
    assert data["queue"] == {"queued": 1, "running": 0, "done": 3, "failed": 0}
    assert {row["hot"] for row in data["steps"]} == {True}


def test_json_of_an_empty_store_has_all_keys(store: Store) -> None:
    data = report_to_json(load_report(store))
    assert data["run"] is None and data["nodes"] == [] and set(data["totals"]) == TOTALS
    assert data["totals"]["steps"] == 0 and data["totals"]["speedup_median"] is None
    assert data["totals"]["break_even_step"] is None and data["totals"]["observer_overhead_percent"] is None


def test_json_has_no_word_for_nan(store: Store) -> None:
    run_id = start(store)
    store.runs.finish(run_id, RunTotals(run_seconds=float("inf"), observer_seconds=float("inf")))
    data = report_to_json(load_report(store))
    assert data["totals"]["observer_overhead_percent"] is None
    json.dumps(data, allow_nan=False)


# ---- which run, and what it is charged with -----------------------------------------------------------


def test_the_newest_run_with_steps_is_reported(store: Store) -> None:
    timed = fill(store)
    untimed = start(store)
    report = load_report(store)
    assert report.run is not None and report.run.id == timed
    report = load_report(store, untimed)
    assert report.run is not None and report.run.id == untimed
    with pytest.raises(StoreError, match="expected run 7"):
        load_report(store, 7)


def test_a_second_run_is_charged_with_no_tuning_and_pays_at_once(store: Store) -> None:
    fill(store)
    second = start(store, "off")
    store.steps.add(second, real_steps(200))
    store.runs.finish(second, RunTotals(200, 9000, 100, capture_seconds=0.0))
    totals = load_report(store, second).totals
    assert totals.tuning_seconds == 0.0
    assert totals.break_even_step is not None and totals.break_even_step < 5


def test_tuning_costs_what_the_script_lost_to_it() -> None:
    modes = ("wait", "background", "after")
    assert [tuning_cost(mode, 20.0, 31.0) for mode in modes] == [31.0, 20.0, 0.0]
    assert tuning_cost("wait", 20.0, 0.0) == 20.0  # of an older version, which did not count the wait


def test_decision_for_a_bucket() -> None:
    wide, exact = Bucket(((8, 8), (129, 512))), Bucket(((8, 8), (256, 256)))
    older, newer = decision(GELU, HOT, 1.1), decision(GELU, HOT, 1.4)
    assert decision_for(HOT, [older, newer, decision(GELU, wide, 3.0)]) == newer
    assert decision_for(exact, [older]) == older  # the bucket lies within the decided one
    assert decision_for(wide, [older]) is None
    assert decision_for(Bucket(()), [older]) is None
    assert decision_for(COLD, []) is None


@pytest.mark.parametrize(
    ("status", "shown", "reason"),
    [("queued", "queued", "waiting"), ("running", "running", "tuning"), ("failed", "failed", "failed"),
     ("done", "none", "not_asked")],
)  # fmt: skip
def test_an_undecided_node_says_where_its_request_stands(status: str, shown: str, reason: str) -> None:
    request = RequestRow(key(GELU, HOT), status, 5, 1.0, "gcc died", 0.0)  # type: ignore[arg-type]
    line = node_line(use(GELU, HOT, 5, 0, 0.1), None, request)
    assert (line.decision, line.reason, line.detail) == (shown, reason, "gcc died")
    assert node_line(use(GELU, HOT, 5, 0, 0.1), None, None).decision == "none"


def test_settings_of_the_same_script_whatever_its_arguments(store: Store) -> None:
    trial = SettingTrial("process.malloc", "x", 2.0, 1.0, 2.0, 1.9, 2.1, "on", "won", "m", "/x/train.py --lr 1")
    store.trials.put(trial)
    store.trials.put(replace(trial, workload="-m train"))
    store.trials.put(replace(trial, workload="other --config train.py"))
    start(store)
    assert load_report(store).settings == (trial,)


# ---- for people ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal(store: Store, width: int) -> None:
    fill(store)
    text = text_of(load_report(store), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for fact in ("12.3 %", "151.2 µs", "70.0 µs", "2.16x", "2.12–2.21", "s0=8 s1=129..256", "queued", "1.17x", "GPT"):
        assert fact in text, fact


def test_a_gain_in_words(store: Store) -> None:
    fill(store)
    text = words_of(load_report(store), 80)
    assert "faster steps than eager (95 % interval" in text and "15 comparisons)" in text
    assert "16,560 of 17,664 ran fused kernels (93.8 %)" in text
    assert "capture 5.4 s (imports 1.1 s, tracing 4.2 s), tuning 21.5 s while the script waited" in text
    assert "has not paid for its cost yet" in text
    assert "no candidate beat eager by the margin" in words_of(load_report(store), 160)
    assert "measured in separate processes; not part of the speedup above" in text
    assert "Next: autofuse daemon status" in text  # one bucket still waits


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.0, "No gain: 1.00x is not distinguishable from eager"), (0.8, "No gain: steps run at 0.80x of eager's speed")],
)
def test_no_gain_is_said_plainly(store: Store, ratio: float, verdict: str) -> None:
    fill(store, ratio)
    text = words_of(load_report(store))
    assert verdict in text and "faster steps" not in text
    if ratio < 1:
        assert "saved nothing:" in text


def test_too_few_held_out_steps_are_said(store: Store) -> None:
    run_id = start(store)
    store.steps.add(run_id, [sample(i, 100.0, held_out=i in (3, 9)) for i in range(12)])
    store.runs.finish(run_id, RunTotals(12, 100, 0))
    assert "(only 1 comparison: 5 make an interval)" in words_of(load_report(store))
    store.steps.add(start(store), [])
    run_id = start(store)
    store.steps.add(run_id, [sample(i, 100.0) for i in range(12)])
    store.runs.finish(run_id, RunTotals(12, 100, 0))
    assert "calls of a routed one. A longer run measures it." in words_of(load_report(store))
    store.runs.finish(run_id, RunTotals(12, 100, 0, exit_code=1))
    assert "calls of a routed one. The script ended with exit code 1 after 12 steps." in words_of(load_report(store))


def test_of_a_long_run_steps_are_counted_that_the_store_no_longer_has(store: Store) -> None:
    run_id = start(store)
    store.steps.add(run_id, [sample(i, 100.0, held_out=i % 50 == 7) for i in range(20_000)])
    store.runs.finish(run_id, RunTotals(20_000, 100, 0))
    (count,) = re.findall(r"timed: about ([\d,]+) with fused kernels, 399 held out", words_of(load_report(store)))
    assert int(count.replace(",", "")) == pytest.approx(19_600, rel=0.01)
    assert report_to_json(load_report(store))["run"]["steps_one_in"] == 4


def test_held_out_steps_are_counted_that_the_store_no_longer_has(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thinning, "MOST_STEPS", 300)
    run_id = start(store)
    store.steps.add(run_id, [sample(i, 100.0, held_out=i % 5 == 2) for i in range(20_000)])
    store.runs.finish(run_id, RunTotals(20_000, 100, 0))
    report = load_report(store)
    totals = report_to_json(report)["totals"]
    assert totals["held_out_steps"] == pytest.approx(4000, rel=0.1)
    assert report_to_json(report)["steps"][0]["held_out_steps"] == totals["held_out_steps"]
    assert f"fused kernels, about {totals['held_out_steps']:,} held out in eager" in words_of(report)


def test_an_empty_store_says_what_to_do(store: Store) -> None:
    text = words_of(load_report(store))
    assert "holds no runs yet" in text and "autofuse run SCRIPT.py" in text


def test_a_fused_step_of_an_optimizer_is_told_where_nothing_else_ran_fused(store: Store) -> None:
    run_id = start(store)
    store.roots.put(run_id, RootRecord("Net[1]", "Net", "eager", "no_graph", "graph break in loop"))
    store.nodes.put_uses(run_id, [use(LOSS, HOT, 30, 28, 0.0)])  # in no graph, so not among the totals
    store.results.put_decision(decision(LOSS, HOT, 2.16))
    text = words_of(load_report(store, run_id))
    said = "Only the optimizer's step ran fused: log_softmax + nll_loss_forward (2.16x when it was tuned)."
    assert f"{said} No module was captured (Net: no graph of it could be captured)." in text
    assert "Nothing ran fused" not in text and "Eager's own kernels won" not in text


def test_a_script_that_ended_before_its_module_was_captured_is_told_what_to_type(store: Store) -> None:
    run_id = start(store)
    store.roots.put(run_id, RootRecord("Net[1]", "Net", "observing", "not_yet", ""))
    store.queue.add([TuneRequest(key(LOSS, HOT), LOSS[3], HOT, (), 9, 50.0, 2.0, run_id)])  # an optimizer's step
    text = words_of(load_report(store, run_id))
    assert "No module was captured (Net: still observed: too short so far for its capture to pay)." in text
    assert "1 kernel is still to be tuned in the background." in text and "the next run uses" not in text
    assert "Next: autofuse run --tune wait train.py" in text


def test_nodes_outside_of_timed_steps_have_no_share_and_are_ordered_by_their_time(store: Store) -> None:
    run_id = start(store)
    store.nodes.put_uses(run_id, [use(LOSS, HOT, 2, 0, 0.0), use(NORM, HOT, 9, 0, 0.0), use(GELU, COLD, 1, 0, 0.2)])
    report = load_report(store, run_id)
    assert [line.operations for line in report.nodes] == [GELU[2], NORM[2], LOSS[2]]
    text = words_of(report)
    assert "20.0 %" in text and " 0.0 %" not in text


def test_a_run_without_fusion_says_why(store: Store) -> None:
    run_id = start(store)
    assert "No call of an nn.Module was seen." in words_of(load_report(store, run_id))
    store.roots.put(run_id, RootRecord("Net[1]", "Net", "eager", "too_small", "12 us a call"))
    text = words_of(load_report(store, run_id))
    assert "Nothing ran fused. No module was captured (Net: too fast per call for capture to gain)." in text
    assert "Next: autofuse explain Net" in text
    store.roots.put(run_id, RootRecord("Net[1]", "Net", "captured", "paid_off"))
    assert "The captured graphs hold no operators that can be fused." in words_of(load_report(store, run_id))
    store.nodes.put_uses(run_id, [use(LOSS, HOT, 9, 0, 0.1)])
    assert "Nothing ran fused. None of its nodes has been tuned yet." in words_of(load_report(store, run_id))
    store.nodes.put_uses(run_id, [use(LOSS, COLD, 9, 0, 0.1)])
    store.results.put_decision(decision(LOSS, COLD, 1.01, EAGER, "below_margin"))
    assert "Eager's own kernels won for every node" in words_of(load_report(store, run_id))
    store.queue.add([TuneRequest(key(LOSS, HOT), LOSS[3], HOT, (), 9, 50.0, 2.0, run_id)])
    waits = "1 kernel is still to be tuned in the background; the next run uses what is found."
    assert waits in words_of(load_report(store, run_id))
    store.queue.finish(key(LOSS, HOT), "failed", "no room in /tmp")
    text = words_of(load_report(store, run_id))
    assert "Nothing ran fused. 1 request for tuning failed; autofuse explain NODE says why" in text
    assert "autofuse tune --again tries anew" in text and "Eager's own kernels won" not in text
    store.notes.add_event(run_id, Event("no_compiler", "There is no C compiler: install gcc."))
    assert "Nothing ran fused. There is no C compiler: install gcc." in words_of(load_report(store, run_id))


def test_what_was_tuned_after_a_run_had_ended_is_not_its_cost_and_not_called_eagers_win(store: Store) -> None:
    run_id = start(store)
    store.roots.put(run_id, RootRecord("Net[1]", "Net", "captured", "paid_off"))
    store.nodes.put_uses(run_id, [use(LOSS, HOT, 9, 0, 0.1)])
    store.queue.add([TuneRequest(key(LOSS, HOT), LOSS[3], HOT, (), 9, 50.0, 2.0, run_id)])
    store.runs.finish(run_id, RunTotals(9, 0, 9))
    store.results.put_decision(decision(LOSS, HOT, 2.16))
    store.queue.finish(key(LOSS, HOT), "done")
    report = load_report(store, run_id)
    assert report.totals.tuning_seconds == 0.0
    text = words_of(report)
    assert "Nothing ran fused. Its kernels were found too late for it; the next run uses them." in text


def test_names_that_look_like_markup_are_printed_as_they_are(store: Store) -> None:
    run_id = start(store)
    store.roots.put(run_id, RootRecord("[bold]X", "[red]X", "eager", "capture_failed", "a[int] failed :smile:"))
    store.notes.add_event(run_id, Event("fallback", "in [blue]f[/blue]"))
    text = words_of(load_report(store))
    assert "[red]X" in text and "a[int] failed :smile:" in text and "in [blue]f[/blue]" in text


def test_long_reports_are_cut_and_say_so(store: Store) -> None:
    run_id = start(store)
    many = [replace(use(NORM, HOT, 1, 0, 0.01), fusion_id=f"{i:064d}", label=f"af_{i}") for i in range(MAX_NODES + 3)]
    store.nodes.put_uses(run_id, many)
    for _ in range(3):
        store.notes.add_event(run_id, Event("fallback", "again and again"))
    text = words_of(load_report(store))
    assert "and 3 more nodes: autofuse report --json" in text
    assert "fallback (3 times): again and again" in text


def test_reports_import_no_torch() -> None:
    code = (
        "import sys, autofuse.report.report, autofuse.report.terminal\n"
        "import autofuse.report.as_json, autofuse.report.explain\n"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- words --------------------------------------------------------------------------------------------


def test_numbers_in_words() -> None:
    assert [wording.microseconds(v) for v in (None, 31.24, 4500.0, 2.5e6)] == ["–", "31.2 µs", "4.50 ms", "2.50 s"]
    assert [wording.seconds(v) for v in (None, 0.84, 59.94, 59.96, 125.0, 4320.0)] == [
        "–", "0.8 s", "59.9 s", "1 min 00 s", "2 min 05 s", "1 h 12 min",
    ]  # fmt: skip
    assert wording.plural(1, "step") == "1 step" and wording.plural(2000, "step") == "2,000 steps"


def test_signatures_in_words() -> None:
    text = "((torch.Size([8, 256]), None, torch.Size([])), {0}, {1})"
    assert wording.signature(text.format(True, True)) == "8×256 scalar"
    assert wording.signature(text.format(False, False)) == "8×256 scalar eval no_grad"
    assert wording.signature("(4, 128)") == "(4, 128)"
    needed = "(((torch.Size([8, 256]), None), 'requires_grad', 0), True, True)"
    assert wording.signature(needed) == "8×256 requires_grad"
