"""Groups of captured functions, their ways, and each way against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autofuse.codegen.c.load import load_kernel
from autofuse.errors import CompilerError
from autofuse.fusion.config import FusionConfig
from autofuse.gpu.devices import CPU
from autofuse.ir.device import cpu_device
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, KernelRecord
from autofuse.runtime.device_backends import Backends
from autofuse.strategies import enumeration
from autofuse.strategies.bundle import is_bundle, pack
from autofuse.strategies.enumeration import BLOCKS, cut_strategies, is_large, strategies_of
from autofuse.strategies.extern_kernels import MAX_PACKED, Folded
from autofuse.strategies.groups import Group
from autofuse.strategies.rewrites import BIAS_APART
from autofuse.strategies.strategy import Strategy
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.verify import GuardedAllocator, Verifier
from autofuse.wrapper.load_strategy import unpack
from autofuse.wrapper.node_call import CallSite, make_launcher
from autofuse.wrapper.strategy_call import LoadedStrategy
from tests.strategies.harness import GENERATOR, Planned, check, load, plan

T = torch.Tensor


def linear(activation: Callable[[T], T]) -> Callable[..., T]:
    return lambda x, w, b: activation(F.linear(x, w, b))


def one_group(planned: list[Planned]) -> Group:
    (group,) = [g for p in planned for g in p.groups]
    return group


def strategy(group: Group, name: str) -> Strategy:
    return next(w for w in strategies_of(group.node.form) if w.name == name)


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


# ---- convolutions ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, batch norm, residual, activation."""

    def __init__(self, dims: int = 2, bias: bool = True, groups: int = 1, affine: bool = True, **how: Any) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.conv = conv(8, 8, 3, bias=bias, groups=groups, padding=how.pop("padding", 1), **how)
        self.norm = norm(8, affine=affine)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: T) -> T:
        return torch.relu(self.norm(self.conv(x)))


class Residual(Block):
    def forward(self, x: T) -> T:
        return F.relu(x + self.norm(self.conv(x)))


CONVOLUTIONS: dict[str, Callable[[], tuple[nn.Module, T]]] = {
    "plain": lambda: (Block(), torch.randn(2, 8, 9, 11)),
    "no bias": lambda: (Block(bias=False), torch.randn(2, 8, 9, 11)),
    "grouped": lambda: (Block(groups=4), torch.randn(2, 8, 9, 11)),
    "depthwise": lambda: (Block(groups=8), torch.randn(1, 8, 7, 7)),
    "strided": lambda: (Block(stride=2, padding=0), torch.randn(3, 8, 9, 11)),
    "dilated": lambda: (Block(dilation=2, padding=2), torch.randn(2, 8, 9, 11)),
    "not affine": lambda: (Block(affine=False), torch.randn(2, 8, 9, 11)),
    "residual": lambda: (Residual(), torch.randn(2, 8, 9, 11)),
    "three dims": lambda: (Block(dims=3), torch.randn(2, 8, 4, 5, 6)),
    "channels last": lambda: (Residual(), torch.randn(2, 8, 9, 11).to(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_takes_norm_residual_and_activation(name: str) -> None:
    module, x = CONVOLUTIONS[name]()
    with torch.no_grad():
        (planned,) = plan(module.eval(), [x], [(0, d) for d in range(2, x.dim())])
    group = one_group([planned])
    fused = strategy(group, "onednn_conv")
    assert [op.target for op in fused.form.operations] == ["vendor.convolution.default"]
    assert "folded" in fused.detail
    values = [tuple(5 + 2 * n for n in range(len(group.node.form.symbols))), (8,) * len(group.node.form.symbols)]
    for kind in strategies_of(group.node.form):
        check(group.node.form, kind, values)
        check(group.node.form, kind, values[:1], ("large", "zeros"))


def test_a_bottleneck_of_two_branches_is_one_group_of_two_convolutions() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(bias=False), Block()

        def forward(self, x: T) -> T:
            return torch.relu(self.first.norm(self.first.conv(x)) + self.second.norm(self.second.conv(x)))

    with torch.no_grad():
        (planned,) = plan(Two().eval(), [torch.randn(2, 8, 9, 11)])
    group = one_group([planned])
    fused = strategy(group, "onednn_conv")
    assert [op.short_name for op in fused.form.operations] == ["convolution", "convolution"]
    assert all(op.target.startswith("vendor.") for op in fused.form.operations)
    assert len(group.node.kernels) == 6
    check(group.node.form, fused, [()])


@pytest.mark.parametrize("how", ["data", "in place", "load", "buffer"])
def test_folded_weights_follow_every_change_of_parameters(how: str) -> None:
    """Also those written through ``.data``, which no version counter shows."""
    module = Block().eval()
    x = torch.randn(2, 8, 9, 11)
    with torch.no_grad():
        (planned,) = plan(module, [x])
        group = one_group([planned])
        loaded = load(strategy(group, "onednn_conv"))
        form = group.node.form
        call = loaded.make_call(CallSite(form, (), 2))
        by_name = {
            "conv.weight": module.conv.weight,
            "conv.bias": module.conv.bias,
            "norm.weight": module.norm.weight,
            "norm.bias": module.norm.bias,
        }
        order = _inputs_of(group, module, x)
        torch.testing.assert_close(call(*order), module(x), rtol=1e-4, atol=1e-5)
        if how == "data":
            module.conv.weight.data[3, 2, 1, 1] += 0.5
        elif how == "in place":
            module.norm.bias.mul_(2.0)
        elif how == "buffer":
            module.norm.running_var[5] *= 3.0
        else:
            module.load_state_dict({k: v + 0.25 for k, v in module.state_dict().items()})
        assert by_name["conv.bias"] is module.conv.bias
        torch.testing.assert_close(call(*order), module(x), rtol=1e-4, atol=1e-5)


def _inputs_of(group: Group, module: nn.Module, x: T) -> list[T]:
    """The group's inputs, told apart by how the convolution and the norm read them."""
    ops = {op.short_name: op for op in group.node.form.operations}
    conv, norm = ops["convolution"], ops["_native_batch_norm_legit_no_training"]
    table = {conv.args[0].name: x, conv.args[1].name: module.conv.weight, conv.args[2].name: module.conv.bias}
    names = ("weight", "bias", "running_mean", "running_var")
    table |= {ref.name: getattr(module.norm, name) for ref, name in zip(norm.args[1:5], names, strict=True)}
    return [table[item.name] for item in group.node.form.inputs]


def test_training_folds_nothing() -> None:
    graphs = plan(Block().train(), [torch.randn(2, 8, 9, 11)])
    assert all(
        g.kind != "conv" or "onednn_conv" not in [w.name for w in strategies_of(g.node.form)]
        for p in graphs
        for g in p.groups
    )


# ---- attention ---------------------------------------------------------------------------------------


def by_hand(q: T, k: T, v: T) -> T:
    return torch.softmax(q @ k.transpose(-2, -1) * (1.0 / math.sqrt(16)), -1) @ v


def masked(q: T, k: T, v: T, mask: T) -> T:
    scores = (q @ k.transpose(-2, -1)) / 4.0
    return torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ v


def biased(q: T, k: T, v: T, bias: T) -> T:
    return torch.softmax((q @ k.transpose(-2, -1)) * 0.25 + bias, dim=-1) @ v


def heads(function: Callable[..., T]) -> Callable[..., T]:
    def split(q: T, k: T, v: T, *rest: T) -> T:
        q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in (q, k, v))
        return function(q, k, v, *rest).transpose(1, 2).contiguous().flatten(2)

    return split


def _qkv(*shape: int) -> list[T]:
    return [torch.randn(shape) for _ in range(3)]


ATTENTIONS: dict[str, tuple[Callable[..., T], list[T], list[tuple[int, int]]]] = {
    "four dims": (by_hand, _qkv(2, 3, 10, 16), [(0, 2), (1, 2), (2, 2)]),
    "three dims": (by_hand, _qkv(6, 10, 16), [(0, 1), (1, 1), (2, 1)]),
    "heads": (heads(by_hand), _qkv(2, 10, 64), [(0, 1), (1, 1), (2, 1)]),
    "causal": (heads(masked), [*_qkv(2, 10, 64), torch.ones(10, 10).tril()], []),
    "padding": (heads(masked), [*_qkv(2, 10, 64), (torch.rand(2, 1, 1, 10) > 0.4).float()], []),
    "bias": (heads(biased), [*_qkv(2, 10, 64), torch.randn(1, 4, 10, 10)], []),
    "cross": (by_hand, [torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16), torch.randn(2, 3, 11, 16)], []),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_by_hand_has_torchs_own_as_a_way(name: str) -> None:
    function, inputs, dynamic = ATTENTIONS[name]
    with torch.no_grad():
        (planned,) = plan(function, inputs, dynamic)
    group = one_group([planned])
    assert group.kind == "attention"
    fused = strategy(group, "sdpa")
    assert sum(op.target == "vendor.sdpa.default" for op in fused.form.operations) == 1
    assert not any(op.short_name in ("bmm", "_softmax") for op in fused.form.operations)
    symbols = group.node.form.symbols
    values = [(n,) * len(symbols) for n in (2, 5, 33)] if symbols else [()]
    for kind in strategies_of(group.node.form):
        check(group.node.form, kind, values)
        check(group.node.form, kind, values[-1:], ("special", "large", "zeros"))


def test_a_result_that_is_turned_twice_is_no_merging_of_heads() -> None:
    def turned(q: T, k: T, v: T) -> T:
        return by_hand(q, k, v).transpose(2, 3).transpose(1, 2).contiguous()  # as many rows as channels

    with torch.no_grad():
        (planned,) = plan(turned, _qkv(2, 3, 16, 16))
    for group in planned.groups:
        for kind in strategies_of(group.node.form):
            check(group.node.form, kind, [()])


def test_a_row_without_any_key_gives_what_softmax_gives() -> None:
    inputs = [*_qkv(1, 4, 64), torch.ones(4, 4).tril()]
    inputs[3][2] = 0.0
    with torch.no_grad():
        (planned,) = plan(heads(masked), inputs)
        group = one_group([planned])
        call = load(strategy(group, "sdpa")).make_call(CallSite(group.node.form, (), 2))
        views = {i.name: i.spec for i in group.node.form.inputs}
        expected = heads(masked)(*inputs)
    assert expected.isnan().any() and views
    check(group.node.form, strategy(group, "sdpa"), [()])  # random masks of 60 % leave some rows empty
    assert call is not None


def test_attention_of_training_is_left_alone_with_its_reason() -> None:
    q = [t.requires_grad_() for t in _qkv(1, 2, 8, 16)]
    graphs = plan(by_hand, q)
    forward = next(p for p in graphs if p.phase == "forward")
    assert [g.kind for g in forward.groups] == []
    assert any("backward" in r.detail for r in forward.refusals if r.code == "attention")


def test_dropout_inside_attention_keeps_eagers_numbers() -> None:
    def function(q: T, k: T, v: T) -> T:
        return F.dropout(torch.softmax(q @ k.transpose(-2, -1), -1), 0.1, True) @ v

    with torch.no_grad():
        (planned,) = plan(function, _qkv(1, 2, 8, 16))
    assert planned.groups == []
    assert any("random numbers" in r.detail for r in planned.refusals)


def test_dropouts_outside_of_training_stand_in_no_chains_way() -> None:
    """They are copies in the captured graph."""

    def attention(q: T, k: T, v: T) -> T:
        scores = q @ k.transpose(-2, -1) * 0.25
        return F.dropout(torch.softmax(scores, -1), 0.1, training=False) @ v

    def linear(x: T, w: T, b: T, r: T) -> T:
        return r + F.dropout(F.linear(x, w, b), 0.1, training=False)

    with torch.no_grad():
        first = one_group(plan(attention, _qkv(2, 3, 10, 16)))
        second = one_group(plan(linear, [torch.randn(4, 6), torch.randn(5, 6), torch.randn(5), torch.randn(4, 5)]))
    for group, name in ((first, "sdpa"), (second, "onednn_linear")):
        check(group.node.form, strategy(group, name), [()])


# ---- sums of products ----------------------------------------------------------------------------------


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


# ---- switches, bundles, cuts ---------------------------------------------------------------------------


def test_switches_turn_kinds_off() -> None:
    inputs = [torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)]
    with torch.no_grad():
        (planned,) = plan(linear(F.relu), inputs, config=FusionConfig(enable_matmul=False))
        assert planned.groups == []
        (planned,) = plan(Block().eval(), [torch.randn(1, 8, 5, 5)], config=FusionConfig(enable_conv=False))
        assert planned.groups == []
        (planned,) = plan(by_hand, _qkv(1, 2, 8, 16), config=FusionConfig(enable_attention=False))
        assert all(g.kind != "attention" for g in planned.groups)


def test_a_way_survives_the_store() -> None:
    with torch.no_grad():
        group = one_group(plan(heads(by_hand), _qkv(2, 10, 64), [(0, 1), (1, 1), (2, 1)]))
    for kind in strategies_of(group.node.form):
        again = Strategy.from_json(kind.to_json())
        assert again == kind and again.steps == kind.steps
        record = pack(kind, [], "c_generic")
        assert is_bundle(record.binary) and record == pack(again, [], "c_generic")


def test_library_calls_alone_load_on_every_processor() -> None:
    with torch.no_grad():
        group = one_group(plan(linear(F.gelu), [torch.randn(24, 40), torch.randn(56, 40), torch.randn(56)]))
    calls, whole = strategy(group, "onednn_linear"), strategy(group, "parts")
    assert not calls.parts and whole.parts
    backends = Backends("no-such-cc", cpu_device())
    loaded = backends.load(pack(calls, [], "c_generic"), CPU)
    assert isinstance(loaded, LoadedStrategy) and loaded.strategy == calls
    kernel = GENERATOR.generate_generic_kernel(whole.kernels[0].node.form)
    record = KernelRecord(kernel.key, kernel.name, kernel.source, kernel.binary)
    assert isinstance(backends.load(pack(whole, [record], kernel.key.target), CPU), LoadedStrategy)
    for foreign in (pack(whole, [record], "c_generic"), pack(calls, [pack(whole, [record], "x")], "c_generic")):
        with pytest.raises(CompilerError, match="expected a kernel for"):
            backends.load(foreign, CPU)


def test_a_part_may_be_a_way_itself() -> None:
    """The node behind a product may have been decided to run as two kernels."""

    def function(x: T, a: T, c: T, w: T, b: T) -> T:
        y = torch.tanh(torch.relu(F.linear(x, a, c)) * 2.0 + 1.0)
        return F.gelu(F.layer_norm(y, (32,), w, b)) * 0.5 + y

    with torch.no_grad():
        inputs = [torch.randn(16, 24), torch.randn(32, 24), *(torch.randn(32) for _ in range(3))]
        form = one_group(plan(function, inputs)).node.form
    outer = strategies_of(form)[0]
    (part,) = outer.kernels
    inner = cut_strategies(part.node.form)[1]
    kernels = [GENERATOR.generate_generic_kernel(kernel.node.form) for kernel in inner.kernels]
    records = [KernelRecord(kernel.key, kernel.name, kernel.source, kernel.binary) for kernel in kernels]
    record = pack(outer, [pack(inner, records, "c_generic")], "c_generic")
    loaded = unpack(record.binary, lambda digest, name, binary: load_kernel(binary, name).entry)
    (entry,) = loaded.entries
    assert isinstance(entry, LoadedStrategy) and len(entry.entries) == 2

    def make_call(allocator: GuardedAllocator, sizes: Sequence[int]) -> Callable[..., Any]:
        return make_launcher(form, loaded, sizes, 2, allocator)

    assert Verifier(form).check(make_call, [CheckCase((), "normal"), CheckCase((), "special")]) >= 0.0


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


def test_a_kernel_is_cut_where_the_least_memory_lies_between() -> None:
    def function(x: T, w: T, b: T) -> T:
        y = torch.tanh(x * 2.0 + 1.0)
        return F.gelu(F.layer_norm(y, (32,), w, b)) * 0.5 + x

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(16, 32), torch.randn(32), torch.randn(32)])
    (node,) = planned.nodes
    whole, *cuts = cut_strategies(node.form)
    assert whole.name == "one_kernel" and len(whole.parts) == 1
    assert cuts and all(len(one.parts) == 2 for one in cuts)
    for kind in (whole, *cuts):
        check(node.form, kind, [()])
        covered = {name for part in kind.parts for name in part.operations}
        assert covered == {op.name for op in node.form.operations if op.short_name not in ("view", "expand")}


def test_a_copy_of_the_second_result_of_an_operation_is_planned() -> None:
    def function(x: T, y: T) -> T:
        return torch.tanh(x.chunk(2, 1)[1].contiguous() @ y)

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(8, 16), torch.randn(8, 8)])
    assert [node.operation_names for node in planned.nodes] == ["clone", "tanh"]


def test_packed_weights_are_kept_for_a_few_sizes_and_follow_the_parameter() -> None:
    weight, folded, packs = torch.randn(4, 3, 3, 3), Folded(), list[torch.Tensor]()

    def pack(source: torch.Tensor) -> torch.Tensor:
        packs.append(source)
        return source.clone()

    def fold_all() -> None:
        for size in (*range(MAX_PACKED + 3), *range(MAX_PACKED + 3)):
            found, offset = folded(weight, None, (), pack, (1, 3, size, size))
            assert torch.equal(found, weight) and offset is None
            assert found.data_ptr() != weight.data_ptr(), "never the parameter itself"

    fold_all()
    assert len(packs) == MAX_PACKED
    weight.data.mul_(2.0)  # no version counter tells
    fold_all()
    assert len(packs) == 2 * MAX_PACKED


def test_what_is_folded_is_one_for_all_callables_of_a_place() -> None:
    module, x = Block().eval(), torch.randn(2, 8, 9, 11)
    with torch.no_grad():
        (planned,) = plan(module, [x])
        group = one_group([planned])
        loaded, kept = load(strategy(group, "onednn_conv")), dict[str, Any]()
        assert loaded.keeps
        calls = [loaded.make_call(CallSite(group.node.form, (), 2, kept=kept)) for _ in range(2)]
        ((_, folded),) = kept.items()
        order = _inputs_of(group, module, x)
        for _ in range(2):  # both with the parameters as they are now
            for call in calls:
                torch.testing.assert_close(call(*order), module(x), rtol=1e-4, atol=1e-5)
            module.conv.weight.data.add_(0.25)
        assert [*kept.values()] == [folded]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_torch_may_be_generated(causal: bool) -> None:
    def function(q: T, k: T, v: T) -> T:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = [torch.randn(3, 40, 2, 32).transpose(1, 2) for _ in range(3)]
    with torch.no_grad():
        group = one_group(plan(function, inputs, [(0, 0), (1, 0), (2, 0)]))
    generated = strategy(group, "generated_attention")
    assert group.kind == "attention" and [part.printer for part in generated.parts] == ["attention"]
    check(group.node.form, generated, [(1,), (2,), (7,)], ("normal", "special", "zeros"))


def test_attention_that_is_not_finite_is_eagers_to_the_bit() -> None:
    inputs = [torch.randn(2, 3, 20, 32) for _ in range(3)]
    with torch.no_grad():
        group = one_group(plan(F.scaled_dot_product_attention, inputs))
        for n, value in ((0, math.nan), (1, math.inf), (2, -math.inf)):
            odd = [t.clone() for t in inputs]
            odd[n][1, 2, 7, 5] = value
            generated = load(strategy(group, "generated_attention"))
            found = make_launcher(group.node.form, generated, (), 2)(*odd)
            (found, *_) = found if isinstance(found, tuple) else (found,)
            torch.testing.assert_close(found, F.scaled_dot_product_attention(*odd), rtol=0, atol=0, equal_nan=True)


class Layers(nn.Module):
    """Equal layers, each a group."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: T) -> T:
        for layer in self.layers:
            x = F.gelu(layer(x)) + x
        return x


def test_the_search_for_groups_looks_at_equal_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[NodeForm] = []
    rewrites = enumeration.rewrites
    monkeypatch.setattr(enumeration, "rewrites", lambda form: looked.append(form) or rewrites(form))
    counts = []
    for layers, width in ((2, 240), (6, 272)):  # of a width each, since what is known of a form is kept
        looked.clear()
        planned = plan(Layers(layers, width), [torch.randn(64, width)])
        assert sum(len(p.groups) for p in planned) >= layers
        counts.append(len(looked))
        for group in (g for p in planned for g in p.groups):
            names = enumeration.generated_names(group.node.form)
            assert sorted(names) == sorted(w.name for w in enumeration.generated_strategies(group.node.form))
    assert 0 < counts[1] <= counts[0] + 1, "the first and the last layer may differ from those between"
