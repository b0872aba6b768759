"""Cleans up the joint FX graph: drops detach aliases, folds views of views, stacks gradients of rows.

In: the joint graph of forward and backward that AOTAutograd has traced, before the partition. Out: the same graph with
fewer nodes. Guarantee: every remaining value keeps its bits, except that a sum of -0.0 and zeros stays -0.0 where
gradients of rows are stacked; the graph returns the same outputs.

A trace contains what autograd saves: sigmoid's result and a detached alias of it, the transpose of a transpose, a
tensor of zeros with one row filled for each step of a loop over rows. Each costs a call in both passes, and each alias
is saved for backward beside its base. The gradients of the rows are as many tensors as there are rows, each as large as
all rows together.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from autofuse.ir.optable import VIEWS, info

aten = torch.ops.aten

LEAST_PIECES = 3  # a gradient of at least so many rows is made by concatenation


def simplify(graph: fx.Graph, is_strict: bool = False) -> int:
    """Returns the number of removed nodes. ``is_strict``: every value keeps its bits, signs of zeros too."""
    before = len(graph.nodes)
    (output,) = graph.find_nodes(op="output")
    leaving = set(output.all_input_nodes)
    _drop_aliases(graph, leaving)
    for node in () if is_strict else reversed(list(graph.nodes)):
        if node.target is aten.add.Tensor and not _is_inner_sum(node):
            _stack_rows(graph, node)
    return before - len(graph.nodes)


def is_view(node: fx.Node) -> bool:
    """Whether a node is only a view of its first argument."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view and info(str(target)).kind in VIEWS


# ---- aliases ---------------------------------------------------------------------------------------------------------


def _drop_aliases(graph: fx.Graph, leaving: set[fx.Node]) -> None:
    seen: dict[Any, fx.Node] = {}
    seen_outside = {base for node in leaving for base in _looked_at(node)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        base = _view_of_view(node)
        if base is not None:
            source = node.args[0]
            node.update_arg(0, base)
            _erase_unused(graph, [source])
        rule = _SAME.get(node.target)
        same = rule(node) if rule is not None else None
        # A result must not come to share its memory with another one, or with an input.
        if same is not None and node in leaving and (same in leaving or same.op == "placeholder" or is_view(same)):
            same = None
        if same is not None and not is_view(node) and (node in seen_outside or not _lies_like(node, same)):
            same = None
        if same is None and is_view(node) and node not in leaving:
            # Within one pass only: otherwise forward would have to save the value for backward.
            key = (node.target, _hashable(node.args), _hashable(node.kwargs), node.meta.get("partitioner_tag"))
            first = seen.setdefault(key, node)
            if first._erased:
                first = seen[key] = node
            same = first if first is not node else None
        if same is not None:
            node.replace_all_uses_with(same)
            if node in leaving:
                leaving.add(same)  # no second result may be replaced by it
            inputs = node.all_input_nodes
            graph.erase_node(node)
            _erase_unused(graph, inputs)


def _looked_at(node: fx.Node) -> Iterator[fx.Node]:
    """A node and all that it is a view of."""
    yield node
    while (is_view(node) or node.target is operator.getitem) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node


def _lies_like(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta.get("val")
    return isinstance(b, torch.Tensor) and statically_known_true(sym_eq(tuple(a.stride()), tuple(b.stride())))


def _detached(node: fx.Node) -> fx.Node | None:
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _transposed_twice(node: fx.Node) -> fx.Node | None:
    inner = node.args[0]
    if isinstance(inner, fx.Node) and inner.target is aten.t.default and isinstance(inner.args[0], fx.Node):
        return inner.args[0]
    return None


def _whole_slice(node: fx.Node) -> fx.Node | None:
    """A slice of the whole tensor, where the node is the slice or its gradient."""
    given = list(node.args[1 if node.target is aten.slice.Tensor else 2 :])
    _, start, end, step = given + [0, 0, sys.maxsize, 1][len(given) :]
    is_whole = start in (0, None) and step == 1 and (end is None or (isinstance(end, int) and end == sys.maxsize))
    source = node.args[0]
    return source if is_whole and isinstance(source, fx.Node) else None


def _as_it_is(node: fx.Node) -> fx.Node | None:
    """A view with the sizes that its base already has."""
    source = node.args[0]
    if isinstance(source, fx.Node) and _is_like(source, node) and _lies_like(node, source):
        return source
    return None


_SAME: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    aten.detach.default: _detached,
    aten.t.default: _transposed_twice,
    aten.slice.Tensor: _whole_slice,
    aten.slice_backward.default: _whole_slice,
    aten.view.default: _as_it_is,
    aten.expand.default: _as_it_is,
}


def _view_of_view(node: fx.Node) -> fx.Node | None:
    """The base of a view's source, where that base is contiguous, so that it can be viewed with any sizes."""
    source = node.args[0]
    if node.target is not aten.view.default or not isinstance(source, fx.Node) or source.target is not node.target:
        return None
    base = source.args[0]
    tags = {
        n.meta.get("partitioner_tag") for n in (node, source)
    }  # within one pass: otherwise forward would have to save another tensor
    if not isinstance(base, fx.Node) or len(tags) > 1 or not _lies_in_a_row(base):
        return None
    return base


def _lies_in_a_row(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    wanted: list[Any] = [1]
    for size in reversed(value.shape[1:]):
        wanted.append(wanted[-1] * size)
    return bool(statically_known_true(sym_eq(tuple(value.stride()), tuple(reversed(wanted[: value.dim()])))))


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return (type(value), value)  # 1, 1.0 and True are equal


def _erase_unused(graph: fx.Graph, nodes: Collection[fx.Node]) -> None:
    for node in nodes:
        if node.op == "call_function" and not node.users and not node._erased and not node.is_impure():
            inputs = node.all_input_nodes
            graph.erase_node(node)
            _erase_unused(graph, inputs)


# ---- gradients of rows -----------------------------------------------------------------------------------------------


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(arg, fx.Node) and _is_like(arg, node) for arg in node.args)
    )


def _is_inner_sum(node: fx.Node) -> bool:
    return len(node.users) == 1 and _is_sum(next(iter(node.users)))


def _is_like(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    alike = (a.dtype, a.device, a.dim()) == (b.dtype, b.device, b.dim())
    return alike and statically_known_true(sym_eq(tuple(a.shape), tuple(b.shape)))


def _stack_rows(graph: fx.Graph, root: fx.Node) -> None:
    """A sum of gradients of all rows of a tensor, each row once, and at most one other term."""
    if not _is_sum(root):
        return
    terms, sums = [root], []
    while any(_is_sum(term) and (term is root or len(term.users) == 1) for term in terms):
        place = next(i for i, term in enumerate(terms) if _is_sum(term) and (term is root or len(term.users) == 1))
        sums.append(terms[place])
        terms[place : place + 1] = list(terms[place].args)
    rows = [t for t in terms if t.target is aten.select_backward.default and len(t.users) == 1]
    others = [term for term in terms if term not in rows]
    if len(rows) < LEAST_PIECES or len(others) > 1:
        return
    if not all(isinstance(number, int) for row in rows for number in row.args[2:4]):
        return  # the row is known only at run time
    gradients: dict[int, Any] = {}
    dims = {row.args[2] % root.meta["val"].dim() for row in rows}
    (dim, *more) = dims
    size = root.meta["val"].shape[dim]
    if more or not isinstance(size, int) or len(rows) != size:
        return
    for row in rows:
        gradients[row.args[3] % size] = row.args[0]
    if len(gradients) != size:
        return
    pieces = [gradients[index] for index in range(size)]
    value = torch.stack([piece.meta["val"] for piece in pieces], dim)
    if not statically_known_true(sym_eq(tuple(value.stride()), tuple(root.meta["val"].stride()))):
        return
    with graph.inserting_before(root):
        joined = graph.call_function(aten.stack.default, (pieces, dim))
        joined.meta = {**root.meta, "val": value}
        if others:
            joined = graph.call_function(aten.add.Tensor, (joined, others[0]))
            joined.meta = dict(root.meta)
    root.replace_all_uses_with(joined)
    for node in (*sums, *rows):  # a sum before those that it reads
        if not node.users:
            graph.erase_node(node)
