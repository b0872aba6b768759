"""The kernel of a node whose stages are known: nests that were looked for one by one.

In: a `NodeForm` with `stages`, and `lower` for each of them. Out: a `LoopKernel` of stages. What one makes for a later
one lies in an output of the node, or in a temporary. Guarantee: a stage reads only inputs and what earlier ones have
written whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from autofuse.codegen.loops import LoopKernel, Param, Stage, Temporary
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, NodeInput, TensorSpec, ValueRef
from autofuse.ir.shape import Dim, as_dim


def join_stages(form: NodeForm, lower: Callable[[NodeForm], LoopKernel]) -> LoopKernel:
    """The kernel, which has no name yet; raises LoweringError where a stage has none, and on a GPU."""
    if any(spec.device != "cpu" for op in form.operations for spec in op.outputs):
        raise LoweringError("device_bounds", "expected a node on a CPU, whose kernels alone have stages, found another")
    joined = _Joined(form)
    for names in form.stages:
        part = part_of(form, names)
        joined.add(part, lower(part.form))
    params = [Param(item.name, item.spec.dtype, False) for item in form.inputs]
    params += [Param(f"o{n}", form.spec(ref).dtype, True) for n, ref in enumerate(form.outputs)]
    return LoopKernel(
        name="", dims=(), rows=(), cols=(), params=tuple(params), values=(), stores=(), symbols=form.symbols,
        kind="stages", stages=tuple(joined.stages), temporaries=tuple(joined.temporaries),
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One stage as a node, and which values of the whole its inputs and outputs are."""

    form: NodeForm
    inputs: tuple[ValueRef, ...]
    outputs: tuple[ValueRef, ...]


def part_of(form: NodeForm, names: Collection[str]) -> Part:
    """A stage of a node: its operations, with the views and constants that they need."""
    elsewhere = {name for stage in form.stages for name in stage} - set(names)
    needed, read = _needed(form, names, elsewhere)
    operations = [op for op in form.operations if op.name in needed]
    given = {item.name for item in form.inputs}
    made = sorted((ref for ref in read if ref.name in elsewhere), key=lambda ref: (ref.name, ref.index))
    inputs = [ValueRef(item.name) for item in form.inputs if ValueRef(item.name) in read]
    flat = {ref: ValueRef(f"{ref.name}o{ref.index}") if ref.index else ref for ref in made}
    assert all(ref.name not in given for ref in flat.values())
    outputs = tuple(ref for ref in _leaving(form) if ref.name in names)
    items = [NodeInput(ref.name, form.spec(ref)) for ref in inputs]
    items += [NodeInput(flat[ref].name, form.spec(ref)) for ref in made]
    own = tuple(op.reading(lambda ref: flat.get(ref, ref)) for op in operations)
    return Part(NodeForm(tuple(items), own, outputs, form.symbols), (*inputs, *made), outputs)


def _needed(form: NodeForm, names: Collection[str], elsewhere: Collection[str]) -> tuple[set[str], set[ValueRef]]:
    """The operations of a stage, and all values that they read."""
    operations = {op.name: op for op in form.operations}
    needed: set[str] = set()
    read: set[ValueRef] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in needed or name not in operations or name in elsewhere:
            continue
        needed.add(name)
        read.update(operations[name].inputs)
        todo += [ref.name for ref in operations[name].inputs]
    return needed, read


def _leaving(form: NodeForm) -> list[ValueRef]:
    """The values that are outputs, or that another stage reads, in program order."""
    home = {name: number for number, names in enumerate(form.stages) for name in names}
    found = set(form.outputs)
    for number, names in enumerate(form.stages):
        elsewhere = {name for name, other in home.items() if other != number}
        found |= {ref for ref in _needed(form, names, elsewhere)[1] if ref.name in elsewhere}
    values = [ValueRef(op.name, n) for op in form.operations for n in range(len(op.outputs))]
    return [ref for ref in values if ref in found]


@dataclass
class _Joined:
    """Collects the stages of a node."""

    form: NodeForm
    stages: list[Stage] = field(default_factory=list)
    temporaries: list[Temporary] = field(default_factory=list)
    homes: dict[ValueRef, int] = field(init=False)  # number of the param that holds a value

    def __post_init__(self) -> None:
        values = [*(ValueRef(item.name) for item in self.form.inputs), *self.form.outputs]
        self.homes = {ref: number for number, ref in enumerate(values)}

    def add(self, part: Part, kernel: LoopKernel) -> None:
        """One more stage, or those of a kernel that has stages itself."""
        for ref in part.outputs:
            if ref not in self.homes:
                self.homes[ref] = self._place(Temporary(_elements(self.form.spec(ref)), self.form.spec(ref).dtype))
        places = [self.homes[ref] for ref in (*part.inputs, *part.outputs)]
        places += [self._place(temporary) for temporary in kernel.temporaries]
        inner: Sequence[Stage] = kernel.stages or [Stage(kernel, tuple(range(len(kernel.params))))]
        self.stages += [
            dataclasses.replace(stage, places=tuple(places[number] for number in stage.places)) for stage in inner
        ]

    def _place(self, temporary: Temporary) -> int:
        self.temporaries.append(temporary)
        return len(self.form.inputs) + len(self.form.outputs) + len(self.temporaries) - 1


def _elements(spec: TensorSpec) -> Dim:
    """The elements of a value that lies in memory without gaps; raises LoweringError for any other."""
    reach = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)) + 1
    if as_dim(reach - spec.numel) != 0:
        raise LoweringError("strides", f"expected a value without gaps between stages, found strides {spec.strides}")
    return spec.numel
