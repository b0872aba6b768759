"""The forward and the backward graph of one capture, seen as one.

In: what AOTAutograd's partition made, then both graphs as imported. Out: one graph of all operations, in which backward
reads what forward made, and the name of each value in each FX graph. Guarantee: neither graph is changed; values are
paired by the names that the partition preserves. A joint graph in which gradients would be lost is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autofuse.capture.graph_import import ImportedGraph
from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import Operation, ValueRef

_NOTE = "autofuse_backward"


@dataclass(frozen=True)
class Counterpart:
    """The backward graph of a forward graph."""

    backward: fx.GraphModule
    results: int  # the first outputs of forward are its caller's, the others are saved for backward


@dataclass(frozen=True)
class BothPasses:
    """One graph of two."""

    graph: FusionGraph
    kept: dict[str, ValueRef]  # FX names of the values that forward saves for backward, and these values
    names: dict[ValueRef, str]  # FX names of all values, the same in both graphs


class OverlappingGradients(RuntimeError):
    """AOTAutograd would write an output's gradient into memory whose elements are one another's."""


def refuse_overlapping_gradients(joint: fx.GraphModule) -> None:
    """Raises OverlappingGradients for an output that is a view with elements in common, such as windows of ``unfold``.

    AOTAutograd copies the gradient of an output to the strides that the output has (torch 2.13, except where one of
    them is 0; 2.11, always). So of elements in common only the gradient of the last remains.
    """
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if str(node.target).startswith("tangents") and isinstance(value, torch.Tensor) and _may_overlap(value):
            sizes, strides = tuple(value.shape), value.stride()
            raise OverlappingGradients(
                f"expected outputs whose elements lie apart, found sizes {sizes} with strides {strides}, "
                "whose gradient AOTAutograd would lose in part"
            )


def _may_overlap(t: torch.Tensor) -> bool:
    """Whether two elements may share their memory; with sizes known as numbers, as AOTAutograd's strides then are."""
    dims = sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1)
    if not all(isinstance(number, int) for dim in dims for number in dim) or any(size == 0 for _, size in dims):
        return False
    reach = 0  # of the dims with smaller strides, in elements
    for stride, size in dims:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def note_backward(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> None:
    """Record on the forward graph which backward graph belongs to it."""
    forward.meta[_NOTE] = Counterpart(backward, results)


def backward_of(forward: fx.GraphModule) -> Counterpart | None:
    found = forward.meta.get(_NOTE)
    return found if isinstance(found, Counterpart) else None


def join(forward: ImportedGraph, backward: ImportedGraph, results: int) -> BothPasses:
    """Raises FusionError where the names of the two do not go together."""
    values = {node.name: ref for node, ref in forward.refs.items()}
    inputs = {**forward.inputs, **{name: spec for name, spec in backward.inputs.items() if name not in values}}
    operations = [*forward.operations, *(_reading(op, values, backward) for op in backward.operations)]
    (output,) = forward.module.graph.find_nodes(op="output")
    flat = list(output.args[0])
    leaving = [forward.refs[node] for node in flat[:results] if node in forward.refs]
    graph = FusionGraph(
        operations, inputs, [*leaving, *(values.get(r.name, r) for r in backward.outputs)], forward.hints
    )
    held = {node.name for node in backward.module.graph.find_nodes(op="placeholder")}
    kept = {node.name: forward.refs[node] for node in flat[results:] if node in forward.refs and node.name in held}
    names = {ref: node.name for node, ref in (*backward.refs.items(), *forward.refs.items())}
    return BothPasses(graph, kept, names)


def _reading(op: Operation, values: dict[str, ValueRef], backward: ImportedGraph) -> Operation:
    """The operation of the backward graph, with forward's values in place of their names."""

    def renamed(ref: ValueRef) -> ValueRef:
        return values[ref.name] if ref.name in backward.inputs and ref.name in values else ref

    return op.reading(renamed)
