"""`Cluster`: a node while it grows, and what may keep two of them apart beside devices, edges and loops.

In: the operations of a graph, one by one, and clusters that are joined. Out: the operations that become a node.
Guarantee: a cluster holds no views, and its operations are in program order; what they read is looked up in the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.iteration_space import IterationSpace, with_parts
from autofuse.fusion.node import FusionNode, join_spaces, space_of
from autofuse.fusion.outside_loops import Kernel, Outside
from autofuse.ir.guarded import GUARDED
from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info

MOST_IN_ONE_ROW = 16384  # elements: more of them are worth several threads, which a row has not
MOST_FLOPS_TWICE = 4.0  # of an element that is calculated once for each window which has it
MOST_PIECES = 8  # that are put together by as many stores of one nest (codegen/lowering/lower.py)


class Seed(NamedTuple):
    """Operations that a cluster begins as."""

    pattern: str  # its name
    names: tuple[str, ...]  # of the operations


class _Pair(NamedTuple):
    """What two clusters calculate outside their loops, at these numbers of operations: clusters only grow."""

    other: FusionNode
    own: int
    its: int
    outside: Outside


class Cluster(FusionNode):
    """A node that grows in a graph: without views, and what it reads is looked up there.

    ``pattern``: the name of a custom pattern that it began as, which may pass the size limit; empty for any other.
    """

    def __init__(self, graph: FusionGraph, pattern: str = "") -> None:
        super().__init__()
        self._graph = graph
        self.pattern = pattern
        self._last_pair: _Pair | None = None

    @property
    def kernels(self) -> list[Operation]:
        return self.operations

    def spec(self, ref: ValueRef) -> TensorSpec:
        return self._graph.spec(ref)

    def _find_space(self, op: Operation) -> IterationSpace | None:
        graph = self._graph
        return with_parts(space_of(op, graph.spec), op, graph.by_name, graph.spec)

    def _in_order(self, kernels: list[Kernel]) -> list[Kernel]:
        return sorted(kernels, key=lambda kernel: self._graph.position[kernel.op.name])

    def _base(self, ref: ValueRef) -> ValueRef:
        return self._graph.base(ref)

    def outside_with(self, other: FusionNode | None = None) -> Outside:
        """As of any node; kept for the last other cluster, of which several questions are asked in a row."""
        if not isinstance(other, Cluster):
            return super().outside_with(other)
        own, its, last = len(self.operations), len(other.operations), self._last_pair
        if last is not None and last.other is other and (last.own, last.its) == (own, its):
            return last.outside
        found = super().outside_with(other)
        self._last_pair = _Pair(other, own, its, found)
        return found

    def beside(self, others: Iterable[Cluster]) -> Cluster:
        """A cluster of its operations and those of others."""
        whole = Cluster(self._graph, self.pattern)
        for cluster in (self, *others):
            whole.take_in(cluster)
        return whole

    def take_in(self, other: Cluster) -> None:
        """All operations of another cluster, whatever its loops; they stay in program order."""
        self._spaces |= other._spaces
        self.pattern = self.pattern or other.pattern
        self.take_operations(other.operations)

    def take_operations(self, operations: Iterable[Operation]) -> None:
        """More operations, whatever their loops."""
        self._by_name |= {op.name: op for op in operations}
        self.operations = sorted(self._by_name.values(), key=lambda op: self._graph.position[op.name])
        self._forget_form()


@dataclass(eq=False)
class Growth:
    """The clusters of a graph while they grow. Contracting each of them to a point leaves the graph acyclic."""

    graph: FusionGraph
    clusters: list[Cluster] = field(default_factory=list)
    home: dict[str, Cluster] = field(default_factory=dict)  # operation -> the cluster that it is in

    def add(self, cluster: Cluster) -> None:
        """One more cluster, of operations that are in no other."""
        self.clusters.append(cluster)
        self.settle(cluster)

    def settle(self, cluster: Cluster) -> None:
        """All its operations are at home there."""
        self.home.update(dict.fromkeys(cluster.names, cluster))

    def remove(self, cluster: Cluster) -> None:
        """It goes into another one, where its operations are at home next."""
        self.clusters.remove(cluster)

    def can_fuse(self, names: Collection[str]) -> bool:
        """`FusionGraph.can_fuse` among the other clusters."""
        return self.graph.can_fuse(names, self._unit_of, self._horizon)

    def _unit_of(self, name: str) -> Collection[str] | None:
        cluster = self.home.get(name)
        return None if cluster is None else cluster.names

    def _horizon(self, last: int) -> int:
        """The last place from which a cluster reaches back to ``last`` or before it, through others if need be."""
        position = self.graph.position
        spans = [(position[c.operations[0].name], position[c.operations[-1].name]) for c in self.clusters]
        for begin, end in sorted(span for span in spans if span[1] > last):
            if begin > last:
                break
            last = max(last, end)
        return last


def share_loops(clusters: Sequence[Cluster]) -> bool:
    """Whether one nest of loops can be that of all."""
    whole = clusters[0].beside(clusters[1:])
    return join_spaces(whole.loops_with()) is not None


def reads_incomplete(first: Cluster, second: Cluster | None = None) -> bool:
    """Whether, in one cluster or two together, an operation that is no follower reads what is complete only after all
    rows."""
    return not first.outside_with(second).is_sound


def is_one_row(graph: FusionGraph, first: Cluster, second: Cluster) -> bool:
    """Whether all that two clusters work on is one row of a few elements: a number that it is reduced to may be read
    along it again."""
    whole = first.beside((second,))
    apart = (OpKind.WRITE, OpKind.COMPOSITE)  # what these have is complete only after loops of their own
    if any(op.short_name in GUARDED or info(op.target).kind in apart for op in whole.operations):
        return False
    spaces = whole.loops_with()
    elements = max((graph.size(space.numel) for space in spaces), default=0)
    return elements <= MOST_IN_ONE_ROW and all(space.rows is None and not space.general for space in spaces)


def pools(graph: FusionGraph, producer: Cluster, consumer: Cluster) -> bool:
    """Whether ``consumer`` pools a value that ``producer`` makes, or puts one that is pooled there at other places."""
    kinds = {op.name: info(op.target).kind for op in producer.operations}
    for op in consumer.operations:
        read = {kinds.get(graph.base(ref).name) for ref in op.inputs} - {None}
        if read and info(op.target).kind is OpKind.POOLING and not (_is_gradient(op) and _is_cheap(producer)):
            return True
        if OpKind.POOLING in read and info(op.target).kind is OpKind.MEMORY:
            return True
    return False


def _is_gradient(op: Operation) -> bool:
    return op.short_name.endswith("_backward")


def _is_cheap(cluster: Cluster) -> bool:
    """Whether elements of all its values may be calculated more than once."""
    facts = [info(op.target) for op in cluster.operations]
    return all(f.kind in (OpKind.POINTWISE, OpKind.CREATION) and f.flops <= MOST_FLOPS_TWICE for f in facts)


def part_leaves(graph: FusionGraph, first: Cluster, second: Cluster) -> bool:
    """Whether a value that is only a part of what the loops run over, or more than that, is read elsewhere too."""
    spaces = [*first.iteration_spaces, *second.iteration_spaces]
    parts = {part for space in spaces for part in space.parts if part not in space.along}
    if not parts:
        return False
    if len(second.operations) == 1 and _puts_alike_together(graph, second.operations[0]):
        return False  # loops over one piece then write all of them
    joined = join_spaces(first.loops_with(second))
    operations = [*first.operations, *second.operations]
    inside = {op.name for op in operations}
    return any(
        space.numel in parts and joined is not None and space.numel != joined.numel and leaves(graph, op, inside)
        for op, space in zip(operations, spaces, strict=True)
    )


def leaves(graph: FusionGraph, op: Operation, inside: Collection[str]) -> bool:
    """Whether a value of an operation is needed by others than these."""
    return any(reader.name not in inside for reader in graph.readers[op.name]) or any(
        ValueRef(op.name, number) in graph.leaving for number in range(len(op.outputs))
    )


def size_of(first: Cluster, second: Cluster) -> int:
    """How many operations two clusters have together, without those that make places to read at."""
    spaces = [*first.iteration_spaces, *second.iteration_spaces]
    along = {part for space in spaces for part in space.along}
    return sum(1 for space in spaces if space.numel not in along)


def leader_leaves(graph: FusionGraph, first: Cluster, second: Cluster) -> bool:
    """Whether a number that leads larger loops is read elsewhere too: who reads it would have to wait for the loops."""
    leaders = first.outside_with(second).leaders
    operations = [*first.operations, *second.operations]
    if not leaders or all(spec.numel == 1 for op in operations for spec in op.outputs):
        return False
    inside = {op.name for op in operations}
    return any(leaves(graph, op, inside) for op in operations if op.name in leaders)


def _puts_alike_together(graph: FusionGraph, op: Operation) -> bool:
    """Whether an operation puts a few tensors of one size together."""
    pieces = {graph.spec(ref).shape for ref in op.inputs}
    return op.short_name in ("cat", "stack") and len(pieces) == 1 and 1 < len(op.inputs) <= MOST_PIECES
