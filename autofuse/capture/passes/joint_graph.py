"""The forward and the backward graph of one capture, seen as one.

In: what AOTAutograd's partition made, then both graphs as imported. Out: one graph of all operations, in which backward
reads what forward made, and the name of each value in each FX graph. Guarantee: neither graph is changed; values are
paired by the names that the partition preserves. A joint graph in which gradients would be lost is refused,
and a forward graph whose result the script could not write to.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext

from autofuse.capture.graph_import import ImportedGraph
from autofuse.capture.passes.simplify import is_view
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


class ViewGivenOut(RuntimeError):
    """A result of the graph is a view that autograd would not let the script write to, as eager does."""


def refuse_views_given_out(forward: fx.GraphModule) -> None:
    """Raises ViewGivenOut for a result that is a view where eager's is none, and that shares memory with another one.

    So AOTAutograd traces ``h.t()[0].zero_(); return h, h.view(-1)``: h comes out as the transpose of a new tensor. Its
    versions are counted, since the other result shares them, and autograd forbids writes to a view that a function of
    the script's own gives out (torch 2.13).
    """
    context, counterpart = TracingContext.try_get(), backward_of(forward)
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or counterpart is None:
        return
    (output,) = forward.graph.find_nodes(op="output")
    results = [node for node in output.args[0][: counterpart.results] if isinstance(node, fx.Node)]
    given = [(node, _looked_at(node)) for node in results]
    first = metadata.num_mutated_inp_runtime_indices  # behind the new values of inputs
    outputs = zip(output.args[0][first:], metadata.output_info, strict=False)  # then what is saved
    own = {node for node, info in outputs if info.output_type is OutputType.non_alias}
    for node, (*views, memory) in given:
        shared = any(other is not node and bases[-1] is memory for other, bases in given)
        if node in own and views and shared and memory.op == "call_function":
            raise ViewGivenOut(
                f"expected results with memory of their own, found {node.name}, a view of {memory.name} as another is"
            )


def _looked_at(node: fx.Node) -> list[fx.Node]:
    """A node and all that it is a view of, down to the owner of the memory."""
    found = [node]
    while is_view(node) or (node.target is operator.getitem and is_view(node.args[0])):
        node = node.args[0]
        found.append(node)
    return found


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
