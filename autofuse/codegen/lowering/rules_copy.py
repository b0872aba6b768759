"""Lowering rules of the overloads that copy what a view shows, each the rule of its view.

In: the index at which a result is wanted. Out: the value of the operand at that place. The result has memory of its
own, so it is stored where a view would only be followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autofuse.codegen.lowering.builder import Val
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Index
from autofuse.codegen.lowering.rules_base import Custom, View, normal_dim
from autofuse.codegen.lowering.rules_index import INDEX_RULES
from autofuse.codegen.lowering.rules_memory import MEMORY_RULES, Window, fresh_loops, replace_word
from autofuse.ir.operation import Operation
from autofuse.ir.shape import as_dim

# The views of which aten has a copying overload with the same arguments.
_VIEWS = (
    "alias.default", "detach.default", "expand.default", "view.default", "permute.default", "t.default",
    "transpose.int", "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "slice.Tensor",
    "select.int", "unbind.int", "split.Tensor", "split_with_sizes.default",
)  # fmt: skip


def _copying(view: str) -> Rule:
    rule = INDEX_RULES.get(f"aten.{view}") or MEMORY_RULES[f"aten.{view}"]
    assert isinstance(rule, View | Custom)
    return replace(rule, counts=True)


def _narrowed(cx: Context, op: Operation) -> Window:
    shape = cx.shape(op.args[0])
    dim, start = normal_dim(int(op.args[1]), len(shape)), op.args[2]
    if isinstance(start, int) and start < 0:
        start = as_dim(shape[dim] + start)
    return Window(dim, start, op.outputs[0].shape[dim], 1, shape[dim])


def _narrow_infer(cx: Context, op: Operation) -> Sequence[Index | None]:
    window = _narrowed(cx, op)
    return [replace_word(cx.canonical(op.args[0]), window.dim, fresh_loops(window.length))]


def _narrow(cx: Context, op: Operation, output: int, index: Index) -> Val:
    window = _narrowed(cx, op)
    return cx.operand(op.args[0], replace_word(index, window.dim, window.source(index[window.dim])))


COPY_RULES: dict[str, Rule] = {
    **{"aten.{}_copy.{}".format(*view.split(".")): _copying(view) for view in _VIEWS},
    "aten.narrow_copy.default": Custom(_narrow_infer, _narrow),
}
