"""Which outputs of a kernel may be written into the memory of an input that is dead afterwards.

In: a node's form, or its loops; the steps of a program. Out: pairs of an output's and an input's number, of a kernel
alone or of each kernel in a program. Guarantee: whatever the printer's settings, each element of the input is read for
the last time before the output's element at its place is written, and the two have the same sizes, strides and dtype;
in a program the input is memory which a step has made, and which nothing reads afterwards through any view. A printer
must not promise its compiler that the two do not overlap.

A fresh output costs a read of each page or cache line before it can be written. In place there is no such read, and a
step's peak memory is lower by the output.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from autofuse.codegen.column_passes import plan
from autofuse.codegen.loops import Access, LoopKernel
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm

Pairs = tuple[tuple[int, int], ...]  # (output, input)


@functools.lru_cache(maxsize=4096)
def in_place(form: NodeForm) -> Pairs:
    """The outputs of a node that its kernel may write into an input's memory. Raises LoweringError, as `lower` does."""
    pairs = []
    for output, source in overlaps(lower(form)):
        one, other = form.spec(form.outputs[output]), form.inputs[source].spec
        if (one.shape, one.strides, one.dtype) == (other.shape, other.strides, other.dtype):
            pairs.append((output, source))
    return tuple(pairs)


def why_not(form: NodeForm) -> tuple[str, str] | None:
    """Why a node has no loop form, as a code and in words; None where it has one."""
    try:
        in_place(form)
    except LoweringError as error:
        return error.code, str(error)
    return None


def overlaps(kernel: LoopKernel) -> Pairs:
    """Pairs of an output and an input of one dtype, which is read only where the output is written, and before that."""
    phases = () if kernel.stages else plan(kernel, keep=False).phases
    if kernel.rest or not phases or kernel.bounds:  # a call whose index is out of bounds is repeated in eager
        return ()
    sources = [n for n, param in enumerate(kernel.params) if not param.is_output]
    outputs = [n for n, param in enumerate(kernel.params) if param.is_output]
    last = set(phases[-1].stores)
    found = []
    for number, output in enumerate(outputs):
        stores = [s for s in kernel.stores if s.access.param == output]
        if len(stores) != 1 or stores[0] not in last or _is_written_again(stores[0].access, kernel):
            continue  # an output stored in parts, or elements that a later pass or another row may read
        for place, source in enumerate(sources):
            same = replace(stores[0].access, param=source)
            loads = [v.attr for v in kernel.values if isinstance(v.attr, Access) and v.attr.param == source]
            is_alike = kernel.params[source].dtype == kernel.params[output].dtype != "bool"
            if is_alike and loads and all(access == same for access in loads):
                found.append((number, place))
    return tuple(found)


def _is_written_again(access: Access, kernel: LoopKernel) -> bool:
    """Whether the loops write an element more than once, as they do where an output is smaller than the nest."""
    moving = {dim for dim, stride in access.strides if stride != 0}
    visited = [*kernel.rows, *(kernel.cols if moving.intersection(kernel.cols) else ())]  # else one store a row
    return any(kernel.dims[dim] != 1 and dim not in moving for dim in visited)


# ---- in a program ------------------------------------------------------------------------------------------------

# Operators whose result has memory of its own.
FRESH = frozenset(["mm", "addmm", "bmm", "baddbmm", "convolution"])


@dataclass(frozen=True)
class Step:
    """One line of a program. A value is any hashable by which the program identifies it."""

    inputs: Sequence[Hashable]
    outputs: Sequence[Hashable]
    is_fresh: bool  # its outputs have memory of their own; else they may share that of any input
    form: NodeForm | None = None  # of a step that is a C kernel; its inputs come first in ``inputs``


def find_reuse(steps: Sequence[Step], kept: Collection[Hashable]) -> list[Pairs]:
    """For each step, outputs that may be written into an input's memory. ``kept``: values needed after the program."""
    seen_in: dict[Hashable, set[Hashable]] = {}  # a value -> the fresh values in whose memory it may lie
    seen_as: dict[Hashable, set[Hashable]] = {}  # a fresh value -> all values that may lie in its memory
    last: dict[Hashable, int] = {}
    for index, step in enumerate(steps):
        last.update((value, index) for value in step.inputs)
        sources = {s for value in step.inputs for s in seen_in.get(value, ())} if not step.is_fresh else set()
        for value in step.outputs:
            seen_in[value] = {value} if step.is_fresh else sources
            for source in seen_in[value]:
                seen_as.setdefault(source, set()).add(value)
    found: list[Pairs] = []
    for index, step in enumerate(steps):
        taken: dict[int, int] = {}
        for output, place in _pairs(step.form):
            sources = seen_in.get(step.inputs[place], set())
            if len(sources) != 1 or output in taken or place in taken.values():
                continue
            (source,) = sources
            elsewhere = [v for i, v in enumerate(step.inputs) if i != place and source in seen_in.get(v, ())]
            views = seen_as[source]
            if not elsewhere and views.isdisjoint(kept) and all(last.get(v, -1) <= index for v in views):
                taken[output] = place
        found.append(tuple(taken.items()))
    return found


def _pairs(form: NodeForm | None) -> Pairs:
    try:
        return in_place(form) if form is not None else ()
    except LoweringError:  # no loop form
        return ()
