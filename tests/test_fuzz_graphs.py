"""The fuzzer of random graphs: some pass, a wrong kernel is found and kept, what is said otherwise is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fuzz import candidates
from fuzz.check import check, row_of, run
from fuzz.graphs import Input, Program, programs
from fuzz.search import search
from tests.cases import CASES
from tests.tracing import example, trace

ROOT = Path(__file__).resolve().parent.parent
FREE = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(FREE, max_examples=20)
@given(programs())
def test_random_graphs_are_eagers(program: Program) -> None:
    """About five seconds of it; `scripts/fuzz graphs` takes an hour."""
    assert check(program).wrong == [], str(program)


@settings(FREE, max_examples=60)
@given(programs())
def test_what_is_said_otherwise_is_the_same_in_eager(program: Program) -> None:
    for other in (program.with_idle_view(), program.in_another_order()):
        try:
            expected = run(program.function, program, program.make_inputs())
        except RuntimeError:  # a gradient of what has been written over
            return
        found = run(other.function, other, other.make_inputs())
        for one, two in zip(found, expected, strict=True):
            assert torch.allclose(one, two, equal_nan=True), f"{program}\n{other}"


PROGRAM = Program(
    (Input((5, 7), "float32", "contiguous"),), ("v0 = i0 * 2", "v1 = torch.tanh(v0)"), ("v1",), False, False, 1
)


def wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that leave results as memory was."""
    monkeypatch.setattr("fuzz.check._KNOWN", {})
    monkeypatch.setattr("fuzz.check._PARTS", {})
    monkeypatch.setattr("fuzz.check.compile_together", lambda texts: [lambda *pointers: None for _ in texts])


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(PROGRAM).wrong == []
    wrong_kernels(monkeypatch)
    found = "\n".join(check(replace(PROGRAM, seed=2)).wrong)
    assert "generic C" in found and "aten.tanh.default(v0)" in found


def test_a_failure_is_kept_and_tried_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong_kernels(monkeypatch)
    told: list[str] = []
    counts = search(0, 10, tmp_path, tmp_path / "last", told.append)
    assert len(told) == 1 and counts["graphs"] > 0 and "def function" in told[0]
    (kept,) = tmp_path.glob("*.txt")
    assert kept.read_text().strip() == told[0].strip()
    again: list[str] = []
    search(0, 1, tmp_path, None, again.append)
    assert [text.partition("\n\n")[0] for text in again] == [told[0].partition("\n\n")[0]]


def test_all_candidates_of_a_node_go_through_the_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[str] = []

    def noted(verifier: Any, form: Any, label: str, make_call: Callable[..., Any], cases: Any) -> Any:
        labels.append(label.split()[0])
        return iter(())

    monkeypatch.setattr("fuzz.check._KNOWN", {})
    monkeypatch.setattr("fuzz.check._PARTS", {})
    monkeypatch.setattr(candidates, "_checked", noted)
    check(replace(PROGRAM, is_dynamic=True))
    assert labels == ["generic", "generic", "specialised", "Triton"]


def test_what_rounding_alone_changes_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sine of a large sum: of float64 no wider result tells that eager's own error is as large."""
    lines = (
        "v0 = torch.tanh(i0)", "v1 = torch.exp(torch.tanh(torch.tanh(v0)))", "v2 = v1.sum()", "v3 = torch.exp(v2)",
        "v4 = torch.tanh(torch.sin(v3))",
    )  # fmt: skip
    program = Program((Input((2, 6), "float64", "transposed"),), lines, ("v0", "v4"), False, False, 1678)
    assert check(program).wrong == []
    monkeypatch.setattr(candidates, "NUDGE", 0)
    monkeypatch.setattr("fuzz.check._KNOWN", {})
    monkeypatch.setattr("fuzz.check._PARTS", {})
    assert "largest error" in "".join(check(program).wrong)


@pytest.mark.parametrize("name", ["add_bias_gelu", "softmax_middle", "var_mean", "any_all_of_one"])
def test_a_node_is_written_as_a_row_of_the_table(name: str) -> None:
    form = CASES[name].form()
    function, _, row = row_of(form, tuple(range(5, 5 + len(form.symbols)))).rpartition("\n")
    namespace = {"torch": torch, "aten": torch.ops.aten, "_t": example}
    exec(function, namespace)
    _, found, examples = eval(row.rstrip(","), namespace)
    assert trace(found, examples).text() == form.text()


def test_the_command_counts(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "fuzz", "graphs", "--graphs", "3", "--minutes", "0", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["graphs"]
    assert found["counts"]["graphs"] >= 3 and found["counts"]["wrong"] == 0 and found["machine"]["torch"]


A, B = Input((6, 3), "float32", "contiguous"), Input((6, 3), "int64", "contiguous")
WIDE = Input((6, 3, 2), "float64", "contiguous")
FOUND = {
    "only the length of places is read": Program(
        (WIDE,),
        (
            "v0 = i0 @ i0.mT", "v1 = v0 == v0", "v2 = i0.float()", "v3 = v2.double()", "v4 = v2.isnan()",
            "v5 = v2[::2].zero_()", "v6 = torch.arange(v4.shape[-1])", "v7 = torch.arange(v2.shape[1])",
            "v8 = torch.arange(v7.shape[0])",
        ),
        ("v1", "v3", "v5", "v6", "v8"), True, False, 1269,
    ),
    "a product by itself beside one that is added up": Program(
        (A,), ("v0 = (i0 @ i0.mT).sum(-1)", "v1 = torch.tanh(v0)", "v2 = i0 @ i0.mT"), ("v1", "v2"), True, False, 1,
    ),
    "integers become floats, for which aten has float32": Program(
        (A, B), ("v0 = i1 / 3", "v1 = torch.lerp(v0, i0, 0.5)", "v2 = v1.double()"), ("v0", "v2"), True, False, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    outcome = check(FOUND[name])
    assert outcome.wrong == [] and not outcome.skipped and outcome.nodes
