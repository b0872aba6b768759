"""A model trained on a device that executes PTX: from the session to the driver, from the loss to the optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import triton
import json
from ptx.train import DRIVER, WITHIN, train

def told(trained):
    return {**trained.to_json(), "within": trained.error <= WITHIN, "kernels": trained.kernels}

print(json.dumps(told(train("small", 5))))
changed = DRIVER.change(lambda text: text.replace("sub.f32", "add.f32"))
print(json.dumps({**told(train("small", 5)), "changed": changed}))
"""


@pytest.mark.skipif(
    torch.backends.cuda.is_built() or not torch.__version__.startswith("2.13."),
    reason="the device rests on a build without CUDA, and on places in tables of torch's functions",
)
def test_a_model_is_trained_on_compiled_kernels() -> None:
    """In a process of its own, which gets a CUDA device for good. Then once more with kernels that are wrong."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    right, wrong = map(json.loads, done.stdout.splitlines()[-2:])
    assert right["problems"] == [] and right["within"], right
    assert right["calls of nodes"] > right["of them by kernels"] >= 20  # the first step is eager's
    names = "".join(right["kernels"])
    assert "layer_norm_backward" in names and "optimizer_adamw" in names and "log_softmax" in names, names
    assert wrong["changed"] > 0 and not wrong["within"], wrong
