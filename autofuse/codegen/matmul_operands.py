"""The operands of a matmul: their arguments, and their strides as matrices in the memory of inputs.

In: a node and an argument of its matmul. Out: `Operand`, strides in elements; or LoweringError. Views are followed to
their base, and so are copies, which only change strides; a computed operand is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autofuse.codegen.lowering.builder import AtomAccess
from autofuse.codegen.lowering.index import Atom, Word, resolve
from autofuse.codegen.lowering.lower import context_of
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, Operation, ValueRef
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, contiguous_strides

# Matmul operators: which arguments are the operands, and which is the added bias.
ANCHORS: dict[str, tuple[int, int, int | None]] = {
    "aten.mm.default": (0, 1, None),
    "aten.addmm.default": (1, 2, 0),
    "aten.bmm.default": (0, 1, None),
    "aten.baddbmm.default": (1, 2, 0),
}

Steps = tuple[tuple[Dim, Dim], ...]  # (size, stride) of the parts of a dim, outermost first


@dataclass(frozen=True)
class Operand:
    """A matrix, or a batch of them, in the memory of an input."""

    name: str  # of the input
    batch: Steps  # of the dim that leads from one matrix to the next
    rows: Dim
    cols: Dim
    offset: Dim = 0  # elements from the beginning of the input

    def extent(self, rows: Dim, cols: Dim) -> Dim:
        """Roughly how many elements of memory matrices of this size span, from the beginning of the input."""
        steps = [(rows, self.rows), (cols, self.cols), *self.batch]
        total = self.offset
        for size, stride in steps:
            total = total + size * stride
        return as_dim(total)


def read_operand(form: NodeForm, ref: ValueRef) -> Operand:
    """A value as a matrix [rows, cols], or a batch of matrices, in the memory of an input.

    Views and copies are followed to the input. Raises LoweringError where the value is calculated, or where no single
    stride leads along its rows or its columns.
    """
    spec = form.spec(ref)
    source = context_of(form).aliased_input(ref)
    if source is not None:
        parts: list[Steps] = [((n, stride),) for n, stride in zip(spec.shape, spec.strides, strict=True)]
        name, offset = source.name, as_dim(0)
    else:
        name, offset, parts = _through_copies(form, ref)
    *batch, rows, cols = parts
    return Operand(name, batch[0] if batch else (), _stride(ref, rows), _stride(ref, cols), offset)


def live(operations: Sequence[Operation], outputs: Iterable[ValueRef]) -> list[Operation]:
    """The operations that outputs need, in order."""
    wanted = {ref.name for ref in outputs}
    kept: list[Operation] = []
    for op in reversed(operations):
        if op.name in wanted:
            kept.append(op)
            wanted.update(ref.name for ref in op.inputs)
    return kept[::-1]


def _through_copies(form: NodeForm, ref: ValueRef) -> tuple[str, Dim, list[Steps]]:
    """The input that a value is a copy of, the offset of its first element, and the parts of each of its dims."""
    spec = form.spec(ref)
    # Lowering ends in a store, and a view may have no memory of its own to store to: so a copy of the value is lowered.
    copied = replace(spec, strides=SymbolicShape(contiguous_strides(spec.shape.dims)))
    copy = Operation(f"{ref.name}_copy", "aten.clone.default", (ref,), (), (copied,))
    operations = (*live(form.operations, [ref]), copy)
    context = context_of(NodeForm(form.inputs, operations, (ValueRef(copy.name),), form.symbols))
    context.infer_all()
    stores = context.pull_outputs()
    node = context.builder.nodes[stores[0][0].number]
    if len(stores) > 1 or node.op != "load" or not isinstance(node.attr, AtomAccess):
        raise LoweringError("operand", f"expected an input as operand, found {ref.name}, which is calculated")
    strides = dict(node.attr.strides)
    steps = [_steps(word, strides) for word in context.canonical(ValueRef(copy.name))]
    return form.inputs[node.attr.param].name, node.attr.offset, steps


def _steps(word: Word, strides: dict[Atom, Dim]) -> Steps:
    """The (size, stride) parts of a dim, outermost first; neighbours that one stride covers are merged."""
    found: list[tuple[Dim, Dim]] = []
    for part in resolve(word):
        size, stride = part.size, strides.get(part, 0) if isinstance(part, Atom) else 0
        if found and as_dim(found[-1][1] - stride * size) == 0:
            found[-1] = (as_dim(found[-1][0] * size), stride)
        else:
            found.append((size, stride))
    return tuple(found)


def _stride(ref: ValueRef, steps: Steps) -> Dim:
    if len(steps) > 1:
        raise LoweringError("operand", f"expected even steps along rows and columns of {ref.name}, found {steps}")
    return steps[0][1] if steps else 0
