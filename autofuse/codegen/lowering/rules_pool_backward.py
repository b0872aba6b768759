"""Lowering rules of the gradients of poolings: each element adds the gradients of the windows that it is in.

In: the index of an element of the image. Out: the sum of the gradients of its windows: of a mean's, each over the
number of elements that it was taken over; of a maximum's, those that the place of the maximum names. The gradient may
be made here by cheap element-wise work, which is then done once for each window that has an element. Guarantee: nothing
is read outside of an operand; windows are added in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect
from autofuse.codegen.lowering.pool_axes import (
    MOST_ELEMENTS,
    Axes,
    adaptive_axes,
    axes_of,
    check_in_memory,
    checked,
    divisor_of,
    elements_of,
    is_padded,
    rank_of,
)
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_memory import all_of, fresh_loops, only_where, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index, shape = cx.canonical(op.args[0]), op.outputs[0].shape
    for dim in range(len(shape) - rank_of(op), len(shape)):
        index = replace_word(index, dim, fresh_loops(shape[dim]))
    return [index]


def _axes(cx: Context, op: Operation, dilation: object = 1) -> Axes:
    image, pooled = op.outputs[0].shape, cx.shape(op.args[0])
    is_adaptive = "adaptive" in op.short_name
    return checked(op, adaptive_axes(op, image, pooled) if is_adaptive else axes_of(op, image, pooled, 2, dilation))


def _windows(cx: Context, op: Operation, axes: Axes, index: Index) -> Iterator[tuple[list[Val], Index, Val]]:
    """The windows that an element may be in: their numbers along the axes, their place in what is pooled, the test that
    the element is in it."""
    b = cx.builder
    found = list(itertools.product(*(axis.windows(b, index) for axis in axes)))
    if len(found) > MOST_ELEMENTS:
        raise LoweringError("pooling", f"expected up to {MOST_ELEMENTS} windows over an element, found {len(found)}")
    for ref in op.inputs[:1] if "avg" in op.short_name else (op.inputs[0], op.inputs[-1]):
        check_in_memory(cx, ref, repeats=len(found))
    for windows in found:
        source = index
        for axis, (window, _) in zip(axes, windows, strict=True):
            source = replace_word(source, axis.dim, () if axis.count == 1 else (Indirect(window, axis.count),))
        test = all_of(b, [test for _, tests in windows for test in tests])
        assert test is not None
        yield [window for window, _ in windows], source, test


def _avg_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, to = cx.builder, op.outputs[0].dtype
    axes = _axes(cx, op)
    with_padding, given = (True, None) if "adaptive" in op.short_name else op.args[6:8]
    if given is None and "adaptive" not in op.short_name and not op.args[5] and (with_padding or not is_padded(axes)):
        given = elements_of(axes)  # no window leaves the padding, which symbolic sizes may not tell
    total: Val | None = None
    for windows, source, test in _windows(cx, op, axes, index):
        with only_where(b, test):
            value = cx.operand(op.args[0], source)
        share = b.div(value, b.cast(divisor_of(b, axes, windows, with_padding, given), to))
        share = b.where(test, share, b.const(0, to))
        total = share if total is None else b.add(total, share)
    assert total is not None
    return b.round_to(total, to)


def _max_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """The gradients of the windows whose maximum is this element.

    As aten's CUDA kernels do, only windows that hold the element are looked at: a forward pass made the places.
    """
    b, to = cx.builder, op.outputs[0].dtype
    is_adaptive = "adaptive" in op.short_name
    axes = _axes(cx, op, 1 if is_adaptive else op.args[5])
    places = op.args[2] if is_adaptive else op.args[7]
    words = [index[axis.dim] for axis in axes]
    own = b.index(words[0])
    for axis, word in zip(axes[1:], words[1:], strict=True):
        own = b.add(b.mul(own, axis.size), b.index(word))
    total = b.const(0, to)
    for _, source, test in _windows(cx, op, axes, index):
        with only_where(b, test):
            chosen = b.apply("and", test, b.apply("eq", cx.operand(places, source), own))
            value = cx.operand(op.args[0], source)
        total = b.add(total, b.where(chosen, value, b.const(0, to)))
    return b.round_to(total, to)


POOL_BACKWARD_RULES: dict[str, Rule] = {
    "aten._adaptive_avg_pool2d_backward.default": Custom(_infer, _avg_pool),
    "aten._adaptive_avg_pool3d_backward.default": Custom(_infer, _avg_pool),
    "aten.avg_pool2d_backward.default": Custom(_infer, _avg_pool),
    "aten.avg_pool3d_backward.default": Custom(_infer, _avg_pool),
    "aten.max_pool2d_with_indices_backward.default": Custom(_infer, _max_pool),
    "aten.max_pool3d_with_indices_backward.default": Custom(_infer, _max_pool),
    "aten.adaptive_max_pool2d_backward.default": Custom(_infer, _max_pool),
    "aten.adaptive_max_pool3d_backward.default": Custom(_infer, _max_pool),
}
