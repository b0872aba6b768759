"""Custom patterns: the seeds' two, from Python and from a TOML file, and what is said of wrong ones."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autofuse
from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.graph_import import import_graph
from autofuse.capture.passes.random_ops import split_dropout
from autofuse.errors import FusionError, SettingsError, UnknownOpError
from autofuse.fusion import FusionConfig, FusionEngine, FusionPattern, patterns
from autofuse.fusion.pattern_file import read_patterns
from autofuse.sessions import make_session
from autofuse.settings.layers import load
from tests.fusion.small_graphs import graph, op, tensor

A = tensor("s0", "s1", 256)
ACTIVATION = FusionPattern(name="custom_activation", ops=["linear", "relu", "dropout"], fusion_type="elementwise")
ATTENTION = FusionPattern(name="fused_attention", ops=["matmul", "softmax", "matmul"], fusion_type="attention")


@contextlib.contextmanager
def no_patterns():
    """The process without registered patterns, for as long as this lasts."""
    registered = patterns.registered_patterns()
    before = list(registered)
    registered.clear()
    try:
        yield
    finally:
        registered[:] = before


@pytest.fixture(autouse=True)
def nothing_registered():
    with no_patterns():
        yield


class Activation(nn.Module):
    """The chain of the seed's first example."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 32), nn.Dropout(0.2)

    def forward(self, x):
        return self.dropout(torch.relu(self.linear(x)))


class Attention(nn.Module):
    """Attention by hand, with a scale and a mask between what the pattern names."""

    def forward(self, query, key, value, mask):
        scores = torch.matmul(query, key.transpose(-2, -1)) / 8**0.5
        return torch.matmul((scores + mask).softmax(-1), value)


def session_in(tmp_path, **values):
    names = {f"fusion.{name}": value for name, value in values.items()}
    return make_session(load({"run.store": str(tmp_path / "s.db"), "run.quiet": True, **names}, {}, tmp_path), "test")


def planned(session, model, *inputs):
    """Forward graph of ``model``, its nodes and its groups, as sets of operators' names."""
    found = []

    def keep(module, phase, times):
        split_dropout(module)
        imported = import_graph(module)
        g = imported.for_fusion()
        nodes = session.planner.plan_nodes(g)
        found.append((nodes, session.planner.plan_groups(g, nodes)))
        return boxed(module.forward)

    torch.compile(model, backend=lambda module, example: compile_with(module, example, keep))(*inputs)
    torch._dynamo.reset()
    nodes, groups = found[0]
    return [n.operation_names for n in nodes], [g.node.operation_names for g in groups]


def refusals(session):
    return [r.detail for r in session.context.refusals if r.code == "pattern_has_no_kernel"]


def used(session):
    return session.planner.engine.get_fusion_stats()["patterns_used"]


# ---- the seeds' examples ------------------------------------------------------------------------------


def test_linear_relu_dropout_in_training(tmp_path):
    session = session_in(tmp_path)
    session.planner.engine.register_pattern(ACTIVATION)
    nodes, groups = planned(session, Activation().train(), torch.randn(8, 16))
    assert any(name.startswith("relu + dropout_scale") for name in nodes)
    assert any(name.startswith("addmm + relu + dropout_scale") for name in groups)
    assert used(session)["custom_activation"] == 1 and not refusals(session)


def test_attention_with_scale_and_mask(tmp_path):
    session = session_in(tmp_path)
    session.planner.engine.register_pattern(ATTENTION)
    heads = [torch.randn(2, 4, size, 8) for size in (6, 7, 7)]
    _, groups = planned(session, Attention(), *heads, torch.randn(6, 7))
    assert groups == ["bmm + div + add + softmax + bmm"]
    assert used(session)["fused_attention"] == 1 and not refusals(session)


def test_a_pattern_that_no_group_takes_in_is_refused(tmp_path):
    session = session_in(tmp_path)
    session.planner.engine.register_pattern(FusionPattern("two_products", ["linear", "linear"], "matmul"))
    planned(session, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8))
    assert refusals(session) == ["pattern 'two_products': nothing here can run these operators as one"]
    assert "two_products" not in used(session)


def test_what_is_switched_off_is_named(tmp_path):
    session = session_in(tmp_path, enable_matmul=False)
    session.planner.engine.register_pattern(ACTIVATION)
    _, groups = planned(session, Activation(), torch.randn(8, 16))
    assert groups == [] and refusals(session) == [
        "pattern 'custom_activation': enable_matmul is off, which addmm needs"
    ]
    engine = FusionEngine(FusionConfig(enable_elementwise=False))
    engine.register_pattern(FusionPattern("mine", ["mul", "relu"]))
    ops = [op("a", "aten.mul.Tensor", ["x", "x"], A), op("b", "aten.relu.default", ["a"], A)]
    engine.fuse(graph(ops, {"x": A}, ["b"]))
    assert [r.detail for r in engine.refusals if r.code == "pattern_has_no_kernel"] == [
        "pattern 'mine': no variant generates mul, or its kind is switched off"
    ]


# ---- matching -----------------------------------------------------------------------------------------


def chain(*targets):
    """``a``, ``b``, ... each reading the one before."""
    names = "abcdefghijk"
    return [op(names[i], target, [names[i - 1] if i else "x", "x"], A) for i, target in enumerate(targets)]


def matches(pattern, ops, outputs):
    return [[o.name for o in found] for found in pattern.matches(graph(ops, {"x": A}, outputs))]


def test_a_reader_that_leads_nowhere_does_not_hide_another():
    ops = chain("aten.mul.Tensor", "aten.add.Tensor")
    ops += [op("c", "aten.add.Tensor", ["a", "x"], A), op("d", "aten.relu.default", ["c"], A)]
    assert matches(FusionPattern("p", ["mul", "add", "relu"]), ops, ["b", "d"]) == [["a", "c", "d"]]


def test_only_attention_passes_over_element_wise_operators():
    ops = chain("aten.bmm.default", "aten.div.Tensor", "aten.add.Tensor", "aten._softmax.default", "aten.bmm.default")
    assert matches(ATTENTION, ops, ["e"]) == [["a", "d", "e"]]
    assert matches(FusionPattern("p", ATTENTION.ops, "matmul"), ops, ["e"]) == []
    far = chain("aten.bmm.default", *["aten.add.Tensor"] * 5, "aten._softmax.default", "aten.bmm.default")
    assert matches(ATTENTION, far, ["h"]) == []


# ---- registration -------------------------------------------------------------------------------------


def test_python_registration_reaches_the_running_session_and_later_ones(tmp_path):
    running = session_in(tmp_path)
    autofuse.register_pattern(FusionPattern("low", ["mul", "relu"]), priority=-1)
    autofuse.register_pattern(ACTIVATION)
    for session in (running, session_in(tmp_path)):
        assert [p.name for p in session.planner.engine.patterns] == ["custom_activation", "low"]
        planned(session, Activation(), torch.randn(8, 16))
        assert used(session)["custom_activation"] == 1
    with pytest.raises(FusionError, match="'low' twice"):
        autofuse.register_pattern(FusionPattern("low", ["mul"]))


def test_larger_priority_goes_first():
    ops = chain("aten.mul.Tensor", "aten.add.Tensor", "aten.relu.default")
    for priorities, winner in (((1, 2), "second"), ((2, 1), "first")):
        engine = FusionEngine()
        engine.register_pattern(FusionPattern("first", ["mul", "add"]), priority=priorities[0])
        engine.register_pattern(FusionPattern("second", ["add", "relu"], priority=priorities[1]))
        engine.fuse(graph(ops, {"x": A}, ["c"]))
        found = engine.get_fusion_stats()["patterns_used"]
        assert found[winner] == 1 and {"first", "second"} & set(found) == {winner}


def test_enabled_patterns_choose(tmp_path):
    session = session_in(tmp_path, enabled_patterns="other")
    session.planner.engine.register_pattern(ACTIVATION)
    planned(session, Activation(), torch.randn(8, 16))
    assert "custom_activation" not in used(session)


# ---- TOML ---------------------------------------------------------------------------------------------

SEEDS = """
[[pattern]]
name = "custom_activation"
ops = ["linear", "relu", "dropout"]

[[pattern]]
name = "fused_attention"
ops = ["matmul", "softmax", "matmul"]
fusion_type = "attention"
priority = 10
"""


def test_a_session_reads_the_file_that_is_set(tmp_path):
    (tmp_path / "patterns.toml").write_text(SEEDS)
    session = session_in(tmp_path, patterns="patterns.toml")
    assert session.planner.engine.patterns == [
        FusionPattern("fused_attention", ATTENTION.ops, "attention", 10),
        ACTIVATION,
    ]
    planned(session, Activation(), torch.randn(8, 16))
    assert used(session)["custom_activation"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[pattern", "expected a readable TOML file"),
        ("", "expected tables \\[\\[pattern\\]\\] and nothing else, found nothing"),
        ("[pattern]\nname = 'a'", "expected tables .* found pattern"),
        (SEEDS + "[other]\n", "found pattern, other"),
        ("pattern = [3]", "pattern 1: expected a table, found 3"),
        ("[[pattern]]\nops = ['mul']", "pattern 1: expected a name, found none. Type: "),
        ("[[pattern]]\nname = 'a'\nops = []", "pattern 1: expected at least one operator"),
        ("[[pattern]]\nname = 'a'\nops = 'mul'", "expected a list of operators' names as ops, found 'mul'"),
        ("[[pattern]]\nname = 'a'\nops = ['mul', 3]", "expected a list of operators' names as ops"),
        ("[[pattern]]\nname = 'a'\nops = ['mul']\npriority = true", "expected a whole number as priority, found True"),
        ("[[pattern]]\nname = 'a'\nops = ['mul']\nprioriti = 1", "found 'prioriti'; did you mean priority?"),
        ("[[pattern]]\nname = 'a'\nops = ['mul']\nfusion_type = 'x'", "expected a fusion_type of elementwise, .* 'x'"),
        (SEEDS + SEEDS.replace("fused_attention", "b"), "pattern 3: .*'custom_activation' twice"),
        ("[[pattern]]\nname = 'a'\nops = ['sofmax']", "found 'sofmax'; did you mean softmax"),
    ],
)
def test_a_bad_file_is_refused_with_what_to_type(tmp_path, text, message):
    path = tmp_path / "patterns.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=message) as caught:
        read_patterns(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"found: .*No such file"):
        read_patterns(tmp_path / "nowhere.toml")


def test_run_refuses_a_bad_file_before_the_script(tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "patterns.toml"
    script.write_text("print('ran')")
    path.write_text("[[pattern]]\nname = 'a'\nops = ['linaer']")
    command = [sys.executable, "-m", "autofuse", "run", "--store", str(tmp_path / "s.db"), "--set"]
    result = subprocess.run([*command, f"fusion.patterns={path}", str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert "'linaer'; did you mean linear" in result.stderr and len(result.stderr.splitlines()) == 1


def test_other_ways_in_say_it_once_and_go_on(tmp_path, capfd):
    (tmp_path / "patterns.toml").write_text("nonsense = 1")
    names = {"run.store": str(tmp_path / "s.db"), "fusion.patterns": str(tmp_path / "patterns.toml")}
    session = make_session(load(names, {}, tmp_path), "test")
    assert session.planner.engine.patterns == [] and "expected tables [[pattern]]" in capfd.readouterr().err


def test_unknown_operators_are_refused_with_the_nearest_names():
    with pytest.raises(UnknownOpError, match="found 'lineer'; did you mean linear"):
        FusionPattern("x", ["lineer", "relu"])


def test_readme_names_load_without_torch():
    code = "import sys, autofuse; autofuse.register_pattern; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_products_that_torch_may_round_are_left_to_it(tmp_path):
    """A kernel of ours has all bits, and was raced against products that have them too."""
    session = session_in(tmp_path)
    torch.set_float32_matmul_precision("high")
    try:
        _, groups = planned(session, Activation(), torch.randn(8, 16))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert groups == []
    assert [r.operations for r in session.context.refusals if r.code == "matmul_precision"] == ["addmm"]
