"""The README's figures are those of a run of the demo, and say where something was not measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autofuse.process.apply import MALLOC
from autofuse.report.as_json import report_to_json
from autofuse.report.report import load_report
from scripts.demo_figures import figures, in_short
from scripts.generate_docs import DEMO, ROOT, demo_table
from tests.report.report_records import fill, open_store


@pytest.fixture
def demo(tmp_path: Path) -> dict[str, Any]:
    """What two runs leave in the demo's folder, summed up."""
    with open_store(tmp_path / "store.sqlite3") as store:
        for name, ratio in (("first", 1.34), ("second", 1.6)):
            report = report_to_json(load_report(store, fill(store, ratio)))
            report["settings"][0]["setting"] = MALLOC
            (tmp_path / f"{name}.json").write_text(json.dumps(report))
    (tmp_path / "plain.txt").write_text("3 parameters\nstep 20 loss 2.0\nstep 40 loss 1.0\n")
    (tmp_path / "first.txt").write_text("step 20 loss 2.0\nstep 40 loss 1.00001\nstep 60 loss 7\n")
    (tmp_path / "second.txt").write_text("step 20 loss 2.0002\nstep 40 loss 1.0\n")
    return figures(tmp_path)


def test_the_figures_are_those_of_the_reports_and_the_losses(demo: dict[str, Any]) -> None:
    assert demo["machine"] == "2 cores, AMD EPYC 9654 96-Core Processor (avx512)"
    assert demo["first"]["median"] == pytest.approx(1.34, abs=0.02)
    assert demo["second"]["median"] == pytest.approx(1.6, abs=0.02)
    assert demo["first"]["loss_error"] == pytest.approx(1e-5) and demo["second"]["loss_error"] == pytest.approx(1e-4)
    assert demo["malloc"]["speedup"] > 1.0 and "never counted as fusion: 1." in demo_table(demo)
    assert in_short("first", demo["first"]).endswith("losses within 1e-05 of plain python's")


def test_the_table_holds_them_and_leaves_out_what_was_not_measured(demo: dict[str, Any]) -> None:
    text = demo_table(demo)
    assert "| losses, against plain Python's | within 1e-05 | within 1e-04 |" in text
    assert "| saved | 7.9 s | " in text and "AMD EPYC 9654" in text
    for name in ("median", "low", "high", "seconds_saved"):
        demo["first"][name] = None
    assert "| – | 1.59x (1.57 to 1.62) |" in demo_table(demo | {"malloc": None})
    assert "Malloc" not in demo_table(demo | {"malloc": None})
    assert "not measured" in in_short("first", demo["first"])


def test_the_readme_shows_the_figures_that_are_kept() -> None:
    assert demo_table(json.loads(DEMO.read_text())) in (ROOT / "README.md").read_text()


def test_the_container_ends_in_the_demo() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (end,) = (line for line in lines if line.startswith("CMD"))
    (script,) = json.loads(end.removeprefix("CMD "))
    assert os.access(ROOT / script, os.X_OK) and script == "scripts/demo" and "RUN scripts/setup" in lines
