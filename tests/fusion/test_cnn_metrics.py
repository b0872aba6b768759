"""Networks of convolutions lose nodes by fusion: the seed's Inception module to the number, others by 30 to 55 %."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.graph_import import import_graph
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from autofuse.fusion import FusionEngine
from autofuse.fusion.metrics import measure_graph
from autofuse.strategies.groups import find_groups
from autofuse.strategies.kernel_count import planned_kernels

spec = importlib.util.spec_from_file_location("inception", Path(__file__).parents[2] / "examples" / "inception.py")
inception = importlib.util.module_from_spec(spec)
spec.loader.exec_module(inception)


def conv_bn(channels_in, channels_out, kernel_size=3, stride=1, groups=1):
    conv = nn.Conv2d(channels_in, channels_out, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels_out)]


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels_in, channels_out, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            *conv_bn(channels_in, channels_out, 3, stride), nn.ReLU(), *conv_bn(channels_out, channels_out)
        )
        is_same = channels_in == channels_out and stride == 1
        self.way_round = nn.Identity() if is_same else nn.Sequential(*conv_bn(channels_in, channels_out, 1, stride))

    def forward(self, x):
        return torch.relu(self.body(x) + self.way_round(x))


def head(channels):
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]


def resnet():
    stem = [*conv_bn(3, 8, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, Residual(8, 8), Residual(8, 8), Residual(8, 16, 2), Residual(16, 16), *head(16))


def vgg():
    layers, channels = [], 3
    for width, depth in ((8, 2), (16, 2), (16, 3)):
        for _ in range(depth):
            layers += [*conv_bn(channels, width), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )


class Inverted(nn.Module):
    """The inverted residual of a MobileNet: wider, one filter a channel, narrow again."""

    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        wide = 4 * channels_in
        self.body = nn.Sequential(
            *conv_bn(channels_in, wide, 1), nn.ReLU6(), *conv_bn(wide, wide, 3, stride, wide), nn.ReLU6(),
            *conv_bn(wide, channels_out, 1),
        )  # fmt: skip
        self.is_residual = channels_in == channels_out and stride == 1

    def forward(self, x):
        return x + self.body(x) if self.is_residual else self.body(x)


def mobilenet():
    blocks = [Inverted(8, 8, 1), Inverted(8, 16, 2), Inverted(16, 16, 1), Inverted(16, 16, 1)]
    return nn.Sequential(*conv_bn(3, 8, 3, 2), nn.ReLU6(), *blocks, *head(16))


def lowerable(form):
    try:
        lower(form)
    except LoweringError as error:
        return error.code, str(error)
    return None


def planned(model, shape):
    """Metrics before and after fusion of the graph that ``model`` has without gradients."""
    found = []

    def keep(module, phase, times):
        imported = import_graph(module)
        graph = imported.for_fusion()
        engine = FusionEngine(lowerable=lowerable)
        nodes = engine.fuse(graph)
        groups, _ = find_groups(graph, nodes, engine.config)
        fused = planned_kernels([*nodes, *(group.node for group in groups)])
        found.append((measure_graph(graph), measure_graph(graph, fused)))
        return boxed(module.forward)

    compiled = torch.compile(model, backend=lambda module, inputs: compile_with(module, inputs, keep), dynamic=False)
    with torch.no_grad():
        compiled(torch.randn(shape))
    torch._dynamo.reset()
    ((before, after),) = found
    return before, after


def test_inception_has_the_seeds_figures():
    before, after = planned(inception.Inception(16).eval(), (2, 16, 9, 11))
    assert (before.nodes, before.edges, before.depth) == (22, 24, 8)
    assert (after.nodes, after.edges, after.depth) == (10, 12, 4)
    assert before.flops == after.flops and after.nbytes < before.nbytes
    assert (before.kernels, after.kernels) == (20, 8)


@pytest.mark.parametrize(
    ("model", "nodes", "lost"),
    [(resnet, (38, 15), 61), (vgg, (30, 15), 50), (mobilenet, (42, 17), 60)],
    ids=["resnet", "vgg", "mobilenet"],
)
def test_networks_of_convolutions_lose_nodes(model, nodes, lost):
    """``lost``: the share of nodes that fusion removes, in percent, of the graph for inference.

    A ResNet and a MobileNet lose more than the seed's 55 %: sums of two ways and ReLU6 become part of a convolution
    too.
    """
    before, after = planned(model().eval(), (2, 3, 32, 32))
    assert before.flops == after.flops and after.nbytes < before.nbytes and after.depth < before.depth
    assert (before.nodes, after.nodes) == nodes
    assert round(100 * (1 - after.nodes / before.nodes)) == lost >= 30
