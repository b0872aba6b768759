"""Which small nodes are stages of one kernel, and which stay apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofuse.codegen.in_place import why_not
from autofuse.fusion import FusionConfig, FusionEngine, FusionGraph
from autofuse.fusion.one_call import in_order
from tests.fusion.small_graphs import graph, op, tensor

INDEX = tensor(4, dtype="int64")


def gather_graph(columns=7, device="cpu", behind="aten.relu.default"):
    """The gradient of a scatter: what is calculated for one size leaves, and is read at places for another."""
    x, part = (replace(tensor(rows, columns), device=device) for rows in (5, 4))
    ops = [
        op("mul", "aten.mul.Tensor", ["g"], x, 2),
        op("slope", "aten.threshold_backward.default", ["mul", "x"], x, 0),
        op("part", "aten.index_select.default", ["slope"], part, 0),
        op("end", behind, ["part"], part),
    ]
    ops[2] = replace(ops[2], args=(ops[2].args[0], 0, op("", "", ["i"], part).args[0]))
    return graph(ops, {"g": x, "x": x, "i": replace(INDEX, device=device)}, ["slope", "end"])


def plan(g: FusionGraph, apart=(), **config):
    return FusionEngine(FusionConfig(**config), lowerable=why_not, check=True).fuse(g, apart)


def stages(node):
    return [list(names) for names in node.stages]


def test_small_nodes_that_hand_on_a_value_are_stages_of_one() -> None:
    (node,) = plan(gather_graph())
    assert stages(node) == [["mul", "slope"], ["part", "end"]]
    assert node.validate_fusion() and [ref.name for ref in node.outputs] == ["slope", "end"]


@pytest.mark.parametrize(
    ("g", "config"),
    [(gather_graph(columns=4096), {}), (gather_graph(), {"max_fusion_size": 3})],
    ids=["large", "too many"],
)
def test_large_nodes_and_many_operations_stay_apart(g: FusionGraph, config: dict[str, int]) -> None:
    nodes = plan(g, **config)
    assert len(nodes) == 2 and not any(node.stages for node in nodes)


def test_what_may_run_as_a_whole_stays_apart() -> None:
    assert not any(node.stages for node in plan(gather_graph(), [["part", "end"]]))


def test_without_the_last_word_of_the_lowering_no_stages_are_made() -> None:
    assert not any(node.stages for node in FusionEngine().fuse(gather_graph()))


def test_what_stands_beside_a_product_is_left_to_it() -> None:
    x, part = tensor(5, 7), tensor(4, 7)
    g = gather_graph()
    ops = [*g.operations, op("mm", "aten.mm.default", ["end", "w"], part)]
    nodes = plan(graph(ops, {**g.inputs, "w": x}, ["slope", "mm"]))
    assert not any(node.stages for node in nodes)


def test_an_operation_that_is_not_worth_a_call_is_taken_along() -> None:
    x, columns = tensor(5, 7), tensor(1, 7)
    ops = [
        op("exp", "aten.exp.default", ["x"], x),
        op("sum", "aten.sum.dim_IntList", ["exp"], tensor(5, 1), (1,), True),
        op("zeros", "aten.zeros.default", [], tensor(9), (9,)),
        op("total", "aten.sum.dim_IntList", ["y"], columns, (0,), True),
    ]
    (node,) = plan(graph(ops, {"x": x, "y": x}, ["sum", "zeros", "total"]))
    assert sorted(map(sorted, node.stages)) == [["exp", "sum"], ["total"], ["zeros"]]
    assert plan(graph(ops[2:], {"y": x}, ["zeros", "total"])) == []  # nothing is worth a call


def test_no_stages_around_an_operation_outside() -> None:
    x, part = tensor(5, 7), tensor(4, 7)
    g = gather_graph()
    outside = op("outside", "aten.sort.default", ["slope"], x)
    ops = [*g.operations[:2], outside, *g.operations[2:]]
    ops[3] = replace(ops[3], args=(op("", "", ["outside"], part).args[0], *ops[3].args[1:]))
    nodes = plan(graph(ops, g.inputs, ["slope", "end"]))
    assert not any(node.stages for node in nodes)


def test_stages_come_after_what_they_read() -> None:
    g = gather_graph()
    parts = FusionEngine().fuse(g)
    assert [node.kernels[0].name for node in in_order(g, reversed(parts))] == ["mul", "part"]


def test_a_node_with_stages_for_some_of_its_operations_is_not_sound() -> None:
    (node,) = plan(gather_graph())
    node.stages = node.stages[:1]
    assert not node.validate_fusion()
