"""A trace opens in Perfetto: it keeps to the Trace Event Format, and says which of its times were recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autofuse.cli.app import parse
from autofuse.db.store import Store
from autofuse.ir.records import STEP_RECORD, Event, RunStart, RunTotals
from autofuse.report import trace
from autofuse.report.trace import trace_of
from tests.report.report_records import DEVICE, GELU, HOT, VERSIONS, decision, fill, open_store, use

NODES = [["af_a", "add + gelu", "train.py:3"], ["af_b", "mul", ""], ["af_group", "addmm + add + gelu", ""]]
# A group (2) around its part (0) on a kernel of 2x, then a node on eager's kernels; the graph runs twice in a step.
ROWS = [[0, 20.0, 10.0, 2.0], [2, 5.0, 30.0, None], [1, 40.0, 50.0, None]]
FUSED = [{"graph": 0, "start": 0.0, "us": 100.0, "nodes": ROWS}, {"graph": 1, "start": 130.0, "us": 20.0, "nodes": []}]
EAGER = [{"graph": 0, "start": 0.0, "us": 150.0, "nodes": [[2, 5.0, 60.0, None], [0, 20.0, 40.0, None]]}]
EAGER += [{"graph": 1, "start": 170.0, "us": 25.0, "nodes": [[0, 1.0, 2.0, None]]}]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def record(store: Store, run: int, **changes: Any) -> None:
    graphs = [{"phase": phase, "sizes": {"s0": 8}, "nodes": NODES} for phase in ("forward", "backward")]
    data = {"calls": 9, "is_recorded": True, "graphs": graphs, "eager": EAGER, "fused": FUSED} | changes
    store.notes.add_event(run, Event(STEP_RECORD, "a step", data))


def slices(document: dict[str, Any], thread: int, process: int = 1) -> list[dict[str, Any]]:
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    return [event for event in events if (event["pid"], event["tid"]) == (process, thread)]


def times(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(event["ts"], event["dur"]) for event in events]


def check_format(document: dict[str, Any]) -> None:
    """As the Trace Event Format asks for; on a thread, slices follow each other or lie in each other."""
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"} and document["displayTimeUnit"] == "ms"
    open_ends: dict[tuple[int, int], list[float]] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert event["ph"] == "X" and isinstance(event["cat"], str) and event["ts"] >= 0 and event["dur"] >= 0
        begin, end = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        around = open_ends.setdefault((event["pid"], event["tid"]), [])
        while around and around[-1] <= begin:
            around.pop()
        assert not around or end <= around[-1], f"{event} reaches out of the slice around it"
        around.append(end)


def test_both_lanes_of_a_recorded_step(store: Store) -> None:
    run = fill(store)
    record(store, run)
    document = trace_of(store, run)
    check_format(document)
    eager, fused = slices(document, 1), slices(document, 2)
    names = ["graph 1, forward", "addmm + add + gelu", "add + gelu", "mul", "graph 2, backward"]
    assert [item["name"] for item in fused] == names
    assert times(fused) == [(0, 100), (5, 30), (20, 10), (40, 50), (130, 20)]
    assert times(eager) == [(0, 150), (5, 60), (20, 40), (170, 25), (171, 2)]
    assert {item["cat"] for item in (*eager, *fused)} == {"recorded"}
    assert [item["args"].get("runs on") for item in fused[1:4]] == [
        "its parts, one by one", "a fused kernel", "eager's kernels",
    ]  # fmt: skip
    told = [event["args"]["name"] for event in document["traceEvents"] if event["name"].endswith("s_name")]
    assert told == ["a step with s0=8, ran 9 times", "whole steps, by the shapes of the input"]
    told = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert told == ["eager's kernels (recorded)", "with fused kernels (recorded)", "medians"]
    assert {item["cat"] for item in slices(document, 1, 2)} == {"medians"}


def test_steps_of_other_sizes_are_processes_of_their_own(store: Store) -> None:
    run = fill(store)
    record(store, run)
    record(store, run, fused=None)
    document = trace_of(store, run)
    check_format(document)
    assert times(slices(document, 2, 2)) == times(slices(document, 1, 2)), (
        "what never ran on kernels takes eager's time"
    )
    assert slices(document, 1, 3)


def test_without_a_step_in_eager_its_lane_is_an_estimate_and_says_so(store: Store) -> None:
    run = fill(store)
    record(store, run, eager=None)
    document = trace_of(store)
    check_format(document)
    eager = slices(document, 1)
    assert times(eager) == [(0, 110), (5, 40), (20, 20), (50, 50), (140, 20)]
    assert {item["cat"] for item in eager} == {"estimated from races"}
    assert "eager's kernels (estimated from races)" in json.dumps(document)


def test_times_of_a_gpu_are_medians(store: Store) -> None:
    run = fill(store)
    record(store, run, eager=None, is_recorded=False)
    document = trace_of(store)
    assert {item["cat"] for item in slices(document, 2)} == {"medians"}


def test_the_optimizer_ends_the_step(store: Store) -> None:
    run = fill(store)
    record(store, run)
    node = ("d" * 16, "af_optimizer_adamw_dddddd", "adamw over 20 tensors", GELU[3])
    store.nodes.put_uses(run, [use(node, HOT, 400, 390, 0.0)])
    store.results.put_decision(decision(node, HOT, 2.0))
    document = trace_of(store)
    check_format(document)
    eager, fused = slices(document, 1)[-1], slices(document, 2)[-1]
    assert times([eager, fused]) == [(195, 151.25), (150, 75.625)]
    assert eager["cat"] == "medians" and fused["name"] == "adamw over 20 tensors"


def test_ten_thousand_nodes_and_odd_names(store: Store) -> None:
    run = fill(store)
    count = 10_000
    name = "[bold]<b>\x1b]0;x\x07\u202e\"'"
    rows = [[slot, 3.0 * slot, 2.999, 1.3 if slot % 2 else None] for slot in range(count)]
    call = {"graph": 0, "start": 0.0, "us": 3.0 * count, "nodes": rows}
    graph = {"phase": "forward", "sizes": {}, "nodes": [[name, name, name]] * count}
    record(store, run, graphs=[graph], eager=None, fused=[call])
    document = trace_of(store)
    check_format(document)
    assert len(slices(document, 2)) == count + 1 and slices(document, 2)[1]["name"] == name


@pytest.mark.parametrize(
    "changes",
    [
        {"fused": [{"us": 1.0}]}, {"graphs": None}, {"eager": None, "fused": None}, {"graphs": []}, {"calls": "many"},
        {"eager": [{"graph": 0, "start": 0, "us": 1, "nodes": [[9, 0, 1, None]]}]},
    ],
)  # fmt: skip
def test_records_of_another_version_are_left_out(store: Store, changes: dict[str, Any]) -> None:
    run = fill(store)
    record(store, run, **changes)
    record(store, run)
    assert len(trace.steps_of(store.notes.events(run))) == 1


# ---- the command -----------------------------------------------------------------------------------------


def command(store: Store, *arguments: str) -> int:
    outcome = parse(["trace", *arguments, "--store", str(store.path)])
    assert isinstance(outcome, int)
    return outcome


def test_the_command_writes_a_file(store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record(store, fill(store))
    path = tmp_path / "step.json"
    assert command(store, str(path)) == 0
    assert capfd.readouterr() == (f"written to {path}; open it at https://ui.perfetto.dev\n", "")
    check_format(json.loads(path.read_text()))


def test_a_run_without_calls_is_one_line(store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(store, str(tmp_path / "x.json")) == 2
    assert "found none; type: autofuse run SCRIPT.py" in capfd.readouterr().err
    run = store.runs.start(RunStart("crashed.py", DEVICE, VERSIONS, "wait", 1, {}))
    assert command(store, str(tmp_path / "x.json")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"run {run} has not ended yet; why: autofuse report --run {run}" in line
    store.runs.finish(run, RunTotals(exit_code=1))
    assert command(store, str(tmp_path / "x.json"), "--run", str(run)) == 2
    assert "kept no step of a captured graph" in capfd.readouterr().err
    assert command(store, str(tmp_path / "x.json"), "--run", "77") == 1
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "x.json").exists()


def test_a_folder_that_cannot_be_written_is_one_line(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    record(store, fill(store))
    for name in ("/proc/step.json", f"{store.path.parent}/missing/step.json"):
        assert command(store, name) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"expected a file that can be written, found {name}" in line and "autofuse trace FILE" in line


def test_rounding_keeps_slices_inside_of_each_other() -> None:
    spans = (trace.Span(0, 0.0004, 9.9996, 1.7), trace.Span(1, 9.9999, 0.0001))
    fused = trace.Lane("recorded", (trace.Call(0, 0.0, 10.0, spans),))
    graph = trace.Graph("forward", {}, (("a", "a", ""), ("b", "b", "")))
    events = list(trace._slices(trace._Place(1, 1), [graph], trace.in_eager(fused)))
    check_format({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}})
    assert all(first["ts"] <= second["ts"] for first, second in pairwise(events))
