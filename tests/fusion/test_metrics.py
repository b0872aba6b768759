"""Metrics of graphs: the seed's definition on small graphs, FLOPs against torch's own counter, bytes by hand."""

import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.utils.flop_counter import FlopCounterMode

from autofuse.capture.graph_import import import_graph
from autofuse.fusion import FusionGraph
from autofuse.fusion.cost import matmul_flops
from autofuse.fusion.metrics import has_kernel, measure_graph
from tests.fusion.small_graphs import graph, op, tensor

A = tensor("s0", "s1", 256)
V = tensor(256)
BYTES = 4 * 100 * 256 * 4  # of A


def shape_of(metrics):
    return metrics.nodes, metrics.edges, metrics.depth


def test_input_and_output_are_nodes_and_depth_counts_edges():
    ops = [op("a", "aten.add.Tensor", ["x", "y"], A), op("b", "aten.relu.default", ["a"], A)]
    g = graph(ops, {"x": A, "y": A}, ["b"])
    before, after = measure_graph(g), measure_graph(g, [{"a", "b"}])
    assert shape_of(before) == (4, 3, 3) and shape_of(after) == (3, 2, 2)
    assert (before.kernels, after.kernels) == (2, 1)
    assert (before.nbytes, after.nbytes) == (5 * BYTES, 3 * BYTES)
    assert before.flops == after.flops == 2 * BYTES / 4


def test_views_and_parameters_are_no_nodes():
    flat = tensor("s0*s1", 256)
    ops = [
        op("v", "aten.view.default", ["x"], flat),
        op("a", "aten.mul.Tensor", ["v", "w"], flat),
        op("s", "aten.slice.Tensor", ["a"], flat),
        op("b", "aten.relu.default", ["s"], flat),
    ]
    g = FusionGraph(ops, {"x": A, "w": V}, graph(ops, {"x": A, "w": V}, ["b"]).outputs, {"s0": 4, "s1": 100}, ["w"])
    assert shape_of(measure_graph(g)) == (4, 3, 3) and measure_graph(g).kernels == 2
    assert measure_graph(g).nbytes == 4 * BYTES + 256 * 4
    assert not has_kernel(ops[0]) and not has_kernel(ops[2])


def test_sets_that_meet_are_one_kernel_and_unread_outputs_are_not_written():
    ops = [
        op("a", "aten.add.Tensor", ["x", "x"], A),
        op("b", "aten.relu.default", ["a"], A),
        op("c", "aten.exp.default", ["b"], A),
        op("d", "aten.neg.default", ["a"], A),
    ]
    g = graph(ops, {"x": A}, ["c", "d"])
    assert shape_of(measure_graph(g)) == (6, 6, 4)
    joined = measure_graph(g, [{"a", "b"}, {"b", "c"}, {"unknown"}])
    assert shape_of(joined) == (4, 4, 3)  # input -> a+b+c -> d -> output, and a+b+c -> output
    assert joined.nbytes == (1 + 2 + 2) * BYTES  # x; a and c; d
    assert shape_of(measure_graph(g, [{"a", "b", "c", "d"}])) == (3, 2, 2)


def test_a_graph_of_nothing():
    metrics = measure_graph(graph([], {"x": A}, ["x"]))
    assert (metrics.nodes, metrics.edges, metrics.depth, metrics.kernels, metrics.nbytes) == (2, 0, 0, 0, 0)


def test_a_repeated_element_is_read_once():
    mask = tensor(1, 256)
    expanded = type(mask)(A.shape, "float32", type(mask.strides)([0, 0, 1]))
    ops = [op("e", "aten.expand.default", ["m"], expanded), op("a", "aten.mul.Tensor", ["x", "e"], A)]
    assert measure_graph(graph(ops, {"x": A, "m": mask}, ["a"])).nbytes == 2 * BYTES + 256 * 4


def products(x, image, weight, filters):
    hidden = torch.addmm(weight[0], x, weight).relu() @ weight.t()
    attended = torch.bmm(hidden.view(2, 5, 8), hidden.view(2, 5, 8).transpose(1, 2)).softmax(-1)
    convolved = torch.nn.functional.conv2d(image, filters, stride=2, padding=1)
    back = torch.nn.functional.conv_transpose2d(convolved, filters, stride=2)
    return attended.sum() + back.sum()


def attention(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def grouped(image, filters):
    return torch.nn.functional.conv1d(image, filters, groups=2)


def captured(function, inputs):
    """FLOPs of matrix products in the forward and the backward graph."""
    flops = []

    def keep(module, _):
        imported = import_graph(module)
        g = imported.for_fusion()
        flops.append({o.name: found for o in g.operations if (found := matmul_flops(g, o)) is not None})
        return make_boxed_func(module)

    aot_function(function, keep, keep, partition_fn=default_partition)(*inputs).sum().backward()
    return flops


def test_flops_are_those_of_torch_forward_and_backward():
    inputs = [torch.randn(s, requires_grad=True) for s in ((10, 8), (2, 4, 9, 7), (8, 8), (6, 4, 3, 3))]
    with FlopCounterMode(display=False) as forward:
        result = products(*inputs)
    with FlopCounterMode(display=False) as backward:
        result.backward()
    found = [sum(flops.values()) for flops in captured(products, inputs)]
    assert found == [forward.get_total_flops(), backward.get_total_flops()] and found[0] > 10_000


def test_flops_that_torch_does_not_count_on_a_cpu():
    shapes = ((1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    forward, backward = captured(attention, [torch.randn(s, requires_grad=True) for s in shapes])
    one = 2 * (2 * 5) * 7 * 8  # a product: heads and queries, keys, width
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert (forward[name], backward[f"{name}_backward"]) == (2 * one, 5 * one)
    inputs = [torch.randn(s, requires_grad=True) for s in ((3, 4, 9), (6, 2, 3))]
    forward, backward = captured(grouped, inputs)
    macs = 3 * 6 * 7 * 2 * 3  # images, filters, places, channels of a group, width of a filter
    assert (sum(forward.values()), sum(backward.values())) == (2 * macs, 4 * macs)
