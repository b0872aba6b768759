"""Writes to tensors whose elements share memory, as those of an expanded one do.

In: a graph of Dynamo, with example values. Out: whether it writes to such a tensor. Eager writes to each element in
turn, or refuses to; AOTAutograd makes the write one to a copy and then brings it back to what the view was made of,
which gives other numbers (torch 2.13: ``x.expand(5, 8)[::2].zero_()`` leaves -720 in place of 0).
"""

from __future__ import annotations

import operator

import torch
from torch import fx

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip


def writes_shared_elements(module: fx.GraphModule) -> bool:
    """Whether a node of Dynamo's graph writes to a tensor with several elements at one place in memory."""
    return any(
        isinstance(value := found.meta.get("example_value"), torch.Tensor)
        and value.layout is torch.strided
        and not value.is_nested
        and shares_elements(value)
        for node in module.graph.nodes
        for found in _written(node)
    )


def _written(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":
        is_in_place = node.target in _IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace"))
    written = [node.args[0]] if is_in_place and node.args else []
    return [value for value in (*written, node.kwargs.get("out")) if isinstance(value, fx.Node)]


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether a stride is 0, or ends within what the smaller ones span. Strides that vary are taken to be apart."""
    # A symbol may have no value to compare with 1.
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    dims = [(stride, size) for size, stride in sizes if not isinstance(size, int) or size != 1]
    if any(isinstance(stride, int) and stride == 0 for stride, _ in dims):
        return True
    if not all(isinstance(value, int) for dim in dims for value in dim):
        return False
    span = 1
    for stride, size in sorted(dims):
        if stride < span:
            return True
        span += (size - 1) * stride
    return False
