"""Blocks of rows and columns, where some tensors of a kernel are dense along the rows and some along the columns."""

from __future__ import annotations

import pytest
import torch

from autofuse.codegen.c.build import compile_source, find_toolchain, flags_for
from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.c.transposed_blocks import BLOCK_COLUMNS, BLOCK_ROWS
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import make_config
from autofuse.wrapper.node_call import make_launcher
from tests.codegen.conftest import Verify
from tests.tracing import trace

aten = torch.ops.aten


def turned() -> NodeForm:
    """[s0, 6, s1, s2], channels last in the second tensor only."""
    x, y = torch.randn(2, 6, 9, 10), torch.randn(2, 6, 9, 10).contiguous(memory_format=torch.channels_last)
    return trace(lambda x, y: aten.clone.default(x.exp() + y, memory_format=torch.channels_last), [x, y], static=(6,))


def matrix() -> NodeForm:
    return trace(lambda x, y: x.t() * 2 + y, [torch.randn(7, 5), torch.randn(5, 7)])


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_at_the_edges_of_blocks(verify: Verify, blocks: bool, threads: int) -> None:
    form = matrix()
    config = make_config({**dict(default_config(knobs_for(lower(form)))), "blocks": blocks})
    rows = (1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS)
    cols = (1, BLOCK_COLUMNS - 1, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 20 * BLOCK_COLUMNS + 3)
    sizes = [(a, b) for a in (*rows, *cols) for b in (*rows, *cols)]
    verify(form, sizes, ("normal",), config, threads=threads)


def test_images_turned_and_not(verify: Verify) -> None:
    form = turned()
    assert dict(default_config(knobs_for(lower(form))))["blocks"] is True
    verify(form, ((2, 9, 10), (1, 1, 1), (3, 33, 17), (1, 64, 67)), ("normal", "special"), None, threads=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.bfloat16, torch.float16, torch.uint8])
def test_elements_of_any_size(verify: Verify, dtype: torch.dtype) -> None:
    left, right = (torch.randint(0, 9, size).to(dtype) for size in ((7, 5), (5, 7)))
    verify(
        trace(lambda x, y: x.t() * 2 + y, [left, right]), ((70, 37), (16, 16), (33, 1)), ("normal",), None, threads=2
    )


def test_several_results_and_one_of_a_row(verify: Verify) -> None:
    """One of each order, one element a row, one a column."""
    row, column = torch.randn(5, 1), torch.randn(1, 7)
    form = trace(
        lambda x, y, r, c: (x.t() + y, (x + y.t()) * 2, r.exp(), c + 1, x.t() * r - c),
        [torch.randn(7, 5), torch.randn(5, 7), row, column],
    )
    assert dict(default_config(knobs_for(lower(form))))["blocks"] is True
    verify(form, ((7, 5), (130, 67), (1, 1), (64, 16)), ("normal", "special"), None, threads=2)


def test_units_of_what_is_put_together(verify: Verify) -> None:
    """Branches that are channels last, side by side in rows: each is read once and stored where it belongs."""
    images = [torch.randn(2, c, 9, 10).contiguous(memory_format=torch.channels_last) for c in (16, 48, 32)]
    form = trace(
        lambda x, y, z: aten.clone.default(torch.cat([x.relu(), y, z], 1), memory_format=torch.contiguous_format),
        images,
        static=(16, 48, 32),
    )
    kernel = lower(form)
    assert len(kernel.stores) == 6 and sum(value.op == "load" for value in kernel.values) == 6
    verify(form, ((2, 9, 10), (1, 1, 1), (3, 8, 17)), ("normal", "special"), None, threads=2)


def test_what_is_read_under_a_test_is_not_read_ahead(verify: Verify) -> None:
    """A padded tensor that is turned: outside of it nothing may be read."""
    form = trace(lambda x, y: aten.constant_pad_nd.default(x, [1, 2]).t() + y, [torch.randn(5, 7), torch.randn(10, 5)])
    verify(form, ((5, 7), (67, 33)), ("normal",), None, threads=2)


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-mno-avx",)])
def test_with_narrower_registers(flags: tuple[str, ...]) -> None:
    toolchain = find_toolchain()
    if not toolchain.is_x86:
        pytest.skip("flags of x86")
    form = trace(lambda x: aten.clone.default(x.t(), memory_format=torch.contiguous_format), [torch.randn(7, 5)])
    kernel = lower(form)
    source = print_c(kernel, default_config(knobs_for(kernel)))
    binary = compile_source(source.text, toolchain, (*flags_for(toolchain), *flags))
    entry = load_kernel(binary, source.name).entry
    for size in ((7, 5), (64, 16), (67, 133)):
        x = torch.randn(size)
        assert torch.equal(make_launcher(form, entry, size, 2)(x), x.t())


def test_only_where_something_is_turned() -> None:
    straight = trace(lambda x, y: x * 2 + y, [torch.randn(5, 7), torch.randn(5, 7)])
    column = trace(lambda x, y: x * 2 + y, [torch.randn(5, 7), torch.randn(5, 1)])
    summed = trace(lambda x, y: (x.t() + y).sum(1), [torch.randn(7, 5), torch.randn(5, 7)])
    for form in (straight, column, summed):
        assert "blocks" not in {knob.name for knob in knobs_for(lower(form))}
    assert "blocks" in {knob.name for knob in knobs_for(lower(matrix()))}
