"""The passes over the columns of a row, and the values of each pass.

In: a loop kernel and whether costly values are kept between passes. Out: a list of passes in order, each with the
values to compute, those read from and written to the row buffer, and the reductions and stores it completes. Guarantee:
a pass uses only row reductions of earlier passes; every store and reduction is in exactly one pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autofuse.codegen.dtypes import DTYPES
from autofuse.codegen.loops import COST, SINKS, Access, LoopKernel, Region, Store, live_values, regions

ROW_RESULTS = ("row_reduce", "row_merge")
WORTH_KEEPING = 8  # cost in arithmetic operations from which a row buffer is cheaper than calculating again


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
    """The passes of each row, and what is calculated and stored outside of them."""

    phases: tuple[ColumnPass, ...]
    entry_values: tuple[int, ...]  # that no loop changes, calculated once before the rows
    last_row_values: tuple[int, ...]  # row values after the last pass
    row_sinks: tuple[int, ...]  # reductions over rows of a value without columns
    row_stores: tuple[Store, ...]
    post_values: tuple[int, ...]  # calculated after the nest, once or for each column
    post_stores: tuple[Store, ...]
    buffered: tuple[int, ...]  # values that have a row buffer
    kept: tuple[int, ...]  # buffered values that are calculated, not just widened


def store_region(kernel: LoopKernel, store: Store, found: list[Region]) -> Region:
    """The region in which a store is done: that of its value, widened by the dims that it is written along."""
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
    """Two lists: stores that do not vary along columns, and stores that do."""
    along = {id(s) for s in stores if store_region(kernel, s, found).cols}
    return [s for s in stores if id(s) not in along], [s for s in stores if id(s) in along]


def plan(kernel: LoopKernel, keep: bool, widen: bool = True) -> Plan:
    """The passes of a kernel.

    ``keep``: costly values are kept in a row buffer for later passes. ``widen``: in a kernel with row reductions, loads
    of 1 and 2 bytes are copied to a row buffer before the pass that needs them.
    """
    return _Planner(kernel, keep, widen).plan()


def scans_of(kernel: LoopKernel, phase: ColumnPass) -> list[int]:
    """The scans that a pass makes."""
    return [n for n in phase.values if kernel.values[n].op == "scan"]


class _Planner:
    """Plans one kernel."""

    def __init__(self, kernel: LoopKernel, keep: bool, widen: bool) -> None:
        self.kernel = kernel
        self.keep = keep
        self.found = regions(kernel)
        self.live = live_values(kernel)
        self.places = [(s, store_region(kernel, s, self.found)) for s in kernel.stores]
        self.full_stores = [(s, r) for s, r in self.places if r.name == "full"]
        self.row_reduces = [n for n in self.live if kernel.values[n].op in ROW_RESULTS]
        self.loop_sinks = [n for n in self.live if kernel.values[n].op in ("col_reduce", "full_reduce")]
        self.widen = widen and bool(self.row_reduces)
        self.cones = cones_of(kernel, self.found)
        self.cost = costs_of(kernel, self.cones)
        in_columns = {n for n in self.live if self.found[n].cols and not self.found[n].post}
        self.in_columns = in_columns
        self.roots = self._roots()
        self.wanted = {stage: _closure(kernel, roots, in_columns, set()) for stage, roots in self.roots.items()}

    def plan(self) -> Plan:
        found, live, values = self.found, self.live, self.kernel.values
        passes = self._passes()
        row_done = {n for p in passes for n in p.row_values}
        post_stores = tuple(s for s, r in self.places if r.name in ("post", "col", "entry"))
        sinks = {n for n in live if values[n].op in SINKS}
        outside = {n for n in live if found[n].post or found[n].cols}
        post = _closure(self.kernel, [s.value for s in post_stores], outside, sinks)
        return Plan(
            phases=tuple(passes),
            entry_values=tuple(n for n in live if found[n].name == "entry"),
            last_row_values=tuple(n for n in self._row_values() if n not in row_done),
            row_sinks=tuple(n for n in live if values[n].op == "rows_reduce"),
            row_stores=tuple(s for s, r in self.places if r.name == "row"),
            post_values=tuple(sorted(n for n in post if values[n].op not in SINKS)),
            post_stores=post_stores,
            buffered=tuple(sorted({n for p in passes for n in p.buffer_reads})),
            kept=tuple(sorted(n for p in passes for n in p.buffer_writes)),
        )

    def _reduced(self, number: int) -> int:
        """The value that a reduction reduces."""
        return self.kernel.values[number].args[0]

    def _roots(self) -> dict[int, list[int]]:
        """For each stage, the values that its pass must calculate. Pass n may use row reductions of stages up to n."""
        needs = [(self.found[n].stage - 1, self._reduced(n)) for n in self.row_reduces]
        needs += [(self.found[self._reduced(n)].stage, self._reduced(n)) for n in self.loop_sinks]
        needs += [(region.stage, store.value) for store, region in self.full_stores]
        roots: dict[int, list[int]] = {n: [] for n in range(max((stage for stage, _ in needs), default=-1) + 1)}
        for stage, number in needs:
            roots[stage].append(number)
        return roots

    def _row_values(self) -> list[int]:
        """Values that vary along rows but not along columns, without the row reductions."""
        return [n for n in self.live if self.found[n].name == "row" and self.kernel.values[n].op not in ROW_RESULTS]

    def _passes(self) -> list[ColumnPass]:
        passes: list[ColumnPass] = []
        available: set[int] = set()  # in row buffers
        row_done: set[int] = set()
        for stage in self.roots:
            passes.append(self._pass(stage, available, row_done))
            available.update(passes[-1].widened, passes[-1].buffer_writes)
            row_done.update(passes[-1].row_values)
        read_later = {n for p in passes for n in p.buffer_reads}
        return [_without_unread(p, read_later) for p in passes]

    def _pass(self, stage: int, available: set[int], row_done: set[int]) -> ColumnPass:
        reach = _closure(self.kernel, self.roots[stage], self.in_columns, available)
        computed = sorted(reach - available)
        fresh = _narrow_loads(self.kernel, computed) if self.widen else []
        computed = [n for n in computed if n not in fresh]
        row_values = [n for n in self._row_values() if self.found[n].stage <= stage and n not in row_done]
        return ColumnPass(
            stage=stage,
            widened=tuple(fresh),
            row_values=tuple(row_values),
            values=tuple(computed),
            buffer_reads=tuple(sorted({*(reach & available), *fresh})),
            buffer_writes=tuple(self._worth_keeping(stage, computed, set(fresh))),
            reductions=tuple(n for n in self.row_reduces if self.found[n].stage - 1 == stage),
            sinks=tuple(n for n in self.loop_sinks if self.found[self._reduced(n)].stage == stage),
            stores=tuple(s for s, r in self.full_stores if r.stage == stage),
        )

    def _worth_keeping(self, stage: int, computed: list[int], widened: set[int]) -> list[int]:
        """The values of a pass that a later pass reads back more cheaply than it would calculate them again.

        Costly ones, and those of a widened load and another one: the later pass reads one buffer in place of two.
        """
        if not self.keep or not self.roots[stage]:
            return []
        later = set().union(*(self.wanted[s] for s in self.wanted if s > stage))
        costly = [n for n in computed if n in later and (self.cost[n] >= WORTH_KEEPING or self._joins(n, widened))]
        return _frontier(self.kernel, [n for n in costly if self.kernel.values[n].dtype != "bool"], self.wanted, stage)

    def _joins(self, number: int, widened: set[int]) -> bool:
        """Whether a value is calculated from a widened load and from another load."""
        cone = self.cones[number]
        return not widened.isdisjoint(cone) and sum(self.kernel.values[n].op == "load" for n in cone) > 1


def _narrow_loads(kernel: LoopKernel, numbers: list[int]) -> list[int]:
    """Loads of 1 and 2 bytes an element that vary along the vectorised dim.

    gcc 12 vectorises a loop for its narrowest type; beside a reduction that means 64 lanes combined one by one (23 ns
    instead of 5 for a masked maximum of 128 floats). bool and 16-bit floats are widened to 32 bits once, and all passes
    run on 32-bit lanes.
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
    """The values of ``inside`` that the roots need; ``stop`` values are included, but not their operands."""
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
    """The values worth keeping that a later pass uses itself, not just to calculate other kept values."""
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


def costs_of(kernel: LoopKernel, cones: Sequence[frozenset[int]]) -> list[int]:
    """Rough cost of each value, in arithmetic operations, where a pass over the columns calculates it anew."""
    return [sum(COST.get(kernel.values[n].op, 1) for n in cone) for cone in cones]


def cones_of(kernel: LoopKernel, found: list[Region]) -> list[frozenset[int]]:
    """For each value that varies along columns, what a pass over them calculates for it, itself included."""
    cones: list[frozenset[int]] = []
    for number, value in enumerate(kernel.values):
        if found[number].cols and not found[number].post:
            cones.append(frozenset({number}).union(*(cones[a] for a in value.args)))
        else:
            cones.append(frozenset())
    return cones
