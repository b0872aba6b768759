"""Lowering rules of pointwise operators: each row is aten's own formula in scalar ops.

In: operand values. Out: the result's value, in the compute dtype of the result.
Guarantee: NaN, Inf and signed comparisons behave as aten's CPU kernels do; bool addition is ``or``, bool
multiplication ``and``; numbers are rounded to the compute dtype first, as aten's kernels take them.
"""

from __future__ import annotations

import math
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


def _scaled(b: Builder, to: str, x: Operand, alpha: Number) -> Val:
    value = b.cast(x, to)
    return value if alpha == 1 else b.mul(value, alpha)


def _add(b: Builder, to: str, x: Operand, y: Operand, alpha: Number = 1) -> Val:
    if to == "bool":
        return b.apply("or", b.cast(x, to), b.cast(y, to))
    return b.add(b.cast(x, to), _scaled(b, to, y, alpha))


def _sub(b: Builder, to: str, x: Operand, y: Operand, alpha: Number = 1) -> Val:
    return b.sub(b.cast(x, to), _scaled(b, to, y, alpha))


def _rsub(b: Builder, to: str, x: Operand, y: Operand, alpha: Number = 1) -> Val:
    return b.sub(b.cast(y, to), _scaled(b, to, x, alpha))


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


def _clamp(b: Builder, to: str, x: Operand, low: Operand | None = None, high: Operand | None = None, **kw: Any) -> Val:
    low, high = kw.get("min", low), kw.get("max", high)
    value = b.cast(x, to)
    if low is not None:
        value = b.apply("maximum", value, b.cast(low, to))
    return value if high is None else b.apply("minimum", value, b.cast(high, to))


def _clamp_max(b: Builder, to: str, x: Operand, high: Operand) -> Val:
    return _clamp(b, to, x, None, high)


def _remainder(op: str) -> Scalar:
    def rule(b: Builder, to: str, x: Operand, y: Operand) -> Val:
        if not is_float(to) and (isinstance(y, Val) or int(y) == 0):
            raise LoweringError("division", f"expected a non-zero number as the divisor of {op}, found {y}")
        return b.apply(op, b.cast(x, to), b.cast(y, to))

    return rule


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


def _addcmul(b: Builder, to: str, x: Val, y: Val, z: Val, value: Number = 1) -> Val:
    product = b.mul(_scaled(b, to, y, value), b.cast(z, to))
    return b.add(b.cast(x, to), product)


def _addcdiv(b: Builder, to: str, x: Val, y: Val, z: Val, value: Number = 1) -> Val:
    return b.add(b.cast(x, to), b.div(_scaled(b, to, y, value), b.cast(z, to)))


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


# ---- activations ------------------------------------------------------------------------------------


def _sigmoid(b: Builder, to: str, x: Operand) -> Val:
    return b.apply("reciprocal", b.add(b.apply("exp", b.apply("neg", b.cast(x, to))), 1))


def _silu(b: Builder, to: str, x: Val) -> Val:
    return b.div(x, b.add(b.apply("exp", b.apply("neg", x)), 1))


def _relu(b: Builder, to: str, x: Val) -> Val:
    return x if to in ("uint8", "bool") else b.apply("maximum", x, b.const(0, to))


def _hardtanh(b: Builder, to: str, x: Val, low: Number = -1, high: Number = 1, **kw: Number) -> Val:
    return _clamp(b, to, x, kw.get("min_val", low), kw.get("max_val", high))


def _leaky_relu(b: Builder, to: str, x: Val, slope: Number = 0.01, **kw: Number) -> Val:
    return b.where(b.compare("gt", x, 0), x, b.mul(x, kw.get("negative_slope", slope)))


def _gelu(b: Builder, to: str, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u): one exp, no cancellation
        return b.div(x, b.add(b.apply("exp", b.mul(_gelu_inner(b, x), -2)), 1))
    return b.mul(b.mul(x, 0.5), b.add(b.apply("erf", b.mul(x, math.sqrt(0.5))), 1))


_GELU_BETA, _GELU_KAPPA = math.sqrt(2 / math.pi), 0.044715


def _gelu_inner(b: Builder, x: Val) -> Val:
    cube = b.mul(b.mul(x, x), x)
    return b.mul(b.add(x, b.mul(cube, _GELU_KAPPA)), _GELU_BETA)


def _softplus(b: Builder, to: str, x: Val, beta: Number = 1, threshold: Number = 20) -> Val:
    scaled = b.mul(x, beta) if beta != 1 else x
    soft = b.apply("log1p", b.apply("exp", scaled))
    soft = b.div(soft, beta) if beta != 1 else soft
    return b.where(b.compare("gt", scaled, threshold), x, soft)


def _mish_parts(b: Builder, to: str, x: Val) -> tuple[Val, Val]:
    """e = exp(x), and tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2).

    x is cut off at 20 (40 for float64), from where on the latter rounds to 1.
    """
    e = b.apply("exp", b.apply("minimum", x, b.const(20 if to != "float64" else 40, to)))
    n = b.mul(e, b.add(e, 2))
    return e, b.div(n, b.add(n, 2))


def _mish(b: Builder, to: str, x: Val) -> Val:
    return b.mul(x, _mish_parts(b, to, x)[1])


def _xlogy(b: Builder, to: str, x: Val | Number, y: Val | Number) -> Val:
    """ATen's BinaryOpsKernel.cpp: xlogy_kernel. 0 for x = 0, whatever log(y) is; but NaN where y is NaN."""
    x, y = b.cast(x, to), b.cast(y, to)
    product = b.where(b.compare("eq", x, 0), b.const(0, to), b.mul(x, b.apply("log", y)))
    return b.where(b.apply("isnan", y), b.const(math.nan, to), product)


def _elu(b: Builder, to: str, x: Val, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Val:
    low = b.mul(b.apply("expm1", _scaled(b, to, x, input_scale)), alpha * scale)
    return b.where(b.compare("lt", x, 0), low, _scaled(b, to, x, scale))


def _hardsigmoid(b: Builder, to: str, x: Val) -> Val:
    return b.div(_clamp(b, to, b.add(x, 3), 0, 6), 6)


def _hardswish(b: Builder, to: str, x: Val) -> Val:
    return b.div(b.mul(x, _clamp(b, to, b.add(x, 3), 0, 6)), 6)


def _log_sigmoid(b: Builder, to: str, x: Val) -> tuple[Val, Val]:
    buffer = b.apply("exp", b.apply("neg", b.apply("abs", x)))
    return b.sub(b.apply("minimum", x, b.const(0, to)), b.apply("log1p", buffer)), buffer


# ---- gradients ----------------------------------------------------------------------------------------


def _threshold_backward(b: Builder, to: str, grad: Val, x: Val, threshold: Number) -> Val:
    return b.select(b.compare("le", x, threshold), 0, grad, to)


def _hardtanh_backward(b: Builder, to: str, grad: Val, x: Val, low: Number, high: Number) -> Val:
    inside = b.apply("and", b.compare("gt", x, low), b.compare("lt", x, high))
    return b.select(inside, grad, 0, to)


def _leaky_relu_backward(b: Builder, to: str, grad: Val, x: Val, slope: Number, is_result: bool) -> Val:
    return b.where(b.compare("gt", x, 0), grad, b.mul(grad, slope))


def _gelu_backward(b: Builder, to: str, grad: Val, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":
        # with s = sigmoid(2 u): (1 + tanh(u)) / 2 = s and (1 - tanh(u)^2) / 2 = 2 s (1 - s)
        s = b.apply("reciprocal", b.add(b.apply("exp", b.mul(_gelu_inner(b, x), -2)), 1))
        slope = b.mul(b.add(b.mul(b.mul(x, x), 3 * _GELU_KAPPA), 1), 2 * _GELU_BETA)
        right = b.mul(b.mul(x, b.mul(s, b.sub(b.const(1, to), s))), slope)
        return b.mul(grad, b.add(s, right))
    cdf = b.mul(b.add(b.apply("erf", b.mul(x, math.sqrt(0.5))), 1), 0.5)
    pdf = b.mul(b.apply("exp", b.mul(b.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return b.mul(grad, b.add(cdf, b.mul(x, pdf)))


def _silu_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    s = _sigmoid(b, to, x)
    return b.mul(b.mul(grad, s), b.add(b.mul(x, b.sub(b.const(1, to), s)), 1))


def _tanh_backward(b: Builder, to: str, grad: Val, y: Val) -> Val:
    return b.mul(grad, b.sub(b.const(1, to), b.mul(y, y)))


def _sigmoid_backward(b: Builder, to: str, grad: Val, y: Val) -> Val:
    return b.mul(b.mul(grad, b.sub(b.const(1, to), y)), y)


def _elu_backward(
    b: Builder, to: str, grad: Val, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Val
) -> Val:
    if is_result:
        low = b.mul(b.mul(grad, input_scale), b.add(x, alpha * scale))
    else:
        low = b.mul(b.mul(grad, input_scale * alpha * scale), b.apply("exp", _scaled(b, to, x, input_scale)))
    return b.where(b.compare("gt", x, 0), _scaled(b, to, grad, scale), low)


def _softplus_backward(b: Builder, to: str, grad: Val, x: Val, beta: Number, threshold: Number) -> Val:
    scaled = b.mul(x, beta) if beta != 1 else x
    z = b.apply("exp", scaled)
    return b.where(b.compare("gt", scaled, threshold), grad, b.div(b.mul(grad, z), b.add(z, 1)))


def _mish_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    e, tanh = _mish_parts(b, to, x)
    sigmoid = b.div(e, b.add(e, 1))
    slope = b.mul(b.mul(x, sigmoid), b.sub(b.const(1, to), b.mul(tanh, tanh)))
    return b.mul(grad, b.add(tanh, slope))


def _hardswish_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    middle = b.mul(grad, b.add(b.div(x, 3), 0.5))
    return b.select(b.compare("le", x, -3), 0, b.where(b.compare("ge", x, 3), grad, middle), to)


_FLOAT_SIXTH = 0.1666666716337204  # aten's kernel has 1/6 in float32, for float64 too


def _hardsigmoid_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    inside = b.apply("and", b.compare("gt", x, -3), b.compare("lt", x, 3))
    return b.select(inside, b.mul(grad, _FLOAT_SIXTH), 0, to)


def _log_sigmoid_backward(b: Builder, to: str, grad: Val, x: Val, buffer: Val) -> Val:
    negative = b.compare("lt", x, 0)
    share = b.div(buffer, b.add(buffer, 1))
    inner = b.where(negative, b.sub(b.const(1, to), share), share)
    return b.mul(grad, inner)


def _dropout_scale(b: Builder, to: str, x: Val, mask: Val, scale: Operand) -> Val:
    return b.mul(b.mul(b.cast(x, to), b.cast(mask, to)), scale)


# ---- the table ------------------------------------------------------------------------------------------

_FLOAT_UNARY = [
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sinh",
    "cosh",
    "asin",
    "acos",
    "atan",
    "erf",
    "erfc",
    "sqrt",
    "rsqrt",
    "reciprocal",
]

_FUNCTIONS: dict[str, Scalar] = {
    **{f"{op}.default": _float_unary(op) for op in _FLOAT_UNARY},
    **{f"{op}.default": _rounding(op) for op in ("floor", "ceil", "round", "trunc")},
    "add.Tensor": _add, "add.Scalar": _add, "sub.Tensor": _sub, "sub.Scalar": _sub,
    "rsub.Tensor": _rsub, "rsub.Scalar": _rsub, "mul.Tensor": _mul, "mul.Scalar": _mul,
    "div.Tensor": _div, "div.Scalar": _div,
    "neg.default": lambda b, to, x: b.apply("neg", x), "abs.default": _abs, "square.default": _square,
    "sign.default": lambda b, to, x: b.apply("sign", x), "sgn.default": lambda b, to, x: b.apply("sign", x),
    "maximum.default": _extreme("maximum"), "minimum.default": _extreme("minimum"),
    "clamp.default": _clamp, "clamp.Tensor": _clamp, "clamp_min.default": _clamp, "clamp_min.Tensor": _clamp,
    "clamp_max.default": _clamp_max, "clamp_max.Tensor": _clamp_max,
    "relu.default": _relu, "hardtanh.default": _hardtanh, "leaky_relu.default": _leaky_relu,
    "sigmoid.default": _sigmoid, "silu.default": _silu, "mish.default": _mish, "softplus.default": _softplus,
    "elu.default": _elu, "gelu.default": _gelu, "hardswish.default": _hardswish,
    "hardsigmoid.default": _hardsigmoid, "log_sigmoid_forward.default": _log_sigmoid,
    "pow.Tensor_Scalar": _pow_scalar, "pow.Tensor_Tensor": _pow, "pow.Scalar": _pow,
    "atan2.default": lambda b, to, y, x: b.apply("atan2", b.cast(y, to), b.cast(x, to)),
    "xlogy.Tensor": _xlogy, "xlogy.Scalar_Self": _xlogy, "xlogy.Scalar_Other": _xlogy,
    "fmod.Scalar": _remainder("fmod"), "remainder.Scalar": _remainder("remainder"),
    "where.self": _where, "where.ScalarSelf": _where, "where.ScalarOther": _where, "where.Scalar": _where,
    "masked_fill.Scalar": _masked_fill, "masked_fill.Tensor": _masked_fill,
    "isnan.default": _class_test("isnan"), "isinf.default": _class_test("isinf"),
    "logical_and.default": _logical("and"), "logical_or.default": _logical("or"),
    "logical_xor.default": _logical("xor"),
    "logical_not.default": lambda b, to, x: b.apply("not", b.cast(x, "bool")),
    "bitwise_and.Tensor": _bitwise("bitand", "and"), "bitwise_and.Scalar": _bitwise("bitand", "and"),
    "bitwise_or.Tensor": _bitwise("bitor", "or"), "bitwise_xor.Tensor": _bitwise("bitxor", "xor"),
    "bitwise_not.default": lambda b, to, x: b.apply("not" if to == "bool" else "bitnot", x),
    "_to_copy.default": _to_copy, "clone.default": _clone, "copy.default": _copy,
    "addcmul.default": _addcmul, "addcdiv.default": _addcdiv, "lerp.Scalar": _lerp, "lerp.Tensor": _lerp,
    "threshold_backward.default": _threshold_backward, "hardtanh_backward.default": _hardtanh_backward,
    "leaky_relu_backward.default": _leaky_relu_backward, "gelu_backward.default": _gelu_backward,
    "silu_backward.default": _silu_backward, "tanh_backward.default": _tanh_backward,
    "sigmoid_backward.default": _sigmoid_backward, "elu_backward.default": _elu_backward,
    "softplus_backward.default": _softplus_backward, "mish_backward.default": _mish_backward,
    "hardswish_backward.default": _hardswish_backward, "hardsigmoid_backward.default": _hardsigmoid_backward,
    "log_sigmoid_backward.default": _log_sigmoid_backward, "native_dropout_backward.default": _dropout_scale,
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
