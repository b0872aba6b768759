"""Lowering rules of padding by the tensor's own elements, reflected or repeated, and of its gradients.

In: the index at which a result is wanted. Out: the value of the operand at that place. A padded place reads the one
element that it shows, whose place is calculated. The gradient of an element is the sum of those of all places that show
it, each under a test. Guarantee: nothing is read outside of an operand; gradients are added in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from autofuse.codegen.lowering.builder import Builder, Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index, Indirect
from autofuse.codegen.lowering.rules_base import Custom
from autofuse.codegen.lowering.rules_memory import all_of, fresh_loops, only_where, replace_word
from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation
from autofuse.ir.shape import Dim, as_dim

MOST_PLACES = 25  # that show one element; each is a load in the text of the kernel


class _Border(NamedTuple):
    """A padded dim."""

    dim: int
    before: Dim
    size: Dim  # within
    after: Dim

    @property
    def padded(self) -> Dim:
        return as_dim(self.before + self.size + self.after)


def _borders(op: Operation, shape: Sequence[Dim], amounts: Sequence[Dim]) -> list[_Border]:
    """The padded dims; the first two amounts are of the last dim."""
    found = []
    for k in range(len(amounts) // 2):
        before, after, dim = amounts[2 * k], amounts[2 * k + 1], len(shape) - 1 - k
        if before != 0 or after != 0:
            found.append(_Border(dim, before, shape[dim], after))
    return found[::-1]


def _is_reflected(op: Operation) -> bool:
    return op.short_name.startswith("reflection")


# ---- padding --------------------------------------------------------------------------------------------


def _pad_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    for border in _borders(op, cx.shape(op.args[0]).dims, op.args[1]):
        index = replace_word(index, border.dim, fresh_loops(op.outputs[0].shape[border.dim]))
    return [index]


def _pad(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b = cx.builder
    for dim, before, size, _ in _borders(op, cx.shape(op.args[0]).dims, op.args[1]):
        place = b.sub(b.index(index[dim]), before)
        last = b.size(as_dim(size - 1), "int64")
        if _is_reflected(op):  # at the first element, and then at the last
            place = b.sub(last, b.apply("abs", b.sub(last, b.apply("abs", place))))
        else:
            place = b.apply("minimum", b.apply("maximum", place, b.const(0, "int64")), last)
        index = replace_word(index, dim, () if size == 1 else (Indirect(place, size),))
    return cx.operand(op.args[0], index)


# ---- gradients ------------------------------------------------------------------------------------------


def _gradient_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    index = cx.canonical(op.args[0])
    for border in _borders(op, cx.shape(op.args[1]).dims, op.args[2]):
        index = replace_word(index, border.dim, fresh_loops(border.size))
    return [index]


class _Place(NamedTuple):
    """A padded place that shows an element under a test; None: it always does."""

    place: Val
    test: Val | None


def _places(b: Builder, border: _Border, index: Index, reflected: bool) -> list[_Place]:
    """The places along a padded dim that show the element at ``index``, in their order."""
    if not isinstance(border.before, int) or not isinstance(border.after, int) or min(border.before, border.after) < 0:
        raise LoweringError("padding", f"expected a padding of a known size of 0 and more, found {border}")
    at, last = b.index(index[border.dim]), as_dim(border.size - 1)
    own = _Place(b.add(at, border.before), None)
    ahead, behind = [], []
    if reflected:
        if border.before:
            inside = b.apply("and", b.compare("ge", at, 1), b.compare("le", at, border.before))
            ahead = [_Place(b.sub(b.size(border.before, "int64"), at), inside)]
        if border.after:
            inside = b.apply("and", b.compare("lt", at, last), b.compare("ge", at, as_dim(last - border.after)))
            behind = [_Place(b.sub(b.size(as_dim(border.before + 2 * last), "int64"), at), inside)]
    else:
        first = b.compare("eq", at, 0) if border.before else None
        ahead = [_Place(b.const(k, "int64"), first) for k in range(border.before)]
        end = b.compare("eq", at, last) if border.after else None
        start = as_dim(border.before + border.size)
        behind = [_Place(b.size(as_dim(start + k), "int64"), end) for k in range(border.after)]
    return [*ahead, own, *behind]


def _gradient(cx: Context, op: Operation, output: int, index: Index) -> Val:
    b, to = cx.builder, op.outputs[0].dtype
    borders = _borders(op, cx.shape(op.args[1]).dims, op.args[2])
    places = [_places(b, border, index, _is_reflected(op)) for border in borders]
    found: Val | None = None
    for number, chosen in enumerate(itertools.product(*places)):
        if number >= MOST_PLACES:
            raise LoweringError("window", f"expected up to {MOST_PLACES} places that show an element, found more")
        source = index
        for border, item in zip(borders, chosen, strict=True):
            word = () if border.padded == 1 else (Indirect(item.place, border.padded),)
            source = replace_word(source, border.dim, word)
        test = all_of(b, [item.test for item in chosen if item.test is not None])
        with only_where(b, test):
            value = cx.operand(op.args[0], source)
        if test is not None:
            value = b.where(test, value, b.const(0, to))
        found = value if found is None else b.add(found, value)
    assert found is not None
    return b.round_to(found, to)


_KINDS = [f"{kind}_pad{rank}d" for kind in ("reflection", "replication") for rank in (1, 2, 3)]

BORDER_RULES: dict[str, Rule] = {
    **{f"aten.{kind}.default": Custom(_pad_infer, _pad) for kind in _KINDS},
    **{f"aten.{kind}_backward.default": Custom(_gradient_infer, _gradient) for kind in _KINDS},
}
