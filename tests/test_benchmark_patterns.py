"""The benchmark of patterns runs as a whole; what it counts is right. No time is looked at."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests import forked

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: object, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    return forked.run(ROOT / "benchmarks" / "patterns.py", *arguments, folder=ROOT, timeout=timeout)


def test_names_that_nobody_knows() -> None:
    done = run("--only", "softmacks")
    assert done.returncode == 1 and "softmacks" in done.stderr and "softmax+scale+mask" in done.stderr


def test_a_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "patterns.json"
    done = run(
        "--quick", "--only", "swiglu train,add+relu", "--shapes", "cache", "--contenders", "eager,autofuse",
        "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["machine"]["torch"] and found["copy_gb_per_s"] > 0 and not found["left_out"]
    rows = {row["row"]: row for row in found["rows"]}
    assert set(rows) == {"add+relu", "swiglu train"}
    tensor = 512 * 1024 * 4
    eager = {name: rows[name]["contenders"]["eager"] for name in rows}
    # add reads two and writes one tensor, relu reads one and writes one
    assert (eager["add+relu"]["kernels"], eager["add+relu"]["bytes"]) == (2, 5 * tensor)
    for name, row in rows.items():
        ours = row["contenders"]["autofuse"]
        assert ours["state"] and 0 < ours["kernels"] <= eager[name]["kernels"]
        assert ours["us"]["median"] > 0 and ours["bytes"] <= eager[name]["bytes"]
        assert row["largest_difference_to_eager"]["autofuse"] < 1e-5
        assert set(row["autofuse_over"]) == {"eager"}
    assert {"slower_than_eager", "geometric_mean_over_eager"} <= set(found["bars"])
