"""Convolutions as one group whose images lie channels last: found, right at any size, given out as eager lays them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autofuse.codegen.templates import CONVOLUTION
from autofuse.strategies.channels_last import DEEPEST_NET, LARGEST_NET
from autofuse.strategies.enumeration import GENERATED_CONVOLUTION, LAST_GENERATED, strategies_of
from autofuse.strategies.groups import Group
from autofuse.strategies.strategy import Strategy
from autofuse.wrapper.node_call import CallSite
from tests.strategies.harness import check, load, plan

T = torch.Tensor
LAST = "channels_last"


def conv(channels_in: int, channels_out: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    norm = nn.BatchNorm2d(channels_out)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, size, stride, size // 2, groups=groups, bias=False), norm, nn.ReLU()
    )


class Net(nn.Module):
    """Convolutions, and a function of them and an image."""

    def __init__(self, forward: Callable[..., T | tuple[T, ...]], *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.function = forward

    def forward(self, x: T) -> T | tuple[T, ...]:
        return self.function(x, *self.parts)


def chain(x: T, a: nn.Module, b: nn.Module) -> T:
    out: T = b(a(x))
    return out


def branches(x: T, a: nn.Module, b: nn.Module, c: nn.Module) -> T:
    return torch.cat([a(x), c(b(x)), F.max_pool2d(x, 3, 1, 1)], 1)


def residual(x: T, a: nn.Module, b: nn.Module) -> T:
    return torch.relu(x + b[1](b[0](a(x))))


def pooled(x: T, a: nn.Module, b: nn.Module) -> T:
    return F.adaptive_avg_pool2d(b(F.avg_pool2d(a(x), 2)), 1).flatten(1)


def gated(x: T, a: nn.Module, b: nn.Module, down: nn.Module, up: nn.Module) -> T:
    """Squeeze and excitation, by convolutions of one pixel."""
    y = b(a(x))
    return y * torch.sigmoid(up(torch.relu(down(y.mean((2, 3), keepdim=True)))))


def shuffled(x: T, a: nn.Module, b: nn.Module) -> T:
    y = a(x)
    n, c, h, w = y.shape
    return torch.as_tensor(b(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)))


def before(x: T, a: nn.Module, norm: nn.Module, b: nn.Module) -> T:
    """Norm and activation in front of the convolution."""
    out: T = b[0](torch.relu(norm(a[0](x))))
    return out


def both(x: T, a: nn.Module, b: nn.Module, c: nn.Module) -> tuple[T, T]:
    """Two results, one of them read on."""
    y = b(a(x))
    return y, c(y)


def halves(x: T, a: nn.Module, b: nn.Module) -> T:
    left, right = a(x).chunk(2, 1)
    return torch.as_tensor(b(left * torch.sigmoid(right)))


def chunks(x: T, a: nn.Module, b: nn.Module, c: nn.Module) -> T:
    """A convolution of one half, as ShuffleNet and YOLO have it."""
    left, right = a(x).chunk(2, 1)
    return torch.as_tensor(c(torch.cat([left, right, b(right)], 1)))


def places(x: T, a: nn.Module, b: nn.Module, c: nn.Module) -> tuple[T, T]:
    """The second result of an operation leaves."""
    y, found = F.max_pool2d(a(x), 2, return_indices=True)
    return c(b(y)), found


def correlated(x: T, a: nn.Module, b: nn.Module) -> T:
    """One result is the weight with which the other is read."""
    y = a(x)
    return F.conv2d(y, b(F.adaptive_avg_pool2d(y, 3)), padding=1)


def upsampled(x: T, a: nn.Module, b: nn.Module) -> T:
    return torch.as_tensor(b(F.interpolate(a(x), scale_factor=2)))


def padded(x: T, a: nn.Module, b: nn.Module) -> T:
    """Borders by reflection, halves that gate each other."""
    return torch.as_tensor(b(F.glu(F.pad(a(x), (1, 2, 1, 1), mode="reflect"), 1)))


def rearranged(x: T, a: nn.Module, b: nn.Module) -> T:
    return torch.as_tensor(b(F.pixel_shuffle(a(x), 2)))


NETS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: Net(chain, conv(8, 12), conv(12, 4, 1)),
    "depthwise": lambda: Net(chain, conv(8, 8, 3, 2, groups=8), conv(8, 4)),
    "plain": lambda: Net(chain, nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)),
    "branches": lambda: Net(branches, conv(8, 8, 1), conv(8, 4, 1), conv(4, 8, 5)),
    "residual": lambda: Net(residual, conv(8, 12), conv(12, 8)),
    "pooled": lambda: Net(pooled, conv(8, 8), conv(8, 8)),
    "gated": lambda: Net(gated, conv(8, 8), conv(8, 8), nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)),
    "shuffled": lambda: Net(shuffled, conv(8, 8), conv(8, 8)),
    "before": lambda: Net(before, conv(8, 8), nn.BatchNorm2d(8), conv(8, 8)),
    "both": lambda: Net(both, conv(8, 8), conv(8, 8), conv(8, 8)),
    "halves": lambda: Net(halves, conv(8, 8), conv(4, 8)),
    "chunks": lambda: Net(chunks, conv(8, 8), conv(4, 4), conv(12, 8)),
    "places": lambda: Net(places, conv(8, 8), conv(8, 8), conv(8, 8)),
    "correlated": lambda: Net(correlated, conv(8, 8), nn.Conv2d(8, 8, 1)),
    "padded": lambda: Net(padded, conv(8, 16), conv(8, 8)),
    "rearranged": lambda: Net(rearranged, conv(8, 32), conv(8, 8)),
    "upsampled": lambda: Net(upsampled, conv(8, 8), conv(8, 8)),
}


def groups_of(module: nn.Module, x: T, dims: Sequence[tuple[int, int]] = ((0, 0), (0, 2), (0, 3))) -> list[Group]:
    with torch.no_grad():
        return [g for planned in plan(module.eval(), [x], dims) for g in planned.groups]


def last_ways(group: Group) -> list[Strategy]:
    return [strategy for strategy in strategies_of(group.node.form) if strategy.name.startswith(LAST)]


@pytest.mark.parametrize("name", NETS)
def test_every_way_is_eager_in_another_order(name: str) -> None:
    found = groups_of(NETS[name](), torch.randn(2, 8, 10, 14))
    nets = [group for group in found if group.kind == "net"]
    if name == "upsampled":  # by an index, of which nobody knows that it takes images to images
        assert not nets
        return
    (group,) = nets
    form, strategies = group.node.form, last_ways(group)
    assert LAST in [strategy.name for strategy in strategies]
    sizes = [(2, 10, 14), (3, 7, 5), (1, 4, 4)]
    if name == "pooled":
        sizes[2] = (1, 6, 4)
    for strategy in strategies:
        check(form, strategy, [values[: len(form.symbols)] for values in sizes])
        check(form, strategy, [sizes[0][: len(form.symbols)]], ("special", "large", "zeros"))


def test_convolutions_are_generated_between_images_that_lie_channels_last() -> None:
    (group,) = groups_of(NETS["branches"](), torch.randn(2, 8, 10, 14))
    (strategy,) = (strategy for strategy in last_ways(group) if strategy.name == LAST_GENERATED)
    assert sum(part.printer == CONVOLUTION for part in strategy.parts) == 3
    assert not strategy.has_extern, "none is left to aten"


def test_convolutions_of_channels_last_images_are_generated_one_by_one() -> None:
    """In training too, where batch norm is no part of the group."""
    module = NETS["chain"]().train().to(memory_format=torch.channels_last)
    x = torch.randn(8, 8, 30, 34).to(memory_format=torch.channels_last)
    forward = plan(module, [x], ((0, 0), (0, 2), (0, 3)))[0]
    found = [group for group in forward.groups if group.kind == "conv"]
    assert [[op.short_name for op in group.node.kernels] for group in found] == [["convolution"]] * 2
    for group in found:
        (strategy,) = (
            strategy for strategy in strategies_of(group.node.form) if strategy.name == GENERATED_CONVOLUTION
        )
        check(group.node.form, strategy, [(2, 10, 14), (3, 7, 5)], ("normal", "special", "zeros"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    (group,) = groups_of(NETS["branches"]().to(dtype), torch.randn(2, 8, 10, 14, dtype=dtype))
    lacks_bf16 = dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for strategy in last_ways(group):
        if lacks_bf16 and "onednn" in strategy.name:  # without AVX-512: a candidate that fails, and no wrong result
            with pytest.raises(RuntimeError, match="bf16 path needs the cpu support"):
                check(group.node.form, strategy, [(2, 10, 14)])
        else:
            check(group.node.form, strategy, [(2, 10, 14), (1, 3, 5)])


def test_between_its_convolutions_nothing_is_turned() -> None:
    (group,) = groups_of(NETS["branches"](), torch.randn(2, 8, 10, 14))
    (strategy,) = (strategy for strategy in last_ways(group) if strategy.name == f"{LAST}_onednn_conv")
    steps = [strategy.kernels[s].node.operation_names if isinstance(s, int) else s.short_name for s in strategy.steps]
    assert sorted(steps) == sorted(["clone", *["convolution"] * 3, "max_pool2d_with_indices", "cat + clone"])


def test_a_pooling_that_gives_indices_is_done_before_other_branches_hold_memory() -> None:
    (group,) = groups_of(NETS["branches"](), torch.randn(2, 8, 10, 14))
    for strategy in last_ways(group):
        (at,) = (n for n, op in enumerate(strategy.form.operations) if "max_pool2d" in op.target)
        assert at == 1, "after the copy of the image that it reads"


def test_results_lie_as_eagers_where_its_parts_run_as_eager_too() -> None:
    module, x = NETS["both"](), torch.randn(2, 8, 10, 14)
    (group,) = groups_of(module, x, ())
    for strategy in last_ways(group):
        for index in reversed(range(len(strategy.parts))):
            strategy = strategy.without(index)
        loaded = load(strategy)
        assert not loaded.entries
        check(group.node.form, strategy, [()])


def test_nan_is_where_eager_has_it() -> None:
    module, x = NETS["chain"](), torch.randn(2, 8, 10, 14)
    x[1, 3, 4, 5] = math.nan
    x[0, 0, 0, 0] = math.inf
    (group,) = groups_of(module, x, ())
    with torch.no_grad():
        order = [x if item.spec.shape.dims == (2, 8, 10, 14) else None for item in group.node.form.inputs]
        weights = [module.parts[i][0].weight for i in range(2)]
        norms = [module.parts[i][1] for i in range(2)]
        named = iter(
            t for w, n in zip(weights, norms, strict=True) for t in (w, n.weight, n.bias, n.running_mean, n.running_var)
        )
        inputs = [next(named) if tensor is None else tensor for tensor in order]
        expected = module(x)
        assert expected.isnan().any() and not expected.isnan().all()
        for strategy in last_ways(group):
            found = load(strategy).make_call(CallSite(group.node.form, (), 2))(*inputs)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            assert found.stride() == expected.stride()


def test_a_deep_net_is_groups_of_one_convolution() -> None:
    """In a net, large values would overflow at another place, and all of its ways be refused."""
    module = nn.Sequential(*(conv(8, 8) for _ in range(DEEPEST_NET + 1)))
    found = groups_of(module, torch.randn(1, 8, 16, 20), ())
    assert [group.kind for group in found] == ["conv"] * (DEEPEST_NET + 1)


# ---- left alone ------------------------------------------------------------------------------------


def test_images_that_are_channels_last_already() -> None:
    module = NETS["branches"]().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 10, 14).to(memory_format=torch.channels_last)
    assert {group.kind for group in groups_of(module, x)} == {"conv"}


def test_training_has_no_nets() -> None:
    module = NETS["branches"]().train()
    for planned in plan(module, [torch.randn(2, 8, 10, 14)]):
        assert all(group.kind != "net" for group in planned.groups)


def test_a_large_net_is_several_groups() -> None:
    count = LARGEST_NET + 3

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(conv(4, 4), conv(4, 4)) for _ in range(count))

        def forward(self, x: T) -> T:
            return torch.cat([part(x) for part in self.parts], 1)

    found = groups_of(Wide(), torch.randn(1, 4, 8, 8), ())
    sizes = [sum(op.short_name == "convolution" for op in group.node.kernels) for group in found]
    assert max(sizes) <= LARGEST_NET and sum(sizes) == 2 * count


def test_one_convolution_is_no_net() -> None:
    (group,) = groups_of(conv(8, 8), torch.randn(2, 8, 10, 14))
    assert group.kind == "conv" and not last_ways(group)
