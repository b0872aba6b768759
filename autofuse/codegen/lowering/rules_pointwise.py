"""Lowering rules of pointwise operators: each row is aten's own formula in scalar ops.

In: operand values. Out: the result's value, in the compute dtype of the result.
Guarantee: NaN, Inf and signed comparisons behave as aten's CPU kernels do; bool addition is ``or``, bool
multiplication ``and``; numbers are rounded to the compute dtype first, as aten's kernels take them.
"""

from __future__ import annotations

from typing import Any

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Builder, Number, Operand, Val
from autofuse.codegen.lowering.context import Rule
from autofuse.codegen.lowering.rules_base import Comparison, Pointwise, Scalar
from autofuse.errors import LoweringError

# ---- shapes of rules ------------------------------------------------------------------------------


def _float_unary(op: str) -> Scalar:
    """A function of floats: integers are converted to the floating dtype of the result first."""
    return lambda b, to, x: b.apply(op, b.cast(x, to))


def _rounding(op: str) -> Scalar:
    """A rounding function: integers stay as they are."""
    return lambda b, to, x: b.apply(op, b.cast(x, to)) if is_float(to) else x


def _logical(op: str) -> Scalar:
    return lambda b, to, x, y: b.apply(op, b.cast(x, "bool"), b.cast(y, "bool"))


def _bitwise(op: str, on_bool: str) -> Scalar:
    def rule(b: Builder, to: str, x: Operand, y: Operand) -> Val:
        return b.apply(on_bool if to == "bool" else op, b.cast(x, to), b.cast(y, to))

    return rule


def _class_test(op: str) -> Scalar:
    return lambda b, to, x: b.apply(op, x) if is_float(x.dtype) else b.const(False, "bool")


# ---- arithmetic -----------------------------------------------------------------------------------


def scaled(b: Builder, to: str, x: Operand, alpha: Number) -> Val:
    value = b.cast(x, to)
    return value if alpha == 1 else b.mul(value, alpha)


def _add(b: Builder, to: str, x: Operand, y: Operand, alpha: Number = 1) -> Val:
    if to == "bool":
        return b.apply("or", b.cast(x, to), b.cast(y, to))
    return b.add(b.cast(x, to), scaled(b, to, y, alpha))


def _sub(b: Builder, to: str, x: Operand, y: Operand, alpha: Number = 1) -> Val:
    return b.sub(b.cast(x, to), scaled(b, to, y, alpha))


def _rsub(b: Builder, to: str, x: Operand, y: Operand, alpha: Number = 1) -> Val:
    return b.sub(b.cast(y, to), scaled(b, to, x, alpha))


def _mul(b: Builder, to: str, x: Operand, y: Operand) -> Val:
    return b.apply("and" if to == "bool" else "mul", b.cast(x, to), b.cast(y, to))


def _div(b: Builder, to: str, x: Operand, y: Operand) -> Val:
    return b.div(b.cast(x, to), y)


def _abs(b: Builder, to: str, x: Val) -> Val:
    return x if to in ("uint8", "bool") else b.apply("abs", x)


def _square(b: Builder, to: str, x: Val) -> Val:
    return _mul(b, to, x, x)


def _extreme(op: str) -> Scalar:
    return lambda b, to, x, y: b.apply(op, b.cast(x, to), b.cast(y, to))


def clamp(b: Builder, to: str, x: Operand, low: Operand | None = None, high: Operand | None = None, **kw: Any) -> Val:
    low, high = kw.get("min", low), kw.get("max", high)
    value = b.cast(x, to)
    if low is not None:
        value = b.apply("maximum", value, b.cast(low, to))
    return value if high is None else b.apply("minimum", value, b.cast(high, to))


def _clamp_max(b: Builder, to: str, x: Operand, high: Operand) -> Val:
    return clamp(b, to, x, None, high)


def _pow_scalar(b: Builder, to: str, x: Operand, exponent: Number) -> Val:
    """aten's own special exponents (`pow_tensor_scalar_optimized_kernel`)."""
    value = b.cast(x, to)
    if exponent == 0:
        return b.const(1, to)
    if exponent == 1:
        return value
    if exponent in (2, 3):
        square = _mul(b, to, value, value)
        return square if exponent == 2 else _mul(b, to, square, value)
    if not is_float(to):
        if not isinstance(exponent, int) or exponent < 0:
            raise LoweringError("pow", f"expected a non-negative integer power of integers, found {exponent}")
        return b.apply("pow", value, b.cast(exponent, to))
    special = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if special:
        return b.apply(special, value)
    if exponent == -2:
        return b.apply("reciprocal", b.mul(value, value))
    return b.apply("pow", value, b.cast(exponent, to))


def _pow(b: Builder, to: str, x: Operand, exponent: Operand) -> Val:
    if not is_float(to):
        raise LoweringError("pow", "expected a constant power of integers, found a tensor")
    return b.apply("pow", b.cast(x, to), b.cast(exponent, to))


def _sign(b: Builder, x: Val) -> Val:
    return x if x.dtype == "bool" else b.apply("sign", x)


def _addcmul(b: Builder, to: str, x: Val, y: Val, z: Val, value: Number = 1) -> Val:
    product = b.mul(scaled(b, to, y, value), b.cast(z, to))
    return b.add(b.cast(x, to), product)


def _addcdiv(b: Builder, to: str, x: Val, y: Val, z: Val, value: Number = 1) -> Val:
    return b.add(b.cast(x, to), b.div(scaled(b, to, y, value), b.cast(z, to)))


def _lerp(b: Builder, to: str, start: Val, end: Val, weight: Operand) -> Val:
    """The form that is exact at both ends: from the start for weights below 0.5 in size, from the end for others."""
    x, y, w = b.cast(start, to), b.cast(end, to), b.cast(weight, to)
    delta = b.sub(y, x)
    from_start = b.add(x, b.mul(w, delta))
    from_end = b.sub(y, b.mul(delta, b.sub(b.const(1, to), w)))
    return b.where(b.compare("lt", b.apply("abs", w), 0.5), from_start, from_end)


# ---- selection and copies ---------------------------------------------------------------------------


def _where(b: Builder, to: str, condition: Val, yes: Operand, no: Operand) -> Val:
    return b.select(b.cast(condition, "bool"), yes, no, to)


def _masked_fill(b: Builder, to: str, x: Val, mask: Val, value: Operand) -> Val:
    return b.select(b.cast(mask, "bool"), value, x, to)


def _to_copy(b: Builder, to: str, x: Val, *args: Any, **kwargs: Any) -> Val:
    # An explicit cast to 16 bits rounds here as eager does; implicit ones only round where a node ends.
    return b.round_to(b.cast(x, to), to)


def _copy(b: Builder, to: str, x: Val, source: Operand, *args: Any) -> Val:
    return b.round_to(b.cast(source, to), to)


def _clone(b: Builder, to: str, x: Val, **kwargs: Any) -> Val:
    return x


def sigmoid(b: Builder, to: str, x: Operand) -> Val:
    return b.apply("reciprocal", b.add(b.apply("exp", b.apply("neg", b.cast(x, to))), 1))


def _dropout_scale(b: Builder, to: str, x: Val, mask: Val, scale: Operand) -> Val:
    return b.mul(b.mul(b.cast(x, to), b.cast(mask, to)), scale)


# ---- the table ------------------------------------------------------------------------------------------

_FLOAT_UNARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asin",
    "acos", "atan", "erf", "erfc", "sqrt", "rsqrt", "reciprocal",
)  # fmt: skip

_FUNCTIONS: dict[str, Scalar] = {
    **{f"{op}.default": _float_unary(op) for op in _FLOAT_UNARY},
    **{f"{op}.default": _rounding(op) for op in ("floor", "ceil", "round", "trunc")},
    "add.Tensor": _add, "add.Scalar": _add, "sub.Tensor": _sub, "sub.Scalar": _sub,
    "rsub.Tensor": _rsub, "rsub.Scalar": _rsub, "mul.Tensor": _mul, "mul.Scalar": _mul,
    "div.Tensor": _div, "div.Scalar": _div,
    "neg.default": lambda b, to, x: b.apply("neg", x), "abs.default": _abs, "square.default": _square,
    "sign.default": lambda b, to, x: _sign(b, x), "sgn.default": lambda b, to, x: _sign(b, x),
    "maximum.default": _extreme("maximum"), "minimum.default": _extreme("minimum"),
    "clamp.default": clamp, "clamp.Tensor": clamp, "clamp_min.default": clamp, "clamp_min.Tensor": clamp,
    "clamp_max.default": _clamp_max, "clamp_max.Tensor": _clamp_max, "sigmoid.default": sigmoid,
    "pow.Tensor_Scalar": _pow_scalar, "pow.Tensor_Tensor": _pow, "pow.Scalar": _pow,
    "atan2.default": lambda b, to, y, x: b.apply("atan2", b.cast(y, to), b.cast(x, to)),
    "where.self": _where, "where.ScalarSelf": _where, "where.ScalarOther": _where, "where.Scalar": _where,
    "masked_fill.Scalar": _masked_fill, "masked_fill.Tensor": _masked_fill,
    "isnan.default": _class_test("isnan"), "isinf.default": _class_test("isinf"),
    "logical_and.default": _logical("and"), "logical_or.default": _logical("or"),
    "logical_xor.default": _logical("xor"),
    "logical_not.default": lambda b, to, x: b.apply("not", b.cast(x, "bool")),
    "bitwise_and.Tensor": _bitwise("bitand", "and"), "bitwise_and.Scalar": _bitwise("bitand", "and"),
    "bitwise_or.Tensor": _bitwise("bitor", "or"), "bitwise_or.Scalar": _bitwise("bitor", "or"),
    "bitwise_xor.Tensor": _bitwise("bitxor", "xor"), "bitwise_xor.Scalar": _bitwise("bitxor", "xor"),
    "bitwise_not.default": lambda b, to, x: b.apply("not" if to == "bool" else "bitnot", x),
    "_to_copy.default": _to_copy, "clone.default": _clone, "copy.default": _copy,
    "addcmul.default": _addcmul, "addcdiv.default": _addcdiv, "lerp.Scalar": _lerp, "lerp.Tensor": _lerp,
    "native_dropout_backward.default": _dropout_scale,
}  # fmt: skip

_COMPARISONS = {
    f"{op}.{kind}": Comparison(op) for op in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Scalar", "Tensor")
}

# Copies are not worth a place in a kernel's name.
_QUIET = frozenset({"_to_copy.default", "clone.default", "copy.default"})

POINTWISE_RULES: dict[str, Rule] = {
    **{f"aten.{name}": Pointwise(function, name not in _QUIET) for name, function in _FUNCTIONS.items()},
    **{f"aten.{name}": rule for name, rule in _COMPARISONS.items()},
    "autofuse.dropout_scale.default": Pointwise(_dropout_scale),
}

__all__ = ["POINTWISE_RULES"]
