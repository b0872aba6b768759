"""Lowering rules of operators that look values up in a tensor: bucketize, searchsorted; and of masked reads.

In: the index at which a result is wanted. Out: the place of a value among sorted ones, or an element of a table where a
mask is true. Guarantee: a search takes aten's steps, so that NaN and sequences that are not sorted give what they give
there. The steps are written out one by one, so the number of elements that are searched must be known.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect, Word, broadcast_index
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_indexed import (
    check_index,
    check_table,
    clamped_place,
    index_layout,
    joined_indices,
)
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef

_MOST_SEARCHED = 1 << 20  # elements of a row: 21 steps

# ---- search in sorted rows -------------------------------------------------------------------------------


def _sorted_and_values(op: Operation) -> tuple[ValueRef, ValueRef]:
    first, second = op.args[:2]
    return (second, first) if op.short_name == "bucketize" else (first, second)


def _infer_search(cx: Context, op: Operation) -> Sequence[Index | None]:
    row, values = _sorted_and_values(op)
    if dict(op.kwargs).get("sorter") is not None:
        raise LoweringError("table", "expected a sorted sequence, found an order of it")
    size = cx.shape(row)[-1]
    if not isinstance(size, int) or not 0 < size <= _MOST_SEARCHED:
        raise LoweringError("size", f"expected a known number of elements to search, found {size}")
    if cx.spec(row).dtype != cx.spec(values).dtype:
        raise LoweringError("dtype", f"expected values of {cx.spec(row).dtype}, found {cx.spec(values).dtype}")
    check_table(cx, row)
    return [cx.canonical(values)]


def _search(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The first place of an element that is not less than the value; to the right, that is greater."""
    row, values = _sorted_and_values(op)
    named, b = dict(op.kwargs), cx.builder
    is_right = bool(named.get("right", False)) or named.get("side") == "right"
    size = int(cx.shape(row)[-1])
    lead = index[:-1] if len(cx.shape(row)) > 1 else ()
    value = cx.operand(values, index)
    low, high = b.const(0, "int64"), b.const(size, "int64")
    for _ in range(size.bit_length()):
        half = b.apply("floor", b.mul(b.cast(b.add(low, high), "float64"), 0.5))
        middle = b.cast(half, "int64")
        word: Word = (Indirect(b.apply("minimum", middle, b.const(size - 1, "int64")), size),)
        is_beyond = b.apply("not", b.apply("gt" if is_right else "ge", cx.operand(row, (*lead, word)), value))
        is_open = b.apply("lt", low, high)
        low, high = (
            b.where(b.apply("and", is_open, is_beyond), b.add(middle, 1), low),
            b.where(b.apply("and", is_open, b.apply("not", is_beyond)), middle, high),
        )
    return b.cast(low, op.outputs[0].dtype)


# ---- masked reads ------------------------------------------------------------------------------------------


def _infer_masked(cx: Context, op: Operation) -> Sequence[Index | None]:
    table, mask, indices = op.args[:3]
    layout = index_layout(cx, op, indices)
    if cx.spec(mask).dtype != "bool" or any(dim == 0 for dim in cx.shape(table)):
        raise LoweringError("indices", "expected a mask of bool and a tensor with elements, found others")
    check_table(cx, table)
    for d in layout.indexed:
        check_index(cx, op, indices[d], cx.shape(table)[d])
    kept = [word for d, word in enumerate(cx.canonical(table)) if d not in layout.indexed]
    return [(*kept[: layout.first], *joined_indices(cx, indices, layout), *kept[layout.first :])]


def _masked(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """Places are clamped, so none is out of bounds; where the mask is false the result is a number."""
    table, mask, indices, fill = op.args[:4]
    layout = index_layout(cx, op, indices)
    end = layout.first + layout.rank
    together, kept = index[layout.first : end], iter((*index[: layout.first], *index[end:]))
    words = [
        clamped_place(cx, indices[d], broadcast_index(together, cx.shape(indices[d])), size)
        if d in layout.indexed
        else next(kept)
        for d, size in enumerate(cx.shape(table))
    ]
    keep = cx.operand(mask, broadcast_index(index, cx.shape(mask)))
    return cx.builder.select(keep, cx.operand(table, tuple(words)), fill, op.outputs[0].dtype)


SEARCH_RULES: dict[str, Rule] = {
    "aten.bucketize.Tensor": Custom(_infer_search, _search),
    "aten.searchsorted.Tensor": Custom(_infer_search, _search),
    "aten._unsafe_masked_index.default": Custom(_infer_masked, _masked),
}
