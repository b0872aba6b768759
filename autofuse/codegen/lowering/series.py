"""Series in scalar ops: polynomials, Chebyshev series and small integer powers of a value.

In: a value and a table of coefficients, the highest power or degree first. Out: the value of the series, in the dtype
of its argument. All steps are multiplications and additions, which every target vectorises.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Builder, Val

_SMALL = 1e-10  # of the largest coefficient: what a float32 loses anyway (its unit is 6e-8)


def polynomial(b: Builder, x: Val, table: Sequence[float]) -> Val:
    """By Horner's rule."""
    value = b.const(table[0], x.dtype)
    for factor in table[1:]:
        value = b.add(b.mul(value, x), factor)
    return value


def ratio(b: Builder, x: Val, above: Sequence[float], below: Sequence[float]) -> Val:
    """A quotient of two polynomials."""
    return b.div(polynomial(b, x, above), polynomial(b, x, below))


def chebyshev(b: Builder, x: Val, table: Sequence[float]) -> Val:
    """By Clenshaw's recurrence; ``x`` is twice the argument of the polynomials, and the last term counts half.

    In float32 it leaves out the first terms, which all together are too small to change the sum.
    """
    if x.dtype == "float32":
        while sum(abs(c) for c in table[:1]) < _SMALL * max(map(abs, table)):
            table = table[1:]
    before, value = b.const(0, x.dtype), b.const(table[0], x.dtype)
    last = before
    for term in table[1:]:
        last, before = before, value
        value = b.add(b.sub(b.mul(x, before), last), term)
    return b.mul(b.sub(value, last), 0.5)


def whole_power(b: Builder, x: Val, exponent: int) -> Val:
    """A positive integer power, by squaring."""
    value: Val | None = None
    while exponent:
        if exponent % 2:
            value = x if value is None else b.mul(value, x)
        exponent //= 2
        x = b.mul(x, x) if exponent else x
    assert value is not None
    return value
