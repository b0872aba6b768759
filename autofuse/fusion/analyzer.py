"""`FusionCandidateAnalyzer`: which operations of a graph become nodes.

In: operations in program order (or a `FusionGraph`). Out: `FusionNode`s that partition the fusible
operations, and a `Refusal` record for each fusion made or not made.
Guarantee: contracting every node to a point leaves the graph acyclic, random operations keep their
order, and no node holds an operation whose value is only complete after the node's own loops.
Method: greedy growth in topological order along producer edges, then a pass over siblings that read the
same tensors. Views are free: a node takes the views between its members, the graph keeps its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from autofuse.fusion.benefit import FusionBenefit, estimate_benefit
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.iteration_space import IterationSpace, iteration_space_of, with_parts
from autofuse.fusion.node import FusionNode, join_extents
from autofuse.ir.operation import NodeForm, Operation, ValueRef, map_arg
from autofuse.ir.optable import FUSIBLE, VIEWS, OpKind, info, is_move
from autofuse.ir.records import Refusal

# A single operation is worth a kernel of its own only where it does some work; one addition is not.
MIN_FLOPS_ALONE = 4.0
# Sibling nodes are joined over tensors of at least this size; below it a launch costs more than the reads.
MIN_SHARED_BYTES = 1 << 14
MOST_PIECES = 8  # that are put together by as many stores of one nest (codegen/lowering/lower.py)


@dataclass(eq=False)
class _Cluster:
    """Operations on their way to becoming a node; ``extents`` runs beside ``operations``."""

    operations: list[Operation]
    extents: list[IterationSpace]
    seeded: bool = False  # began as a custom pattern, which may pass the size limit


@dataclass
class FusionCandidateAnalyzer:
    """Finds nodes and judges them (seed: operator fusion with dynamic shapes).

    ``lowerable``: optional last word on a node, None where a kernel can be generated and a (code, message)
    where not; the node is then split.
    """

    config: FusionConfig = field(default_factory=FusionConfig)
    lowerable: Callable[[NodeForm], tuple[str, str] | None] | None = None
    refusals: list[Refusal] = field(default_factory=list)
    _island: dict[str, int] = field(default_factory=dict)

    # ---- the seed's questions ----------------------------------------------------------------------

    def find_fusible_operations(
        self,
        ops: Sequence[Operation] | FusionGraph,
        seeds: Iterable[Sequence[str]] = (),
        apart: Iterable[Collection[str]] = (),
    ) -> list[FusionNode]:
        """Nodes in program order. ``seeds``: names of operations to start clusters from (custom patterns);
        ``apart``: names that share no node with others (what may run in another way as a whole)."""
        graph = ops if isinstance(ops, FusionGraph) else _closed_graph(ops)
        self.refusals = []
        self._island = {name: number for number, names in enumerate(apart) for name in names}
        if not self.config.enabled:
            return []
        nodes = [node for cluster in self._clusters(graph, seeds) for node in self._finish(graph, cluster)]
        return sorted(nodes, key=lambda node: graph.position[node.kernels[0].name])

    def analyze_benefit(self, node: FusionNode, graph: FusionGraph | None = None) -> FusionBenefit:
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

    def _clusters(self, graph: FusionGraph, seeds: Iterable[Sequence[str]]) -> list[_Cluster]:
        home: dict[str, _Cluster] = {}
        clusters: list[_Cluster] = []
        for names in seeds:
            members = [graph.by_name[n] for n in names]
            extents = [self._extent(graph, op) for op in members]
            if len({self._island.get(n) for n in names}) > 1:
                self._refuse(
                    "kept_apart", members, "part of the pattern belongs to an attention that may run as a whole"
                )
                continue
            if None in extents or join_extents([e for e in extents if e]) is None or any(n in home for n in names):
                self._refuse("pattern_loops_differ", members, "the pattern's operations do not share one loop nest")
                continue
            cluster = _Cluster(members, [e for e in extents if e], seeded=True)
            clusters.append(cluster)
            home.update(dict.fromkeys(names, cluster))
        for op in graph.operations:
            if op.name in home or info(op.target).kind in VIEWS:
                continue
            extent = self._extent(graph, op)
            if extent is None:
                continue
            cluster = _Cluster([op], [extent])
            clusters.append(cluster)
            home[op.name] = cluster
            for producer in graph.producers(op):
                self._join(graph, home, clusters, home.get(producer.name), home[op.name])
            if extent.parts:
                self._join_pieces(graph, home, clusters, op)
        self._join_wholes(graph, home, clusters)
        self._join_siblings(graph, home, clusters)
        self._join_moves(graph, home, clusters)
        return clusters

    def _extent(self, graph: FusionGraph, op: Operation) -> IterationSpace | None:
        """The extent of an operation that may be fused, None for the rest."""
        kind = info(op.target).kind
        if kind not in FUSIBLE or not self.config.allows(kind):
            return None
        if not all(self.config.device_enabled(spec.device) for spec in op.outputs):
            return None
        specs = [graph.spec(ref) for ref in op.inputs] + list(op.outputs)
        if any(spec.dtype not in _DTYPES for spec in specs):
            self._refuse("dtype", [op], f"no kernel computes with {sorted({s.dtype for s in specs} - _DTYPES)}")
            return None
        return with_parts(iteration_space_of(op, graph.spec), op, graph.by_name, graph.spec)

    def _join(
        self,
        graph: FusionGraph,
        home: dict[str, _Cluster],
        clusters: list[_Cluster],
        first: _Cluster | None,
        second: _Cluster,
        apart: bool = False,
    ) -> bool:
        """Merge two clusters where that is sound; ``home`` and ``clusters`` follow. Returns whether it was.

        ``apart``: they may have loops of their own.
        """
        if first is None or first is second:
            return False
        operations = sorted([*first.operations, *second.operations], key=lambda o: graph.position[o.name])
        refusal = self._why_not(graph, home, first, second, apart)
        if refusal is not None:
            self._refuse(refusal[0], operations, refusal[1])
            return False
        by_name = {
            op.name: extent
            for cluster in (first, second)
            for op, extent in zip(cluster.operations, cluster.extents, strict=True)
        }
        first.operations, first.extents = operations, [by_name[op.name] for op in operations]
        first.seeded = first.seeded or second.seeded
        clusters.remove(second)
        home.update((op.name, first) for op in second.operations)
        return True

    def _why_not(
        self, graph: FusionGraph, home: dict[str, _Cluster], first: _Cluster, second: _Cluster, apart: bool = False
    ) -> tuple[str, str] | None:
        if self._island.get(first.operations[0].name) != self._island.get(second.operations[0].name):
            return "kept_apart", "one side is part of an attention that may run as a whole"
        size = len(first.operations) + len(second.operations)
        if size > self.config.max_fusion_size and not (first.seeded or second.seeded):
            return "size_limit", f"{size} operations are more than max_fusion_size={self.config.max_fusion_size}"
        devices = {graph.device(ref) for op in (*first.operations, *second.operations) for ref in _touched(op)}
        if len(devices) > 1:
            return "mixed_devices", f"a kernel reaches one device, these live on {' and '.join(sorted(devices))}"
        if not apart and join_extents([*first.extents, *second.extents]) is None:
            return "loops_differ", "the operations do not share one loop nest"
        if _part_leaves(graph, first, second):
            return "part_leaves", "a part of the result is also needed by itself, and has other loops"
        if _reads_terminal(graph, first, second) or _reads_terminal(graph, second, first):
            return "needs_whole_reduction", "a value is complete only after all rows, and a second kernel reads it"
        if _pools(graph, first, second) or _pools(graph, second, first):
            return "pooled_value", "next to a pooling, a value would be made once for each window or each piece"
        if _has_outside_path(graph, home, first, second) or _has_outside_path(graph, home, second, first):
            return "cycle", "an operation between the two must run outside of the kernel"
        return None

    def _join_pieces(
        self, graph: FusionGraph, home: dict[str, _Cluster], clusters: list[_Cluster], op: Operation
    ) -> None:
        """Join an operation with all that its pieces come from: one of them alone would leave the others between."""
        own = home[op.name]
        others = {id(home[p.name]): home[p.name] for p in graph.producers(op) if p.name in home}
        others.pop(id(own), None)
        if len(others) < 2:
            return
        found = list(others.values())
        merged = _Cluster(
            [o for c in found for o in c.operations],
            [e for c in found for e in c.extents],
            any(c.seeded for c in found),
        )
        whole = _Cluster([*merged.operations, *own.operations], [*merged.extents, *own.extents])
        if self._why_not(graph, home, merged, own) or _reads_terminal(graph, merged, merged):
            return
        if _has_outside_path(graph, home, whole, whole):
            return
        for cluster in found:
            clusters.remove(cluster)
        clusters.append(merged)
        home.update((o.name, merged) for o in merged.operations)
        self._join(graph, home, clusters, merged, own)

    def _join_wholes(self, graph: FusionGraph, home: dict[str, _Cluster], clusters: list[_Cluster]) -> None:
        """Join what is cut into parts with the one cluster that reads all of them: none of its readers alone could."""
        for op in graph.operations:
            own = home.get(op.name)
            readers = {id(c): c for c in (home.get(r.name) for r in graph.readers[op.name]) if c is not None}
            if own is None or len(readers) != 1 or any(r.name not in home for r in graph.readers[op.name]):
                continue
            (reader,) = readers.values()
            if reader is not own and any(op.outputs[0].numel in extent.parts for extent in reader.extents):
                self._join(graph, home, clusters, own, reader)

    def _join_siblings(self, graph: FusionGraph, home: dict[str, _Cluster], clusters: list[_Cluster]) -> None:
        """Join clusters that read the same large tensor, made here or an input: it is then read once."""
        for ref, names in graph.value_readers.items():
            readers = [home[name] for name in names if name in home]
            if graph.nbytes(graph.spec(ref)) < MIN_SHARED_BYTES:
                continue
            for first, second in itertools.pairwise(readers):
                if first in clusters and second in clusters and first is not second:
                    self._join(graph, home, clusters, first, second)

    def _join_moves(self, graph: FusionGraph, home: dict[str, _Cluster], clusters: list[_Cluster]) -> None:
        """Join copies, casts, fills and the like that follow each other, whatever their sizes: one launch for all."""
        last: _Cluster | None = None
        for op in graph.operations:
            if info(op.target).kind in VIEWS:
                continue
            own = home.get(op.name)
            if own is None or not all(is_move(o.target) for o in own.operations):
                last = None
            elif last is None or last is own or not self._join(graph, home, clusters, last, own, apart=True):
                last = own

    # ---- from cluster to node ----------------------------------------------------------------------

    def _finish(self, graph: FusionGraph, cluster: _Cluster) -> list[FusionNode]:
        operations = cluster.operations
        while operations:
            node = build_node(graph, operations)
            problem = self._problem(graph, node)
            if problem is None:
                self._accept(graph, node)
                rest = [op for op in cluster.operations if op not in operations]
                extents = [e for op, e in zip(cluster.operations, cluster.extents, strict=True) if op in rest]
                return [node, *(self._finish(graph, _Cluster(rest, extents)) if rest else [])]
            code, message = problem
            self._refuse(code, operations, message)
            if code in _FINAL:
                return []
            # No kernel for all of it: what comes first may still be one.
            operations = operations[:-1]
        rest = cluster.operations[1:]
        return self._finish(graph, _Cluster(rest, cluster.extents[1:])) if rest else []

    def _problem(self, graph: FusionGraph, node: FusionNode) -> tuple[str, str] | None:
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
        benefit = estimate_benefit(node, graph)
        if not benefit.should_fuse(self.config.min_fusion_benefit):
            return (
                "low_benefit",
                f"estimated {benefit.estimated_speedup:.2f}x is below "
                f"min_fusion_benefit={self.config.min_fusion_benefit}",
            )
        return self.lowerable(node.form) if self.lowerable else None

    def _accept(self, graph: FusionGraph, node: FusionNode) -> None:
        benefit = estimate_benefit(node, graph)
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
_FINAL = frozenset({"no_work", "single_op", "small_tensors", "low_benefit"})


def build_node(graph: FusionGraph, kernels: Sequence[Operation]) -> FusionNode:
    """A node of these operations, the views between them, and the values that the rest of the graph needs."""
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


def flat_name(ref: ValueRef) -> str:
    """The name under which output ``index`` of an operation enters a node."""
    return ref.name if ref.index == 0 else f"{ref.name}@{ref.index}"


def _with_flat_inputs(op: Operation, split: set[ValueRef]) -> Operation:
    rename = lambda ref: ValueRef(flat_name(ref)) if ref in split else ref  # noqa: E731
    return replace(op, args=map_arg(op.args, rename), kwargs=tuple((k, map_arg(v, rename)) for k, v in op.kwargs))


def _closed_graph(ops: Sequence[Operation]) -> FusionGraph:
    """A graph of operations whose outside inputs are not described: they get the reader's output spec."""
    names = {op.name for op in ops}
    inputs = {ref.name: op.outputs[0] for op in ops for ref in op.inputs if ref.name not in names}
    read = {ref for op in ops for ref in op.inputs}
    outputs = [ValueRef(op.name, i) for op in ops for i in range(len(op.outputs)) if ValueRef(op.name, i) not in read]
    return FusionGraph(ops, inputs, outputs)


def _touched(op: Operation) -> list[ValueRef]:
    """All values that an operation reads or makes."""
    return [*op.inputs, *(ValueRef(op.name, n) for n in range(len(op.outputs)))]


def _is_transpose(node: FusionNode, op: Operation) -> bool:
    """A copy into another layout, which costs a pass over memory."""
    return op.short_name == "clone" and node.spec(op.inputs[0]).strides != op.outputs[0].strides


def _reads_terminal(graph: FusionGraph, producer: _Cluster, consumer: _Cluster) -> bool:
    """Whether ``consumer`` reads a value that ``producer`` completes only after all its rows."""
    terminal = {
        ValueRef(op.name, i)
        for op, extent in zip(producer.operations, producer.extents, strict=True)
        for i, level in enumerate(extent.levels)
        if level == "terminal"
    }
    return any(graph.base(ref) in terminal for op in consumer.operations for ref in op.inputs)


def _pools(graph: FusionGraph, producer: _Cluster, consumer: _Cluster) -> bool:
    """Whether ``consumer`` pools a value that ``producer`` makes, or puts one that is pooled there at other places."""
    kinds = {op.name: info(op.target).kind for op in producer.operations}
    for op in consumer.operations:
        read = {kinds.get(graph.base(ref).name) for ref in op.inputs} - {None}
        if read and info(op.target).kind is OpKind.POOLING:
            return True
        if OpKind.POOLING in read and info(op.target).kind is OpKind.MEMORY:
            return True
    return False


def _part_leaves(graph: FusionGraph, first: _Cluster, second: _Cluster) -> bool:
    """Whether a value that is only a part of what the loops run over, or more than that, is read elsewhere too."""
    extents = [*first.extents, *second.extents]
    if len(second.operations) == 1 and _puts_alike_together(graph, second.operations[0]):
        return False  # loops over one piece then write all of them
    parts = {part for extent in extents for part in extent.parts}
    joined = join_extents(extents)
    operations = [*first.operations, *second.operations]
    inside = {op.name for op in operations}
    return any(
        extent.numel in parts
        and joined is not None
        and extent.numel != joined.numel
        and (
            any(r.name not in inside for r in graph.readers[op.name])
            or any(ValueRef(op.name, n) in graph.leaving for n in range(len(op.outputs)))
        )
        for op, extent in zip(operations, extents, strict=True)
    )


def _puts_alike_together(graph: FusionGraph, op: Operation) -> bool:
    """Whether an operation puts a few tensors of one size together."""
    pieces = {graph.spec(ref).shape for ref in op.inputs}
    return op.short_name in ("cat", "stack") and len(pieces) == 1 and 1 < len(op.inputs) <= MOST_PIECES


def _has_outside_path(graph: FusionGraph, home: dict[str, _Cluster], first: _Cluster, second: _Cluster) -> bool:
    """Whether something outside both must run after ``first`` and before ``second``, other clusters contracted."""
    inside = {op.name for op in (*first.operations, *second.operations)}
    targets = {op.name for op in second.operations}
    last = max(graph.position[name] for name in targets)
    stack = [r for op in first.operations for r in graph.readers[op.name] if r.name not in inside]
    seen: set[str] = set()
    while stack:
        op = stack.pop()
        if op.name in seen:
            continue
        cluster = home.get(op.name)
        members = cluster.operations if cluster is not None else [op]
        seen.update(member.name for member in members)
        for member in members:
            if cluster is None and graph.position[member.name] > last:
                continue
            for reader in graph.readers[member.name]:
                if reader.name in targets:
                    return True
                if reader.name not in seen and reader.name not in inside:
                    stack.append(reader)
    return False
