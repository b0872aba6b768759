"""Lowering rules of the gated linear unit and its gradient: one half of a dim times the sigmoid of the other half.

In: the index at which a result is wanted. Out: the value there. Both halves are read at the place of the result; the
gradient is stored once for each half. Formulas are those of ATen's Activation.cpp and GatedLinearUnit.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Word
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.codegen.lowering.rules_memory import Units, fresh_loops, replace_word
from autofuse.codegen.lowering.rules_pointwise import sigmoid
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, ValueRef
from autofuse.ir.shape import divide


def _halves(cx: Context, x: ValueRef, dim: int) -> tuple[int, Units]:
    """The dim of the halves of ``x``, and the dim as two units."""
    shape = cx.shape(x)
    dim = normal_dim(dim, len(shape))
    half = divide(shape[dim], 2)
    if half is None:
        raise LoweringError("view", f"expected a dim of two halves, found {shape[dim]}")
    return dim, Units(2, half)


def _read(cx: Context, x: ValueRef, halves: tuple[int, Units], index: Index) -> tuple[Val, Val]:
    """The elements of both halves at a place within one."""
    dim, units = halves
    values = [cx.operand(x, replace_word(index, dim, units.at(half, index[dim]))) for half in range(2)]
    return values[0], values[1]


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim, units = _halves(cx, op.args[0], int(op.arg(1, -1)))
    return [replace_word(cx.canonical(op.args[0]), dim, fresh_loops(units.size))]


def _glu(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b = cx.builder
    first, second = _read(cx, op.args[0], _halves(cx, op.args[0], int(op.arg(1, -1))), index)
    return b.round_to(b.mul(first, sigmoid(b, op.outputs[0].dtype, second)), op.outputs[0].dtype)


def _gradient_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    dim, units = _halves(cx, op.args[1], int(op.args[2]))
    index = cx.canonical(op.args[0])
    return [replace_word(index, dim, units.compose(index[dim]))]


def _gradient(cx: Context, op: Operation, output: int, index: Index) -> Val:
    """g s for the first half, g a s (1 - s) for the second, with s the sigmoid of the second."""
    b, to = cx.builder, op.outputs[0].dtype
    dim, units = _halves(cx, op.args[1], int(op.args[2]))

    def of_half(half: int, word: Word) -> Val:
        at = replace_word(index, dim, word)
        grad = cx.operand(op.args[0], at)
        first, second = _read(cx, op.args[1], (dim, units), at)
        gate = sigmoid(b, op.outputs[0].dtype, second)
        if half == 0:
            return b.round_to(b.mul(gate, grad), to)
        slope = b.mul(b.sub(b.const(1.0, gate.dtype), gate), gate)
        return b.round_to(b.mul(b.mul(slope, first), grad), to)

    return units.choose(b, index[dim], of_half)


GLU_RULES: dict[str, Rule] = {
    "aten.glu.default": Custom(_infer, _glu),
    "aten.glu_backward.default": Custom(_gradient_infer, _gradient),
}
