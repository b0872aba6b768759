"""Lowering rules of the gradients of mean poolings: each element adds the gradients of the windows that it is in.

In: the index of an element of the image. Out: the sum of the gradients of its windows, each over the number of elements
that its mean was taken over. Guarantee: nothing is read outside of an operand; windows are added in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_memory import all_of, fresh_loops, only_where, replace_word
from autofuse.codegen.lowering.rules_pool import MOST_ELEMENTS, PoolAxis, adaptive_axes, axes_of, checked, divisor_of
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index, shape = cx.canonical(op.args[0]), op.outputs[0].shape
    for dim in (len(shape) - 2, len(shape) - 1):
        index = replace_word(index, dim, fresh_loops(shape[dim]))
    return [index]


def _windows(cx: Context, axis: PoolAxis, index: Index) -> list[tuple[Val, list[Val]]]:
    """The windows along one dim that an element may be in, in their order, each with the tests that it is."""
    b = cx.builder
    place = b.add(b.index(index[axis.dim]), axis.padding)
    last = place if axis.stride == 1 else b.apply("div", place, b.const(axis.stride, "int64"))
    found = []
    for back in range(-(-axis.length // axis.stride) - 1, -1, -1):
        window = b.sub(last, back)
        tests = [b.compare("lt", window, axis.count)]
        if back:
            tests.append(b.compare("ge", window, 0))
        if (back + 1) * axis.stride > axis.length:  # the window may have ended before the element
            tests.append(b.compare("lt", b.sub(place, b.mul(window, axis.stride)), axis.length))
        found.append((window, tests))
    return found


def _avg_pool(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, to = cx.builder, op.outputs[0].dtype
    image, pooled = op.outputs[0].shape, cx.shape(op.args[0])
    is_adaptive = op.short_name.startswith("_adaptive")
    axes = checked(cx, op, adaptive_axes(image, pooled) if is_adaptive else axes_of(op, image, pooled, 2))
    with_padding, given = (True, None) if is_adaptive else op.args[6:8]
    if given is None and not is_adaptive and not op.args[5] and (with_padding or not any(a.padding for a in axes)):
        given = axes[0].length * axes[1].length  # no window leaves the padding, which symbolic sizes may not tell
    total: Val | None = None
    pairs = list(itertools.product(*(_windows(cx, axis, index) for axis in axes)))
    if len(pairs) > MOST_ELEMENTS:
        raise LoweringError("pooling", f"expected up to {MOST_ELEMENTS} windows over an element, found {len(pairs)}")
    for pair in pairs:
        source = index
        for axis, (window, _) in zip(axes, pair, strict=True):
            source = replace_word(source, axis.dim, () if axis.count == 1 else (Indirect(window, axis.count),))
        test = all_of(b, [test for _, tests in pair for test in tests])
        assert test is not None
        with only_where(b, test):
            value = cx.operand(op.args[0], source)
        divisor = divisor_of(b, axes, [window for window, _ in pair], with_padding, given)
        share = b.div(value, b.cast(divisor, to))
        share = b.where(test, share, b.const(0, to))
        total = share if total is None else b.add(total, share)
    assert total is not None
    return b.round_to(total, to)


POOL_BACKWARD_RULES: dict[str, Rule] = {
    "aten._adaptive_avg_pool2d_backward.default": Custom(_infer, _avg_pool),
    "aten.avg_pool2d_backward.default": Custom(_infer, _avg_pool),
}
