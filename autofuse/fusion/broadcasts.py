"""Whether element-wise work on an operand that is broadcast may be done inside the loops of what reads it.

In: two clusters that would share a nest. Out: whether something speaks against it. Guarantee: where nothing does, no
value of fewer elements than the loops have steps is an output, unless it is one a row, and what is calculated anew at
each step costs little beside another call.
"""

from __future__ import annotations

from typing import NamedTuple

from autofuse.fusion.cluster import MOST_FLOPS_TWICE, Cluster, leaves
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import join_spaces
from autofuse.fusion.outside_loops import Kernel
from autofuse.ir.optable import info
from autofuse.ir.shape import Dim

MOST_FLOPS_AGAIN = 16384.0  # in all: about what a call of a kernel of its own costs


def broadcast_leaves(graph: FusionGraph, first: Cluster, second: Cluster) -> bool:
    """Whether a value that is broadcast in the loops is also needed by itself."""
    inside = {*first.names, *second.names}
    return any(leaves(graph, op, inside) for op, _ in _smaller(first, second).kernels)


def is_costly_again(graph: FusionGraph, first: Cluster, second: Cluster) -> bool:
    """Whether calculating what is broadcast anew at each step costs more than a kernel of its own."""
    found = _smaller(first, second)
    flops = sum(info(op.target).flops for op, _ in found.kernels)
    return flops > MOST_FLOPS_TWICE and flops * graph.size(found.steps) > MOST_FLOPS_AGAIN


class _Smaller(NamedTuple):
    """What is calculated at each step of loops that it does not vary along, and how many steps there are."""

    kernels: list[Kernel]
    steps: Dim


def _smaller(first: Cluster, second: Cluster) -> _Smaller:
    spaces = [*first.iteration_spaces, *second.iteration_spaces]
    sizes = {size for space in spaces for size in (*space.spread, *space.again)}
    sizes -= {size for space in spaces for size in space.along}  # the places of an index have loops anyway
    joined = join_spaces(first.loops_with(second)) if sizes else None
    if joined is None:
        return _Smaller([], 0)
    outside = first.outside_with(second)
    found = [
        kernel
        for kernel in (*first.found_kernels, *second.found_kernels)
        if kernel.space.numel in sizes - {joined.numel, joined.rows} and not outside.has(kernel.op.name)
    ]
    return _Smaller(found, joined.numel)
