"""Knobs of C kernels: what may vary in the code of one kernel, and the defaults.

In: a loop kernel. Out: the knobs that change its code, each with choices, and a default configuration.
Guarantee: every configuration made of these choices prints a correct kernel; a knob that would change nothing is
not listed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from autofuse.codegen.c.math import INLINE_CALLS
from autofuse.codegen.c.target import march, vector_bits
from autofuse.codegen.column_passes import ColumnPass, plan, scans_of
from autofuse.codegen.dtypes import DTYPES, is_float
from autofuse.codegen.knobs import Knob
from autofuse.codegen.loops import COST, Access, LoopKernel, regions
from autofuse.codegen.one_pass import can_merge_passes
from autofuse.ir.shape import Dim, evaluate

STREAM_FROM_BYTES = 8 << 20  # lines written past the caches are not read before: a copy has a third less traffic
SERIAL_BELOW = 16384  # elements below which one thread is done before others have begun
LANES = 1024  # neighbouring rows of a block: wide blocks read memory in its order, narrow ones stay in a cache
# What to change first, ordered by wins against the default over 35 buckets of 13 nodes.
_LIKELIEST = (
    "blocks", "row_chunks", "passes", "sum_block", "nontemporal", "lane_block", "vector_bits", "math", "threads",
    "staging",
)  # fmt: skip
LONG_ROW = 32768  # columns from which a row may be too long for the caches
FAR_TOO_LONG = 1 << 18  # columns from which it usually is
FEWEST_ROWS = 4  # below which some threads usually do
FEW_ROWS = 32  # rows below which threads may want parts of rows
_FEWEST = 4  # rows, where their number is known, below which vectors along rows stay mostly empty


@functools.cache
def _vector_bits(march: str) -> tuple[int, ...]:
    return vector_bits()


def cpu_vector_bits() -> tuple[int, ...]:
    """Vector widths in bits of the processor that code is made for, narrowest first."""
    return _vector_bits(march())


def knobs_for(kernel: LoopKernel, symbol_values: Mapping[str, int] | None = None) -> tuple[Knob, ...]:
    """The knobs that change this kernel's code, first those that are likeliest to pay.

    With symbol values, knobs that cannot pay at these sizes are left out, and the defaults suit the sizes.
    ``nontemporal`` is left out where the outputs fit the caches: whoever reads them next would wait for the memory, and
    a race, in which nobody reads them, would not show it.
    """
    if kernel.stages:
        return _knobs_of_stages(kernel, symbol_values)
    widths = cpu_vector_bits()
    is_short = symbol_values is not None and elements(kernel, symbol_values) < SERIAL_BELOW
    threads = "serial" if is_short else "parallel"
    knobs = [
        Knob("vector_bits", widths, widths[-1], "preferred vector width of the compiler"),
        Knob("threads", ("parallel", "serial"), threads, "use the caller's thread count, or one thread"),
    ]
    if any((v.op, v.dtype) in INLINE_CALLS for v in kernel.values):
        knobs.append(
            Knob("math", ("inline", "library"), "inline", "own exp, erf and cdf, or the library's vector functions")
        )
    if can_transpose(kernel):
        knobs.append(Knob("blocks", (True, False), True, "visit rows and columns in blocks that stay in the caches"))
    has_lanes = uses_lanes(kernel)
    if has_lanes:
        knobs.append(Knob("lane_block", (64, 256, LANES), LANES, "neighbouring rows that a pass works on at once"))
    elif plan(kernel, keep=True).kept:
        knobs.append(
            Knob("staging", ("buffer", "recompute"), "buffer", "keep costly column values of a row for later passes")
        )
    if any(v.op == "row_reduce" and v.attr == "sum" and is_float(v.dtype) for v in kernel.values):
        knobs.append(Knob("sum_block", (256, 1024), 256, "columns added in the compute dtype before double takes over"))
    if symbol_values is not None and not has_lanes:
        knobs += _knobs_of_long_rows(kernel, symbol_values)
    is_small = symbol_values is not None and _written_bytes(kernel, symbol_values) < STREAM_FROM_BYTES
    if not has_lanes and can_stream(kernel) and not is_small:
        # Off where arithmetic bounds the kernel, because values on their way to memory go through a tile first.
        streams = symbol_values is not None and not any(COST.get(v.op, 1) >= 12 for v in kernel.values)
        knobs.append(Knob("nontemporal", (False, True), streams, "write outputs past the caches; pays from about 8 MB"))
    return tuple(sorted(knobs, key=lambda knob: _LIKELIEST.index(knob.name)))


def _knobs_of_stages(kernel: LoopKernel, symbol_values: Mapping[str, int] | None) -> tuple[Knob, ...]:
    """The knobs that any stage has a use for, but for those of one way to walk through memory."""
    found: dict[str, Knob] = {}
    for stage in kernel.stages:
        for knob in knobs_for(stage.kernel, symbol_values):
            is_more = knob.name not in found or knob.default == "parallel"  # a long stage has threads
            if knob.name in ("vector_bits", "threads", "math") and is_more:
                found[knob.name] = knob
    return tuple(sorted(found.values(), key=lambda knob: _LIKELIEST.index(knob.name)))


def _knobs_of_long_rows(kernel: LoopKernel, symbol_values: Mapping[str, int]) -> list[Knob]:
    """The knobs that can pay only for rows that are longer than caches, or for few rows."""
    rows, columns = (_points(kernel, dims, symbol_values) for dims in (kernel.rows, kernel.cols))
    found = []
    if rows < FEW_ROWS and columns >= LONG_ROW and can_chunk(kernel):
        # All rows are read once before any is read again: whole rows stay in a cache that chunks of many have left.
        found.append(
            Knob("row_chunks", (True, False), rows < FEWEST_ROWS, "share parts of rows among threads, or rows")
        )
    if columns >= LONG_ROW and can_merge(kernel):
        one = Knob(
            "passes", ("one", "several"), "one", "maximum or mean and what is relative to it in one pass, or not"
        )
        found.append(one)
    return found


def can_merge(kernel: LoopKernel) -> bool:
    """Whether a pass over the columns can make what is relative to the row's maximum or mean, too."""
    return kernel.kind == "row" and not kernel.has_scan and not uses_lanes(kernel) and can_merge_passes(kernel)


def can_chunk(kernel: LoopKernel) -> bool:
    """Whether chunks of a row can be worked on apart: all that is made of a row is reductions that can be joined."""
    return kernel.has_row_reduce and not kernel.has_scan and kernel.kind == "row" and not uses_lanes(kernel)


def can_stream(kernel: LoopKernel) -> bool:
    """Whether a pass over the columns only writes outputs, each in order: these need not go through the caches."""
    return kernel.kind != "write" and any(is_streamable(kernel, phase) for phase in plan(kernel, keep=True).phases)


def is_streamable(kernel: LoopKernel, phase: ColumnPass) -> bool:
    """Whether the stores of a pass can be written past the caches."""
    dense = all(dict(s.access.strides).get(kernel.cols[-1]) == 1 for s in phase.stores)
    reduces = bool(phase.reductions or phase.sinks)
    return bool(phase.stores) and dense and not reduces and not scans_of(kernel, phase)


def can_transpose(kernel: LoopKernel) -> bool:
    """Whether a kernel is element-wise, with some tensors dense along the last row dim and some along the columns.

    A loop over rows finds each element of the former in another cache line, which is gone before the next row reads
    from it: a copy of images into another order took four times as long (3 x 64 x 32 x 32, EPYC).
    """
    if kernel.kind != "pointwise" or len(kernel.cols) != 1 or not kernel.rows or kernel.bounds:
        return False
    row, col = kernel.rows[-1], kernel.cols[-1]
    size = kernel.dims[row]
    accesses = [v.attr for v in kernel.values if isinstance(v.attr, Access)] + [s.access for s in kernel.stores]
    is_turned = any(stride_along(a, row) == 1 and stride_along(a, col) not in (0, 1) for a in accesses)
    is_few = isinstance(size, int) and size < _FEWEST
    return is_turned and not is_few and any(stride_along(a, col) == 1 for a in accesses)


def uses_lanes(kernel: LoopKernel) -> bool:
    """Whether rows suit vector lanes: only rows are reduced, and most tensors are dense along the last row dim."""
    if (
        not kernel.needs_whole_rows
        or not kernel.rows
        or kernel.bounds
        or kernel.sinks
        or plan(kernel, keep=False).post_stores
    ):
        return False
    row, col = kernel.rows[-1], kernel.cols[-1]
    size = kernel.dims[row]
    if isinstance(size, int) and size < _FEWEST:
        return False
    found = regions(kernel)
    accesses = [v.attr for n, v in enumerate(kernel.values) if isinstance(v.attr, Access) and found[n].name == "full"]
    accesses += [s.access for s in kernel.stores if found[s.value].name == "full"]
    side_by_side = sum(stride_along(a, row) == 1 and stride_along(a, col) not in (0, 1) for a in accesses)
    return bool(side_by_side > sum(stride_along(a, col) == 1 for a in accesses))


def stride_along(access: Access, dim: int) -> Dim:
    """Elements from one place to the next along a domain dim."""
    return dict(access.strides).get(dim, 0)


def _written_bytes(kernel: LoopKernel, symbol_values: Mapping[str, int]) -> int:
    """Bytes of all outputs, as if each had an element at every point of the nest."""
    written = sum(DTYPES[kernel.params[s.access.param].dtype].nbytes for s in kernel.stores)
    return elements(kernel, symbol_values) * written


def elements(kernel: LoopKernel, symbol_values: Mapping[str, int]) -> int:
    """Points of the loop nest."""
    return _points(kernel, range(len(kernel.dims)), symbol_values)


def _points(kernel: LoopKernel, dims: Iterable[int], symbol_values: Mapping[str, int]) -> int:
    """Points of some of the loops."""
    total = 1
    for dim in dims:
        total *= evaluate(kernel.dims[dim], symbol_values)
    return total
