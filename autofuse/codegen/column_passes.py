"""Phases: the passes over the columns of a row, and what each pass calculates.

In: a loop kernel and whether costly values are kept between passes. Out: a list of passes in order, each with the
values to calculate, those read from and written to the row buffer, and the reductions and stores it completes.
Guarantee: a pass uses only row reductions of earlier passes; every store and reduction is in exactly one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autofuse.codegen.dtypes import DTYPES
from autofuse.codegen.loops import COST, SINKS, Access, LoopKernel, Region, Store, live_values, regions

_WORTH_KEEPING = 8  # cost of a value, in arithmetic operations, from which a row buffer is cheaper


@dataclass(frozen=True)
class ColumnPass:
    """One pass over the columns of a row."""

    stage: int
    widened: tuple[int, ...]  # narrow loads copied to a row buffer before the pass
    row_values: tuple[int, ...]  # calculated once before the pass
    values: tuple[int, ...]  # calculated for each column, in order
    buffer_reads: tuple[int, ...]  # values taken from the row buffer instead
    buffer_writes: tuple[int, ...]  # values of this pass that a later one takes from the row buffer
    reductions: tuple[int, ...]  # row_reduce values this pass completes
    sinks: tuple[int, ...]  # reductions over rows this pass adds to
    stores: tuple[Store, ...]  # stores of column-dependent values


@dataclass(frozen=True)
class Plan:
    """All that happens for a row, and what happens outside of rows."""

    phases: tuple[ColumnPass, ...]
    entry_values: tuple[int, ...]  # depend on sizes and 0-d inputs only
    last_row_values: tuple[int, ...]  # row values after the last pass
    row_sinks: tuple[int, ...]  # reductions over rows of a value without columns
    row_stores: tuple[Store, ...]
    post_values: tuple[int, ...]  # calculated once after the nest, some of them per column
    post_stores: tuple[Store, ...]
    buffered: tuple[int, ...]  # values that have a row buffer
    kept: tuple[int, ...]  # those of them that were calculated, not just widened


def store_region(kernel: LoopKernel, store: Store, found: list[Region]) -> Region:
    """Where a store happens: the value's region, widened by the dims it is written along."""
    dims = {d for d, _ in store.access.strides}
    value = found[store.value]
    in_columns = value.cols or bool(dims & set(kernel.cols))
    return Region(
        rows=value.rows or bool(dims & set(kernel.rows)) or (in_columns and not kernel.rows and not value.post),
        cols=in_columns,
        post=value.post,
        stage=value.stage,
    )


def split_by_columns(
    kernel: LoopKernel, stores: Sequence[Store], found: list[Region]
) -> tuple[list[Store], list[Store]]:
    """Stores of single elements, and those along columns."""
    along = {id(s) for s in stores if store_region(kernel, s, found).cols}
    return [s for s in stores if id(s) not in along], [s for s in stores if id(s) in along]


def plan(kernel: LoopKernel, keep: bool, widen: bool = True) -> Plan:
    """The passes of a kernel. ``keep``: costly values go through a row buffer; ``widen``: narrow loads do."""
    found = regions(kernel)
    places = [(s, store_region(kernel, s, found)) for s in kernel.stores]
    live = live_values(kernel)
    in_columns = {n for n in live if found[n].cols and not found[n].post}
    full_stores = [(s, r) for s, r in places if r.name == "full"]
    row_reduces = [n for n in live if kernel.values[n].op == "row_reduce"]
    loop_sinks = [n for n in live if kernel.values[n].op in ("col_reduce", "full_reduce")]
    stages = [found[n].stage - 1 for n in row_reduces]
    stages += [found[kernel.values[n].args[0]].stage for n in loop_sinks] + [r.stage for _, r in full_stores]
    roots_of: dict[int, list[int]] = {stage: [] for stage in range(max(stages, default=-1) + 1)}
    for n in row_reduces:
        roots_of[found[n].stage - 1].append(kernel.values[n].args[0])
    for n in loop_sinks:
        roots_of[found[kernel.values[n].args[0]].stage].append(kernel.values[n].args[0])
    for s, r in full_stores:
        roots_of[r.stage].append(s.value)

    cost = cone_cost(kernel, found)
    wanted = {stage: _closure(kernel, roots, in_columns, set()) for stage, roots in roots_of.items()}
    available: set[int] = set()
    phases: list[ColumnPass] = []
    row_done: set[int] = set()
    for stage, roots in roots_of.items():
        reach = _closure(kernel, roots, in_columns, available)
        reads = sorted(reach & available)
        computed = sorted(reach - available)
        later = set().union(*(wanted[s] for s in wanted if s > stage))
        fresh = _narrow_loads(kernel, computed) if row_reduces and widen else []
        computed = [n for n in computed if n not in fresh]
        reads = sorted({*reads, *fresh})
        available.update(fresh)
        writes = (
            [
                n
                for n in computed
                if kernel.values[n].dtype != "bool" and keep and n in later and cost[n] >= _WORTH_KEEPING
            ]
            if roots
            else []
        )
        writes = _frontier(kernel, writes, wanted, stage)
        row_values = [n for n in live if found[n].name == "row" and found[n].stage <= stage and n not in row_done]
        row_values = [n for n in row_values if kernel.values[n].op != "row_reduce"]
        row_done.update(row_values)
        phases.append(
            ColumnPass(
                stage=stage,
                widened=tuple(fresh),
                row_values=tuple(row_values),
                values=tuple(computed),
                buffer_reads=tuple(reads),
                buffer_writes=tuple(writes),
                reductions=tuple(n for n in row_reduces if found[n].stage - 1 == stage),
                sinks=tuple(n for n in loop_sinks if found[kernel.values[n].args[0]].stage == stage),
                stores=tuple(s for s, r in full_stores if r.stage == stage),
            )
        )
        available.update(writes)
    read_later = {n for p in phases for n in p.buffer_reads}
    phases = [_without_unread(p, read_later) for p in phases]
    last = [n for n in live if found[n].name == "row" and n not in row_done and kernel.values[n].op != "row_reduce"]
    post_stores = tuple(s for s, r in places if r.name in ("post", "col", "entry"))
    sinks = {n for n in live if kernel.values[n].op in SINKS}
    outside = {n for n in live if found[n].post or found[n].cols}
    post = _closure(kernel, [s.value for s in post_stores], outside, sinks)
    return Plan(
        phases=tuple(phases),
        entry_values=tuple(n for n in live if found[n].name == "entry"),
        last_row_values=tuple(last),
        row_sinks=tuple(n for n in live if kernel.values[n].op == "rows_reduce"),
        row_stores=tuple(s for s, r in places if r.name == "row"),
        post_values=tuple(sorted(n for n in post if kernel.values[n].op not in SINKS)),
        post_stores=post_stores,
        buffered=tuple(sorted(read_later)),
        kept=tuple(sorted(n for p in phases for n in p.buffer_writes)),
    )


def _narrow_loads(kernel: LoopKernel, numbers: list[int]) -> list[int]:
    """Loads of 1 and 2 bytes an element that vary along the vectorised dim.

    gcc 12 vectorises a loop for its narrowest type; beside a reduction that means 64 lanes combined one by one
    (23 ns instead of 5 for a masked maximum of 128 floats). Widened once, all passes run on 32-bit lanes.
    """
    last = kernel.cols[-1]
    found = []
    for n in numbers:
        value = kernel.values[n]
        if value.op == "load" and isinstance(value.attr, Access):
            narrow = DTYPES[kernel.params[value.attr.param].dtype].nbytes < 4
            if narrow and any(d == last for d, _ in value.attr.strides):
                found.append(n)
    return found


def _without_unread(phase: ColumnPass, read_later: set[int]) -> ColumnPass:
    writes = tuple(n for n in phase.buffer_writes if n in read_later)
    return dataclasses.replace(phase, buffer_writes=writes)


def _closure(kernel: LoopKernel, roots: list[int], inside: set[int], stop: set[int]) -> set[int]:
    """Column values needed for the roots; ``stop`` values are included but not looked behind."""
    found: set[int] = set()
    stack = [r for r in roots if r in inside]
    while stack:
        n = stack.pop()
        if n in found:
            continue
        found.add(n)
        if n not in stop:
            stack.extend(a for a in kernel.values[n].args if a in inside)
    return found


def _frontier(kernel: LoopKernel, writes: list[int], wanted: dict[int, set[int]], stage: int) -> list[int]:
    """Of the values worth keeping, those a later pass uses from outside of the kept ones."""
    kept = set(writes)
    outer: set[int] = set()
    for later, reach in wanted.items():
        if later <= stage:
            continue
        for n in reach:
            if n not in kept:
                outer.update(a for a in kernel.values[n].args if a in kept)
        outer.update(n for n in kept if n in reach and not _used_inside(kernel, n, reach))
    return [n for n in writes if n in outer]


def _used_inside(kernel: LoopKernel, number: int, reach: set[int]) -> bool:
    return any(number in kernel.values[n].args for n in reach)


def cone_cost(kernel: LoopKernel, found: list[Region]) -> list[int]:
    """Rough cost of making each value anew in a pass over the columns."""
    cones: list[frozenset[int]] = []
    for number, value in enumerate(kernel.values):
        if found[number].cols and not found[number].post:
            cones.append(frozenset({number}).union(*(cones[a] for a in value.args)))
        else:
            cones.append(frozenset())
    return [sum(COST.get(kernel.values[n].op, 1) for n in cone) for cone in cones]
