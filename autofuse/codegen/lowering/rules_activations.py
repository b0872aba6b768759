"""Lowering rules of activations and of their gradients: each row is aten's own formula in scalar ops.

In: operand values. Out: the result's value, in the compute dtype of the result. Guarantee: as in `rules_pointwise`.
"""

from __future__ import annotations

import math

from autofuse.codegen.lowering.builder import Builder, Number, Val
from autofuse.codegen.lowering.context import Rule
from autofuse.codegen.lowering.rules_base import Pointwise, Scalar
from autofuse.codegen.lowering.rules_pointwise import clamp, scaled, sigmoid

# ---- activations ------------------------------------------------------------------------------------


def _silu(b: Builder, to: str, x: Val) -> Val:
    return b.div(x, b.add(b.apply("exp", b.apply("neg", x)), 1))


def _relu(b: Builder, to: str, x: Val) -> Val:
    return x if to in ("uint8", "bool") else b.apply("maximum", x, b.const(0, to))


def _hardtanh(b: Builder, to: str, x: Val, low: Number = -1, high: Number = 1, **kw: Number) -> Val:
    return clamp(b, to, x, kw.get("min_val", low), kw.get("max_val", high))


def _leaky_relu(b: Builder, to: str, x: Val, slope: Number = 0.01, **kw: Number) -> Val:
    return b.where(b.compare("gt", x, 0), x, b.mul(x, kw.get("negative_slope", slope)))


def _gelu(b: Builder, to: str, x: Val, approximate: str = "none") -> Val:
    if approximate == "tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u): one exp, no cancellation
        return b.div(x, b.add(b.apply("exp", b.mul(_gelu_inner(b, x), -2)), 1))
    return b.mul(x, b.apply("normal_cdf", x))


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


def _elu(b: Builder, to: str, x: Val, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Val:
    low = b.mul(b.apply("expm1", scaled(b, to, x, input_scale)), alpha * scale)
    return b.where(b.compare("lt", x, 0), low, scaled(b, to, x, scale))


def _hardsigmoid(b: Builder, to: str, x: Val) -> Val:
    return b.div(clamp(b, to, b.add(x, 3), 0, 6), 6)


def _hardswish(b: Builder, to: str, x: Val) -> Val:
    return b.div(b.mul(x, clamp(b, to, b.add(x, 3), 0, 6)), 6)


def log_sigmoid(b: Builder, to: str, x: Val) -> tuple[Val, Val]:
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
    cdf = b.apply("normal_cdf", x)
    pdf = b.mul(b.apply("exp_nonpositive", b.mul(b.mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return b.mul(grad, b.add(cdf, b.mul(x, pdf)))


def _silu_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    s = sigmoid(b, to, x)
    return b.mul(b.mul(grad, s), b.add(b.mul(x, b.sub(b.const(1, to), s)), 1))


def _tanh_backward(b: Builder, to: str, grad: Val, y: Val) -> Val:
    return b.mul(grad, b.sub(b.const(1, to), b.mul(y, y)))


def _sigmoid_backward(b: Builder, to: str, grad: Val, y: Val) -> Val:
    return b.mul(b.mul(grad, b.sub(b.const(1, to), y)), y)


def _elu_backward(
    b: Builder, to: str, grad: Val, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Val
) -> Val:
    low = elu_backward_low(b, to, grad, alpha, scale, input_scale, is_result, x)
    return b.where(b.compare("gt", x, 0), scaled(b, to, grad, scale), low)


def elu_backward_low(
    b: Builder, to: str, grad: Val, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Val
) -> Val:
    """The gradient where x is negative."""
    if is_result:
        return b.mul(b.mul(grad, input_scale), b.add(x, alpha * scale))
    return b.mul(b.mul(grad, input_scale * alpha * scale), b.apply("exp", scaled(b, to, x, input_scale)))


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


FLOAT_SIXTH = 0.1666666716337204  # aten's kernel has 1/6 in float32, for float64 too


def _hardsigmoid_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    inside = b.apply("and", b.compare("gt", x, -3), b.compare("lt", x, 3))
    return b.select(inside, b.mul(grad, FLOAT_SIXTH), 0, to)


def log_sigmoid_backward(b: Builder, to: str, grad: Val, x: Val, buffer: Val) -> Val:
    negative = b.compare("lt", x, 0)
    share = b.div(buffer, b.add(buffer, 1))
    inner = b.where(negative, b.sub(b.const(1, to), share), share)
    return b.mul(grad, inner)


# ---- activations and gradients with a threshold -----------------------------------------------------------


def _threshold(b: Builder, to: str, x: Val, threshold: Number, value: Number) -> Val:
    return b.select(b.compare("le", x, threshold), value, x, to)


def _celu(b: Builder, to: str, x: Val, alpha: Number = 1) -> Val:
    return _elu(b, to, x, alpha, 1, 1 / alpha)


def _prelu(b: Builder, to: str, x: Val, weight: Val) -> Val:
    return b.where(b.compare("gt", x, 0), x, b.mul(x, b.cast(weight, to)))


def _prelu_backward(b: Builder, to: str, grad: Val, x: Val, weight: Val) -> tuple[Val, Val]:
    """The gradients of the input and, element by element, of the weight."""
    positive = b.compare("gt", x, 0)
    return (
        b.where(positive, grad, b.mul(grad, b.cast(weight, to))),
        b.where(positive, b.const(0, to), b.mul(grad, x)),
    )


# ---- the table ------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Scalar] = {
    "relu.default": _relu,
    "hardtanh.default": _hardtanh,
    "leaky_relu.default": _leaky_relu,
    "silu.default": _silu,
    "mish.default": _mish,
    "softplus.default": _softplus,
    "elu.default": _elu,
    "gelu.default": _gelu,
    "hardswish.default": _hardswish,
    "hardsigmoid.default": _hardsigmoid,
    "log_sigmoid_forward.default": log_sigmoid,
    "threshold_backward.default": _threshold_backward,
    "hardtanh_backward.default": _hardtanh_backward,
    "leaky_relu_backward.default": _leaky_relu_backward,
    "gelu_backward.default": _gelu_backward,
    "silu_backward.default": _silu_backward,
    "tanh_backward.default": _tanh_backward,
    "sigmoid_backward.default": _sigmoid_backward,
    "elu_backward.default": _elu_backward,
    "softplus_backward.default": _softplus_backward,
    "mish_backward.default": _mish_backward,
    "hardswish_backward.default": _hardswish_backward,
    "hardsigmoid_backward.default": _hardsigmoid_backward,
    "log_sigmoid_backward.default": log_sigmoid_backward,
    "threshold.default": _threshold,
    "celu.default": _celu,
    "_prelu_kernel.default": _prelu,
    "_prelu_kernel_backward.default": _prelu_backward,
}

ACTIVATION_RULES: dict[str, Rule] = {f"aten.{name}": Pointwise(function) for name, function in _FUNCTIONS.items()}
