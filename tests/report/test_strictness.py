"""What a strict run gives up, from what was measured."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.db.store import Store
from autofuse.ir.records import EAGER, Candidate, DecisionKey, Measurement, ObservedShape, RunStart, RunTotals
from autofuse.ir.strict import strictly
from autofuse.report.as_json import report_to_json
from autofuse.report.console import PlainConsole
from autofuse.report.report import Report, load_report
from autofuse.report.terminal import render_report
from tests.report.report_records import DEVICE, GELU, HOT, LOSS, NORM, VERSIONS, decision, key, use

STRICT = strictly(VERSIONS)


def strict_key(node: tuple[str, str, str, dict[str, object]]) -> DecisionKey:
    return replace(key(node, HOT), versions=STRICT)


def refused(variant: str, eager_us: float, speedup: float) -> Measurement:
    return Measurement(
        Candidate(variant), "not_bit_equal", (8, 256), eager_us / speedup, eager_us, speedup, speedup, speedup,
        message="output 0 has other bits",
    )  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A strict run: one node in eager, one on a slower kernel, one on its fastest; and a usual decision beside them."""
    with Store.open(tmp_path / "s.sqlite3") as opened:
        run_id = opened.runs.start(RunStart("x.py", DEVICE, STRICT, "wait", 1))
        eager = replace(decision(GELU, HOT, 2.0, EAGER, "not_bit_equal"), key=strict_key(GELU), unfused_us=150.0)
        opened.results.put_decision(decision(GELU, HOT, 3.0))
        opened.results.put_decision(eager)
        opened.results.put_decision(replace(decision(NORM, HOT, 1.5), key=strict_key(NORM), unfused_us=150.0))
        opened.results.put_decision(replace(decision(LOSS, HOT, 2.0), key=strict_key(LOSS), unfused_us=150.0))
        measured = [refused("c_generic", 150.0, 2.0), refused("c_specialised", 150.0, 1.5)]
        opened.results.put_measurements(strict_key(GELU), measured)
        opened.results.put_measurements(strict_key(NORM), [refused("c_generic", 150.0, 3.0)])
        opened.results.put_measurements(strict_key(LOSS), [refused("c_generic", 150.0, 1.2)])
        group = replace(use(NORM, HOT, 0, 0, 0.1), shapes=(ObservedShape((8, 256), 100),))
        opened.nodes.put_uses(run_id, [use(GELU, HOT, 200, 0, 0.1), group, use(LOSS, HOT, 100, 100, 0.1)])
        opened.runs.finish(run_id, RunTotals(steps=100))
        yield opened


def text_of(report: Report) -> str:
    file = io.StringIO()
    render_report(report, PlainConsole(file=file, width=100))
    return " ".join(file.getvalue().replace("│", " ").split())


def test_a_strict_run_says_what_it_gives_up(store: Store) -> None:
    report = load_report(store)
    assert report.strict is not None and report.strict.refused_nodes == 2
    # Twice a step 150 us that could be 75; once 100 us that could be 50, of a group that ran as single nodes.
    assert report.strict.step_us == pytest.approx(2 * 75.0 + 50.0)
    assert report_to_json(report)["strict"] == {"refused_nodes": 2, "step_us": pytest.approx(200.0)}
    said = "faster kernels of 2 nodes were refused, as they are not eager's to the bit, 200.0 µs a step are given up"
    assert said in text_of(report)


def test_it_uses_no_decision_of_a_usual_run(store: Store) -> None:
    lines = {line.fusion_id: line for line in load_report(store).nodes}
    assert (lines[GELU[0]].decision, lines[GELU[0]].reason) == ("eager", "not_bit_equal")


def test_without_a_refusal_or_steps_nothing_is_made_up(store: Store) -> None:
    run_id = store.runs.start(RunStart("y.py", DEVICE, STRICT, "wait", 1))
    store.nodes.put_uses(run_id, [use(LOSS, HOT, 100, 100, 0.1)])
    report = load_report(store, run_id)
    assert report.strict is not None and (report.strict.refused_nodes, report.strict.step_us) == (0, None)
    assert "no faster kernel was refused for its bits" in text_of(report)


def test_a_usual_run_has_no_such_line(store: Store) -> None:
    run_id = store.runs.start(RunStart("z.py", DEVICE, VERSIONS, "wait", 1))
    report = load_report(store, run_id)
    assert report.strict is None and report_to_json(report)["strict"] is None and "strict" not in text_of(report)
