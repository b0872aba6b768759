"""Lowering rules of views and creation: index remaps, positions and constants; no memory is touched.

In: the index at which a result is wanted. Out: the index of the source, or a value made from positions.
Guarantee: a view costs nothing inside a kernel; one whose groups of dims cannot be matched provably is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Number, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, fresh_index, regroup
from autofuse.codegen.lowering.rules_base import Custom, View, infer_broadcast, normal_dim
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import SymbolicShape

# ---- views ------------------------------------------------------------------------------------------


def _view_forward(cx: Context, op: Operation, index: Index) -> Index:
    return regroup(index, op.outputs[0].shape)


def _view_backward(cx: Context, op: Operation, index: Index) -> Index:
    return regroup(index, cx.shape(op.args[0]))


def _place(index: Index, source: SymbolicShape, target: SymbolicShape) -> Index:
    """Squeeze and unsqueeze only add or drop dims of size 1: the other words keep their order."""
    words = iter(word for word, dim in zip(index, source, strict=True) if dim != 1)
    return tuple(() if dim == 1 else next(words) for dim in target)


def _squeeze_forward(cx: Context, op: Operation, index: Index) -> Index:
    return _place(index, cx.shape(op.args[0]), op.outputs[0].shape)


def _squeeze_backward(cx: Context, op: Operation, index: Index) -> Index:
    return _place(index, op.outputs[0].shape, cx.shape(op.args[0]))


def _expand_forward(cx: Context, op: Operation, index: Index) -> Index:
    return infer_broadcast(cx, op)


def _expand_backward(cx: Context, op: Operation, index: Index) -> Index:
    source = cx.shape(op.args[0])
    tail = index[len(index) - len(source) :] if len(source) else ()
    return tuple(() if dim == 1 else word for dim, word in zip(source, tail, strict=True))


def _order(op: Operation, rank: int) -> tuple[int, ...]:
    """Source dim of each result dim."""
    name = op.short_name.removesuffix("_copy")
    if name == "permute":
        return tuple(normal_dim(int(d), rank) for d in op.args[1])
    order = list(range(rank))
    first, second = (0, 1) if name == "t" else (normal_dim(int(d), rank) for d in op.args[1:3])
    if rank >= 2 or name != "t":
        order[first], order[second] = order[second], order[first]
    return tuple(order)


def _permute_forward(cx: Context, op: Operation, index: Index) -> Index:
    return tuple(index[d] for d in _order(op, len(index)))


def _permute_backward(cx: Context, op: Operation, index: Index) -> Index:
    words: list[Any] = [()] * len(index)
    for position, source in enumerate(_order(op, len(index))):
        words[source] = index[position]
    return tuple(words)


def _same(cx: Context, op: Operation, index: Index) -> Index:
    return index


# ---- creation -----------------------------------------------------------------------------------------


def _fresh(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [fresh_index(op.outputs[0].shape)]


def _like(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [cx.canonical(op.args[0])]


def _constant(argument: int | None, number: Number = 0) -> Any:
    """The value of a constant tensor: an argument of the operator, or always the same number."""

    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        value = number if argument is None else op.arg(argument, dict(op.kwargs).get("fill_value", number))
        b, to = cx.builder, op.outputs[0].dtype
        return b.round_to(b.cast(value, to), to)

    return evaluate


def _arange(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """start + step x position; floating ranges are calculated in double, as aten does."""
    b, to = cx.builder, op.outputs[0].dtype
    start = op.args[0] if op.target != "aten.arange.default" else 0
    step = op.arg(2, dict(op.kwargs).get("step", 1)) if op.target == "aten.arange.start_step" else 1
    floating = to.startswith(("float", "bfloat"))
    wide = "float64" if floating else "int64"
    position = b.cast(b.index(index[0]), wide)
    moved = position if step == 1 else b.mul(position, step)
    return b.cast(moved if start == 0 else b.add(moved, start), to)


def _linspace(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """Steps from the start in the first half, back from the end in the second, as in aten, calculated in double."""
    b, to = cx.builder, op.outputs[0].dtype
    start, end, steps = op.args[:3]
    if not is_float(to):
        raise LoweringError("dtype", f"expected floating-point numbers, found {to}, whose rounding is eager's own")
    first, last, count = b.const(start, to), b.const(end, to), b.size(steps, "float64")
    first, last = (b.cast(b.round_to(edge, to), "float64") for edge in (first, last))
    step = b.div(b.sub(last, first), b.sub(count, 1))
    position = b.cast(b.index(index[0]), "float64")
    rising = b.add(first, b.mul(step, position))
    falling = b.sub(last, b.mul(step, b.sub(b.sub(count, position), 1)))
    found = b.where(b.apply("lt", b.add(b.mul(position, 2), 1), count), rising, falling)
    return b.round_to(b.cast(b.where(b.compare("eq", position, 0), first, found), to), to)  # one step has no size


def _eye(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, to = cx.builder, op.outputs[0].dtype
    return b.select(b.apply("eq", b.index(index[0]), b.index(index[1])), 1, 0, to)


def _filled(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """One element of a tensor, everywhere."""
    b, to = cx.builder, op.outputs[0].dtype
    return b.round_to(b.cast(cx.operand(op.args[1], ()), to), to)


def _triangle(op_name: str) -> Any:
    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        b = cx.builder
        diagonal = op.arg(1, dict(op.kwargs).get("diagonal", 0))
        row, col = b.index(index[-2]), b.index(index[-1])
        limit = row if diagonal == 0 else b.add(row, diagonal)
        keep = b.apply("le" if op_name == "tril" else "ge", col, limit)
        return b.select(keep, cx.operand(op.args[0], index), 0, op.outputs[0].dtype)

    return evaluate


def _unset(cx: Context, op: Operation, output: int, index: Index) -> Val:
    raise LoweringError("empty", f"expected memory that is only filled, found that {op.name} is read")


_VIEW = View(_view_forward, _view_backward)
_SQUEEZE = View(_squeeze_forward, _squeeze_backward)
_PERMUTE = View(_permute_forward, _permute_backward)

INDEX_RULES: dict[str, Rule] = {
    "aten.view.default": _VIEW,
    "aten._unsafe_view.default": _VIEW,
    "aten.reshape.default": _VIEW,
    "aten.unsqueeze.default": _SQUEEZE,
    "aten.squeeze.default": _SQUEEZE,
    "aten.squeeze.dim": _SQUEEZE,
    "aten.squeeze.dims": _SQUEEZE,
    "aten.expand.default": View(_expand_forward, _expand_backward),
    "aten.permute.default": _PERMUTE,
    "aten.transpose.int": _PERMUTE,
    "aten.t.default": _PERMUTE,
    "aten.alias.default": View(_same, _same),
    "aten.detach.default": View(_same, _same),
    "aten.full.default": Custom(_fresh, _constant(1), counts=False),
    "aten.scalar_tensor.default": Custom(_fresh, _constant(0), counts=False),
    "aten.zeros.default": Custom(_fresh, _constant(None, 0), counts=False),
    "aten.ones.default": Custom(_fresh, _constant(None, 1), counts=False),
    "aten.empty_like.default": Custom(_like, _unset, counts=False),
    "aten.full_like.default": Custom(_like, _constant(1), counts=False),
    "aten.zeros_like.default": Custom(_like, _constant(None, 0), counts=False),
    "aten.ones_like.default": Custom(_like, _constant(None, 1), counts=False),
    "aten.arange.default": Custom(_fresh, _arange),
    "aten.arange.start": Custom(_fresh, _arange),
    "aten.arange.start_step": Custom(_fresh, _arange),
    "aten.linspace.default": Custom(_fresh, _linspace),
    "aten.eye.default": Custom(_fresh, _eye),
    "aten.eye.m": Custom(_fresh, _eye),
    "aten.new_full.default": Custom(_fresh, _constant(2), counts=False),
    "aten.new_zeros.default": Custom(_fresh, _constant(None, 0), counts=False),
    "aten.new_ones.default": Custom(_fresh, _constant(None, 1), counts=False),
    "aten.zero.default": Custom(_like, _constant(None, 0), counts=False),
    "aten.fill.Scalar": Custom(_like, _constant(1), counts=False),
    "aten.fill.Tensor": Custom(_like, _filled, counts=False),
    "aten.tril.default": Custom(_like, _triangle("tril")),
    "aten.triu.default": Custom(_like, _triangle("triu")),
}
