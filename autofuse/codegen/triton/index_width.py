"""Index width: whether 32 bits hold every index of a kernel.

In: a loop kernel. Out: the flat sizes and the extents in memory that its indices must reach, and the sizes for which a
kernel with 32-bit positions may be called.
"""

from __future__ import annotations

from collections.abc import Iterable

from autofuse.codegen.loops import Access, LoopKernel
from autofuse.ir.shape import Dim, as_dim, product

INDEX_BOUND = 2**31 - 2**21  # room for a tile that reaches beyond the end

Limit = tuple[Dim, int]  # (size, bound): a kernel is wrong where the size is beyond the bound


def extents(kernel: LoopKernel) -> tuple[Dim, ...]:
    """The flat sizes and memory extents that 32-bit indices must reach."""
    found: list[Dim] = [as_dim(product(kernel.dims))]
    accesses = [v.attr for v in kernel.values if isinstance(v.attr, Access)] + [s.access for s in kernel.stores]
    for access in accesses:
        reach: Dim = access.offset
        for d, stride in access.strides:
            reach = reach + kernel.dims[d] * stride
        found.append(as_dim(reach))
    return tuple(dict.fromkeys(found))


def index_limits(reached: Iterable[Dim], is_wide: bool) -> list[Limit]:
    """The limits of 32-bit positions; none where positions have 64 bits (``is_wide``)."""
    return [] if is_wide else [(extent, INDEX_BOUND) for extent in reached]


def open_limits(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The limits that symbols may exceed: without those that constant sizes keep."""
    return tuple((size, bound) for size, bound in limits if not (isinstance(size, int) and size <= bound))
