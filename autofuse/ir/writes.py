"""Operators that write elements to places that are data: where each finds its tensors, and how many elements it writes.

In: an operation and the specs of what it reads. Out: the tensor that is written into, the indices with the sizes that
they index, the values, and the number of elements. Guarantee: the planner, the lowering and the making of inputs for
checks ask the same questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, SymbolicShape, product

SpecOf = Callable[[ValueRef], TensorSpec]


class _Places(NamedTuple):
    """Which arguments an operator has its tensors in."""

    base: int | None  # what is written into; None: zeros
    indices: int
    values: int | None  # None: a number


_ALONG_DIM = _Places(0, 2, 3)  # (self, dim, index, values)
_PLACES: dict[str, _Places] = {
    "embedding_dense_backward": _Places(None, 1, 0),
    "index_add": _ALONG_DIM,
    "index_copy": _ALONG_DIM,
    "index_reduce": _ALONG_DIM,
    "index_fill": _ALONG_DIM,
    "scatter": _ALONG_DIM,
    "scatter_add": _ALONG_DIM,
    "scatter_reduce": _ALONG_DIM,
    "index_put": _Places(0, 1, 2),
    "_unsafe_index_put": _Places(0, 1, 2),
    "_unsafe_masked_index_put_accumulate": _Places(0, 2, 3),
    "put": _Places(0, 1, 2),
    "max_unpool2d": _Places(None, 1, 0),
    "max_unpool3d": _Places(None, 1, 0),
}
_PLANES = {"max_unpool2d": 2, "max_unpool3d": 3}  # dims of a plane that an index counts the elements of
_WRAPPING = ("index_put", "_unsafe_index_put", "put", "index_fill", "_unsafe_masked_index_put_accumulate")


def is_write(op: Operation) -> bool:
    """Whether an operation writes to places that are data."""
    return info(op.target).kind is OpKind.WRITE


def wraps(op: Operation) -> bool:
    """Whether an index of -1 is the last place."""
    return op.short_name in _WRAPPING


def needs_distinct(op: Operation) -> bool:
    """Whether eager's result depends on the order of its threads where an index names a place twice."""
    accumulates = dict(op.kwargs).get("accumulate", op.arg(3, False))
    return op.short_name in ("index_put", "_unsafe_index_put", "put") and not accumulates


def base_of(op: Operation) -> ValueRef | None:
    """The tensor of which the result is a copy with other elements; None where it begins as zeros."""
    at = _PLACES[op.short_name].base
    return None if at is None else op.args[at]


def operands_of(op: Operation) -> list[ValueRef]:
    """What is read to know the values and their places: all but the tensor that is written into."""
    found: list[ValueRef] = []
    for position, arg in enumerate(op.args):
        items = arg if isinstance(arg, tuple) else (arg,)
        if position != _PLACES[op.short_name].base:
            found += [item for item in items if isinstance(item, ValueRef)]
    return found


def values_of(op: Operation) -> Any:
    """The tensor, or the number, that is written."""
    at = _PLACES[op.short_name].values
    return None if at is None else op.args[at]


def indices_of(op: Operation) -> Any:
    """The index tensor, or for several dims a tuple with None where a dim has none."""
    return op.args[_PLACES[op.short_name].indices]


def indexed_sizes(op: Operation) -> list[tuple[ValueRef, Dim]]:
    """Each index tensor, and the number of places that it may name."""
    named, shape = indices_of(op), op.outputs[0].shape
    if isinstance(named, tuple):
        return [(ref, shape[dim]) for dim, ref in enumerate(named) if ref is not None]
    if op.short_name in _PLANES:
        return [(named, product(shape.dims[len(shape) - _PLANES[op.short_name] :]))]
    if op.short_name == "put":
        return [(named, shape.numel)]
    return [(named, shape[0 if op.short_name == "embedding_dense_backward" else int(op.args[1])])] if shape.dims else []


def written_elements(op: Operation, spec: SpecOf) -> Dim:
    """How many elements are written, those that are written twice counted twice."""
    named, shape = indices_of(op), op.outputs[0].shape
    if isinstance(named, tuple):
        found = [spec(ref).shape for ref in named if ref is not None]
        kept = [size for dim, size in enumerate(shape) if dim >= len(named) or named[dim] is None]
        return product((*_broadcast(found), *kept))
    if op.short_name.startswith("index_"):
        kept = [size for dim, size in enumerate(shape) if dim != int(op.args[1]) % max(1, len(shape))]
        return product((spec(named).numel, *kept))
    return spec(op.args[0] if op.short_name == "embedding_dense_backward" else named).numel


def _broadcast(shapes: list[SymbolicShape]) -> tuple[Dim, ...]:
    rank = max((len(shape) for shape in shapes), default=0)
    sizes: list[Dim] = [1] * rank
    for shape in shapes:
        for back in range(1, len(shape) + 1):
            if shape[-back] != 1:
                sizes[-back] = shape[-back]
    return tuple(sizes)
