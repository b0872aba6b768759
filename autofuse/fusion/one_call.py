"""Which small nodes are one call: each keeps loops of its own, and they run one after another as stages of a kernel.

In: the nodes of a graph. Out: nodes, of which some have taken others in as stages.
Guarantee: such a node is on a CPU, its tensors are small, nothing of it stands beside an operator without a kernel, and
the nodes together leave the graph acyclic. What a stage makes for a later one lies in memory, as between calls.
Why: a call costs as much as the arithmetic on some thousand elements. What stands beside a matmul is left alone, for it
may become a part of that kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from autofuse.fusion.cluster import Cluster, Growth, leaves
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.iteration_space import is_constant
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import Operation
from autofuse.ir.optable import FUSIBLE, VIEWS, OpKind, info

_ENDS = "inputs and outputs"  # no name of a value


@dataclass(frozen=True)
class Joining:
    """How nodes are joined."""

    limit: int  # bytes that a tensor has fewer than
    most: int  # operations in a call
    alone: Callable[[Operation], FusionNode | None]  # the node of an operation that no other has, if it has a kernel
    whole: Callable[[Sequence[FusionNode]], FusionNode | None]  # the node with these as stages, if it has a kernel


def join_calls(
    graph: FusionGraph, nodes: Sequence[FusionNode], apart: Iterable[Collection[str]], how: Joining
) -> list[FusionNode]:
    """The nodes of a graph, in program order, small ones that are related joined, with operations between them that are
    not worth a call of their own. What is in a set of ``apart`` stays as it is."""
    kept = {name for names in apart for name in names}
    joining = _Calls(graph, how)
    for node in nodes:
        joining.add(node, joins=kept.isdisjoint(_names(node)))
    if joining.small:
        inside = kept.union(*map(_names, nodes))
        for op in graph.operations:
            is_work = info(op.target).kind in FUSIBLE - VIEWS and not is_constant(op)
            if op.name not in inside and is_work and _is_small(graph, [op], how.limit):
                alone = how.alone(op)
                if alone is not None:
                    joining.add(alone, joins=True)
    joining.join()
    found = [node for parts in joining.stages.values() for node in _joined(graph, parts, nodes, how)]
    return sorted(found, key=lambda node: graph.position[node.kernels[0].name])


class _Calls:
    """Nodes of a graph while they are joined."""

    def __init__(self, graph: FusionGraph, how: Joining) -> None:
        self.small: list[Cluster] = []  # those that may be joined
        self.stages: dict[int, list[FusionNode]] = {}  # by the identity of a cluster
        self._graph, self._how, self._growth = graph, how, Growth(graph)

    def add(self, node: FusionNode, joins: bool) -> None:
        """One more node."""
        cluster = Cluster(self._graph)
        cluster.take_operations(operations_of(self._graph, node))
        self._growth.add(cluster)
        self.stages[id(cluster)] = [node]
        if joins and _is_small(self._graph, cluster.operations, self._how.limit):
            self.small.append(cluster)

    def join(self) -> None:
        """Join what is related, in program order."""
        graph, home = self._graph, self._growth.home
        last: dict[str, Cluster] = {}
        for own in sorted(self.small, key=lambda cluster: graph.position[cluster.operations[0].name]):
            keys = _relations(graph, own)
            for key in keys:
                found = last.get(key)
                other = home[found.operations[0].name] if found is not None else own
                own = other if other is not own and self._take_in(other, own) else own
            last.update(dict.fromkeys(keys, own))

    def _take_in(self, other: Cluster, own: Cluster) -> bool:
        if _work(other) + _work(own) > self._how.most or not self._growth.can_fuse([*other.names, *own.names]):
            return False
        self._growth.remove(own)
        other.take_in(own)
        self._growth.settle(other)
        self.stages[id(other)] += self.stages.pop(id(own))
        return True


def _work(cluster: Cluster) -> int:
    """How many operations calculate something."""
    return sum(1 for op in cluster.operations if info(op.target).kind is not OpKind.CREATION)


def _joined(
    graph: FusionGraph, parts: Sequence[FusionNode], nodes: Sequence[FusionNode], how: Joining
) -> list[FusionNode]:
    own = [part for part in parts if part in nodes]
    found = how.whole(in_order(graph, parts)) if len(parts) > 1 and own else None
    return own if found is None else [found]


def in_order(graph: FusionGraph, parts: Iterable[FusionNode]) -> list[FusionNode]:
    """Parts in an order in which each reads only what earlier ones make."""
    waiting = sorted(parts, key=lambda part: graph.position[part.kernels[0].name])
    found: list[FusionNode] = []
    while waiting:
        made = {op.name for part in waiting for op in part.kernels}
        ready = next(part for part in waiting if not (_read(graph, operations_of(graph, part)) & made - _names(part)))
        waiting.remove(ready)
        found.append(ready)
    return found


def operations_of(graph: FusionGraph, node: FusionNode) -> list[Operation]:
    """What a node stands for, with the names of the graph."""
    return [graph.by_name[op.name] for op in node.kernels]


def _names(node: FusionNode) -> set[str]:
    return {op.name for op in node.kernels}


def _read(graph: FusionGraph, operations: Iterable[Operation]) -> set[str]:
    """The inputs and operations that operations read from, through views."""
    return {graph.base(ref).name for op in operations for ref in op.inputs}


def _is_small(graph: FusionGraph, operations: Sequence[Operation], limit: int) -> bool:
    """Whether operations are small work on a CPU, between inputs, outputs and what may be fused."""
    read = [graph.by_name[name] for name in _read(graph, operations) if name in graph.by_name]
    readers = [reader for op in operations for reader in graph.readers[op.name]]
    return all(info(op.target).kind in FUSIBLE for op in (*read, *readers)) and all(
        spec.device == "cpu" and graph.nbytes(spec) < limit
        for op in operations
        for spec in (*op.outputs, *map(graph.spec, op.inputs))
    )


def _is_number(graph: FusionGraph, name: str) -> bool:
    """Whether a value is a constant, of which each node has a copy."""
    return name in graph.by_name and is_constant(graph.by_name[name])


def _relations(graph: FusionGraph, cluster: Cluster) -> list[str]:
    """What related clusters have in common: a value that one makes or that both read; or all of their work, where
    each has it to itself from the inputs of the graph to its outputs."""
    inside: Collection[str] = cluster.names
    read = {name for name in _read(graph, cluster.operations) if name not in inside and not _is_number(graph, name)}
    is_apart = read <= graph.inputs.keys() and not any(
        reader.name not in inside for op in cluster.operations for reader in graph.readers[op.name]
    )
    ends = [_ENDS] if is_apart and any(leaves(graph, op, inside) for op in cluster.operations) else []
    return [*sorted(read), *inside, *ends]
