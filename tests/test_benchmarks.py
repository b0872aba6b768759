"""The GPU benchmark runs as a whole on a CPU, and says so where there is no GPU. No time is looked at."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests import forked

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return forked.run(ROOT / "benchmarks" / "gpu.py", *arguments, folder=ROOT, environment=env, timeout=600)


def test_without_a_gpu_it_says_so() -> None:
    done = run(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert "expected a GPU" in done.stderr and "autofuse doctor" in done.stderr


def test_names_that_nobody_knows() -> None:
    done = run("--device", "cpu", "--only", "softmacks")
    assert done.returncode == 1 and "softmacks" in done.stderr and "softmax_backward" in done.stderr


def test_a_quick_run_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--quick", "--only", "check,steps,bias_gelu_backward", "--minutes", 9, "--out", out)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["machine"]["torch"] and found["machine"]["gpu"].startswith("none") and not found["left_out"]
    checked = found["sections"]["check"]
    assert checked["counts"] == {"right": len(checked["rows"])} and len(checked["rows"]) == 12 + 9
    rows = found["sections"]["table"]["rows"]
    assert [row["case"] for row in rows] == ["bias_gelu_backward"] * 2
    for row in rows:
        assert not row["errors"] and set(row["modes"]) == {"eager", "autofuse"}
        assert row["largest_difference_to_eager"]["autofuse"] < 1e-5
        assert row["modes"]["autofuse"]["nodes_fused"].split()[-1] != "0", "forward and backward were planned"
    for row in found["sections"]["steps"]["rows"]:
        assert set(row["modes"]) == {"eager", "fused", "autofuse"}
        assert max(row["largest_difference_to_eager"].values()) < 1e-5
    assert len(found["sections"]["steps"]["rows"]) == 1
    assert found["sections"]["notes"] == []
