"""Which operations become nodes: chains, broadcasting, reductions, terminals, cycles, limits, refusals."""

import pytest
import torch

from autofuse.errors import FusionError, SettingsError, UnknownOpError
from autofuse.fusion import (
    FusionCandidateAnalyzer,
    FusionConfig,
    FusionEngine,
    FusionGraph,
    FusionNode,
    FusionPattern,
)
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.shape import SymbolicShape
from tests.cases import CASES
from tests.fusion.small_graphs import graph, op, tensor

A = tensor("s0", "s1", 256)
ROW = tensor("s0", "s1", 1)
V = tensor(256)


def plan(g, **config):
    analyzer = FusionCandidateAnalyzer(FusionConfig(**config))
    return analyzer.find_fusible_operations(g), analyzer


def names(nodes):
    return [n.operation_names for n in nodes]


def test_a_chain_is_one_node_however_long():
    ops = [op("r0", "aten.relu.default", ["x"], A)]
    ops += [op(f"r{i}", "aten.mul.Tensor", [f"r{i - 1}", "x"], A) for i in range(1, 20)]
    nodes, _ = plan(graph(ops, {"x": A}, ["r19"]))
    assert len(nodes) == 1 and len(nodes[0].kernels) == 20
    assert nodes[0].outputs == (ValueRef("r19"),)


def test_the_size_limit_splits_and_says_so():
    ops = [op("r0", "aten.relu.default", ["x"], A)]
    ops += [op(f"r{i}", "aten.mul.Tensor", [f"r{i - 1}", "x"], A) for i in range(1, 12)]
    nodes, analyzer = plan(graph(ops, {"x": A}, ["r11"]), max_fusion_size=4)
    assert max(len(n.kernels) for n in nodes) == 4 and sum(len(n.kernels) for n in nodes) == 12
    assert any(r.code == "size_limit" and not r.accepted for r in analyzer.refusals)


def test_bias_broadcast_and_values_needed_outside():
    ops = [
        op("add", "aten.add.Tensor", ["x", "b"], A),
        op("relu", "aten.relu.default", ["add"], A),
        op("mm", "aten.mm.default", ["add", "w"], A),
        op("out", "aten.mul.Tensor", ["relu", "mm"], A),
    ]
    nodes, _ = plan(graph(ops, {"x": A, "b": V, "w": A}, ["out"]))
    assert names(nodes) == ["add + relu"]
    assert set(nodes[0].outputs) == {ValueRef("add"), ValueRef("relu")}


def test_no_cycle_through_an_operation_outside():
    """add feeds a matmul whose result meets add again: add and mul may not share a kernel."""
    ops = [
        op("add", "aten.gelu.default", ["x"], A),
        op("mm", "aten.mm.default", ["add", "w"], A),
        op("mul", "aten.mul.Tensor", ["add", "mm"], A),
        op("exp", "aten.exp.default", ["mul"], A),
    ]
    nodes, analyzer = plan(graph(ops, {"x": A, "w": A}, ["exp"]))
    assert names(nodes) == ["gelu", "mul + exp"]
    assert any(r.code == "cycle" for r in analyzer.refusals)


def test_no_cycle_through_a_node_that_reaches_back():
    """The copies a and c: the matmul needs a, and the sum that c needs runs with the mul that needs the matmul."""
    whole, one = tensor(64, 256), tensor()
    ops = [
        op("p", "aten.sum.default", ["y"], one),
        op("a", "aten.clone.default", ["x"], whole),
        op("c", "aten.repeat.default", ["p"], tensor(8), (8,)),
        op("mm", "aten.mm.default", ["a", "w"], whole),
        op("q", "aten.mul.Tensor", ["mm", "y"], whole),
    ]
    nodes, analyzer = plan(graph(ops, dict.fromkeys("xyw", whole), ["c", "q"]))
    assert names(nodes) == ["sum + mul"]
    assert any(r.code == "cycle" and r.operations == "clone + repeat" for r in analyzer.refusals)


def test_a_whole_reduction_ends_a_node():
    ops = [
        op("mul", "aten.mul.Tensor", ["x", "x"], A),
        op("sum", "aten.sum.default", ["mul"], tensor()),
        op("div", "aten.div.Tensor", ["mul", "sum"], A),
        op("exp", "aten.exp.default", ["div"], A),
    ]
    nodes, analyzer = plan(graph(ops, {"x": A}, ["exp"]))
    assert all(not ({"sum", "div"} <= {o.name for o in n.operations}) for n in nodes)
    assert any(r.code in ("needs_whole_reduction", "cycle") for r in analyzer.refusals)


@pytest.mark.parametrize(("rows", "kernels"), [(32, [4]), (512, [2, 2])])
def test_a_number_of_few_elements_is_read_along_them_again(rows, kernels):
    x = tensor(rows, 256)
    ops = [
        op("mul", "aten.mul.Tensor", ["x", "x"], x),
        op("sum", "aten.sum.default", ["mul"], tensor()),
        op("div", "aten.div.Tensor", ["x", "sum"], x),
        op("exp", "aten.exp.default", ["div"], x),
    ]
    nodes, _ = plan(graph(ops, {"x": x}, ["exp"]))
    assert [len(n.kernels) for n in nodes] == kernels


def test_values_of_a_row_join_what_spreads_them():
    """Along the last dims only: what is spread along the first ones would be calculated for each row anew."""
    for small, spread in ((tensor(64, 1), True), (tensor(1, 256), False)):
        x = tensor(64, 256)
        ops = [
            op("exp", "aten.exp.default", ["v"], small),
            op("neg", "aten.neg.default", ["exp"], small),
            op("mul", "aten.mul.Tensor", ["x", "neg"], x),
            op("sin", "aten.sin.default", ["mul"], x),
        ]
        nodes, _ = plan(graph(ops, {"x": x, "v": small}, ["sin", "neg"]))
        assert (len(nodes) == 1) is spread


def broadcast_graph(small, x, leaving, target="aten.mul.Tensor"):
    ops = [
        op("one", target, ["v"], small, *([] if target.endswith("default") else [2])),
        op("mul", "aten.mul.Tensor", ["x", "one"], x),
        op("sin", "aten.sin.default", ["mul"], x),
    ]
    return graph(ops, {"x": x, "v": small}, leaving)


@pytest.mark.parametrize(
    ("small", "x"),
    [
        (tensor(256), tensor(64, 256)),
        (tensor(64, 1), tensor(3, 64, 256)),
        (tensor("s1"), tensor("s0", "s1")),
        (tensor(1, "s1"), tensor("s0", "s1")),
        (tensor("s0", 1), tensor("s1", "s0", 256)),
    ],
)
def test_cheap_work_on_what_is_broadcast_is_done_in_the_loops_of_its_reader(small, x):
    nodes, _ = plan(broadcast_graph(small, x, ["sin"]))
    assert names(nodes) == ["mul + mul + sin"] and nodes[0].validate_fusion()


@pytest.mark.parametrize(("rows", "joins"), [(8, True), (512, False)])
def test_costly_work_on_what_is_broadcast_is_done_once_unless_there_is_little(rows, joins):
    nodes, analyzer = plan(broadcast_graph(tensor(128), tensor(rows, 128), ["sin"], "aten.exp.default"))
    assert names(nodes) == (["exp + mul + sin"] if joins else ["exp", "mul + sin"])
    assert any(r.code == "broadcast_work" for r in analyzer.refusals) is not joins


def test_what_is_broadcast_and_leaves_has_a_kernel_of_its_own():
    nodes, analyzer = plan(broadcast_graph(tensor(256), tensor(64, 256), ["sin", "one"]))
    assert names(nodes) == ["mul + sin"]
    assert any(r.code == "part_leaves" for r in analyzer.refusals)


def test_what_is_broadcast_for_two_nodes_has_a_kernel_of_its_own():
    small, x = tensor(256), tensor(64, 256)
    ops = [
        op("exp", "aten.exp.default", ["v"], small),
        op("mul", "aten.mul.Tensor", ["x", "exp"], x),
        op("mm", "aten.mm.default", ["mul", "w"], x),
        op("add", "aten.add.Tensor", ["mm", "exp"], x),
        op("sin", "aten.sin.default", ["add"], x),
    ]
    nodes, _ = plan(graph(ops, {"x": x, "v": small, "w": tensor(256, 256)}, ["sin"]))
    assert "exp" not in " ".join(name for name in names(nodes) if "sin" in name)
    assert all(node.validate_fusion() for node in nodes)


def test_the_places_of_an_index_may_leave_and_be_broadcast():
    """Upsampling keeps for the backward graph how far each place is from its neighbour."""
    places, x = tensor(6, dtype="int64"), tensor(5, 6)
    ops = [
        op("at", "aten.mul.Tensor", ["v"], tensor(6), 0.5),
        op("place", "aten._to_copy.default", ["at"], places, dtype="int64"),
        op("read", "aten.index_select.default", ["x"], x, 1, ValueRef("place")),
        op("far", "aten.sub.Tensor", ["at", "place"], tensor(6)),
        op("out", "aten.mul.Tensor", ["read", "far"], x),
    ]
    nodes, _ = plan(graph(ops, {"v": tensor(6), "x": tensor(5, 9)}, ["out", "far", "place"]))
    assert names(nodes) == ["mul + to_copy + index_select + sub + mul"]


def test_row_statistics_join_the_work_around_them():
    ops = [
        op("mul", "aten.mul.Tensor", ["x", "x"], A),
        op("mean", "aten.mean.dim", ["mul"], ROW, (-1,), True),
        op("eps", "aten.add.Tensor", ["mean"], ROW, 1e-6),
        op("rsqrt", "aten.rsqrt.default", ["eps"], ROW),
        op("norm", "aten.mul.Tensor", ["x", "rsqrt"], A),
        op("scale", "aten.mul.Tensor", ["norm", "w"], A),
    ]
    nodes, _ = plan(graph(ops, {"x": A, "w": V}, ["scale"]))
    assert names(nodes) == ["mul + mean + add + rsqrt + mul + mul"]
    assert nodes[0].kind == "reduction" and nodes[0].validate_fusion()


def test_layer_norm_backward_takes_bias_gradient_through_a_view():
    flat = tensor("s0*s1", 256)
    ops = [
        op("ln", "aten.native_layer_norm_backward.default", ["g", "x"], None, (256,), ValueRef("m"), ValueRef("r"),
           ValueRef("w"), ValueRef("b"), (True, True, True), outputs=[A, V, V]),
        op("drop", "aten.native_dropout_backward.default", ["ln", "mask"], A, 1.25),
        op("view", "aten.view.default", ["drop"], flat, (SymbolicShape(["s0*s1"])[0], 256)),
        op("sum", "aten.sum.dim_IntList", ["view"], tensor(1, 256), (0,), True),
        op("mm", "aten.mm.default", ["view", "w2"], flat),
    ]  # fmt: skip
    inputs = {"g": A, "x": A, "m": ROW, "r": ROW, "w": V, "b": V, "mask": tensor("s0", "s1", 256, dtype="bool")}
    nodes, _ = plan(graph(ops, {**inputs, "w2": tensor(256, 256)}, ["mm", "sum", "ln@1", "ln@2"]))
    assert names(nodes) == ["native_layer_norm_backward + native_dropout_backward + sum"]
    assert ValueRef("drop") in nodes[0].outputs and ValueRef("ln", 0) not in nodes[0].outputs


def test_siblings_that_read_one_large_tensor_are_joined():
    ops = [
        op("mm", "aten.mm.default", ["x", "w"], A),
        op("relu", "aten.gelu.default", ["mm"], A),
        op("exp", "aten.exp.default", ["mm"], A),
        op("a", "aten.mm.default", ["relu", "w"], A),
        op("b", "aten.mm.default", ["exp", "w"], A),
    ]
    nodes, _ = plan(graph(ops, {"x": A, "w": A}, ["a", "b"]))
    assert names(nodes) == ["gelu + exp"]


def test_siblings_that_read_one_large_input_are_joined():
    """The two gradients of silu(a) * b, of which each needs that of the product."""
    ops = [
        op("silu", "aten.silu.default", ["a"], A),
        op("first", "aten.mul.Tensor", ["g", "silu"], A),
        op("inner", "aten.mul.Tensor", ["g", "b"], A),
        op("second", "aten.silu_backward.default", ["inner", "a"], A),
    ]
    nodes, _ = plan(graph(ops, {"g": A, "a": A, "b": A}, ["first", "second"]))
    assert names(nodes) == ["silu + mul + mul + silu_backward"]


def test_refusals_are_data():
    ops = [op("add", "aten.add.Tensor", ["x", "x"], A), op("mm", "aten.mm.default", ["add", "x"], A)]
    nodes, analyzer = plan(graph(ops, {"x": A}, ["mm"]))
    assert nodes == []
    (refusal,) = [r for r in analyzer.refusals if not r.accepted]
    assert refusal.code == "single_op" and refusal.operations == "add" and refusal.source.startswith("model.py:1")


def test_lowerable_splits_what_has_no_kernel():
    ops = [op("a", "aten.gelu.default", ["x"], A), op("b", "aten.exp.default", ["a"], A)]
    refuse = lambda form: ("too_big", "no") if len(form.operations) > 1 else None  # noqa: E731
    analyzer = FusionCandidateAnalyzer(FusionConfig(), refuse)
    assert names(analyzer.find_fusible_operations(graph(ops, {"x": A}, ["b"]))) == ["gelu", "exp"]


def test_with_check_no_node_is_accepted_that_is_not_sound(monkeypatch):
    ops = [op("a", "aten.gelu.default", ["x"], A), op("b", "aten.exp.default", ["a"], A)]
    asked = []
    monkeypatch.setattr(FusionNode, "validate_fusion", lambda node: asked.append(node.operation_names) or False)
    assert len(FusionEngine().fuse(graph(ops, {"x": A}, ["b"]))) == 1 and not asked, "it costs time"
    engine = FusionEngine(check=True)
    assert engine.fuse(graph(ops, {"x": A}, ["b"])) == []
    assert asked == ["gelu + exp", "gelu", "exp"]
    assert [r.code for r in engine.refusals] == ["not_sound"] * 3


def test_with_check_operations_keep_the_shapes_of_what_they_read():
    ops = [op("a", "aten.gelu.default", ["x"], A), op("b", "aten.add.Tensor", ["a", "v"], A)]
    assert len(FusionEngine(check=True).fuse(graph(ops, {"x": A, "v": V}, ["b"]))) == 1, "broadcast"
    ops[1] = op("b", "aten.exp.default", ["a"], tensor("s1", "s0", 256))  # as many elements
    assert names(FusionEngine().fuse(graph(ops, {"x": A}, ["b"]))) == ["gelu + exp"]
    engine = FusionEngine(check=True)
    assert names(engine.fuse(graph(ops, {"x": A}, ["b"]))) == ["gelu"]
    assert [r.operations for r in engine.refusals if r.code == "not_sound"] == ["gelu + exp", "exp"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nodes_of_all_cases_are_sound(dtype):
    for case in CASES.values():
        form = case.form(dtype)
        g = FusionGraph(form.operations, {item.name: item.spec for item in form.inputs}, form.outputs)
        plain, checked = FusionEngine(), FusionEngine(check=True)
        expected = [node.fusion_id for node in plain.fuse(g)]
        assert [node.fusion_id for node in checked.fuse(g)] == expected, case.name


def test_switches_and_sizes():
    ops = [op("a", "aten.gelu.default", ["x"], A), op("s", "aten._softmax.default", ["a"], A, -1, False)]
    g = graph(ops, {"x": A}, ["s"])
    assert names(plan(g)[0]) == ["gelu + softmax"]
    assert names(plan(g, enable_reduction=False)[0]) == ["gelu"]
    assert plan(g, enabled=False)[0] == []
    assert plan(g, cpu_fusion=False)[0] == []
    assert plan(g, min_tensor_size=10**9)[0] == []
    assert plan(g, min_fusion_benefit=100.0)[0] == []
    for bad in ({"max_fusion_size": 0}, {"min_fusion_benefit": 0.0}, {"min_tensor_size": -1}):
        with pytest.raises(SettingsError, match="expected"):
            FusionConfig(**bad)


def test_the_same_code_in_another_layer_has_one_identity():
    def layer(tag, s0, s1):
        spec = tensor(s0, s1, 256)
        ops = [op(f"a{tag}", "aten.gelu.default", [f"x{tag}"], spec)]
        ops.append(op(f"b{tag}", "aten.exp.default", [f"a{tag}"], spec))
        return FusionNode(ops, {f"x{tag}": spec})

    first, second = layer("1", "s0", "s1"), layer("2", "s77", "s3")
    assert first.fusion_id == second.fusion_id and first.symbols == ("s0", "s1") and second.symbols == ("s77", "s3")
    assert first.fusion_id != layer("3", "s0", "s0").fusion_id
    assert FusionNode.from_json(first.to_json()).fusion_id == first.fusion_id
    assert NodeForm.from_json(first.to_json()) == first.form


def test_node_growth_and_validation():
    node = FusionNode([op("a", "aten.add.Tensor", ["x", "y"], A)], {"x": A, "y": A})
    relu = op("b", "aten.relu.default", ["a"], A)
    assert node.can_fuse_with(relu, [A.shape])
    assert not node.can_fuse_with(relu, [V.shape])
    assert not node.can_fuse_with(op("m", "aten.mm.default", ["a", "a"], A), [A.shape])
    node.add_operation(relu)
    assert node.validate_fusion() and node.output_shapes == [A.shape] and node.input_shapes == [A.shape, A.shape]
    with pytest.raises(FusionError, match="expected an operation"):
        node.add_operation(op("m", "aten.mm.default", ["b", "b"], A))
    assert not FusionNode([relu], {}).validate_fusion()
    late = FusionNode([op("a", "aten.add.Tensor", ["x", "y"], A)])
    sums = op("r", "aten.sum.dim_IntList", ["a"], ROW, (-1,), True)
    assert not FusionNode().can_fuse_with(sums) and late.can_fuse_with(sums), "it reads what is there"
    other = FusionNode([op("c", "aten.relu.default", ["z"], tensor(7))], {"z": tensor(7)})
    assert late.can_fuse_with(node) and not late.can_fuse_with(other), "of another node, the loops"


def test_benefit_counts_launches_and_bytes():
    ops = [op("a", "aten.add.Tensor", ["x", "y"], A), op("b", "aten.relu.default", ["a"], A)]
    g = graph(ops, {"x": A, "y": A}, ["b"])
    (node,), analyzer = plan(g)
    benefit = analyzer.analyze_benefit(node, g)
    nbytes = 4 * 100 * 256 * 4
    assert benefit.kernel_count_reduction == 1 and benefit.memory_saved == 2 * nbytes
    assert benefit.should_fuse(1.0) and not benefit.should_fuse(100.0)
    assert analyzer.requires_runtime_shape_check(node) and analyzer.is_shape_preserving(ops[1])


def test_engine_patterns_and_statistics():
    ops = [
        op("a", "aten.mul.Tensor", ["x", "x"], A),
        op("b", "aten.add.Tensor", ["a", "x"], A),
        op("c", "aten.relu.default", ["b"], A),
    ]
    engine = FusionEngine(FusionConfig(max_fusion_size=2))
    engine.register_pattern(FusionPattern("affine_relu_mine", ["mul", "add", "relu"]), priority=5)
    nodes = engine.fuse(graph(ops, {"x": A}, ["c"]))
    assert names(nodes) == ["mul + add + relu"]
    stats = engine.get_fusion_stats()
    assert stats["num_fused"] == 1 and stats["patterns_used"]["affine_relu_mine"] == 1
    assert stats["efficiency"] == pytest.approx(2 / 3) and stats["memory_saved"] > 0
    with pytest.raises(FusionError, match="twice"):
        engine.register_pattern(FusionPattern("affine_relu_mine", ["mul"]))
    with pytest.raises(UnknownOpError, match="did you mean"):
        FusionPattern("x", ["linaer"])
    with pytest.raises(FusionError, match="fusion_type"):
        FusionPattern("x", ["relu"], fusion_type="magic")
    attention = FusionPattern("fused_attention", ["matmul", "softmax", "matmul"], "attention")
    engine.register_pattern(attention)
    bmm = [
        op("q", "aten.bmm.default", ["x", "x"], A),
        op("s", "aten._softmax.default", ["q"], A, -1, False),
        op("o", "aten.bmm.default", ["s", "x"], A),
    ]
    engine.fuse(graph(bmm, {"x": A}, ["o"]))
    assert any(r.code == "pattern_has_no_kernel" for r in engine.refusals)
    assert FusionEngine(enable_fusion=False).fuse(graph(ops, {"x": A}, ["c"])) == []


def test_views_inside_a_node_and_outside_of_it():
    flat = tensor("s0*s1", 256)
    view_arg = (SymbolicShape(["s0*s1"])[0], 256)
    ops = [
        op("a", "aten.gelu.default", ["x"], A),
        op("v", "aten.view.default", ["a"], flat, view_arg),
        op("b", "aten.exp.default", ["v"], flat),
        op("mm", "aten.mm.default", ["v", "w"], flat),
    ]
    nodes, _ = plan(graph(ops, {"x": A, "w": A}, ["b", "mm"]))
    assert [o.name for o in nodes[0].operations] == ["a", "v", "b"]
    assert set(nodes[0].outputs) == {ValueRef("a"), ValueRef("b")}  # mm reads a through a view of its own


def test_bad_graphs_are_named():
    with pytest.raises(FusionError, match="nothing produces"):
        graph([op("a", "aten.relu.default", ["x"], A)], {}, ["a"])
    with pytest.raises(FusionError, match="two"):
        graph([op("a", "aten.relu.default", ["x"], A), op("a", "aten.relu.default", ["x"], A)], {"x": A}, ["a"])
