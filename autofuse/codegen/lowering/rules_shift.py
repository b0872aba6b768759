"""Lowering rules of operators that reorder or repeat the elements of one tensor: flips, shuffles, roll, repeat.

In: the index at which a result is wanted. Out: the value of the operand at that place. A roll reads one of two places,
each under a test of the index; all others are index remaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Moved, regroup
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_memory import fresh_loops, moved_word, only_where, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, divide


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


# ---- quarter turns and shuffles --------------------------------------------------------------------------


def _turned(op: Operation, rank: int) -> tuple[int, int, int]:
    """The quarter turns, 0 to 3, and the two dims of a rot90."""
    first, second = (normal_dim(int(d), rank) for d in op.arg(2, (0, 1)))
    return int(op.arg(1, 1)) % 4, first, second


def _swapped(index: Index, first: int, second: int) -> Index:
    words = list(index)
    words[first], words[second] = words[second], words[first]
    return tuple(words)


def _rot90_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    turns, first, second = _turned(op, len(index))
    return [_swapped(index, first, second) if turns % 2 else index]


def _rot90(cx: Context, op: Operation, output: int, index: Index) -> Val:
    shape = cx.shape(op.args[0])
    turns, first, second = _turned(op, len(shape))
    index = _swapped(index, first, second) if turns % 2 else index
    for dim in {0: (), 1: (second,), 2: (first, second), 3: (first,)}[turns]:
        if shape[dim] != 1:
            index = replace_word(index, dim, (Moved(as_dim(shape[dim] - 1), shape[dim], index[dim], -1),))
    return cx.operand(op.args[0], index)


@dataclass(frozen=True)
class _Blocks:
    """Images whose places in blocks of ``side`` x ``side`` are channels, or become channels."""

    channels: Dim  # of the image with fewer
    rows: Dim  # of that image, in blocks
    cols: Dim
    side: int

    def gather(self, index: Index) -> Index:
        """The index of the image with fewer channels, from that of the other."""
        *outer, channel, row, col = index
        at, i, j = regroup((channel,), SymbolicShape((self.channels, self.side, self.side)))
        return (*outer, at, (*row, *i), (*col, *j))

    def scatter(self, index: Index) -> Index:
        """The other way round."""
        *outer, channel, row, col = index
        above, i = regroup((row,), SymbolicShape((self.rows, self.side)))
        left, j = regroup((col,), SymbolicShape((self.cols, self.side)))
        return (*outer, (*channel, *i, *j), above, left)


def _blocks(few: SymbolicShape, many: SymbolicShape, side: int) -> _Blocks:
    return _Blocks(few[-3], many[-2], many[-1], side)


def _pixel_shuffle() -> Rule:
    def blocks(cx: Context, op: Operation) -> _Blocks:
        return _blocks(op.outputs[0].shape, cx.shape(op.args[0]), int(op.args[1]))

    return Custom(
        lambda cx, op: [blocks(cx, op).gather(cx.canonical(op.args[0]))],
        lambda cx, op, n, index: cx.operand(op.args[0], blocks(cx, op).scatter(index)),
    )


def _pixel_unshuffle() -> Rule:
    def blocks(cx: Context, op: Operation) -> _Blocks:
        return _blocks(cx.shape(op.args[0]), op.outputs[0].shape, int(op.args[1]))

    return Custom(
        lambda cx, op: [blocks(cx, op).scatter(cx.canonical(op.args[0]))],
        lambda cx, op, n, index: cx.operand(op.args[0], blocks(cx, op).gather(index)),
    )


def _channels_turned(cx: Context, op: Operation, index: Index, back: bool) -> Index:
    """Groups of channels, channel by channel; ``back``: the other way round."""
    channels, groups = cx.shape(op.args[0])[1], as_dim(op.args[1])
    within = divide(channels, groups)
    if within is None:
        raise LoweringError("view", f"expected groups of equal size, found {groups} of {channels} channels")
    first, second = regroup((index[1],), SymbolicShape((within, groups) if back else (groups, within)))
    return replace_word(index, 1, (*second, *first))


_CHANNELS = Custom(
    lambda cx, op: [_channels_turned(cx, op, cx.canonical(op.args[0]), back=False)],
    lambda cx, op, n, index: cx.operand(op.args[0], _channels_turned(cx, op, index, back=True)),
)

SHIFT_RULES: dict[str, Rule] = {
    "aten.flip.default": Custom(_like, _flip),
    "aten.roll.default": Custom(_like, _roll),
    "aten.repeat.default": Custom(_repeat_infer, _repeat),
    "aten.rot90.default": Custom(_rot90_infer, _rot90),
    "aten.pixel_shuffle.default": _pixel_shuffle(),
    "aten.pixel_unshuffle.default": _pixel_unshuffle(),
    "aten.channel_shuffle.default": _CHANNELS,
    "aten.native_channel_shuffle.default": _CHANNELS,
}
