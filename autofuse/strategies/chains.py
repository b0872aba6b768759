"""Finds chains of operations in a form, and replaces each with one operation.

In: a form as a graph. Out: the next link of a chain, seen through views; a form with the chain replaced. Guarantee: a
link is only followed where nothing else reads the value between, so no needed value is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import Arg, NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, contiguous_strides


@dataclass(frozen=True)
class Link:
    """The only operation that reads a value, and the views through which it reads."""

    operation: Operation
    operand: int  # position of the value among the arguments
    views: tuple[Operation, ...]  # views and copies that change nothing


def next_link(graph: FusionGraph, op: Operation) -> Link | None:
    """The only reader of output 0 of ``op``; None where there are several, or the value escapes."""
    views: list[Operation] = []
    current = op
    while True:
        readers = graph.consumers[current.name]
        if len(readers) != 1 or any(ref.name == current.name for ref in graph.outputs):
            return None
        reader = readers[0]
        if is_free(graph, reader):
            views.append(reader)
            current = reader
            continue
        positions = [i for i, arg in enumerate(reader.args) if arg == ValueRef(current.name)]
        if len(positions) != 1 or any(arg == ValueRef(current.name) for _, arg in reader.kwargs):
            return None
        return Link(reader, positions[0], tuple(views))


def is_free(graph: FusionGraph, op: Operation) -> bool:
    """Whether an operation returns the elements that it reads: a view, or the copy of a dropout in inference."""
    if op.short_name == "clone":
        source, out = graph.spec(op.inputs[0]), op.outputs[0]
        return (source.shape, source.strides) == (out.shape, out.strides)
    return info(op.target).kind is OpKind.VIEW


def keep_order(graph: FusionGraph, views: Sequence[Operation]) -> bool:
    """Whether a chain of views gives all elements in the order in which the first view reads them."""
    sizes: Sequence[Dim] = ()
    order: list[int] = []  # the dims of `sizes`, as permuted so far
    for op in views:
        source = graph.spec(op.inputs[0])
        if source.numel != op.outputs[0].numel:
            return False
        turned = _turned(op, len(source.shape))
        if turned is None:
            if not _is_sorted(order, sizes):
                return False
            order = []
            continue
        if not order:
            sizes, order = source.shape.dims, list(range(len(source.shape)))
        order = [order[dim] for dim in turned]
    return _is_sorted(order, sizes)


def _turned(op: Operation, rank: int) -> list[int] | None:
    """The dims in a view's order; None for a view that permutes nothing."""
    order = list(range(rank))
    if op.target == "aten.transpose.int":
        first, second = (int(dim) % rank for dim in op.args[1:3])
        order[first], order[second] = second, first
    elif op.target == "aten.permute.default":
        order = [int(dim) % rank for dim in op.args[1]]
    elif op.target == "aten.t.default":
        order.reverse()
    else:
        return None
    return order


def _is_sorted(order: Sequence[int], sizes: Sequence[Dim]) -> bool:
    longer = [dim for dim in order if sizes[dim] != 1]
    return longer == sorted(longer)


def is_contiguous(spec: TensorSpec) -> bool:
    return spec.strides.dims == contiguous_strides(spec.shape.dims)


def as_shape(graph: FusionGraph, ref: ValueRef, like: TensorSpec, name: str) -> tuple[ValueRef, list[Operation]] | None:
    """``ref`` with the sizes of ``like``: itself, or a view under ``name``.

    None where it is not contiguous or has another number of elements.
    """
    spec = graph.spec(ref)
    if spec.shape == like.shape:
        return ref, []
    if not is_contiguous(spec) or spec.numel != like.numel:
        return None
    strides = type(spec.strides)(contiguous_strides(like.shape.dims))
    viewed = replace(spec, shape=like.shape, strides=strides)
    return ValueRef(name), [Operation(name, "aten.view.default", (ref, like.shape.dims), (), (viewed,))]


def replaced(form: NodeForm, chain: Sequence[Operation], new: Sequence[Operation]) -> NodeForm:
    """The form with ``new`` in place of ``chain``, whose last value it returns; unread views are left out."""
    gone = {op.name for op in chain}
    operations = [op for op in form.operations if op.name not in gone]
    # ``new`` takes the place of the last link: the operands exist by then, and the readers come later.
    last = max(index for index, op in enumerate(form.operations) if op.name in gone)
    before = [op for op in form.operations[:last] if op.name not in gone]
    operations = [*before, *new, *operations[len(before) :]]
    return replace(form, operations=live(operations, form.outputs))


def live(operations: Sequence[Operation], outputs: Sequence[ValueRef]) -> tuple[Operation, ...]:
    """The operations that the outputs need."""
    needed = {ref.name for ref in outputs}
    kept: list[Operation] = []
    for op in reversed(operations):
        if op.name in needed:
            kept.append(op)
            needed |= {ref.name for ref in op.inputs}
    return tuple(reversed(kept))


def result_of(op: Operation, made: ValueRef, made_spec: TensorSpec) -> list[Operation]:
    """Return ``made`` as the result of ``op``: the same elements with other sizes, not a view for autograd."""
    spec = op.outputs[0]
    if spec.shape == made_spec.shape:
        return []
    return [Operation(op.name, "aten._unsafe_view.default", (made, spec.shape.dims), (), (spec,), op.source)]


def number(arg: Arg) -> float | None:
    """A plain number, None for anything else."""
    return float(arg) if isinstance(arg, int | float) and not isinstance(arg, bool) else None
