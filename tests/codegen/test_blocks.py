"""Blocks of rows and columns, where some tensors of a kernel are dense along the rows and some along the columns."""

from __future__ import annotations

import pytest
import torch

from autofuse.codegen.c.body import BLOCK_COLUMNS, BLOCK_ROWS
from autofuse.codegen.c.knobs import default_config, knobs_for
from autofuse.codegen.lowering.lower import lower
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import make_config
from tests.cases import trace
from tests.codegen.conftest import Verify

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
    config = make_config({**dict(default_config(lower(form))), "blocks": blocks})
    rows = (1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS)
    cols = (1, BLOCK_COLUMNS - 1, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 20 * BLOCK_COLUMNS + 3)
    sizes = [(a, b) for a in (*rows, *cols) for b in (*rows, *cols)]
    verify(form, sizes, ("normal",), config, threads=threads)


def test_images_turned_and_not(verify: Verify) -> None:
    form = turned()
    assert dict(default_config(lower(form)))["blocks"] is True
    verify(form, ((2, 9, 10), (1, 1, 1), (3, 33, 17), (1, 64, 67)), ("normal", "special"), None, threads=2)


def test_only_where_something_is_turned() -> None:
    straight = trace(lambda x, y: x * 2 + y, [torch.randn(5, 7), torch.randn(5, 7)])
    column = trace(lambda x, y: x * 2 + y, [torch.randn(5, 7), torch.randn(5, 1)])
    summed = trace(lambda x, y: (x.t() + y).sum(1), [torch.randn(7, 5), torch.randn(5, 7)])
    for form in (straight, column, summed):
        assert "blocks" not in {knob.name for knob in knobs_for(lower(form))}
    assert "blocks" in {knob.name for knob in knobs_for(lower(matrix()))}
