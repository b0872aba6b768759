"""Compiled kernels are proved free of races and deadlocks: some here, all by ``scripts/gpu-static --proofs``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.ptx.unproved import DUPLICATES, UNPROVED

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_static.json"
SOME = "add_bias_gelu,softmax_middle,mean_all"  # pointwise, rows of several warps, two passes

SCRIPT = """
import json
import triton
from ptx import proofs
from ptx.work import all_work

found = {}
def prove(name, programs=0):
    work = next(iter(all_work(("float32",), (name,))))
    return sorted({proof.result for proof in proofs.proofs_of(work, "cuda:90", programs)})
for name in "SOME".split(","):
    found[name] = prove(name)
original = proofs.body_of
proofs.body_of = lambda text: original(text).replace("bar.sync", "//")
found["no barriers"] = prove("mean_all", proofs.SEVERAL)
proofs.body_of = original
found["one value"] = prove("any_all_dims")
proofs.AllSchedules._do_bar = lambda self, item, mask: None
found["one value, no barriers"] = prove("any_all_dims")
print(json.dumps(found))
""".replace("SOME", SOME)


def test_some_are_proved() -> None:
    """In a process of its own: Triton is interpreted in this one. Without its barriers a kernel is refused; so are
    writes of one value, of which the executor sees no more than that they are equal."""
    pytest.importorskip("sentryward")
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("no barriers") == ["potential_race"]
    assert found.pop("one value") == ["one_value"] and found.pop("one value, no barriers") == ["duplicates"]
    assert found == {name: ["race_free"] for name in SOME.split(",")}


def test_what_is_not_proved_is_listed_with_its_reason() -> None:
    """Of the last run of all. Both lists may only shrink: a row that is proved by now must leave them."""
    rows = json.loads(RESULTS.read_text())["proofs"]["rows"]
    assert sum(row["result"] in ("race_free", "one_value") for row in rows) > 1000
    assert not [row for row in rows if row["result"] == "potential_race"]
    twice = {row["case"] for row in rows if row["result"] == "duplicates"}
    assert twice == set(DUPLICATES)
    assert _by_case(rows) == {case: reason for reason, cases in UNPROVED.items() for case in cases}


def _by_case(rows: list[Mapping[str, str]]) -> dict[str, str]:
    """The reason of each case that is neither proved nor explained."""
    left = [row for row in rows if row["result"] not in ("race_free", "one_value", "duplicates")]
    return {row["case"]: row["reason"].partition(":")[0] for row in left}
