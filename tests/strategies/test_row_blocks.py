"""Products in blocks of rows: which groups have them, and each against float64 with sizes around the blocks' edges."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autofuse.strategies import row_blocks
from autofuse.strategies.bundle import pack
from autofuse.strategies.enumeration import BLOCKS, strategies_of
from autofuse.strategies.strategy import Strategy
from autofuse.wrapper.load_strategy import unpack
from tests.strategies.harness import GENERATOR, check, plan

T = torch.Tensor
FORM = 8 * 4  # bytes of a row of eight columns in float32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 rows."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 16 * FORM)


def block_way(
    function: Callable[..., T], inputs: list[T], dynamic: list[tuple[int, int]]
) -> tuple[object, Strategy | None]:
    with torch.no_grad():
        (planned,) = plan(function, inputs, dynamic)
    (group,) = planned.groups
    form = group.node.form
    return form, next((strategy for strategy in strategies_of(form) if strategy.name == BLOCKS), None)


def product_bias_relu(x: T, w: T, b: T) -> T:
    return torch.relu(x @ w + b)


def linear_residual(x: T, w: T, b: T, r: T) -> T:
    return F.gelu(F.linear(x, w, b)) * 0.5 + r


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_blocks_of_a_product(dtype: torch.dtype) -> None:
    inputs = [torch.randn(40, 5, dtype=dtype), torch.randn(5, 8, dtype=dtype), torch.randn(8, dtype=dtype)]
    form, strategy = block_way(product_bias_relu, inputs, [(0, 0)])
    assert strategy is not None and strategy.rows is not None and strategy.rows.is_cut == (True, False, False)
    assert len(strategy.kernels) == 1
    rows = strategy.rows.count
    kinds = ("normal", "special") if dtype is torch.float32 else ("normal",)
    check(form, strategy, [(n,) for n in (0, 1, 2, rows - 1, rows, rows + 1, 3 * rows, 3 * rows + 7)], kinds)


@pytest.mark.parametrize("shape", [(40, 5), (4, 10, 5), (2, 4, 5, 5)])
def test_leading_dims_are_rows_together(shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(shape), torch.randn(8, 5), torch.randn(8), torch.randn(*shape[:-1], 8)]
    form, strategy = block_way(linear_residual, inputs, [])
    assert strategy is not None and strategy.rows is not None and strategy.rows.is_cut.count(True) == 2
    check(form, strategy, [()])


def test_rows_that_vary_in_two_dims() -> None:
    inputs = [torch.randn(4, 10, 5), torch.randn(8, 5), torch.randn(8), torch.randn(4, 10, 8)]
    form, strategy = block_way(linear_residual, inputs, [(0, 0), (0, 1), (3, 0), (3, 1)])
    assert strategy is not None
    check(form, strategy, [(1, 1), (3, 7), (5, 16), (2, 0)])


def test_a_way_in_blocks_survives_the_store() -> None:
    inputs = [torch.randn(40, 5), torch.randn(5, 8), torch.randn(8)]
    _, strategy = block_way(product_bias_relu, inputs, [(0, 0)])
    assert strategy is not None and Strategy.from_json(strategy.to_json()) == strategy
    kernel = GENERATOR.generate_generic_kernel(strategy.kernels[0].node.form)
    from autofuse.ir.records import KernelRecord

    record = pack(strategy, [KernelRecord(kernel.key, kernel.name, kernel.source, kernel.binary)], "cpu")
    loaded = unpack(record.binary, lambda digest, name, binary: kernel.load().entry)
    assert loaded.strategy == strategy and "blocks of 16 rows" in record.source


def test_threads_that_share_a_call_do_not_share_a_block() -> None:
    inputs = [torch.randn(40, 5), torch.randn(5, 8), torch.randn(8)]
    form, strategy = block_way(product_bias_relu, inputs, [(0, 0)])
    assert strategy is not None
    from autofuse.wrapper.node_call import make_launcher
    from tests.strategies.harness import load

    call = make_launcher(form, load(strategy), [2000], 1)
    x = [torch.randn(2000, 5) for _ in range(4)]
    wanted = [product_bias_relu(t, *inputs[1:]) for t in x]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            if not torch.allclose(call(x[number], *inputs[1:]), wanted[number], atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.softmax(x @ w + b, 0),
        lambda x, w, b: torch.relu((x @ w).t()) + 1,
        lambda x, w, b: torch.relu(x.t() @ x).t(),
    ],
    ids=["across_rows", "transposed", "rows_as_columns"],
)
def test_rows_that_need_each_other_have_no_blocks(function: Callable[..., T]) -> None:
    inputs = [torch.randn(48, 8), torch.randn(8, 8), torch.randn(8)]
    with torch.no_grad():
        planned = plan(function, inputs)
    names = [strategy.name for p in planned for g in p.groups for strategy in strategies_of(g.node.form)]
    assert BLOCKS not in names


def test_few_rows_have_no_blocks() -> None:
    inputs = [torch.randn(31, 5), torch.randn(5, 8), torch.randn(8)]
    with torch.no_grad():
        (planned,) = plan(product_bias_relu, inputs)
    assert planned.groups == []
