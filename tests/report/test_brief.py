"""The brief report: on 80 columns it fits a screen, no row breaks, and what it leaves out is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from autofuse.cli.app import parse
from autofuse.db.store import Store
from autofuse.ir.records import RunStart
from autofuse.report.brief import MAX_NODES, render_brief
from autofuse.report.console import PlainConsole
from autofuse.report.report import load_report
from tests.report.report_records import DEVICE, HOT, NORM, VERSIONS, fill, open_store, use


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def lines(store: Store, width: int = 80) -> list[str]:
    out = StringIO()
    render_brief(load_report(store), PlainConsole(file=out, width=width, highlight=False))
    found = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, found)) <= width
    return found


def test_forty_nodes_fit_a_screen(store: Store) -> None:
    run_id = fill(store)
    operations = " + ".join(["add", "native_layer_norm", "gelu", "mul"] * 5)
    many = [
        replace(use(NORM, HOT, 1, 0, 0.01), fusion_id=f"{n:064d}", label=f"af_x_{n:06x}", operations=operations)
        for n in range(40)
    ]
    store.nodes.put_uses(run_id, many)
    found = lines(store)
    assert len(found) <= 24
    rows = [line for line in found if line.endswith(("fused", "eager", "queued", "open"))]
    assert len(rows) == MAX_NODES + 1  # with the head of the table
    assert "34 more nodes" in " ".join(found)


def test_what_it_says(store: Store) -> None:
    fill(store)
    text = " ".join(" ".join(lines(store)).split())
    for words in (
        "1.33x faster steps than eager", "400 steps, 93.8 % of node calls fused; cost 26.9 s, saved 7.9 s",
        "8 129..256",
        "All nodes together take 26.8 % of a step; the rest is",
        "1 note, the last: kernel not loaded", "2 input shapes, 2 modules, 5 fusions not made, 1 process setting",
        "Next: autofuse",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("width", [40, 63, 64, 200])
def test_no_row_breaks(store: Store, width: int) -> None:
    fill(store)
    found = lines(store, width)
    start = next(n for n, line in enumerate(found) if line.startswith("─"))
    assert found[start + 5] == ""
    assert [line.split()[-1] for line in found[start + 1 : start + 5]] == ["fused", "fused", "queued", "eager"]


def test_without_runs_and_without_nodes(store: Store) -> None:
    assert "holds no runs yet" in " ".join(lines(store))
    store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "wait", 1))
    text = " ".join(lines(store))
    assert "Nothing ran fused. No call of an nn.Module was seen." in text and "0 steps, no node call fused" in text


def test_the_command(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    fill(store)
    assert not parse(["report", "--store", str(store.path)])
    brief = capfd.readouterr().out
    assert not parse(["report", "--store", str(store.path), "--verbose"])
    assert "Fusions not made" not in brief and "Fusions not made" in capfd.readouterr().out
