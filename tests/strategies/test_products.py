"""Groups around products, their strategies, and each strategy against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.ir.records import Bucket
from autofuse.strategies.enumeration import BLOCKS, is_large, strategies_of
from autofuse.strategies.groups import Group
from autofuse.strategies.rewrites import BIAS_APART
from tests.strategies.harness import check, one_group, plan, strategy
from tests.strategies.modules import linear

T = torch.Tensor


ACTIVATIONS: dict[str, Callable[[T], T]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_product_takes_its_activation_inside(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.randn(24, 40, dtype=dtype), torch.randn(56, 40, dtype=dtype), torch.randn(56, dtype=dtype)]
    with torch.no_grad():
        (planned,) = plan(linear(ACTIVATIONS[name]), inputs, [(0, 0)])
    group = one_group([planned])
    assert group.kind == "matmul"
    fused = strategy(group, "onednn_linear")
    assert [op.target for op in fused.form.operations] == ["vendor.linear.default"] and not fused.parts
    lacks_bf16 = dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for kind in strategies_of(group.node.form):
        if lacks_bf16 and kind.name.startswith(
            "onednn"
        ):  # without AVX-512: a candidate that fails, and no wrong result
            with pytest.raises(RuntimeError, match="could not create a primitive"):
                check(group.node.form, kind, [(7,)])
        else:
            assert check(group.node.form, kind, [(1,), (2,), (7,), (64,)]) >= 0.0


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (1, 1, 5), (2, 3, 4, 5)])
def test_a_product_of_any_rank_with_a_residual(shape: tuple[int, ...]) -> None:
    def function(x: T, w: T, b: T, r: T) -> T:
        return r + F.linear(x, w, b)

    inputs = [torch.randn(shape), torch.randn(6, 5), torch.randn(6), torch.randn(*shape[:-1], 6)]
    with torch.no_grad():
        group = one_group(plan(function, inputs))
    names = [w.name for w in strategies_of(group.node.form)]
    assert names == ["parts", "onednn_linear", "onednn_product", "bias_apart", "generated_product"]
    for kind in strategies_of(group.node.form):
        check(group.node.form, kind, [()])


def test_a_value_that_others_need_keeps_the_product_apart() -> None:
    def function(x: T, w: T) -> tuple[T, T]:
        y = x @ w
        return torch.relu(y), y

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(8, 8), torch.randn(8, 8)])
    assert planned.groups == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.relu((x @ w).t()),
        lambda x, w: (x @ w).t() + x,
        lambda x, w: (x @ w).t() + (w @ x).t(),
        lambda x, w: torch.tanh((x @ w).view(2, 3, 2, 3).transpose(1, 2)),
        lambda x, w: torch.relu((x @ w).view(4, 9)),
    ],
)
def test_a_product_is_not_joined_with_what_reads_it_in_another_order(function: Callable[[T, T], T]) -> None:
    """Square ones: their sizes do not tell."""
    with torch.no_grad():
        planned = plan(function, [torch.randn(6, 6), torch.randn(6, 6)])
    for group in (group for p in planned for group in p.groups):
        for kind in strategies_of(group.node.form):
            check(group.node.form, kind, [()])


def test_training_keeps_relu_inside_and_gelu_outside() -> None:
    """relu's gradient needs its result, gelu's needs the product itself."""
    w = torch.randn(16, 16, requires_grad=True)
    graphs = plan(lambda x, w: torch.relu(x @ w).sum(), [torch.randn(8, 16), w])
    assert [len(p.groups) for p in graphs if p.phase == "forward"] == [1]
    graphs = plan(lambda x, w: F.gelu(x @ w).sum(), [torch.randn(8, 16), w])
    assert [len(p.groups) for p in graphs if p.phase == "forward"] == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bias_may_be_added_by_the_kernel_that_follows(dtype: torch.dtype) -> None:
    """Also where backward needs the product with its bias; not in 16 bits, where it would be rounded once more."""
    inputs = [torch.randn(2, 12, 40, dtype=dtype), torch.randn(56, 40, dtype=dtype), torch.randn(56, dtype=dtype)]
    graphs = plan(linear(F.gelu), [inputs[0], *(t.requires_grad_() for t in inputs[1:])], [(0, 1)])
    groups = [group for p in graphs if p.phase == "forward" for group in p.groups]
    if dtype == torch.bfloat16:
        assert not [w for group in groups for w in strategies_of(group.node.form) if w.name == BIAS_APART]
        return
    (group,) = groups
    apart = strategy(group, BIAS_APART)
    assert [op.short_name for op in apart.form.operations if "view" not in op.short_name] == ["mm", "add", "gelu"]
    assert len(apart.parts) == 1 and len(apart.form.outputs) == 2
    check(group.node.form, apart, [(1,), (7,), (12,)], ("normal", "special", "zeros"))


def test_blocks_of_rows_have_the_bias_in_their_kernel() -> None:
    with torch.no_grad():
        group = one_group(plan(linear(F.gelu), [torch.randn(3000, 8), torch.randn(512, 8), torch.randn(512)]))
    blocks = strategy(group, BLOCKS)
    assert [op.short_name for op in blocks.form.operations] == ["mm", "add", "gelu"] and len(blocks.parts) == 1
    check(group.node.form, blocks, [()])


def test_a_long_product_by_itself_may_be_onednns() -> None:
    """MKL is made for Intel's processors; which of the two is faster is measured."""
    inputs = [torch.randn(160, 96), torch.randn(96, 128), torch.randn(128)]
    with torch.no_grad():
        group = one_group(plan(lambda x, w, b: torch.addmm(b, x, w), inputs, [(0, 0)]))
    names = [w.name for w in strategies_of(group.node.form)]
    assert group.members == () and names == ["parts", "onednn_product", "generated_product"]
    fused = strategy(group, "onednn_product")
    assert not fused.parts
    check(group.node.form, fused, [(1,), (2,), (7,), (160,)], ("normal", "special", "large", "zeros"))


@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_a_product_of_sizes_that_vary_is_judged_by_those_that_come(name: str) -> None:
    """A graph may be captured at its smallest sizes."""
    outer = (4,) if name == "bmm" else ()
    inputs = [torch.randn(*outer, 5, 96), torch.randn(*outer, 96, 32)]
    with torch.no_grad():
        group = one_group(plan(getattr(torch, name), inputs, [(0, len(outer))]))
    form = group.node.form
    small, large = (Bucket(((low, high),)) for low, high in ((5, 8), (513, 1024)))
    assert [w.name for w in strategies_of(form) if is_large(w, form, small)] == ["parts"]
    assert "generated_product" in [w.name for w in strategies_of(form) if is_large(w, form, large)]


def test_a_transposed_operand_is_copied_by_a_kernel_first() -> None:
    inputs = [torch.randn(160, 96), torch.randn(160, 128)]
    with torch.no_grad():
        group = one_group(plan(lambda x, g: x.t() @ g, inputs, [(0, 0), (1, 0)]))
    names = [w.name for w in strategies_of(group.node.form)]
    assert names == ["parts", "onednn_product", "onednn_product_rows", "generated_product"]
    copied = strategy(group, "onednn_product_rows")
    assert [kernel.node.operation_names for kernel in copied.kernels] == ["clone"]
    for name in names[1:]:
        check(group.node.form, strategy(group, name), [(1,), (2,), (7,), (160,)], ("normal", "special"))


@pytest.mark.parametrize(
    ("rows", "dtype"), [(4, torch.float32), (160, torch.bfloat16), (160, torch.float64)], ids=["short", "bf16", "f64"]
)
def test_products_that_onednn_gains_nothing_for(rows: int, dtype: torch.dtype) -> None:
    """Short ones, 16 bits, for which aten calls oneDNN by itself, and float64, which oneDNN has not."""
    inputs = [torch.randn(rows, 96, dtype=dtype), torch.randn(96, 128, dtype=dtype)]
    with torch.no_grad():
        (planned,) = plan(torch.mm, inputs)
    assert planned.groups == []


def recurrent(x: T, h: T, w: T) -> T:
    for t in range(4):
        h = torch.tanh(x[:, t] + h @ w)
    return h


def test_products_that_are_added_up_are_one_product() -> None:
    """The gradient of a weight that every step uses."""
    inputs = [torch.randn(6, 4, 16), torch.randn(6, 16), torch.randn(16, 16, requires_grad=True)]
    graphs = plan(recurrent, inputs, [(0, 0), (1, 0)])
    (group,) = [g for p in graphs if p.phase == "backward" for g in p.groups if len(g.node.kernels) > 4]
    joined = strategy(group, "joined_products")
    assert [op.target for op in joined.form.operations] == ["vendor.sum_of_products.default"]
    values = [(n,) * len(group.node.form.symbols) for n in (1, 2, 7, 33)]
    check(group.node.form, joined, values, ("normal", "special", "large", "zeros"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_no_product_is_added_as_before(dtype: torch.dtype) -> None:
    def function(r: T, *pairs: T) -> T:
        total = r
        for a, b in zip(pairs[::2], pairs[1::2], strict=True):
            total = total + a @ b
        return total + r.tanh()

    shapes = [(9, 5), (5, 7), (9, 1), (1, 7), (9, 13), (13, 7)]  # terms of any length
    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(9, 7, dtype=dtype), *(torch.randn(s, dtype=dtype) for s in shapes)])
    (group,) = [g for g in planned.groups if any(w.name == "joined_products" for w in strategies_of(g.node.form))]
    joined = strategy(group, "joined_products")
    assert sum(op.short_name == "mm" for op in joined.form.operations) == 0
    check(group.node.form, joined, [()], ("normal", "special", "large", "zeros"))


def test_a_product_that_somebody_else_reads_stays() -> None:
    def function(a: T, b: T, c: T) -> tuple[T, T]:
        first = a @ b
        return first + a @ c + b @ c, first

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(8, 8) for _ in range(3)])
    names = [w.name for g in planned.groups for w in strategies_of(g.node.form)]
    assert "joined_products" not in names


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(0, 40), seed=st.integers(0, 3))
def test_ways_of_one_group_agree_at_any_size(rows: int, seed: int) -> None:
    group = _gated()
    for kind in strategies_of(group.node.form):
        if rows > 1:
            check(group.node.form, kind, [(rows,)])


_KNOWN: list[Group] = []


def _gated() -> Group:
    if not _KNOWN:
        with torch.no_grad():
            inputs = [torch.randn(12, 16), torch.randn(24, 16), torch.randn(24, 16)]
            function = lambda x, a, b: F.silu(F.linear(x, a)) * F.linear(x, b)  # noqa: E731
            _KNOWN.append(one_group(plan(function, inputs, [(0, 0)])))
    return _KNOWN[0]


def test_a_gate_is_one_group_with_both_products() -> None:
    group = _gated()
    assert sorted(op.short_name for op in group.node.kernels) == ["mm", "mm", "mul", "silu"]
    fused = strategy(group, "onednn_linear")
    assert sum(op.target.startswith("vendor.") for op in fused.form.operations) >= 1
