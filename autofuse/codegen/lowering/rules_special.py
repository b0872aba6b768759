"""Lowering rules of special functions: those of the gamma and zeta family, of the error function, and frexp.

In: operand values. Out: the result's value, in the compute dtype of the result. Each rule is the approximation of
ATen's Math.h, written without branches: all pieces are calculated and one is selected, and loops have a fixed number
of steps. So NaN and Inf come out where ATen has them. Integers are converted to the floating dtype of the result first.
"""

from __future__ import annotations

import math

from autofuse.codegen.dtypes import compute_dtype
from autofuse.codegen.lowering import special_tables as t
from autofuse.codegen.lowering.builder import Builder, Operand, Val
from autofuse.codegen.lowering.context import Rule
from autofuse.codegen.lowering.rules_base import Pointwise, Scalar
from autofuse.codegen.lowering.series import chebyshev, polynomial, ratio, whole_power
from autofuse.errors import LoweringError

_MOST_ORDERS = 10  # of polygamma: beyond, ATen's sum loses more to cancellation than 16 bits can hold
_MOST_GAMMAS = 16  # that a multivariate one is made of


def _is_whole(b: Builder, x: Val) -> Val:
    return b.apply("eq", x, b.apply("floor", x))


# ---- derivatives of the logarithm of gamma -----------------------------------------------------------------

_DIGAMMA = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)


def _digamma(b: Builder, to: str, x: Operand) -> Val:
    """Math.h: calc_digamma. Moved to 10 or more by steps of 1; numbers below 0 are reflected."""
    value = b.cast(x, to)
    below = b.compare("lt", value, 0)
    place = b.where(below, b.sub(b.const(1, to), value), value)
    steps = b.const(0, to)
    for _ in range(10):
        is_low = b.compare("lt", place, 10)
        steps = b.where(is_low, b.sub(steps, b.apply("reciprocal", place)), steps)
        place = b.where(is_low, b.add(place, 1), place)
    square = b.apply("reciprocal", b.mul(place, place))
    found = b.sub(b.add(steps, b.apply("log", place)), b.div(b.const(0.5, to), place))
    found = b.sub(found, b.mul(square, polynomial(b, square, _DIGAMMA)))
    # ATen takes the tangent in float64. The rest from the nearest integer makes float32 as accurate near poles.
    nearest = b.apply("round" if value.dtype == "float32" else "trunc", value)
    turned = b.apply("tan", b.mul(b.sub(value, nearest), math.pi))
    found = b.where(below, b.sub(found, b.div(b.const(math.pi, to), turned)), found)
    found = b.select(b.apply("and", below, _is_whole(b, value)), math.nan, found, to)
    pole = b.apply("copysign", b.const(math.inf, to), b.apply("neg", value))
    return b.where(b.compare("eq", value, 0), pole, found)


def _trigamma(b: Builder, to: str, x: Operand) -> Val:
    """Math.h: trigamma. Moved by six steps of 1; numbers below a half are reflected."""
    value = b.cast(x, to)
    below = b.compare("lt", value, 0.5)
    place = b.where(below, b.sub(b.const(1, to), value), value)
    total = b.const(0, to)
    for _ in range(6):
        total = b.add(total, b.apply("reciprocal", b.mul(place, place)))
        place = b.add(place, 1)
    square = b.apply("reciprocal", b.mul(place, place))
    tail = b.mul(square, polynomial(b, square, (1 / 42, -1 / 30, 1 / 6)))
    tail = b.add(b.add(b.div(b.const(0.5, to), place), 1), tail)
    total = b.add(total, b.div(tail, place))
    sine = b.apply("sin", b.mul(value, math.pi))
    reflected = b.sub(b.div(b.const(math.pi**2, to), b.mul(sine, sine)), total)
    return b.where(below, reflected, total)


def _polygamma(b: Builder, to: str, order: int, x: Operand) -> Val:
    """Math.h: calc_polygamma. ATen takes orders of 2 and more from zeta, in float64 on a CPU."""
    if order == 0:
        return _digamma(b, to, x)
    if order == 1:
        return _trigamma(b, to, x)
    if not 0 <= order <= _MOST_ORDERS:
        raise LoweringError("constant", f"expected a polygamma of order 0 to {_MOST_ORDERS}, found {order}")
    found = _zeta_of_order(b, b.cast(x, "float64"), order + 1)
    return b.cast(b.mul(found, (-1) ** (order + 1) * math.factorial(order)), to)


def _zeta_of_order(b: Builder, q: Val, order: int) -> Val:
    """zeta(order, q). ATen's sum goes from q on; below 0 it is the sum over all integers without those below q.

    sum over all k of (q + k)^-s = (-pi)^s / (s - 1)! times the derivative s - 1 of the cotangent at pi q.
    """
    below = b.compare("lt", q, 0)
    place = b.where(below, b.sub(b.const(1, q.dtype), q), q)
    term = total = whole_power(b, b.apply("reciprocal", place), order)
    for k in range(1, 10):
        term = whole_power(b, b.apply("reciprocal", b.add(place, k)), order)
        total = b.add(total, term)
    found = _euler_maclaurin(b, b.const(order, q.dtype), b.add(place, 9), total, term)
    rest = b.sub(q, b.apply("round", q))
    from_half = b.sub(b.const(0.5, q.dtype), b.apply("abs", rest))  # its sine is 0 there, where a cosine would not be
    cosine, sine = (b.apply("sin", b.mul(part, math.pi)) for part in (from_half, rest))
    cotangent = b.div(cosine, sine)
    scale = (-1) ** (order - 1) * math.pi**order / math.factorial(order - 1)
    everywhere = b.mul(polynomial(b, cotangent, _cotangent_derivative(order - 1)), scale)
    reflected = b.sub(everywhere, found) if order % 2 == 0 else b.add(everywhere, found)
    found = b.where(below, reflected, found)
    return b.select(b.apply("and", b.compare("le", q, 0), _is_whole(b, q)), math.inf, found, q.dtype)


def _cotangent_derivative(order: int) -> tuple[float, ...]:
    """The derivative of a cotangent as a polynomial of it, the highest power first: c' = -(1 + c^2)."""
    powers = [0, 1]  # the lowest first
    for _ in range(order):
        slopes = [n * powers[n] for n in range(1, len(powers))]
        powers = [-(low + high) for low, high in zip([*slopes, 0, 0], [0, 0, *slopes], strict=True)]
    return tuple(map(float, reversed(powers)))


# ---- zeta ----------------------------------------------------------------------------------------------------

# (2 k)! / B(2 k), with ATen's rounding
_ZETA = (
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10, -2.950130727918164224e12,
    1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17, -7.1661652561756670113e18,
)  # fmt: skip
_ZETA_UNIT = 1.11022302462515654042e-16  # of the sum: what ATen leaves out


def _euler_maclaurin(b: Builder, x: Val, place: Val, total: Val, power: Val) -> Val:
    """A sum of terms, the last of which is ``power`` = place^-x, with all that follow them."""
    is_small = b.apply("lt", b.apply("abs", power), b.mul(total, _ZETA_UNIT))
    found = b.add(total, b.div(b.mul(power, place), b.sub(x, 1)))
    found = b.sub(found, b.mul(power, 0.5))
    factor = b.const(1, x.dtype)
    for number, divisor in enumerate(_ZETA):
        factor = b.mul(factor, b.add(x, 2 * number))
        power = b.div(power, place)
        found = b.add(found, b.div(b.mul(factor, power), divisor))
        factor = b.mul(factor, b.add(x, 2 * number + 1))
        power = b.div(power, place)
    return b.where(is_small, total, found)


def _zeta_from(b: Builder, x: Val, q: Val, is_precise: bool) -> Val:
    """zeta(x, q) for q above 0. ATen takes nine steps there.

    Not ``is_precise``: four steps, whose powers are made of exp and log. The error is then below 1e-9 of the result.
    """
    falling, steps = b.apply("neg", x), 9 if is_precise else 4
    term = total = b.apply("pow", q, falling)
    for k in range(1, steps + 1):
        place = b.add(q, k)
        if is_precise:
            term = b.apply("pow", place, falling)
        else:
            term = b.apply("exp", b.mul(falling, b.apply("log", place)))
        total = b.add(total, term)
    return _euler_maclaurin(b, x, b.add(q, steps), total, term)


def _zeta(b: Builder, to: str, left: Operand, right: Operand) -> Val:
    """Math.h: zeta, in float64 as on a CPU. Below q = 0 ATen steps up to 9; the terms below 0 are a difference.

    For a whole x and q = -n - f with 0 < f < 1: zeta(x, q) = zeta(x, 1 - f) + (-1)^x (zeta(x, f) - zeta(x, 1 - q)).
    """
    x, q = b.cast(left, "float64"), b.cast(right, "float64")
    one = b.const(1, "float64")
    below = b.compare("lt", q, 0)
    rest = b.sub(q, b.apply("floor", q))
    is_precise = compute_dtype(to) == "float64"
    found = _zeta_from(b, x, b.where(below, rest, q), is_precise)
    under = b.sub(*(_zeta_from(b, x, b.sub(one, part), is_precise) for part in (rest, q)))
    is_odd = b.apply("not", _is_whole(b, b.mul(x, 0.5)))  # of a whole number; fmod would keep gcc from vectorising
    found = b.where(below, b.add(found, b.where(is_odd, b.apply("neg", under), under)), found)
    found = b.select(b.apply("and", below, b.apply("isinf", x)), math.inf, found, "float64")
    not_above = b.compare("le", q, 0)
    found = b.select(b.apply("and", not_above, b.apply("not", _is_whole(b, x))), math.nan, found, "float64")
    found = b.select(b.apply("and", not_above, _is_whole(b, q)), math.inf, found, "float64")
    found = b.select(b.compare("lt", x, 1), math.nan, found, "float64")
    return b.cast(b.select(b.compare("eq", x, 1), math.inf, found, "float64"), to)


def _mvlgamma(b: Builder, to: str, x: Operand, order: int) -> Val:
    """A sum of lgamma. ATen's UnaryOps.cpp: mvlgamma."""
    if not 1 <= order <= _MOST_GAMMAS:
        raise LoweringError("constant", f"expected an mvlgamma of order 1 to {_MOST_GAMMAS}, found {order}")
    value = b.cast(x, to)
    places = [b.add(value, (n - order + 1) / 2) if n != order - 1 else value for n in range(order)]
    total = b.apply("lgamma", places[0])
    for place in places[1:]:
        total = b.add(total, b.apply("lgamma", place))
    return b.add(total, order * (order - 1) / 4 * math.log(math.pi))


# ---- the error function and the normal distribution ----------------------------------------------------------


def _erfinv(b: Builder, to: str, y: Operand) -> Val:
    """y times a function of log(1 - y^2). Eager has it from a vector library, which is accurate to the last digit."""
    value, one = b.cast(y, to), b.const(1, to)
    w = b.apply("neg", b.apply("log", b.mul(b.sub(one, value), b.add(one, value))))
    root = b.apply("sqrt", w)
    factor = chebyshev(b, b.sub(b.mul(w, 0.64), 2), t.ERFINV_NEAR)
    far = chebyshev(b, b.mul(b.sub(root, 3.25), 2 / 0.75), t.ERFINV_FAR)
    if value.dtype == "float64":  # in float32 1 - y^2 is 0, or at least 1e-7
        last = chebyshev(b, b.mul(b.sub(root, 5.05), 2 / 1.05), t.ERFINV_LAST)
        far = b.where(b.compare("lt", root, 4), far, last)
    found = b.mul(value, b.where(b.compare("lt", w, 6.25), factor, far))
    return b.where(b.compare("eq", b.apply("abs", value), 1), b.mul(value, math.inf), found)


def _erfcx_above(b: Builder, x: Val) -> Val:
    """exp(x^2) erfc(x) from 0 on."""
    place = b.sub(b.const(1, x.dtype), b.div(b.const(7.5, x.dtype), b.add(x, 3.75)))
    return b.div(chebyshev(b, b.mul(place, 2), t.ERFCX), b.add(b.mul(x, 2), 1))


def _erfcx(b: Builder, to: str, x: Operand) -> Val:
    value = b.cast(x, to)
    above = _erfcx_above(b, b.apply("abs", value))
    below = b.sub(b.mul(b.apply("exp", b.mul(value, value)), 2), above)
    return b.where(b.compare("lt", value, 0), below, above)


def _log_ndtr(b: Builder, to: str, x: Operand) -> Val:
    """Math.h: calc_log_ndtr."""
    value = b.cast(x, to)
    scaled = b.mul(value, math.sqrt(0.5))
    tail = b.apply("log", b.mul(_erfcx_above(b, b.apply("neg", scaled)), 0.5))
    below = b.sub(tail, b.mul(scaled, scaled))
    above = b.apply("log1p", b.mul(b.apply("erfc", scaled), -0.5))
    return b.where(b.compare("lt", value, -1), below, above)


_EXP_MINUS_2 = 0.13533528323661269189


def _ndtri(b: Builder, to: str, x: Operand) -> Val:
    """Math.h: calc_ndtri. A rational function in the centre, another of 1 / sqrt(-2 log y) for the tails."""
    value, one = b.cast(x, to), b.const(1, to)
    is_high = b.apply("gt", value, b.sub(one, b.const(_EXP_MINUS_2, to)))
    y = b.where(is_high, b.sub(one, value), value)
    middle = b.sub(y, 0.5)
    square = b.mul(middle, middle)
    centre = b.mul(square, ratio(b, square, t.NDTRI_P0, t.NDTRI_Q0))
    centre = b.mul(b.add(middle, b.mul(middle, centre)), math.sqrt(2 * math.pi))
    depth = b.apply("sqrt", b.mul(b.apply("log", y), -2))
    inverse = b.apply("reciprocal", depth)
    far = ratio(b, inverse, t.NDTRI_P2, t.NDTRI_Q2)
    series = b.where(b.compare("lt", depth, 8), ratio(b, inverse, t.NDTRI_P1, t.NDTRI_Q1), far)
    tail = b.sub(b.sub(depth, b.div(b.apply("log", depth), depth)), b.mul(inverse, series))
    tail = b.where(is_high, tail, b.apply("neg", tail))
    found = b.where(b.compare("gt", y, _EXP_MINUS_2), centre, tail)
    outside = b.apply("or", b.compare("lt", value, 0), b.compare("gt", value, 1))
    found = b.select(outside, math.nan, found, to)
    found = b.select(b.compare("eq", value, 0), -math.inf, found, to)
    return b.select(b.compare("eq", value, 1), math.inf, found, to)


# ---- parts of a number ---------------------------------------------------------------------------------------

_LARGEST_STEPS = {"float32": 64, "float64": 512}  # powers of two; half, a quarter, ... follow


def _frexp(b: Builder, to: str, x: Val) -> tuple[Val, Val]:
    """A number in [0.5, 1) and the power of two it is multiplied by: exact, step by step. 0, Inf and NaN have none."""
    size, power = b.apply("abs", x), b.const(1, x.dtype)
    largest = _LARGEST_STEPS[x.dtype]
    steps = [largest >> n for n in range(largest.bit_length())]
    for step in (largest, largest, *steps):  # subnormal numbers are smaller than the largest ones are large
        is_low = b.compare("lt", size, 2.0 ** (1 - step))
        size = b.where(is_low, b.mul(size, 2.0**step), size)
        power = b.where(is_low, b.sub(power, step), power)
    for step in steps:
        is_high = b.compare("ge", size, 2.0**step)
        size = b.where(is_high, b.mul(size, 2.0**-step), size)
        power = b.where(is_high, b.add(power, step), power)
    plain = b.apply("or", b.compare("eq", x, 0), b.apply("or", b.apply("isinf", x), b.apply("isnan", x)))
    mantissa = b.where(plain, x, b.apply("copysign", b.mul(size, 0.5), x))
    return mantissa, b.cast(b.select(plain, 0, power, x.dtype), "int32")


# ---- the table ------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Scalar] = {
    "digamma.default": _digamma,
    "polygamma.default": _polygamma,
    "special_zeta.default": _zeta,
    "special_zeta.other_scalar": _zeta,
    "special_zeta.self_scalar": _zeta,
    "mvlgamma.default": _mvlgamma,
    "erfinv.default": _erfinv,
    "special_erfcx.default": _erfcx,
    "special_log_ndtr.default": _log_ndtr,
    "special_ndtri.default": _ndtri,
    "frexp.Tensor": _frexp,
}

SPECIAL_RULES: dict[str, Rule] = {f"aten.{name}": Pointwise(function) for name, function in _FUNCTIONS.items()}
