"""Lowering rules of scans along a dim: sums, products, extremes and log-sums of all elements up to each place.

In: the index at which a result is wanted. Out: its value, with `scan` nodes along the loops of the dim. Behind a flip
the scan goes backwards along them: the gradient of a sum, a flipped sum of what is flipped, is one scan. Guarantee:
elements are added in aten's order, and extremes are those of aten: the last of equal ones, NaN once there was one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Atom, Index, Moved, Word, atoms_of, resolve, word_size
from autofuse.codegen.lowering.rules_base import Custom, normal_dim
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import Dim, as_dim


def _infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    return [cx.canonical(op.args[0])] * len(op.outputs)


class _Traversal(NamedTuple):
    """How a word traverses a dim: it is at ``start + step x place along the loops``."""

    loops: tuple[Atom, ...]
    start: Dim
    step: int


def _traversal_of(word: Word) -> _Traversal:
    """Raises LoweringError for a word that is not made of loops alone."""
    parts = resolve(word)
    if len(parts) == 1 and isinstance(parts[0], Moved) and parts[0].word:
        inner = _traversal_of(parts[0].word)
        return _Traversal(inner.loops, as_dim(parts[0].start + parts[0].step * inner.start), parts[0].step * inner.step)
    loops = tuple(part for part in parts if isinstance(part, Atom))
    if len(loops) != len(parts):
        raise LoweringError("scan", "expected a scan that is read along its dim, found it read at single places")
    return _Traversal(loops, 0, 1)


def _scanned(cx: Context, op: Operation, kind: str, value: Val, index: Index) -> Val:
    """What a reduction of this kind has reached at an index, where the elements have ``value``."""
    size = cx.shape(op.args[0])
    dim = normal_dim(int(op.args[1]), max(1, len(size)))
    if not index or size[dim] == 1:
        return value
    way = _traversal_of(index[dim])
    others = atoms_of((*index[:dim], *index[dim + 1 :]))
    is_whole = as_dim(word_size(way.loops) - size[dim]) == 0
    is_reversed = way.step == -1 and as_dim(way.start - size[dim] + 1) == 0
    if not is_whole or set(way.loops) & set(others) or not (is_reversed or (way.step, way.start) == (1, 0)):
        raise LoweringError("scan", "expected a scan that is read along all of its dim, found a part of it read")
    if cx.builder.guard is not None:
        raise LoweringError("scan", "expected a scan of all elements, found one that is made under a test")
    return cx.builder.scan(kind, value, way.loops, is_reversed)


def _scan(kind: str) -> Custom:
    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        return _scanned(cx, op, kind, cx.builder.cast(cx.operand(op.args[0], index), op.outputs[0].dtype), index)

    return Custom(_infer, evaluate)


def _extreme(kind: str) -> Custom:
    """``cummax`` and ``cummin``: an element that is as large as the largest before it takes its place."""

    def evaluate(cx: Context, op: Operation, output: int, index: Index) -> Val:
        b, x = cx.builder, cx.operand(op.args[0], index)
        wide = b.cast(x, "int32") if x.dtype == "bool" else x
        most = _scanned(cx, op, kind, wide, index)
        if output == 0:
            return b.cast(most, x.dtype)
        is_found = b.apply("eq", wide, most)
        if is_float(x.dtype):
            is_found = b.apply("or", is_found, b.apply("isnan", x))  # beside a NaN no number is the extreme
        place = b.index(index[normal_dim(int(op.args[1]), len(index))]) if index else b.const(0, "int64")
        return _scanned(cx, op, "max", b.where(is_found, place, b.const(0, "int64")), index)

    return Custom(_infer, evaluate)


SCAN_RULES: dict[str, Rule] = {
    "aten.cumsum.default": _scan("sum"),
    "aten.cumprod.default": _scan("prod"),
    "aten.logcumsumexp.default": _scan("logsum"),
    "aten.cummax.default": _extreme("max"),
    "aten.cummin.default": _extreme("min"),
}
