"""What default settings make of sizes: tiles, warps and launches; and divisions that are multiplications."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from autofuse.codegen.knobs import default_config
from autofuse.codegen.loops import LoopValue
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.scalar import TritonScalars
from autofuse.codegen.triton.source import TritonSource, resolve
from autofuse.ir.records import Config, make_config
from tests.cases import CASES
from tests.tracing import trace

Values = Mapping[str, int]


def printed(function: Callable[..., object], *tensors: torch.Tensor, values: Values) -> tuple[TritonSource, Config]:
    """A node by its default settings for these sizes."""
    kernel = lower(trace(function, list(tensors)))
    config = default_config(triton_knobs(kernel, values, values))
    return print_triton(kernel, config), config


@pytest.mark.parametrize(
    ("columns", "rows_of_a_tile", "warps"),
    [(128, 4, 2), (256, 2, 2), (512, 1, 2), (1000, 1, 4), (2025, 1, 8), (4096, 1, 16), (8192, 1, 32), (16384, 1, 32)],
)
def test_whole_rows_have_eight_elements_a_thread(columns: int, rows_of_a_tile: int, warps: int) -> None:
    _, config = printed(lambda x: torch.softmax(x, 1), torch.zeros(5, 7), values={"s0": 4096, "s1": columns})
    knobs = dict(config)
    assert (knobs["BLOCK_ROWS"], knobs["num_warps"], knobs["persistent"]) == (rows_of_a_tile, warps, True)


def test_long_rows_are_looped_over_where_registers_do_not_hold_them() -> None:
    """Beside column sums, or with much work on each element, 16,384 columns spilled: such kernels are never timed."""
    backward = lower(CASES["layer_norm_backward"].form())
    rows = lower(trace(lambda x: (torch.softmax(torch.tanh(x), 1), torch.erf(x)), [torch.zeros(5, 7)]))
    for kernel, sizes in ((backward, ("s0", "s2")), (rows, ("s0", "s1"))):
        for columns, is_whole in ((8192, True), (16384, False)):
            values = dict.fromkeys(kernel.symbols, 1) | dict(zip(sizes, (4096, columns), strict=True))
            knobs = {knob.name: knob for knob in triton_knobs(kernel, values, values)}
            assert knobs["persistent"].default is is_whole


@pytest.mark.parametrize(
    ("rows", "columns", "launches"), [(64, 512, 1), (256, 512, 1), (257, 512, 2), (4096, 512, 2), (4096, 32768, 1)]
)
def test_columns_are_added_up_by_one_program_where_that_keeps_a_gpu_busy(
    rows: int, columns: int, launches: int
) -> None:
    """Of few rows, and of so many columns that their tiles are enough programs: no second kernel, no scratch memory."""
    values = {"s0": rows, "s1": columns}
    source, _ = printed(lambda x: (x * 2).sum(0), torch.zeros(5, 7), values=values)
    call = resolve(source, values)
    assert len(call.launches) == launches and bool(call.scratch) == (launches == 2)


def test_a_mean_over_a_power_of_two_is_not_divided() -> None:
    """Where the size is built in: another one is divided by, as one that is an argument."""
    kernel = lower(trace(lambda x: x.mean(1), [torch.zeros(5, 7)]))
    config = make_config({"BLOCK_COLS": 512, "BLOCK_ROWS": 1})
    for columns, divides in (({"s1": 512}, False), ({"s1": 500}, True), ({}, True)):
        assert ("div_rn" in print_triton(kernel, config, columns).text) == divides


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_division_by_a_power_of_two_has_the_bits_of_the_multiplication(dtype: str) -> None:
    """Subnormal numbers, infinities and NaN too; beyond the powers whose inverse is normal it stays a division."""
    bits = np.random.default_rng(1).integers(0, 2 ** (8 * np.dtype(dtype).itemsize), 4096, np.uint64)
    numbers = bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    most = {"float32": 126, "float64": 1022}[dtype]
    for exponent in (1, 9, 52, most, -most):
        divisor = np.dtype(dtype).type(2.0) ** np.dtype(dtype).type(exponent)
        operands = [LoopValue("load", dtype), LoopValue("const", dtype, (), float(divisor))]
        text = TritonScalars().expression(LoopValue("div", dtype, (0, 1)), ["x", "y"], operands)
        inverse = np.dtype(dtype).type(float(text.removeprefix("x * ")))
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(numbers / divisor, numbers * inverse)
    for kept in (2.0 ** (most + 1), 3.0, 0.0, float("inf"), "nan"):
        operands = [LoopValue("load", dtype), LoopValue("const", dtype, (), kept)]
        assert "*" not in TritonScalars().expression(LoopValue("div", dtype, (0, 1)), ["x", "y"], operands)
