"""The C of kernels whose passes are merged, or whose rows are worked on in chunks: passes in blocks of columns.

In: a kernel whose passes were merged (`one_pass`), or whose rows have chunks (`row_chunks`). Out: the text of the
function that works on a share of the rows, as `Body` gives it. Layout of a pass with reductions: blocks of columns that
stay in the first-level cache; narrow elements are widened into a tile, then one loop makes the reductions, and a
further one each merge. Guarantee: a row is read from memory once in a pass, and no row needs a buffer.
Names in the text: as in `body.py` and `merge.py`; ``buf*`` is a tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.c.body import Body
from autofuse.codegen.c.merge import Element, block_lines, fields, finish_lines, merges_of
from autofuse.codegen.column_passes import ColumnPass, Plan
from autofuse.codegen.dtypes import VALUE_TYPE
from autofuse.codegen.loops import LoopKernel

TILE_SUM = 1024  # columns of a block: 4 KiB of floats


class TiledBody(Body):
    """Prints one kernel's loops. The plan keeps no costly values."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        phases = tuple(self._in_blocks(kernel, phase) for phase in plan.phases)
        super().__init__(kernel, dataclasses.replace(plan, phases=phases, buffered=()), knobs)
        self._place = "c - b"

    @staticmethod
    def _in_blocks(kernel: LoopKernel, phase: ColumnPass) -> ColumnPass:
        """A pass that widens what it reads by itself, or reads it as it is where it reduces nothing."""
        if phase.reductions or phase.sinks:
            return dataclasses.replace(phase, widened=phase.buffer_reads)
        values = tuple(sorted((*phase.values, *phase.buffer_reads)))
        return dataclasses.replace(phase, widened=(), buffer_reads=(), values=values)

    def _phase(self, phase: ColumnPass) -> list[str]:
        self._widened = frozenset(phase.widened)
        names = [name for n in merges_of(self.kernel, phase.reductions) for name in fields(self.kernel, n)[1:]]
        return [*(f"    double {name} = 0;" for name in names), *super()._phase(phase)]

    def _complete(self, phase: ColumnPass) -> list[str]:
        merges = merges_of(self.kernel, phase.reductions)
        return [f"    {line}" for n in merges for line in finish_lines(self.kernel, n)] + super()._complete(phase)

    def _widen(self, phase: ColumnPass) -> list[str]:
        return []

    def _innermost(self, phase: ColumnPass) -> list[str]:
        """A loop over blocks of columns."""
        if not phase.reductions and not phase.sinks:
            return super()._innermost(phase)
        kernel, (start, stop) = self.kernel, self._column_range(self.last)
        merges = merges_of(kernel, phase.reductions)
        rest = dataclasses.replace(phase, reductions=tuple(n for n in phase.reductions if n not in merges))
        scalars = [*rest.reductions, *(n for n in phase.sinks if kernel.values[n].op == "full_reduce")]
        blocked = [n for n in scalars if self._reducer(n).widens]
        lines = [
            f"for (int64_t b = {start}; b < {stop}; b += {TILE_SUM}) {{",
            f"  const int64_t b_end = {stop} - b < {TILE_SUM} ? {stop} : b + {TILE_SUM};",
        ]
        for n in phase.widened:
            ctype = VALUE_TYPE[kernel.values[n].dtype]
            lines += [f"  _Alignas(64) {ctype} buf{n}[{TILE_SUM}];", "  #pragma omp simd"]
            lines.append(f"  for (int64_t c = b; c < b_end; ++c) buf{n}[c - b] = {self.compute(n)};")
        lines += [f"  {self._reducer(n).accumulator} p{n} = 0;" for n in blocked]
        for n in dict.fromkeys(kernel.values[m].args[1] for m in merges):
            lines.append(f"  const {self._reducer(n).accumulator} old{n} = t{n}; (void)old{n};")
        lines += [f"  #pragma omp simd{self._clauses(scalars, blocked)}{self._noted(phase)}"]
        lines += ["  for (int64_t c = b; c < b_end; ++c) {", *(f"    {line}" for line in self._columns(rest)), "  }"]
        for n in merges:
            lines += [f"  {line}" for line in block_lines(kernel, n, self.scalars, self._element(n, phase))]
        return [*lines, *(f"  t{n} += p{n};" for n in blocked), "}"]

    def _element(self, merge: int, phase: ColumnPass) -> Element:
        """The element of a merge."""
        element = self.kernel.values[merge].args[0]
        wanted, stack = set(), [element]
        while stack:
            n = stack.pop()
            if n not in wanted and (n in phase.values or n in phase.buffer_reads):
                wanted.add(n)
                stack += [] if n in phase.buffer_reads else self.kernel.values[n].args
        own = dataclasses.replace(
            phase,
            values=tuple(n for n in phase.values if n in wanted),
            buffer_reads=tuple(n for n in phase.buffer_reads if n in wanted),
            reductions=(), sinks=(), stores=(),
        )  # fmt: skip
        return Element(self._columns(own), self.text(element), self._noted(own))
