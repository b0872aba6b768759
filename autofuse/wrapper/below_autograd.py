"""Which parts of a graph need autograd's tracking of views and versions, and which may run below autograd.

In: an aten graph and how many of its outputs its caller sees. Out: the views that must be made with this bookkeeping,
or that the whole graph needs it. Guarantee: a tensor that shares memory with one that the script can write to shares
its version counter as well, so backward refuses overwritten tensors as eager does. A graph's own writes are counted.

Why: torch records the base of each view and counts writes, in a layer (ADInplaceOrView) between Python and the kernel.
For values inside of a graph nothing reads these records. Without the layer a view takes 1.4 us instead of 2.9, a matmul
4.9 instead of 5.7 (torch 2.13, Intel Xeon, 2026-11), and a step has hundreds of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection

import torch
from torch import fx
from torch.autograd import forward_ad

from autofuse.capture.passes.random_ops import bernoulli_mask, dropout_scale, philox_dropout

# A context in which calls of this thread skip the layer; None where torch lacks it.
_below: Callable[[], contextlib.AbstractContextManager[None]] | None = getattr(
    torch._C, "_AutoDispatchBelowADInplaceOrView", None
)
BELOW = (
    "af_below() if af_dual._current_level < 0 else af_above()"  # forward-mode tangents are handled in the layers above
)
NAMES = {"af_below": _below, "af_dual": forward_ad, "af_above": contextlib.nullcontext}

_OWN = (bernoulli_mask, dropout_scale, philox_dropout)
_HARMLESS_MODULES = ("_operator", "math", "builtins")  # sizes, and parts of results


def kept_books(graph: fx.Graph, results: int | None = None) -> Collection[fx.Node] | None:
    """Nodes that must run with bookkeeping, all of them views of inputs; None where the whole graph must.

    ``results``: so many first outputs are the caller's, the others are saved for backward; all are the caller's if
    None.
    """
    if _below is None or any(_may_write(node) for node in graph.nodes):
        return None
    (output,) = graph.find_nodes(op="output")
    values = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
    leaving = [value for value in values if isinstance(value, fx.Node)]
    outside = {value for value in values[:results] if isinstance(value, fx.Node)}
    of_memory: dict[fx.Node, list[fx.Node]] = {}
    for node in dict.fromkeys(leaving):
        of_memory.setdefault(_looked_at(node)[-1], []).append(node)
    views: dict[fx.Node, None] = {}
    for memory, nodes in of_memory.items():
        if memory.op in ("placeholder", "get_attr"):
            for node in nodes:
                views.update(dict.fromkeys(_looked_at(node)[:-1]))
        elif len(nodes) > 1 and outside.intersection(nodes):
            return None
    return list(views)


def _may_write(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    if isinstance(node.target, torch._ops.OpOverload):
        # An operator of another library may need autograd inside.
        return node.target.namespace not in ("aten", "prims") or bool(node.target._schema.is_mutable)
    known = node.target in _OWN or getattr(node.target, "__module__", "") in _HARMLESS_MODULES
    return not known and not str(getattr(node.target, "__name__", "")).startswith("sym_")


def _looked_at(node: fx.Node) -> list[fx.Node]:
    """A node and its chain of bases, down to the owner of the memory."""
    found = [node]
    while True:
        target = node.target
        is_view = isinstance(target, torch._ops.OpOverload) and target.is_view
        source = node.args[0] if is_view or (target is operator.getitem and _is_view_call(node.args[0])) else None
        if node.op != "call_function" or not isinstance(source, fx.Node):
            return found
        node = source
        found.append(node)


def _is_view_call(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
