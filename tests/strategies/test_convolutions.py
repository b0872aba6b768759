"""Groups around convolutions, their strategies, and each strategy against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofuse.strategies.enumeration import strategies_of
from autofuse.strategies.extern_kernels import MAX_PACKED, Folded
from autofuse.strategies.groups import Group
from autofuse.wrapper.node_call import CallSite
from tests.strategies.harness import check, load, one_group, plan, strategy
from tests.strategies.modules import Block

T = torch.Tensor


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


def test_a_bias_with_a_stride_is_not_for_onednn() -> None:
    """It reads the memory behind the first element, whatever the stride: sums of other numbers."""
    biases = torch.randn(6, 2)
    assert "onednn_conv" not in _strategies_with(biases[:, 0])
    assert "onednn_conv" in _strategies_with(biases[:, 0].clone())


def _strategies_with(bias: T) -> list[str]:
    with torch.no_grad():
        inputs = [torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3), bias]
        (planned,) = plan(lambda x, w, b: torch.relu(torch.conv2d(x, w, b)), inputs)
    return [strategy.name for group in planned.groups for strategy in strategies_of(group.node.form)]


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


@pytest.mark.parametrize(
    ("channels", "names"),
    [
        (16, {"forward": ["parts", "generated_convolution_rows"], "backward": ["parts", "generated_gradients"]}),
        (3, {"forward": [], "backward": []}),  # those of a photo would leave most of a vector empty
    ],
)
def test_a_convolution_and_its_gradients_are_groups_of_their_own(channels: int, names: dict[str, list[str]]) -> None:
    module = nn.Conv2d(channels, 8, 3, stride=2, padding=1)
    x = torch.randn(3, channels, 9, 11, requires_grad=True)
    for planned in plan(lambda x: module(x).sin(), [x], [(0, 0), (0, 2), (0, 3)]):
        found = [strategy for group in planned.groups for strategy in strategies_of(group.node.form)]
        assert [kind.name for kind in found] == names[planned.phase]
        for group in planned.groups:
            for kind in strategies_of(group.node.form):
                # A part is raced by itself: the sizes of a result, and of its gradient, follow from the image's.
                assert all(len(kernel.node.symbols) == 3 for kernel in kind.kernels)
                check(group.node.form, kind, [(1, 5, 6), (5, 9, 4)])
                check(group.node.form, kind, [(3, 8, 7)], ("large", "zeros"))
