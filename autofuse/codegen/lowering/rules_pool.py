"""Lowering rules of pooling over windows: each element of the result reads the few elements of its window.

In: the index of an output. Out: the largest element of its window, or their mean, and the place of the largest. The
elements of a window are read one by one, so a pooling is element-wise work in the loops of its readers. Its input must
be in memory: computed here, an element would be computed once for each window that contains it. Guarantee: nothing is
read outside of the operand. A NaN wins a window, the last one if there are several, and of equal elements the first, as
in aten; a window of nothing but -inf points to its first element.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, fresh_index
from autofuse.codegen.lowering.pool_axes import (
    Axes,
    PoolAxis,
    adaptive_axes,
    axes_of,
    check_in_memory,
    checked,
    divisor_of,
    elements_of,
    is_padded,
    rank_of,
    steps_of,
)
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_memory import all_of, only_where
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import SymbolicShape


def _axes(cx: Context, op: Operation, dilation: object = 1) -> Axes:
    """The axes of the windows; raises LoweringError as `checked`, and for a tensor that is not in memory."""
    shape, result = cx.shape(op.args[0]), op.outputs[0].shape
    is_adaptive = "adaptive" in op.short_name
    axes = adaptive_axes(op, shape, result) if is_adaptive else axes_of(op, shape, result, 1, dilation)
    checked(op, axes)
    check_in_memory(cx, op.args[0], repeats=0)
    return axes


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    result, rank = op.outputs[0].shape.dims, rank_of(op)
    outer = cx.canonical(op.args[0])[: len(result) - rank]
    return [(*outer, *fresh_index(SymbolicShape(result[-rank:])))] * len(op.outputs)


# ---- the largest ----------------------------------------------------------------------------------------


def _max_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The largest element of a window, or its place in the image.

    A place outside of the image is replaced by the nearest one in it, which the same window holds too. So no element is
    read under a test, which compilers would make a branch of.
    """
    is_adaptive = "adaptive" in op.short_name
    axes = _axes(cx, op, 1 if is_adaptive else op.arg(4, 1))
    for axis in axes:
        if isinstance(axis, PoolAxis) and axis.dilation > 1 and (axis.padding or op.arg(5, False)):
            raise LoweringError("pooling", "expected windows without gaps where they leave the image, found a dilation")
    b = cx.builder
    best: Val | None = None
    at: Val | None = None
    for steps in steps_of(axes):
        words = tuple(axis.nearest(b, index, step) for axis, step in zip(axes, steps, strict=True))
        value = cx.operand(op.args[0], (*index[: axes[0].dim], *words))
        place = b.index(words[0])
        for axis, word in zip(axes[1:], words[1:], strict=True):
            place = b.add(b.mul(place, axis.size), b.index(word))
        if best is None or at is None:
            best, at = value, place
            continue
        wins = b.apply("or", b.compare("gt", value, best), b.compare("ne", value, value))
        best, at = b.where(wins, value, best), b.where(wins, place, at)
    assert best is not None and at is not None
    return at if output else best


# ---- the mean -------------------------------------------------------------------------------------------


def _element(cx: Context, op: Operation, axes: Axes, steps: Sequence[int], index: Index) -> tuple[Val, Val | None]:
    """An element of a window, and the test that it is in the image; None where it always is."""
    b, at = cx.builder, list(index)
    tests = [test for axis, step in zip(axes, steps, strict=True) for test in axis.tests(b, index, step)]
    for axis, step in zip(axes, steps, strict=True):
        at[axis.dim] = axis.word(b, index, step)
    test = all_of(b, tests)
    with only_where(b, test):
        return cx.operand(op.args[0], tuple(at)), test


def _avg_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    axes, b = _axes(cx, op), cx.builder
    given: int | Val | None
    if "adaptive" in op.short_name:
        with_padding, given = True, elements_of(axes) if all(isinstance(axis, PoolAxis) for axis in axes) else None
    else:
        with_padding, given = op.arg(5, True), op.arg(6, None)
        # Without ceil_mode no window leaves the padding, which symbolic sizes may not tell.
        if given is None and not op.arg(4, False) and (with_padding or not is_padded(axes)):
            given = elements_of(axes)
    if given is None:
        given = divisor_of(b, axes, [b.index(index[axis.dim]) for axis in axes], with_padding, None)
    name = op.outputs[0].dtype
    total = b.const(0, name)
    for steps in steps_of(axes):
        value, test = _element(cx, op, axes, steps, index)
        total = b.add(total, value if test is None else b.where(test, value, b.const(0, name)))
    return b.round_to(b.div(total, b.cast(given, name)), name)


POOL_RULES: dict[str, Rule] = {
    "aten.max_pool2d_with_indices.default": Custom(_infer, _max_pool),
    "aten.max_pool3d_with_indices.default": Custom(_infer, _max_pool),
    "aten.adaptive_max_pool2d.default": Custom(_infer, _max_pool),
    "aten.adaptive_max_pool3d.default": Custom(_infer, _max_pool),
    "aten.avg_pool2d.default": Custom(_infer, _avg_pool),
    "aten.avg_pool3d.default": Custom(_infer, _avg_pool),
    "aten._adaptive_avg_pool2d.default": Custom(_infer, _avg_pool),
    "aten._adaptive_avg_pool3d.default": Custom(_infer, _avg_pool),
}
