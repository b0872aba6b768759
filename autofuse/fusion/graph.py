"""The graph of operations: edges, order, consumers and costs, and what its edges allow to run as one.

In: operations in program order. Out: who produces and who reads each value, with views resolved; what each operation
costs; whether operations may run as one kernel; the nodes that an engine makes of them.
Guarantee: never changes an operation; views are transparent, since reading through a view is free. An operation reads
only what the graph knows when it is added, so the order of adding is one in which all can run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import sympy

from autofuse.errors import FusionError
from autofuse.fusion.cost import matmul_flops
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import BYTES_PER_ELEMENT, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import VIEWS, OpKind, info
from autofuse.ir.shape import Dim, evaluate, free_symbols


class Fuses(Protocol):
    """What plans the nodes of a graph (`FusionEngine`)."""

    def fuse(self, operations: FusionGraph, apart: Sequence[Collection[str]] = ()) -> list[FusionNode]:
        """Nodes in program order, none of which share an operation."""


class FusionGraph:
    """Operations with their producer and consumer edges (seeds: fusion graph manager).

    Shapes are symbolic. Costs are those of one call at the graph's ``hints``, 64 for a symbol that has none: bytes are
    read and written by each operation as a kernel of its own, a multiply-add is two FLOPs.
    """

    def __init__(
        self,
        operations: Iterable[Operation] = (),
        inputs: Mapping[str, TensorSpec] | None = None,
        outputs: Iterable[ValueRef] = (),
        hints: Mapping[str, int] | None = None,
        parameters: Iterable[str] = (),
        devices: Mapping[ValueRef, str] | None = None,
        derived: Mapping[str, sympy.Expr] | None = None,
    ) -> None:
        """``inputs``: tensors from outside by name; ``outputs``: values that must exist afterwards;
        ``hints``: a likely value of each symbol, for cost estimates only; ``parameters``: which inputs are
        parameters or buffers of modules; ``devices``: where values live, with the index that their specs lack;
        ``derived``: symbols that stand for rounded quotients of others. Raises FusionError as `add_node`."""
        self.operations: list[Operation] = []  # in program order; `add_node` adds to it
        self.inputs = dict(inputs or {})
        self.outputs = tuple(outputs)
        self.hints = dict(hints or {})
        self.parameters = frozenset(parameters)
        self.devices = dict(devices or {})
        self.derived = dict(derived or {})
        self.by_name: dict[str, Operation] = {}
        self.position: dict[str, int] = {}
        self.consumers: dict[str, list[Operation]] = {}
        self.value_readers: dict[ValueRef, list[str]] = {}  # readers of each value, through views
        self.readers: dict[str, list[Operation]] = {}
        self._devices_of: dict[str, frozenset[str]] = {}
        for op in operations:
            self.add_node(op)

    def add_node(self, op: Operation) -> int:
        """Append an operation with its edges; returns its place in program order.

        Raises FusionError for a name that is taken, and for a value that neither an input nor an earlier operation is.
        """
        if op.name in self.by_name or op.name in self.inputs:
            raise FusionError(f"expected one value called {op.name!r}, found two; rename one of the operations")
        reads = dict.fromkeys(op.inputs)
        for ref in reads:
            if ref.name not in self.by_name and ref.name not in self.inputs:
                raise FusionError(
                    f"{op.name} reads {ref.name!r}, which nothing produces before it; "
                    "add it to the inputs, or sort the operations"
                )
        place = len(self.operations)
        self.operations.append(op)
        self.by_name[op.name], self.position[op.name] = op, place
        self.consumers[op.name], self.readers[op.name] = [], []
        for ref in reads:
            if ref.name in self.consumers:
                self.consumers[ref.name].append(op)
        if info(op.target).kind not in VIEWS:
            for base in dict.fromkeys(self.base(ref) for ref in reads):
                self.value_readers.setdefault(base, []).append(op.name)
            for producer in self.producers(op):
                self.readers[producer.name].append(op)
        self.__dict__.pop("leaving", None)
        return place

    @functools.cached_property
    def leaving(self) -> set[ValueRef]:
        """Values that must exist afterwards, views resolved."""
        return {self.base(ref) for ref in self.outputs}

    # ---- fusing ------------------------------------------------------------------------------------

    def can_fuse(
        self,
        names: Collection[str],
        unit_of: Callable[[str], Collection[str] | None] | None = None,
        horizon: Callable[[int], int] | None = None,
    ) -> bool:
        """Whether operations may run as one kernel, as far as edges and devices say; loops are a node's question.

        All that they read and make lives on one device, and nothing outside has to run after one of them and before
        another. ``unit_of``: the names of all operations that run as one with an operation outside, None for one that
        runs by itself. ``horizon(place)``: the last place in program order from which such a unit reaches back to
        ``place`` or before it; asked only where a path leads so far. Without units nothing reaches back.
        """
        inside = set(names)
        if len(self.devices_of(inside)) > 1:
            return False
        last = max(self.position[name] for name in inside)
        is_final = horizon is None
        stack = [reader.name for name in inside for reader in self.readers[name] if reader.name not in inside]
        seen: set[str] = set()
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            unit = unit_of(name) if unit_of is not None else None
            if unit is None and self.position[name] > last:
                if horizon is not None and not is_final:
                    last, is_final = horizon(last), True
                if self.position[name] > last:
                    continue
            members = (name,) if unit is None else unit
            seen.update(members)
            for member in members:
                for reader in self.readers[member]:
                    if reader.name in inside:
                        return False
                    if reader.name not in seen:
                        stack.append(reader.name)
        return True

    def optimize(self, engine: Fuses, apart: Sequence[Collection[str]] = ()) -> list[FusionNode]:
        """The nodes that an engine makes of the graph, in program order; other operations run as in eager.

        No node holds operations of a set of ``apart`` beside others. The graph itself stays as it is.
        """
        return engine.fuse(self, apart)

    def devices_of(self, names: Iterable[str]) -> set[str]:
        """Where all values live that operations read or make."""
        found: set[str] = set()
        for name in names:
            devices = self._devices_of.get(name)
            if devices is None:
                op = self.by_name[name]
                touched = (*op.inputs, *(ValueRef(name, index) for index in range(len(op.outputs))))
                devices = self._devices_of[name] = frozenset(map(self.device, touched))
            found |= devices
        return found

    # ---- edges and costs ---------------------------------------------------------------------------

    def spec(self, ref: ValueRef) -> TensorSpec:
        """Symbolic shape, strides (in elements), dtype and device of a value; raises KeyError for an unknown one."""
        if ref.name in self.inputs:
            return self.inputs[ref.name]
        return self.by_name[ref.name].outputs[ref.index]

    def device(self, ref: ValueRef) -> str:
        """Where a value lives: ``cuda:1`` where the graph knows the index, else the type."""
        return self.devices.get(ref) or self.spec(ref).device

    def base(self, ref: ValueRef) -> ValueRef:
        """The value that a chain of views looks at."""
        while ref.name in self.by_name and info(self.by_name[ref.name].target).kind in VIEWS:
            ref = self.by_name[ref.name].inputs[0]
        return ref

    def producers(self, op: Operation) -> list[Operation]:
        """Operations whose values ``op`` reads, through views; views themselves never appear."""
        names = dict.fromkeys(self.base(ref).name for ref in op.inputs)
        return [self.by_name[name] for name in names if name in self.by_name]

    def has_single_consumer(self, op: Operation) -> bool:
        """Whether exactly one operation reads the values of ``op`` and none of them is a graph output."""
        return len(self.consumers[op.name]) == 1 and all(o.name != op.name for o in self.outputs)

    def size(self, dim: Dim, default: int = 64) -> int:
        """A likely value of a dim; ``default`` for symbols without a hint."""
        if isinstance(dim, int):
            return dim
        return evaluate(dim, {name: self.hints.get(name, default) for name in free_symbols(dim)})

    def numel(self, spec: TensorSpec) -> int:
        """Elements of a tensor, at the likely sizes."""
        return math.prod(self.size(d) for d in spec.shape)

    def nbytes(self, spec: TensorSpec) -> int:
        """Bytes of a tensor's elements, at the likely sizes."""
        return self.numel(spec) * BYTES_PER_ELEMENT.get(spec.dtype, 4)

    def operation_bytes(self, op: Operation) -> int:
        """Bytes that ``op`` reads and writes as a kernel of its own; 0 for views."""
        if info(op.target).kind in VIEWS:
            return 0
        read = sum(self.bytes_read(op, ref) for ref in dict.fromkeys(op.inputs))
        return read + sum(self.nbytes(spec) for spec in op.outputs)

    def bytes_read(self, op: Operation, ref: ValueRef) -> int:
        """Bytes of a tensor that ``op`` reads: of a table no more than it gives elements."""
        whole = self.nbytes(self.spec(ref))
        return min(whole, self.nbytes(op.outputs[0])) if self.is_table(op, ref) else whole

    def is_table(self, op: Operation, ref: ValueRef) -> bool:
        """Whether ``op`` reads a tensor only at places that are data."""
        return info(op.target).kind is OpKind.INDEXED and ref == op.inputs[0] and op.inputs.count(ref) == 1

    def operation_flops(self, op: Operation) -> float:
        """Floating-point operations: two for a multiply-add of the matmul family, roughly a rate per element else."""
        exact = matmul_flops(self, op)
        if exact is not None:
            return exact
        facts = info(op.target)
        if facts.kind is OpKind.OPAQUE or facts.kind in VIEWS:
            return 0.0
        specs = [self.spec(ref) for ref in op.inputs] if facts.kind is not OpKind.INDEXED else []
        return facts.flops * max((self.numel(s) for s in [*specs, *op.outputs]), default=0)


MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"})
