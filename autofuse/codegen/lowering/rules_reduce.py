"""Lowering rules of reductions and of the norms built on them.

In: the index at which a result is wanted. Out: its value, with `reduce` nodes over the loops of the reduced dims.
Guarantee: variances are two-pass (mean first, then squared distances), softmax subtracts the row's maximum,
and NaN propagates through max and min as it does in aten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from autofuse.codegen.lowering.builder import Builder, Number, Val
from autofuse.codegen.lowering.index import Atom, Index, Indirect, Word, join, resolve
from autofuse.codegen.lowering.rules_base import Custom, Rule, normal_dim, normal_dims
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import Dim, divide, product

if TYPE_CHECKING:
    from autofuse.codegen.lowering.lower import Context


def reduced_atoms(words: Sequence[Word]) -> tuple[Atom, ...]:
    """Loops of the words that are reduced; an indirect index cannot be."""
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
    """The index of a reduction's source, empty where it was reduced, from the index of its result."""
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


def _arguments(cx: Context, op: Operation) -> tuple[tuple[int, ...], bool]:
    """Reduced dims and keepdim, wherever the overload has them."""
    rank = len(cx.shape(op.args[0]))
    named = dict(op.kwargs)
    if op.target.endswith(".default") and op.short_name in ("sum", "mean", "any", "all"):
        return tuple(range(rank)), False
    at = 2 if op.short_name == "linalg_vector_norm" else 1
    dims = named.get("dim", op.arg(at))
    keepdim = named.get("keepdim", op.arg(at + 1, False))
    return normal_dims(dims, rank), bool(keepdim)


def _infer_reduction(cx: Context, op: Operation) -> Sequence[Index | None]:
    dims, keepdim = _arguments(cx, op)
    return [drop_dims(cx.canonical(op.args[0]), dims, keepdim)] * len(op.outputs)


def _sum(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    return b.reduce("sum", b.cast(x, to), over)


def _mean(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    return b.div(b.reduce("sum", b.cast(x, to), over), b.size(n, to))


def _kind(kind: str) -> Any:
    return lambda b, op, to, x, over, n: b.reduce(kind, b.cast(x, to), over)


def variance(b: Builder, x: Val, over: Sequence[Atom], n: Dim, correction: Number = 0) -> tuple[Val, Val]:
    """Variance and mean, two passes."""
    mean = b.div(b.reduce("sum", x, over), b.size(n, x.dtype))
    off = b.sub(x, mean)
    squares = b.reduce("sum", b.mul(off, off), over)
    freedom = b.size(n, x.dtype)
    if correction != 0:
        freedom = b.apply("maximum", b.sub(freedom, correction), b.const(0, x.dtype))
    return b.div(squares, freedom), mean


def _mean_as_aten(b: Builder, var: Val, mean: Val) -> Val:
    """aten's running mean turns an infinite element into NaN."""
    return b.select(b.apply("isnan", var), math.nan, mean, mean.dtype)


def _evaluate_variance(cx: Context, op: Operation, output: int, index: Index) -> Val:
    dims, keepdim = _arguments(cx, op)
    ref = op.args[0]
    opened, over = open_dims(cx, ref, dims, keep_index(index, dims, len(cx.shape(ref)), keepdim))
    correction = op.kwarg("correction", op.arg(2))
    b = cx.builder
    x = b.cast(cx.operand(ref, opened), "float64")  # aten accumulates these in double, unlike its norms
    var, mean = variance(b, x, over, count(cx, ref, dims), 1 if correction is None else correction)
    if output == 1:
        return b.cast(_mean_as_aten(b, var, mean), op.outputs[1].dtype)
    return b.cast(b.apply("sqrt", var) if op.short_name == "std" else var, op.outputs[0].dtype)


def _logsumexp(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    value = b.cast(x, to)
    top = b.reduce("peak", value, over)  # NaN reaches the result through the sum
    # an infinite maximum would make inf - inf: aten subtracts 0 instead
    shift = b.select(b.compare("eq", b.apply("abs", top), math.inf), 0, top, to)
    total = b.reduce("sum", b.apply("exp", b.sub(value, shift)), over)
    return b.add(b.apply("log", total), shift)


def _vector_norm(b: Builder, op: Operation, to: str, x: Val, over: Sequence[Atom], n: Dim) -> Val:
    order: Any = dict(op.kwargs).get("ord", op.arg(1, 2))
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


def _reduction(function: Any) -> Custom:
    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        dims, keepdim = _arguments(cx, op)
        ref = op.args[0]
        opened, over = open_dims(cx, ref, dims, keep_index(index, dims, len(cx.shape(ref)), keepdim))
        found: Val = function(cx.builder, op, op.outputs[0].dtype, cx.operand(ref, opened), over, count(cx, ref, dims))
        return found

    return Custom(_infer_reduction, evaluate)


# ---- softmax ----------------------------------------------------------------------------------------


def _infer_like_first(cx: Context, op: Operation) -> Sequence[Index | None]:
    """Outputs of the first tensor's shape share its loops."""
    ref = op.inputs[0]
    for other in op.inputs[1:]:
        _join_same_shape(cx, ref, other)
    return [cx.canonical(ref) if spec.shape == cx.shape(ref) else None for spec in op.outputs]


def _join_same_shape(cx: Context, first: ValueRef, other: ValueRef) -> None:
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
            return b.sub(g, b.mul(b.apply("exp", y), total))
        return b.mul(b.sub(g, total), y)

    return evaluate


# ---- layer norm, RMS norm -----------------------------------------------------------------------------


def _trailing(cx: Context, ref: ValueRef, normalized: Sequence[Any]) -> tuple[int, ...]:
    rank = len(cx.shape(ref))
    return tuple(range(rank - len(normalized), rank))


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _infer_norm(cx: Context, op: Operation) -> Sequence[Index | None]:
    """(out, statistics...): statistics keep the normalised dims as size 1."""
    x = op.args[0]
    index, dims = cx.canonical(x), _trailing(cx, x, op.args[1])
    return [index, *[drop_dims(index, dims, keepdim=True)] * (len(op.outputs) - 1)]


def _affine(cx: Context, value: Val, weight: ValueRef | None, bias: ValueRef | None, index: Index) -> Val:
    b = cx.builder
    if weight is not None:
        value = b.mul(value, b.cast(cx.operand(weight, index), value.dtype))
    return value if bias is None else b.add(value, b.cast(cx.operand(bias, index), value.dtype))


def _layer_norm(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, normalized, weight, bias, eps = op.args[:5]
    b, dims, to = cx.builder, _trailing(cx, x, normalized), _wide(op.outputs[0].dtype)
    opened, over = open_dims(cx, x, dims, index)
    var, mean = variance(b, b.cast(cx.operand(x, opened), to), over, count(cx, x, dims))
    if output == 1:
        return _mean_as_aten(b, var, mean)
    rstd = b.apply("rsqrt", b.add(var, eps))
    if output == 2:
        return rstd
    here = b.mul(b.sub(b.cast(cx.operand(x, index), to), mean), rstd)
    return _affine(cx, here, weight, bias, index[dims[0] :])


def _rms_norm(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, normalized, weight = op.args[:3]
    eps = op.arg(3)
    b, dims, to = cx.builder, _trailing(cx, x, normalized), _wide(op.outputs[0].dtype)
    if eps is None:
        eps = {"float64": 2.220446049250313e-16, "float32": 1.1920928955078125e-07}[to]
    opened, over = open_dims(cx, x, dims, index)
    row = b.cast(cx.operand(x, opened), to)
    square = b.div(b.reduce("sum", b.mul(row, row), over), b.size(count(cx, x, dims), to))
    rstd = b.apply("rsqrt", b.add(square, eps))
    if output == 1:
        return rstd
    here = b.mul(b.cast(cx.operand(x, index), to), rstd)
    return _affine(cx, here, weight, None, index[dims[0] :])


def _infer_norm_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    grad, x, normalized = op.args[:3]
    _join_same_shape(cx, grad, x)
    index = cx.canonical(grad)
    dims = _trailing(cx, x, normalized)
    return [index, *[index[dims[0] :]] * (len(op.outputs) - 1)]


def _norm_gradient(
    cx: Context, op: Operation, output: int, index: Index, stats: tuple[ValueRef | None, ValueRef], weight: Any
) -> Val:
    """Gradients of (x - mean) * rstd * weight + bias; without a mean, those of an RMS norm."""
    grad, x, normalized = op.args[:3]
    mean, rstd = stats
    b, dims, to = cx.builder, _trailing(cx, x, normalized), _wide(cx.spec(x).dtype)
    lead = tuple(range(dims[0]))

    def at(place: Index) -> tuple[Val, Val, Val]:
        row = tuple(() if d in dims else w for d, w in enumerate(place))
        scale = b.cast(cx.operand(rstd, row), to)
        off = b.cast(cx.operand(x, place), to)
        if mean is not None:
            off = b.sub(off, b.cast(cx.operand(mean, row), to))
        return b.cast(cx.operand(grad, place), to), b.mul(off, scale), scale

    if output > 0:  # weight and bias: reduce over the leading dims
        opened, over = open_dims(cx, grad, lead, (*[()] * len(lead), *index))
        g, normal, _ = at(opened)
        return b.reduce("sum", b.mul(g, normal) if output == 1 else g, over)

    def scaled(place: Index) -> tuple[Val, Val, Val]:
        g, normal, scale = at(place)
        return (g if weight is None else b.mul(g, b.cast(cx.operand(weight, place[dims[0] :]), to))), normal, scale

    opened, over = open_dims(cx, grad, dims, index)
    g, normal, scale = scaled(opened)
    n = b.size(count(cx, x, dims), to)
    along = b.div(b.reduce("sum", b.mul(g, normal), over), n)
    mean_grad = b.div(b.reduce("sum", g, over), n) if mean is not None else None
    g, normal, scale = scaled(index)
    inner = b.sub(g, b.mul(normal, along))
    if mean_grad is not None:
        inner = b.sub(inner, mean_grad)
    return b.mul(scale, inner)


def _layer_norm_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    return _norm_gradient(cx, op, output, index, (op.args[3], op.args[4]), op.args[5])


def _rms_norm_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    return _norm_gradient(cx, op, output, index, (None, op.args[3]), op.args[4])


# ---- batch norm, group norm ---------------------------------------------------------------------------


def _infer_batch_norm(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    return [index, *[(index[1],)] * (len(op.outputs) - 1)]


def _channel_affine(cx: Context, value: Val, weight: Any, bias: Any, word: Word) -> Val:
    return _affine(cx, value, weight, bias, (word,))


def _batch_norm_inference(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, weight, bias, mean, var = op.args[:5]
    eps = op.args[6]
    if output > 0:
        raise LoweringError("empty", "expected only the first output of inference batch norm, found the empty ones")
    # One product and one sum an element, as eager computes it, NaN and Inf of the parameters included.
    b, to, channel = cx.builder, _wide(op.outputs[0].dtype), (index[1],)
    scale = b.apply("rsqrt", b.add(b.cast(cx.operand(var, channel), to), eps))
    if weight is not None:
        scale = b.mul(scale, b.cast(cx.operand(weight, channel), to))
    offset = b.mul(b.apply("neg", b.cast(cx.operand(mean, channel), to)), scale)
    if bias is not None:
        offset = b.add(offset, b.cast(cx.operand(bias, channel), to))
    return b.add(b.mul(b.cast(cx.operand(x, index), to), scale), offset)


class _Statistics(NamedTuple):
    """Of a channel: biased variance, mean, and what is left of the mean once it is rounded."""

    var: Val
    mean: Val
    left: Val | None


def _rounded_statistics(b: Builder, var: Val, mean: Val, to: str) -> _Statistics:
    """Statistics in double as a tensor of type ``to`` holds them.

    Of -1e5 +- 0.001 the mean's rounding is larger than the deviation, and whether eager's error or ours is the smaller
    would be luck: ``(x - mean) - left`` has none.
    """
    rounded = b.cast(mean, to)
    left = None if to == "float64" else b.cast(b.sub(mean, b.cast(rounded, "float64")), to)
    return _Statistics(b.cast(var, to), rounded, left)


def _channel_statistics(b: Builder, x: Val, over: Sequence[Atom], n: Dim) -> _Statistics:
    """Statistics of a channel from its elements in double, as aten's.

    In float32, 1000 +- 0.001 has a mean whose rounding makes the variance wrong in the third digit. On one core of an
    EPYC, 2026-11, double costs 4 to 57 % of six kernels' time, which is then still a quarter to a half of eager's.
    """
    var, mean = variance(b, b.cast(x, "float64"), over, n)
    return _rounded_statistics(b, var, mean, x.dtype)


def _shifted_statistics(b: Builder, x: Val, first: Val, over: Sequence[Atom], n: Dim) -> _Statistics:
    """The same in one pass: var = E[(x - k)^2] - E[x - k]^2, with k an element of the channel.

    (mean - k)^2 is at most n var, so at most the digits of n are lost of double's 16: none that float32 has, up to 1e8
    elements. Where channels are neighbours in memory, a block of them fits no cache, and a pass less counts.
    """
    wide, k = b.cast(x, "float64"), b.cast(first, "float64")
    k = b.select(b.compare("lt", b.apply("abs", k), math.inf), k, 0, "float64")  # the mean of a channel with Inf is Inf
    size, off = b.size(n, "float64"), b.sub(wide, k)
    shift = b.div(b.reduce("sum", off, over), size)
    var = b.sub(b.div(b.reduce("sum", b.mul(off, off), over), size), b.mul(shift, shift))
    # Of equal elements both terms are 0; rounding must not make less of it. NaN stays.
    var = b.select(b.compare("lt", var, 0), 0, var, "float64")
    return _rounded_statistics(b, var, b.add(k, shift), x.dtype)


def _refuse_statistics(cx: Context, op: Operation, output: int) -> None:
    """Where torch's tracing gives statistics of 16-bit tensors another dtype than its kernels do, eager's stay."""
    running, found = cx.spec(op.args[3]).dtype, op.outputs[output].dtype
    if found != running:
        raise LoweringError("batch_norm", f"expected statistics of {running}, found them traced as {found}")


def _batch_norm_no_stats(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, weight, bias, training, _momentum, eps = op.args[:6]
    if not training:
        raise LoweringError("batch_norm", "expected training statistics, found training=False without running ones")
    return _batch_norm_training(cx, op, output, index, (x, weight, bias, eps))


def _batch_norm_functional(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """(result, mean, 1/deviation, new running mean, new running variance); the last has n - 1 below it."""
    x, weight, bias, running_mean, running_var, training, momentum, eps = op.args[:8]
    if not training:
        raise LoweringError("batch_norm", "expected training, found running statistics that are to be used")
    if output > 0:
        _refuse_statistics(cx, op, output)
    if output < 3:
        return _batch_norm_training(cx, op, output, index, (x, weight, bias, eps))
    b, to = cx.builder, _wide(op.outputs[0].dtype)
    (var, mean, _), n = _statistics_at(cx, op, index[0])
    size = b.size(n, to)
    fresh = mean if output == 3 else b.mul(var, b.div(size, b.sub(size, 1)))  # of one element NaN, as in aten
    old = b.cast(cx.operand(running_mean if output == 3 else running_var, index), to)
    return b.add(b.mul(fresh, momentum), b.mul(old, 1 - momentum))


def _statistics_at(cx: Context, op: Operation, channel: Word) -> tuple[_Statistics, Dim]:
    """Statistics of a channel, and how many elements it has."""
    x = op.args[0]
    rank = len(cx.shape(x))
    dims = tuple(d for d in range(rank) if d != 1)
    start = tuple(channel if d == 1 else () for d in range(rank))
    opened, over = open_dims(cx, x, dims, start)
    n, b, to = count(cx, x, dims), cx.builder, _wide(op.outputs[0].dtype)
    values = b.cast(cx.operand(x, opened), to)
    spec = cx.spec(x)
    if spec.device != "cpu" or spec.strides[1] != 1 or to == "float64":
        return _channel_statistics(b, values, over, n), n
    return _shifted_statistics(b, values, b.cast(_first_element(cx, x, start, n), to), over, n), n


def _first_element(cx: Context, x: ValueRef, start: Index, n: Dim) -> Val:
    """The element of a channel with which its loops begin; 0 where there is none to read."""
    b = cx.builder
    outer = b.guard
    if not isinstance(n, int):
        some = b.compare("gt", b.size(n, "int64"), 0)
        b.guard = some if outer is None else b.apply("and", outer, some)
    found = cx.operand(x, start)
    b.guard = outer
    return found


def _batch_norm_training(cx: Context, op: Operation, output: int, index: Index, args: tuple[Any, ...]) -> Val:
    x, weight, bias, eps = args
    b, to = cx.builder, _wide(op.outputs[0].dtype)
    (var, mean, left), _ = _statistics_at(cx, op, index[0] if output else index[1])
    if output == 1:
        return mean
    rstd = b.apply("rsqrt", b.add(var, eps))
    if output == 2:
        return rstd
    off = b.sub(b.cast(cx.operand(x, index), to), mean)
    here = b.mul(off if left is None else b.sub(off, left), rstd)
    return _channel_affine(cx, here, weight, bias, index[1])


def _infer_batch_norm_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    _join_same_shape(cx, op.args[0], op.args[1])
    return _infer_batch_norm(cx, op)


def _batch_norm_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    grad, x, weight, running_mean, running_var, save_mean, save_rstd, train, eps = op.args[:9]
    rank = len(cx.shape(x))
    dims = tuple(d for d in range(rank) if d != 1)
    b, to = cx.builder, _wide(cx.spec(x).dtype)
    place = index if output == 0 else tuple(index[0] if d == 1 else () for d in range(rank))
    channel = (place[1],)
    if train:
        mean, rstd = (b.cast(cx.operand(r, channel), to) for r in (save_mean, save_rstd))
    else:
        mean = b.cast(cx.operand(running_mean, channel), to)
        rstd = b.apply("rsqrt", b.add(b.cast(cx.operand(running_var, channel), to), eps))

    def at(spot: Index) -> tuple[Val, Val]:
        off = b.sub(b.cast(cx.operand(x, spot), to), mean)
        return b.cast(cx.operand(grad, spot), to), b.mul(off, rstd)

    opened, over = open_dims(cx, grad, dims, place)
    g, normal = at(opened)
    if output > 0:
        return b.reduce("sum", b.mul(g, normal) if output == 1 else g, over)
    scale = rstd if weight is None else b.mul(rstd, b.cast(cx.operand(weight, channel), to))
    if not train:
        return b.mul(b.cast(cx.operand(grad, index), to), scale)
    n = b.size(count(cx, x, dims), to)
    along = b.div(b.reduce("sum", b.mul(g, normal), over), n)
    mean_grad = b.div(b.reduce("sum", g, over), n)
    g, normal = at(index)
    return b.mul(b.sub(b.sub(g, b.mul(normal, along)), mean_grad), scale)


def _groups(cx: Context, op: Operation, word: Word) -> Index:
    """The channel loops as (group, channel in group)."""
    channels, groups = op.args[4], op.args[6]
    return cx.regroup_word(word, (groups, count_div(channels, groups)))


def count_div(total: Dim, by: Dim) -> Dim:
    quotient = divide(total, by)
    if quotient is None:
        raise LoweringError("sizes", f"expected {total} channels to divide into {by} groups, found a remainder")
    return quotient


def _infer_group_norm(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    group, _ = _groups(cx, op, index[1])
    return [index, (index[0], group), (index[0], group)]


def _group_norm(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, weight, bias = op.args[:3]
    eps = op.args[7]
    b, to = cx.builder, _wide(op.outputs[0].dtype)
    canonical = cx.canonical(x)
    group = index[1] if output else _groups(cx, op, index[1])[0]
    inner = _groups(cx, op, canonical[1])[1]
    if set(resolve(inner)) & set(resolve(group)):
        raise LoweringError("reduction", "expected loops of their own for a group's channels, found shared")
    opened = (index[0], (*group, *inner), *canonical[2:])
    over = reduced_atoms([inner, *canonical[2:]])
    n = product((op.args[5], count_div(op.args[4], op.args[6])))
    var, mean = variance(b, b.cast(cx.operand(x, opened), to), over, n)
    if output == 1:
        return _mean_as_aten(b, var, mean)
    rstd = b.apply("rsqrt", b.add(var, eps))
    if output == 2:
        return rstd
    here = b.mul(b.sub(b.cast(cx.operand(x, index), to), mean), rstd)
    return _channel_affine(cx, here, weight, bias, index[1])


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
    "aten.any.dim": _reduction(_kind("any")),
    "aten.any.default": _reduction(_kind("any")),
    "aten.all.dim": _reduction(_kind("all")),
    "aten.all.default": _reduction(_kind("all")),
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
    "aten.native_layer_norm.default": Custom(_infer_norm, _layer_norm),
    "aten.native_layer_norm_backward.default": Custom(_infer_norm_backward, _layer_norm_backward),
    "aten._fused_rms_norm.default": Custom(_infer_norm, _rms_norm),
    "aten._fused_rms_norm_backward.default": Custom(_infer_norm_backward, _rms_norm_backward),
    "aten._native_batch_norm_legit_no_training.default": Custom(_infer_batch_norm, _batch_norm_inference),
    "aten._native_batch_norm_legit.no_stats": Custom(_infer_batch_norm, _batch_norm_no_stats),
    "aten._native_batch_norm_legit_functional.default": Custom(_infer_batch_norm, _batch_norm_functional),
    "aten.native_batch_norm_backward.default": Custom(_infer_batch_norm_backward, _batch_norm_backward),
    "aten.native_group_norm.default": Custom(_infer_group_norm, _group_norm),
}
