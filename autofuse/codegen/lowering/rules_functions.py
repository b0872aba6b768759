"""Lowering rules of functions of one and two numbers beyond arithmetic: quotients, logarithms, special functions.

In: operand values. Out: the result's value, in the compute dtype of the result. Guarantee: as in `rules_pointwise`:
each row is aten's own formula, NaN, Inf and signed zeros included.
"""

from __future__ import annotations

import math

from autofuse.codegen.dtypes import dtype, is_float
from autofuse.codegen.lowering.builder import Builder, Number, Operand, Val
from autofuse.codegen.lowering.context import Rule
from autofuse.codegen.lowering.rules_base import Pointwise, Scalar
from autofuse.errors import LoweringError


def _unary(op: str) -> Scalar:
    """A function of floats: integers are converted to the floating dtype of the result first."""
    return lambda b, to, x: b.apply(op, b.cast(x, to))


def _binary(op: str) -> Scalar:
    return lambda b, to, x, y: b.apply(op, b.cast(x, to), b.cast(y, to))


# ---- quotients and remainders -------------------------------------------------------------------------


def _remainder(op: str) -> Scalar:
    def rule(b: Builder, to: str, x: Operand, y: Operand) -> Val:
        if not is_float(to) and (isinstance(y, Val) or int(y) == 0):
            raise LoweringError("division", f"expected a non-zero number as the divisor of {op}, found {y}")
        return b.apply(op, b.cast(x, to), b.cast(y, to))

    return rule


def divided(
    b: Builder, to: str, x: Operand, y: Operand, rounding_mode: str | None = None, inverse: Val | None = None
) -> Val:
    """A quotient, rounded towards zero or minus infinity; ``inverse``: 1 / y, by which to multiply instead."""
    if rounding_mode is None:
        return _over(b, b.cast(x, to), y, inverse)
    if not is_float(to):
        raise LoweringError("division", f"expected floats for a {rounding_mode} quotient, found {to}")
    left, right = b.cast(x, to), b.cast(y, to)
    if rounding_mode == "trunc":
        return b.apply("trunc", _over(b, left, right, inverse))
    return _floored(b, to, left, right, inverse)


def _floor_divide(b: Builder, to: str, x: Operand, y: Operand) -> Val:
    return divided(b, to, x, y, "floor")


def _over(b: Builder, x: Val, y: Operand, inverse: Val | None) -> Val:
    return b.div(x, y) if inverse is None else b.mul(x, inverse)


def _floored(b: Builder, to: str, x: Val, y: Val, inverse: Val | None) -> Val:
    """c10's generic_math.h: div_floor_floating. From the remainder, since the rounded quotient may be one too large."""
    rest, zero = b.apply("fmod", x, y), b.const(0, to)
    exact = _over(b, b.sub(x, rest), y, inverse)
    differs = b.apply("xor", b.compare("lt", y, 0), b.compare("lt", rest, 0))
    below = b.where(b.apply("and", b.compare("ne", rest, 0), differs), b.sub(exact, 1), exact)
    floor = b.apply("floor", below)
    floor = b.where(b.compare("gt", b.sub(below, floor), 0.5), b.add(floor, 1), floor)
    plain = _over(b, x, y, inverse)
    found = b.where(b.compare("ne", below, 0), floor, b.apply("copysign", zero, plain))
    return b.where(b.compare("eq", y, 0), plain, found)


def _nextafter(b: Builder, to: str, x: Operand, y: Operand) -> Val:
    if dtype(to).nbytes == 2:  # calculated in 32 bits, the next number rounds back to x
        raise LoweringError("round", f"expected neighbours of float32 or float64, found {to}")
    return b.apply("nextafter", b.cast(x, to), b.cast(y, to))


def _frac(b: Builder, to: str, x: Val) -> Val:
    return b.sub(x, b.apply("trunc", x)) if is_float(to) else b.const(0, to)


_MOST_DECIMALS = 300  # ten to more overflows


def _round_decimals(b: Builder, to: str, x: Val, decimals: int = 0) -> Val:
    """ATen's UnaryOpsKernel.cpp: round_decimals_kernel. In 16 bits aten rounds at each step."""
    if not is_float(to) or dtype(to).nbytes == 2 or abs(decimals) > _MOST_DECIMALS:
        raise LoweringError("round", f"expected float32 or float64 and at most 300 digits, found {to} and {decimals}")
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return b.mul(b.apply("round", b.div(x, scale)), scale)
    return b.div(b.apply("round", b.mul(x, scale)), scale)


# ---- larger, smaller, and tests -----------------------------------------------------------------------


def _extreme_number(op: str) -> Scalar:
    """The larger or smaller operand; NaN only where both are."""

    def rule(b: Builder, to: str, x: Operand, y: Operand) -> Val:
        left, right = b.cast(x, to), b.cast(y, to)
        found = b.apply(op, left, right)
        if not is_float(to):
            return found
        return b.where(b.apply("isnan", left), right, b.where(b.apply("isnan", right), left, found))

    return rule


def _is_infinity(infinity: float) -> Scalar:
    return lambda b, to, x: b.compare("eq", x, infinity) if is_float(x.dtype) else b.const(False, "bool")


def _signbit(b: Builder, to: str, x: Val) -> Val:
    if x.dtype == "bool":
        return b.const(False, "bool")
    return b.compare("lt", b.apply("copysign", b.const(1, x.dtype), x) if is_float(x.dtype) else x, 0)


def _copysign(b: Builder, to: str, x: Operand, sign: Operand) -> Val:
    # A number's sign only: Triton makes a constant -0.0 a 0.
    known = math.copysign(1.0, sign) if isinstance(sign, bool | int | float) else sign
    return b.apply("copysign", b.cast(x, to), b.cast(known, to))


def _heaviside(b: Builder, to: str, x: Val, at_zero: Operand) -> Val:
    above = b.cast(b.compare("gt", b.cast(x, to), 0), to)
    return b.where(b.compare("eq", b.cast(x, to), 0), b.cast(at_zero, to), above)


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
            "float64": 1.7976931348623157e308}  # fmt: skip


def _nan_to_num(
    b: Builder, to: str, x: Val, nan: Number | None = None, high: Number | None = None, low: Number | None = None,
    **kw: Number | None,
) -> Val:  # fmt: skip
    if not is_float(to):
        return x
    high, low = kw.get("posinf", high), kw.get("neginf", low)
    finite = b.select(b.compare("eq", x, math.inf), _LARGEST[to] if high is None else high, x, to)
    finite = b.select(b.compare("eq", x, -math.inf), -_LARGEST[to] if low is None else low, finite, to)
    return b.select(b.apply("isnan", x), kw.get("nan", nan) or 0, finite, to)


def angle(b: Builder, to: str, x: Val) -> Val:
    """Of a real number: 0 or pi; NaN stays NaN."""
    value = b.cast(x, to)
    turned = b.select(b.compare("lt", value, 0), math.pi, 0, to)
    return b.where(b.apply("isnan", value), value, turned)


# ---- logarithms and powers ------------------------------------------------------------------------------


def _logaddexp(exp: str, unit: float) -> Scalar:
    """ATen's BinaryOpsKernel.cpp: logaddexp_kernel and logaddexp2_kernel. Equal infinities give themselves."""

    def rule(b: Builder, to: str, x: Operand, y: Operand) -> Val:
        left, right = b.cast(x, to), b.cast(y, to)
        top = b.where(b.compare("lt", left, right), right, left)
        apart = b.apply("neg", b.apply("abs", b.sub(left, right)))
        found = b.add(top, _times(b, b.apply("log1p", b.apply(exp, apart)), unit))
        same = b.apply("and", b.apply("isinf", left), b.apply("eq", left, right))
        return b.where(same, left, found)

    return rule


def _times(b: Builder, x: Val, factor: float) -> Val:
    return x if factor == 1 else b.mul(x, factor)


def _scaled_by(factor: float) -> Scalar:
    return lambda b, to, x: b.mul(b.cast(x, to), factor)


def _ldexp(b: Builder, to: str, x: Val, exponent: Val) -> Val:
    """The formula of floating exponents; by integers eager scales exactly, beyond what a power of 2 can hold."""
    if exponent.dtype != to or dtype(to).nbytes == 2:
        raise LoweringError("pow", f"expected an exponent of the dtype of the result, {to}, found {exponent.dtype}")
    return b.mul(b.cast(x, to), b.apply("pow", b.const(2, to), b.cast(exponent, to)))


def _xlogy(log: str) -> Scalar:
    """ATen's BinaryOpsKernel.cpp: xlogy_kernel, xlog1py_kernel. 0 for x = 0, whatever log(y) is; NaN where y is NaN."""

    def rule(b: Builder, to: str, left: Operand, right: Operand) -> Val:
        x, y = b.cast(left, to), b.cast(right, to)
        product = b.where(b.compare("eq", x, 0), b.const(0, to), b.mul(x, b.apply(log, y)))
        return b.where(b.apply("isnan", y), b.const(math.nan, to), product)

    return rule


def _entr(b: Builder, to: str, x: Val) -> Val:
    """ATen's UnaryOpsKernel.cpp: entr_kernel."""
    value = b.cast(x, to)
    positive = b.mul(b.apply("neg", value), b.apply("log", value))
    other = b.select(b.compare("eq", value, 0), 0, -math.inf, to)
    found = b.where(b.compare("gt", value, 0), positive, other)
    return b.where(b.apply("isnan", value), value, found)


def _logit(b: Builder, to: str, x: Val, eps: Number | None = None) -> Val:
    value, one = b.cast(x, to), b.const(1, to)
    if eps is not None and eps >= 0:
        low, high = b.const(eps, to), b.sub(one, b.const(eps, to))
        value = b.where(b.compare("lt", value, eps), low, b.where(b.apply("gt", value, high), high, value))
    return b.apply("log", b.div(value, b.sub(one, value)))


def _logit_backward(b: Builder, to: str, grad: Val, x: Val, eps: Number | None = None) -> Val:
    """ATen's BinaryOpsKernel.cpp: logit_backward_kernel. 0 beyond the bounds, NaN where there are none."""
    g, value, one = b.cast(grad, to), b.cast(x, to), b.const(1, to)
    bounded = eps is not None and not eps < 0  # aten's own test, which NaN passes
    low = b.const(eps if bounded else 0, to)  # type: ignore[arg-type]
    high = b.sub(one, low)
    inner = b.div(g, b.mul(value, b.sub(one, value)))
    inside = b.apply("and", b.apply("ge", value, low), b.apply("le", value, high))
    return b.where(inside, inner, b.const(0 if bounded else math.nan, to))


def _sinc(b: Builder, to: str, x: Val) -> Val:
    value = b.cast(x, to)
    turned = b.mul(value, math.pi)
    return b.select(b.compare("eq", value, 0), 1, b.div(b.apply("sin", turned), turned), to)


# ---- the table ------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Scalar] = {
    **{f"{op}.default": _unary(op) for op in ("asinh", "acosh", "atanh", "lgamma")},
    "hypot.default": _binary("hypot"),
    "nextafter.default": _nextafter,
    "copysign.Tensor": _copysign,
    "copysign.Scalar": _copysign,
    "fmod.Scalar": _remainder("fmod"),
    "fmod.Tensor": _remainder("fmod"),
    "remainder.Scalar": _remainder("remainder"),
    "remainder.Tensor": _remainder("remainder"),
    "remainder.Scalar_Tensor": _remainder("remainder"),
    "div.Tensor_mode": divided,
    "div.Scalar_mode": divided,
    "floor_divide.default": _floor_divide,
    "floor_divide.Scalar": _floor_divide,
    "frac.default": _frac,
    "round.decimals": _round_decimals,
    "fmax.default": _extreme_number("maximum"),
    "fmin.default": _extreme_number("minimum"),
    "isposinf.default": _is_infinity(math.inf),
    "isneginf.default": _is_infinity(-math.inf),
    "signbit.default": _signbit,
    "heaviside.default": _heaviside,
    "nan_to_num.default": _nan_to_num,
    "angle.default": angle,
    "logaddexp.default": _logaddexp("exp", 1),
    "logaddexp2.default": _logaddexp("exp2", 1 / math.log(2)),
    "deg2rad.default": _scaled_by(math.pi / 180),
    "rad2deg.default": _scaled_by(180 / math.pi),
    "ldexp.Tensor": _ldexp,
    "xlogy.Tensor": _xlogy("log"),
    "xlogy.Scalar_Self": _xlogy("log"),
    "xlogy.Scalar_Other": _xlogy("log"),
    "special_xlog1py.default": _xlogy("log1p"),
    "special_xlog1py.self_scalar": _xlogy("log1p"),
    "special_xlog1py.other_scalar": _xlogy("log1p"),
    "special_entr.default": _entr,
    "logit.default": _logit,
    "logit_backward.default": _logit_backward,
    "sinc.default": _sinc,
}

FUNCTION_RULES: dict[str, Rule] = {f"aten.{name}": Pointwise(function) for name, function in _FUNCTIONS.items()}
