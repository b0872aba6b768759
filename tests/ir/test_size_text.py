"""Sizes as text: integers in every language, also where floating-point numbers would round a quotient wrongly."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autofuse.errors import LoweringError
from autofuse.ir.shape import as_dim, evaluate, parse_dim, symbol
from autofuse.ir.size_text import PYTHON, TRITON, C, dim_text

SIZE = symbol("s0")
LANGUAGES = (C, TRITON, PYTHON)


def calculated(text: str, size: int) -> int:
    """C rounds towards zero; where nothing is negative that is down."""
    return int(eval(text.replace("//", "/").replace("/", "//"), {"s0": size}))


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5), st.integers(0, 500))
def test_what_a_window_leaves_of_a_size(length, stride, padding, more):
    padding = min(padding, length // 2)
    size = length + more
    left = as_dim(sympy.floor((SIZE + 2 * padding - length) / stride) + 1)
    wanted = (size + 2 * padding - length) // stride + 1
    assert evaluate(left, {"s0": size}) == wanted
    assert evaluate(parse_dim(str(left)), {"s0": size}) == wanted  # as it comes back from a store
    assert {calculated(dim_text(left, language), size) for language in LANGUAGES} == {wanted}
    again = as_dim(sympy.floor((left - 1) / stride) + 1)
    assert {calculated(dim_text(again, language), size) for language in LANGUAGES} == {(wanted - 1) // stride + 1}


@pytest.mark.parametrize("size", range(2, 40))
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("s0*(s0 - 1)/2", lambda n: n * (n - 1) // 2),
        ("s0*(s0 + 1)*(s0 + 2)/6", lambda n: n * (n + 1) * (n + 2) // 6),
        ("ceiling(s0/7)", lambda n: -(-n // 7)),
        ("Mod(s0, 5) + Max(s0, 9) - Min(s0, 3)", lambda n: n % 5 + max(n, 9) - min(n, 3)),
    ],
)
def test_fractions_whose_sum_is_whole(text, wanted, size):
    dim = parse_dim(text)
    assert evaluate(dim, {"s0": size}) == wanted(size)
    if "M" not in text:  # C and Triton write the larger one in their own way
        assert {calculated(dim_text(dim, language), size) for language in LANGUAGES} == {wanted(size)}


def test_no_text_for_what_is_no_size():
    with pytest.raises(LoweringError, match="built from"):
        dim_text(sympy.sin(SIZE))
