"""Stored text is data: sizes by a grammar, names, operators and words by patterns; nothing of it is evaluated."""

import copy
import json

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autofuse.codegen.lowering.lower import describe
from autofuse.codegen.triton.source import TritonSource
from autofuse.errors import FusionError, ShapeError
from autofuse.ir.operation import NodeForm, TensorSpec
from autofuse.ir.shape import as_dim, evaluate, parse_dim, symbol
from autofuse.optim.form import StepForm
from autofuse.strategies.strategy import Strategy
from tests.cases import CASES

RUNS = "__import__('os').system('touch {}')"

sizes = st.recursive(
    st.one_of(st.integers(0, 9), st.sampled_from(["s0", "s1"]).map(symbol)),
    lambda part: st.one_of(
        st.tuples(part, part).map(lambda p: p[0] + p[1]),
        st.tuples(part, part).map(lambda p: p[0] * p[1]),
        st.tuples(part, st.integers(1, 7)).map(lambda p: sympy.floor(sympy.sympify(p[0]) / p[1])),
        st.tuples(part, st.integers(1, 7)).map(lambda p: sympy.Mod(p[0], p[1])),
        st.tuples(part, part).map(lambda p: sympy.Max(*p)),
        part.map(lambda p: p**2),
    ),
    max_leaves=6,
)


@given(sizes, st.integers(0, 40), st.integers(0, 40))
def test_a_size_reads_as_it_was_written(size, first, second):
    size = as_dim(size)
    assert parse_dim(str(size)) == size
    values = {"s0": first, "s1": second}
    assert evaluate(parse_dim(str(size)), values) == evaluate(size, values)


@pytest.mark.parametrize("text", [
    "__import__('os')", "s0.__class__", "s0[0]", "eval(s0)", "floor.__call__(s0)", "lambda", "s0 if s0 else s1",
    "(s0 := 3)", "9**9**9", "(s0 + 1)**999999", "s0**s1", "1e5", "0x10", "", "(", "s0 s1", "s0,", "1/0", "Mod(s0, 0)",
    "floor(1, 2)", "(" * 999 + "s0" + ")" * 999, "s" * 99, "1" * 99, "s0" + " + s0" * 2000, "\u0661",
])  # fmt: skip
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ShapeError, match="expected a size"):
        parse_dim(text)


def test_a_size_that_is_code_does_not_run(tmp_path):
    witness = tmp_path / "ran"
    with pytest.raises(ShapeError):
        parse_dim(RUNS.format(witness))
    with pytest.raises(ShapeError):
        TensorSpec.from_json([[RUNS.format(witness)], "float32", [1], "cpu"])
    with pytest.raises(ShapeError, match="name"):
        symbol("s0: print(1)")
    assert not witness.exists()


@pytest.fixture
def node():
    """A node of two operations, as JSON."""
    return json.loads(json.dumps(CASES["add_layer_norm"].form().to_json()))


def spoilt(data, path, value):
    data = copy.deepcopy(data)
    *front, last = path
    place = data
    for key in front:
        place = place[key]
    place[last] = value
    return data


@pytest.mark.parametrize(("path", "value"), [
    (("operations", 0, "name"), "v0 = print(1); v0"),
    (("operations", 0, "name"), "import"),
    (("operations", 0, "target"), "aten.add.Tensor(1)"),
    (("operations", 0, "target"), "os.system.default"),
    (("operations", 0, "target"), "aten.add"),
    (("operations", 0, "target"), 7),
    (("operations", 0, "args"), ["x'); print('"]),
    (("operations", 0, "args"), ["/etc/passwd"]),
    (("operations", 0, "args"), [{"ref": "torch", "index": 0}]),
    (("operations", 0, "args"), [{"ref": "i0", "index": 1}]),
    (("operations", 0, "args"), [{"ref": "i0", "index": "0"}]),
    (("operations", 0, "args"), [{"dim": "print(1)"}]),
    (("operations", 0, "args"), [2**70]),
    (("operations", 0, "kwargs"), {"dtype)": "float32"}),
    (("operations", 0, "kwargs"), {"dtype": "float32)"}),
    (("operations", 0, "outputs", 0, 1), "float32; int x"),
    (("inputs", 0, 0), "i0, i1=print(1)"),
    (("inputs", 0, 1, 1), "float32)"),
    (("inputs", 0, 1, 3), "cpu')"),
    (("outputs", 0, 0), "torch"),
    (("outputs", 0, 1), 99),
    (("symbols",), ["s0=print(1)"]),
])  # fmt: skip
def test_a_node_with_code_in_it_is_refused(node, path, value):
    assert NodeForm.from_json(node).to_json() == node
    with pytest.raises((FusionError, ShapeError)):
        NodeForm.from_json(spoilt(node, path, value))


def test_every_node_of_the_table_is_accepted():
    for case in CASES.values():
        form = case.form()
        assert NodeForm.from_json(json.loads(json.dumps(form.to_json()))) == form


@pytest.mark.parametrize("line", ["a\rimport os", "a\nimport os", "a\x0cimport os", "a\u2028import os", "*/ int x; /*"])
def test_a_line_of_the_users_stays_in_its_comment(node, line):
    form = NodeForm.from_json(spoilt(node, ("operations", 0, "source"), line))
    text = describe(form.operations[0])
    assert len(text.splitlines()) == 1 and "*/" not in text


def test_steps_ways_and_triton_sources_are_checked_too(node):
    step = StepForm("adam", ("weight_decay",), "float32", (8,)).to_json()
    assert StepForm.from_json(step).to_json() == step
    for name, value in [("algorithm", "os"), ("flags", ["x"]), ("dtype", "x"), ("sizes", ["x"]), ("device", "a b")]:
        with pytest.raises(FusionError):
            StepForm.from_json({**step, name: value})
    form = NodeForm.from_json(node)
    strategy = {"name": "w", "form": node, "parts": [[[form.operations[0].name], "loop"]], "detail": "", "rows": None}
    assert Strategy.from_json(strategy).form == form
    for name, value in [("parts", [[["v9"], "loop"]]), ("parts", [[["v0"], "x"]]), ("rows", ["b 0", 1, "s0", [True]])]:
        with pytest.raises(FusionError):
            Strategy.from_json({**strategy, name: value})
    source = TritonSource("af_x", "", (), (), ("s0",), 1, 1).to_json()
    assert TritonSource.from_json(source).to_json() == source
    with pytest.raises(FusionError):
        TritonSource.from_json({**source, "symbols": ["s0; x"]})
