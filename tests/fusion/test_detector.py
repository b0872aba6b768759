"""Opportunities: what they say, their order, and the nodes that come of them."""

from dataclasses import FrozenInstanceError

import pytest

from autofuse.errors import FusionError
from autofuse.fusion import FusionConfig, FusionDetector, FusionEngine, FusionOpportunity, FusionPattern
from autofuse.fusion.analyzer import build_node
from autofuse.fusion.benefit import estimate_benefit
from tests.fusion.small_graphs import graph, op, tensor

A = tensor("s0", "s1", 256)
LINEAR = FusionPattern("mine", ["linear", "relu", "exp"])


def two_places():
    """A long chain and a short one, with a matmul between."""
    ops = [
        op("a", "aten.add.Tensor", ["x", "x"], A),
        op("b", "aten.relu.default", ["a"], A),
        op("mm", "aten.mm.default", ["b", "w"], A),
        op("c", "aten.gelu.default", ["mm"], A),
        op("d", "aten.mul.Tensor", ["c", "x"], A),
        op("e", "aten.exp.default", ["d"], A),
        op("f", "aten.mul.Tensor", ["e", "x"], A),
        op("g", "aten.sum.dim_IntList", ["f"], tensor("s0", "s1", 1), (-1,), True),
    ]
    return graph(ops, {"x": A, "w": A}, ["g"])


def names(nodes):
    return [[o.name for o in node.kernels] for node in nodes]


def test_opportunities_say_what_they_gain_the_largest_first():
    g = two_places()
    found = FusionDetector().detect(g)
    assert [(o.pattern, o.operations) for o in found] == [
        ("reduction", ("c", "d", "e", "f", "g")),
        ("add_relu", ("a", "b")),
    ]
    assert found[0].estimated_speedup > found[1].estimated_speedup > 1
    for opportunity in found:
        benefit = estimate_benefit(build_node(g, [g.by_name[name] for name in opportunity.operations]), g)
        assert opportunity.estimated_speedup == benefit.estimated_speedup
        assert opportunity.memory_saved == benefit.memory_saved > 0
    with pytest.raises(FrozenInstanceError):
        found[0].pattern = "other"


@pytest.mark.parametrize("turned", [False, True])
def test_nodes_come_of_opportunities_in_program_order(turned):
    g = two_places()
    detector = FusionDetector()
    found = detector.detect(g)
    applied = detector.apply(g, found[::-1] if turned else found)
    assert names(applied.nodes) == [["a", "b"], ["c", "d", "e", "f", "g"]] == names(FusionEngine().fuse(g))
    assert (applied.stats.applied, applied.stats.kernels_saved, applied.stats.dynamic) == (2, 5, 2)
    assert applied.stats.memory_saved == sum(o.memory_saved for o in found)
    assert [r.code for r in detector.refusals if r.accepted] == ["fused", "fused"]


def test_what_is_left_out_makes_no_node():
    g = two_places()
    detector = FusionDetector()
    assert names(detector.apply(g, detector.detect(g)[1:]).nodes) == [["a", "b"]]


def test_what_gains_too_little_is_no_opportunity_but_a_refusal():
    g = two_places()
    detector = FusionDetector(FusionConfig(min_tensor_size=10**9))
    assert detector.detect(g) == []
    assert [r.code for r in detector.refusals].count("small_tensors") == 2
    assert not any(r.accepted for r in detector.refusals)
    assert FusionDetector(FusionConfig(enabled=False)).detect(g) == []


def test_what_has_no_kernel_is_split_afterwards():
    g = two_places()
    detector = FusionDetector(lowerable=lambda form: ("too_big", "no") if len(form.operations) > 2 else None)
    found = detector.detect(g)
    assert len(found) == 2
    assert max(map(len, names(detector.apply(g, found).nodes))) == 2


def test_a_pattern_with_a_product_waits_for_a_group():
    ops = [
        op("mm", "aten.mm.default", ["x", "w"], A),
        op("r", "aten.relu.default", ["mm"], A),
        op("e", "aten.exp.default", ["r"], A),
    ]
    g = graph(ops, {"x": A, "w": A}, ["e"])
    detector = FusionDetector(patterns=[LINEAR], groups_follow=True)
    found = {o.needs_group: o for o in detector.detect(g)}
    assert found[True].operations == ("mm", "r", "e") and found[True].pattern == "mine"
    assert found[False].operations == ("r", "e") and found[False].pattern == "mine"
    assert names(detector.apply(g, list(found.values())).nodes) == [["r", "e"]]
    alone = FusionDetector(patterns=[LINEAR])
    assert [o.needs_group for o in alone.detect(g)] == [False]
    assert [r.code for r in alone.refusals] == ["pattern_has_no_kernel"]


def test_a_pattern_around_work_of_another_kernel_is_refused():
    """The mul and the add of it may not share one: the matmul between them needs the first and feeds the second."""
    ops = [
        op("a", "aten.mul.Tensor", ["x", "x"], A),
        op("mm", "aten.mm.default", ["a", "w"], A),
        op("b", "aten.add.Tensor", ["a", "mm"], A),
        op("c", "aten.relu.default", ["b"], A),
    ]
    g = graph(ops, {"x": A, "w": A}, ["c"])
    engine = FusionEngine()
    engine.register_pattern(FusionPattern("affine", ["mul", "add", "relu"]))
    assert names(engine.fuse(g)) == [["b", "c"]]
    assert any(r.code == "cycle" and r.operations == "mul + add + relu" for r in engine.refusals)


def test_opportunities_of_another_graph_and_those_that_overlap_are_refused():
    g = two_places()
    detector = FusionDetector()
    (first, second) = detector.detect(g)
    with pytest.raises(FusionError, match="found nothing"):
        detector.apply(g, [FusionOpportunity("mine", ("nothing",), 2.0, 0)])
    with pytest.raises(FusionError, match="each in one opportunity, found c"):
        detector.apply(g, [first, second, FusionOpportunity("mine", ("c", "d"), 2.0, 0)])
