"""Lowering rules of diagonals and sliding windows: dims of a view that read one dim of the source together, or two.

In: the index at which a result is wanted. Out: the value of the operand at that place. A diagonal and an unfolded dim
are index remaps. What puts a diagonal into a whole tests each place, and the gradient of sliding windows adds the few
windows that an element is in. Guarantee: nothing is read outside of an operand; windows are added in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect, Moved, Word
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_memory import all_of, fresh_loops, moved_word, only_where, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import Dim

MOST_WINDOWS = 16  # that an element is in; each is a load in the text of the kernel

# ---- diagonals ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Diagonal:
    """Element k of a diagonal is at ``row + k`` of dim ``rows`` and at ``col + k`` of dim ``cols``."""

    rows: int
    cols: int
    row: int
    col: int


def _diagonal_of(op: Operation, rank: int, first: int, dims: tuple[int, int]) -> _Diagonal:
    """The diagonal of the arguments offset, dim1, dim2 from ``first`` on; ``dims`` are those of an operator without."""
    offset = op.arg(first, 0)
    rows, cols = (normal_dim(int(op.arg(first + 1 + n, dims[n])), rank) for n in range(2))
    return _Diagonal(rows, cols, max(-offset, 0), max(offset, 0))


def _outer(index: Index, diagonal: _Diagonal) -> Index:
    """The words of the other dims."""
    return tuple(word for dim, word in enumerate(index) if dim not in (diagonal.rows, diagonal.cols))


def _diagonal_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    outer = _outer(index, _diagonal_of(op, len(index), 1, (0, 1)))
    return [(*outer, fresh_loops(op.outputs[0].shape[-1]))]


def _diagonal(cx: Context, op: Operation, output: int, index: Index) -> Val:
    shape = cx.shape(op.args[0])
    diagonal = _diagonal_of(op, len(shape), 1, (0, 1))
    outer = iter(index[:-1])
    words = []
    for dim, size in enumerate(shape):
        if dim not in (diagonal.rows, diagonal.cols):
            words.append(next(outer))
        else:  # a place of its own in each of the two dims, also where it is the whole word: no view may split it
            start = diagonal.row if dim == diagonal.rows else diagonal.col
            words.append(() if size == 1 else (Moved(start, size, index[-1]),))
    return cx.operand(op.args[0], tuple(words))


def _whole_infer(cx: Context, op: Operation, part: ValueRef, diagonal: _Diagonal) -> Sequence[Index | None]:
    outer = iter(cx.canonical(part)[:-1])
    diagonals = (diagonal.rows, diagonal.cols)
    shape = op.outputs[0].shape
    return [tuple(fresh_loops(size) if dim in diagonals else next(outer) for dim, size in enumerate(shape))]


def _with_diagonal(
    cx: Context, op: Operation, index: Index, diagonal: _Diagonal, part: ValueRef, rest: ValueRef | None
) -> Val:
    """``part`` on the diagonal, ``rest`` (or 0) elsewhere."""
    b, to = cx.builder, op.outputs[0].dtype
    row, col = index[diagonal.rows], index[diagonal.cols]
    length = cx.shape(part)[-1]
    other = b.const(0, to) if rest is None else cx.operand(rest, index)
    if length == 0:
        return other
    test = b.compare("eq", b.index(col), b.add(b.index(row), diagonal.col - diagonal.row))
    # The dim that begins at 0 counts along the diagonal; no longer one has an element there.
    place = () if length == 1 else moved_word(row if diagonal.row == 0 else col, 0, length)
    with only_where(b, test):
        value = cx.operand(part, (*_outer(index, diagonal), place))
    if cx.spec(part).dtype != to:
        value = b.round_to(b.cast(value, to), to)
    return b.where(test, value, other)


def _embedded(op: Operation) -> _Diagonal:
    return _diagonal_of(op, len(op.outputs[0].shape), 1, (-2, -1))


def _inserted(op: Operation) -> _Diagonal:
    return _diagonal_of(op, len(op.outputs[0].shape), 2, (0, 1))


# ---- sliding windows ------------------------------------------------------------------------------------


def sum_of_places(total: Dim, *words: tuple[int, Word]) -> Word:
    """The place in a dim of ``total`` that is the sum of places, each times its step.

    Each place is a digit of its own, of size 1 but for the first: so no digit counts for more because of the next.
    """
    if total == 1:
        return ()
    sizes = [total, *[1] * (len(words) - 1)]
    return tuple(Moved(0, size, word, step) for size, (step, word) in zip(sizes, words, strict=True))


def place_word(place: Val, size: Dim) -> Word:
    """A calculated place as the word of a dim of ``size``."""
    return () if size == 1 else (Indirect(place, size),)


def _unfolded(cx: Context, op: Operation, source: ValueRef) -> tuple[int, int, int]:
    """Dim, length and step of the windows of an unfold."""
    rank = len(cx.shape(source))
    if rank == 0:
        raise LoweringError("window", "expected windows along a dim, found a tensor of one element")
    dim, size, step = op.args[1:4]
    return normal_dim(int(dim), rank), int(size), int(step)


def _unfold_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim, size, _ = _unfolded(cx, op, op.args[0])
    index = cx.canonical(op.args[0])
    return [(*replace_word(index, dim, fresh_loops(op.outputs[0].shape[dim])), fresh_loops(size))]


def _unfold(cx: Context, op: Operation, output: int, index: Index) -> Val:
    dim, _, step = _unfolded(cx, op, op.args[0])
    word = sum_of_places(cx.shape(op.args[0])[dim], (step, index[dim]), (1, index[-1]))
    return cx.operand(op.args[0], replace_word(index[:-1], dim, word))


def _unfold_backward_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim = normal_dim(int(op.args[2]), len(op.outputs[0].shape))
    return [replace_word(cx.canonical(op.args[0])[:-1], dim, fresh_loops(op.outputs[0].shape[dim]))]


def _unfold_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The sum over the windows that hold an element: from the last that begins at or before it, backwards."""
    b, to, total = cx.builder, op.outputs[0].dtype, op.outputs[0].shape
    dim, (size, step) = normal_dim(int(op.args[2]), len(total)), op.args[3:5]
    count = cx.shape(op.args[0])[dim]
    most = -(-size // step)
    if most > MOST_WINDOWS:
        raise LoweringError("window", f"expected up to {MOST_WINDOWS} windows over an element, found {most}")
    word = index[dim]
    place = b.index(word)
    within = b.apply("remainder", place, b.const(step, "int64"))
    last = b.apply("div", b.sub(place, within), b.const(step, "int64"))
    found: Val | None = None
    for back in range(most - 1, -1, -1):  # in the order of the windows, as aten adds them
        window, at = b.sub(last, back), b.add(within, back * step)
        tests = [b.compare("lt", window, count), b.compare("lt", at, size)]
        tests += [b.compare("ge", window, 0)] if back else []
        test = all_of(b, tests)
        with only_where(b, test):
            value = cx.operand(op.args[0], (*replace_word(index, dim, place_word(window, count)), place_word(at, size)))
        assert test is not None
        value = b.where(test, value, b.const(0, to))
        found = value if found is None else b.add(found, value)
    assert found is not None
    return b.round_to(found, to)


DIAGONAL_RULES: dict[str, Rule] = {
    "aten.diagonal.default": Custom(_diagonal_infer, _diagonal, counts=False),
    "aten.diagonal_copy.default": Custom(_diagonal_infer, _diagonal),
    "aten.diag_embed.default": Custom(
        lambda cx, op: _whole_infer(cx, op, op.args[0], _embedded(op)),
        lambda cx, op, n, index: _with_diagonal(cx, op, index, _embedded(op), op.args[0], None),
    ),
    "aten.diagonal_scatter.default": Custom(
        lambda cx, op: _whole_infer(cx, op, op.args[1], _inserted(op)),
        lambda cx, op, n, index: _with_diagonal(cx, op, index, _inserted(op), op.args[1], op.args[0]),
    ),
    "aten.diagonal_backward.default": Custom(
        lambda cx, op: _whole_infer(cx, op, op.args[0], _inserted(op)),
        lambda cx, op, n, index: _with_diagonal(cx, op, index, _inserted(op), op.args[0], None),
    ),
    "aten.unfold.default": Custom(_unfold_infer, _unfold, counts=False),
    "aten.unfold_copy.default": Custom(_unfold_infer, _unfold),
    "aten.unfold_backward.default": Custom(_unfold_backward_infer, _unfold_backward),
}
