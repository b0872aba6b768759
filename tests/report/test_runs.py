"""The list of runs, two side by side, and the commands that delete and compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from autofuse.cli.app import parse
from autofuse.db.store import Store
from autofuse.report.console import PlainConsole
from autofuse.report.runs import render_comparison, render_runs, run_lines
from tests.report.report_records import HOT, LOSS, fill, open_store, use


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def printed(render: object, *arguments: object, width: int = 80) -> str:
    out = StringIO()
    console = PlainConsole(file=out, width=width, highlight=False)
    store, *rest = arguments
    render(store, console, *rest)  # type: ignore[operator]
    return out.getvalue()


def test_runs_are_listed_the_newest_first(store: Store) -> None:
    assert "holds no runs yet" in printed(render_runs, store, 20)
    first, second = fill(store), fill(store, ratio=1.0)
    text = printed(render_runs, store, 20)
    assert text.index(f" {second}  ") < text.index(f" {first}  ")
    assert "1.33x" in text and f"Next: autofuse runs compare {first} {second}" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert [line.id for line in run_lines(store, 1)] == [second]


@pytest.mark.parametrize("width", [40, 80])
def test_two_runs_side_by_side(store: Store, width: int) -> None:
    first, second = fill(store), fill(store, ratio=1.0)
    text = printed(render_comparison, store, first, second, width=width)
    words = " ".join(text.split())
    assert f"run {first}" in words and f"run {second}" in words and "decided alike" in words.replace("\n", " ")
    assert all(len(line) <= width for line in text.splitlines())


def test_nodes_that_ran_otherwise_are_named(store: Store) -> None:
    first, second = fill(store), fill(store)
    store.nodes.put_uses(second, [replace(use(LOSS, HOT, 368, 368, 0.02))])
    text = " ".join(printed(render_comparison, store, first, second).split())
    assert f"{LOSS[1]}, {HOT.label}: 0.0 % of its calls fused, then 100.0 % of its calls fused" in text


def test_the_commands(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = fill(store), fill(store)
    path = str(store.path)
    assert not parse(["runs", "--store", path])
    assert not parse(["runs", "compare", "--store", path, str(first), str(second)])
    assert f"Runs {first} and {second}" in capfd.readouterr().out
    assert not parse(["runs", "delete", "--store", path, str(first)])
    assert "Removed 1 run. Decisions and kernels are kept." in capfd.readouterr().out
    assert [run.id for run in store.runs.recent()] == [second]
    assert parse(["runs", "delete", "--store", path, str(second), "99"])
    assert "99" in capfd.readouterr().err and len(store.runs.recent()) == 1
    assert parse(["runs", "compare", "--store", path, "1", "99"])
    assert parse(["runs", "delete", "--store", path]) == 2
