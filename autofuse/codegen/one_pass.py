"""Fewer passes over a row: reductions of distances from the row's own maximum or mean, made beside these.

In: a loop kernel. Out: the same with a ``row_merge`` in place of each such reduction. A softmax reads its row once for
its maximum and once for the sum of exponentials; a variance once for the mean and once for the squares. Both can be
made of a part of the row at a time, relative to what that part or the row so far has, and corrected when parts are
merged:

    sum exp(x - top)  = exp(t - top) sum exp(x - t),                         with t the maximum so far
    sum (x - mean)^2  = sum over parts of (squares from the part's own mean m) + count (m - mean)^2

Each of the two makes the elements anew, so costly ones are left in passes of their own, which keep them in a buffer.
Guarantee: a kernel without such reductions is given back as it is. The result is the same but for rounding: NaN, Inf
and rows of nothing but -inf end as in several passes. Sources: Milakov and Gimelshein 2018; Chan, Golub and LeVeque
1979.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from autofuse.codegen.column_passes import WORTH_KEEPING, cones_of, costs_of
from autofuse.codegen.dtypes import is_float
from autofuse.codegen.loops import LoopKernel, LoopValue, regions
from autofuse.ir.shape import as_dim, product


class _Merge(NamedTuple):
    """What a reduction is of: its kind, the elements, and the reduction that it is relative to."""

    kind: str
    element: int
    beside: int


def merge_passes(kernel: LoopKernel) -> LoopKernel:
    """The kernel with merges in place of the reductions that can be ones."""
    found = regions(kernel)
    costs = costs_of(kernel, cones_of(kernel, found))
    values = list(kernel.values)
    for number, value in enumerate(kernel.values):
        if value.op != "row_reduce" or value.attr != "sum" or not is_float(value.dtype):
            continue
        merge = _exponentials(kernel, value) or _squares(kernel, value)
        if merge is not None and found[merge.element].cols and costs[merge.element] < WORTH_KEEPING:
            values[number] = LoopValue("row_merge", value.dtype, (merge.element, merge.beside), merge.kind)
    merged = tuple(values)
    return kernel if merged == kernel.values else dataclasses.replace(kernel, values=merged)


def can_merge_passes(kernel: LoopKernel) -> bool:
    return merge_passes(kernel) is not kernel


def _exponentials(kernel: LoopKernel, reduction: LoopValue) -> _Merge | None:
    """sum exp(x - top)."""
    exponential = kernel.values[reduction.args[0]]
    distance = kernel.values[exponential.args[0]] if exponential.op == "exp" else exponential
    if exponential.op != "exp" or distance.op != "sub":
        return None
    element, top = distance.args
    if _is_of(kernel, top, ("peak", "max"), element):
        return _Merge("exp", element, top)
    shift = kernel.values[top]
    if shift.op != "where":
        return None
    test, zero, finite = shift.args
    is_infinite = kernel.values[test]
    if is_infinite.op != "eq" or kernel.values[zero].op != "const" or kernel.values[zero].attr != 0:
        return None
    size, bound = (kernel.values[a] for a in is_infinite.args)
    is_tested = size.op == "abs" and size.args == (finite,) and bound.op == "const" and bound.attr == math.inf
    if is_tested and _is_of(kernel, finite, ("peak", "max"), element):
        return _Merge("exp_finite", element, finite)
    return None


def _squares(kernel: LoopKernel, reduction: LoopValue) -> _Merge | None:
    """sum (x - mean)^2."""
    square = kernel.values[reduction.args[0]]
    if square.op != "mul" or square.args[0] != square.args[1]:
        return None
    distance = kernel.values[square.args[0]]
    if distance.op != "sub":
        return None
    element, middle = distance.args
    mean = kernel.values[middle]
    if mean.op != "div" or not _is_of(kernel, mean.args[0], ("sum",), element):
        return None
    return _Merge("squares", element, mean.args[0]) if _is_columns(kernel, mean.args[1]) else None


def _is_of(kernel: LoopKernel, number: int, kinds: tuple[str, ...], element: int) -> bool:
    """Whether a value is the reduction of an element over its row."""
    value = kernel.values[number]
    return value.op == "row_reduce" and value.attr in kinds and value.args == (element,)


def _is_columns(kernel: LoopKernel, number: int) -> bool:
    """Whether a value is the number of columns."""
    value, columns = kernel.values[number], as_dim(product(kernel.dims[d] for d in kernel.cols))
    if value.op == "const":
        return isinstance(columns, int) and value.attr == columns
    return value.op == "size" and as_dim(value.attr - columns) == 0  # type: ignore[operator]
