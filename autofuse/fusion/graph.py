"""The graph of operations: edges, order, consumers and costs.

In: operations in program order. Out: who produces and who reads each value, with views resolved, and
what each operation costs.
Guarantee: never changes an operation; views are transparent, since reading through a view is free.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import sympy

from autofuse.errors import FusionError
from autofuse.fusion.cost import matmul_flops
from autofuse.ir.operation import BYTES_PER_ELEMENT, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import VIEWS, OpKind, info
from autofuse.ir.shape import Dim, evaluate, free_symbols


class FusionGraph:
    """Operations with their producer and consumer edges (seeds: fusion graph manager)."""

    def __init__(
        self,
        operations: Sequence[Operation],
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
        ``derived``: symbols that stand for rounded quotients of others."""
        self.operations = tuple(operations)
        self.inputs = dict(inputs or {})
        self.outputs = tuple(outputs)
        self.hints = dict(hints or {})
        self.parameters = frozenset(parameters)
        self.devices = dict(devices or {})
        self.derived = dict(derived or {})
        self.by_name: dict[str, Operation] = {}
        for op in self.operations:
            if op.name in self.by_name or op.name in self.inputs:
                raise FusionError(f"expected one value called {op.name!r}, found two; rename one of the operations")
            self.by_name[op.name] = op
        self.position = {op.name: i for i, op in enumerate(self.operations)}
        self._check_order()
        self.consumers: dict[str, list[Operation]] = {op.name: [] for op in self.operations}
        self.value_readers: dict[ValueRef, list[str]] = {}  # readers of each value, through views
        self.readers: dict[str, list[Operation]] = {op.name: [] for op in self.operations}
        for op in self.operations:
            for ref in dict.fromkeys(op.inputs):
                if ref.name in self.consumers:
                    self.consumers[ref.name].append(op)
            if info(op.target).kind not in VIEWS:
                for producer in self.producers(op):
                    self.readers[producer.name].append(op)
                for ref in dict.fromkeys(self.base(ref) for ref in op.inputs):
                    self.value_readers.setdefault(ref, []).append(op.name)
        self.leaving = {self.base(ref) for ref in self.outputs}  # values that must exist afterwards, views resolved

    def _check_order(self) -> None:
        for op in self.operations:
            for ref in op.inputs:
                if ref.name in self.inputs:
                    continue
                if ref.name not in self.position:
                    raise FusionError(f"{op.name} reads {ref.name!r}, which nothing produces; add it to the inputs")
                if self.position[ref.name] >= self.position[op.name]:
                    raise FusionError(f"{op.name} reads {ref.name!r} before it is produced; sort the operations")

    def spec(self, ref: ValueRef) -> TensorSpec:
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
        """Whether exactly one operation reads the values of ``op`` and none of them leaves the graph."""
        return len(self.consumers[op.name]) == 1 and all(o.name != op.name for o in self.outputs)

    def size(self, dim: Dim, default: int = 64) -> int:
        """A likely value of a dim; ``default`` for symbols without a hint."""
        if isinstance(dim, int):
            return dim
        return evaluate(dim, {name: self.hints.get(name, default) for name in free_symbols(dim)})

    def numel(self, spec: TensorSpec) -> int:
        return math.prod(self.size(d) for d in spec.shape)

    def nbytes(self, spec: TensorSpec) -> int:
        return self.numel(spec) * BYTES_PER_ELEMENT.get(spec.dtype, 4)

    def operation_bytes(self, op: Operation) -> int:
        """Bytes that ``op`` reads and writes as a kernel of its own; 0 for views."""
        if info(op.target).kind in VIEWS:
            return 0
        read = sum(self.nbytes(self.spec(ref)) for ref in dict.fromkeys(op.inputs))
        return read + sum(self.nbytes(spec) for spec in op.outputs)

    def operation_flops(self, op: Operation) -> float:
        """Floating-point operations: two for a multiply-add of the matmul family, roughly a rate per element else."""
        exact = matmul_flops(self, op)
        if exact is not None:
            return exact
        facts = info(op.target)
        if facts.kind is OpKind.OPAQUE or facts.kind in VIEWS:
            return 0.0
        specs = [self.spec(ref) for ref in op.inputs]
        return facts.flops * max((self.numel(s) for s in [*specs, *op.outputs]), default=0)


MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "matmul", "linear"})
