"""Writes by one operator to elements that share memory: with each other, or with what it reads.

In: a graph of Dynamo, with example values. Out: whether it has such a write. Eager writes to each element in turn, or
refuses to: after ``x -= x[:, :1]`` only the first column is sure to be 0, because the others subtract what is 0 by
then. AOTAutograd computes all elements before it writes any, and brings a write to a view back to the base of the view,
which gives other numbers (torch 2.13: ``x.expand(5, 8)[::2].zero_()`` leaves -720 in place of 0).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

_IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip


def writes_shared_elements(module: fx.GraphModule) -> bool:
    """Whether a node of Dynamo's graph writes to elements that share memory with each other, or with what it reads."""
    return any(
        shares_elements(written) or any(_overlap(written, read) for read in _read(node))
        for node in module.graph.nodes
        for written in _written(node)
    )


def _written(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node writes to."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    if node.op == "call_function":
        is_in_place = node.target in _IN_PLACE or name.endswith("_") or bool(node.kwargs.get("inplace"))
    found = _tensors([node.kwargs.get("out"), *(node.args[:1] if is_in_place else ())])
    return _assigned(found, node.args[1]) if node.target is operator.setitem else found


def _read(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node reads; what it writes to may be among them."""
    return _tensors([node.args[1:] if node.target is operator.setitem else node.args, node.kwargs])


def _assigned(written: list[torch.Tensor], where: Any) -> list[torch.Tensor]:
    """The parts of tensors that an assignment writes to; all of them where indices are data, as eager sees it."""
    place = fx.map_arg(where, lambda node: node.meta.get("example_value"))
    is_data = any(isinstance(value, torch.Tensor | list) for value in (place if isinstance(place, tuple) else (place,)))
    try:
        return written if is_data else [t[place] for t in written]
    except Exception:  # a bound that is known at run time only
        return [t for t in written if shares_elements(t)]


def _tensors(values: Any) -> list[torch.Tensor]:
    """The example values of all nodes among these that are tensors with strides."""
    examples = (node.meta.get("example_value") for node in tree_leaves(values) if isinstance(node, fx.Node))
    return [t for t in examples if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested]


def shares_elements(tensor: torch.Tensor) -> bool:
    """Whether a stride is 0, or ends within what the smaller ones span. Sizes that vary are taken as in the trace."""
    sizes, strides = map(traced_number, tensor.shape), map(traced_number, tensor.stride())
    known = list(zip(strides, sizes, strict=True))
    if any(stride == 0 and size != 1 for stride, size in known):
        return True
    dims = [(stride, size) for stride, size in known if stride is not None and size is not None and size != 1]
    span = 1
    for stride, size in sorted(dims):
        if stride < span:
            return True
        span += (size - 1) * stride
    return False


def _overlap(written: torch.Tensor, read: torch.Tensor) -> bool:
    """Whether two tensors have elements in common without being the same. Sizes that vary are taken as in the trace."""
    if written is read or written.untyped_storage()._cdata != read.untyped_storage()._cdata:
        return False
    one, other = _geometry(written), _geometry(read)
    if one is None or other is None:
        return True
    if one == other:
        return False
    (sizes, strides, begin), (their_sizes, their_strides, their_begin) = one, other
    steps = [*zip(strides, sizes, strict=True), *((-s, n) for s, n in zip(their_strides, their_sizes, strict=True))]
    return _reaches(their_begin - begin, sorted((step for step in steps if step[1] > 1), key=lambda s: -abs(s[0])))


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Sizes, strides and offset, as numbers; None where one is known at run time only."""
    numbers = [traced_number(value) for value in (*tensor.shape, *tensor.stride(), tensor.storage_offset())]
    if any(number is None for number in numbers):
        return None
    known, dims = [number for number in numbers if number is not None], tensor.dim()
    return tuple(known[:dims]), tuple(known[dims : 2 * dims]), known[-1]


def traced_number(size: Any) -> int | None:
    """A size as it is in the trace; None where it is known at run time only."""
    return size if isinstance(size, int) else getattr(size.node, "hint", None)


def _reaches(distance: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether a sum of steps, each taken fewer times than its count, is the distance. Longest steps first."""
    if not steps:
        return distance == 0
    (step, count), rest = steps[0], steps[1:]
    if step == 0:
        return _reaches(distance, rest)
    above = sum(s * (n - 1) for s, n in rest if s > 0)
    below = sum(s * (n - 1) for s, n in rest if s < 0)
    # The rest reaches from below to above: times * step lies between distance - above and distance - below.
    bounds = sorted(((distance - above) / step, (distance - below) / step))
    first, last = max(0, int(-(-bounds[0] // 1))), min(count - 1, int(bounds[1] // 1))
    return any(_reaches(distance - times * step, rest) for times in range(first, last + 1))
