"""The optimizer of the process: its switches hold in sessions, and it counts what they plan."""

import pytest
import torch
from test_patterns import ACTIVATION, Activation, no_patterns, planned, session_in, used

from autofuse.errors import FusionError, SettingsError
from autofuse.fusion import FusionConfig, FusionEngine, FusionOptimizer, FusionPattern, patterns
from tests.fusion.small_graphs import graph, op, tensor

A = tensor("s0", "s1", 256)
MINE = FusionPattern("mine", ["mul", "add"])


@pytest.fixture(autouse=True)
def shared():
    """The optimizer of the process as it is at first."""
    with no_patterns():
        FusionOptimizer.shared().reset()
        yield FusionOptimizer.shared()
        FusionOptimizer.shared().reset()


def chain():
    ops = [
        op("a", "aten.mul.Tensor", ["x", "x"], A),
        op("b", "aten.add.Tensor", ["a", "x"], A),
        op("c", "aten.relu.default", ["b"], A),
    ]
    return graph(ops, {"x": A}, ["c"])


def test_sessions_plan_through_the_optimizer_of_the_process(tmp_path, shared, monkeypatch):
    asked = []
    detect, apply = shared.detect_opportunities, shared.apply_fusions
    monkeypatch.setattr(shared, "detect_opportunities", lambda *args: asked.append("detect") or detect(*args))
    monkeypatch.setattr(shared, "apply_fusions", lambda *args: asked.append("apply") or apply(*args))
    for _ in range(2):
        session = session_in(tmp_path)
        planned(session, Activation().train(), torch.randn(8, 16))
        assert session.planner.engine.optimizer is shared
    assert asked == ["detect", "apply"] * 2
    stats, of_one = shared.get_stats(), session.planner.engine.get_fusion_stats()
    assert stats["total_fusions"] == stats["num_fused"] == 2 * of_one["num_fused"] > 0
    assert stats["average_speedup"] == pytest.approx(of_one["mean_speedup"])
    assert stats["memory_saved"] == 2 * of_one["memory_saved"]


def test_a_switch_holds_for_sessions_that_run_and_for_later_ones(tmp_path, shared):
    running = session_in(tmp_path)
    shared.set_enabled(False)
    for session in (running, session_in(tmp_path)):
        assert planned(session, Activation(), torch.randn(8, 16)) == ([], [])
    shared.set_enabled(True)
    for session in (running, session_in(tmp_path, enabled=False)):
        assert planned(session, Activation(), torch.randn(8, 16))[0], "whatever the settings say"
    shared.reset()
    assert planned(session_in(tmp_path, enabled=False), Activation(), torch.randn(8, 16)) == ([], [])


def test_small_tensors_are_left_to_eager(tmp_path, shared):
    session = session_in(tmp_path)
    shared.set_min_tensor_size(8 * 32 + 1)
    assert planned(session, Activation().train(), torch.randn(8, 16))[0] == []
    assert any(r.code == "small_tensors" for r in session.context.refusals)
    shared.set_min_tensor_size(8 * 32)
    assert planned(session, Activation().train(), torch.randn(8, 16))[0] != []
    with pytest.raises(SettingsError, match="min_tensor_size"):
        shared.set_min_tensor_size(-1)
    assert shared.switches == {"min_tensor_size": 256}


def test_a_pattern_is_enabled_beside_those_of_the_settings(tmp_path, shared):
    shared.enable_pattern(ACTIVATION)
    shared.enable_pattern(ACTIVATION)
    session = session_in(tmp_path, enabled_patterns="other")
    planned(session, Activation(), torch.randn(8, 16))
    assert used(session)["custom_activation"] == 1 == shared.get_stats()["patterns_used"]["custom_activation"]
    assert patterns.registered_patterns() == [ACTIVATION]
    with pytest.raises(FusionError, match="twice"):
        shared.enable_pattern(FusionPattern("custom_activation", ["mul", "relu"]))


def test_plans_that_are_kept_are_those_of_the_same_switches(tmp_path, shared):
    session = session_in(tmp_path)
    before = session.roots.services.plan_cache().switches()
    shared.set_enabled(False)
    after = session.roots.services.plan_cache().switches()
    assert {name for name in before if before[name] != after[name]} == {"switches of fusion"}


def test_an_optimizer_detects_and_applies_by_itself(shared):
    shared.enable_pattern(MINE)
    found = shared.detect_opportunities(chain())
    assert [(o.pattern, o.operations) for o in found] == [("mine", ("a", "b", "c"))]
    g = chain()
    applied = shared.apply_fusions(g, found)
    assert [n.operation_names for n in applied.nodes] == ["mul + add + relu"]
    assert len(g.operations) == 3, "the graph stays as it is"
    assert shared.get_stats()["total_fusions"] == 1
    shared.set_enabled(False)
    assert shared.detect_opportunities(chain()) == []


def test_an_engine_of_its_own_has_switches_of_its_own(shared):
    shared.set_enabled(False)
    engine = FusionEngine(FusionConfig(min_tensor_size=1))
    assert len(engine.fuse(chain())) == 1 and shared.get_stats()["total_fusions"] == 0
    engine.optimizer.set_min_tensor_size(10**9)
    assert engine.fuse(chain()) == [] and engine.config.min_tensor_size == 10**9
