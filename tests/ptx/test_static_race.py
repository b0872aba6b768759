"""The static race against Inductor: that its seams still work, and how its rows are judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ptx.static_race import COLUMNS, OURS, RESULTS, THEIRS, counted, result

ROOT = Path(__file__).resolve().parents[2]

# In float32 a row of 512 columns is read once and written once, as the weights are read, by both sides.
SCRIPT = """
import json
from benchmarks.doors_rows import ROWS
from ptx.static_race import rows_of
(row,) = [row for row in ROWS if row.name == "forward: rms_norm"]
print(json.dumps(list(rows_of(row, "small", "float32"))))
"""


def test_both_sides_of_one_graph() -> None:
    """In a process of its own, in which torch believes in an H100."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    for side in (row[OURS], row[THEIRS]):
        assert side["kernels"] == 1 and not side["library"] and not side["eager"]
        assert side["bytes"] == 4 * (2 * 64 * 512 + 512) and side["passes"] == 1.0
        assert side["spill bytes"] == 0 and side["registers"] > 8 and side["instructions"] > 64 * 512
        assert side["bytes an access"] > 15 and side["sectors"] >= side["bytes"] // 32


@pytest.mark.parametrize(
    ("column", "ours", "theirs", "expected"),
    [
        ("kernels", 1, 2, "win"), ("kernels", 2, 1, "loss"), ("bytes", 100, 101, "tie"), ("bytes", 103, 100, "loss"),
        ("occupancy", 1.0, 0.5, "win"), ("bytes an access", 8.0, 16.0, "loss"), ("spill bytes", 0, 0, "tie"),
    ],
)  # fmt: skip
def test_what_a_win_is(column: str, ours: float, theirs: float, expected: str) -> None:
    (found,) = (c for c in COLUMNS if c.name == column)
    assert result(found, ours, theirs) == expected


def test_the_counts_are_those_of_the_rows() -> None:
    document = json.loads(RESULTS.read_text())
    assert document["bars"] == counted(document["rows"]) and not document["refused"]
    assert all(sum(bar[name] for name in ("win", "tie", "loss")) == len(document["rows"])
               for bar in document["bars"].values())  # fmt: skip
