"""Graphs that grow operation by operation, and what their edges allow to run as one."""

import pytest

from autofuse.errors import FusionError
from autofuse.fusion import FusionEngine, FusionGraph
from autofuse.ir.operation import ValueRef
from tests.fusion.small_graphs import graph, op, tensor

A = tensor(4, 256)


def chain():
    """a, a matmul, then c and d; b reads a beside it."""
    return [
        op("a", "aten.gelu.default", ["x"], A),
        op("mm", "aten.mm.default", ["a", "w"], A),
        op("b", "aten.exp.default", ["a"], A),
        op("v", "aten.view.default", ["mm"], A, (4, 256)),
        op("c", "aten.mul.Tensor", ["v", "b"], A),
        op("d", "aten.tanh.default", ["c"], A),
    ]


def test_a_graph_that_grows_is_the_one_that_is_made_whole():
    whole = graph(chain(), {"x": A, "w": A}, ["d"])
    grown = FusionGraph(inputs={"x": A, "w": A}, outputs=[ValueRef("v")])
    assert [grown.add_node(operation) for operation in chain()] == list(range(6))
    for name in ("operations", "by_name", "position", "consumers", "readers", "value_readers"):
        assert getattr(grown, name) == getattr(whole, name), name
    assert whole.leaving == {ValueRef("d")} and grown.leaving == {ValueRef("mm")}, "through the view"


def test_what_leaves_is_known_of_operations_that_come_later():
    g = FusionGraph(inputs={"x": A}, outputs=[ValueRef("v")])
    g.add_node(op("a", "aten.gelu.default", ["x"], A))
    assert g.leaving == {ValueRef("v")}
    g.add_node(op("v", "aten.view.default", ["a"], A, (4, 256)))
    assert g.leaving == {ValueRef("a")}


@pytest.mark.parametrize(
    ("name", "reads", "message"),
    [
        ("a", "x", "two"),
        ("x", "a", "two"),
        ("b", "later", "b reads 'later', which nothing produces before it"),
    ],
)
def test_a_wrong_operation_is_named_and_leaves_the_graph_alone(name, reads, message):
    g = FusionGraph([op("a", "aten.gelu.default", ["x"], A)], {"x": A})
    with pytest.raises(FusionError, match=message):
        g.add_node(op(name, "aten.exp.default", [reads], A))
    assert [o.name for o in g.operations] == ["a"] and g.readers == {"a": []}


def test_work_between_keeps_operations_apart():
    g = graph(chain(), {"x": A, "w": A}, ["d"])
    assert g.can_fuse(["a", "b"]) and g.can_fuse(["c", "d"]) and g.can_fuse(["a", "mm", "b", "c"])
    assert not g.can_fuse(["a", "c"]) and not g.can_fuse(["a", "b", "c", "d"]), "the matmul is between"


def test_operations_outside_count_with_all_that_runs_as_one_with_them():
    ops = [
        op("a", "aten.gelu.default", ["x"], A),
        op("p", "aten.exp.default", ["x"], A),
        op("q", "aten.exp.default", ["a"], A),
        op("c", "aten.mul.Tensor", ["a", "p"], A),
    ]
    g = graph(ops, {"x": A}, ["c", "q"])
    assert g.can_fuse(["a", "c"])
    together = {"p": ["p", "q"], "q": ["p", "q"]}
    assert not g.can_fuse(["a", "c"], together.get), "q waits for a, and c for p, which runs with q"


def test_a_path_is_followed_as_far_as_units_reach_back():
    """Of a and c, behind c: mm, which needs a, and q, which needs mm and runs as one with p, which c needs."""
    ops = [
        op("p", "aten.exp.default", ["x"], A),
        op("a", "aten.gelu.default", ["x"], A),
        op("c", "aten.exp.default", ["p"], A),
        op("mm", "aten.mm.default", ["a", "w"], A),
        op("q", "aten.exp.default", ["mm"], A),
    ]
    g = graph(ops, {"x": A, "w": A}, ["c", "q"])
    together = {"p": ["p", "q"], "q": ["p", "q"]}
    asked = []
    assert not g.can_fuse(["a", "c"], together.get, lambda place: asked.append(place) or 4)
    assert asked == [2]
    assert g.can_fuse(["a", "c"]), "without units"
    assert g.can_fuse(["p", "a"], None, lambda place: asked.append(place) or place)


def test_a_kernel_reaches_one_device():
    ops = [op("a", "aten.gelu.default", ["x"], A), op("b", "aten.exp.default", ["y"], A)]
    devices = {ValueRef(name): f"cuda:{n}" for n, names in enumerate(("xa", "yb")) for name in names}
    g = FusionGraph(ops, {"x": A, "y": A}, [ValueRef("a"), ValueRef("b")], devices=devices)
    assert g.devices_of(["a"]) == {"cuda:0"} and g.can_fuse(["a"]) and not g.can_fuse(["a", "b"])


def test_optimize_gives_what_an_engine_makes_of_the_graph():
    g = graph(chain(), {"x": A, "w": A}, ["d"])
    engine = FusionEngine()
    nodes = g.optimize(engine)
    assert [[o.name for o in node.kernels] for node in nodes] == [["a", "b"], ["c", "d"]]
    assert [n.fusion_id for n in nodes] == [n.fusion_id for n in FusionEngine().fuse(g)]
    assert engine.get_fusion_stats()["num_fused"] == 2
    apart = g.optimize(engine, [["a"]])
    assert [[o.name for o in node.kernels] for node in apart] == [["a"], ["b", "c", "d"]]
