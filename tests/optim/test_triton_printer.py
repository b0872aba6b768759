"""Optimizer steps in Triton: every algorithm and flag in the interpreter and compiled, one launch a group."""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.source import Assumptions
from autofuse.codegen.triton.targets import limits_of, prune_reason
from autofuse.daemon.workers.interpreter import Interpreted, InterpreterRunner
from autofuse.gpu.modules import load_artifact
from autofuse.optim import calls
from autofuse.optim.calls import ExternCall, TritonCall, make_call
from autofuse.optim.candidate import StepCandidate
from autofuse.optim.form import DTYPES, StepForm
from autofuse.optim.step_bench import check
from autofuse.optim.tensors import CPU, copied, make_arguments, torch_function, with_variant, written
from autofuse.optim.triton_printer import KNOBS, columns, print_triton_step
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.verify import Wrong
from tests.gpu.fake_driver import artifact_of, cpu_calls, fake_driver
from tests.optim.test_c_printer import CASES, FLAGS

SIZES = (1, 7, 0, 512, 1025, 2611)  # a whole block, several, and parts
COUNTING = [name for name in FLAGS if name != "sgd"]


def candidate(form: StepForm, **config: int) -> StepCandidate:
    source = print_triton_step(form, tuple(sorted(config.items())))
    return StepCandidate("triton_multi", json.dumps(source.to_json()).encode(), source.name)


def call_of(form: StepForm, **config: int) -> TritonCall:
    made = make_call(form, Interpreted(print_triton_step(form, tuple(config.items()))), CPU)
    assert isinstance(made, TritonCall)
    return made


def stepped(form: StepForm, arguments: dict[str, Any], **config: int) -> list[Tensor]:
    call = call_of(form, **config)
    assert call.pack(arguments, 1) is None
    call.run()
    return written(form, arguments)


@pytest.mark.parametrize(("algorithm", "flags"), CASES, ids=[f"{a}-{'-'.join(f) or 'plain'}" for a, f in CASES])
def test_a_step_is_torchs_step(algorithm: str, flags: tuple[str, ...]) -> None:
    form = StepForm(algorithm, flags, "float32", SIZES)
    assert check(form, candidate(form, block=512), 1, InterpreterRunner()) < 4.0


@pytest.mark.parametrize(("algorithm", "dtype"), list(itertools.product(FLAGS, DTYPES)))
def test_a_step_in_any_dtype(algorithm: str, dtype: str) -> None:
    form = StepForm(algorithm, FLAGS[algorithm][-1], dtype, SIZES)
    assert check(form, candidate(form), 1, InterpreterRunner()) < 16.0


@pytest.mark.parametrize("algorithm", COUNTING)
def test_counters_on_the_device_are_read_and_counted_there(algorithm: str) -> None:
    form = StepForm(algorithm, FLAGS[algorithm][-1], "float32", (3, 0, 1300), "fused", counters="device")
    assert len(print_triton_step(form, ()).passes) == 2 and form.vendors == ()
    assert check(form, candidate(form), 1, InterpreterRunner()) < 4.0


def test_more_tensors_than_one_program_of_the_first_pass_takes() -> None:
    form = StepForm("adam", (), "float32", tuple(n % 3 for n in range(130)), "fused", counters="device")
    ours, theirs = (make_arguments(form, 1) for _ in range(2))
    for n, counters in enumerate(zip(ours["state_steps"], theirs["state_steps"], strict=True)):
        for counter in counters:
            counter.fill_(3.0 * n)
    torch_function("adam")(**with_variant(form, theirs, ""))
    for found, expected in zip(stepped(form, ours), written(form, theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_counters_on_the_host_are_each_tensors_own() -> None:
    form = StepForm("adam", (), "float32", (3, 5, 600, 0))
    ours, theirs = (make_arguments(form, 1) for _ in range(2))
    for n, counters in enumerate(zip(ours["state_steps"], theirs["state_steps"], strict=True)):
        for counter in counters:
            counter.fill_([0.0, 7.0, 7.0, 2.0**24][n])
    call = call_of(form)
    for _ in range(2):
        assert call.pack(ours, 1) is None
        call.run()
        torch_function("adam")(**with_variant(form, theirs, ""))
    assert [float(t) for t in ours["state_steps"]] == [2.0, 9.0, 9.0, 2.0**24]  # as float32 counts
    for found, expected in zip(written(form, ours), written(form, theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_blocks_that_may_not_be_read_in_vectors_are_not() -> None:
    """The code for whole aligned blocks is broken here: only what is aligned, and no part of a block, shows it."""
    form = StepForm("sgd", (), "float32", (1500, 1024, 1023))
    source = print_triton_step(form, (("block", 512),))
    update = "    p = fused(down, g, p)\n"
    assert update in source.text
    broken = replace(source, text=source.text.replace(update, f"{update}    if WHOLE:\n        p = p + 1e6\n"))
    arguments = make_arguments(form, 2)
    odd = torch.empty(1025)[1:]
    arguments["params"][1] = odd.copy_(arguments["params"][1])
    call = make_call(form, Interpreted(broken), CPU)
    assert call.pack(arguments, 1) is None
    call.run()
    blocks = [(param.abs() > 1e5).tolist() for param in arguments["params"]]
    assert blocks[0] == [True] * 1024 + [False] * 476
    assert not any(blocks[1]) and blocks[2] == [True] * 512 + [False] * 511


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_at_odd_addresses_get_the_same_numbers(dtype: str) -> None:
    form = StepForm("adam", ("amsgrad",), dtype, (1500, 512, 33))
    aligned = make_arguments(form, 2)
    shifted = copied(aligned)
    for k, name in enumerate(("params", "grads", *form.states)):
        tensor = shifted[name][k % 2]
        place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
        shifted[name][k % 2] = place.copy_(tensor)
        assert place.data_ptr() % 16
    for found, expected in zip(stepped(form, shifted), stepped(form, aligned), strict=True):
        assert torch.equal(found, expected)


def test_what_is_wrong_is_found() -> None:
    form = StepForm("rmsprop", ("momentum",), "float32", (40,))
    broken = candidate(form)
    text = broken.binary.decode()
    assert "s1 * push" in text
    wrong = replace(broken, binary=text.replace("s1 * push", "s1").encode())
    with pytest.raises(Wrong):
        check(form, wrong, 1, InterpreterRunner())


# ---- compiled ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonCompiler]:
    with TritonCompiler(lambda key: None, lambda key, files: None) as opened:
        yield opened


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
@pytest.mark.parametrize("algorithm", FLAGS)
def test_steps_compile_without_a_gpu(compiler: TritonCompiler, algorithm: str, target: str) -> None:
    counters = "host" if algorithm == "sgd" else "device"
    form = StepForm(algorithm, FLAGS[algorithm][-1], "float32", (5000, 3), device="cuda", counters=counters)
    artifact = compiler.compile(print_triton_step(form, ()), target, [Assumptions(True)])
    assert prune_reason(artifact, limits_of(target)) is None
    assert len(artifact.images) == (1 if counters == "host" else 2)
    assert all(image.image[:4] == b"\x7fELF" for image in artifact.images)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_whole_blocks_are_read_and_written_in_vectors(compiler: TritonCompiler, dtype: str, tmp_path: Path) -> None:
    form = StepForm("adam", (), dtype, (5000, 3), device="cuda")
    artifact = compiler.compile(print_triton_step(form, ()), "cuda:90", [Assumptions(True)])
    path = tmp_path / "step.cubin"
    path.write_bytes(artifact.images[0].image)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout
    assert text.count("LDG.E.128") >= 4 and text.count("STG.E.128") >= 3


# ---- launched ---------------------------------------------------------------------------------------------


def read_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a kernel finds there: the fake device's memory is the host's."""
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def test_one_launch_takes_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the driver, which is a fake: the grid, the table's rows, the tensor of each program."""
    form = StepForm("adam", (), "float32", (1, 2048, 0, 2049))
    source = print_triton_step(form, (("block", 1024),))
    fake = fake_driver()
    fake.forget()
    loaded = load_artifact(Artifact.unpack(artifact_of(source).pack()), 0, driver=fake.driver)
    current, launched_on = [1], []

    def stream(index: int) -> int:
        launched_on.append(current[0])
        return 0x5000 + index

    monkeypatch.setattr(calls, "torch_calls", lambda: replace(cpu_calls(current), raw_stream=stream))
    call = make_call(form, loaded, CPU)
    assert isinstance(call, TritonCall)
    arguments = make_arguments(form, 1, steps=4)
    assert call.pack(arguments, 1) is None
    call.run()
    (seen,) = fake.launches
    assert seen.grid == (1 + 2 + 1 + 3, 1, 1) and seen.stream == 0x5000 and (launched_on, current) == ([0], [1])
    table, blocks, *hidden = seen.params
    assert hidden == [0, 0]
    assert read_at(blocks, seen.grid[0], torch.int32).tolist() == [0, 1, 1, 2, 3, 3, 3]
    names = columns(form)
    rows = read_at(table, len(form.sizes) * len(names), torch.int64).view(len(form.sizes), -1)
    assert rows[:, 0].tolist() == list(form.sizes) and rows[:, 1].tolist() == [0, 1, 3, 4]
    for column, listed in zip((2, 3, 4, 5), ("params", "grads", "exp_avgs", "exp_avg_sqs"), strict=True):
        assert rows[:, column].tolist() == [t.data_ptr() for t in arguments[listed]]
    numbers = rows.view(torch.float64)[:, names.index("down")]
    assert numbers.tolist() == [-(1e-3 / (1 - 0.9**5))] * 4
    assert [float(t) for t in arguments["state_steps"]] == [5.0] * 4
    fake.fail_with(1)
    assert call.pack(arguments, 1) is None
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        call.run()
    assert [float(t) for t in arguments["state_steps"]] == [5.0] * 4  # nothing is done, so torch may still do it


def test_the_fused_variant_counts_on_the_host() -> None:
    """What a GPU's fused kernel gets are copies: torch's own would be given the addresses of the host's counters."""
    form = StepForm("adam", ("decoupled_weight_decay", "weight_decay"), "float32", (40, 3), device="cuda")
    assert "fused" in form.vendors and "foreach" not in form.vendors
    ours, theirs = (make_arguments(form, 5) for _ in range(2))
    given = []

    def fused(**arguments: Any) -> None:
        given.append(arguments["state_steps"])
        torch_function("adam")(**arguments)

    call = ExternCall(form, fused, "fused", CPU)
    for _ in range(2):
        assert call.pack(ours, 1) is None
        call.run()
        torch_function("adam")(**with_variant(form, theirs, "fused"))
    assert not {id(t) for t in ours["state_steps"]} & {id(t) for t in given[0]}
    for found, expected in zip(written(form, ours), written(form, theirs), strict=True):
        assert torch.equal(found, expected)


def test_sizes_are_data() -> None:
    """What was checked on some sizes is the binary for all."""
    few, many = (StepForm("adam", (), "float32", sizes, "fused", counters="device") for sizes in ((3, 700), (9,) * 200))
    texts = [print_triton_step(form, ()).text.partition('"""\n\nimport')[2] for form in (few, many)]
    assert texts[0].replace(few.label, many.label) == texts[1] and "import" in texts[0]


def test_knobs_change_the_binary_and_nothing_else() -> None:
    form = StepForm("adagrad", ("weight_decay",), "float32", (3000, 17))
    expected = None
    for block in KNOBS[0].choices:
        source = print_triton_step(form, (("block", block), ("num_warps", 8)))
        assert source.num_warps == 8 and dict(source.passes[0].constants) == {"BLOCK": block}
        found = stepped(form, make_arguments(form, 4), block=int(block))
        expected = expected or found
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
