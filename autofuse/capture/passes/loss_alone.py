"""A backward graph for the loss alone, for models that give out more than their loss.

In: AOTAutograd's backward graph, which reads a gradient of each output. Out: the same graph without the gradients of
all outputs but the loss, a scalar; None where there is no such loss, or where zeros in their place are used for more
than a sum. Guarantee: the gradients are those that zeros would give, but for the sign of a zero: eager adds nothing
either.

Why: for a language model that gives out its logits beside the loss, zeros as large as the logits would be made at each
step, and read to be added.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from autofuse.capture.corrections.undefined_gradients import tangents_behind

_SUMS = {"aten.add.Tensor": (0, 1), "aten.sub.Tensor": (1,)}  # which of their operands may be left out if it is zero


class LossAlone(NamedTuple):
    """The graph, and which of the whole graph's tangents it reads."""

    graph: fx.GraphModule
    tangent: int


def loss_alone(backward: fx.GraphModule) -> LossAlone | None:
    """The graph for the gradient of a scalar output alone."""
    tangents = [n for n in backward.graph.find_nodes(op="placeholder") if str(n.target).startswith("tangents")]
    values = [node.meta.get("val") for node in tangents]
    scalars = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.dim() == 0]
    if len(tangents) < 2 or len(scalars) != 1 or not all(isinstance(value, torch.Tensor) for value in values):
        return None
    graph = _without(backward, set(range(len(tangents))) - set(scalars))
    return None if graph is None else LossAlone(graph, scalars[0])


def _without(backward: fx.GraphModule, absent: Collection[int]) -> fx.GraphModule | None:
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    results = copy.graph_copy(backward.graph, copies)
    (end,) = backward.graph.find_nodes(op="output")
    behind = tangents_behind(backward.graph)
    zeros = {copies[node] for node, found in behind.items() if found and found <= set(absent) and node in copies}
    output = copy.output([None if result in zeros else result for result in results])
    output.meta.update(end.meta)
    for node in list(copy.nodes):
        if node in zeros or node is output or zeros.isdisjoint(node.all_input_nodes):
            continue
        stays = _stays(node, zeros)
        if stays is None:
            return None
        node.replace_all_uses_with(stays)
    copy.eliminate_dead_code()
    for node in zeros:
        if node.op == "placeholder":
            copy.erase_node(node)
    module = fx.GraphModule(backward, copy)
    module.meta.update(backward.meta)
    return module


def _stays(node: fx.Node, zeros: Collection[fx.Node]) -> fx.Node | None:
    """The operand that a sum with zeros is equal to; None where that is none."""
    places = _SUMS.get(str(node.target), ())
    left_out = [i for i in places if node.args[i] in zeros]
    if len(left_out) != 1 or (left_out == [0] and node.kwargs):  # alpha times the other
        return None
    stays = node.args[1 - left_out[0]]
    return stays if isinstance(stays, fx.Node) and _are_alike(node, stays) else None


def _are_alike(result: fx.Node, operand: fx.Node) -> bool:
    """Whether a sum with zeros has the size, the type and the strides of its other operand."""
    a, b = result.meta["val"], operand.meta.get("val")
    return (
        isinstance(b, torch.Tensor)
        and a.dtype == b.dtype
        and a.dim() == b.dim()
        and statically_known_true(sym_eq(tuple(a.shape), tuple(b.shape)))
        and statically_known_true(sym_eq(tuple(a.stride()), tuple(b.stride())))
    )
