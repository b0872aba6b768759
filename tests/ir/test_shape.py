"""SymbolicShape: broadcasting, binding, unifying, divisibility, JSON; properties over random shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.errors import ShapeError
from autofuse.ir.shape import SymbolicShape, contiguous_strides, divide, evaluate, parse_dim, product, symbol

dims = st.one_of(st.integers(0, 9), st.sampled_from(["s0", "s1", "2*s0", "s0*s1", "s1 + 1"]))
shapes = st.lists(dims, max_size=4).map(SymbolicShape)
values = st.fixed_dictionaries({"s0": st.integers(0, 50), "s1": st.integers(0, 50)})


@given(shapes)
def test_json_round_trip(shape):
    assert SymbolicShape.from_json(shape.to_json()) == shape
    assert hash(SymbolicShape.from_json(shape.to_json())) == hash(shape)


@given(shapes, values)
def test_bind_agrees_with_arithmetic(shape, table):
    sizes = shape.bind(table)
    text = [str(d) for d in shape]
    assert sizes == tuple(eval(t, {}, table) for t in text)
    total = 1
    for size in sizes:
        total *= size
    assert evaluate(shape.numel, table) == total


@given(shapes, values)
def test_unify_finds_the_binding(shape, table):
    plain = [d for d in shape if not isinstance(d, int)]
    bound = {str(s) for d in plain if d.is_Symbol for s in d.free_symbols}
    if any(str(s) not in bound for d in plain for s in d.free_symbols):
        return  # expressions alone need not have one solution
    found = shape.unify(shape.bind(table))
    assert found == {name: table[name] for name in found}
    assert SymbolicShape(shape).bind({**table, **found}) == shape.bind(table)


@given(shapes, values)
def test_broadcast_with_itself_and_with_ones(shape, table):
    assert shape.broadcast(shape) == shape
    assert shape.broadcast(SymbolicShape([1] * len(shape))) == shape
    assert SymbolicShape([]).broadcast(shape) == shape


def test_broadcast_follows_torch():
    left, right = SymbolicShape(["s0", 1, 8]), SymbolicShape(["s1", 8])
    assert left.broadcast(right) == SymbolicShape(["s0", "s1", 8])
    with pytest.raises(ShapeError, match="3 against 4"):
        SymbolicShape([3]).broadcast(SymbolicShape([4]))
    with pytest.raises(ShapeError, match="s0 against s1"):
        SymbolicShape(["s0"]).broadcast(SymbolicShape(["s1"]))


def test_equal_expressions_are_equal_shapes():
    assert SymbolicShape(["s0*(s1 + 1)"]) == SymbolicShape(["s0*s1 + s0"])
    assert SymbolicShape([parse_dim("4*2")]) == SymbolicShape([8])


def test_divisibility():
    assert divide(parse_dim("8*s0"), 8) == symbol("s0") and divide(12, 4) == 3
    assert divide(symbol("s1"), 2) is None
    assert divide(parse_dim("s0*s1"), symbol("s1")) == symbol("s0")
    assert divide(parse_dim("s0 + 1"), 2) is None


def test_missing_symbols_and_wrong_sizes_are_named():
    with pytest.raises(ShapeError, match="s1"):
        SymbolicShape(["s0", "s1"]).bind({"s0": 3})
    with pytest.raises(ShapeError, match="found 3 and 4"):
        SymbolicShape(["s0", "s0"]).unify((3, 4))
    with pytest.raises(ShapeError, match="2 dims"):
        SymbolicShape(["s0", "s1"]).unify((3,))
    assert SymbolicShape(["2*s0 + 1"]).unify((7,)) == {"s0": 3}
    with pytest.raises(ShapeError):
        SymbolicShape(["2*s0 + 1"]).unify((8,))


def test_a_rounded_quotient_has_no_one_size_behind_it():
    with pytest.raises(ShapeError, match="one value"):
        SymbolicShape(["floor(s1/2) - 5"]).unify([3])


def test_strides_and_products():
    assert contiguous_strides([2, 3, 4]) == (12, 4, 1)
    assert contiguous_strides(SymbolicShape(["s0", "s1", 8]).dims)[0] == parse_dim("8*s1")
    assert product([]) == 1
