"""Which small pieces of work share a kernel though each has loops of its own.

In: the clusters of a graph. Out: whether one is small element-wise work, what relates it to others, and whether two are
independent. Guarantee: only clusters of which neither reads a value of the other are independent.
Why: a call costs as much as the arithmetic on some thousand elements, so one call of several nests pays for small
tensors. What is related lies near each other in a model: the parts of one tensor, or the whole of a graph. So the same
layers give the same nodes, which are tuned once.
"""

from __future__ import annotations

from autofuse.fusion.cluster import Cluster
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.iteration_space import is_constant
from autofuse.ir.optable import FUSIBLE, info, stands_beside
from autofuse.ir.parts import cuts_of

_WHOLE = "whole graph"  # no name of a value


def is_small_work(graph: FusionGraph, cluster: Cluster, limit: int) -> bool:
    """Whether a cluster is element-wise work on tensors of fewer bytes than a limit each."""
    return all(
        stands_beside(op.target)
        and all(graph.nbytes(spec) < limit for spec in (*op.outputs, *map(graph.spec, op.inputs)))
        for op in cluster.operations
    )


def relations(graph: FusionGraph, cluster: Cluster) -> list[str]:
    """What clusters have in common that may share a kernel: a tensor that both read; or all of their work, where each
    has it to itself from the inputs of the graph to its outputs.

    What reads a matmul's result may become a part of that kernel, so it is related to other readers of it alone.
    """
    inside = cluster.names
    read = dict.fromkeys(graph.base(ref).name for op in cluster.operations for ref in op.inputs)
    outside = [name for name in read if name not in inside]
    found = [name for name in outside if name in graph.inputs or not is_constant(graph.by_name[name])]
    made = [name for name in found if name not in graph.inputs]
    opaque = [name for name in made if info(graph.by_name[name].target).kind not in FUSIBLE]
    if opaque:
        return opaque
    found += cuts_of(cluster.operations, graph.base)
    leaves = all(reader.name in inside for op in cluster.operations for reader in graph.readers[op.name])
    return [*found, _WHOLE] if leaves and not made else found


def are_independent(first: Cluster, second: Cluster) -> bool:
    """Whether two clusters read no value of each other, cuts into copies aside."""
    return len(first.beside([second]).parts) >= len(first.parts) + len(second.parts)
