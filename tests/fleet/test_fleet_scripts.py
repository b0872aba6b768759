"""A script on two hosts: what the first one has tuned, the second runs fused without a search."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from autofuse.db.store import Store
from autofuse.ir.records import EAGER
from tests.postgres import PASSWORD, Postgres

SCRIPT = """\
import torch

class Chain(torch.nn.Module):
    def forward(self, x, y):
        for _ in range(6):
            x = torch.tanh(x * y + 0.5) - y
        return torch.softmax(x, -1)

torch.manual_seed(0)
model, x, y = Chain(), torch.randn(512, 512), torch.randn(512, 512)
with torch.no_grad():
    for _ in range(60):
        found = model(x, y)
print(f"{float(found.double().pow(2).sum()):.9f}")
"""


class Ran(NamedTuple):
    stdout: str
    fused_calls: int
    kernels: int  # winners
    measured: int  # candidates
    seconds: float  # of tuning


def run(folder: Path, url: str) -> Ran:
    """Run the script on a host, and end its daemon, which sends what it has found."""
    folder.mkdir(mode=0o700)
    (folder / "script.py").write_text(SCRIPT)
    store = folder / "store.db"
    environment = {**os.environ, "AUTOFUSE_FLEET_URL": url, "AUTOFUSE_TUNER_SHARED_FOLDER": str(folder / "shared")}
    command = [sys.executable, "-m", "autofuse"]
    options = ["--tune", "wait", "--store", str(store), "--profile", "quick"]
    options += ["--set", "capture.at_once=true", "--set", "tuner.job_seconds=60", "--set", "tuner.trials=4"]
    done = subprocess.run(
        [*command, "run", *options, str(folder / "script.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(
        [*command, "daemon", "stop", "--store", str(store)], env=environment, capture_output=True, check=False
    )
    with Store.open(store, readonly=True) as stored:
        (ran,) = stored.runs.recent()
        decisions = [decision for _, decision in stored.results.decisions()]
        measured = sum(len(stored.results.measurements(of)) for of in {d.key.fusion_id for d in decisions})
        assert PASSWORD not in str(ran.settings) and "***" in ran.settings["fleet.url"]
    kernels = sum(decision.candidate.variant != EAGER for decision in decisions)
    seconds = sum(decision.tuning_seconds for decision in decisions)
    return Ran(done.stdout, ran.totals.fused_calls, kernels, measured, round(seconds, 2))


def test_a_script_runs_fused_on_a_host_that_has_not_searched(postgres: Postgres, tmp_path: Path) -> None:
    name = postgres.new_database()
    first = run(tmp_path / "first", postgres.url(name))
    deadline = time.monotonic() + 10.0
    while not postgres.sql("SELECT 1 FROM decisions", database=name):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = run(tmp_path / "second", postgres.url(name))
    print(first, second, sep="\n")  # for those who look: pytest -s
    assert float(first.stdout) == pytest.approx(float(second.stdout), rel=1e-6)
    assert first.kernels >= 1 and first.fused_calls > 0, "a chain that fusing speeds up by far on any machine"
    assert second.kernels >= 1 and second.fused_calls > 0
    assert second.measured <= first.kernels < first.measured, "one candidate each"
