"""Lowering rules of operators for which aten's CUDA kernels differ from its CPU kernels.

In: as in the tables whose rows these replace for a node on a GPU. Out: likewise. Guarantee: NaN, Inf and numbers at a
bound come out as aten's CUDA kernels give them, for which each row is named; docs/SEMANTICS.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autofuse.codegen.dtypes import dtype, is_float
from autofuse.codegen.lowering.builder import Builder, Number, Operand, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index
from autofuse.codegen.lowering.rules_activations import (
    FLOAT_SIXTH,
    elu_backward_low,
    log_sigmoid,
    log_sigmoid_backward,
)
from autofuse.codegen.lowering.rules_base import Custom, Pointwise, Scalar, infer_broadcast, operands_at
from autofuse.codegen.lowering.rules_functions import angle, divided
from autofuse.codegen.lowering.rules_loss import smooth_l1_backward
from autofuse.codegen.lowering.rules_pointwise import clamp, scaled
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation


def _rounded(b: Builder, to: str, number: Number) -> Val:
    """A number as a kernel takes it whose arguments are of the tensors' own dtype: 0.1 in bfloat16 is 0.10009765625."""
    return b.round_to(b.const(number, to), to)


# ---- quotients, products ------------------------------------------------------------------------------


def _inverse(b: Builder, to: str, y: Operand) -> Val | None:
    """1 / y for a number y. BinaryDivTrueKernel.cu and its like multiply by it; by a tensor they divide."""
    return None if isinstance(y, Val) or not is_float(to) else b.div(b.const(1, to), b.cast(y, to))


def _divided(b: Builder, to: str, x: Operand, y: Operand, rounding_mode: str | None = None) -> Val:
    return divided(b, to, x, y, rounding_mode, _inverse(b, to, y))


def _floor_divide(b: Builder, to: str, x: Operand, y: Operand) -> Val:
    return _divided(b, to, x, y, "floor")


def _addcmul(b: Builder, to: str, x: Val, y: Val, z: Val, value: Number = 1) -> Val:
    """PointwiseOpsKernel.cu: the product of the tensors comes first."""
    return b.add(b.cast(x, to), scaled(b, to, b.mul(b.cast(y, to), z), value))


def _addcdiv(b: Builder, to: str, x: Val, y: Val, z: Val, value: Number = 1) -> Val:
    return b.add(b.cast(x, to), scaled(b, to, b.div(b.cast(y, to), z), value))


# ---- functions ------------------------------------------------------------------------------------------


def _angle(b: Builder, to: str, x: Val) -> Val:
    """UnaryComplexKernels.cu has none for 16 bits."""
    if dtype(to).nbytes == 2:
        raise LoweringError(
            "dtype", f"expected an angle of float32 or float64, found {to}, which a GPU's eager refuses"
        )
    return angle(b, to, x)


def _logit_backward(b: Builder, to: str, grad: Val, x: Val, eps: Number | None = None) -> Val:
    """BinaryMiscBackwardOpsKernels.cu: only what compares as outside is; NaN goes through the formula."""
    g, value, one = b.cast(grad, to), b.cast(x, to), b.const(1, to)
    bounded = eps is not None and not eps < 0
    low = b.const(eps if bounded else 0, to)  # type: ignore[arg-type]
    inner = b.div(g, b.mul(value, b.sub(one, value)))
    outside = b.apply("or", b.apply("lt", value, low), b.apply("gt", value, b.sub(one, low)))
    return b.where(outside, b.const(0 if bounded else math.nan, to), inner)


# ---- activations and their gradients --------------------------------------------------------------------


def _threshold(b: Builder, to: str, x: Val, threshold: Number, value: Number) -> Val:
    """ActivationThresholdKernel.cu rounds the threshold to the dtype of ``x``."""
    return b.select(b.compare("le", x, _rounded(b, to, threshold)), value, x, to)


def _threshold_backward(b: Builder, to: str, grad: Val, x: Val, threshold: Number) -> Val:
    return b.select(b.compare("le", x, _rounded(b, to, threshold)), 0, grad, to)


def _elu(b: Builder, to: str, x: Val, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Val:
    """ActivationEluKernel.cu: 0 and NaN are on the side of the exponential function."""
    low = b.mul(b.apply("expm1", scaled(b, to, x, input_scale)), alpha * scale)
    return b.where(b.compare("gt", x, 0), scaled(b, to, x, scale), low)


def _celu(b: Builder, to: str, x: Val, alpha: Number = 1) -> Val:
    return _elu(b, to, x, alpha, 1, 1 / alpha)


def _elu_backward(
    b: Builder, to: str, grad: Val, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Val
) -> Val:
    """ActivationEluKernel.cu: the gradient at NaN is that of a positive number."""
    low = elu_backward_low(b, to, grad, alpha, scale, input_scale, is_result, x)
    return b.where(b.compare("le", x, 0), low, scaled(b, to, grad, scale))


def _hardtanh_backward(b: Builder, to: str, grad: Val, x: Val, low: Number, high: Number) -> Val:
    """ActivationHardtanhKernel.cu: the gradient passes at NaN."""
    outside = b.apply("or", b.compare("le", x, low), b.compare("ge", x, high))
    return b.select(outside, 0, grad, to)


def _hardsigmoid(b: Builder, to: str, x: Val) -> Val:
    """ActivationHardsigmoidKernel.cu multiplies by 1 / 6 in float32."""
    return b.mul(clamp(b, to, b.add(x, 3), 0, 6), FLOAT_SIXTH)


def _hardswish(b: Builder, to: str, x: Val) -> Val:
    return b.mul(b.mul(x, clamp(b, to, b.add(x, 3), 0, 6)), FLOAT_SIXTH)


def _hardswish_backward(b: Builder, to: str, grad: Val, x: Val) -> Val:
    """ActivationHardswishKernel.cu: the gradient passes at NaN."""
    middle = b.mul(grad, b.add(b.div(x, 3), 0.5))
    return b.select(b.compare("le", x, -3), 0, b.where(b.compare("lt", x, 3), middle, grad), to)


# ---- log sigmoid: its second result is empty, and its gradient does not read it ---------------------------


def _infer_log_sigmoid(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [cx.canonical(op.args[0]), None]


def _log_sigmoid(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ActivationLogSigmoidKernel.cu."""
    if output:
        raise LoweringError("empty", f"expected the first result of {op.name}, found the empty one")
    return log_sigmoid(cx.builder, op.outputs[0].dtype, cx.operand(op.args[0], index))[0]


def _without_buffer(op: Operation) -> Operation:
    return replace(op, args=op.args[:2])


def _infer_log_sigmoid_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [infer_broadcast(cx, _without_buffer(op))]


def _log_sigmoid_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ActivationLogSigmoidKernel.cu calculates anew what the CPU's kernel reads from the second result."""
    b, to = cx.builder, op.outputs[0].dtype
    (grad, x), _ = operands_at(cx, _without_buffer(op), index)
    return log_sigmoid_backward(b, to, grad, x, log_sigmoid(b, to, x)[1])


# ---- losses -------------------------------------------------------------------------------------------------


def _smooth_slope(b: Builder, off: Val, to: str, beta: float) -> Val:
    """PointwiseOpsKernel.cu: with beta 0 the slope between equal numbers is 0 / 0."""
    edge = _rounded(b, to, beta)
    above = b.where(b.apply("gt", off, edge), b.const(1, to), b.div(off, edge))
    return b.where(b.apply("lt", off, b.apply("neg", edge)), b.const(-1, to), above)


# ---- the table ------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Scalar] = {
    "div.Tensor": _divided,
    "div.Scalar": _divided,
    "div.Tensor_mode": _divided,
    "div.Scalar_mode": _divided,
    "floor_divide.default": _floor_divide,
    "floor_divide.Scalar": _floor_divide,
    "addcmul.default": _addcmul,
    "addcdiv.default": _addcdiv,
    "angle.default": _angle,
    "logit_backward.default": _logit_backward,
    "threshold.default": _threshold,
    "threshold_backward.default": _threshold_backward,
    "elu.default": _elu,
    "celu.default": _celu,
    "elu_backward.default": _elu_backward,
    "hardtanh_backward.default": _hardtanh_backward,
    "hardsigmoid.default": _hardsigmoid,
    "hardswish.default": _hardswish,
    "hardswish_backward.default": _hardswish_backward,
}

CUDA_RULES: dict[str, Rule] = {
    **{f"aten.{name}": Pointwise(function) for name, function in _FUNCTIONS.items()},
    "aten.log_sigmoid_forward.default": Custom(_infer_log_sigmoid, _log_sigmoid),
    "aten.log_sigmoid_backward.default": Custom(_infer_log_sigmoid_backward, _log_sigmoid_backward),
    "aten.smooth_l1_loss_backward.default": smooth_l1_backward(_smooth_slope),
}
