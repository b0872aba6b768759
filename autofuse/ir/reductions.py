"""Which dims a reduction reduces, wherever its overload names them.

In: an operation of kind ``REDUCTION``. Out: `ReducedDims`. Guarantee: the planner and the lowering read the same dims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from autofuse.ir.operation import Operation

_WITHOUT_DIMS = frozenset(
    f"aten.{name}"
    for name in (
        "sum.default", "mean.default", "any.default", "all.default", "max.default", "min.default", "prod.default",
        "norm.Scalar", "norm.ScalarOpt_dtype",
    )
)  # fmt: skip
_BEHIND_AN_ORDER = ("linalg_vector_norm", "norm")
_KEPT_BY_NO_DIMS = ("aten.any.dims", "aten.all.dims")  # an empty list of dims reduces none of them there, else all


class ReducedDims(NamedTuple):
    """The reduced dims, counted from the front, and whether they stay with size 1."""

    dims: tuple[int, ...]
    keepdim: bool


def reduced_dims(op: Operation, rank: int) -> ReducedDims:
    """What an operation reduces of a tensor of ``rank`` dims; of one without dims nothing, whatever dim is named."""
    if op.target in _WITHOUT_DIMS:
        return ReducedDims(tuple(range(rank)), False)
    named = dict(op.kwargs)
    at = 2 if op.short_name in _BEHIND_AN_ORDER else 1
    only_named = op.short_name == "aminmax"
    dims: Any = named.get("dim", None if only_named else op.arg(at))
    keepdim = bool(named.get("keepdim", False if only_named else op.arg(at + 1, False)))
    if isinstance(dims, int):
        dims = (dims,)
    if dims is None or (not dims and op.target not in _KEPT_BY_NO_DIMS):
        return ReducedDims(tuple(range(rank)), keepdim)
    return ReducedDims(tuple(sorted(int(d) % rank for d in dims)) if rank else (), keepdim)
