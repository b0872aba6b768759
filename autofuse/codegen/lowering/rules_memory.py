"""Lowering rules of operators that move elements: concatenation, windows, padding.

In: the index at which a result is wanted. Out: the value of the operand at that place. A window (slice, select, split)
of a value is an offset of its index, without memory access. A concatenation (cat, stack, pad, the gradient of a slice)
determines for each place the input that it belongs to:

- inputs that are multiples of one unit, few units in all: the place splits into (unit, place in the unit), and outputs
  are stored once for each unit, so that each element is computed once and written to its place;
- others: all inputs are evaluated under a test of the place, and loads are made only where the test is true.

Guarantee: nothing is read outside of an operand; values are copied, and rounded only where aten converts them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Atom, Index, Moved, Word, fresh_index, is_fixed, join, regroup, word_size
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_pointwise import POINTWISE_RULES
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, divide

MOST_UNITS = 8  # most units of a dim: an output is stored once for each
_LAST = 2**62  # an end from here on means "to the end"


@contextlib.contextmanager
def only_where(b: Builder, test: Val | None) -> Iterator[None]:
    """Loads within are made only where ``test`` is true."""
    outer = b.guard
    if test is not None:
        b.guard = test if outer is None else b.apply("and", outer, test)
    try:
        yield
    finally:
        b.guard = outer


def replace_word(index: Index, dim: int, *words: Word) -> Index:
    """``index`` with the word of one dim replaced by none, one or several."""
    return (*index[:dim], *words, *index[dim + 1 :])


def moved_word(word: Word, start: Dim, size: Dim, step: int = 1) -> Word:
    """The place ``start + step x place of word`` in a dim of ``size``.

    It is the word itself only where that runs over all of the dim, since digits beside it take their strides from its
    size.
    """
    is_whole = start == 0 and step == 1 and as_dim(word_size(word) - size) == 0
    return word if is_whole else (Moved(start, size, word, step),)


def fresh_loops(size: Dim) -> Word:
    return fresh_index(SymbolicShape((size,)))[0]


def _result(cx: Context, op: Operation, value: Val, source: str) -> Val:
    to = op.outputs[0].dtype
    return value if source == to else cx.builder.round_to(cx.builder.cast(value, to), to)


# ---- units: a dim as a few equal parts ------------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """A dim of ``count`` units with ``size`` places each.

    The number of the unit is the outer digit of a place, or the inner one: then a unit has every count-th place.
    """

    count: int
    size: Dim
    is_inner: bool = False

    def compose(self, inner: Word) -> Word:
        """The loops of the dim, from the loops within a unit."""
        outer: Word = (Atom(self.count, is_unrolled=True),) if self.count > 1 else ()
        return (*inner, *outer) if self.is_inner else (*outer, *inner)

    def at(self, unit: int, inner: Word) -> Word:
        """The place in the dim of a place within a known unit."""
        digit: Word = (Moved(unit, self.count),) if self.count > 1 else ()
        return (*inner, *digit) if self.is_inner else (*digit, *inner)

    def take_apart(self, word: Word) -> tuple[Word, Word]:
        """The word of the unit and that of the place within; raises LoweringError where it does not split."""
        sizes = (self.size, self.count) if self.is_inner else (self.count, self.size)
        first, second = regroup((word,), SymbolicShape(sizes))
        return (second, first) if self.is_inner else (first, second)

    def choose(self, b: Builder, word: Word, value_of: Callable[[int, Word], Val]) -> Val:
        """The value at a place; ``value_of`` gives it for a known unit and a place within."""
        digit, inner = self.take_apart(word)
        if self.count == 1:
            return value_of(0, inner)
        if len(digit) == 1 and is_fixed(digit[0]) and isinstance(digit[0], Moved) and isinstance(digit[0].start, int):
            return value_of(digit[0].start, inner)
        place, values = b.index(digit), [value_of(unit, inner) for unit in range(self.count)]
        found = values[-1]
        for unit in range(self.count - 2, -1, -1):
            found = b.where(b.compare("eq", place, unit), values[unit], found)
        return found


def _units_of(sizes: Sequence[Dim]) -> Units | None:
    """The unit that all sizes are multiples of; None where there is none, or where more than MOST_UNITS are needed."""
    if len(set(sizes)) == 1:
        return Units(len(sizes), sizes[0]) if len(sizes) <= MOST_UNITS else None
    numbers = [size for size in sizes if isinstance(size, int)]
    unit = math.gcd(*numbers)
    if len(numbers) < len(sizes) or sum(numbers) > MOST_UNITS * unit:
        return None
    return Units(sum(numbers) // unit, unit)


# ---- concatenation --------------------------------------------------------------------------------------


def _pieces(cx: Context, op: Operation) -> tuple[list[ValueRef], int]:
    """The tensors that have elements, and the dim that they are concatenated along.

    aten also takes empty tensors of one dim beside others.
    """
    rank = len(op.outputs[0].shape)
    dim = normal_dim(int(op.arg(1, dict(op.kwargs).get("dim", 0))), rank)
    found = [ref for ref in op.args[0] if len(cx.shape(ref)) == rank and cx.shape(ref)[dim] != 0]
    return found, dim


def _cat_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    refs, dim = _pieces(cx, op)
    if not refs:
        return [None]
    words = [_tied([cx.canonical(ref)[d] for ref in refs]) for d in range(len(op.outputs[0].shape)) if d != dim]
    units = _units_of([cx.shape(ref)[dim] for ref in refs])
    if units is None:
        word = fresh_loops(op.outputs[0].shape[dim])
    else:
        within = [cx.canonical(ref)[dim] for ref in refs if cx.shape(ref)[dim] == units.size]
        word = units.compose(_tied(within) if within else fresh_loops(units.size))
    return [(*words[:dim], word, *words[dim:])]


def _tied(words: list[Word]) -> Word:
    """The first word; the others run over its loops where they can."""
    for word in words[1:]:
        join(words[0], word)
    return words[0]


def _cat(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b = cx.builder
    refs, dim = _pieces(cx, op)
    sizes = [cx.shape(ref)[dim] for ref in refs]
    if not refs:
        raise LoweringError("empty", f"expected a concatenation with elements, found {op.name} without")

    def piece(ref: ValueRef, word: Word) -> Val:
        return _result(cx, op, cx.operand(ref, replace_word(index, dim, word)), cx.spec(ref).dtype)

    units = _units_of(sizes)
    if units is not None:
        counts = [divide(size, units.size) for size in sizes]
        owner = [(ref, k, n) for ref, n in zip(refs, counts, strict=True) for k in range(int(n))]  # type: ignore[arg-type]

        def of_unit(unit: int, inner: Word) -> Val:
            ref, k, n = owner[unit]
            return piece(ref, Units(int(n), units.size).at(k, inner))  # type: ignore[arg-type]

        with contextlib.suppress(LoweringError):
            return units.choose(b, index[dim], of_unit)
    place, starts = b.index(index[dim]), [as_dim(sum(sizes[:k])) for k in range(len(sizes))]
    below = [b.compare("lt", place, start) for start in starts[1:]]
    values = []
    for k, (ref, start, size) in enumerate(zip(refs, starts, sizes, strict=True)):
        tests = [b.compare("ge", place, start)] if k > 0 else []
        tests += [below[k]] if k < len(below) else []
        with only_where(b, all_of(b, tests)):
            values.append(piece(ref, moved_word(index[dim], as_dim(-start), size)))
    found = values[-1]
    for test, value in reversed(list(zip(below, values, strict=False))):
        found = b.where(test, value, found)
    return found


def all_of(b: Builder, tests: Sequence[Val]) -> Val | None:
    """The truth value that all tests hold; None where there are none."""
    return functools.reduce(lambda x, y: b.apply("and", x, y), tests) if tests else None


def _stack_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    refs, dim = op.args[0], _stack_dim(op)
    index = tuple(_tied([cx.canonical(ref)[d] for ref in refs]) for d in range(len(op.outputs[0].shape) - 1))
    word = Units(len(refs), 1).compose(()) if len(refs) <= MOST_UNITS else fresh_loops(len(refs))
    return [(*index[:dim], word, *index[dim:])]


def _stack_dim(op: Operation) -> int:
    return normal_dim(int(op.arg(1, dict(op.kwargs).get("dim", 0))), len(op.outputs[0].shape))


def _stack(cx: Context, op: Operation, output: int, index: Index) -> Val:
    refs, dim = op.args[0], _stack_dim(op)

    def of_unit(unit: int, inner: Word) -> Val:
        return _result(cx, op, cx.operand(refs[unit], replace_word(index, dim)), cx.spec(refs[unit]).dtype)

    return Units(len(refs), 1).choose(cx.builder, index[dim], of_unit)


# ---- windows: views of a part ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Places ``start + step x k`` of a dim of ``total``, for k below ``length``."""

    dim: int
    start: Dim
    length: Dim
    step: int
    total: Dim

    @property
    def units(self) -> tuple[Units, int] | None:
        """The dim as equal units, of which the window is one, and the number of that unit; None where it is none."""
        count = divide(self.total, self.length) if self.length != 0 else None
        if not isinstance(count, int) or count > MOST_UNITS:
            return None
        if self.step == count and isinstance(self.start, int) and 0 <= self.start < count:
            return Units(count, self.length, is_inner=count > 1), self.start
        which = divide(self.start, self.length)
        return (Units(count, self.length), which) if self.step == 1 and isinstance(which, int) else None

    def source(self, word: Word) -> Word:
        """The place in the dim of a place in the window."""
        found = self.units
        if found is not None:
            return found[0].at(found[1], word)
        return moved_word(word, self.start, self.total, self.step)


def _slice_window(op: Operation, total: Dim, length: Dim, first: int) -> Window:
    """The window of slice's arguments, which begin at ``first`` with the dim."""
    rank = len(op.outputs[0].shape)
    dim = normal_dim(int(op.arg(first, 0)), rank)
    start, end, step = (
        _bound(op.arg(first + 1), total, 0),
        _bound(op.arg(first + 2), total, total),
        op.arg(first + 3, 1),
    )
    if not isinstance(step, int) or step < 1 or as_dim(length - _count(start, end, step)) != 0:
        raise LoweringError("slice", f"expected a slice of provable bounds, found {start}:{end}:{step} of {total}")
    return Window(dim, start, length, step, total)


def _bound(value: Dim | None, total: Dim, default: Dim) -> Dim:
    if value is None:
        return default
    if isinstance(value, int):
        if value >= _LAST:
            return total
        if value < 0:
            value = as_dim(total + value)
    if isinstance(value, int) and isinstance(total, int):
        return min(max(value, 0), total)
    return as_dim(value)


def _count(start: Dim, end: Dim, step: int) -> Dim:
    span = as_dim(end - start)
    if isinstance(span, int):
        return max(0, -(-span // step))
    whole = divide(span, step)
    return span if step == 1 else whole if whole is not None else -1


Windows = Callable[["Context", Operation, int], Window]


def _slice(cx: Context, op: Operation, output: int) -> Window:
    shape = cx.shape(op.args[0])
    dim = normal_dim(int(op.arg(1, 0)), len(shape))
    return _slice_window(op, shape[dim], op.outputs[0].shape[dim], 1)


def _split(cx: Context, op: Operation, output: int) -> Window:
    shape = cx.shape(op.args[0])
    dim = normal_dim(int(op.arg(2, 0)), len(shape))
    sizes = [spec.shape[dim] for spec in op.outputs]
    return Window(dim, as_dim(sum(sizes[:output])), sizes[output], 1, shape[dim])


def _window_rule(window_of: Windows) -> Rule:
    def infer(cx: Context, op: Operation) -> Sequence[Index | None]:
        found: list[Index | None] = []
        for n in range(len(op.outputs)):
            window, index = window_of(cx, op, n), cx.canonical(op.args[0])
            whole = as_dim(window.length - window.total) == 0
            found.append(index if whole else replace_word(index, window.dim, fresh_loops(window.length)))
        return found

    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        window = window_of(cx, op, output)
        return cx.operand(op.args[0], replace_word(index, window.dim, window.source(index[window.dim])))

    return Custom(infer, evaluate, counts=False)


def _chosen(cx: Context, op: Operation, source: ValueRef, first: int) -> tuple[int, Dim, Dim]:
    """Dim, its size and the place of a select."""
    shape = cx.shape(source)
    dim = normal_dim(int(op.arg(first, 0)), len(shape))
    place = op.arg(first + 1)
    return dim, shape[dim], as_dim(shape[dim] + place) if isinstance(place, int) and place < 0 else as_dim(place)


def _select_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim = normal_dim(int(op.arg(1, 0)), len(cx.shape(op.args[0])))
    return [replace_word(cx.canonical(op.args[0]), dim)] * len(op.outputs)


def _select(cx: Context, op: Operation, output: int, index: Index) -> Val:
    dim, size, place = _chosen(cx, op, op.args[0], 1)
    word: Word = () if size == 1 else (Moved(place, size),)
    return cx.operand(op.args[0], (*index[:dim], word, *index[dim:]))


def _unbind(cx: Context, op: Operation, output: int, index: Index) -> Val:
    shape = cx.shape(op.args[0])
    dim = normal_dim(int(op.arg(1, 0)), len(shape))
    word: Word = () if shape[dim] == 1 else (Moved(output, shape[dim]),)
    return cx.operand(op.args[0], (*index[:dim], word, *index[dim:]))


# ---- a part put into a whole ----------------------------------------------------------------------------


def _inserted(cx: Context, op: Operation, index: Index, window: Window, part: ValueRef, rest: ValueRef | None) -> Val:
    """``part`` in the window, ``rest`` (or 0) elsewhere."""
    b, name, dim = cx.builder, op.outputs[0].dtype, window.dim

    def inside(word: Word) -> Val:
        return _result(cx, op, cx.operand(part, replace_word(index, dim, word)), cx.spec(part).dtype)

    def outside() -> Val:
        return b.const(0, name) if rest is None else cx.operand(rest, index)

    units = window.units
    if units is not None:
        with contextlib.suppress(LoweringError):
            return units[0].choose(b, index[dim], lambda n, word: inside(word) if n == units[1] else outside())
    if window.step != 1:
        raise LoweringError("slice_step", f"expected a step that divides {window.total}, found {window.step}")
    if window.length == 0:
        return outside()
    end = as_dim(window.start + window.length)
    place, tests = b.index(index[dim]), []
    if window.start != 0:
        tests.append(b.compare("ge", place, window.start))
    if as_dim(end - window.total) != 0:
        tests.append(b.compare("lt", place, end))
    test = all_of(b, tests)
    with only_where(b, test):
        value = inside(moved_word(index[dim], as_dim(-window.start), window.length))
    return value if test is None else b.where(test, value, outside())


def _inserted_index(cx: Context, window: Window, part: ValueRef) -> Index:
    index, units = cx.canonical(part), window.units
    if units is not None:
        return replace_word(index, window.dim, units[0].compose(index[window.dim]))
    return replace_word(index, window.dim, fresh_loops(window.total))


def _gradient_window(cx: Context, op: Operation) -> Window:
    shape = op.outputs[0].shape
    dim = normal_dim(int(op.arg(2)), len(shape))
    return _slice_window(op, shape[dim], cx.shape(op.args[0])[dim], 2)


def _scatter_window(cx: Context, op: Operation) -> Window:
    shape = op.outputs[0].shape
    dim = normal_dim(int(op.arg(2, 0)), len(shape))
    return _slice_window(op, shape[dim], cx.shape(op.args[1])[dim], 2)


def _slice_backward(cx: Context, op: Operation, output: int, index: Index) -> Val:
    return _inserted(cx, op, index, _gradient_window(cx, op), op.args[0], None)


def _slice_scatter(cx: Context, op: Operation, output: int, index: Index) -> Val:
    return _inserted(cx, op, index, _scatter_window(cx, op), op.args[1], op.args[0])


def _put(cx: Context, op: Operation, index: Index, part: ValueRef, rest: ValueRef | None) -> Val:
    """``part`` at one place of a dim, ``rest`` (or 0) elsewhere."""
    b, name = cx.builder, op.outputs[0].dtype
    dim = normal_dim(int(op.arg(2, 0)), len(op.outputs[0].shape))
    total, place = op.outputs[0].shape[dim], op.arg(3)
    place = as_dim(total + place) if isinstance(place, int) and place < 0 else as_dim(place)
    other = b.const(0, name) if rest is None else cx.operand(rest, index)
    value = _result(cx, op, cx.operand(part, replace_word(index, dim)), cx.spec(part).dtype)
    return b.where(b.compare("eq", b.index(index[dim]), place), value, other)


def _put_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim = normal_dim(int(op.arg(2, 0)), len(op.outputs[0].shape))
    part = cx.canonical(op.args[1] if op.short_name == "select_scatter" else op.args[0])
    return [(*part[:dim], fresh_loops(op.outputs[0].shape[dim]), *part[dim:])]


# ---- padding --------------------------------------------------------------------------------------------


class _Margin(NamedTuple):
    """A padded dim: its size, and the places before and after it."""

    dim: int
    before: Dim  # places
    size: Dim  # within
    after: Dim


def _margins(cx: Context, op: Operation) -> list[_Margin]:
    """The margins of the padded dims."""
    shape, amounts = cx.shape(op.args[0]), op.args[1]
    found = []
    for k in range(len(amounts) // 2):
        before, after, dim = amounts[2 * k], amounts[2 * k + 1], len(shape) - 1 - k
        if before != 0 or after != 0:
            found.append(_Margin(dim, before, shape[dim], after))
    return found


def _pad_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    for margin in _margins(cx, op):
        index = replace_word(index, margin.dim, fresh_loops(op.outputs[0].shape[margin.dim]))
    return [index]


def _pad(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, name = cx.builder, op.outputs[0].dtype
    source, tests = index, []
    for dim, before, size, after in _margins(cx, op):
        place = b.index(index[dim])
        if not isinstance(before, int) or before > 0:
            tests.append(b.compare("ge", place, before))
        if not isinstance(after, int) or after > 0:
            tests.append(b.compare("lt", place, as_dim(before + size)))
        source = replace_word(source, dim, () if size == 1 else moved_word(index[dim], as_dim(-before), size))
    test = all_of(b, tests)
    with only_where(b, test):
        value = cx.operand(op.args[0], source)
    filler = b.round_to(b.cast(op.arg(2, dict(op.kwargs).get("value", 0)), name), name)
    return value if test is None else b.where(test, value, filler)


MEMORY_RULES: dict[str, Rule] = {
    "aten.cat.default": Custom(_cat_infer, _cat),
    "aten.stack.default": Custom(_stack_infer, _stack),
    "aten.slice.Tensor": _window_rule(_slice),
    "aten.split.Tensor": _window_rule(_split),
    "aten.split_with_sizes.default": _window_rule(_split),
    "aten.unsafe_split.Tensor": _window_rule(_split),
    "aten.unsafe_split_with_sizes.default": _window_rule(_split),
    "aten.select.int": Custom(_select_infer, _select, counts=False),
    "aten.unbind.int": Custom(_select_infer, _unbind, counts=False),
    "aten.slice_backward.default": Custom(
        lambda cx, op: [_inserted_index(cx, _gradient_window(cx, op), op.args[0])], _slice_backward
    ),
    "aten.slice_scatter.default": Custom(
        lambda cx, op: [_inserted_index(cx, _scatter_window(cx, op), op.args[1])], _slice_scatter
    ),
    "aten.select_backward.default": Custom(_put_infer, lambda cx, op, n, index: _put(cx, op, index, op.args[0], None)),
    "aten.select_scatter.default": Custom(
        _put_infer, lambda cx, op, n, index: _put(cx, op, index, op.args[1], op.args[0])
    ),
    "aten.constant_pad_nd.default": Custom(_pad_infer, _pad),
    "aten.lift_fresh_copy.default": POINTWISE_RULES["aten.clone.default"],
}
