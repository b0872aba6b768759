"""How the windows of a pooling lie along the dims of an image.

In: a pooling, its image's shape and its result's. Out: an axis for each pooled dim: where the elements of a window are,
in which windows an element is, and how many elements count. Guarantee: a place is provably in the image, or comes with
the test that it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context
from autofuse.codegen.lowering.index import Index, Indirect, Moved, Word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, divide

MOST_ELEMENTS = 27  # of a window; each is a load in the text of the kernel
MOST_REPEATED = 64  # arithmetic operations that an element of a result may take to make what its windows read
_CHEAP = 4.0  # arithmetic operations of an element up to which it may be calculated once for each window


class Axis(Protocol):
    """The windows along one dim of an image."""

    @property
    def dim(self) -> int: ...

    @property
    def size(self) -> Dim:
        """Of the image."""

    @property
    def count(self) -> Dim:
        """Of windows."""

    @property
    def length(self) -> int:
        """Elements of the longest window."""

    def word(self, b: Builder, index: Index, step: int) -> Word:
        """The place of element ``step`` of the window at ``index``."""

    def nearest(self, b: Builder, index: Index, step: int) -> Word:
        """The same place, or that of the nearest element that the window has."""

    def tests(self, b: Builder, index: Index, step: int) -> list[Val]:
        """The tests that the window has such an element; none where it always has."""

    def windows(self, b: Builder, index: Index) -> list[tuple[Val, list[Val]]]:
        """The windows that an element may be in, in their order, each with the tests that it is."""

    def extent(self, b: Builder, window: Val, with_padding: bool) -> int | Val:
        """How many places of a window count: all, or those that are not cut off at the border."""


@dataclass(frozen=True)
class PoolAxis:
    """Windows of one length, which go in strides."""

    dim: int
    size: Dim
    count: Dim
    length: int
    stride: int
    padding: int
    dilation: int

    def start(self, step: int) -> int:
        """The index of element ``step`` of the first window; negative in the padding."""
        return step * self.dilation - self.padding

    def word(self, b: Builder, index: Index, step: int) -> Word:
        return (Moved(self.start(step), self.size, index[self.dim], self.stride),)

    def nearest(self, b: Builder, index: Index, step: int) -> Word:
        word = self.word(b, index, step)
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
        place, found = b.index(self.word(b, index, step)), []
        is_before, is_beyond = self._may_leave(step)
        if is_before:
            found.append(b.compare("ge", place, 0))
        if is_beyond:
            found.append(b.compare("lt", place, self.size))
        return found

    def windows(self, b: Builder, index: Index) -> list[tuple[Val, list[Val]]]:
        if self.dilation > 1:
            raise LoweringError("pooling", "expected the gradient of windows without gaps, found a dilation")
        place = b.add(b.index(index[self.dim]), self.padding)
        last = place if self.stride == 1 else b.apply("div", place, b.const(self.stride, "int64"))
        found = []
        for back in range(-(-self.length // self.stride) - 1, -1, -1):
            window = b.sub(last, back)
            tests = [b.compare("lt", window, self.count)]
            if back:
                tests.append(b.compare("ge", window, 0))
            if (back + 1) * self.stride > self.length:  # the window may have ended before the element
                tests.append(b.compare("lt", b.sub(place, b.mul(window, self.stride)), self.length))
            found.append((window, tests))
        return found

    def extent(self, b: Builder, window: Val, with_padding: bool) -> int | Val:
        beyond = as_dim(self.stride * (self.count - 1) + self.length - 2 * self.padding - self.size)  # of the last one
        is_cut = not isinstance(beyond, int) or beyond > 0
        if not is_cut and (with_padding or not self.padding):
            return self.length
        start = b.sub(b.mul(window, self.stride), self.padding)
        end = b.apply("minimum", b.add(start, self.length), b.size(as_dim(self.size + self.padding), "int64"))
        if not with_padding:
            start = b.apply("maximum", start, b.const(0, "int64"))
            end = b.apply("minimum", end, b.size(self.size, "int64"))
        return b.sub(end, start)


@dataclass(frozen=True)
class AdaptiveAxis:
    """Windows that cover an image in ``count`` parts of nearly one length: neighbours may share an element.

    Window i goes from floor(i x size / count) to ceil((i + 1) x size / count), as in aten.
    """

    dim: int
    size: int
    count: int

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(_parts_of(self.size, self.count))

    @property
    def length(self) -> int:
        return max(self._lengths)

    def _start(self, b: Builder, window: Val) -> Val:
        return b.apply("div", b.mul(window, self.size), b.const(self.count, "int64"))

    def _end(self, b: Builder, window: Val) -> Val:
        last = b.add(b.mul(window, self.size), self.size + self.count - 1)
        return b.apply("div", last, b.const(self.count, "int64"))

    def _place(self, b: Builder, index: Index, step: int) -> Val:
        return b.add(self._start(b, b.index(index[self.dim])), step)

    def word(self, b: Builder, index: Index, step: int) -> Word:
        return (Indirect(self._place(b, index, step), self.size),)

    def nearest(self, b: Builder, index: Index, step: int) -> Word:
        place = self._place(b, index, step)
        if step >= min(self._lengths):
            place = b.apply("minimum", place, b.sub(self._end(b, b.index(index[self.dim])), 1))
        return (Indirect(place, self.size),)

    def tests(self, b: Builder, index: Index, step: int) -> list[Val]:
        if step < min(self._lengths):
            return []
        return [b.apply("lt", self._place(b, index, step), self._end(b, b.index(index[self.dim])))]

    def windows(self, b: Builder, index: Index) -> list[tuple[Val, list[Val]]]:
        place = b.index(index[self.dim])
        first = b.apply("div", b.mul(place, self.count), b.const(self.size, "int64"))
        end = b.apply("div", b.add(b.mul(place, self.count), self.count + self.size - 1), b.const(self.size, "int64"))
        windows = [b.add(first, step) for step in range(max(_parts_of(self.count, self.size)))]
        return [(window, [b.apply("lt", window, end)]) for window in windows]

    def extent(self, b: Builder, window: Val, with_padding: bool) -> int | Val:
        if min(self._lengths) == self.length:
            return self.length
        return b.sub(self._end(b, window), self._start(b, window))


def _parts_of(size: int, count: int) -> Iterator[int]:
    """The lengths of ``count`` windows that cover ``size`` elements."""
    return (-(-(i + 1) * size // count) - i * size // count for i in range(count))


Axes = tuple[Axis, ...]


def rank_of(op: Operation) -> int:
    """How many dims a pooling pools."""
    return 3 if "3d" in op.short_name else 2


def axes_of(op: Operation, shape: SymbolicShape, result: SymbolicShape, first: int, dilation: object = 1) -> Axes:
    """The axes of windows over an image; their length, stride and padding are arguments from ``first`` on."""
    rank = rank_of(op)
    lengths = _numbers(op.args[first], (1,) * rank)
    strides, paddings = _numbers(op.arg(first + 1, ()), lengths), _numbers(op.arg(first + 2, 0), (0,) * rank)
    dilations = _numbers(dilation, (1,) * rank)
    return tuple(
        PoolAxis(dim, shape[dim], result[dim], lengths[n], strides[n], paddings[n], dilations[n])
        for n, dim in enumerate(range(len(shape) - rank, len(shape)))
    )


def adaptive_axes(op: Operation, shape: SymbolicShape, result: SymbolicShape) -> Axes:
    """The axes of windows that cover an image; raises LoweringError where their lengths are not known."""
    axes: list[Axis] = []
    for dim in range(len(shape) - rank_of(op), len(shape)):
        size, count = shape[dim], result[dim]
        length = divide(size, count)
        if isinstance(length, int) and length > 0:  # windows that lie side by side
            axes.append(PoolAxis(dim, size, count, length, length, 0, 1))
        elif isinstance(size, int) and isinstance(count, int) and size > 0 and count > 0:
            axes.append(AdaptiveAxis(dim, size, count))
        else:
            raise LoweringError("pooling", f"expected windows of known lengths, found {count} over {size}")
    return tuple(axes)


def checked(op: Operation, axes: Axes) -> Axes:
    """The axes. Raises LoweringError for windows of more than MOST_ELEMENTS elements, and dtypes without floats."""
    if elements_of(axes) > MOST_ELEMENTS:
        lengths = tuple(axis.length for axis in axes)
        raise LoweringError("pooling", f"expected windows of up to {MOST_ELEMENTS} elements, found {lengths}")
    if not is_float(op.outputs[0].dtype):
        raise LoweringError("pooling", f"expected floating-point numbers, found {op.outputs[0].dtype}")
    return axes


def check_in_memory(cx: Context, ref: ValueRef, repeats: int) -> None:
    """Raise LoweringError for a value that is costly to make for each of so many windows.

    ``repeats``: 0 where it may not be made here at all.
    """
    if cx.aliased_input(ref) is None and (not repeats or repeats * _cost(cx, ref) > MOST_REPEATED):
        raise LoweringError("pooled_value", "expected a pooling of a tensor in memory, found one of a value made here")


def _cost(cx: Context, ref: ValueRef) -> float:
    """Arithmetic operations of an element of a value; infinite where it is more than cheap element-wise work."""
    op = cx.operation_of(ref)
    if op is None:
        return 0.0
    facts = info(op.target)
    if facts.kind not in (OpKind.POINTWISE, OpKind.VIEW, OpKind.CREATION) or facts.flops > _CHEAP:
        return math.inf
    return facts.flops + sum(_cost(cx, r) for r in op.inputs)


def elements_of(axes: Axes) -> int:
    """Elements of the longest window."""
    return math.prod(axis.length for axis in axes)


def is_padded(axes: Axes) -> bool:
    """Whether places beside the image belong to windows."""
    return any(isinstance(axis, PoolAxis) and axis.padding > 0 for axis in axes)


def steps_of(axes: Axes) -> Iterator[tuple[int, ...]]:
    """The numbers of a window's elements along the axes."""
    return itertools.product(*(range(axis.length) for axis in axes))


def divisor_of(b: Builder, axes: Axes, windows: Sequence[Val], with_padding: bool, given: object) -> int | Val:
    """What the sum of a window is divided by: a given number, or the number of its elements."""
    if isinstance(given, int):
        return given
    extents = [axis.extent(b, window, with_padding) for axis, window in zip(axes, windows, strict=True)]
    total = extents[0]
    for own in extents[1:]:
        if isinstance(total, int):
            total = total * own if isinstance(own, int) else b.mul(own, total)
        else:
            total = b.mul(total, own)
    return total


def _numbers(value: object, default: tuple[int, ...]) -> tuple[int, ...]:
    """One number for each axis."""
    numbers = list(value) if isinstance(value, Sequence) else [value]
    found = [n for n in numbers if isinstance(n, int)]
    if len(found) != len(numbers):
        raise LoweringError("pooling", f"expected windows of known sizes, found {value}")
    if not found:
        return default
    return tuple(found) if len(found) == len(default) else (found[0],) * len(default)
