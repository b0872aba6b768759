"""Lowering rules of operators that reorder or repeat the elements of one tensor: flip, roll, repeat.

In: the index at which a result is wanted. Out: the value of the operand at that place. A flip and a repeat are index
remaps; a roll reads one of two places, each under a test of the index.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Moved, regroup
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_memory import fresh_loops, moved_word, only_where, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import Dim, SymbolicShape, as_dim


def _like(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [cx.canonical(op.args[0])]


def _flip(cx: Context, op: Operation, output: int, index: Index) -> Val:
    shape = cx.shape(op.args[0])
    for dim in (normal_dim(int(d), len(shape)) for d in op.args[1]):
        if shape[dim] != 1:
            index = replace_word(index, dim, (Moved(as_dim(shape[dim] - 1), shape[dim], index[dim], -1),))
    return cx.operand(op.args[0], index)


def _roll(cx: Context, op: Operation, output: int, index: Index) -> Val:
    shape, dims = cx.shape(op.args[0]), tuple(op.arg(2, ()) or ())
    if len(dims) != len(op.args[1]):
        raise LoweringError("roll", "expected a roll with a dim for each shift, found one of the flattened tensor")
    turns = [(normal_dim(int(d), len(shape)), _turn(s, shape[int(d)])) for s, d in zip(op.args[1], dims, strict=True)]

    def rolled(at: Index, rest: Sequence[tuple[int, Dim]]) -> Val:
        """Place p holds what was at p - shift, or at p - shift + size where the former is before the beginning."""
        if not rest:
            return cx.operand(op.args[0], at)
        b, (dim, shift) = cx.builder, rest[0]
        if shift == 0:
            return rolled(at, rest[1:])
        size, word = shape[dim], at[dim]
        test = b.compare("ge", b.index(word), shift)
        values = []
        for guard, start in ((test, as_dim(-shift)), (b.apply("not", test), as_dim(size - shift))):
            with only_where(b, guard):
                values.append(rolled(replace_word(at, dim, moved_word(word, start, size)), rest[1:]))
        return b.where(test, *values)

    return rolled(index, turns)


def _turn(shift: Dim, size: Dim) -> Dim:
    """The shift as a number of places from 0 to the size. Raises LoweringError where it may be beyond."""
    if isinstance(shift, int) and isinstance(size, int):
        return shift % size if size else 0
    if shift == -1:
        return as_dim(size - 1)
    if shift in (0, 1):
        return shift
    raise LoweringError("roll", f"expected a shift below the size, found {shift} of {size}")


def _repeats(cx: Context, op: Operation) -> list[tuple[Dim, Dim]]:
    """For each dim of the result, how often the operand's dim is repeated, and its size (1 where it has none)."""
    shape, times = cx.shape(op.args[0]), op.args[1]
    sizes = [1] * (len(times) - len(shape)) + list(shape)
    return list(zip(times, sizes, strict=True))


def _repeat_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    words = [()] * (len(op.args[1]) - len(cx.shape(op.args[0]))) + list(cx.canonical(op.args[0]))
    return [tuple((*fresh_loops(times), *word) for (times, _), word in zip(_repeats(cx, op), words, strict=True))]


def _repeat(cx: Context, op: Operation, output: int, index: Index) -> Val:
    words = []
    for (times, size), word in zip(_repeats(cx, op), index, strict=True):
        words.append(() if size == 1 else word if times == 1 else regroup((word,), SymbolicShape((times, size)))[1])
    return cx.operand(op.args[0], tuple(words[len(words) - len(cx.shape(op.args[0])) :]))


SHIFT_RULES: dict[str, Rule] = {
    "aten.flip.default": Custom(_like, _flip),
    "aten.roll.default": Custom(_like, _roll),
    "aten.repeat.default": Custom(_repeat_infer, _repeat),
}
