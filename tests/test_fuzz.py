"""The fuzzer of PyTorch's samples: it finds a wrong kernel, counts what it does not compare, and a few samples pass."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from fuzz import fused
from fuzz.models import try_models
from fuzz.samples import Outcome, name_of, samples, try_sample

ROOT = Path(__file__).resolve().parent.parent
# Each of another kind; `scripts/fuzz samples` tries all operators.
FIXED = (
    "as_strided", "cumsum", "index_put", "logsumexp", "native_layer_norm", "nn.functional.interpolate.bilinear",
    "nn.functional.max_pool2d", "scatter_reduce.amax", "std", "trapezoid",
)  # fmt: skip


def operator(name: str) -> Any:
    return next(op for op in op_db if name_of(op) == name)


@pytest.mark.parametrize("name", FIXED)
def test_a_sample_of_an_operator(name: str) -> None:
    outcome = Outcome()
    for sample in samples(operator(name), torch.float32, random.Random(1), 1):
        try_sample(sample, outcome, 1)
    assert outcome.wrong == [] and (outcome.ran or outcome.skipped)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "entry_of", lambda form: lambda *pointers: None)  # leaves results as memory was
    outcome = Outcome()
    for sample in samples(operator("logaddexp"), torch.float32, random.Random(1), 3):
        try_sample(sample, outcome, 1)
    assert outcome.wrong


def test_a_fault_of_ours_is_no_missing_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(fused, "build_program", broken)
    outcome = Outcome()
    for sample in samples(operator("logaddexp"), torch.float32, random.Random(1), 1):
        try_sample(sample, outcome, 1)
    assert len(outcome.wrong) == 1 and outcome.skipped == {}


def test_the_command_counts_and_repeats() -> None:
    command = [sys.executable, "-m", "fuzz", "samples", "--only", "logaddexp", "--dtypes", "float32", "--samples", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("0 wrong", "0 crashes", "2 operators", "2 samples"))


def test_a_model_is_drawn_and_verified(tmp_path: Path) -> None:
    pytest.importorskip("nnsmith", reason="scripts/fuzz models installs it")
    counts = try_models(100, 5, tmp_path / "last", lambda finding: pytest.fail(finding))
    assert counts["models"] > 0 and counts["candidates"] >= counts["nodes"] > 0
