"""The plan of a tiled matmul: the operands of a node's only matmul, and its epilogue.

In: a `NodeForm` with one matmul (mm, addmm, bmm, baddbmm) of its inputs, and an element-wise epilogue. Out: `Matmul`;
or LoweringError with a reason code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from autofuse.codegen.matmul_operands import ANCHORS, Operand, read_operand
from autofuse.codegen.triton.index_width import extents
from autofuse.codegen.triton.templates.epilogue import DTYPES, Epilogue, follow, kernel_name
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.shape import Dim


@dataclass(frozen=True)
class Matmul:
    """A matmul and its epilogue."""

    rest: Epilogue
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
        return tuple(dict.fromkeys((*extents(self.rest.kernel), *operands)))


@functools.lru_cache(maxsize=256)
def plan_matmul(form: NodeForm) -> Matmul:
    """The matmul of a node and its epilogue. Raises LoweringError where it has no such form."""
    anchor = _anchor(form)
    left, right, _ = ANCHORS[anchor.target]
    spec = anchor.outputs[0]
    operands = [anchor.args[n] for n in (left, right)]
    specs = [form.spec(ref) for ref in operands]
    if {s.dtype for s in (*specs, spec)} != {spec.dtype} or spec.dtype not in DTYPES:
        found = ", ".join(s.dtype for s in specs)
        raise LoweringError("dtype", f"expected operands of one dtype of {', '.join(DTYPES)}, found {found}")
    return Matmul(
        rest=follow(form, anchor, kernel_name("tiled", form)),
        left=read_operand(form, operands[0]),
        right=read_operand(form, operands[1]),
        batch=spec.shape[0] if len(spec.shape) == 3 else 1,
        rows=spec.shape[-2],
        cols=spec.shape[-1],
        depth=specs[0].shape[-1],
        dtype=spec.dtype,
    )


def _anchor(form: NodeForm) -> Operation:
    found = [op for op in form.operations if op.target in ANCHORS]
    if len(found) != 1:
        raise LoweringError("anchor", f"expected one product of matrices, found {len(found)}")
    return found[0]
