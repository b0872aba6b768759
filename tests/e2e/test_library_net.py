"""A script with a library's operators: the same losses with what they compute registered, and with a wrong function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.commands import report, stop_daemon

SCRIPT = Path(__file__).with_name("library_net.py")
QUICK = ("--set", "tuner.trials=2", "--set", "tuner.rounds=5", "--set", "tuner.budget_seconds=20")
QUICK = (*QUICK, "--set", "tuner.job_seconds=2", "--set", "tuner.idle_exit_seconds=20")


def run(*command: object) -> tuple[list[float], str]:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()], done.stderr


def test_the_same_losses_with_a_right_function_and_with_a_wrong_one(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite3"
    expected, _ = run(SCRIPT, "plain")
    start = ("-m", "autofuse", "run", "--tune", "wait", "--store", store, *QUICK, SCRIPT)
    try:
        right, said = run(*start)
        assert right == pytest.approx(expected, rel=1e-4) and "unfused" not in said
        nodes = [row["operations"] for row in report(store)["nodes"]]
        assert any("mylib__scaled " in row and "relu" in row for row in nodes)
        assert any("mylib__scaled_backward" in row for row in nodes)
        wrong, said = run(*start, "wrong")
    finally:
        stop_daemon(store)
    assert wrong == pytest.approx(expected, rel=1e-4)
    assert said.count("mylib::scaled runs as the library has it, unfused: result 0 of normal numbers") == 1
    nodes = [row["operations"] for row in report(store)["nodes"]]
    assert not any("mylib__scaled " in row for row in nodes)
