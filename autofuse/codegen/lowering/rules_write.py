"""Lowering rules of operators that write to places which are data: scatters, index_add, the gradient of an embedding.

In: an operation. Out: for each of its passes over the values, the loops, the place in the result, the value and how it
is combined with what is there (`Written`). Guarantee: the loops run over the values in their row-major order, so that
what goes to one place is combined in the order of a single thread of eager; indices are looked at as those of reads
(`rules_indexed`), and eager repeats and raises. Such a value is complete only after its loops: it has no element to
give at an index (`evaluate`), and `stages` has it stored before anything reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context
from autofuse.codegen.lowering.index import Index, Word, broadcast_index, regroup, word_size
from autofuse.codegen.lowering.rules_base import normal_dim
from autofuse.codegen.lowering.rules_indexed import check_index, clamped_place, index_layout, joined_indices, place_of
from autofuse.codegen.lowering.rules_memory import moved_word, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import Dim, as_dim, contiguous_strides, product
from autofuse.ir.writes import indexed_sizes, indices_of, values_of, wraps

_PUTS = ("scatter", "index_copy", "index_fill", "max_unpool2d", "max_unpool3d")
_HOW = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}


class Written(NamedTuple):
    """One pass over the values of a write."""

    loops: Index  # over the values
    place: Index  # in the result
    value: Val
    how: str  # of `loops.PUTS`, without its beginning
    guard: Val | None = None  # where it is false, nothing is written
    strides: tuple[Dim, ...] | None = None  # of the place, where they are not the result's


class WriteRule(Protocol):
    """How an operator writes."""

    def writes(self, cx: Context, op: Operation, number: int) -> Written:
        """Pass ``number`` of the operation."""

    def passes(self, op: Operation) -> int:
        """How many passes the operation has."""


@dataclass(frozen=True)
class Write:
    """A rule made of a function that gives the only pass."""

    function: Callable[[Context, Operation], Written]
    counts: bool = True

    def infer(self, cx: Context, op: Operation) -> Sequence[Index | None]:
        return [None]

    def evaluate(self, cx: Context, op: Operation, output: int, index: Index) -> Val:
        raise LoweringError("write", f"expected a value that is made element by element, found what {op.name} writes")

    def passes(self, op: Operation) -> int:
        return 2 if _starts_anew(op) else 1

    def writes(self, cx: Context, op: Operation, number: int) -> Written:
        found = self.function(cx, op)
        if _starts_anew(op) and number == 0:
            first = cx.builder.const(_start_of(found.how, op.outputs[0].dtype), op.outputs[0].dtype)
            return found._replace(value=first, how="set")
        return found


# ---- what is written, and how ---------------------------------------------------------------------------------


_BITS = {"uint8": 8, "int8": 7, "int16": 15, "int32": 31, "int64": 63}  # without the sign's
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


def _starts_anew(op: Operation) -> bool:
    """Whether places that are named lose what was there before."""
    if op.short_name not in ("scatter_reduce", "index_reduce"):
        return False
    return not dict(op.kwargs).get("include_self", op.arg(5, True))


def _start_of(how: str, dtype: str) -> int | float:
    """What a reduction begins with: 0, 1, or what every element replaces."""
    if how in ("add", "mul"):
        return 0 if how == "add" else 1
    if is_float(dtype):
        return -math.inf if how == "max" else math.inf
    bits = _BITS.get(dtype)
    if bits is None:
        raise LoweringError("dtype", f"expected numbers to compare, found {dtype}")
    return (0 if dtype == "uint8" else -(1 << bits)) if how == "max" else (1 << bits) - 1


def how_of(op: Operation) -> str:
    """How the elements that an operation writes are combined with what is there."""
    if op.short_name in ("scatter_reduce", "index_reduce"):
        return _HOW[str(op.args[4])]
    if op.short_name in ("index_put", "_unsafe_index_put", "put"):
        return "add" if dict(op.kwargs).get("accumulate", op.arg(3, False)) else "set"
    return "set" if op.short_name in _PUTS else "add"


def _value(cx: Context, op: Operation, index: Index) -> Val:
    """The value at an index of its tensor, or a number, as the result's dtype calculates."""
    values, to = values_of(op), op.outputs[0].dtype
    b = cx.builder
    if isinstance(values, ValueRef):
        return b.cast(cx.operand(values, index if len(cx.shape(values)) else ()), to)
    if not _holds(to, values):
        raise LoweringError("dtype", f"expected a number that {to} holds, found {values}, which eager refuses")
    return b.const(bool(values) if to == "bool" else values, to)


def _holds(dtype: str, number: int | float) -> bool:
    """Whether eager converts a number to a dtype without an error; fractions of integers are cut off."""
    if dtype == "bool" or (is_float(dtype) and not math.isfinite(number)):
        return True
    if is_float(dtype):
        return abs(number) <= _LARGEST.get(dtype, math.inf)
    bits, low = _BITS[dtype], 0 if dtype == "uint8" else -(1 << _BITS[dtype])
    return math.isfinite(number) and low <= number < 1 << bits


def _check_values(cx: Context, op: Operation, loops: Index) -> None:
    """Raise LoweringError for values that are not known to be as many as the loops: their fake kernel does not look."""
    sizes = cx.shape(values_of(op)).dims
    words = loops[len(loops) - len(sizes) :]
    if len(sizes) > len(loops) or any(
        size != 1 and as_dim(word_size(word) - size) != 0 for word, size in zip(words, sizes, strict=True)
    ):
        raise LoweringError("sizes", f"expected values for all that {op.name} writes, found {cx.shape(values_of(op))}")


def _checked_how(op: Operation) -> str:
    how, to = how_of(op), op.outputs[0].dtype
    if how != "set" and to == "bool":
        raise LoweringError("dtype", f"expected numbers to combine, found {to}")
    return how


def _check(cx: Context, op: Operation) -> None:
    if op.outputs[0].device != "cpu":
        raise LoweringError("device_bounds", "expected writes by an index on a CPU, found some on a GPU")
    if not len(op.outputs[0].shape):
        raise LoweringError("indices", "expected a tensor with dims, found one element")
    for ref, size in indexed_sizes(op):
        check_index(cx, op, ref, size)


def _check_as_eager(cx: Context, op: Operation) -> None:
    """Raise LoweringError for dtypes that eager refuses of operators that put whole slices."""
    kind, values = cx.spec(indices_of(op)).dtype, values_of(op)
    if kind != "int64":
        raise LoweringError("indices", f"expected indices of int64, found {kind}, which eager refuses")
    if isinstance(values, ValueRef) and cx.spec(values).dtype != op.outputs[0].dtype:
        raise LoweringError("dtype", f"expected values of {op.outputs[0].dtype}, found {cx.spec(values).dtype}")


def _along(cx: Context, op: Operation, at: Index, dim: int) -> Word:
    """The place along a dim that the only index holds at ``at``."""
    wrapped = 0 if wraps(op) else None
    return place_of(cx, op, indices_of(op), at, op.outputs[0].shape[dim], wrapped)


# ---- one index ------------------------------------------------------------------------------------------------


def _scattered(cx: Context, op: Operation) -> Written:
    """Dims beside the indexed one are written from their beginning: the index may be smaller there, as for a gather."""
    _check(cx, op)
    ids, shape = indices_of(op), op.outputs[0].shape
    dim, loops = normal_dim(int(op.args[1]), len(shape)), cx.canonical(ids)
    if len(cx.shape(ids)) != len(shape):
        raise LoweringError("indices", "expected an index of as many dims as the tensor, found another")
    place = tuple(() if size == 1 else moved_word(w, 0, size) for w, size in zip(loops, shape, strict=True))
    values = values_of(op)
    at = loops
    if isinstance(values, ValueRef) and len(cx.shape(values)):
        sizes = cx.shape(values)
        at = tuple(() if size == 1 else moved_word(w, 0, size) for w, size in zip(loops, sizes, strict=True))
    where = replace_word(place, dim, _along(cx, op, loops, dim))
    return Written(loops, where, _value(cx, op, at), _checked_how(op))


def _by_rows(cx: Context, op: Operation) -> Written:
    """index_add and its like: one index along a dim, whole slices as values."""
    _check(cx, op)
    ids, shape = indices_of(op), op.outputs[0].shape
    dim, values = normal_dim(int(op.args[1]), len(shape)), values_of(op)
    if op.short_name in ("index_copy", "index_fill"):
        _check_as_eager(cx, op)
    ids_at = cx.canonical(ids) if len(cx.shape(ids)) else ()
    chosen = ids_at[0] if ids_at else ()
    if isinstance(values, ValueRef) and len(cx.shape(values)) == len(shape):
        sizes = list(shape.dims)
        sizes[dim] = cx.shape(ids).numel
        if sizes != list(cx.shape(values).dims):
            raise LoweringError("sizes", f"expected one slice of {shape} for each index, found {cx.shape(values)}")
        kept = cx.canonical(values)
    else:
        kept = cx.canonical(ValueRef(op.name))
    loops = replace_word(kept, dim, chosen)
    value = _value(cx, op, loops)
    alpha = dict(op.kwargs).get("alpha", 1) if op.short_name == "index_add" else 1
    if alpha != 1:
        value = cx.builder.mul(value, alpha)
    return Written(loops, replace_word(loops, dim, _along(cx, op, ids_at, dim)), value, _checked_how(op))


def _embedding_backward(cx: Context, op: Operation) -> Written:
    """Eager leaves out indices that are the padding's, and those that are out of bounds: then it repeats the call."""
    _check(cx, op)
    grad, ids, _, padding, by_frequency = op.args[:5]
    if by_frequency:
        raise LoweringError("indices", "expected gradients that are added up, found some scaled by frequency")
    if cx.shape(grad).dims[:-1] != cx.shape(ids).dims:
        raise LoweringError("sizes", f"expected a gradient for each of {cx.shape(ids)} indices, found {cx.shape(grad)}")
    at = cx.canonical(ids)
    loops = (*at, cx.canonical(grad)[-1])
    b = cx.builder
    guard = None
    if padding is not None and (not isinstance(padding, int) or padding >= 0):
        guard = b.compare("ne", b.cast(cx.operand(ids, at), "int64"), b.size(padding, "int64"))
    where = (place_of(cx, op, ids, at, op.outputs[0].shape[0]), loops[-1])
    return Written(loops, where, b.cast(cx.operand(grad, loops), op.outputs[0].dtype), "add", guard)


def _put(cx: Context, op: Operation) -> Written:
    _check(cx, op)
    ids, source, shape = indices_of(op), op.args[2], op.outputs[0].shape
    if op.outputs[0].strides.dims != contiguous_strides(shape.dims):
        raise LoweringError("strides", "expected a contiguous tensor to put into, found another")
    loops = cx.canonical(ids)
    at = loops if cx.shape(source) == cx.shape(ids) else regroup(loops, cx.shape(source))
    word = place_of(cx, op, ids, loops, shape.numel, wrapped=0)
    return Written(loops, (word,), _value(cx, op, at), _checked_how(op), strides=(1,))


def _unpool(planes: int) -> Callable[[Context, Operation], Written]:
    """An index counts the elements of a plane."""

    def function(cx: Context, op: Operation) -> Written:
        _check(cx, op)
        x, ids = op.args[:2]
        shape, strides = op.outputs[0].shape, op.outputs[0].strides
        lead = len(shape) - planes
        if strides.dims[lead:] != contiguous_strides(shape.dims[lead:]):
            raise LoweringError("strides", "expected planes without gaps, found another order")
        loops = cx.canonical(ids)
        word = place_of(cx, op, ids, loops, product(shape.dims[lead:]))
        value = cx.builder.cast(cx.operand(x, loops), op.outputs[0].dtype)
        return Written(loops, (*loops[:lead], word), value, "set", strides=(*strides.dims[:lead], 1))

    return function


# ---- several indices --------------------------------------------------------------------------------------------


def _index_put(cx: Context, op: Operation) -> Written:
    _check(cx, op)
    layout = index_layout(cx, op, indices_of(op))
    loops, words = _indexed_loops(cx, op)
    for d in layout.indexed:
        ref = indices_of(op)[d]
        at = broadcast_index(loops[layout.first : layout.first + layout.rank], cx.shape(ref))
        words[d] = place_of(cx, op, ref, at, op.outputs[0].shape[d], wrapped=d)
    _check_values(cx, op, loops)
    values = values_of(op)
    return Written(loops, tuple(words), _value(cx, op, broadcast_index(loops, cx.shape(values))), _checked_how(op))


def _indexed_loops(cx: Context, op: Operation) -> tuple[Index, list[Word]]:
    """The loops of what an advanced index names, and the word of each dim of the result that has no index."""
    indices = indices_of(op)
    layout = index_layout(cx, op, indices)
    own = cx.canonical(ValueRef(op.name))
    kept = [word for d, word in enumerate(own) if d not in layout.indexed]
    loops = (*kept[: layout.first], *joined_indices(cx, indices, layout), *kept[layout.first :])
    return loops, [() if d in layout.indexed else word for d, word in enumerate(own)]


def _masked_index_put(cx: Context, op: Operation) -> Written:
    """Places are clamped, and where the mask is false a zero is added."""
    _check(cx, op)
    mask, indices = op.args[1], indices_of(op)
    layout = index_layout(cx, op, indices)
    loops, words = _indexed_loops(cx, op)
    for d in layout.indexed:
        ref = indices[d]
        at = broadcast_index(loops[layout.first : layout.first + layout.rank], cx.shape(ref))
        words[d] = clamped_place(cx, ref, at, op.outputs[0].shape[d])
    _check_values(cx, op, loops)
    b, to = cx.builder, op.outputs[0].dtype
    value = _value(cx, op, broadcast_index(loops, cx.shape(values_of(op))))
    keep = cx.operand(mask, broadcast_index(loops, cx.shape(mask)))
    if to == "bool" or keep.dtype != "bool":
        raise LoweringError("dtype", f"expected numbers to add and a mask of bool, found {to} and {keep.dtype}")
    return Written(loops, tuple(words), b.select(keep, value, 0, to), "add")


WRITE_RULES: dict[str, Write] = {
    "aten.embedding_dense_backward.default": Write(_embedding_backward),
    "aten.index_add.default": Write(_by_rows),
    "aten.index_copy.default": Write(_by_rows),
    "aten.index_fill.int_Scalar": Write(_by_rows),
    "aten.index_fill.int_Tensor": Write(_by_rows),
    "aten.index_reduce.default": Write(_by_rows),
    "aten.scatter_add.default": Write(_scattered),
    "aten.scatter.src": Write(_scattered),
    "aten.scatter.value": Write(_scattered),
    "aten.scatter_reduce.two": Write(_scattered),
    "aten.index_put.default": Write(_index_put),
    "aten._unsafe_index_put.default": Write(_index_put),
    "aten._unsafe_masked_index_put_accumulate.default": Write(_masked_index_put),
    "aten.put.default": Write(_put),
    "aten.max_unpool2d.default": Write(_unpool(2)),
    "aten.max_unpool3d.default": Write(_unpool(3)),
}
