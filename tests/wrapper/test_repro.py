"""The file of a node and its kernel runs by itself, finds a right kernel right and a wrong one wrong."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autofuse.cli.app import parse
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.inputs import make_inputs
from autofuse.db.rows import KernelSource
from autofuse.db.store import Store
from autofuse.errors import UsageError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import CompileKey, KernelRecord, Measurement
from autofuse.wrapper.repro import repro, sizes_for
from tests.cases import CASES
from tests.report.report_records import GELU, HOT, decision, fill, form, key, open_store, use
from tests.tracing import trace

CASES_OF_ALL_KINDS = ("add_bias_gelu", "layer_norm_backward", "cross_entropy", "gather_sum", "embedding_backward")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def kernel_of(form: NodeForm) -> KernelSource:
    made = FusionKernelGenerator().generate_generic_kernel(form)
    return KernelSource(made.key, made.name, made.source, 0, {})


def text_of(name: str) -> str:
    form = CASES[name].form()
    return repro(form, kernel_of(form), {s: 9 + 2 * n for n, s in enumerate(form.symbols)}, 2, "repro.py")


def run(text: str, folder: Path) -> int:
    file = folder / "repro.py"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(file))
    return int(end.value.code or 0)


@pytest.mark.parametrize("name", CASES_OF_ALL_KINDS)
def test_a_right_kernel_is_found_right(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(text_of(name), tmp_path) == 0
    said = capsys.readouterr().out
    assert "right" in said or "equal" in said
    assert "WRONG" not in said and "eager / kernel" in said


def test_lines_of_a_script_are_comments_whatever_they_hold(tmp_path: Path) -> None:
    form = CASES["add_bias_gelu"].form()
    nasty = 'x.py:3 y = x  # \\xi \\upsilon """Twice.""" \u2028 \n import nothing'
    marked = replace(form, operations=tuple(replace(op, source=nasty) for op in form.operations))
    text = repro(marked, kernel_of(form), dict.fromkeys(form.symbols, 9), 1, "C:\\Users\\x.py")
    assert run(text, tmp_path) == 0


def test_a_mask_of_scores_is_a_mask(tmp_path: Path) -> None:
    form = trace(lambda x, m: torch.softmax(x + m, -1), (torch.randn(3, 8, 8), torch.zeros(8, 8)), dynamic=False)
    text = repro(form, kernel_of(form), {}, 1, "x.py")
    assert run(text, tmp_path) == 0
    assert ("'mask'" in text) == bool(make_inputs(form, {})[1].isinf().any())


def test_a_wrong_kernel_is_found_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of("add_bias_gelu")
    broken = text.replace("0.5f", "0.4f", 1)
    assert broken != text and run(broken, tmp_path) == 1
    assert "WRONG" in capsys.readouterr().out


def test_it_needs_nothing_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "repro.py"
    file.write_text(text_of("add_bias_gelu"))
    assert "import autofuse" not in file.read_text()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = f"import runpy, sys; sys.modules['autofuse'] = None; runpy.run_path({str(file)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nodes_that_no_file_can_hold() -> None:
    compiled = CompileKey("s", "gcc 12.2", "-O3", "avx512")
    drawn = CASES["dropout_scale"].form()
    with pytest.raises(UsageError, match="without random numbers"):
        repro(drawn, KernelSource(compiled, "k", "", 0, {}), {}, 1, "x.py")
    form = CASES["add_bias_gelu"].form()
    with pytest.raises(UsageError, match="found one for a GPU"):
        repro(form, KernelSource(compiled, "k", "import triton\n", 0, {}), {}, 1, "x.py")
    with pytest.raises(UsageError, match="found a strategy of several steps"):
        repro(form, KernelSource(replace(compiled, compiler="way"), "k", "// parts\n", 0, {}), {}, 1, "x.py")


def test_an_optimizers_step_is_refused_with_what_to_type(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path / "store.sqlite3")
    run_id = fill(store)
    step = ("d" * 64, "af_optimizer_adamw_0a0b0c", "adamw", {**form("optimizer.adamw.default"), "optimizer": {}})
    record = KernelRecord(CompileKey("t", "gcc 12.2", "-O3", "avx512"), step[1], "void f(void) {}", b"\x7fELF")
    store.kernels.put(record)
    store.nodes.put_uses(run_id, [use(step, HOT, 9, 9, 0.0)])
    store.results.put_decision(replace(decision(step, HOT, 1.5, "c_multi"), compile_key=record.key.digest))
    store.close()
    assert parse(["repro", "0a0b0c", "--store", str(tmp_path / "store.sqlite3")])
    said = capfd.readouterr().err
    assert "found an optimizer's step; its source: autofuse show af_optimizer_adamw_0a0b0c" in said


def test_sizes_are_those_measured_else_the_largest() -> None:
    form = CASES["add_bias_gelu"].form()
    symbols = form.symbols
    assert sizes_for(form, [(1, 8)] * len(symbols), tuple(range(len(symbols)))) == {
        name: number for number, name in enumerate(symbols)
    }
    assert sizes_for(form, [(1, 8)] * len(symbols), ()) == dict.fromkeys(symbols, 8)


# ---- the commands ---------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A run's store with one real kernel."""
    opened = open_store(tmp_path / "store.sqlite3")
    run_id = fill(opened)
    form = CASES["add_bias_gelu"].form()
    kernel = kernel_of(form)
    node = (GELU[0], GELU[1], GELU[2], form.to_json())
    opened.kernels.put(KernelRecord(kernel.key, kernel.name, kernel.source, b"\x7fELF"))
    found = replace(decision(GELU, HOT, 2.2), compile_key=kernel.key.digest)
    opened.results.put_decision(found)
    sizes = tuple(8 for _ in form.symbols)
    opened.results.put_measurements(
        key(GELU, HOT), [Measurement(found.candidate, "ok", sizes, 5.0, 11.0, 2.2, compile_key=kernel.key.digest)]
    )
    with opened.file.write() as connection:
        from sqlalchemy import update

        from autofuse.db import models

        connection.execute(
            update(models.Node).where(models.Node.fusion_id == GELU[0]).values(form=dict(form.to_json()))
        )
    opened.nodes.put_uses(run_id, [replace(use(GELU, HOT, 9, 9, 0.2), node=node[3])])
    yield opened
    opened.close()


def test_show_prints_the_source(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    assert not parse(["show", "--store", str(store.path), GELU[1]])
    said = capfd.readouterr().out
    assert "af_entry" in said and "2.20x of eager's speed when tuned" in said and HOT.label in said


@pytest.mark.parametrize("command", ["show", "repro"])
@pytest.mark.parametrize(
    ("name", "words"),
    [("af_loss", "No candidate beat eager"), ("af_norm", "which has none"), ("GPT", "found the module GPT"),
     ("nonsense", "found 'nonsense'")],
)  # fmt: skip
def test_a_node_without_a_kernel(
    store: Store, capfd: pytest.CaptureFixture[str], command: str, name: str, words: str
) -> None:
    assert parse([command, "--store", str(store.path), name])
    assert words in capfd.readouterr().err


def test_a_bucket_that_is_not_there(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(["show", "--store", str(store.path), GELU[1], "--bucket", "s9=1"])
    assert f"its buckets: {HOT.label!r}" in capfd.readouterr().err


def test_repro_writes_a_file_that_runs(store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "made.py"
    assert not parse(["repro", "--store", str(store.path), GELU[1], "--out", str(file)])
    assert f"written to {file}; type: python {file}" in capfd.readouterr().out
    assert run(file.read_text(), tmp_path) == 0
    assert parse(["repro", "--store", str(store.path), GELU[1], "--out", str(tmp_path / "no" / "x.py")])
    assert "--out FILE" in capfd.readouterr().err
