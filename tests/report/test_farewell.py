"""The line at the end of a run: the gain or the reason that there is none, the cost, what to type next."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.cli.launch import FAREWELL
from autofuse.db.client import StoreClient
from autofuse.db.store import Store
from autofuse.ir.records import Event, RootRecord, RunStart, RunTotals, StepSample, TuneRequest
from tests.report.report_records import DEVICE, HOT, LOSS, NORM, ROOT, VERSIONS, fill, key, open_store, use


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "store.sqlite3")
    yield opened
    opened.close()


def start(store: Store, mode: str = "background") -> int:
    return store.runs.start(RunStart("train.py", DEVICE, VERSIONS, mode, 1, {}))


def test_a_gain_is_a_line_of_eighty_columns(store: Store) -> None:
    said = store.apply(FAREWELL, fill(store))
    assert said == "1.33x faster steps. Cost 26.9 s, saved 7.9 s. Next: autofuse report"
    assert len(f"autofuse: {said}") <= 80


def test_a_loss_is_one(store: Store) -> None:
    said = store.apply(FAREWELL, fill(store, ratio=0.9), " --store s")
    assert said == (
        "No gain: steps run at 0.90x of eager's speed. Cost 26.9 s, lost 2.4 s. Next: autofuse report --store s"
    )


def test_what_the_daemon_goes_on_with_is_said(store: Store) -> None:
    run = fill(store, mode="background")
    store.queue.add([TuneRequest(key(LOSS, HOT), LOSS[3], HOT, (), 9, 50.0, 2.0, run)])
    said = store.apply(FAREWELL, run, " --store s")
    assert "1 kernel is still to be tuned in the background (autofuse daemon stop --store s ends that)." in said


def test_where_nothing_ran_fused_it_says_how_to_end_the_tuning(store: Store) -> None:
    run = start(store)
    store.queue.add([TuneRequest(key(LOSS, HOT), LOSS[3], HOT, (), 9, 50.0, 2.0, run)])
    said = store.apply(FAREWELL, run, " --store s")
    assert "1 kernel is still to be tuned in the background; the next run uses what is found." in said
    assert "To end the tuning: autofuse daemon stop --store s. Next: autofuse report" in said


def test_no_gain_says_why(store: Store) -> None:
    run = start(store)
    store.steps.add(run, [StepSample(ROOT, "", False, 0, 1, 1000.0)])
    store.roots.put(run, RootRecord(ROOT, "GPT", "eager", "too_small", calls=400))
    store.runs.finish(run, RunTotals(steps=1, exit_code=0))
    said = store.apply(FAREWELL, run)
    assert said.startswith("Nothing ran fused. No module was captured (GPT: ") and "Cost" not in said
    assert said.endswith("Next: autofuse report") and "\n" not in said


def test_what_is_missing_leads_to_doctor(store: Store) -> None:
    run = start(store)
    store.notes.add_event(run, Event("no_compiler", "expected a C compiler, found none"))
    assert store.apply(FAREWELL, run) == "Nothing ran fused: no C compiler. Next: autofuse doctor"


def test_ten_thousand_nodes_are_one_line_too(store: Store) -> None:
    run = start(store)
    many = [
        replace(use(NORM, HOT, 1, 0, 0.0), fusion_id=f"{n:064d}", label=f"[bold]{n}\x1b[2J", operations="a\nb")
        for n in range(10_000)
    ]
    store.nodes.put_uses(run, many)
    assert store.apply(FAREWELL, run) == (
        "Nothing ran fused. None of its nodes has been tuned yet. Next: autofuse report"
    )


def test_the_command_names_the_run_that_it_would_not_show(store: Store) -> None:
    fill(store)
    run = start(store)  # without steps: `autofuse report` prefers the other
    assert store.apply(FAREWELL, run).endswith(f"Next: autofuse report --run {run}")


def test_the_process_that_keeps_the_store_makes_it(store: Store) -> None:
    run = fill(store)
    client = StoreClient(store.path, 5.0)
    try:
        assert client.apply(FAREWELL, run) == store.apply(FAREWELL, run)
    finally:
        client.close()


SCRIPT = "import torch\nwith torch.no_grad(): print(torch.nn.Linear(2, 2)(torch.ones(2)).shape)\n"


def run_script(folder: Path, *options: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "statistics.py").write_text("raise SystemExit('not the script's own')")  # which a report imports
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AUTOFUSE_")}
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "off", "--store", "s 1.sqlite3", *options, "train.py"]
    return subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=300
    )


def test_a_run_ends_with_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()  # a terminal gets the same line as a file: no colours
    done = run_script(tmp_path, stderr=theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", 0) as terminal:
        (line,) = terminal.read(4096).decode().splitlines()
    assert (done.returncode, done.stdout) == (0, "torch.Size([2])\n"), line
    assert line.startswith("autofuse: Nothing ran fused. No module was captured (Linear: ")
    assert line.endswith(f"Next: autofuse report --store '{tmp_path}/s 1.sqlite3'")


def test_a_quiet_run_ends_without(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
