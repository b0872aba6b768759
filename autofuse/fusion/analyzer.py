"""`FusionCandidateAnalyzer`: which operations of a graph become nodes.

In: operations in program order (or a `FusionGraph`). Out: `FusionNode`s that partition the fusible
operations, and a `Refusal` record for each fusion made or not made.
Guarantee: contracting every node to a point leaves the graph acyclic, random operations keep their
order, and no node holds an operation whose value is only complete after the node's own loops.
Method: greedy growth in topological order along producer edges, then a pass over siblings that read the
same tensors. Views are free: a node takes the views between its members, the graph keeps its own.
`FusionDetector` asks in two steps: what may be fused, and the nodes that come of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from autofuse.errors import ShapeError
from autofuse.fusion.benefit import FusionBenefit, estimate_benefit
from autofuse.fusion.broadcasts import broadcast_leaves, is_costly_again
from autofuse.fusion.cluster import (
    Cluster,
    Growth,
    Seed,
    is_one_row,
    leader_leaves,
    part_leaves,
    pools,
    reads_incomplete,
    share_loops,
    size_of,
)
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.iteration_space import is_constant
from autofuse.fusion.node import FusionNode
from autofuse.fusion.one_call import Joining, join_calls, operations_of
from autofuse.fusion.side_by_side import are_independent, is_small_work, relations
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.ir.optable import FUSIBLE, VIEWS, OpKind, info, is_move
from autofuse.ir.records import Refusal
from autofuse.ir.shape import SymbolicShape

# A single operation is worth a kernel of its own only where it does some work; one addition is not.
MIN_FLOPS_ALONE = 4.0
# Sibling nodes are joined over tensors of at least this size; below it a launch costs more than the reads.
MIN_SHARED_BYTES = 1 << 14


@dataclass(eq=False)
class _Judged:
    """Nodes of one graph with what they gain, None where that is too little; by the names of their operations."""

    graph: FusionGraph | None
    nodes: dict[tuple[str, ...], tuple[FusionNode, FusionBenefit | None]] = field(default_factory=dict)


@dataclass
class FusionCandidateAnalyzer:
    """Finds nodes and judges them (seed: operator fusion with dynamic shapes).

    ``lowerable``: optional last word on a node, None where a kernel can be generated and a (code, message)
    where not; the node is then split. ``check``: no node is accepted that is not sound (``run.check``).
    """

    config: FusionConfig = field(default_factory=FusionConfig)
    lowerable: Callable[[NodeForm], tuple[str, str] | None] | None = None
    refusals: list[Refusal] = field(default_factory=list)
    check: bool = False
    _island: dict[str, int] = field(default_factory=dict)
    _judged: _Judged = field(default_factory=lambda: _Judged(None))

    # ---- the seed's questions ----------------------------------------------------------------------

    def find_fusible_operations(
        self,
        ops: Sequence[Operation] | FusionGraph,
        seeds: Iterable[Seed] = (),
        apart: Iterable[Collection[str]] = (),
    ) -> list[FusionNode]:
        """Nodes in program order. ``seeds``: what clusters begin as (custom patterns);
        ``apart``: names that share no node with others (what may run in another way as a whole)."""
        graph = ops if isinstance(ops, FusionGraph) else closed_graph(ops)
        self.refusals = []
        return self.nodes_of(graph, [cluster.operations for cluster in self.grow(graph, seeds, apart)])

    def analyze_benefit(self, node: FusionNode, graph: FusionGraph | None = None) -> FusionBenefit:
        """What a call of the node is expected to gain, in bytes, launches and time, at the likely sizes of its graph.

        64 stands for a size without a likely value. Source: a roofline of the processor (`fusion.benefit`).
        """
        return estimate_benefit(node, graph)

    def is_shape_preserving(self, op: Operation) -> bool:
        """Whether the output has the shape of the (broadcast) inputs."""
        return info(op.target).kind is OpKind.POINTWISE or op.short_name in (
            "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
        )  # fmt: skip

    def requires_runtime_shape_check(self, node: FusionNode) -> bool:
        """Whether some size of the node is only known when it runs."""
        return bool(node.symbols)

    # ---- growing clusters --------------------------------------------------------------------------

    def grow(
        self, graph: FusionGraph, seeds: Iterable[Seed] = (), apart: Iterable[Collection[str]] = ()
    ) -> list[Cluster]:
        """Operations that may share one kernel as far as loops and edges say, those of ``seeds`` first."""
        self._island = {name: number for number, names in enumerate(apart) for name in names}
        growth = Growth(graph)
        if not self.config.enabled:
            return []
        for seed in seeds:
            self._plant(growth, seed)
        for op in graph.operations:
            if op.name in growth.home or info(op.target).kind in VIEWS or is_constant(op):
                continue  # a node takes its own copy of a constant
            cluster = self._single(graph, op)
            if cluster is None:
                continue
            growth.add(cluster)
            has_parts = any(space.parts for space in cluster.iteration_spaces)
            for producer in graph.producers(op):
                self._join(growth, growth.home.get(producer.name), growth.home[op.name])
            if has_parts:
                self._join_pieces(growth, op)
        self._join_wholes(growth)
        self._join_led(growth)
        self._join_siblings(growth)
        self._join_moves(growth)
        self._join_beside(growth)
        return growth.clusters

    def _plant(self, growth: Growth, seed: Seed) -> None:
        """Begin a cluster with the operations of a custom pattern, where they can share a kernel."""
        graph = growth.graph
        members = [graph.by_name[name] for name in seed.names]
        parts = [self._single(graph, op, seed.pattern) for op in members]
        if len({self._island.get(name) for name in seed.names}) > 1:
            self._refuse("kept_apart", members, "part of the pattern belongs to an attention that may run as a whole")
            return
        found = [part for part in parts if part is not None]
        if len(found) < len(members) or any(name in growth.home for name in seed.names) or not share_loops(found):
            self._refuse("pattern_loops_differ", members, "the pattern's operations do not share one loop nest")
            return
        if not growth.can_fuse(seed.names):
            self._refuse("cycle", members, "an operation between those of the pattern must run outside of the kernel")
            return
        cluster = found[0]
        for part in found[1:]:
            cluster.take_in(part)
        growth.add(cluster)

    def _single(self, graph: FusionGraph, op: Operation, pattern: str = "") -> Cluster | None:
        """A cluster that begins with an operation; None where it may not be fused, or has no loops."""
        kind = info(op.target).kind
        if kind not in FUSIBLE or not self.config.allows(kind):
            return None
        if not all(self.config.device_enabled(spec.device) for spec in op.outputs):
            return None
        if kind is OpKind.WRITE and any(spec.device != "cpu" for spec in op.outputs):
            return None  # no kernel of a GPU writes by an index in a fixed order
        if op.short_name == "empty_like" and not _is_only_filled(graph, op):
            return None
        specs = [graph.spec(ref) for ref in op.inputs] + list(op.outputs)
        if any(spec.dtype not in _DTYPES for spec in specs):
            self._refuse("dtype", [op], f"no kernel computes with {sorted({s.dtype for s in specs} - _DTYPES)}")
            return None
        cluster = Cluster(graph, pattern)
        if not cluster.can_fuse_with(op):
            return None
        cluster.add_operation(op)
        return cluster

    def _join(self, growth: Growth, first: Cluster | None, second: Cluster, apart: bool = False) -> bool:
        """Merge two clusters where that is sound; returns whether it was. ``apart``: each may have loops of its own."""
        if first is None or first is second:
            return False
        refusal = self._why_not(growth, first, second, apart)
        if refusal is not None:
            position = growth.graph.position
            operations = sorted([*first.operations, *second.operations], key=lambda op: position[op.name])
            self._refuse(refusal[0], operations, refusal[1])
            return False
        growth.remove(second)
        first.take_in(second)
        growth.settle(first)
        return True

    def _why_not(self, growth: Growth, first: Cluster, second: Cluster, apart: bool = False) -> tuple[str, str] | None:
        graph = growth.graph
        names = [*first.names, *second.names]
        if self._island and len({self._island.get(name) for name in names}) > 1:
            return "kept_apart", "one side is part of an attention that may run as a whole"
        count, most = size_of(first, second), self.config.max_fusion_size
        if count > most and not (first.pattern or second.pattern):
            return "size_limit", f"{count} operations are more than max_fusion_size={most}"
        devices = graph.devices_of(names)
        if len(devices) > 1:
            return "mixed_devices", f"a kernel reaches one device, these live on {' and '.join(sorted(devices))}"
        if not apart and not first.can_fuse_with(second):
            return "loops_differ", "the operations do not share one loop nest"
        if not apart and leader_leaves(graph, first, second):
            return "part_leaves", "a number that the loops read is also needed by itself"
        if not apart and broadcast_leaves(graph, first, second):
            return "part_leaves", "a value that is broadcast is also needed by itself, and has fewer loops"
        if not apart and is_costly_again(graph, first, second):
            return "broadcast_work", "a costly value that is broadcast would be calculated once for each copy"
        if part_leaves(graph, first, second):
            return "part_leaves", "a part of the result is also needed by itself, and has other loops"
        if reads_incomplete(first, second) and not is_one_row(graph, first, second):
            return "needs_whole_reduction", "a value is complete only after all rows, and a second kernel reads it"
        if pools(graph, first, second) or pools(graph, second, first):
            return "pooled_value", "next to a pooling, a value would be made once for each window or each piece"
        if not growth.can_fuse(names):
            return "cycle", "an operation between the two must run outside of the kernel"
        return None

    def _join_pieces(self, growth: Growth, op: Operation) -> None:
        """Join a concatenation with the producers of all its inputs: joining one would leave the others between."""
        graph, home = growth.graph, growth.home
        own = home[op.name]
        others = {id(home[p.name]): home[p.name] for p in graph.producers(op) if p.name in home}
        others.pop(id(own), None)
        if len(others) < 2:
            return
        found = list(others.values())
        merged = Cluster(graph).beside(found)
        if self._why_not(growth, merged, own) or reads_incomplete(merged):
            return
        for cluster in found:
            growth.remove(cluster)
        growth.add(merged)
        self._join(growth, merged, own)

    def _join_wholes(self, growth: Growth) -> None:
        """Join a split with the single cluster that reads all its parts: a part's reader alone could not join it."""
        graph, home = growth.graph, growth.home
        for op in graph.operations:
            own = home.get(op.name)
            readers = {id(c): c for c in (home.get(r.name) for r in graph.readers[op.name]) if c is not None}
            if own is None or len(readers) != 1 or any(r.name not in home for r in graph.readers[op.name]):
                continue
            (reader,) = readers.values()
            if reader is not own and any(op.outputs[0].numel in space.parts for space in reader.iteration_spaces):
                self._join(growth, own, reader)

    def _join_led(self, growth: Growth) -> None:
        """Join a cluster of single elements with all that it leads, where those share loops: the two gradients of a
        loss have the gradient of its result before them."""
        graph, home = growth.graph, growth.home
        for cluster in list(growth.clusters):
            if any(spec.numel != 1 for op in cluster.operations for spec in op.outputs):
                continue
            names = [r.name for op in cluster.operations for r in graph.readers[op.name]]
            led = {id(c): c for c in (home.get(name) for name in names) if c is not None and c is not cluster}
            if len(led) < 2 or any(name not in home for name in names):
                continue
            first, *others = led.values()
            if all(self._join(growth, first, other) for other in others):
                self._join(growth, cluster, first)

    def _join_siblings(self, growth: Growth) -> None:
        """Join clusters that read the same large tensor, made here or an input: it is then read once."""
        graph, home = growth.graph, growth.home
        for ref, names in graph.value_readers.items():
            readers = [home[name] for name in names if name in home]
            if graph.nbytes(graph.spec(ref)) < MIN_SHARED_BYTES:
                continue
            for first, second in itertools.pairwise(readers):
                if first in growth.clusters and second in growth.clusters and first is not second:
                    self._join(growth, first, second)

    def _join_moves(self, growth: Growth) -> None:
        """Join copies, casts, fills and the like that follow each other, whatever their sizes: one launch for all."""
        last: Cluster | None = None
        for op in growth.graph.operations:
            if info(op.target).kind in VIEWS:
                continue
            own = growth.home.get(op.name)
            if own is None or not all(is_move(o.target) for o in own.operations):
                last = None
            elif last is None or last is own or not self._join(growth, last, own, apart=True):
                last = own

    def _join_beside(self, growth: Growth) -> None:
        """Join small independent clusters of element-wise work, each with loops of its own: one call for all."""
        graph = growth.graph
        last: dict[str, Cluster] = {}
        for cluster in sorted(growth.clusters, key=lambda c: graph.position[c.operations[0].name]):
            if not is_small_work(graph, cluster, MIN_SHARED_BYTES):
                continue
            keys, own = relations(graph, cluster), cluster
            for key in keys:
                other = last.get(key)
                if other is None or growth.home[other.operations[0].name] is own:
                    continue
                other = growth.home[other.operations[0].name]
                if are_independent(other, own) and self._join(growth, other, own, apart=True):
                    own = other
            last.update(dict.fromkeys(keys, own))

    # ---- from cluster to node ----------------------------------------------------------------------

    def nodes_of(self, graph: FusionGraph, candidates: Iterable[Sequence[Operation]]) -> list[FusionNode]:
        """The nodes of operations that may share a kernel each, in program order; what has no kernel is split."""
        nodes = [node for operations in candidates for node in self._finish(graph, operations)]
        return sorted(nodes, key=lambda node: graph.position[node.kernels[0].name])

    def in_calls(
        self, graph: FusionGraph, nodes: Sequence[FusionNode], apart: Iterable[Collection[str]] = ()
    ) -> list[FusionNode]:
        """The nodes with small ones that are related joined (`one_call`); only where kernels can be looked for."""
        if self.lowerable is None:
            return list(nodes)
        alone, whole = functools.partial(self._alone, graph), functools.partial(self._as_stages, graph)
        return join_calls(graph, nodes, apart, Joining(MIN_SHARED_BYTES, self.config.max_fusion_size, alone, whole))

    def _alone(self, graph: FusionGraph, op: Operation) -> FusionNode | None:
        """The node of an operation, worth a call or not; None where it has no kernel."""
        node = build_node(graph, [op]) if self._single(graph, op) is not None else None
        return node if node is not None and node.outputs and self._problem(node) is None else None

    def _as_stages(self, graph: FusionGraph, parts: Sequence[FusionNode]) -> FusionNode | None:
        """One node of these; None (and a refusal) where no kernel can be generated."""
        found = [op for part in parts for op in operations_of(graph, part)]
        node = build_node(graph, sorted(found, key=lambda op: graph.position[op.name]))
        stages = [[op.name for op in part.kernels] for part in parts]
        whole = FusionNode(node.operations, node.inputs, node.outputs, stages)
        refusal = self._problem(whole)
        if refusal is not None:
            self._refuse(refusal[0], whole.kernels, refusal[1])
            return None
        for names in (part.operation_names for part in parts):  # it was accepted by itself
            own = next((r for r in self.refusals if r.accepted and r.operations == names), None)
            if own is not None:
                self.refusals.remove(own)
        estimate = self.analyze_benefit(whole, graph)
        self._accept(whole, estimate)
        self._judged.nodes[tuple(op.name for op in whole.kernels)] = whole, estimate
        return whole

    def _finish(self, graph: FusionGraph, candidate: Sequence[Operation]) -> list[FusionNode]:
        operations = candidate
        while operations:
            node, estimate = self.judge(graph, operations)
            if estimate is None:
                if operations is candidate:
                    return []
                break  # what comes behind may still be one
            refusal = self._problem(node)
            if refusal is None:
                self._accept(node, estimate)
                rest = [op for op in candidate if op not in operations]
                return [node, *(self._finish(graph, rest) if rest else [])]
            self._refuse(refusal[0], operations, refusal[1])
            if operations is candidate and node.is_side_by_side:  # each part may have one by itself
                parts = [[graph.by_name[op.name] for op in part] for part in node.parts]
                return [found for part in parts for found in self._finish(graph, part)]
            # No kernel for all of it: what comes first may still be one.
            operations = operations[:-1]
        return self._finish(graph, candidate[1:]) if len(candidate) > 1 else []

    def judge(self, graph: FusionGraph, operations: Sequence[Operation]) -> tuple[FusionNode, FusionBenefit | None]:
        """The node of operations and what it is expected to gain; None (and a refusal) where that is too little to look
        for a kernel. Asked again of the same graph, it gives the same node and no second refusal."""
        if self._judged.graph is not graph:
            self._judged = _Judged(graph)
        names = tuple(op.name for op in operations)
        if names not in self._judged.nodes:
            node = build_node(graph, operations)
            self._judged.nodes[names] = node, self._worth(graph, node)
        return self._judged.nodes[names]

    def _worth(self, graph: FusionGraph, node: FusionNode) -> FusionBenefit | None:
        refusal = self._why_idle(graph, node)
        if refusal is not None:
            self._refuse(refusal[0], node.kernels or node.operations, refusal[1])
            return None
        benefit = self.analyze_benefit(node, graph)
        least = self.config.min_fusion_benefit
        if not benefit.should_fuse(least):
            detail = f"estimated {benefit.estimated_speedup:.2f}x is below min_fusion_benefit={least}"
            self._refuse("low_benefit", node.kernels, detail)
            return None
        return benefit

    def _why_idle(self, graph: FusionGraph, node: FusionNode) -> tuple[str, str] | None:
        """Why a kernel would have next to nothing to do."""
        kernels = node.kernels
        if not kernels:
            return "no_work", "only views"
        if all(info(op.target).kind is OpKind.CREATION for op in kernels):
            return "no_work", "only constants"
        cheap = info(kernels[0].target).flops < MIN_FLOPS_ALONE
        if len(kernels) == 1 and cheap and not _is_transpose(node, kernels[0]):
            return "single_op", "one cheap operation gains nothing from a kernel of its own"
        largest = max(graph.numel(spec) for op in kernels for spec in op.outputs)
        largest = max([largest, *(graph.numel(spec) for spec in node.inputs.values())])
        if largest < self.config.min_tensor_size:
            return "small_tensors", f"{largest} elements are fewer than min_tensor_size={self.config.min_tensor_size}"
        return None

    def _problem(self, node: FusionNode) -> tuple[str, str] | None:
        """Why no kernel can be generated."""
        if self.check and not self._is_sound(node):
            return "not_sound", f"{node.label} is no node that can run as one, an error of autofuse: please report it"
        return self.lowerable(node.form) if self.lowerable else None

    def _is_sound(self, node: FusionNode) -> bool:
        """Whether operations read existing values, share their loops, and keep the shapes that they promise to keep."""
        keeping = [op for op in node.kernels if self.is_shape_preserving(op)]
        return node.validate_fusion() and all(_has_shape_of_inputs(node, op) for op in keeping)

    def _accept(self, node: FusionNode, benefit: FusionBenefit) -> None:
        self.refusals.append(
            Refusal(
                code="fused",
                accepted=True,
                operations=node.operation_names,
                detail=f"estimated {benefit.estimated_speedup:.2f}x, {benefit.kernel_count_reduction} launches fewer",
                bytes_saved=benefit.memory_saved,
                source=node.kernels[0].source or "",
            )
        )

    def _refuse(self, code: str, operations: Sequence[Operation], detail: str) -> None:
        names = " + ".join(op.short_name.strip("_") for op in operations)
        self.refusals.append(Refusal(code, False, names, detail, source=operations[0].source or ""))


_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"})


def build_node(graph: FusionGraph, kernels: Sequence[Operation]) -> FusionNode:
    """A node of these operations, the views between them, the constants they read, and the values that others need."""
    inside = {op.name for op in kernels}
    members: dict[str, Operation] = {op.name: op for op in kernels}
    for op in kernels:
        for ref in op.inputs:
            chain = []
            while ref.name in graph.by_name and info(graph.by_name[ref.name].target).kind in VIEWS:
                chain.append(graph.by_name[ref.name])
                ref = chain[-1].inputs[0]
            if ref.name in inside:  # a view of an input stays outside: aten makes it for nothing
                members.update((view.name, view) for view in chain)
            elif _is_own_constant(graph, ref, op):
                members.update((item.name, item) for item in (*chain, graph.by_name[ref.name]))
    operations = sorted(members.values(), key=lambda o: graph.position[o.name])
    own = {op.name for op in operations}
    values = [ValueRef(op.name, index) for op in kernels for index in range(len(op.outputs))]
    needed = [
        ref
        for ref in values
        if ref in graph.leaving or any(reader not in inside for reader in graph.value_readers.get(ref, ()))
    ]
    inputs = {
        ref.name: graph.spec(ref) for op in operations for ref in op.inputs if ref.name not in own and ref.index == 0
    }
    split = {ref for op in operations for ref in op.inputs if ref.name not in own and ref.index != 0}
    if split:  # a later output of an operation with several: it enters under a name of its own
        operations = [_with_flat_inputs(op, split) for op in operations]
        inputs |= {flat_name(ref): graph.spec(ref) for ref in split}
    node = FusionNode(operations, inputs, tuple(needed))
    return node.in_inputs(graph.derived) if node.reads_windows else node


def _is_own_constant(graph: FusionGraph, ref: ValueRef, reader: Operation) -> bool:
    """Whether a kernel can have the value as a constant of its own."""
    made = graph.by_name.get(ref.name)
    return made is not None and is_constant(made) and graph.device(ref) == graph.device(ValueRef(reader.name))


def flat_name(ref: ValueRef) -> str:
    """The name under which output ``index`` of an operation enters a node."""
    return ref.name if ref.index == 0 else f"{ref.name}@{ref.index}"


def _with_flat_inputs(op: Operation, split: set[ValueRef]) -> Operation:
    return op.reading(lambda ref: ValueRef(flat_name(ref)) if ref in split else ref)


def closed_graph(ops: Sequence[Operation]) -> FusionGraph:
    """A graph of operations whose outside inputs are not described: they get the reader's output spec."""
    names = {op.name for op in ops}
    inputs = {ref.name: op.outputs[0] for op in ops for ref in op.inputs if ref.name not in names}
    read = {ref for op in ops for ref in op.inputs}
    outputs = [ValueRef(op.name, i) for op in ops for i in range(len(op.outputs)) if ValueRef(op.name, i) not in read]
    return FusionGraph(ops, inputs, outputs)


def _has_shape_of_inputs(node: FusionNode, op: Operation) -> bool:
    """Whether the first result has the shape of the broadcast inputs; True where symbols leave that open."""
    try:
        shape = functools.reduce(SymbolicShape.broadcast, [node.spec(ref).shape for ref in op.inputs])
    except (ShapeError, TypeError):  # sizes that are equal for a reason that their spelling does not tell; no inputs
        return True
    return shape == op.outputs[0].shape


def _is_only_filled(graph: FusionGraph, op: Operation) -> bool:
    """Whether nothing reads what memory holds that an operation allocates."""
    fills = all(reader.short_name == "fill" for reader in graph.readers[op.name])
    return fills and ValueRef(op.name) not in graph.leaving


def _is_transpose(node: FusionNode, op: Operation) -> bool:
    """A copy into another layout, which costs a pass over memory."""
    return op.short_name == "clone" and node.spec(op.inputs[0]).strides != op.outputs[0].strides
