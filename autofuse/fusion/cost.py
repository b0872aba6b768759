"""Arithmetic of the matmul family: the FLOPs of a matmul, a convolution or an attention.

In: an operation, and the likely sizes of the graph that it is in. Out: floating-point operations, a multiply-add
counted as two.
"""

from __future__ import annotations

from typing import Protocol

from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.shape import Dim


class Sizes(Protocol):
    """Likely sizes in a graph."""

    def spec(self, ref: ValueRef) -> TensorSpec:
        """What is known of a value."""

    def size(self, dim: Dim) -> int:
        """A likely value of a dim."""

    def numel(self, spec: TensorSpec) -> int:
        """Elements of a tensor."""


def matmul_flops(graph: Sizes, op: Operation) -> float | None:
    """FLOPs of a matmul, a convolution or attention, forward or backward; None for any other operator."""
    specs = [graph.spec(ref) for ref in op.inputs]
    name = op.short_name
    if name == "linear" and len(specs) >= 2:
        return 2.0 * graph.numel(specs[0]) * graph.size(specs[1].shape[0])
    if name in ("mm", "bmm", "matmul", "mv", "dot") and len(specs) == 2:
        return _product(graph, *specs)
    if name in ("addmm", "baddbmm", "addmv", "addbmm", "_addmm_activation") and len(specs) == 3:
        return _product(graph, *specs[1:])
    if name == "convolution":
        return _convolution(graph, op, specs[0], specs[1], op.outputs[0])
    if name == "convolution_backward":
        mask = op.arg(10) or (True, True, False)
        forward = _convolution(graph, op, specs[1], specs[2], specs[0], transposed=bool(op.arg(7)))
        return forward * sum(bool(asked) for asked in mask[:2])
    if name.startswith("_scaled_dot_product") and len(specs) >= 3:
        # Forward two matmuls of length x length x width each; backward five, one of which is recomputed.
        backward = "backward" in name
        query, key, value = specs[1:4] if backward else specs[:3]
        rows = graph.numel(query) / max(1, _last(graph, query))
        one = 2.0 * rows * graph.size(key.shape[len(key.shape) - 2])
        width, width_v = _last(graph, query), _last(graph, value)
        return one * ((3 * width + 2 * width_v) if backward else (width + width_v))
    return None


def _last(graph: Sizes, spec: TensorSpec) -> int:
    return graph.size(spec.shape[len(spec.shape) - 1])


def _product(graph: Sizes, left: TensorSpec, right: TensorSpec) -> float:
    columns = _last(graph, right) if len(right.shape) > 1 else 1
    return 2.0 * graph.numel(left) * columns


def _convolution(
    graph: Sizes,
    op: Operation,
    image: TensorSpec,
    weight: TensorSpec,
    result: TensorSpec,
    transposed: bool | None = None,
) -> float:
    """Each element of the result (of the image, where it is transposed) meets one filter."""
    if transposed is None:
        transposed = bool(op.arg(6))
    filters = max(1, graph.size(weight.shape[0]))
    return 2.0 * graph.numel(image if transposed else result) * graph.numel(weight) / filters
