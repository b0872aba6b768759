"""What a graph looks like and costs, before fusion and after (seeds: graph metrics).

In: a `FusionGraph` and the sets of operations that run as one kernel each. Out: `GraphMetrics`.
Guarantee: reads only. Nodes are one for all inputs, one for all outputs and one for each kernel; a view is none, and so
is a parameter or a buffer. An edge is a pair of nodes of which one reads what the other makes. FLOPs do not change by
fusion: the work is the same, the trips to memory are fewer.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import BYTES_PER_ELEMENT, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info

# What eager runs without a kernel, beside the views that kernels can follow: parts of a tensor, checks of sizes.
_ALIASES = frozenset(
    {
        "slice", "select", "as_strided", "split", "split_with_sizes", "unbind", "chunk", "narrow", "diagonal",
        "squeeze", "unsqueeze", "unfold", "view_as_complex", "view_as_real", "real", "imag", "lift_fresh",
        "_reshape_alias", "_assert_scalar", "_assert_tensor_metadata", "sym_size", "sym_stride", "sym_numel",
        "sym_storage_offset", "sym_constrain_range", "sym_constrain_range_for_size",
    }
)  # fmt: skip
_INPUT, _OUTPUT = "<input>", "<output>"


@dataclass(frozen=True)
class GraphMetrics:
    """Size and cost of one call of a graph at one set of symbol values."""

    nodes: int  # kernels, and one for the inputs, and one for the outputs
    edges: int
    depth: int  # edges on the longest path
    flops: float  # a multiply-add counts two
    nbytes: int  # read and written by all kernels
    kernels: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; the bytes are called ``bytes``."""
        return {("bytes" if name == "nbytes" else name): value for name, value in asdict(self).items()}


def has_kernel(op: Operation) -> bool:
    """Whether eager runs a kernel for this operation."""
    return info(op.target).kind is not OpKind.VIEW and op.short_name not in _ALIASES


def measure_graph(graph: FusionGraph, fused: Iterable[Collection[str]] = ()) -> GraphMetrics:
    """Metrics of ``graph`` when each set of operation names in ``fused`` runs as one kernel; sets that meet are one."""
    kernels = [op for op in graph.operations if has_kernel(op)]
    home, clusters = _homes([op.name for op in kernels], fused)
    edges = _edges(graph, kernels, home)
    return GraphMetrics(
        nodes=len(set(home.values())) + 2,
        edges=len(edges),
        depth=_depth(edges),
        flops=sum(graph.operation_flops(op) for op in kernels),
        nbytes=_bytes_read(graph, kernels, home) + _bytes_written(graph, kernels, home, clusters),
        kernels=len(set(home.values())),
    )


def _homes(kernels: Sequence[str], fused: Iterable[Collection[str]]) -> tuple[dict[str, str], set[str]]:
    """The kernel that each operation runs in, named after its first operation, and which of these are fused ones."""
    home = {name: name for name in kernels}
    clusters: set[str] = set()
    for names in fused:
        members = [name for name in kernels if name in names]
        if not members:
            continue
        met = {home[name] for name in members}
        first = next(name for name in kernels if home[name] in met)
        home |= {name: first for name in kernels if home[name] in met}
        clusters = clusters - met | {first}
    return home, clusters


def _base(graph: FusionGraph, ref: ValueRef) -> ValueRef:
    """The value that a kernel wrote or the graph was given, under all views."""
    while ref.name in graph.by_name:
        op = graph.by_name[ref.name]
        if has_kernel(op) or not op.inputs:
            break
        ref = op.inputs[0]
    return ref


def _edges(graph: FusionGraph, kernels: Sequence[Operation], home: dict[str, str]) -> set[tuple[str, str]]:
    edges: set[tuple[str, str]] = set()
    for op in kernels:
        for ref in op.inputs:
            source = _base(graph, ref).name
            if source in home:
                edges.add((home[source], home[op.name]))
            elif source in graph.inputs and source not in graph.parameters:
                edges.add((_INPUT, home[op.name]))
    leaving = {_base(graph, ref).name for ref in graph.outputs}
    edges.update((home[name], _OUTPUT) for name in leaving if name in home)
    return {(first, second) for first, second in edges if first != second}


def _depth(edges: set[tuple[str, str]]) -> int:
    """Edges on the longest path."""
    before: dict[str, set[str]] = {}
    for first, second in edges:
        before.setdefault(second, set()).add(first)
    depth: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(before).static_order():
        depth[name] = max((depth[source] + 1 for source in before.get(name, ())), default=0)
    return max(depth.values(), default=0)


def _stored_bytes(graph: FusionGraph, spec: TensorSpec) -> int:
    """Bytes behind a tensor: a dim of stride 0 repeats one element."""
    pairs = zip(spec.shape, spec.strides, strict=True)
    sizes = [min(1, graph.size(size)) if stride == 0 else graph.size(size) for size, stride in pairs]
    return math.prod(sizes) * BYTES_PER_ELEMENT.get(spec.dtype, 4)


def _bytes_read(graph: FusionGraph, kernels: Sequence[Operation], home: dict[str, str]) -> int:
    """A kernel reads each tensor once, and of one that it reads in parts no more than the whole."""
    reads: dict[tuple[str, ValueRef], dict[ValueRef, int]] = {}
    for op in kernels:
        for ref in op.inputs:
            base = _base(graph, ref)
            if home.get(base.name) != home[op.name]:
                bytes_of = reads.setdefault((home[op.name], base), {})
                stored = _stored_bytes(graph, graph.spec(ref))
                read = min(stored, graph.bytes_read(op, ref)) if graph.is_table(op, ref) else stored
                bytes_of[ref] = max(bytes_of.get(ref, 0), read)
    return sum(min(_stored_bytes(graph, graph.spec(base)), sum(refs.values())) for (_, base), refs in reads.items())


def _bytes_written(graph: FusionGraph, kernels: Sequence[Operation], home: dict[str, str], clusters: set[str]) -> int:
    """Eager writes all its outputs, a fused kernel those that are read outside of it."""
    needed = {_base(graph, ref) for ref in graph.outputs}
    for op in kernels:
        needed.update(base for base in (_base(graph, r) for r in op.inputs) if home.get(base.name) != home[op.name])
    return sum(
        _stored_bytes(graph, spec)
        for op in kernels
        for index, spec in enumerate(op.outputs)
        if home[op.name] not in clusters or ValueRef(op.name, index) in needed
    )
