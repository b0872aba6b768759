"""The list of runs, two side by side, and the commands that delete and compare."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from autofuse.cli.app import parse
from autofuse.daemon.process_id import this_machine
from autofuse.db.store import Store
from autofuse.ir.records import RunStart
from autofuse.report.console import PlainConsole
from autofuse.report.runs import render_comparison, render_runs, run_lines
from tests.report.report_records import DEVICE, HOT, LOSS, VERSIONS, fill, open_store, use


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
    assert not parse(["runs", "delete", "--store", path, str(first), str(first)])
    assert "Removed 1 run. Decisions and kernels are kept." in capfd.readouterr().out
    assert [run.id for run in store.runs.recent()] == [second]
    assert parse(["runs", "compare", "--store", path, str(second), "99"])
    assert parse(["runs", "delete", "--store", path]) == 2


def test_all_of_the_runs_are_deleted_or_none(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    first, path = fill(store), str(store.path)
    going = store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "wait", os.getpid(), machine=this_machine()))
    killed = store.runs.start(RunStart("train.py", DEVICE, VERSIONS, "wait", 2**22 + 1, machine=this_machine()))
    for other, words in ((going, "may still go on"), (99, "expected run 99")):
        assert parse(["runs", "delete", "--store", path, str(first), str(other)])
        assert words in capfd.readouterr().err and len(store.runs.recent()) == 3
    assert not parse(["runs", "delete", "--store", path, str(first), str(killed)])
    assert [run.id for run in store.runs.recent()] == [going]


@pytest.mark.parametrize("rest", [["compare", "1", "1"], ["delete", "1"], ["prune"]])
def test_options_belong_behind_a_subcommand(store: Store, capfd: pytest.CaptureFixture[str], rest: list[str]) -> None:
    fill(store)
    assert parse(["runs", "--store", str(store.path), *rest]) == 2
    assert f"expected options behind {rest[0]}, found --store before it" in capfd.readouterr().err
    assert len(store.runs.recent()) == 1
