"""Lowering rules of losses. A class index becomes an indirect read, its gradient a comparison; no one-hot exists.

In: the index at which a result is wanted. Out: its value. Guarantee: a target outside of [0, C) that is not
`ignore_index` never reads out of bounds; eager raises there, a kernel cannot, so the loss becomes NaN, and the runtime
then repeats the call in eager (`runtime/graphs/loss_guard.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect, Word, atoms_of, broadcast_index, join
from autofuse.codegen.lowering.rules_base import Custom, infer_broadcast
from autofuse.errors import LoweringError
from autofuse.ir.guarded import keeps_nan
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import Dim

_NONE, _MEAN, _SUM = 0, 1, 2  # aten's Reduction


def _rows(index: Index) -> Index:
    """The index of the targets: everything but the class dim."""
    return index[:-1]


def _join_rows(cx: Context, scores: ValueRef, target: ValueRef) -> None:
    for left, right in zip(_rows(cx.canonical(scores)), cx.canonical(target), strict=True):
        join(left, right)


class _Targets:
    """What is known of the targets at some rows."""

    def __init__(self, cx: Context, target: ValueRef, rows: Index, classes: Dim, ignore: int) -> None:
        b = cx.builder
        self.class_index = b.cast(cx.operand(target, rows), "int64")
        self.counted = b.compare("ne", self.class_index, ignore)
        limit = b.size(classes, "int64")
        self.inside = b.apply("and", b.compare("ge", self.class_index, 0), b.apply("lt", self.class_index, limit))
        self.usable = b.apply("and", self.counted, self.inside)
        safe = b.where(self.usable, self.class_index, b.const(0, "int64"))
        self.word: Word = (Indirect(safe, classes),)


def _class_weight(cx: Context, weight: ValueRef | None, targets: _Targets, to: str) -> Val:
    """The weight of each row's class, 0 for ignored rows."""
    b = cx.builder
    one = b.const(1, to) if weight is None else b.cast(cx.operand(weight, (targets.word,)), to)
    return b.select(targets.counted, one, 0, to)


def _infer_nll(cx: Context, op: Operation) -> Sequence[Index | None]:
    scores, target = op.args[:2]
    if (kind := cx.spec(target).dtype) not in ("int64", "uint8"):
        raise LoweringError("target", f"expected targets of int64 or uint8, found {kind}, which eager refuses")
    _check_kept(cx, op)
    _join_rows(cx, scores, target)
    return [cx.canonical(target) if op.args[3] == _NONE else (), ()]


def _nll_forward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    scores, target, weight, reduction, ignore = op.args[:5]
    b, to, classes = cx.builder, op.outputs[0].dtype, cx.shape(scores)[-1]
    if reduction == _NONE and output == 1:
        return b.const(0, to)
    rows = index if reduction == _NONE else cx.canonical(target)
    targets = _Targets(cx, target, rows, classes, int(ignore))
    share = _class_weight(cx, weight, targets, to)
    over = atoms_of(rows)
    if output == 1:
        return b.reduce("sum", share, over)
    picked = b.cast(cx.operand(scores, (*rows, targets.word)), to)
    lost = b.mul(b.apply("neg", picked), share) if weight is not None else b.apply("neg", picked)
    lost = b.where(targets.inside, lost, b.const(math.nan, to))
    loss = b.select(targets.counted, lost, 0, to)
    if reduction == _NONE:
        return loss
    total = b.reduce("sum", loss, over)
    return total if reduction == _SUM else b.div(total, b.reduce("sum", share, over))


def _infer_nll_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    _join_rows(cx, op.args[1], op.args[2])
    return [cx.canonical(op.args[1])]


def _nll_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """``where(class == target, -weight * grad / total_weight, 0)``; only the comparison varies along a row."""
    grad, scores, target, weight, reduction, ignore, total = op.args[:7]
    b, to, classes = cx.builder, op.outputs[0].dtype, cx.shape(scores)[-1]
    rows = _rows(index)
    targets = _Targets(cx, target, rows, classes, int(ignore))
    slope = b.cast(cx.operand(grad, rows if reduction == _NONE else ()), to)
    slope = b.apply("neg", slope)
    if weight is not None:
        slope = b.mul(slope, _class_weight(cx, weight, targets, to))
    if reduction == _MEAN:
        slope = b.div(slope, b.cast(cx.operand(total, ()), to))
    hit = b.where(targets.usable, targets.class_index, b.const(-1, "int64"))
    return b.select(b.apply("eq", b.index(index[-1]), hit), slope, 0, to)


# ---- element by element: squares, absolute values, and both --------------------------------------------


def _infer_elements(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = infer_broadcast_of(cx, op)
    return [index if op.arg(2, _MEAN) == _NONE else ()]


def infer_broadcast_of(cx: Context, op: Operation) -> Index:
    left, right = op.args[:2]
    for a, b in zip(cx.canonical(left), cx.canonical(right), strict=True):
        join(a, b)
    return cx.canonical(left)


def _elements(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, target = op.args[:2]
    reduction = op.arg(2, _MEAN)
    b, to = cx.builder, op.outputs[0].dtype
    place = index if reduction == _NONE else cx.canonical(x)
    off = b.sub(b.cast(cx.operand(x, place), to), b.cast(cx.operand(target, place), to))
    if op.short_name == "mse_loss":
        each = b.mul(off, off)
    else:
        each = (_huber if op.short_name == "huber_loss" else _smooth)(b, off, float(op.arg(3, 1.0)))
    return _reduced(cx, op, each, reduction, place)


def _reduced(cx: Context, op: Operation, each: Val, reduction: int, place: Index) -> Val:
    """The losses of all elements, reduced as the operator asks; ``place`` is their index in the input."""
    b, to = cx.builder, op.outputs[0].dtype
    if reduction == _NONE:
        return each
    total = b.reduce("sum", each, atoms_of(place))
    return total if reduction == _SUM else b.div(total, b.size(cx.shape(op.args[0]).numel, to))


def _huber(b: Builder, off: Val, delta: float) -> Val:
    """ATen's BinaryOpsKernel.cpp: huber_kernel."""
    size, edge, half = b.apply("abs", off), b.const(delta, off.dtype), b.const(0.5, off.dtype)
    inner = b.mul(b.mul(half, size), size)
    return b.where(b.compare("lt", size, delta), inner, b.mul(edge, b.sub(size, b.mul(half, edge))))


def _smooth(b: Builder, off: Val, beta: float) -> Val:
    """ATen's BinaryOpsKernel.cpp: smooth_l1_kernel."""
    size, half = b.apply("abs", off), b.const(0.5, off.dtype)
    inner = b.div(b.mul(b.mul(half, size), size), b.const(beta, off.dtype)) if beta else size
    return b.where(b.compare("lt", size, beta), inner, b.sub(size, b.mul(half, b.const(beta, off.dtype))))


def _infer_elements_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [infer_broadcast(cx, op)]


def _mse_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    grad, x, target, reduction = op.args[:4]
    b, to = cx.builder, op.outputs[0].dtype
    off = b.sub(b.cast(cx.operand(x, index), to), b.cast(cx.operand(target, index), to))
    slope = b.cast(cx.operand(grad, index if len(cx.shape(grad)) else ()), to)
    factor: Any = b.const(2, to)
    if reduction == _MEAN:
        factor = b.div(factor, b.size(cx.shape(x).numel, to))
    return b.mul(b.mul(off, factor), slope)


def _huber_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ATen's PointwiseOpsKernel.cpp: huber_backward_cpu_kernel."""
    grad, x, target, reduction, delta = op.args[:5]
    b, to = cx.builder, op.outputs[0].dtype
    off = b.sub(b.cast(cx.operand(x, index), to), b.cast(cx.operand(target, index), to))
    slope = b.cast(cx.operand(grad, index if len(cx.shape(grad)) else ()), to)
    edge = b.const(float(delta), to)
    beyond = b.where(b.compare("ge", off, float(delta)), edge, off)
    clipped = b.where(b.compare("le", off, -float(delta)), b.const(-float(delta), to), beyond)
    if reduction == _MEAN:
        slope = b.mul(b.div(b.const(1, to), b.size(cx.shape(x).numel, to)), slope)
    return b.mul(slope, clipped)


def _smooth_slope(b: Builder, off: Val, to: str, beta: float) -> Val:
    """ATen's PointwiseOpsKernel.cpp: smooth_l1_backward_cpu_kernel."""
    beyond = b.where(b.compare("gt", off, 0), b.const(1, to), b.const(-1, to))
    inner = b.div(off, b.const(beta, to)) if beta else off  # with beta 0, only NaN comes here
    return b.where(b.compare("ge", b.apply("abs", off), beta), beyond, inner)


def smooth_l1_backward(slope_of: Callable[[Builder, Val, str, float], Val]) -> Rule:
    """The rule of the gradient; ``slope_of`` gives the slope of the loss at a difference."""

    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        grad, x, target, reduction, beta = op.args[:5]
        b, to = cx.builder, op.outputs[0].dtype
        off = b.sub(b.cast(cx.operand(x, index), to), b.cast(cx.operand(target, index), to))
        slope = b.cast(cx.operand(grad, index if len(cx.shape(grad)) else ()), to)
        each = slope_of(b, off, to, float(beta))
        if reduction == _MEAN:
            each = b.mul(b.div(b.const(1, to), b.size(cx.shape(x).numel, to)), each)
        return b.mul(each, slope)

    return Custom(_infer_elements_backward, evaluate)


# ---- binary cross-entropy of logits -------------------------------------------------------------------


def _infer_logits(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = infer_broadcast_of(cx, op)
    for weight in _weights_of(op):
        sizes = cx.shape(weight)
        for word, own, dim in zip(index[len(index) - len(sizes) :], cx.canonical(weight), sizes, strict=True):
            if dim != 1:
                join(word, own)
    return [index if op.arg(4, _MEAN) == _NONE else ()]


def _weights_of(op: Operation) -> list[ValueRef]:
    return [weight for weight in (op.arg(2, None), op.arg(3, None)) if weight is not None]


def _logits(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ATen's Loss.cpp: binary_cross_entropy_with_logits."""
    x_ref, target_ref = op.args[:2]
    reduction = op.arg(4, _MEAN)
    b, to = cx.builder, op.outputs[0].dtype
    place = index if reduction == _NONE else cx.canonical(x_ref)

    def weight(number: int) -> Val | None:
        ref = op.arg(number, None)
        return None if ref is None else b.cast(cx.operand(ref, broadcast_index(place, cx.shape(ref))), to)

    x, target = b.cast(cx.operand(x_ref, place), to), b.cast(cx.operand(target_ref, place), to)
    decay = b.apply("log1p", b.apply("exp", b.apply("neg", b.apply("abs", x))))
    log_sigmoid = b.sub(b.apply("minimum", x, b.const(0, to)), decay)
    each_weight, positive = weight(2), weight(3)
    if positive is not None:
        log_sigmoid = b.mul(log_sigmoid, b.add(b.mul(b.sub(positive, b.const(1, to)), target), b.const(1, to)))
    each = b.sub(b.mul(b.sub(b.const(1, to), target), x), log_sigmoid)
    return _reduced(cx, op, each if each_weight is None else b.mul(each, each_weight), reduction, place)


# ---- binary cross-entropy of probabilities, soft margin -----------------------------------------------


def _infer_pair(cx: Context, op: Operation) -> Sequence[Index | None]:
    """A loss of two tensors of one shape, whose reduction comes last; a weight may broadcast."""
    if cx.shape(op.args[0]) != cx.shape(op.args[1]):
        raise LoweringError("sizes", "expected an input and a target of one shape, found others")
    index = infer_broadcast_of(cx, op)
    return [index if _last(op) == _NONE else ()]


def _last(op: Operation) -> int:
    """The reduction of a loss, the last of its arguments."""
    return int(op.arg({"binary_cross_entropy": 3, "soft_margin_loss": 2}[op.short_name], _MEAN))


def _infer_probabilities(cx: Context, op: Operation) -> Sequence[Index | None]:
    _check_kept(cx, op)
    return _infer_pair(cx, op)


def _check_kept(cx: Context, op: Operation) -> None:
    """Raise LoweringError where the NaN of what eager refuses might be lost on its way to the outputs."""
    behind = {ValueRef(op.name)}
    for other in cx.form.operations:
        if behind.intersection(other.inputs):
            behind.update(ValueRef(other.name, number) for number in range(len(other.outputs)))
            if not keeps_nan(other):
                raise LoweringError("target", f"expected a loss whose NaN is kept, found {other.target} behind it")


def _probabilities(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ATen's Loss.cpp: binary_cross_entropy. What is no probability raises in eager and is NaN here."""
    x_ref, target_ref, weight = op.args[0], op.args[1], op.arg(2, None)
    b, to = cx.builder, op.outputs[0].dtype
    place = index if _last(op) == _NONE else cx.canonical(x_ref)
    x, target = b.cast(cx.operand(x_ref, place), to), b.cast(cx.operand(target_ref, place), to)
    least = b.const(-100, to)
    other = b.apply("maximum", b.apply("log1p", b.apply("neg", x)), least)
    each = b.sub(b.mul(b.sub(target, 1), other), b.mul(target, b.apply("maximum", b.apply("log", x), least)))
    for value in (x, target):
        inside = b.apply("and", b.compare("ge", value, 0), b.compare("le", value, 1))
        each = b.where(inside, each, b.const(math.nan, to))
    if weight is not None:
        each = b.mul(each, b.cast(cx.operand(weight, broadcast_index(place, cx.shape(weight))), to))
    return _reduced(cx, op, each, _last(op), place)


def _probabilities_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ATen's Loss.cpp: binary_cross_entropy_backward."""
    grad, x_ref, target_ref = op.args[:3]
    weight, reduction = op.arg(3, None), op.arg(4, _MEAN)
    b, to = cx.builder, op.outputs[0].dtype
    x, target = b.cast(cx.operand(x_ref, index), to), b.cast(cx.operand(target_ref, index), to)
    slope = b.cast(cx.operand(grad, index if len(cx.shape(grad)) else ()), to)
    least = b.round_to(b.const(1e-12, to), to)  # 0 in float16, where aten divides by 0 then
    spread = b.apply("maximum", b.mul(b.sub(b.const(1, to), x), x), least)
    each = b.div(b.mul(slope, b.sub(x, target)), spread)
    if weight is not None:
        each = b.mul(each, b.cast(cx.operand(weight, broadcast_index(index, cx.shape(weight))), to))
    return b.div(each, b.size(cx.shape(x_ref).numel, to)) if reduction == _MEAN else each


def _soft_margin(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ATen's Loss.cpp: soft_margin_loss."""
    x, target = op.args[:2]
    b, to = cx.builder, op.outputs[0].dtype
    place = index if _last(op) == _NONE else cx.canonical(x)
    off = b.mul(b.apply("neg", b.cast(cx.operand(x, place), to)), b.cast(cx.operand(target, place), to))
    return _reduced(cx, op, b.apply("log1p", b.apply("exp", off)), _last(op), place)


def _soft_margin_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """ATen's Loss.cpp: soft_margin_loss_backward."""
    grad, x_ref, target_ref, reduction = op.args[:4]
    b, to = cx.builder, op.outputs[0].dtype
    x, target = b.cast(cx.operand(x_ref, index), to), b.cast(cx.operand(target_ref, index), to)
    slope = b.cast(cx.operand(grad, index if len(cx.shape(grad)) else ()), to)
    z = b.apply("exp", b.mul(b.apply("neg", target), x))
    norm = b.div(b.const(-1, to), b.size(cx.shape(x_ref).numel, to)) if reduction == _MEAN else b.const(-1, to)
    return b.mul(b.div(b.mul(b.mul(target, z), norm), b.add(z, 1)), slope)


LOSS_RULES: dict[str, Rule] = {
    "aten.nll_loss_forward.default": Custom(_infer_nll, _nll_forward),
    "aten.nll_loss_backward.default": Custom(_infer_nll_backward, _nll_backward),
    "aten.mse_loss.default": Custom(_infer_elements, _elements),
    "aten.huber_loss.default": Custom(_infer_elements, _elements),
    "aten.smooth_l1_loss.default": Custom(_infer_elements, _elements),
    "aten.smooth_l1_loss_backward.default": smooth_l1_backward(_smooth_slope),
    "aten.binary_cross_entropy_with_logits.default": Custom(_infer_logits, _logits),
    "aten.binary_cross_entropy.default": Custom(_infer_probabilities, _probabilities),
    "aten.binary_cross_entropy_backward.default": Custom(_infer_elements_backward, _probabilities_backward),
    "aten.soft_margin_loss.default": Custom(_infer_pair, _soft_margin),
    "aten.soft_margin_loss_backward.default": Custom(_infer_elements_backward, _soft_margin_backward),
    "aten.huber_loss_backward.default": Custom(_infer_elements_backward, _huber_backward),
    "aten.mse_loss_backward.default": Custom(_infer_elements_backward, _mse_backward),
}
