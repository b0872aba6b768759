"""Lowering rules of norms and of their gradients: layer norm, RMS norm, batch norm, group norm.

In: the index at which a result is wanted. Out: its value; statistics are reductions (`rules_reduce`) over the loops of
the normalised dims. Guarantee: variances are two-pass (mean first, then squared distances), and statistics are rounded
where aten does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Atom, Index, Word, resolve
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_memory import only_where
from autofuse.codegen.lowering.rules_reduce import (
    count,
    drop_dims,
    join_same_shape,
    mean_as_aten,
    open_dims,
    reduced_atoms,
    variance,
)
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import Dim, divide, product

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
        return mean_as_aten(b, var, mean)
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
    join_same_shape(cx, grad, x)
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
    # One multiplication and one addition per element, as eager computes it, NaN and Inf of the parameters included.
    b, to, channel = cx.builder, _wide(op.outputs[0].dtype), (index[1],)
    scale = b.apply("rsqrt", b.add(b.cast(cx.operand(var, channel), to), eps))
    if weight is not None:
        scale = b.mul(scale, b.cast(cx.operand(weight, channel), to))
    offset = b.mul(b.apply("neg", b.cast(cx.operand(mean, channel), to)), scale)
    if bias is not None:
        offset = b.add(offset, b.cast(cx.operand(bias, channel), to))
    return b.add(b.mul(b.cast(cx.operand(x, index), to), scale), offset)


class _Statistics(NamedTuple):
    """The statistics of a channel: biased variance, mean, and what rounding has taken from the mean."""

    var: Val
    mean: Val
    left: Val | None


def _rounded_statistics(b: Builder, var: Val, mean: Val, to: str) -> _Statistics:
    """Statistics in float64, rounded as a tensor of type ``to`` holds them.

    For elements such as -1e5 +- 0.001, the mean's rounding error is larger than the deviation, and luck would decide
    whether eager's error or ours is smaller. ``(x - mean) - left`` has no such error.
    """
    rounded = b.cast(mean, to)
    left = None if to == "float64" else b.cast(b.sub(mean, b.cast(rounded, "float64")), to)
    return _Statistics(b.cast(var, to), rounded, left)


def _channel_statistics(b: Builder, x: Val, over: Sequence[Atom], n: Dim) -> _Statistics:
    """Statistics of a channel, calculated from its elements in float64, as aten does.

    In float32, the mean of 1000 +- 0.001 is rounded so far that the variance is wrong in the third digit. On one core
    of an EPYC, 2026-11, float64 costs 4 to 57 % of six kernels' time, which is then still a quarter to a half of
    eager's.
    """
    var, mean = variance(b, b.cast(x, "float64"), over, n)
    return _rounded_statistics(b, var, mean, x.dtype)


def _shifted_statistics(b: Builder, x: Val, first: Val, over: Sequence[Atom], n: Dim) -> _Statistics:
    """The same in one pass: var = E[(x - k)^2] - E[x - k]^2, with k an element of the channel.

    (mean - k)^2 is at most n var, so the difference loses at most as many of float64's 16 digits as n has: none of
    those that float32 has, up to 1e8 elements. Where channels are neighbours in memory, a block of them fits no cache,
    and each pass less counts.
    """
    wide, k = b.cast(x, "float64"), b.cast(first, "float64")
    k = b.select(b.compare("lt", b.apply("abs", k), math.inf), k, 0, "float64")  # k = Inf would make the mean NaN
    size, off = b.size(n, "float64"), b.sub(wide, k)
    shift = b.div(b.reduce("sum", off, over), size)
    var = b.sub(b.div(b.reduce("sum", b.mul(off, off), over), size), b.mul(shift, shift))
    # Both terms are 0 for equal elements, and rounding must not make the difference negative. NaN stays.
    var = b.select(b.compare("lt", var, 0), 0, var, "float64")
    return _rounded_statistics(b, var, b.add(k, shift), x.dtype)


def _refuse_statistics(cx: Context, op: Operation, output: int) -> None:
    """Refuse statistics that are traced in another dtype than the running ones.

    For 16-bit tensors, torch's tracing and its kernels disagree about that dtype, so eager calculates them.
    """
    running, found = cx.spec(op.args[3]).dtype, op.outputs[output].dtype
    if found != running:
        raise LoweringError("batch_norm", f"expected statistics of {running}, found them traced as {found}")


def _batch_norm_no_stats(cx: Context, op: Operation, output: int, index: Index) -> Val:
    x, weight, bias, training, _momentum, eps = op.args[:6]
    if not training:
        raise LoweringError("batch_norm", "expected training statistics, found training=False without running ones")
    return _batch_norm_training(cx, op, output, index, (x, weight, bias, eps))


def _batch_norm_functional(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """(result, mean, 1 / deviation, new running mean, new running variance); the last takes the unbiased variance."""
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
    fresh = mean if output == 3 else b.mul(var, b.div(size, b.sub(size, 1)))  # NaN for one element, as in aten
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
    """The first element of a channel in the order of its loops; 0 for a channel without elements."""
    b = cx.builder
    with only_where(b, None if isinstance(n, int) else b.compare("gt", b.size(n, "int64"), 0)):
        return cx.operand(x, start)


def _batch_norm_training(cx: Context, op: Operation, output: int, index: Index, args: tuple[Any, ...]) -> Val:
    x, weight, bias, eps = args
    b, to = cx.builder, _wide(op.outputs[0].dtype)
    (var, mean, left), _ = _statistics_at(cx, op, index[0] if output else index[1])
    if output == 1:
        return mean
    rstd = b.apply("rsqrt", b.add(var, eps))
    if output == 2:
        return rstd
    value, channel = b.cast(cx.operand(x, index), to), (index[1],)
    if weight is None or cx.spec(x).device != "cpu":
        off = b.sub(value, mean)
        return _channel_affine(cx, b.mul(off if left is None else b.sub(off, left), rstd), weight, bias, index[1])
    # aten's CPU kernel has one multiplication and one addition: x * scale + (bias - mean * scale). An infinite weight
    # gives NaN by that where (x - mean) * scale would not; with any other, the latter is nearer to float64.
    scale = b.mul(rstd, b.cast(cx.operand(weight, channel), to))
    offset = b.const(0, to) if bias is None else b.cast(cx.operand(bias, channel), to)
    is_finite = b.compare("lt", b.apply("abs", scale), math.inf)
    offset = b.select(is_finite, offset, b.sub(offset, b.mul(mean, scale)), to)
    off = b.sub(value, b.select(is_finite, mean, 0, to))
    if left is not None:
        off = b.sub(off, b.select(is_finite, left, 0, to))
    return b.add(_affine(cx, b.mul(off, rstd), weight, None, channel), offset)


def _infer_batch_norm_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    join_same_shape(cx, op.args[0], op.args[1])
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
        return mean_as_aten(b, var, mean)
    rstd = b.apply("rsqrt", b.add(var, eps))
    if output == 2:
        return rstd
    here = b.mul(b.sub(b.cast(cx.operand(x, index), to), mean), rstd)
    return _channel_affine(cx, here, weight, bias, index[1])


def _infer_group_norm_backward(cx: Context, op: Operation) -> Sequence[Index | None]:
    join_same_shape(cx, op.args[0], op.args[1])
    index = cx.canonical(op.args[0])
    return [index, (index[1],), (index[1],)]


def _group_norm_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """Gradients of (x - mean) * rstd * weight + bias with statistics of a group: of x, of the weight, of the bias.

    aten's formula, with ds = sum(g x) and db = sum(g) where g has the weight in it: an infinite element makes the same
    elements NaN as there.
    """
    grad, x, mean, rstd, weight, _, channels, elements, groups = op.args[:9]
    b, to = cx.builder, _wide(cx.spec(x).dtype)
    each = count_div(channels, groups)

    def at(place: Index) -> tuple[Val, Val]:
        return b.cast(cx.operand(grad, place), to), b.cast(cx.operand(x, place), to)

    def statistics(place: Index) -> tuple[Val, Val]:
        row = (place[0], cx.regroup_word(place[1], (groups, each))[0])
        return b.cast(cx.operand(mean, row), to), b.cast(cx.operand(rstd, row), to)

    if output > 0:  # weight and bias: all but the channels is reduced
        rank = len(cx.shape(x))
        start = tuple(index[0] if d == 1 else () for d in range(rank))
        opened, over = open_dims(cx, grad, [d for d in range(rank) if d != 1], start)
        (g, value), (middle, scale) = at(opened), statistics(opened)
        product_here = b.mul(b.sub(b.mul(g, value), b.mul(g, middle)), scale)
        return b.reduce("sum", product_here if output == 1 else g, over)

    def weighted(place: Index) -> tuple[Val, Val]:
        g, value = at(place)
        return (g if weight is None else b.mul(g, b.cast(cx.operand(weight, (place[1],)), to))), value

    canonical = cx.canonical(grad)
    group, _ = cx.regroup_word(index[1], (groups, each))
    _, inner = cx.regroup_word(canonical[1], (groups, each))
    if set(resolve(inner)) & set(resolve(group)):
        raise LoweringError("reduction", "expected loops of their own for a group's channels, found shared")
    over = reduced_atoms([inner, *canonical[2:]])
    g, value = weighted((index[0], (*group, *inner), *canonical[2:]))
    products, total = b.reduce("sum", b.mul(g, value), over), b.reduce("sum", g, over)
    middle, scale = statistics(index)
    share = b.div(b.const(1, to), b.size(product((elements, each)), to))
    of_x = b.mul(b.mul(b.sub(b.mul(total, middle), products), b.mul(scale, b.mul(scale, scale))), share)
    rest = b.sub(b.apply("neg", b.mul(of_x, middle)), b.mul(b.mul(total, scale), share))
    g, value = weighted(index)
    return b.add(b.add(b.mul(g, scale), b.mul(of_x, value)), rest)


# ---- the table ------------------------------------------------------------------------------------------

NORM_RULES: dict[str, Rule] = {
    "aten.native_layer_norm.default": Custom(_infer_norm, _layer_norm),
    "aten.native_layer_norm_backward.default": Custom(_infer_norm_backward, _layer_norm_backward),
    "aten._fused_rms_norm.default": Custom(_infer_norm, _rms_norm),
    "aten._fused_rms_norm_backward.default": Custom(_infer_norm_backward, _rms_norm_backward),
    "aten._native_batch_norm_legit_no_training.default": Custom(_infer_batch_norm, _batch_norm_inference),
    "aten._native_batch_norm_legit.no_stats": Custom(_infer_batch_norm, _batch_norm_no_stats),
    "aten._native_batch_norm_legit_functional.default": Custom(_infer_batch_norm, _batch_norm_functional),
    "aten.native_batch_norm_backward.default": Custom(_infer_batch_norm_backward, _batch_norm_backward),
    "aten.native_group_norm.default": Custom(_infer_group_norm, _group_norm),
    "aten.native_group_norm_backward.default": Custom(_infer_group_norm_backward, _group_norm_backward),
}
