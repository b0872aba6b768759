"""Stages: a node that writes to places which are data, as nests one after another.

In: a `NodeForm` with such writes, or with outputs that share no loops, and `lower` for what is one nest. Out: a
`LoopKernel` of stages. For each write, one stage makes what is written into (a copy, zeros), the next ones combine the
values with it, calculated in their loops; then further stages make the outputs, which read the result where it lies: in
an output, or in a temporary.
Guarantee: a stage reads only inputs and what earlier stages have written whole. Sums of 16-bit floats are made in 32
bits and rounded once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autofuse.codegen.dtypes import compute_dtype, dtype, is_float
from autofuse.codegen.loops import LoopKernel, Param, Stage, Temporary
from autofuse.codegen.lowering.builder import AtomAccess, Val, linear_offset, linear_terms
from autofuse.codegen.lowering.context import Context, Rule
from autofuse.codegen.lowering.index import Atom, atoms_of
from autofuse.codegen.lowering.rules_write import WriteRule, Written, how_of
from autofuse.codegen.lowering.schedule import schedule_tile
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, SymbolicShape, contiguous_strides
from autofuse.ir.writes import base_of, indices_of, is_write, operands_of, values_of

_ZEROS = ("zeros", "zeros_like", "new_zeros", "zero")
_ONES = ("ones", "ones_like", "new_ones")
_FILLS = {"full": 1, "full_like": 1, "new_full": 2}  # argument of the number


def lower_stages(form: NodeForm, rules: dict[str, Rule], lower: Callable[[NodeForm], LoopKernel]) -> LoopKernel:
    """The kernel of a node with writes; raises LoweringError where it has none, as on a GPU."""
    if any(spec.device != "cpu" for op in form.operations for spec in op.outputs):
        raise LoweringError("device_bounds", "expected a node on a CPU, whose kernels alone have stages, found another")
    return _Stages(_expanded(form), rules, lower).kernel()


# ---- writes in simpler ones -------------------------------------------------------------------------------------


def _expanded(form: NodeForm) -> NodeForm:
    """A mean as a sum and a count; sums and products of 16-bit floats in 32 bits."""
    operations: list[Operation] = []
    for op in form.operations:
        for part in _mean(op, form) if is_write(op) and str(op.arg(4)) == "mean" else [op]:
            operations += _widened(part) if is_write(part) else [part]
    return dataclasses.replace(form, operations=tuple(operations))


def _mean(op: Operation, form: NodeForm) -> list[Operation]:
    """The sum, divided by how many elements went into it; eager does so, and divides by 1 where nothing did."""
    spec, values = op.outputs[0], values_of(op)
    if not is_float(spec.dtype):
        raise LoweringError("dtype", f"expected floats of which to take a mean, found {spec.dtype}")
    kept = int(bool(dict(op.kwargs).get("include_self", True)))
    names = [f"{op.name}_{part}" for part in ("sum", "start", "ones", "count", "atleast")]
    total, start, ones, count, atleast = names
    wide = dataclasses.replace(spec, dtype=compute_dtype(spec.dtype))
    many = dataclasses.replace(form.spec(values), dtype=wide.dtype)
    along = (op.args[1], indices_of(op))
    return [
        dataclasses.replace(op, name=total, args=(*op.args[:4], "sum"), outputs=(wide,)),
        Operation(start, "aten.full.default", (spec.shape.dims, kept), (), (wide,)),
        Operation(ones, "aten.full.default", (many.shape.dims, 1), (), (many,)),
        _sum_of(op, (ValueRef(start), *along, ValueRef(ones)), count, wide),
        Operation(atleast, "aten.clamp_min.default", (ValueRef(count), 1), (), (wide,)),
        Operation(op.name, "aten.div.Tensor", (ValueRef(total), ValueRef(atleast)), (), (spec,)),
    ]


def _sum_of(op: Operation, args: tuple[object, ...], name: str, spec: TensorSpec) -> Operation:
    target = "index_add" if op.short_name == "index_reduce" else "scatter_add"
    return Operation(name, f"aten.{target}.default", args, (), (spec,))


def _widened(op: Operation) -> list[Operation]:
    spec = op.outputs[0]
    if how_of(op) not in ("add", "mul") or not is_float(spec.dtype) or dtype(spec.dtype).nbytes > 2:
        return [op]
    wide = dataclasses.replace(spec, dtype="float32")
    name = f"{op.name}_wide"
    return [
        dataclasses.replace(op, name=name, outputs=(wide,)),
        Operation(op.name, "aten._to_copy.default", (ValueRef(name),), (("dtype", spec.dtype),), (spec,)),
    ]


# ---- stages -------------------------------------------------------------------------------------------------------


@dataclass
class _Stages:
    """Collects the stages of a node."""

    form: NodeForm
    rules: dict[str, Rule]
    lower: Callable[[NodeForm], LoopKernel]
    stages: list[Stage] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    written: dict[str, TensorSpec] = field(default_factory=dict)  # results of writes, as they lie in memory
    homes: dict[ValueRef, int] = field(default_factory=dict)  # number of the param that holds a value

    def kernel(self) -> LoopKernel:
        form = self.form
        self.homes = {ValueRef(item.name): n for n, item in enumerate(form.inputs)}
        self.homes |= {ref: len(form.inputs) + n for n, ref in enumerate(form.outputs)}
        params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
        params += [Param(f"o{n}", form.spec(ref).dtype, True) for n, ref in enumerate(form.outputs)]
        for op in form.operations:
            if is_write(op):
                self._write(op, len(params))
        self._outputs([ref for ref in form.outputs if ref.name not in self.written])
        return LoopKernel(
            name="", dims=(), rows=(), cols=(), params=tuple(params), values=(), stores=(), symbols=form.symbols,
            kind="write" if self.written else "stages", stages=tuple(self.stages), temporaries=tuple(self.temporaries),
        )  # fmt: skip

    def _write(self, op: Operation, params: int) -> None:
        """The stages of one write: what it begins with, then its values."""
        result, spec = ValueRef(op.name), op.outputs[0]
        if any(dim == 0 for dim in spec.shape):
            raise LoweringError("empty", f"expected a result with elements, found the shape {spec.shape}")
        if result not in self.homes:
            self.homes[result] = params + len(self.temporaries)
            self.temporaries.append(Temporary(spec.shape.numel, spec.dtype))
            spec = dataclasses.replace(spec, strides=SymbolicShape(contiguous_strides(spec.shape.dims)))
        op = dataclasses.replace(op, outputs=(spec,))
        self._begin(op)
        self._values(op)
        self.written[op.name] = spec

    def _begin(self, op: Operation) -> None:
        """The stage that makes what is written into."""
        base, spec = base_of(op), op.outputs[0]
        made = next((o for o in self.form.operations if base is not None and o.name == base.name), None)
        number = 0 if base is None else _number(made)
        if number is not None:
            begin = Operation(op.name, "aten.full.default", (spec.shape.dims, number), (), (spec,))
            form = dataclasses.replace(self.form, inputs=(), operations=(begin,), outputs=(ValueRef(op.name),))
        else:
            begin = Operation(op.name, "aten._to_copy.default", (base,), (("dtype", spec.dtype),), (spec,))
            form = self._part([ref for ref in (base,) if ref is not None], (begin,))
        self._add(form, self.lower(form))

    def _values(self, op: Operation) -> None:
        """A stage for each pass over the values."""
        form = self._part(operands_of(op), (op,))
        rule: WriteRule = self.rules[op.target]  # type: ignore[assignment]
        for number in range(rule.passes(op)):
            self._add(form, _write_nest(form, op, self.rules, number))

    def _outputs(self, outputs: Sequence[ValueRef]) -> None:
        """The stages that make the other outputs, each of as many as share loops."""
        groups: list[tuple[NodeForm, LoopKernel]] = []
        for ref in outputs:
            for number, (form, _) in enumerate(groups):
                with contextlib.suppress(LoweringError):
                    more = self._part([*form.outputs, ref])
                    groups[number] = more, self.lower(more)
                    break
            else:
                form = self._part([ref])
                groups.append((form, self.lower(form)))
        for form, kernel in groups:
            self._add(form, kernel)

    def _add(self, form: NodeForm, kernel: LoopKernel) -> None:
        values = (*(ValueRef(item.name) for item in form.inputs), *form.outputs)
        self.stages.append(Stage(kernel, tuple(self.homes[ref] for ref in values)))

    def _part(self, roots: Sequence[ValueRef], behind: Sequence[Operation] = ()) -> NodeForm:
        """The part of the node that makes some values from inputs and from what is written by now."""
        operations = {op.name: op for op in self.form.operations if op.name not in self.written}
        needed: set[str] = set()
        todo = list(roots)
        while todo:
            ref = todo.pop()
            if ref.name in operations and ref.name not in needed:
                needed.add(ref.name)
                todo += operations[ref.name].inputs
        kept = [*(op for op in self.form.operations if op.name in needed), *behind]
        read = {ref.name for op in self.form.operations if op.name in needed for ref in op.inputs}
        read |= {ref.name for ref in roots}
        inputs = [item for item in self.form.inputs if item.name in read]
        inputs += [NodeInput(name, spec) for name, spec in self.written.items() if name in read]
        outputs = tuple(ValueRef(op.name) for op in behind) or tuple(roots)
        return NodeForm(tuple(inputs), tuple(kept), outputs, self.form.symbols)


def _number(op: Operation | None) -> int | float | None:
    """The number that a constant operation fills its result with; None for other operations."""
    if op is None or info(op.target).kind is not OpKind.CREATION:
        return None
    if op.short_name in _ZEROS or op.short_name in _ONES:
        return int(op.short_name in _ONES)
    value = op.arg(_FILLS[op.short_name]) if op.short_name in _FILLS else None
    return value if isinstance(value, int | float) else None


def _write_nest(form: NodeForm, op: Operation, rules: dict[str, Rule], number: int) -> LoopKernel:
    """The nest of one pass over the values, in their row-major order."""
    context = Context(form, rules)
    context.infer_all()
    rule: WriteRule = rules[op.target]  # type: ignore[assignment]
    found: list[Written] = []

    def make() -> list[tuple[Val, AtomAccess]]:
        found[:] = [rule.writes(context, op, number)]
        return [_put(context, op, found[0], len(form.inputs))]

    stores = context.pull(make)
    context.check_bounds(stores)
    params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
    params.append(Param("out", op.outputs[0].dtype, True))
    loops = list(atoms_of(found[0].loops))
    nest = _nest(context, loops, stores[0])
    kernel, _ = schedule_tile(nest, context.builder.nodes, stores, tuple(params), form.symbols, "", ())
    return dataclasses.replace(kernel, kind="write")


def _put(cx: Context, op: Operation, found: Written, param: int) -> tuple[Val, AtomAccess]:
    """The value that stands for the write, and where it goes."""
    b, strides = cx.builder, found.strides or op.outputs[0].strides.dims
    terms, indirect = linear_terms(found.place, strides)
    stride: Dim = 1
    if len(indirect) == 1:
        place, stride = indirect[0]
    else:
        place = b.places(indirect) if indirect else b.const(0, "int64")
    access = AtomAccess(param, terms, stride, linear_offset(found.place, strides))
    guard = found.guard if found.guard is not None else b.const(True, "bool")
    return b.node(f"put_{found.how}", found.value.dtype, (found.value, place, guard), access), access


def _nest(cx: Context, loops: list[Atom], store: tuple[Val, AtomAccess]) -> list[list[Atom]]:
    """Rows and columns: columns are the last loops, as far as all of their elements go to places of their own."""
    put = cx.builder.nodes[store[0].number]
    bound = cx.builder.reach(put.args[1]) | cx.builder.reach(put.args[2])
    own = {atom for atom, _ in store[1].strides} - bound
    first = len(loops)
    while first > 0 and loops[first - 1] in own:
        first -= 1
    first = min(first, max(0, len(loops) - 1))
    return [loops[:first], loops[first:]]
