"""Where eager's time goes: operators of all shapes together, their shares and medians, in the report and its JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from report_records import fill
from rich.console import Console

from autofuse.db.store import Store
from autofuse.ir.records import OpProfile
from autofuse.report.as_json import report_to_json
from autofuse.report.brief import render_brief
from autofuse.report.operators import MAX_OPERATORS, OperatorLine, operator_lines
from autofuse.report.report import Report, load_report
from autofuse.report.terminal import render_report

MATMUL, ADD = "aten.mm.default", "aten.add.Tensor"


def profile(overload: str, rows: int, calls: int, time_us: float, module: str = "GPT.head") -> OpProfile:
    return OpProfile(overload, module, "forward", ((rows, 8),), ("float32",), ((8, 1),), "cpu", calls, time_us)


PROFILES = [
    profile(MATMUL, 4, 10, 100.0),
    profile(MATMUL, 64, 3, 300.0),
    profile(ADD, 4, 20, 60.0),
    profile("aten.add.Scalar", 4, 4, 40.0),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.db") as opened:
        yield opened


def text_of(report: Report, verbose: bool, width: int = 80) -> str:
    render = render_report if verbose else render_brief
    console = Console(width=width, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    render(report, console)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    return text


def test_overloads_and_shapes_of_an_operator_are_one_line() -> None:
    matmul, add = operator_lines(PROFILES)
    assert matmul == OperatorLine("aten.mm", 13, 0.8, 400.0, 10.0)  # ten calls of 10 us, three of 100
    assert add == OperatorLine("aten.add", 24, 0.2, 100.0, 3.0)
    assert operator_lines([]) == [] and operator_lines([profile(ADD, 4, 0, 0.0)]) == []
    assert operator_lines([profile(ADD, 4, 2, 0.0)]) == [OperatorLine("aten.add", 2, 0.0, 0.0, 0.0)]


def test_the_report_shows_them_where_it_is_asked_for(store: Store) -> None:
    run_id = fill(store)
    assert "Where eager's time goes" not in text_of(load_report(store), verbose=True)
    store.profiles.put_ops(run_id, PROFILES)
    store.profiles.put_ops(run_id, [profile(f"aten.other{n}.default", 4, 1, 0.0) for n in range(MAX_OPERATORS)])
    report = load_report(store)
    assert "Where eager's time goes" not in text_of(report, verbose=False)
    text = text_of(report, verbose=True)
    rows = [line.split() for line in text.splitlines() if " aten." in line]
    assert rows[0] == ["80.0", "%", "aten.mm", "13", "10.0", "µs", "400.0", "µs"]
    assert rows[1] == ["20.0", "%", "aten.add", "24", "3.0", "µs", "100.0", "µs"]
    assert len(rows) == MAX_OPERATORS and "and 2 more operators: autofuse report --json" in " ".join(text.split())


def test_json_has_all_of_them(store: Store) -> None:
    store.profiles.put_ops(fill(store), PROFILES)
    assert report_to_json(load_report(store))["operators"] == [
        {"operator": "aten.mm", "calls": 13, "time_share": 0.8, "time_us": 400.0, "median_us": 10.0},
        {"operator": "aten.add", "calls": 24, "time_share": 0.2, "time_us": 100.0, "median_us": 3.0},
    ]
