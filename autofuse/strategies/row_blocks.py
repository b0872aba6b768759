"""A matmul and its epilogue, in blocks of rows that stay in the caches.

In: the form of a group with one matmul and an element-wise epilogue. Out: the form of one block, whose number of rows
is a symbol of its own, and the inputs that are cut into rows. Guarantee: each row of the outputs depends on no other
row of the cut inputs.

Why: a matmul writes its whole result before the next kernel reads it. In blocks of 2 MiB the result is read from the
caches, and only the final values go to memory. Libraries do the same for the few epilogues that they have.
"""

from __future__ import annotations

from dataclasses import replace

from autofuse.fusion.graph import FusionGraph
from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.ir.shape import Dim, SymbolicShape, contiguous_strides, product, symbol
from autofuse.strategies.chains import is_contiguous, is_free
from autofuse.strategies.strategy import Rows, graph_of

BLOCK_BYTES = 2 << 20  # of the matmul's result: best of 256 KiB to 8 MiB on an EPYC with 1 MiB of L2 a core (2026-11)
LEAST_BLOCKS = 2  # with fewer blocks it is not worth it, if the number of rows is known
ROWS = "b0"  # the symbol of a block's rows
_PRODUCTS = {"mm": (0,), "addmm": (1,)}  # positions of the operands that are cut into blocks


def block_of(form: NodeForm) -> tuple[NodeForm, Rows] | None:
    """One block of a group's form, and how its inputs are cut; None where rows depend on each other."""
    products = [op for op in form.operations if op.short_name in _PRODUCTS]
    if len(products) != 1 or products[0].kwargs:
        return None
    total, columns = products[0].outputs[0].shape.dims
    if not isinstance(columns, int) or not columns:
        return None
    rows = max(1, BLOCK_BYTES // (columns * BYTES_PER_ELEMENT[products[0].outputs[0].dtype]))
    if isinstance(total, int) and total < LEAST_BLOCKS * rows:
        return None
    return _Cutter(form, products[0], total).cut(rows)


class _Cutter:
    """Builds the form of a block: values with rows are cut, all others are the same for every block."""

    def __init__(self, form: NodeForm, product: Operation, total: Dim) -> None:
        self.form = form
        self.graph: FusionGraph = graph_of(form)
        self.product = product
        self.total = total
        self.cut_values: dict[str, ValueRef] = {}  # name in the node's form -> the block's value
        self.whole: set[str] = set()  # names of values that a block reads uncut
        self.operations: list[Operation] = []

    def cut(self, rows: int) -> tuple[NodeForm, Rows] | None:
        """The form of a block of ``rows`` rows, and how inputs are cut; None where an operation mixes rows."""
        steps = [op for op in self.form.operations if not self._is_view(op)]
        if not all(self._add(op) for op in steps):
            return None
        outputs = [self._rows(ref) for ref in self.form.outputs]
        made = {op.name for op in self.operations}
        if len(set(outputs)) != len(outputs) or any(ref is None or ref.name not in made for ref in outputs):
            return None
        is_cut = tuple(item.name in self.cut_values for item in self.form.inputs)
        if any(item.name in self.whole for item, cut in zip(self.form.inputs, is_cut, strict=True) if cut):
            return None
        inputs = tuple(
            NodeInput(item.name, self._block(item.spec)) if cut else item
            for item, cut in zip(self.form.inputs, is_cut, strict=True)
        )
        block = NodeForm(inputs, tuple(self.operations), tuple(filter(None, outputs)), (*self.form.symbols, ROWS))
        return block, Rows(ROWS, rows, self.total, is_cut)

    def _is_view(self, op: Operation) -> bool:
        return len(op.inputs) == 1 and (info(op.target).kind is OpKind.VIEW or is_free(self.graph, op))

    def _add(self, op: Operation) -> bool:
        if op is self.product:
            cut = [op.args[position] for position in _PRODUCTS[op.short_name]]
        elif info(op.target).kind is OpKind.POINTWISE and len(op.outputs) == 1:
            cut = [ref for ref in op.inputs if self.graph.spec(ref).shape == op.outputs[0].shape]
        else:
            return False
        others = [ref for ref in op.inputs if ref not in cut]
        if op is not self.product and any(len(self.graph.spec(ref).shape) > 1 for ref in others):
            return False  # an operand that is neither one row nor one value
        if self._width(op.outputs[0]) is None or not all(map(self._rows, cut)) or not all(map(self._same, others)):
            return False
        bias = self.graph.spec(op.args[0]) if op.short_name == "addmm" else None
        if bias is not None and len(bias.shape) > 1:
            return False

        def renamed(ref: ValueRef) -> ValueRef:
            return self.cut_values[ref.name] if ref in cut else ref

        self.operations.append(replace(op.reading(renamed), outputs=(self._block(op.outputs[0]),)))
        self.cut_values[op.name] = ValueRef(op.name)
        return True

    def _rows(self, ref: ValueRef) -> ValueRef | None:
        """A block's rows of a value: of an input, or of a view that only splits or merges leading dims."""
        known = self.cut_values.get(ref.name)
        if known is not None:
            return known
        spec = self.graph.spec(ref)
        width = self._width(spec)
        if ref.index or width is None or not is_contiguous(spec):
            return None
        maker = self.graph.by_name.get(ref.name)
        if maker is None:
            found: ValueRef | None = ref
        elif self._is_view(maker) and self._width(self.graph.spec(maker.inputs[0])) == width:
            found = self._rows(maker.inputs[0])
        else:
            return None
        if found is not None:
            self.cut_values[ref.name] = found
        return found

    def _same(self, ref: ValueRef) -> bool:
        """Take a value that is the same for every block: an input, or a view of one."""
        if ref.name in self.cut_values or ref.index:
            return False
        maker = self.graph.by_name.get(ref.name)
        if maker is not None and ref.name not in self.whole:
            if not self._is_view(maker) or not self._same(maker.inputs[0]):
                return False
            self.operations.append(maker)
        self.whole.add(ref.name)
        return True

    def _width(self, spec: TensorSpec) -> int | None:
        """Columns of a tensor whose leading dims together are the matmul's rows; None for any other."""
        dims = spec.shape.dims
        if len(dims) < 2 or not isinstance(dims[-1], int):
            return None
        return dims[-1] if product(dims[:-1]) == self.total else None

    def _block(self, spec: TensorSpec) -> TensorSpec:
        dims = (symbol(ROWS), spec.shape.dims[-1])
        return replace(spec, shape=SymbolicShape(dims), strides=SymbolicShape(contiguous_strides(dims)))
