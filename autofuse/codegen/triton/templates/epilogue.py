"""The epilogue of a node's matmul, for kernels that hold the matmul's result in registers.

In: a `NodeForm` and its matmul (mm, addmm, bmm, baddbmm). Out: the operations after it as a `LoopKernel` in which the
matmul's result is one more input; or LoweringError with a reason code. Guarantee: each element of the result is read
where it is computed, so that it stays in registers. aten adds ``beta * bias + alpha * product`` before it rounds, once;
so do the kernels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from autofuse.codegen.loops import LoopKernel, Param
from autofuse.codegen.lowering.lower import describe, lower_tile
from autofuse.codegen.matmul_operands import ANCHORS, live
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, NodeInput, Operation, ValueRef

DTYPES = ("float16", "bfloat16", "float32", "float64")
PRODUCT = "product"  # the name of the bare matmul where the scaled sum has the operation's name
_VIEWS = frozenset(["view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "_unsafe_view"])


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a matmul."""

    kernel: LoopKernel  # of the operations, for each element of the matmul's result
    product: int  # the kernel's parameter for the matmul's result
    dims: tuple[tuple[int, ...], ...]  # of the kernel: batch, rows, columns of the matmul's result


def follow(form: NodeForm, anchor: Operation, name: str) -> Epilogue:
    """The epilogue of a matmul: all other operations that the node's outputs need.

    Raises LoweringError where an element of the epilogue needs another element of the matmul's result, where the
    epilogue reduces, or where no output needs the matmul.
    """
    _, _, bias = ANCHORS[anchor.target]
    scaling = _scaling(anchor, None if bias is None else anchor.args[bias])
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
    rest = NodeForm(tuple(inputs), tuple(kept), form.outputs, form.symbols)
    kernel, dims = lower_tile(rest, product, name)
    number = next(n for n, p in enumerate(kernel.params) if p.name == product.name)
    return Epilogue(replace(kernel, comments=tuple(describe(op) for op in form.operations)), number, dims)


def kernel_name(kind: str, form: NodeForm) -> str:
    """``af_<kind>_<operations>_<hash>``."""
    names = dict.fromkeys(op.short_name.strip("_") for op in form.operations if op.short_name not in _VIEWS)
    digest = hashlib.sha256(form.text().encode()).hexdigest()[:10]
    return f"af_{kind}_{'_'.join(names)[:48].strip('_')}_{digest}"


def parameters(form: NodeForm) -> tuple[Param, ...]:
    """All tensors of a node, in the order in which a kernel takes them."""
    outputs = [Param(f"o{n}", form.spec(ref).dtype, True) for n, ref in enumerate(form.outputs)]
    return (*(Param(item.name, item.spec.dtype, False) for item in form.inputs), *outputs)


def _scaling(anchor: Operation, bias: ValueRef | None) -> list[Operation]:
    """The operations of ``beta * bias + alpha * product``; aten does not read a bias whose factor is 0."""
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
