"""Matches hand-written attention (matmul, scale, mask, softmax, matmul) and replaces it with torch's own attention.

In: a form. Out: the form with the chain replaced by ``vendor.sdpa``, or a reason why it may not be. Guarantee: rows
without any key left give NaN like the softmax, not the library's value. The probabilities must have no other reader,
and there must be no dropout between, since it would use other random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.ir.shape import Dim
from autofuse.strategies.chains import is_free, keep_order, next_link, number, replaced
from autofuse.strategies.strategy import graph_of

DROPOUT_INSIDE = "dropout inside keeps eager's random numbers; the vendor's attention would draw others"
LEAST_FILL = -1e30  # a fill at or below this makes a probability exactly 0
PRODUCTS = ("bmm", "baddbmm")


@dataclass(frozen=True)
class Scores:
    """The input of a softmax: a matmul, scaled and masked."""

    chain: tuple[Operation, ...]  # operations from the matmul to the softmax's input
    query: ValueRef  # [B, H, T, D] or [B*H, T, D]
    key: ValueRef  # transposed: [B, H, D, S] or [B*H, D, S]
    lead: tuple[Dim, ...]  # B, H
    scale: float
    bias: ValueRef | None  # added to the scores
    masked: ValueRef | None  # True where a score is masked
    fill: float  # in place of such a score


@dataclass(frozen=True)
class Attention:
    """One attention in a graph."""

    chain: tuple[Operation, ...]  # operations from the first matmul to the last one that is replaced
    scores: Scores
    value: ValueRef  # [B, H, S, D] or [B*H, S, D]
    heads_last: bool  # the result is wanted as [B, T, H, D]


def attention_rewrites(form: NodeForm) -> NodeForm | None:
    """The form with each attention replaced; None where there is none."""
    current, count = form, 0
    for name in [op.name for op in form.operations if op.short_name == "_softmax"]:
        graph = graph_of(current)
        found = find_attention(graph, graph.by_name[name]) if name in graph.by_name else "gone"
        if isinstance(found, str):
            continue
        last, scores = found.chain[-1], found.scores
        args = (
            scores.query, scores.key, found.value, scores.lead, scores.scale, scores.bias, scores.masked,
            found.heads_last, scores.fill,
        )  # fmt: skip
        made = Operation(last.name, "vendor.sdpa.default", args, (), (last.outputs[0],), last.source)
        current, count = replaced(current, found.chain, [made]), count + 1
    return current if count else None


def find_attention(graph: FusionGraph, softmax: Operation) -> Attention | str:
    """The attention around a softmax, or why it cannot be taken: "" where it is no attention at all."""
    shape = softmax.outputs[0].shape
    rank = len(shape)
    if rank not in (3, 4) or softmax.arg(1) not in (-1, rank - 1) or softmax.arg(2):
        return ""
    below = next_link(graph, softmax)
    if below is None:
        readers = graph.value_readers.get(ValueRef(softmax.name), ())
        is_attention = any(graph.by_name[name].short_name in PRODUCTS for name in readers)
        return "the probabilities are needed again, for the backward pass or by the script" if is_attention else ""
    if below.operation.short_name == "dropout_scale":
        return DROPOUT_INSIDE
    if below.operation.short_name != "bmm" or below.operand != 0:
        return ""
    scores = find_scores(graph, softmax)
    if scores is None:
        return ""
    second = below.operation
    in_order = keep_order(graph, below.views)
    if not in_order or graph.spec(second.args[0]).shape.dims[-2:] != shape.dims[-2:]:
        return ""
    lead = scores.lead
    query, key, value = (_before_copy(graph, ref, lead) for ref in (scores.query, scores.key, second.args[1]))
    scores = replace(scores, query=query, key=key)
    chain = [*scores.chain, softmax, *below.views, second]
    after = next_link(graph, second)
    heads_last = False
    if (
        after is not None
        and after.operation.short_name == "clone"
        and len(lead) == 2
        and keep_order(graph, after.views[:-1])
        and _merges_heads(after.views, lead)
    ):
        chain += [*after.views, after.operation]
        heads_last = True
    return Attention(tuple(chain), scores, value, heads_last)


def find_scores(graph: FusionGraph, softmax: Operation) -> Scores | None:
    """The matmul, scale and masks before a softmax; None where anything else is between.

    Scale and masks must fit [B, H, T, S], which are the matmul's elements in contiguous order.
    """
    shape = softmax.outputs[0].shape
    middle: list[Operation] = []
    views: list[Operation] = []  # those next to each other, the last one first
    scale, bias, masked, least = 1.0, None, None, float("-inf")
    current = softmax.args[0]
    while True:
        op = graph.by_name.get(current.name)
        if op is None or len(graph.consumers[op.name]) != 1 or op.name in {r.name for r in graph.outputs}:
            return None
        if is_free(graph, op):
            views.append(op)
        elif not keep_order(graph, views[::-1]):
            return None
        else:
            views = []
        if op.short_name == "bmm":
            if op.outputs[0].shape.dims[-2:] != shape.dims[-2:]:
                return None
            lead = tuple(shape.dims[:-2])
            return Scores((op, *middle[::-1]), op.args[0], op.args[1], lead, scale, bias, masked, least)
        middle.append(op)
        if op.target in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"):
            factor = number(op.args[1])
            if factor is None or factor <= 0:  # torch's CPU kernel masks before it scales: -inf would become inf
                return None
            scale *= factor if op.short_name == "mul" else 1.0 / factor
        elif op.target == "aten.add.Tensor" and isinstance(op.args[1], ValueRef) and scale == 1.0 and not op.kwargs:
            if bias is not None or graph.spec(op.args[1]).dtype != op.outputs[0].dtype or op.outputs[0].shape != shape:
                return None
            bias = op.args[1]
        elif op.target == "aten.masked_fill.Scalar" and scale == 1.0:
            fill = number(op.args[2])
            if masked is not None or bias is not None or fill is None or fill > LEAST_FILL:
                return None
            if op.outputs[0].shape != shape:
                return None
            masked, least = op.args[1], fill
        elif not is_free(graph, op):
            return None
        if not isinstance(op.args[0], ValueRef):
            return None
        current = op.args[0]


def _before_copy(graph: FusionGraph, ref: ValueRef, lead: tuple[Dim, ...]) -> ValueRef:
    """The operand before the copy that makes its heads contiguous, if there is one."""
    current, copied = ref, False
    while current.name in graph.by_name:
        op = graph.by_name[current.name]
        if op.short_name == "clone" and not copied:
            copied = True
        elif op.short_name not in ("view", "_unsafe_view", "expand"):
            break
        if not isinstance(op.args[0], ValueRef):
            break
        current = op.args[0]
    shape = graph.spec(current).shape
    return current if copied and len(shape) == 4 and tuple(shape.dims[:2]) == lead else ref


def _merges_heads(views: tuple[Operation, ...], lead: tuple[Dim, ...]) -> bool:
    """Whether the result is viewed as [B, H, T, D] and then as [B, T, H, D]."""
    if not views or views[-1].target != "aten.transpose.int" or sorted(views[-1].args[1:]) != [1, 2]:
        return False
    shape = views[-1].outputs[0].shape.dims
    return len(shape) == 4 and (shape[0], shape[2]) == lead
