"""Lowering rules of Bessel functions and the Airy function.

In: operand values. Out: the result's value, in the compute dtype of the result. Each rule is the approximation of
ATen's Math.h, written without branches: all pieces are calculated and one is selected. So NaN and Inf come out where
ATen has them. Integers are converted to the floating dtype of the result first.
"""

from __future__ import annotations

import math

from autofuse.codegen.lowering import special_tables as t
from autofuse.codegen.lowering.builder import Builder, Operand, Val
from autofuse.codegen.lowering.context import Rule
from autofuse.codegen.lowering.rules_base import Pointwise, Scalar
from autofuse.codegen.lowering.series import chebyshev, polynomial, ratio

# ---- modified functions of the first kind ------------------------------------------------------------------


def _scaled_near(b: Builder, x: Val, order: int) -> Val:
    """exp(-x) I(x) on [0, 8]."""
    series = chebyshev(b, b.sub(b.div(x, 2), 2), (t.I0_SMALL, t.I1_SMALL)[order])
    return b.mul(series, x) if order else series


def _modified_first(order: int, scaled: bool) -> Scalar:
    """I0 and I1, or these times exp(-abs(x))."""

    def rule(b: Builder, to: str, x: Operand) -> Val:
        value = b.cast(x, to)
        size = b.apply("abs", value)
        near = _scaled_near(b, size, order)
        far = chebyshev(b, b.sub(b.div(b.const(32, to), size), 2), (t.I0_LARGE, t.I1_LARGE)[order])
        if not scaled:
            growth = b.apply("exp", size)
            near, far = b.mul(growth, near), b.mul(growth, far)
        far = b.div(far, b.apply("sqrt", size))
        found = b.where(b.compare("le", size, 8), near, far)
        return b.where(b.compare("lt", value, 0), b.apply("neg", found), found) if order else found

    return rule


# ---- modified functions of the second kind -----------------------------------------------------------------


def _modified_second(order: int, scaled: bool) -> Scalar:
    """K0 and K1, or these times exp(x)."""

    def rule(b: Builder, to: str, x: Operand) -> Val:
        value = b.cast(x, to)
        first = b.mul(b.apply("exp", value), _scaled_near(b, value, order))  # it is read up to 2
        series = chebyshev(b, b.sub(b.mul(value, value), 2), (t.K0_SMALL, t.K1_SMALL)[order])
        product = b.mul(_log_of_half(b, value), first)
        near = b.add(product, b.div(series, value)) if order else b.sub(series, product)
        far = chebyshev(b, b.sub(b.div(b.const(8, to), value), 2), (t.K0_LARGE, t.K1_LARGE)[order])
        if scaled:
            near = b.mul(near, b.apply("exp", value))
        else:
            far = b.mul(b.apply("exp", b.apply("neg", value)), far)
        found = b.where(b.compare("le", value, 2), near, b.div(far, b.apply("sqrt", value)))
        return _at_zero(b, value, found, math.inf)

    return rule


def _log_of_half(b: Builder, x: Val) -> Val:
    """log(x / 2), also where the half is too small a number."""
    is_tiny = b.compare("lt", x, 1e-30)
    whole = b.apply("log", b.where(is_tiny, x, b.mul(x, 0.5)))
    return b.where(is_tiny, b.sub(whole, math.log(2)), whole)


def _at_zero(b: Builder, x: Val, found: Val, infinity: float) -> Val:
    """A function with a pole at 0 that is NaN below."""
    found = b.select(b.compare("lt", x, 0), math.nan, found, x.dtype)
    return b.select(b.compare("eq", x, 0), infinity, found, x.dtype)


# ---- functions of the first and second kind ----------------------------------------------------------------

_WAVES = (
    (math.pi / 4, t.J0_PP, t.J0_PQ, t.J0_QP, t.J0_QQ),
    (3 * math.pi / 4, t.J1_PP, t.J1_PQ, t.J1_QP, t.J1_QQ),
)


def _sine_and_cosine(b: Builder, angle: Val, is_read: Val) -> tuple[Val, Val]:
    """Both of an angle, correct where they are read.

    Of one and the same angle gcc calculates them in one call, and that call has no vector form.
    """
    return b.apply("sin", b.select(is_read, angle, 0, angle.dtype)), b.apply("cos", angle)


def _wave(b: Builder, x: Val, order: int, second: bool) -> Val:
    """Beyond 5: a damped cosine, for the second kind a sine."""
    turn, pp, pq, qp, qq = _WAVES[order]
    inverse = b.div(b.const(5, x.dtype), x)
    square = b.mul(inverse, inverse)
    angle = b.sub(x, turn)
    sin, cos = _sine_and_cosine(b, angle, b.apply("not", b.compare("le", x, 5)))  # NaN stays NaN
    even = b.mul(ratio(b, square, pp, pq), sin if second else cos)
    odd = b.mul(b.mul(inverse, ratio(b, square, qp, qq)), cos if second else sin)
    damping = b.apply("sqrt", x)
    return b.div(b.mul(b.add(even, odd) if second else b.sub(even, odd), math.sqrt(2 / math.pi)), damping)


def _first_near(b: Builder, x: Val, order: int) -> Val:
    """J0 and J1 up to 5: their first two zeros are factors."""
    square = b.mul(x, x)
    zeros = ((5.78318596294678452118, 30.4712623436620863991), (14.6819706421238932572, 49.2184563216946036703))[order]
    series = ratio(b, square, (t.J0_RP, t.J1_RP)[order], (t.J0_RQ, t.J1_RQ)[order])
    value = b.mul(series, x) if order else series
    for zero in zeros:
        value = b.mul(value, b.sub(square, zero))
    return value


def _first_kind(order: int) -> Scalar:
    def rule(b: Builder, to: str, x: Operand) -> Val:
        value = b.cast(x, to)
        size = b.apply("abs", value)
        far = _wave(b, size, order, second=False)
        far = b.where(b.compare("lt", value, 0), b.apply("neg", far), far) if order else far
        return b.where(b.compare("le", size, 5), _first_near(b, value, order), far)

    return rule


def _second_kind(order: int) -> Scalar:
    def rule(b: Builder, to: str, x: Operand) -> Val:
        value = b.cast(x, to)
        series = ratio(b, b.mul(value, value), (t.Y0_YP, t.Y1_YP)[order], (t.Y0_YQ, t.Y1_YQ)[order])
        product = b.mul(b.apply("log", value), _first_near(b, value, order))
        if order:
            series, product = b.mul(value, series), b.sub(product, b.apply("reciprocal", value))
        near = b.add(series, b.mul(product, 2 / math.pi))
        found = b.where(b.compare("le", value, 5), near, _wave(b, value, order, second=True))
        return _at_zero(b, value, found, -math.inf)

    return rule


def _spherical_j0(b: Builder, to: str, x: Operand) -> Val:
    value = b.cast(x, to)
    factors = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(6, -1, -1))
    near = polynomial(b, b.mul(value, value), factors)
    far = b.div(b.apply("sin", value), value)
    found = b.where(b.compare("lt", b.apply("abs", value), 0.5), near, far)
    return b.select(b.apply("isinf", value), 0, found, to)


# ---- the Airy function -------------------------------------------------------------------------------------

_INNER = 2.09  # ATen's bound of the power series
_ZERO = 103.892  # beyond it ATen gives 0
_PER_ROOT_PI = 5.64189583547756286948e-01  # 1 / sqrt(pi)


def _airy(b: Builder, to: str, x: Operand) -> Val:
    """Ai(x) in three pieces. Between the bounds ATen adds terms until they are small: here all fourteen, by Horner."""
    value = b.cast(x, to)
    size = b.apply("abs", value)
    root = b.apply("sqrt", size)
    zeta = b.div(b.mul(b.mul(size, 2), root), 3)
    inverse, fourth = b.apply("reciprocal", zeta), b.apply("sqrt", root)
    decay = b.mul(b.mul(fourth, 2), b.apply("exp", zeta))
    above = b.div(b.mul(ratio(b, inverse, t.AIRY_N, t.AIRY_D), _PER_ROOT_PI), decay)
    square, angle = b.mul(inverse, inverse), b.add(zeta, math.pi / 4)
    even = b.add(b.mul(square, ratio(b, square, t.AIRY_FN, t.AIRY_FD)), 1)
    odd = b.mul(inverse, ratio(b, square, t.AIRY_GN, t.AIRY_GD))
    is_below = b.compare("lt", value, -_INNER)
    sine, cosine = _sine_and_cosine(b, angle, is_below)
    wave = b.sub(b.mul(sine, even), b.mul(cosine, odd))
    below = b.mul(b.div(b.const(_PER_ROOT_PI, to), fourth), wave)
    cube = b.mul(b.mul(value, value), value)
    first = b.mul(polynomial(b, cube, t.AIRY_F), 0.355028053887817239260)
    second = b.mul(b.mul(value, polynomial(b, cube, t.AIRY_G)), 0.258819403792806798405)
    found = b.where(b.compare("ge", value, _INNER), above, b.sub(first, second))
    found = b.where(is_below, below, found)
    found = b.select(b.compare("gt", value, _ZERO), 0, found, to)
    return b.select(b.apply("isinf", value), math.nan, found, to)


# ---- the table ---------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Scalar] = {
    "i0": _modified_first(0, scaled=False),
    "special_i0e": _modified_first(0, scaled=True),
    "special_i1": _modified_first(1, scaled=False),
    "special_i1e": _modified_first(1, scaled=True),
    "special_modified_bessel_i0": _modified_first(0, scaled=False),
    "special_modified_bessel_i1": _modified_first(1, scaled=False),
    "special_modified_bessel_k0": _modified_second(0, scaled=False),
    "special_modified_bessel_k1": _modified_second(1, scaled=False),
    "special_scaled_modified_bessel_k0": _modified_second(0, scaled=True),
    "special_scaled_modified_bessel_k1": _modified_second(1, scaled=True),
    "special_bessel_j0": _first_kind(0),
    "special_bessel_j1": _first_kind(1),
    "special_bessel_y0": _second_kind(0),
    "special_bessel_y1": _second_kind(1),
    "special_spherical_bessel_j0": _spherical_j0,
    "special_airy_ai": _airy,
}

BESSEL_RULES: dict[str, Rule] = {f"aten.{name}.default": Pointwise(function) for name, function in _FUNCTIONS.items()}
