"""Element-wise values that backward recomputes in the kernel that needs them, instead of reading saved tensors.

In: the joint graph of forward and backward that AOTAutograd has traced, before the partition. Out: the same graph, in
which backward has its own copy of such a value. Guarantee: only element-wise operations without random numbers are
recomputed, no tensor is saved that would not be alive anyway, and the values have the same bits.

Eager saves silu(a) of ``silu(a) * b`` for backward, though backward has ``a`` as well: a fused kernel saves one write
and one read of a tensor. A value may be a few operations away from what backward has. This is our own pass, not torch's
min-cut, which moves whole chains and starts from the graph's inputs: operations that are not fused in the end run as
eager's kernels, so few extra ones are wanted, and the script may overwrite an input that eager does not save.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition

from autofuse.capture.corrections.shared_elements import traced_number
from autofuse.capture.passes.joint_graph import note_backward, refuse_overlapping_gradients
from autofuse.capture.passes.simplify import is_view, simplify
from autofuse.capture.passes.statistics_dtypes import correct_statistics
from autofuse.ir.optable import OpKind, info

MOST_OPERATIONS = 6  # that backward runs for one value which is not saved, if nothing is fused
MOST_WORK = 16.0  # operations on an element (`ir.optable`): those of mish, 24, cost more than memory's 8 bytes
SIMPLE_POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)  # are products and roots
SMALL = 8  # a value with so many times fewer elements than what is made of it is kept: its memory is not worth a kernel
_INLINED = {OpKind.POINTWISE, OpKind.REDUCTION, OpKind.NORMALISATION, OpKind.LOSS, OpKind.MEMORY}


def partition(
    joint: fx.GraphModule, inputs: Sequence[Any], *, is_strict: bool = False, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """AOTAutograd's default partition, with cheap values recomputed; the forward graph knows its backward graph.

    ``is_strict``: as for `simplify`. Raises OverlappingGradients.
    """
    refuse_overlapping_gradients(joint)
    correct_statistics(joint.graph)
    if not _is_checkpointed(joint.graph):
        simplify(joint.graph, is_strict)
        recompute(joint.graph)
    joint.recompile()
    parted: tuple[fx.GraphModule, fx.GraphModule] = default_partition(joint, inputs, **options)
    note_backward(*parted, options["num_fwd_outputs"])
    return parted


def recompute(graph: fx.Graph) -> int:
    """Give backward its own copies; returns how many operations they are."""
    last = None
    for node in graph.nodes:
        if node.meta.get("partitioner_tag") == "is_forward":
            last = node
    if last is None:
        return 0  # nothing that backward could share
    order = list(graph.nodes)
    forward = set(order[: order.index(last) + 1])
    copies = _compute_again(graph, order, forward)
    # Last: the views of backward's own change which values backward reads, which is tested above.
    return copies + _see_again(graph, list(graph.nodes), forward)


# ---- element-wise values


def _compute_again(graph: fx.Graph, order: Sequence[fx.Node], forward: set[fx.Node]) -> int:
    chosen = _Choice(forward)
    for node in order:
        if node in forward:
            chosen.consider(node)
    copies: dict[fx.Node, fx.Node] = {}

    def again(node: fx.Node, before: fx.Node) -> fx.Node:
        """Backward's own value, made just before its first reader."""
        if node not in chosen.again and node not in chosen.between:
            return node
        if node not in copies:
            made = {source: again(source, before) for source in node.all_input_nodes}
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda source: made[source])
            copies[node].meta = {**node.meta, "partitioner_tag": "is_backward"}
        return copies[node]

    for node in order:
        if node in forward or node.op == "output":
            continue
        for source in node.all_input_nodes:
            if source in chosen.again:
                node.replace_input_with(source, again(source, node))
    return len(copies)


class _Choice:
    """Which values backward computes again, decided in the order of the graph."""

    def __init__(self, forward: set[fx.Node]) -> None:
        self.again: set[fx.Node] = set()  # are not saved
        self.between: set[fx.Node] = set()  # are computed on the way to those; eager does not save them
        self._forward = forward

    def consider(self, node: fx.Node) -> None:
        later = self._later(node)
        if not later or not _is_elementwise(node) or not all(map(_is_inlined, node.users)):
            return  # another kernel needs it written anyway; reading it then costs no more than reading its inputs
        if _elements(node) * SMALL <= max(map(_elements, later)):
            return
        extra: list[fx.Node] = []
        if self._reach(node, extra) and _work((node, *extra)) <= MOST_WORK:
            self.again.add(node)
            self.between.update(extra)

    def _reach(self, node: fx.Node, extra: list[fx.Node]) -> bool:
        """Whether backward can compute a value from what it has; ``extra``: operations it needs besides."""
        for source in node.all_input_nodes:
            if source in extra or self._is_alive(source):
                continue
            extra.append(source)
            is_free = _is_seen(source)
            if not (is_free or _is_elementwise(source)) or _operations(extra) >= MOST_OPERATIONS:
                return False
            if not self._reach(source, extra):
                return False
        return True

    def _is_alive(self, source: fx.Node) -> bool:
        """Sizes are alive; a tensor is where backward reads it for something else, or computes it again.

        An input that backward does not read may be overwritten by then.
        """
        if not isinstance(source.meta.get("val"), torch.Tensor | tuple | list):
            return bool(source.op != "get_attr")
        return source in self.again or source in self.between or bool(self._later(source))

    def _later(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user not in self._forward and user.op != "output"]


def _is_inlined(user: fx.Node) -> bool:
    """Whether a reader takes a value in its own kernel, so that nobody needs it written; views are looked through."""
    if user.op != "call_function":
        return False  # the graph's outputs are written anyway
    if _is_seen(user):
        return all(map(_is_inlined, user.users))
    return user.target is not operator.getitem and info(str(user.target)).kind in _INLINED


def _elements(node: fx.Node) -> int:
    """Of a tensor, or of the largest of several; symbols count as their hints."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, tuple | list) else (value,)
    sizes = [traced_number(t.numel()) for t in tensors if isinstance(t, torch.Tensor)]
    return max((int(size or 0) for size in sizes), default=0)


def _operations(nodes: Iterable[fx.Node]) -> int:
    return sum(not _is_seen(node) for node in nodes)


def _work(nodes: Iterable[fx.Node]) -> float:
    return sum(1.0 if _is_simple_power(node) else info(str(node.target)).flops for node in nodes)


def _is_simple_power(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.pow.Tensor_Scalar and node.args[1] in SIMPLE_POWERS


# ---- views


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


def _is_checkpointed(graph: fx.Graph) -> bool:
    """Whether the user's checkpoints already decide what is recomputed."""
    return any("recompute" in node.meta for node in graph.nodes)
