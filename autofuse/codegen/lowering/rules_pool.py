"""Lowering rules of pooling over windows: each element of the result reads the few elements of its window.

In: the index of an output. Out: the largest element of its window, or their mean, and the place of the largest. The
elements of a window are read one by one, so a pooling is element-wise work in the loops of its readers. Its input must
be in memory: computed here, an element would be computed once for each window that contains it. Guarantee: nothing is
read outside of the operand. A NaN wins a window, the last one if there are several, and of equal elements the first, as
in aten; a window of nothing but -inf points to its first element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect, Moved, Word, fresh_index
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_memory import all_of, only_where
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, divide

MOST_ELEMENTS = 25  # of a window; each is a load in the text of the kernel


@dataclass(frozen=True)
class PoolAxis:
    """How the windows lie along one dim of an image."""

    dim: int
    size: Dim  # of the image
    count: Dim  # of windows
    length: int
    stride: int
    padding: int
    dilation: int

    def start(self, step: int) -> int:
        """The index of element ``step`` of the first window; negative in the padding."""
        return step * self.dilation - self.padding

    def word(self, index: Index, step: int) -> Word:
        """The place of element ``step`` of the window at ``index``."""
        return (Moved(self.start(step), self.size, index[self.dim], self.stride),)

    def nearest(self, b: Builder, index: Index, step: int) -> Word:
        """The same place, or the one in the image that is nearest to it."""
        word = self.word(index, step)
        is_before, is_beyond = self._may_leave(step)
        if not is_before and not is_beyond:
            return word
        place = b.index(word)
        if is_before:
            place = b.apply("maximum", place, b.const(0, "int64"))
        if is_beyond:
            place = b.apply("minimum", place, b.size(as_dim(self.size - 1), "int64"))
        return (Indirect(place, self.size),)

    def _may_leave(self, step: int) -> tuple[bool, bool]:
        """Whether the element may lie before the image, and beyond it."""
        beyond = as_dim(self.stride * (self.count - 1) + self.start(step) - self.size)  # of the last window's element
        return self.start(step) < 0, not isinstance(beyond, int) or beyond >= 0

    def tests(self, b: Builder, index: Index, step: int) -> list[Val]:
        """The tests that the element is in the image; none where it always is."""
        place, found = b.index(self.word(index, step)), []
        is_before, is_beyond = self._may_leave(step)
        if is_before:
            found.append(b.compare("ge", place, 0))
        if is_beyond:
            found.append(b.compare("lt", place, self.size))
        return found


Axes = tuple[PoolAxis, PoolAxis]


def _axes(cx: Context, op: Operation, dilation: object = 1) -> Axes:
    """The rows and columns of the windows; raises LoweringError as `checked`."""
    return checked(cx, op, axes_of(op, cx.shape(op.args[0]), op.outputs[0].shape, 1, dilation))


def axes_of(op: Operation, shape: SymbolicShape, result: SymbolicShape, first: int, dilation: object = 1) -> Axes:
    """The rows and columns of windows over an image; their size, stride and padding are arguments from ``first`` on."""
    lengths = _pair(op.args[first], (1, 1))
    strides, paddings = _pair(op.arg(first + 1, ()), lengths), _pair(op.arg(first + 2, 0), (0, 0))
    dilations = _pair(dilation, (1, 1))
    rows, cols = (
        PoolAxis(dim, shape[dim], result[dim], lengths[n], strides[n], paddings[n], dilations[n])
        for n, dim in enumerate((len(shape) - 2, len(shape) - 1))
    )
    return rows, cols


def adaptive_axes(shape: SymbolicShape, result: SymbolicShape) -> Axes:
    """The rows and columns of windows that lie side by side over an image; raises LoweringError where they cannot."""
    axes = []
    for dim in (len(shape) - 2, len(shape) - 1):
        length = divide(shape[dim], result[dim])
        if not isinstance(length, int):
            raise LoweringError("pooling", f"expected windows of one size, found {result[dim]} over {shape[dim]}")
        axes.append(PoolAxis(dim, shape[dim], result[dim], length, length, 0, 1))
    return axes[0], axes[1]


def checked(cx: Context, op: Operation, axes: Axes) -> Axes:
    """The axes.

    Raises LoweringError for windows of more than MOST_ELEMENTS elements, for dtypes that are not floats, and for a
    tensor that is not in memory.
    """
    lengths = axes[0].length, axes[1].length
    if lengths[0] * lengths[1] > MOST_ELEMENTS:
        raise LoweringError("pooling", f"expected windows of up to {MOST_ELEMENTS} elements, found {lengths}")
    if not is_float(op.outputs[0].dtype):
        raise LoweringError("pooling", f"expected floating-point numbers, found {op.outputs[0].dtype}")
    if cx.aliased_input(op.args[0]) is None:
        raise LoweringError("pooled_value", "expected a pooling of a tensor in memory, found one of a value made here")
    return axes


def _pair(value: object, default: tuple[int, int]) -> tuple[int, int]:
    numbers = list(value) if isinstance(value, Sequence) else [value]
    found = [n for n in numbers if isinstance(n, int)]
    if len(found) != len(numbers):
        raise LoweringError("pooling", f"expected windows of known sizes, found {value}")
    return (found[0], found[-1]) if found else default


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    result = op.outputs[0].shape.dims
    outer = cx.canonical(op.args[0])[: len(result) - 2]
    return [(*outer, *fresh_index(SymbolicShape(result[-2:])))] * len(op.outputs)


def _steps(axes: Axes) -> Iterator[tuple[int, int]]:
    return itertools.product(range(axes[0].length), range(axes[1].length))


# ---- the largest ----------------------------------------------------------------------------------------


def _max_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The largest element of a window, or its place in the image.

    A place outside of the image is replaced by the nearest one in it, which the same window holds too. So no element is
    read under a test, which compilers would make a branch of.
    """
    rows, cols = axes = _axes(cx, op, op.arg(4, 1))
    if any(axis.dilation > 1 and (axis.padding or op.arg(5, False)) for axis in axes):
        raise LoweringError("pooling", "expected windows without gaps where they leave the image, found a dilation")
    b = cx.builder
    best: Val | None = None
    at: Val | None = None
    for i, j in _steps(axes):
        row, col = rows.nearest(b, index, i), cols.nearest(b, index, j)
        value = cx.operand(op.args[0], (*index[: rows.dim], row, col))
        place = b.add(b.mul(b.index(row), cols.size), b.index(col))
        if best is None or at is None:
            best, at = value, place
            continue
        wins = b.apply("or", b.compare("gt", value, best), b.compare("ne", value, value))
        best, at = b.where(wins, value, best), b.where(wins, place, at)
    assert best is not None and at is not None
    return at if output else best


# ---- the mean -------------------------------------------------------------------------------------------


def _element(cx: Context, op: Operation, axes: Axes, steps: tuple[int, int], index: Index) -> tuple[Val, Val | None]:
    """An element of a window, and the test that it is in the image; None where it always is."""
    b, at = cx.builder, list(index)
    tests = [test for axis, step in zip(axes, steps, strict=True) for test in axis.tests(b, index, step)]
    for axis, step in zip(axes, steps, strict=True):
        at[axis.dim] = axis.word(index, step)
    test = all_of(b, tests)
    with only_where(b, test):
        return cx.operand(op.args[0], tuple(at)), test


def _extent(b: Builder, axis: PoolAxis, window: Val, with_padding: bool) -> int | Val:
    """How many places of a window count along one dim: all, or those that are not cut off at the border."""
    beyond = as_dim(axis.stride * (axis.count - 1) + axis.length - 2 * axis.padding - axis.size)  # of the last window
    is_cut = not isinstance(beyond, int) or beyond > 0
    if not is_cut and (with_padding or not axis.padding):
        return axis.length
    start = b.sub(b.mul(window, axis.stride), axis.padding)
    end = b.apply("minimum", b.add(start, axis.length), b.size(as_dim(axis.size + axis.padding), "int64"))
    if not with_padding:
        start = b.apply("maximum", start, b.const(0, "int64"))
        end = b.apply("minimum", end, b.size(axis.size, "int64"))
    return b.sub(end, start)


def divisor_of(b: Builder, axes: Axes, windows: Sequence[Val], with_padding: bool, given: object) -> int | Val:
    """What the sum of a window is divided by: a given number, or the number of its elements."""
    if isinstance(given, int):
        return given
    rows, cols = (_extent(b, axis, window, with_padding) for axis, window in zip(axes, windows, strict=True))
    if isinstance(rows, int) and isinstance(cols, int):
        return rows * cols
    return b.mul(rows, cols) if isinstance(rows, Val) else b.mul(cols, rows)  # type: ignore[arg-type]


def _avg_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    axes, b = _axes(cx, op), cx.builder
    # Without ceil_mode no window leaves the padding, which symbolic sizes may not tell.
    given = op.arg(6, None)
    if given is None and not op.arg(4, False) and (op.arg(5, True) or not any(axis.padding for axis in axes)):
        given = axes[0].length * axes[1].length
    if given is None:
        given = divisor_of(b, axes, [b.index(index[axis.dim]) for axis in axes], op.arg(5, True), None)
    return _mean(cx, op, axes, index, given)


def _adaptive_avg_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    axes = checked(cx, op, adaptive_axes(cx.shape(op.args[0]), op.outputs[0].shape))
    return _mean(cx, op, axes, index, axes[0].length * axes[1].length)


def _mean(cx: Context, op: Operation, axes: Axes, index: Index, divisor: int | Val) -> Val:
    b, name = cx.builder, op.outputs[0].dtype
    total = b.const(0, name)
    for steps in _steps(axes):
        value, test = _element(cx, op, axes, steps, index)
        total = b.add(total, value if test is None else b.where(test, value, b.const(0, name)))
    return b.round_to(b.div(total, b.cast(divisor, name)), name)


POOL_RULES: dict[str, Rule] = {
    "aten.max_pool2d_with_indices.default": Custom(_infer, _max_pool),
    "aten.avg_pool2d.default": Custom(_infer, _avg_pool),
    "aten._adaptive_avg_pool2d.default": Custom(_infer, _adaptive_avg_pool),
}
