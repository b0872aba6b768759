"""Lowering rules of operators that read a tensor at places which are data: embeddings, gathers, advanced indexing.

In: the index at which a result is wanted. Out: the element of the table at the place that the index tensors hold there.
Guarantee: what eager refuses ends as in eager. Every index is looked at, and nothing is read outside of a table. A
CPU's kernel that finds an index out of its bounds reports it (`checked` in `loops.py`); then the call is repeated in
eager, which raises (`wrapper/node_call.py`). A GPU's kernel asserts on the device, as eager's kernels do there. So a
node is refused where some index might not be looked at, because only a part of the result is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Atom, Index, Indirect, Word, broadcast_index, join, resolve, word_size
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_memory import moved_word, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.indices import passes_indices
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.optable import VIEWS, OpKind, info
from autofuse.ir.shape import Dim, as_dim, contiguous_strides

_INTEGERS = ("int64", "int32")
_CHEAP = 4.0  # operations by which an element of a table may be calculated where it is read


# ---- indices ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _everywhere(b: Builder) -> Iterator[None]:
    """Loads within are made whatever guard there is around them."""
    outer, b.guard = b.guard, None
    try:
        yield
    finally:
        b.guard = outer


def place_of(cx: Context, op: Operation, ref: ValueRef, at: Index, size: Dim, wrapped: int | None = None) -> Word:
    """The place that an index tensor holds at ``at`` in a dim of ``size``.

    ``wrapped``: the number of the index among those of the operation, in which -1 is the last place.
    """
    loops = [part for word in at for part in resolve(word)]
    whole = all(as_dim(word_size(word) - dim) == 0 for word, dim in zip(at, cx.shape(ref), strict=True))
    if not whole or len(set(loops)) < len(loops) or not all(isinstance(part, Atom) for part in loops):
        raise LoweringError("unread", f"expected all of {op.name} to be made, found a part of it")
    b = cx.builder
    with _everywhere(b):
        place = b.cast(cx.operand(ref, at), "int64")
        if wrapped is not None:
            place = b.where(b.compare("lt", place, 0), b.add(place, b.size(size, "int64")), place)
        return (Indirect(cx.checked(op, wrapped or 0, place, size), size),)


def _check_index(cx: Context, op: Operation, ref: ValueRef, table: ValueRef, size: Dim) -> None:
    """Raise LoweringError for an index that no kernel follows; ``size``: places that it may name."""
    if any(dim == 0 for dim in cx.shape(table)):
        raise LoweringError("empty", f"expected a table with elements, found the shape {cx.shape(table)}")
    check_table(cx, table)
    check_index(cx, op, ref, size)


def check_index(cx: Context, op: Operation, ref: ValueRef, size: Dim) -> None:
    """Raise LoweringError for an index, whose elements may name ``size`` places, of a kind that no kernel follows."""
    if (kind := cx.spec(ref).dtype) not in _INTEGERS:
        raise LoweringError("indices", f"expected indices of int64 or int32 for {op.name}, found {kind}")
    _check_values(cx, ref, size)


def _check_values(cx: Context, ref: ValueRef, size: Dim) -> None:
    """Raise LoweringError for an index that is calculated from inputs: no random inputs would keep it in its bounds.

    A decomposition keeps what it calculates within them.
    """
    source = cx.operation_of(ref)
    while source is not None and source.inputs and passes_indices(source):
        source = cx.operation_of(source.inputs[0])
    if source is None or cx.is_part(source) or not cx.reads_inputs(source):
        return
    if source.target != "aten.remainder.Scalar" or source.arg(1) != size:
        raise LoweringError("indices", f"expected indices that are given, found some that {source.name} calculates")


def check_table(cx: Context, table: ValueRef) -> None:
    """Raise LoweringError for a table whose elements are not cheaply calculated where they are read."""
    flops, todo = 0.0, [table]
    while todo:
        op = cx.operation_of(todo.pop())
        if op is None:
            continue
        facts = info(op.target)
        flops += facts.flops
        if facts.kind not in (*VIEWS, OpKind.POINTWISE, OpKind.CREATION) or flops > _CHEAP:
            raise LoweringError("table", f"expected a tensor that is given to read from, found what {op.name} makes")
        todo += op.inputs


def clamped_place(cx: Context, ref: ValueRef, at: Index, size: Dim) -> Word:
    """The place that an index tensor holds, clamped to [-size, size) and counted from the end below 0."""
    b = cx.builder
    place, full = b.cast(cx.operand(ref, at), "int64"), b.size(size, "int64")
    place = b.apply("minimum", b.apply("maximum", place, b.apply("neg", full)), b.sub(full, 1))
    return (Indirect(b.where(b.compare("lt", place, 0), b.add(place, full), place), size),)


# ---- one index -----------------------------------------------------------------------------------------


def _infer_embedding(cx: Context, op: Operation) -> Sequence[Index | None]:
    table, ids = op.args[:2]
    _check_index(cx, op, ids, table, cx.shape(table)[0])
    return [(*cx.canonical(ids), cx.canonical(table)[1])]


def _embedding(cx: Context, op: Operation, output: int, index: Index) -> Val:
    table, ids = op.args[:2]
    return cx.operand(table, (place_of(cx, op, ids, index[:-1], cx.shape(table)[0]), index[-1]))


def _select_dim(cx: Context, op: Operation) -> int:
    rank = len(cx.shape(op.args[0]))
    if rank == 0:
        raise LoweringError("indices", "expected a tensor with dims, found one element")
    return normal_dim(int(op.args[1]), rank)


def _infer_select(cx: Context, op: Operation) -> Sequence[Index | None]:
    table, dim, ids = op.args[0], _select_dim(cx, op), op.args[2]
    _check_index(cx, op, ids, table, cx.shape(table)[dim])
    chosen = cx.canonical(ids)[0] if len(cx.shape(ids)) else ()
    return [replace_word(cx.canonical(table), dim, chosen)]


def _select(cx: Context, op: Operation, output: int, index: Index) -> Val:
    table, dim, ids = op.args[0], _select_dim(cx, op), op.args[2]
    at = (index[dim],) if len(cx.shape(ids)) else ()
    return cx.operand(table, replace_word(index, dim, place_of(cx, op, ids, at, cx.shape(table)[dim])))


def _infer_gather(cx: Context, op: Operation) -> Sequence[Index | None]:
    table, ids = op.args[0], op.args[2]
    if len(cx.shape(table)) != len(cx.shape(ids)):
        raise LoweringError("indices", "expected an index of as many dims as the tensor, found another")
    _check_index(cx, op, ids, table, cx.shape(table)[_select_dim(cx, op)])
    return [cx.canonical(ids)]


def _gather(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """Dims beside the indexed one are read from their beginning: the index may be smaller there."""
    table, dim, ids = op.args[0], _select_dim(cx, op), op.args[2]
    sizes = cx.shape(table)
    words = tuple(() if size == 1 else moved_word(w, 0, size) for w, size in zip(index, sizes, strict=True))
    return cx.operand(table, replace_word(words, dim, place_of(cx, op, ids, index, sizes[dim])))


def _infer_take(cx: Context, op: Operation) -> Sequence[Index | None]:
    table, ids = op.args[:2]
    _check_index(cx, op, ids, table, cx.shape(table).numel)
    if not cx.is_input(table) or cx.spec(table).strides.dims != contiguous_strides(cx.shape(table).dims):
        raise LoweringError("table", "expected a contiguous tensor to take from, found another")
    return [cx.canonical(ids)]


def _take(cx: Context, op: Operation, output: int, index: Index) -> Val:
    table, ids = op.args[:2]
    return cx.load_flat(table, place_of(cx, op, ids, index, cx.shape(table).numel, wrapped=0))


# ---- several indices -----------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Where the dims of an advanced index's result come from."""

    indexed: tuple[int, ...]  # dims of the table that have an index
    first: int  # dims of the result before those of the indices
    rank: int  # dims of the broadcast indices


def index_layout(cx: Context, op: Operation, indices: Sequence[ValueRef | None]) -> _Layout:
    """The broadcast indices stand where the indexed dims were, or first, where these are not neighbours."""
    indexed = tuple(d for d, ref in enumerate(indices) if ref is not None)
    if not indexed:
        raise LoweringError("indices", "expected an index, found none")
    is_adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
    return _Layout(
        indexed, indexed[0] if is_adjacent else 0, max(len(cx.shape(ref)) for ref in indices if ref is not None)
    )


def joined_indices(cx: Context, indices: Sequence[ValueRef | None], layout: _Layout) -> list[Word]:
    """The loops over the broadcast indices."""
    together: list[Word] = [()] * layout.rank
    for ref in indices:
        if ref is None:
            continue
        for back, (word, size) in enumerate(zip(cx.canonical(ref)[::-1], cx.shape(ref).dims[::-1], strict=True), 1):
            if size == 1:
                continue
            if together[-back]:
                join(together[-back], word)
            else:
                together[-back] = word
    return together


def _infer_index(cx: Context, op: Operation) -> Sequence[Index | None]:
    table, indices = op.args[:2]
    layout = index_layout(cx, op, op.args[1])
    for d in layout.indexed:
        _check_index(cx, op, indices[d], table, cx.shape(table)[d])
    together = joined_indices(cx, indices, layout)
    kept = [word for d, word in enumerate(cx.canonical(table)) if d not in layout.indexed]
    return [(*kept[: layout.first], *together, *kept[layout.first :])]


def _index(cx: Context, op: Operation, output: int, index: Index) -> Val:
    table, indices = op.args[:2]
    layout = index_layout(cx, op, op.args[1])
    end = layout.first + layout.rank
    together, kept = index[layout.first : end], iter((*index[: layout.first], *index[end:]))
    words: list[Word] = []
    for d, size in enumerate(cx.shape(table)):
        if d not in layout.indexed:
            words.append(next(kept))
            continue
        ref = indices[d]
        words.append(place_of(cx, op, ref, broadcast_index(together, cx.shape(ref)), size, wrapped=d))
    return cx.operand(table, tuple(words))


INDEXED_RULES: dict[str, Rule] = {
    "aten.embedding.default": Custom(_infer_embedding, _embedding),
    "aten.index_select.default": Custom(_infer_select, _select),
    "aten.gather.default": Custom(_infer_gather, _gather),
    "aten.take.default": Custom(_infer_take, _take),
    "aten.index.Tensor": Custom(_infer_index, _index),
    "aten._unsafe_index.Tensor": Custom(_infer_index, _index),
}
