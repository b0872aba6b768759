"""Element-wise values that backward recomputes in the kernel that needs them, instead of reading saved tensors.

In: the joint graph of forward and backward that AOTAutograd has traced, before the partition. Out: the same graph, in
which backward has its own copy of such a value. Guarantee: only element-wise operations without random numbers are
recomputed, no tensor is saved that would not be alive anyway, and the values have the same bits.

Eager saves silu(a) of ``silu(a) * b`` for backward, though backward has ``a`` as well: a fused kernel saves one write
and one read of a tensor. This is our own pass, not torch's min-cut, which moves whole chains: operations that are not
fused in the end run as eager's kernels, and we want few extra ones.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition

from autofuse.capture.joint_graph import note_backward, refuse_overlapping_gradients
from autofuse.capture.simplify import is_view, simplify


def partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, is_strict: bool = False, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's default partition, with cheap values recomputed; the forward graph knows its backward graph.

    ``is_strict``: as for `simplify`. Raises OverlappingGradients.
    """
    refuse_overlapping_gradients(joint)
    if not _is_checkpointed(joint.graph):
        simplify(joint.graph, is_strict)
        recompute(joint.graph)
    joint.recompile()
    parted: tuple[fx.GraphModule, fx.GraphModule] = default_partition(joint, inputs, **options)
    note_backward(*parted, options["num_fwd_outputs"])
    return parted


def recompute(graph: fx.Graph) -> int:
    """Give backward its own copies; returns how many."""
    last = None
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") == "is_forward":
            last = node
    if last is None:
        return 0  # nothing that backward could share
    order = list(graph.nodes)
    forward = set(order[: order.index(last) + 1])
    copies = 0
    output = graph.find_nodes(op="output")  # graph outputs are written anyway
    for node in [n for n in order if n in forward]:
        later = [user for user in node.users if user not in forward and user.op != "output"]
        if not later or not _is_elementwise(node) or output[0] in node.users:
            continue
        sooner = [user for user in node.users if user in forward]
        if not all(_is_elementwise(user) for user in (*sooner, *later)):
            continue  # another kernel needs it written anyway; reading it then costs no more than reading its inputs
        if all(_is_alive_in_backward(n, node, forward) for n in node.all_input_nodes):
            first = min(later, key=order.index)
            with graph.inserting_before(first):
                copy = graph.node_copy(node)
            copy.meta = {**node.meta, "partitioner_tag": "is_backward"}
            for user in later:
                user.replace_input_with(node, copy)
            copies += 1
    # Last: the views of backward's own change which values backward reads, which is tested above.
    return copies + _see_again(graph, list(graph.nodes), forward)


def _is_checkpointed(graph: fx.Graph) -> bool:
    """Whether the user's checkpoints already decide what is recomputed."""
    return any("recompute" in node.meta for node in graph.nodes)


def _see_again(graph: fx.Graph, order: Sequence[fx.Node], forward: set[fx.Node]) -> int:
    """Give backward its own views, so that one base tensor is saved instead of several views of it.

    This takes no more memory, because a view holds all of its base. But autograd detaches each view that it saves, and
    element-wise kernels read through views of their own graph at no cost. Matmuls gain nothing from it.
    """
    first = next((node for node in order if node not in forward and node.op == "call_function"), None)
    if first is None:
        return 0
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node) -> fx.Node:
        if not _is_seen(node):
            return node
        if node not in copies:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            seen = again(source)
            with graph.inserting_before(first):
                copies[node] = graph.node_copy(node, lambda n: seen if n is source else n)
            copies[node].meta = {**node.meta, "partitioner_tag": "is_backward"}
        return copies[node]

    for node in order:
        later = [user for user in node.users if user not in forward and user.op != "output"]
        if node in forward and later and _is_seen(node) and all(map(_is_elementwise, later)):
            seen = again(node)
            for user in later:
                if user is not seen and user not in copies.values():
                    user.replace_input_with(node, seen)
    return len(copies)


def _is_seen(node: fx.Node) -> bool:
    """Whether the node is a view, or one of several views that one operation makes."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return is_view(node)


def _is_elementwise(node: fx.Node) -> bool:
    tags: Sequence[Any] = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return bool(torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def _is_alive_in_backward(source: fx.Node, node: fx.Node, forward: set[fx.Node]) -> bool:
    """Sizes are alive; a tensor is where backward reads it for something else (an input may be overwritten by then)."""
    if not isinstance(source.meta.get("val"), torch.Tensor):
        return bool(source.op != "get_attr")
    return any(user is not node and user not in forward for user in source.users)
