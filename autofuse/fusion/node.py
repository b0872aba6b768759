"""`FusionNode`: operations that run as one kernel, and their canonical form.

In: operations with the names of a graph. Out: `form`, the frozen record that code generation, tuning
and routing share, with canonical names, so that the same code in another layer has the same fusion_id.
Guarantee: `validate_fusion` is True exactly when every operation is fusible, reads only inputs or
earlier operations, and all share one loop nest, only move elements, or are independent element-wise parts.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from autofuse.errors import FusionError
from autofuse.fusion.iteration_space import IterationSpace, Level, is_constant, iteration_space_of, with_parts
from autofuse.fusion.outside_loops import Kernel, Outside, find_outside
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef, map_arg
from autofuse.ir.optable import CONVOLUTION, CONVOLUTION_BACKWARD, FUSIBLE, VIEWS, OpKind, info, is_move, stands_beside
from autofuse.ir.parts import cuts_of, independent_parts
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, evaluate, free_symbols, symbol

_WINDOWS = frozenset([CONVOLUTION, CONVOLUTION_BACKWARD])


class FusionNode:
    """A sequence of operations to be run as one kernel (seed: operator fusion with dynamic shapes).

    Shapes are symbolic, in the symbols of the graph that the node is of; ``form`` has symbols of its own. The analyzer
    grows nodes by `can_fuse_with` and `add_operation`, and finishes them with the views between and the values that
    leave.
    """

    def __init__(
        self,
        operations: Iterable[Operation] = (),
        inputs: Mapping[str, TensorSpec] | None = None,
        outputs: Iterable[ValueRef] | None = None,
        stages: Iterable[Sequence[str]] = (),
    ) -> None:
        """``inputs``: specs of the tensors from outside, by name; ``outputs``: the values that leave,
        every value nothing in the node reads where not given; ``stages``: names of the operations that are a nest of
        their own, where there are several, in their order."""
        self.operations: list[Operation] = []
        self.inputs: dict[str, TensorSpec] = dict(inputs or {})
        self._outputs = None if outputs is None else tuple(outputs)
        self.stages = tuple(map(tuple, stages))
        self._by_name: dict[str, Operation] = {}
        self._spaces: dict[str, tuple[Operation, IterationSpace]] = {}  # those that were asked for
        for op in operations:
            self._append(op)

    # ---- growing ---------------------------------------------------------------------------------

    def add_operation(self, op: Operation) -> FusionNode:
        """Append an operation; returns the node for chaining.

        Raises FusionError where it does not fit (`can_fuse_with`) and for a name that is taken.
        """
        if not self.can_fuse_with(op, [s for o in self.operations for s in (t.shape for t in o.outputs)]):
            raise FusionError(
                f"expected an operation that shares the loops of {self.operation_names or 'a node'}, "
                f"found {op.target}; ask can_fuse_with first"
            )
        self._append(op)
        return self

    def _append(self, op: Operation) -> None:
        if op.name in self._by_name:
            raise FusionError(f"expected a new name, found {op.name!r} twice; rename the operation")
        self.operations.append(op)
        self._by_name[op.name] = op
        self._forget_form()

    def _forget_form(self) -> None:
        for name in ("form", "_json", "fusion_id"):
            self.__dict__.pop(name, None)

    def can_fuse_with(self, op: Operation | FusionNode, intermediate_shapes: Sequence[SymbolicShape] = ()) -> bool:
        """Whether ``op`` can join: fusible kind, compatible loop nest, and the values it reads are there.

        ``op``: an operation, or another node, of which only the loops are compared. ``intermediate_shapes``: symbolic
        shapes of the values that would pass between; each must be known to the node. Never raises.
        """
        if isinstance(op, FusionNode):
            return join_spaces(self.loops_with(op)) is not None
        if info(op.target).kind not in FUSIBLE or info(op.target).kind is OpKind.RANDOM:
            return False
        known = {spec.shape for o in self.operations for spec in o.outputs} | {s.shape for s in self.inputs.values()}
        if self.operations and any(shape not in known for shape in intermediate_shapes):
            return False
        if info(op.target).kind in VIEWS or is_constant(op):
            return True
        space = self._space(op)
        return space is not None and join_spaces(self._loops([Kernel(op, space)])) is not None

    # ---- facts -----------------------------------------------------------------------------------

    def spec(self, ref: ValueRef) -> TensorSpec:
        """Symbolic shape, strides (in elements), dtype and device of a value; raises FusionError for an unknown one."""
        if ref.name in self._by_name:
            return self._by_name[ref.name].outputs[ref.index]
        try:
            return self.inputs[ref.name]
        except KeyError:
            raise FusionError(f"expected an input or an earlier operation called {ref.name!r}, found none") from None

    def _space(self, op: Operation) -> IterationSpace | None:
        known = self._spaces.get(op.name)
        if known is not None and known[0] is op:
            return known[1]
        found = self._find_space(op)
        if found is not None:  # what it reads may still come
            self._spaces[op.name] = op, found
        return found

    def _find_space(self, op: Operation) -> IterationSpace | None:
        try:
            return with_parts(space_of(op, self.spec), op, self._by_name, self.spec)
        except FusionError:
            return None

    @property
    def iteration_spaces(self) -> list[IterationSpace]:
        """Of its kernels, in order; what has none is left out."""
        return [e for e in map(self._space, self.kernels) if e is not None]

    def loops_with(self, other: FusionNode | None = None) -> list[IterationSpace]:
        """The iteration spaces of what runs in the loops, with another node's too, without leaders and
        followers."""
        others = other.found_kernels if other is not None else []
        outside = self.outside_with(other)
        return [kernel.space for kernel in (*self.found_kernels, *others) if not outside.has(kernel.op.name)]

    def outside_with(self, other: FusionNode | None = None) -> Outside:
        """What is calculated outside the loops, with another node's operations too."""
        return self._outside(other.found_kernels if other is not None else [], other)

    def _loops(self, others: Sequence[Kernel], of: FusionNode | None = None) -> list[IterationSpace]:
        outside = self._outside(others, of)
        return [kernel.space for kernel in (*self.found_kernels, *others) if not outside.has(kernel.op.name)]

    def _outside(self, others: Sequence[Kernel], of: FusionNode | None = None) -> Outside:
        def numel(ref: ValueRef) -> Dim | None:
            own = self._numel(ref)
            return of._numel(ref) if own is None and of is not None else own

        return find_outside(self._in_order([*self.found_kernels, *others]), self._base, numel)

    @property
    def found_kernels(self) -> list[Kernel]:
        """Its kernels with their loops, in order; what has no iteration space is left out."""
        spaces = [(op, self._space(op)) for op in self.kernels]
        return [Kernel(op, space) for op, space in spaces if space is not None]

    def _numel(self, ref: ValueRef) -> Dim | None:
        """Elements of a value; None for one that the node does not know."""
        try:
            return self.spec(ref).numel
        except FusionError:
            return None

    def _in_order(self, kernels: list[Kernel]) -> list[Kernel]:
        """In program order, in which they are here."""
        return kernels

    def _base(self, ref: ValueRef) -> ValueRef:
        """The value that a chain of its views looks at."""
        while ref.name in self._by_name and info(self._by_name[ref.name].target).kind in VIEWS:
            ref = self._by_name[ref.name].inputs[0]
        return ref

    @property
    def names(self) -> Collection[str]:
        """Of its operations."""
        return self._by_name.keys()

    @property
    def outputs(self) -> tuple[ValueRef, ...]:
        if self._outputs is not None:
            return self._outputs
        read = {ref for op in self.operations for ref in op.inputs}
        refs = [ValueRef(op.name, i) for op in self.operations for i in range(len(op.outputs))]
        return tuple(ref for ref in refs if ref not in read)

    @property
    def input_shapes(self) -> list[SymbolicShape]:
        """Symbolic sizes of the tensors from outside, in order of first use."""
        return [self.inputs[name].shape for name in self.input_names]

    @property
    def output_shapes(self) -> list[SymbolicShape]:
        """Symbolic sizes of the values that leave, in the order of ``outputs``."""
        return [self.spec(ref).shape for ref in self.outputs]

    @property
    def input_names(self) -> tuple[str, ...]:
        """Tensors from outside, in order of first use."""
        own = {op.name for op in self.operations}
        names = dict.fromkeys(ref.name for op in self.operations for ref in op.inputs if ref.name not in own)
        return tuple(names)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Free symbols of the graph's names, in the order of the form's s0, s1, ..."""
        return _symbols_in_order(self)

    @property
    def kernels(self) -> list[Operation]:
        """The operations that the node stands for: all but views and constants, of which it has copies of its own."""
        return [op for op in self.operations if info(op.target).kind not in VIEWS and not is_constant(op)]

    @property
    def reads_windows(self) -> bool:
        """Whether sizes of its outputs, or inputs, are rounded quotients of others, as where windows go in strides."""
        return any(info(op.target).kind is OpKind.POOLING or op.target in _WINDOWS for op in self.operations)

    def validate_fusion(self) -> bool:
        """Whether the node is sound; never raises. With ``run.check`` the planner asks it of every node it accepts."""
        own: set[str] = set()
        for op in self.operations:
            if info(op.target).kind not in FUSIBLE or info(op.target).kind is OpKind.RANDOM:
                return False
            if any(ref.name not in own and ref.name not in self.inputs for ref in op.inputs):
                return False
            own.add(op.name)
        if not self.kernels or any(ref.name not in own for ref in self.outputs):
            return False
        spaces = [self._space(op) for op in self.kernels]
        if None in spaces:
            return False
        if self.stages and sorted(name for stage in self.stages for name in stage) != sorted(
            op.name for op in self.kernels
        ):
            return False
        return (
            bool(self.stages)  # of nodes that were asked
            or all(is_move(op.target) for op in self.kernels)
            or join_spaces(self.loops_with()) is not None
            or self._shares_loops_in_parts()
        )

    @property
    def parts(self) -> list[list[Operation]]:
        """Its kernels in parts that read no value of each other."""
        return independent_parts(self.kernels, self._base)

    @property
    def is_side_by_side(self) -> bool:
        """Whether it is in parts that have no nest of loops in common, and no operation is in two of them."""
        parts = self.parts
        return len(parts) > 1 and sum(map(len, parts)) == len(self.kernels) and join_spaces(self.loops_with()) is None

    def _shares_loops_in_parts(self) -> bool:
        """Whether it is element-wise work in independent parts, each of which has one nest of loops."""
        if not all(stands_beside(op.target) for op in self.kernels):
            return False
        cuts, outside = cuts_of(self.kernels, self._base), self.outside_with()
        spaces = [
            [space for op in part if op.name not in cuts and not outside.has(op.name) and (space := self._space(op))]
            for part in self.parts
        ]
        return all(join_spaces(found) is not None for found in spaces if found)

    def in_inputs(self, derived: Mapping[str, sympy.Expr]) -> FusionNode:
        """The node with rounded quotients instead of the symbols that stand for them: sizes follow from each other."""
        table: dict[sympy.Expr, sympy.Expr] = {}
        for name, quotient in derived.items():  # each is made of earlier ones
            table[symbol(name)] = quotient.xreplace(table)
        return self.with_dims(table) if table else self

    def with_dims(self, table: Mapping[sympy.Expr, sympy.Expr]) -> FusionNode:
        """The node with every size changed."""
        change: Callable[[Dim], Dim] = lambda dim: dim if isinstance(dim, int) else as_dim(dim.xreplace(table))  # noqa: E731
        operations = [op.with_dims(change) for op in self.operations]
        inputs = {name: spec.with_dims(change) for name, spec in self.inputs.items()}
        return FusionNode(operations, inputs, self.outputs, self.stages)

    # ---- canonical form ----------------------------------------------------------------------------

    @functools.cached_property
    def form(self) -> NodeForm:
        """The node with inputs i0.., operations v0.., symbols s0.., as a frozen record."""
        inputs = self.input_names
        missing = [name for name in inputs if name not in self.inputs]
        if missing:
            raise FusionError(f"expected specs of the inputs {missing}, found none; pass them as inputs")
        names = {name: f"i{i}" for i, name in enumerate(inputs)}
        names |= {op.name: f"v{i}" for i, op in enumerate(self.operations)}
        table = {name: symbol(f"s{i}") for i, name in enumerate(self.symbols)}
        rename_ref: Callable[[ValueRef], ValueRef] = lambda ref: ValueRef(names[ref.name], ref.index)  # noqa: E731
        rename_dim: Callable[[Any], Dim] = lambda dim: SymbolicShape([dim]).substitute(table)[0]  # noqa: E731
        return NodeForm(
            inputs=tuple(NodeInput(names[n], _rename_spec(self.inputs[n], table)) for n in inputs),
            operations=tuple(
                Operation(
                    name=names[op.name],
                    target=op.target,
                    args=map_arg(op.args, rename_ref, rename_dim),
                    kwargs=tuple((k, map_arg(v, rename_ref, rename_dim)) for k, v in op.kwargs),
                    outputs=tuple(_rename_spec(spec, table) for spec in op.outputs),
                    source=op.source,
                    body=None if op.body is None else op.body.with_dims(rename_dim),
                )
                for op in self.operations
            ),
            outputs=tuple(rename_ref(ref) for ref in self.outputs),
            symbols=tuple(f"s{i}" for i in range(len(self.symbols))),
            stages=tuple(tuple(names[name] for name in stage) for stage in self.stages),
        )

    def get_fused_signature(self) -> str:
        """Canonical text of the operations, dtypes, layouts and constants; equal text means equal code."""
        return self.form.text()

    @functools.cached_property
    def fusion_id(self) -> str:
        """SHA-256 of the signature, 16 hexadecimal digits."""
        return hashlib.sha256(self.get_fused_signature().encode()).hexdigest()[:16]

    @property
    def kind(self) -> str:
        kinds = {info(op.target).kind for op in self.kernels}
        if OpKind.OPAQUE in kinds:  # a group
            names = {op.short_name for op in self.kernels}
            if names & {"convolution", "convolution_backward"}:
                return "conv"
            return "attention" if "_softmax" in names else "matmul"
        if OpKind.LOSS in kinds:
            return "loss"
        if OpKind.NORMALISATION in kinds:
            return "norm"
        return "reduction" if OpKind.REDUCTION in kinds else "elementwise"

    @property
    def label(self) -> str:
        """The name that a profiler and the report show: ``af_<kind>_<ops>_<hash>``."""
        words = [op.short_name.strip("_").removeprefix("native_") for op in self.kernels]
        text = "_".join(words if len(words) <= 4 else [*words[:2], f"{len(words) - 3}more", words[-1]])
        return f"af_{self.kind}_{text}_{self.fusion_id[:6]}"

    @property
    def operation_names(self) -> str:
        return " + ".join(op.short_name.strip("_") for op in self.kernels)

    def to_json(self) -> dict[str, Any]:
        """The form's plain values, made once: not to be changed."""
        return self._json

    @functools.cached_property
    def _json(self) -> dict[str, Any]:
        return self.form.to_json()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FusionNode:
        form = NodeForm.from_json(data)
        return cls(form.operations, {i.name: i.spec for i in form.inputs}, form.outputs, form.stages)

    def __repr__(self) -> str:
        return f"FusionNode({self.operation_names})"


def space_of(op: Operation, spec: Callable[[ValueRef], TensorSpec]) -> IterationSpace | None:
    """The iteration space of a fusible operation; that of a composite one is its decomposition's."""
    return iteration_space_of(op, spec) if op.body is None else _space_of_body(op.body)


@functools.lru_cache(maxsize=256)
def _space_of_body(body: NodeForm) -> IterationSpace | None:
    tables = _only_tables(body)
    operations = [op for op in body.operations if op.name not in tables]
    inputs = {item.name: item.spec for item in body.inputs} | {name: body.spec(ValueRef(name)) for name in tables}
    inner = FusionNode(operations, inputs, body.outputs)
    joined = join_spaces(inner.loops_with()) if inner.validate_fusion() else None
    if joined is None or not inner.outside_with().is_sound:
        return None
    levels = [_level_of(inner, inner._base(ref), joined) for ref in body.outputs]
    return None if None in levels else replace(joined, levels=tuple(level for level in levels if level is not None))


def _only_tables(body: NodeForm) -> set[str]:
    """Operations whose elements are calculated only where an index reads them, outside of their own loops."""
    found: set[str] = set()
    leaving = {ref.name for ref in body.outputs}
    for op in reversed(body.operations):
        readers = [reader for reader in body.operations if op.name in {ref.name for ref in reader.inputs}]
        passes = info(op.target).kind in (OpKind.POINTWISE, *VIEWS) and op.name not in leaving
        if passes and readers and all(reader.name in found or _is_table(op, reader) for reader in readers):
            found.add(op.name)
    return found


def _is_table(op: Operation, reader: Operation) -> bool:
    first, *others = (ref.name for ref in reader.inputs)
    return info(reader.target).kind is OpKind.INDEXED and first == op.name and op.name not in others


def _level_of(node: FusionNode, ref: ValueRef, joined: IterationSpace) -> Level | None:
    """The level of a value in the loops of its node; None for one that is a part of what they run over."""
    op = node._by_name.get(ref.name)
    space = None if op is None or is_constant(op) else node._space(op)
    if op is None or space is None:
        return None
    if op.name in node.outside_with().followers:
        return "terminal"
    if space.levels[ref.index] != "full" or space.numel == joined.numel:
        return space.levels[ref.index]
    return "row" if space.numel == joined.rows else None


def join_spaces(spaces: Sequence[IterationSpace]) -> IterationSpace | None:
    """The loop nest that all spaces share, None where there is none."""
    parts = {part for space in spaces for part in space.parts}
    smaller = parts.union(*((*space.spread, *space.again) for space in spaces))  # what is broadcast, too
    whole = [space for space in spaces if space.numel not in smaller]
    full = _largest(whole) if whole else max((e.numel for e in spaces), key=_guessed, default=1)
    rows: Dim | None = None
    general: tuple[object, ...] = ()
    levels: list[Level] = []
    for space in spaces:
        levels.extend(space.levels)
        if space.general:
            if general and general != space.general:
                return None
            general = space.general
        if space.rows is not None and space.numel == full:
            if rows is not None and rows != space.rows:
                return None
            rows = space.rows
    if rows is None and not general:  # what stays the same along the columns may be calculated once a row
        spread = {size for space in spaces if space.numel == full for size in space.spread}
        once = {space.numel for space in spaces if space.numel in spread and space.rows is None}
        rows = once.pop() if len(once) == 1 else None
    for space in spaces:
        if space.numel == full or (space.numel in smaller and space.rows is None and not space.general):
            continue
        # A smaller operation may live between two passes, once a row.
        if rows is None or space.numel != rows or space.rows is not None:
            return None
    return IterationSpace(full, rows, tuple(levels), general, tuple(dict.fromkeys(p for e in spaces for p in e.parts)))


def _guessed(numel: Dim) -> int:
    """A number to compare symbolic sizes of one graph by."""
    return evaluate(numel, dict.fromkeys(free_symbols(numel), 64))


def _largest(spaces: Sequence[IterationSpace]) -> Dim:
    """The space of most elements; with symbols, the one that has a row split or comes first."""
    numbers = [e.numel for e in spaces if isinstance(e.numel, int)]
    symbolic = [e for e in spaces if not isinstance(e.numel, int)]
    if not symbolic:
        return max(numbers, default=1)
    split = [e.numel for e in symbolic if e.rows is not None]
    if split:
        return split[0]
    return symbolic[0].numel


def _symbols_in_order(node: FusionNode) -> tuple[str, ...]:
    found = dict.fromkeys(name for read in node.input_names for name in node.inputs[read].symbols)
    for op in node.operations:
        found |= dict.fromkeys(op.symbols)
    return tuple(found)


def _rename_spec(spec: TensorSpec, table: Mapping[str, Dim]) -> TensorSpec:
    return TensorSpec(spec.shape.substitute(table), spec.dtype, spec.strides.substitute(table), spec.device)
