"""Kernels of ours as compiled for a GPU: right, within their memory, ordered; and a spoilt one is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# One of each kind: pointwise, a row in several warps, column sums in two passes, an index that is checked.
SOME = "add_bias_gelu,layer_norm_backward_add,softmax_middle,index_select,cumsum_backward,mean_all"

SPOILT = """
import json
import torch
from autofuse.codegen.triton.generator import TritonKernelGenerator
from ptx import kernels, text
from ptx.work import Outcome, all_work, execute

found = {}
(work,) = list(all_work(("float32",), ("layer_norm_backward_add",)))
original = kernels.parse
changes = {
    "nothing": lambda source: source,
    "no barrier": lambda source: source.replace("bar.sync", "//"),
    "other bound": lambda source: source.replace("setp.lt.s32", "setp.ge.s32"),
    "other number": lambda source: source.replace("sub.f32", "add.f32"),
}
for name, change in changes.items():
    kernels.parse = lambda source: original(change(source))
    outcome = Outcome()
    execute(work, outcome, 1)
    found[name] = sorted(kind for kind in ("right", "wrong", "faults", "races") if outcome.counts[kind])
kernels.parse = original
(work,) = list(all_work(("float32",), ("add_layer_norm",)))[:1]
outcome = Outcome()
execute(work, outcome, 1, built_in=32)
found["a product in each lane"] = sorted(kind for kind in ("right", "wrong", "faults", "races") if outcome.counts[kind])
print(json.dumps(found))
"""


def python(*words: str) -> str:
    """In a process of its own: Triton is interpreted in this one."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_compiled_kernels_are_right(tmp_path: Path) -> None:
    out = tmp_path / "ptx.json"
    said = python("-m", "ptx", "--only", SOME, "--dtypes", "float32,bfloat16", "--sizes", "1", "--json", str(out))
    counts = json.loads(out.read_text())["share 0/1"]["counts"]
    assert counts["right"] >= 25 and counts["nodes"] >= 10 and counts["opcodes"] > 40, said
    assert not any(counts.get(kind) for kind in ("wrong", "faults", "races", "unsupported", "refused")), said


def test_a_spoilt_kernel_is_found() -> None:
    found = json.loads(python("-c", f"import triton\n{SPOILT}").splitlines()[-1])
    assert found["nothing"] == ["right"]
    assert "races" in found["no barrier"]
    assert "faults" in found["other bound"] or "wrong" in found["other bound"]
    assert "wrong" in found["other number"]
    # Contracted with the first addition over lanes, a product would be rounded in one lane and not in its neighbour.
    assert found["a product in each lane"] == ["right"]


def test_a_name_that_is_none() -> None:
    done = subprocess.run([sys.executable, "-m", "ptx", "--only", "nope"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "expected names of nodes such as softmax, found 'nope'" in done.stderr
