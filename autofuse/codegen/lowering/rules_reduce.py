"""Lowering rules of reductions and of softmax.

In: the index at which a result is wanted. Out: its value, with `reduce` nodes over the loops of the reduced dims.
Guarantee: variances are two-pass (mean first, then squared distances), softmax subtracts the row's maximum,
and NaN propagates through max and min as it does in aten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Builder, Number, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Atom, Index, Indirect, Word, join, resolve
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.reductions import reduced_dims
from autofuse.ir.shape import Dim, product


def reduced_atoms(words: Sequence[Word]) -> tuple[Atom, ...]:
    """The loops of reduced words. Raises LoweringError for an indirect index, which has no loop."""
    parts = [p for word in words for p in resolve(word)]
    if any(isinstance(p, Indirect) for p in parts):
        raise LoweringError("reduction", "expected loops to reduce over, found an indirect index")
    return tuple(p for p in parts if isinstance(p, Atom))


def open_dims(cx: Context, ref: ValueRef, dims: Sequence[int], index: Index) -> tuple[Index, tuple[Atom, ...]]:
    """``index`` with the words of ``dims`` replaced by the tensor's own loops, and those loops."""
    words = list(index)
    for dim in dims:
        words[dim] = ()
    for dim in dims:
        words[dim] = cx.reduce_word(ref, dim, tuple(words))
    return tuple(words), reduced_atoms([words[d] for d in dims])


def keep_index(index: Index, dims: Sequence[int], rank: int, keepdim: bool) -> Index:
    """The index of a reduction's source from the index of its result; words of reduced dims are empty."""
    if keepdim:
        return tuple(() if d in dims else word for d, word in enumerate(index))
    words = iter(index)
    return tuple(() if d in dims else next(words) for d in range(rank))


def drop_dims(index: Index, dims: Sequence[int], keepdim: bool) -> Index:
    """The canonical index of a reduction's result."""
    if keepdim:
        return tuple(() if d in dims else word for d, word in enumerate(index))
    return tuple(word for d, word in enumerate(index) if d not in dims)


def count(cx: Context, ref: ValueRef, dims: Sequence[int]) -> Dim:
    shape = cx.shape(ref)
    return product(shape[d] for d in dims)


# ---- plain reductions -------------------------------------------------------------------------------


def _infer_reduction(cx: Context, op: Operation) -> Sequence[Index | None]:
    dims, keepdim = reduced_dims(op, len(cx.shape(op.args[0])))
    return [drop_dims(cx.canonical(op.args[0]), dims, keepdim)] * len(op.outputs)


def _sum(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    return b.reduce("sum", b.cast(x, to), over)


def _mean(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    return b.div(b.reduce("sum", b.cast(x, to), over), b.size(n, to))


def _kind(kind: str) -> Any:
    return lambda b, op, to, x, over, n: b.reduce(kind, b.cast(x, to), over)


def _truth(kind: str) -> Any:
    """any and all: of numbers whether they are not 0, which without loops to reduce over would be the number."""
    return lambda b, op, to, x, over, n: b.cast(b.reduce(kind, b.cast(x, "bool"), over), to)


def variance(b: Builder, x: Val, over: Sequence[Atom], n: Dim, correction: Number = 0) -> tuple[Val, Val]:
    """Variance and mean in two passes; the variance is divided by n - ``correction``."""
    mean = b.div(b.reduce("sum", x, over), b.size(n, x.dtype))
    off = b.sub(x, mean)
    squares = b.reduce("sum", b.mul(off, off), over)
    freedom = b.size(n, x.dtype)
    if correction != 0:
        freedom = b.apply("maximum", b.sub(freedom, correction), b.const(0, x.dtype))
    return b.div(squares, freedom), mean


def mean_as_aten(b: Builder, var: Val, mean: Val) -> Val:
    """The mean as aten's running mean gives it: NaN where the variance is NaN, as after an infinite element."""
    return b.select(b.apply("isnan", var), math.nan, mean, mean.dtype)


def _evaluate_variance(cx: Context, op: Operation, output: int, index: Index) -> Val:
    ref = op.args[0]
    dims, keepdim = reduced_dims(op, len(cx.shape(ref)))
    opened, over = open_dims(cx, ref, dims, keep_index(index, dims, len(cx.shape(ref)), keepdim))
    correction = op.kwarg("correction", op.arg(2))
    b = cx.builder
    x = b.cast(cx.operand(ref, opened), "float64")  # aten accumulates these in double, unlike its norms
    if output == 1:  # the variance of a single element is NaN by its correction, its mean is not
        return b.cast(mean_as_aten(b, *variance(b, x, over, count(cx, ref, dims))), op.outputs[1].dtype)
    var, _ = variance(b, x, over, count(cx, ref, dims), 1 if correction is None else correction)
    return b.cast(b.apply("sqrt", var) if op.short_name.startswith("std") else var, op.outputs[0].dtype)


def _logsumexp(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    value = b.cast(x, to)
    top = b.reduce("peak", value, over)  # NaN reaches the result through the sum
    # an infinite maximum would make inf - inf: aten subtracts 0 instead
    shift = b.select(b.compare("eq", b.apply("abs", top), math.inf), 0, top, to)
    total = b.reduce("sum", b.apply("exp", b.sub(value, shift)), over)
    return b.add(b.apply("log", total), shift)


def _vector_norm(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    order: Any = dict(op.kwargs).get("ord", op.arg(1, 2))
    order = 2 if order is None else order
    value = b.cast(x, to)
    size = b.apply("abs", value)
    if order == 2:
        return b.apply("sqrt", b.reduce("sum", b.mul(value, value), over))
    if order == 1:
        return b.reduce("sum", size, over)
    if order in (math.inf, -math.inf):
        return b.reduce("max" if order > 0 else "min", size, over)
    if order == 0:
        return b.reduce("sum", b.cast(b.compare("ne", value, 0), to), over)
    total = b.reduce("sum", b.apply("pow", size, b.const(order, to)), over)
    return b.apply("pow", total, b.const(1 / order, to))


def _nansum(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    if not is_float(x.dtype):
        return b.reduce("sum", b.cast(x, to), over)
    if not is_float(to):
        raise LoweringError("dtype", f"expected a sum of numbers that may be NaN in their own kind, found {to}")
    value = b.cast(x, to)
    return b.reduce("sum", b.select(b.apply("isnan", value), 0, value, to), over)


def _count_nonzero(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    return b.reduce("sum", b.cast(b.compare("ne", x, 0), to), over)


def _evaluate_both_ends(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """``aminmax``: the smallest and the largest element."""
    return _over_loops(_kind("max" if output else "min"), cx, op, index)


def _over_loops(function: Any, cx: Context, op: Operation, index: Index) -> Val:
    """A reduction's value from its function, which takes the elements and the loops over them."""
    ref = op.args[0]
    dims, keepdim = reduced_dims(op, len(cx.shape(ref)))
    opened, over = open_dims(cx, ref, dims, keep_index(index, dims, len(cx.shape(ref)), keepdim))
    found: Val = function(cx.builder, op, op.outputs[0].dtype, cx.operand(ref, opened), over, count(cx, ref, dims))
    return found


def _reduction(function: Any) -> Custom:
    return Custom(_infer_reduction, lambda cx, op, output, index: _over_loops(function, cx, op, index))


# ---- the place of an extreme --------------------------------------------------------------------------


def _place(kind: str, where: int) -> Any:
    """``argmax``, ``max.dim`` and the like: output ``where`` is the place, another one the value.

    As in aten, the first of equal elements wins, and the first NaN before all numbers.
    """

    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        b, ref = cx.builder, op.args[0]
        dims, keepdim = reduced_dims(op, len(cx.shape(ref)))
        opened, over = open_dims(cx, ref, dims, keep_index(index, dims, len(cx.shape(ref)), keepdim))
        x = cx.operand(ref, opened)
        most = b.reduce(kind, x, over)
        if output != where:
            return most
        is_found = b.apply("eq", x, most)
        if is_float(x.dtype):
            is_found = b.apply("or", is_found, b.apply("isnan", x))  # beside a NaN no number equals the extreme
        along: Word = tuple(part for d in dims for part in opened[d])
        beyond = b.size(count(cx, ref, dims), "int64")
        return b.reduce("min", b.where(is_found, b.index(along), beyond), over)

    return Custom(_infer_reduction, evaluate)


# ---- softmax ----------------------------------------------------------------------------------------


def _infer_like_first(cx: Context, op: Operation) -> Sequence[Index | None]:
    """Outputs of the first tensor's shape share its loops."""
    ref = op.inputs[0]
    for other in op.inputs[1:]:
        join_same_shape(cx, ref, other)
    return [cx.canonical(ref) if spec.shape == cx.shape(ref) else None for spec in op.outputs]


def join_same_shape(cx: Context, first: ValueRef, other: ValueRef) -> None:
    if cx.shape(first) == cx.shape(other):
        for left, right in zip(cx.canonical(first), cx.canonical(other), strict=True):
            join(left, right)


def _softmax(log: bool, safe: bool) -> Any:
    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        b, ref, to = cx.builder, op.args[0], op.outputs[0].dtype
        dim = normal_dim(int(op.args[1]), max(1, len(index)))
        if not index:  # a 0-d softmax is 1
            return b.const(0 if log else 1, to)
        opened, over = open_dims(cx, ref, (dim,), index)
        row = b.cast(cx.operand(ref, opened), to)
        # NaN reaches every element through the sum; only the safe form tests the maximum itself
        top = b.reduce("max" if safe else "peak", row, over)
        total = b.reduce("sum", b.apply("exp", b.sub(row, top)), over)
        here = b.sub(b.cast(cx.operand(ref, index), to), top)
        if log:
            return b.sub(here, b.apply("log", total))
        share = b.mul(b.apply("exp", here), b.apply("reciprocal", total))
        # a row of nothing but -inf is 0 in the safe form, NaN in the plain one
        return b.select(b.compare("eq", top, -math.inf), 0, share, to) if safe else share

    return evaluate


def _softmax_backward(log: bool) -> Any:
    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        b, (grad, out), to = cx.builder, op.args[:2], "float64" if op.outputs[0].dtype == "float64" else "float32"
        if not index:
            return b.const(0, to)
        dim = normal_dim(int(op.args[2]), len(index))
        opened, over = open_dims(cx, grad, (dim,), index)
        g = b.cast(cx.operand(grad, opened), to)
        y = b.cast(cx.operand(out, opened), to)
        total = b.reduce("sum", g if log else b.mul(g, y), over)
        g, y = b.cast(cx.operand(grad, index), to), b.cast(cx.operand(out, index), to)
        if log:
            return b.sub(g, b.mul(b.apply("exp_nonpositive", y), total))
        return b.mul(b.sub(g, total), y)

    return evaluate


# ---- the table ------------------------------------------------------------------------------------------

_VARIANCE = Custom(_infer_reduction, _evaluate_variance)

REDUCE_RULES: dict[str, Rule] = {
    "aten.sum.dim_IntList": _reduction(_sum),
    "aten.sum.default": _reduction(_sum),
    "aten.mean.dim": _reduction(_mean),
    "aten.mean.default": _reduction(_mean),
    "aten.amax.default": _reduction(_kind("max")),
    "aten.amin.default": _reduction(_kind("min")),
    "aten.prod.dim_int": _reduction(_kind("prod")),
    "aten.any.dim": _reduction(_truth("any")),
    "aten.any.default": _reduction(_truth("any")),
    "aten.all.dim": _reduction(_truth("all")),
    "aten.all.default": _reduction(_truth("all")),
    "aten.any.dims": _reduction(_truth("any")),
    "aten.all.dims": _reduction(_truth("all")),
    "aten.max.default": _reduction(_kind("max")),
    "aten.min.default": _reduction(_kind("min")),
    "aten.aminmax.default": Custom(_infer_reduction, _evaluate_both_ends),
    "aten.argmax.default": _place("max", 0),
    "aten.argmin.default": _place("min", 0),
    "aten.max.dim": _place("max", 1),
    "aten.min.dim": _place("min", 1),
    "aten.prod.default": _reduction(_kind("prod")),
    "aten.nansum.default": _reduction(_nansum),
    "aten.count_nonzero.default": _reduction(_count_nonzero),
    "aten.count_nonzero.dim_IntList": _reduction(_count_nonzero),
    "aten.std_mean.correction": _VARIANCE,
    "aten.norm.Scalar": _reduction(_vector_norm),
    "aten.norm.ScalarOpt_dim": _reduction(_vector_norm),
    "aten.norm.ScalarOpt_dtype": _reduction(_vector_norm),
    "aten.norm.ScalarOpt_dim_dtype": _reduction(_vector_norm),
    "aten.var.correction": _VARIANCE,
    "aten.var_mean.correction": _VARIANCE,
    "aten.std.correction": _VARIANCE,
    "aten.logsumexp.default": _reduction(_logsumexp),
    "aten.linalg_vector_norm.default": _reduction(_vector_norm),
    "aten._softmax.default": Custom(_infer_like_first, _softmax(log=False, safe=False)),
    "aten._log_softmax.default": Custom(_infer_like_first, _softmax(log=True, safe=False)),
    "aten._safe_softmax.default": Custom(_infer_like_first, _softmax(log=False, safe=True)),
    "aten._softmax_backward_data.default": Custom(_infer_like_first, _softmax_backward(log=False)),
    "aten._log_softmax_backward_data.default": Custom(_infer_like_first, _softmax_backward(log=True)),
}
