"""What a tiled matmul does to a node: one product, and what follows it at each place of a tile.

In: a `NodeForm` with one product (mm, addmm, bmm, baddbmm) of views of its inputs, and operations on single elements
after it. Out: `Matmul`: where the operands lie, and the operations after the product as a `LoopKernel` in which the
product is one more input; or LoweringError with a reason code.
Guarantee: the product is read at the place at which it is made, so that it need not leave the registers.
aten adds ``beta * bias + alpha * product`` before it rounds, once; so does the kernel.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace

from autofuse.codegen.loops import LoopKernel, Param
from autofuse.codegen.lowering.lower import describe, lower_tile
from autofuse.codegen.triton.body import extents
from autofuse.codegen.triton.operands import Operand, live, read_operand
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, NodeInput, Operation, ValueRef
from autofuse.ir.shape import Dim

# Which arguments are the operands, and which the bias that is added.
ANCHORS: dict[str, tuple[int, int, int | None]] = {
    "aten.mm.default": (0, 1, None),
    "aten.addmm.default": (1, 2, 0),
    "aten.bmm.default": (0, 1, None),
    "aten.baddbmm.default": (1, 2, 0),
}
DTYPES = ("float16", "bfloat16", "float32", "float64")
PRODUCT = "product"  # the name of the product where what it is scaled and added to has the operation's own


@dataclass(frozen=True)
class Matmul:
    """A product and what follows it."""

    kernel: LoopKernel  # what follows, for each element; its dims are batch, rows and columns
    product: int  # the parameter of the kernel that stands for the product
    batch_dims: tuple[int, ...]  # of the kernel
    row_dims: tuple[int, ...]
    col_dims: tuple[int, ...]
    left: Operand
    right: Operand
    batch: Dim
    rows: Dim
    cols: Dim
    depth: Dim  # columns of the left operand, rows of the right one
    dtype: str  # of both operands

    @property
    def extents(self) -> tuple[Dim, ...]:
        """The flat sizes and memory extents that 32-bit indices must reach."""
        operands = (self.left.extent(self.rows, self.depth), self.right.extent(self.depth, self.cols))
        return tuple(dict.fromkeys((*extents(self.kernel), *operands)))


def matmul_refusal(form: NodeForm) -> tuple[str, str] | None:
    """Why a node has no tiled matmul, as a code and in words; None where it has one."""
    try:
        plan_matmul(form)
    except LoweringError as error:
        return error.code, str(error)
    return None


@functools.lru_cache(maxsize=256)
def plan_matmul(form: NodeForm) -> Matmul:
    """The product of a node and what follows it. Raises LoweringError where it has no such form."""
    anchor = _anchor(form)
    left, right, bias = ANCHORS[anchor.target]
    spec = anchor.outputs[0]
    operands = [anchor.args[n] for n in (left, right)]
    specs = [form.spec(ref) for ref in operands]
    if {s.dtype for s in (*specs, spec)} != {spec.dtype} or spec.dtype not in DTYPES:
        found = ", ".join(s.dtype for s in specs)
        raise LoweringError("dtype", f"expected operands of one dtype of {', '.join(DTYPES)}, found {found}")
    added = None if bias is None else anchor.args[bias]
    rest, product = _after(form, anchor, added)
    digest = hashlib.sha256(form.text().encode()).hexdigest()[:10]
    names = dict.fromkeys(op.short_name.strip("_") for op in form.operations if _counts(op))
    kernel, dims = lower_tile(rest, product, f"af_tiled_{'_'.join(names)[:48].strip('_')}_{digest}")
    tile = next(n for n, p in enumerate(kernel.params) if p.name == product.name)
    kernel = replace(kernel, comments=tuple(describe(op) for op in form.operations))
    return Matmul(
        kernel=kernel,
        product=tile,
        batch_dims=dims[0],
        row_dims=dims[1],
        col_dims=dims[2],
        left=read_operand(form, operands[0]),
        right=read_operand(form, operands[1]),
        batch=spec.shape[0] if len(spec.shape) == 3 else 1,
        rows=spec.shape[-2],
        cols=spec.shape[-1],
        depth=specs[0].shape[-1],
        dtype=spec.dtype,
    )


def parameters(form: NodeForm) -> tuple[Param, ...]:
    """All tensors of a node, in the order in which a kernel takes them."""
    outputs = [Param(f"o{n}", form.spec(ref).dtype, True) for n, ref in enumerate(form.outputs)]
    return (*(Param(item.name, item.spec.dtype, False) for item in form.inputs), *outputs)


def _anchor(form: NodeForm) -> Operation:
    found = [op for op in form.operations if op.target in ANCHORS]
    if len(found) != 1:
        raise LoweringError("anchor", f"expected one product of matrices, found {len(found)}")
    return found[0]


def _counts(op: Operation) -> bool:
    return op.short_name not in ("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "_unsafe_view")


# ---- what follows the product -----------------------------------------------------------------------------


def _after(form: NodeForm, anchor: Operation, bias: ValueRef | None) -> tuple[NodeForm, ValueRef]:
    """The node with the product as an input, and which one that is."""
    scaling = _scaling(anchor, bias)
    product = ValueRef(PRODUCT if scaling else anchor.name)
    operations: list[Operation] = []
    for op in form.operations:
        operations += scaling if op is anchor else [op]
    kept = live(operations, form.outputs)
    used = {ref.name for op in kept for ref in op.inputs} | {ref.name for ref in form.outputs}
    if product.name not in used:
        raise LoweringError("unused", f"expected an output that depends on {anchor.name}, found none")
    inputs = [item for item in form.inputs if item.name in used]
    inputs.append(NodeInput(product.name, anchor.outputs[0]))
    return NodeForm(tuple(inputs), tuple(kept), form.outputs, form.symbols), product


def _scaling(anchor: Operation, bias: ValueRef | None) -> list[Operation]:
    """``beta * bias + alpha * product``; aten does not read a bias whose factor is 0."""
    if bias is None:
        return []
    beta, alpha = anchor.kwarg("beta", 1), anchor.kwarg("alpha", 1)
    if not all(isinstance(factor, int | float) for factor in (beta, alpha)):
        raise LoweringError("factor", f"expected numbers as factors of {anchor.name}, found {beta} and {alpha}")

    made: list[Operation] = []

    def call(name: str, target: str, *args: object, **kwargs: object) -> ValueRef:
        made.append(Operation(name, target, args, tuple(kwargs.items()), anchor.outputs, anchor.source))
        return ValueRef(name)

    value = ValueRef(PRODUCT)
    if alpha != 1:
        value = call(f"{PRODUCT}_scaled" if beta else anchor.name, "aten.mul.Tensor", value, alpha)
    if beta != 0:
        call(anchor.name, "aten.add.Tensor", value, bias, alpha=beta)
    return made
