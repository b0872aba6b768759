"""The examples as a person runs them, in a tiny setting: the same numbers with autofuse as without, some fused."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.e2e.commands import report, stop_daemon

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK = ("--set", "tuner.trials=2", "--set", "tuner.rounds=5", "--set", "tuner.job_seconds=1")
QUICK = (
    *QUICK,
    "--set",
    "tuner.budget_seconds=30",
    "--set",
    "tuner.idle_exit_seconds=20",
    "--set",
    "capture.min_root_us=0",
)
TINY = {
    "train_cnn.py": "--steps 16 --batch-size 4 --width 4 --blocks 1 --smallest 16 --largest 24 --log-every 1",
    # No two of its steps have the same shape, so that it waits for a bucket and not for a shape.
    "train_packed.py": "--steps 16 --width 32 --blocks 1 --sentences 12 --log-every 1",
    "infer.py": "--requests 16 --batch-size 3 --layers 1 --width 32 --heads 2 --context 24 --log-every 1",
}

# Without autofuse, so that they go on working; whole runs of all would take minutes.
PLAIN = {
    "train_diffusion.py": "--steps 2 --width 16 --batch-size 2 --sizes 8 12 --log-every 1",
    "train_gnn.py": "--steps 2 --width 16 --smallest 20 --largest 40 --log-every 1",
    "train_recommender.py": "--steps 2 --width 8 --batch-size 16 --log-every 1",
    "train_speech.py": "--steps 2 --width 16 --blocks 1 --batch-size 2 --log-every 1",
    "train_hf.py": "--steps 2 --width 16 --layers 1 --longest 12 --batch-size 2 --log-every 1",
    "serve.py": "--requests 8 --width 16 --layers 1",
}
NEEDS = {"train_hf.py": "accelerate", "serve.py": "fastapi"}


def run(*command: object) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", TINY)
def test_the_same_numbers_with_and_without(name: str, tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite3"
    script = (EXAMPLES / name, *TINY[name].split())
    done = forked.run(*script)
    assert done.returncode == 0, done.stderr
    plain = done.stdout
    try:
        routed = run("-m", "autofuse", "run", "--tune", "wait", "--store", store, *QUICK, *script)
    finally:
        stop_daemon(store)
    expected, found = ([line.rsplit(maxsplit=1) for line in out.splitlines()] for out in (plain, routed))
    assert [words[0] for words in found] == [words[0] for words in expected] and len(found) > 5
    for (what, ours), (_, theirs) in zip(found, expected, strict=True):
        if re.search("loss|checksum", what):
            assert float(ours) == pytest.approx(float(theirs), rel=1e-3, abs=1e-5), what
    assert report(store)["totals"]["fused_calls"] > 0


@pytest.mark.parametrize("name", PLAIN)
def test_it_runs(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    done = forked.run(EXAMPLES / name, *PLAIN[name].split())
    assert done.returncode == 0, done.stderr
    numbers = re.findall(r"(?:loss|checksum) (\S+)$", done.stdout, re.MULTILINE)
    assert numbers and all(math.isfinite(float(number)) for number in numbers)


def test_they_are_plain_scripts() -> None:
    for script in EXAMPLES.glob("*.py"):
        assert not re.search(r"^\s*(import|from) autofuse", script.read_text(), re.MULTILINE), script.name
