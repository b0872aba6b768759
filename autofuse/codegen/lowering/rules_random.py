"""Lowering rule of dropout on CUDA: the mask is a function of an element's place and the generator's state.

In: the index at which the result or the mask is wanted. Out: its value, with eager's order and rounding: ``x * mask *
scale``, where ``mask = uniform(place) < keep``. Source: ATen/native/cuda/Dropout.cu. Guarantee: only dropouts that
eager samples in memory order are lowered, and one per node, since a call has one state. Capture replaces eager's
operator by this one only where a device has proved the numbers equal to eager's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Val, linear_offset, linear_terms
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.philox import DROPOUT
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import contiguous_strides


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    x, p, train = op.args
    if train is False or isinstance(p, bool) or not isinstance(p, int | float) or not 0.0 <= p < 1.0:
        raise LoweringError("random", f"expected a dropout that draws, found p={p} train={train}")
    for spec in (cx.spec(x), *op.outputs):
        if spec.strides.dims != contiguous_strides(spec.shape.dims):
            raise LoweringError("random", f"expected a dropout of contiguous tensors, found strides {spec.strides}")
    if sum(other.target == DROPOUT for other in cx.form.operations) > 1:
        raise LoweringError("random", "expected one random operation in a node, found several")
    return [cx.canonical(x)] * 2


def _evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, spec = cx.builder, op.outputs[0]
    x, p, _ = op.args
    value = b.cast(cx.operand(x, index), spec.dtype)
    keep, scale = _keep_and_scale(p, value.dtype)
    terms, indirect = linear_terms(index, spec.strides)
    if indirect:
        raise LoweringError("random", "expected a place in memory that loops tell, found an indirect one")
    place = b.node("index", "int64", (), terms) if terms else b.const(0, "int64")
    if (offset := linear_offset(index, spec.strides)) != 0:
        place = b.add(place, offset)
    drawn = b.cast(b.node("uniform", "float32", (place,)), value.dtype)
    mask = b.compare("lt", drawn, keep)
    return mask if output else b.mul(b.mul(value, b.cast(mask, value.dtype)), scale)


def _keep_and_scale(p: float, name: str) -> tuple[float, float]:
    """The probability to keep an element, and the scale of kept ones.

    Eager rounds the probability to the type it calculates in, then divides in float64.
    """
    keep = 1.0 - float(p)
    if name == "float32":
        keep = float(struct.unpack("f", struct.pack("f", keep))[0])
    return keep, 1.0 / keep


RANDOM_RULES: dict[str, Rule] = {DROPOUT: Custom(_infer, _evaluate)}
