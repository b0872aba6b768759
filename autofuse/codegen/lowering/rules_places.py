"""Lowering rules of operators that find an element by a calculated place among all elements of a tensor.

In: the index at which a result is wanted. Out: the element at the place that strides, blocks of columns or chunks give.
Sources: ATen's `Im2Col.cpp`, `Col2Im.cpp`, `_chunk_cat` in `TensorShape.cpp`, and the definition of ``as_strided``: the
place of an element is the offset plus the sum of its index times the strides.
Guarantee: nothing is read outside of an operand. Sizes by which a place is divided are numbers; others are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect, Word, fresh_index
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_diagonal import place_word
from autofuse.codegen.lowering.rules_memory import all_of, fresh_loops, only_where
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, TensorSpec
from autofuse.ir.optable import VIEWS, info
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, contiguous_strides

MOST_BLOCKS = 25  # of a kernel's size in `col2im`; each is a load in the text of the kernel


def _numbers(values: object, what: str) -> list[int]:
    found = [n for n in values if isinstance(n, int)] if isinstance(values, Sequence) else []
    if not isinstance(values, Sequence) or len(found) < len(values):
        raise LoweringError("strides", f"expected {what} that are numbers, found {values}")
    return found


def _digits(b: Builder, place: Val, sizes: Sequence[int]) -> list[Val]:
    """The index of a place among elements in row-major order; that of the first dim is as large as it comes."""
    found: list[Val] = []
    for size in reversed(sizes[1:]):
        within = b.apply("remainder", place, b.const(size, "int64"))
        found.append(within)
        place = _quotient(b, b.sub(place, within), size)
    return [place, *reversed(found)]


def _quotient(b: Builder, whole: Val, size: int) -> Val:
    """A multiple of a size, divided by it."""
    return whole if size == 1 else b.apply("div", whole, b.const(size, "int64"))


def _place(b: Builder, index: Sequence[Word], strides: Sequence[int], offset: int = 0) -> Val:
    place = b.const(offset, "int64")
    for word, stride in zip(index, strides, strict=True):
        if word:
            place = b.add(place, b.mul(b.index(word), stride))
    return place


def _words(places: Sequence[Val], sizes: Sequence[Dim]) -> Index:
    return tuple(place_word(place, size) for place, size in zip(places, sizes, strict=True))


# ---- strides --------------------------------------------------------------------------------------------


class _Strided(NamedTuple):
    """Elements of a contiguous tensor in another order."""

    sizes: list[int]
    strides: list[int]
    offset: int


def _strided(cx: Context, op: Operation, first: int) -> _Strided:
    """The arguments size, stride and storage_offset from ``first`` on. Raises LoweringError for other tensors than
    contiguous ones that begin where their memory does, and for places outside of them."""
    source, (sizes, strides) = op.args[0], (_numbers(op.args[first + n], "sizes and strides") for n in range(2))
    spec, made, offset = cx.spec(source), cx.operation_of(source), op.arg(first + 2)
    elements = _numbers(spec.shape.dims, "sizes")
    if spec.strides.dims != contiguous_strides(spec.shape.dims) or (made and info(made.target).kind in VIEWS):
        raise LoweringError("strides", f"expected a whole contiguous tensor, found strides {spec.strides}")
    if offset is not None and (made is None or not isinstance(offset, int)):
        raise LoweringError("strides", f"expected no place in the memory of a tensor that is given, found {offset}")
    found = _Strided(sizes, strides, offset or 0)
    last = found.offset + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if min([*sizes, *elements], default=1) < 1 or last >= _product(elements) or found.offset < 0:
        raise LoweringError("strides", f"expected places within {spec.shape}, found {sizes} in steps of {strides}")
    return found


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _as_strided_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [fresh_index(op.outputs[0].shape)]


def _as_strided(cx: Context, op: Operation, output: int, index: Index) -> Val:
    source, strided = op.args[0], _strided(cx, op, 1)
    spec = cx.spec(source)
    if cx.is_input(source):
        shape, strides = SymbolicShape(strided.sizes), SymbolicShape(strided.strides)
        return cx.load(source, TensorSpec(shape, spec.dtype, strides, spec.device), index)
    sizes = _numbers(spec.shape.dims, "sizes")
    place = _place(cx.builder, index, strided.strides, strided.offset)
    return cx.operand(source, _words(_digits(cx.builder, place, sizes) if sizes else [], sizes))


def _scatter_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [cx.canonical(op.args[0])]


def _as_strided_scatter(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The source at the places that the strides name, the tensor elsewhere; places must not repeat."""
    b, (whole, part) = cx.builder, op.args[:2]
    strided, to = _strided(cx, op, 2), op.outputs[0].dtype
    sizes = _numbers(cx.shape(whole).dims, "sizes")
    rest = _place(b, index, _numbers(contiguous_strides(sizes), "strides"), -strided.offset)
    tests = [b.compare("ge", rest, 0)]
    places: dict[int, Val] = {}
    order = sorted((d for d, n in enumerate(strided.sizes) if n > 1), key=lambda d: -strided.strides[d])
    for number, dim in enumerate(order):
        reach = sum((strided.sizes[d] - 1) * strided.strides[d] for d in order[number + 1 :])
        if strided.strides[dim] <= reach:
            raise LoweringError("overlap", f"expected places that do not repeat, found steps of {strided.strides}")
        within = b.apply("remainder", rest, b.const(strided.strides[dim], "int64"))
        places[dim] = _quotient(b, b.sub(rest, within), strided.strides[dim])
        tests.append(b.compare("lt", places[dim], strided.sizes[dim]))
        rest = within
    tests.append(b.compare("eq", rest, 0))
    test = all_of(b, tests)
    assert test is not None
    words = tuple((Indirect(places[d], n),) if d in places else () for d, n in enumerate(strided.sizes))
    with only_where(b, test):
        value = cx.operand(part, words)
    if cx.spec(part).dtype != to:
        value = b.round_to(b.cast(value, to), to)
    return b.where(test, value, cx.operand(whole, index))


# ---- columns of images ----------------------------------------------------------------------------------


class _Axis(NamedTuple):
    """How blocks lie along one dim of an image."""

    image: Dim
    blocks: Dim
    length: int
    dilation: int
    padding: int
    stride: int


def _axes(image: Sequence[Dim], arguments: Sequence[object]) -> list[_Axis]:
    """Rows and columns; ``arguments``: length, dilation, padding and stride of both."""
    pairs = [_numbers(values, "sizes of blocks") for values in arguments]
    found = []
    for n, size in enumerate(image):
        length, dilation, padding, stride = (pair[n if len(pair) > 1 else 0] for pair in pairs)
        span = as_dim(size + 2 * padding - dilation * (length - 1) - 1)
        if stride != 1 and not isinstance(span, int):
            raise LoweringError("strides", f"expected blocks of an image of a known size, found {size}")
        found.append(
            _Axis(size, span // stride + 1 if isinstance(span, int) else span + 1, length, dilation, padding, stride)
        )
    return found


def _im2col_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    if cx.aliased_input(op.args[0]) is None:
        raise LoweringError("pooled_value", "expected blocks of a tensor in memory, found some of a value made here")
    *outer, channels, _, _ = cx.canonical(op.args[0])
    rows, cols = _axes(cx.shape(op.args[0]).dims[-2:], op.args[1:5])
    block = (*channels, *fresh_loops(rows.length), *fresh_loops(cols.length))
    return [(*outer, block, (*fresh_loops(rows.blocks), *fresh_loops(cols.blocks)))]


def _im2col(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, to = cx.builder, op.outputs[0].dtype
    shape = cx.shape(op.args[0]).dims
    axes = _axes(shape[-2:], op.args[1:5])
    channels, *steps = cx.regroup_word(index[-2], (shape[-3], axes[0].length, axes[1].length))
    blocks = cx.regroup_word(index[-1], (axes[0].blocks, axes[1].blocks))
    places, tests = [], []
    for axis, step, block in zip(axes, steps, blocks, strict=True):
        place = _place(b, (block, step), (axis.stride, axis.dilation), -axis.padding)
        places.append(place)
        if axis.padding:
            tests += [b.compare("ge", place, 0), b.compare("lt", place, axis.image)]
    test = all_of(b, tests)
    with only_where(b, test):
        value = cx.operand(op.args[0], (*index[:-2], channels, *_words(places, shape[-2:])))
    return value if test is None else b.where(test, value, b.const(0, to))


def _col2im_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    outer = cx.canonical(op.args[0])[:-2]
    return [(*outer, *fresh_index(SymbolicShape(op.outputs[0].shape.dims[-3:])))]


def _col2im(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The sum over the blocks that hold an element, in the order of the places in a block, as aten adds them."""
    b, to = cx.builder, op.outputs[0].dtype
    channels, *image = op.outputs[0].shape.dims[-3:]
    axes = _axes(image, op.args[2:6])
    if axes[0].length * axes[1].length > MOST_BLOCKS:
        raise LoweringError("window", f"expected blocks of up to {MOST_BLOCKS} elements, found {axes}")
    elements = _numbers([channels, *(axis.length for axis in axes), axes[1].blocks], "sizes")
    found: Val | None = None
    for row in range(axes[0].length):
        for col in range(axes[1].length):
            blocks, tests = [], []
            for axis, word, step in zip(axes, index[-2:], (row, col), strict=True):
                begin = _place(b, (word,), (1,), axis.padding - step * axis.dilation)
                within = b.apply("remainder", begin, b.const(axis.stride, "int64"))
                block = _quotient(b, b.sub(begin, within), axis.stride)
                blocks.append(block)
                tests += [b.compare("ge", begin, 0), b.compare("lt", block, axis.blocks)]
                tests += [b.compare("eq", within, 0)] if axis.stride > 1 else []
            test = all_of(b, tests)
            assert test is not None
            channel = b.add(b.mul(b.index(index[-3]), elements[1] * elements[2]), row * elements[2] + col)
            place = b.add(b.mul(blocks[0], elements[3]), blocks[1])
            columns = _words((channel, place), cx.shape(op.args[0]).dims[-2:])
            with only_where(b, test):
                value = cx.operand(op.args[0], (*index[:-3], *columns))
            value = b.where(test, value, b.const(0, to))
            found = value if found is None else b.add(found, value)
    assert found is not None
    return b.round_to(found, to)


# ---- chunks ---------------------------------------------------------------------------------------------


def _chunk_dim(cx: Context, op: Operation) -> int:
    """The dim that is cut, counted from the front; aten counts in the first tensor."""
    return normal_dim(int(op.args[1]), len(cx.shape(op.args[0][0])))


def _chunk_cat_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim, result = _chunk_dim(cx, op), op.outputs[0].shape.dims
    return [(*cx.canonical(op.args[0][0])[:dim], *fresh_index(SymbolicShape(result[dim:])))]


def _chunk_cat(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """Row k of the result has chunk k of each tensor, one behind the other, zeros behind the last of its chunks."""
    b, to, refs, dim, chunks = cx.builder, op.outputs[0].dtype, op.args[0], _chunk_dim(cx, op), op.args[2]
    column, begin = b.index(index[dim + 1]), 0
    found: Val = b.const(0, to)
    for ref in refs:
        size, *inner = _numbers(cx.shape(ref).dims[dim:], "sizes")
        length = -(-size // int(chunks)) * _product(inner)
        if not length:
            continue
        place = b.add(b.mul(b.index(index[dim]), length), b.sub(column, begin))
        tests = [b.compare("lt", place, size * _product(inner)), b.compare("ge", column, begin)]
        tests.append(b.compare("lt", column, begin + length))
        test = all_of(b, tests)
        assert test is not None
        with only_where(b, test):
            value = cx.operand(ref, (*index[:dim], *_words(_digits(b, place, [size, *inner]), [size, *inner])))
        found = b.where(test, value if cx.spec(ref).dtype == to else b.cast(value, to), found)
        begin += length
    return found


PLACE_RULES: dict[str, Rule] = {
    "aten.as_strided.default": Custom(_as_strided_infer, _as_strided, counts=False),
    "aten.as_strided_copy.default": Custom(_as_strided_infer, _as_strided),
    "aten.as_strided_scatter.default": Custom(_scatter_infer, _as_strided_scatter),
    "aten.im2col.default": Custom(_im2col_infer, _im2col),
    "aten.col2im.default": Custom(_col2im_infer, _col2im),
    "aten._chunk_cat.default": Custom(_chunk_cat_infer, _chunk_cat),
}
