"""The C of rows that are contiguous in memory: one pass over the columns works on many rows, one per lane.

In: a kernel whose rows are neighbours in memory and whose columns are not (statistics of channels that are stored last,
a softmax over a leading dim). Out: the text of the function that works on a share of the rows, as `Body` gives it.
Layout of a share: items are blocks of at most ``lane_block`` neighbouring rows; a column is read for all of them before
the next one is, so memory is read contiguously. Where there are fewer blocks than threads, these share a block: each
works on a part of the columns, and all add up the parts in the order of threads. Names in the text: as in `body.py`;
``l`` is a row's lane; ``lane*``, values of the block's rows, ``t*`` and ``p*`` are arrays; ``s*`` hold the totals of a
thread for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autofuse.codegen.c.body import Body, column_loop
from autofuse.codegen.c.knobs import LANES
from autofuse.codegen.c.scalar import memory_type
from autofuse.codegen.c.scan import carried_start, carried_type
from autofuse.codegen.column_passes import ColumnPass, Plan, scans_of
from autofuse.codegen.dtypes import VALUE_TYPE
from autofuse.codegen.loops import Access, LoopKernel

SHARE = 64  # columns that each thread has at least where threads share a block
_VECTOR = 16  # a block's rows are a multiple of this


class LaneBody(Body):
    """Prints one kernel's loops with rows as lanes. The plan keeps no row buffers."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        super().__init__(kernel, plan, knobs)
        self.lane = kernel.rows[-1]
        self.lanes = int(str(knobs.get("lane_block", LANES)))
        self.splits_columns = self.streams = False

    def items_limit(self) -> str:
        outer = " * ".join(f"n{d}" for d in self.kernel.rows[:-1]) or "1"
        return f"{outer} * ((n{self.lane} + {_VECTOR - 1}) / {_VECTOR}) + n{self.kernel.cols[0]} / {SHARE}"

    def scratch_layout(self) -> list[str]:
        """C lines that define the places of a thread's totals, in bytes; none where threads share nothing."""
        lines, offset = [], "0"
        for n in self._reductions() if self.parallel else ():
            lines.append(f"  const int64_t at_s{n} = {offset};")
            offset = f"at_s{n} + AF_ALIGNED({self.lanes} * sizeof({self._reducer(n).total}))"
        return [*lines, f"  const int64_t scratch_bytes = {offset};"] if lines else []

    def _scratch_pointers(self) -> list[str]:
        if not self.parallel or not self._reductions():
            return []
        return [*self.scratch_layout(), "  char* const everyone = scratch - tid * scratch_bytes;"]

    def _reductions(self) -> list[int]:
        return [n for phase in self.plan.phases for n in phase.reductions]

    # ---- accesses

    def element(self, access: Access, c: str, extra: str = "") -> str:
        """The element of the current column and lane.

        The access's pointer is at the block's first row and, where the access moves with the columns, at the current
        column.
        """
        terms = [self._product("l", s) for d, s in access.strides if d == self.lane]
        terms += [extra] if extra else []
        return f"{self._at(access)}[{' + '.join(terms) or '0'}]"

    def _at(self, access: Access) -> str:
        name = self._pointers[access]
        return f"{name}c" if self._moves(access) else name

    def _moves(self, access: Access) -> bool:
        return any(d == self.last for d, _ in access.strides)

    def _loop(self, dim: int, c: str) -> str:
        return "(l0 + l)" if dim == self.lane else super()._loop(dim, c)

    def _block_pointers(self, indent: str) -> list[str]:
        """C lines of pointers to the block's first row: `Body`'s, with ``l0`` as the position along the lane dim."""
        return [
            line.replace(f"r{self.lane}", "l0") if re.search(rf"\br{self.lane}\b", line) else line
            for line in self._pointer_lines("row", indent)
        ]

    def _at_column(self, used: Iterable[int], stores: Iterable[Access]) -> list[str]:
        accesses = [v.attr for v in (self.kernel.values[n] for n in used) if isinstance(v.attr, Access)]
        lines = []
        for access in dict.fromkeys([*accesses, *stores]):
            if not self._moves(access):
                continue
            param = self.kernel.params[access.param]
            const, name = "" if param.is_output else "const ", self._pointers[access]
            place = self._product("c", dict(access.strides)[self.last])
            lines.append(f"{const}{memory_type(param.dtype)}* const {name}c = {name} + {place};")
        return lines

    # ---- the function of a share of the rows

    def _items(self) -> list[str]:
        outer = self.kernel.rows[:-1]
        digits = [*((f"r{d}", f"n{d}") for d in outer), ("blk", "nblk")]
        count = " * ".join(f"n{d}" for d in outer) or "INT64_C(1)"
        lane, spread = f"n{self.lane}", f"n{self.kernel.cols[0]}"
        is_shared = f"team > 1 && outer * (({lane} + {self.lanes - 1}) / {self.lanes}) < 4 * team"
        is_shared = f"{is_shared} && {spread} >= {SHARE} * team" if self.parallel and not self.kernel.has_scan else "0"
        lines = [
            f"  const int64_t outer = {count};",
            f"  const int is_shared = {is_shared};",
            "  const int64_t wanted = is_shared || outer >= team || outer == 0 ? 1 : (team + outer - 1) / outer;",
            f"  int64_t width = (({lane} + wanted - 1) / wanted + {_VECTOR - 1}) / {_VECTOR} * {_VECTOR};",
            f"  width = width > {self.lanes} ? {self.lanes} : width < {_VECTOR} ? {_VECTOR} : width;",
            f"  const int64_t nblk = ({lane} + width - 1) / width, total = outer * nblk;",
            "  const int64_t begin = is_shared ? 0 : total * tid / team;",
            "  const int64_t end = is_shared ? total : total * (tid + 1) / team;",
            f"  const int64_t c_begin = is_shared ? {spread} * tid / team : 0;",
            f"  const int64_t c_end = is_shared ? {spread} * (tid + 1) / team : {spread};",
            "  if (begin < end) {",
            *self._decode(digits),
            "  for (int64_t item = begin; item < end; ++item) {",
            f"    const int64_t l0 = blk * width, lanes = {lane} - l0 < width ? {lane} - l0 : width;",
            *self._block_pointers("    "),
        ]
        for phase in self.plan.phases:
            lines += self._lane_values(phase.row_values)
            lines += self._phase(phase)
        lines += self._lane_values(self.plan.last_row_values)
        if self.plan.row_stores:
            read = [s.value for s in self.plan.row_stores]
            stores = self._over_lanes("      ", [*self._read(read), *(self.store(s) for s in self.plan.row_stores)])
            lines += ["    if (!is_shared || tid == 0) {", *stores, "    }"]
        lines += self._barrier("the next block's totals take the places of this one's")
        return [*lines, *self._advance(digits), "  }", "  }"]

    def _barrier(self, why: str) -> list[str]:
        if not self.parallel:
            return []
        return [f"    if (is_shared) {{  /* {why} */", "      #pragma omp barrier", "    }"]

    def _over_lanes(self, indent: str, body: list[str]) -> list[str]:
        head = [f"{indent}#pragma omp simd", f"{indent}for (int64_t l = 0; l < lanes; ++l) {{"]
        return [*head, *(f"{indent}  {line}" for line in body), f"{indent}}}"]

    def _array(self, name: str, ctype: str) -> str:
        return f"    _Alignas(64) {ctype} {name}[{self.lanes}];"

    def _is_lane_value(self, number: int) -> bool:
        return self.regions[number].name == "row" and self.kernel.values[number].op != "const"

    def _read(self, numbers: Iterable[int]) -> list[str]:
        """C lines that read, for the current lane, those of these values that the block holds as arrays."""
        found = sorted(n for n in set(numbers) if self._is_lane_value(n))
        return [f"const {VALUE_TYPE[self.kernel.values[n].dtype]} x{n} = lane{n}[l];" for n in found]

    def _operands(self, numbers: Iterable[int]) -> list[int]:
        return [a for n in numbers for a in self.kernel.values[n].args]

    def _lane_values(self, numbers: tuple[int, ...]) -> list[str]:
        made = [n for n in numbers if self._is_lane_value(n)]
        if not made:
            return []
        lines = [self._array(f"lane{n}", VALUE_TYPE[self.kernel.values[n].dtype]) for n in made]
        known = [n for n in self._operands(made) if n not in made]
        body = [*self._read(known)]
        for n in made:
            body += [self.declare(n), f"lane{n}[l] = x{n};"]
        return [*lines, *self._over_lanes("    ", body)]

    # ---- a pass over the columns

    def carried(self, number: int) -> str:
        return f"run{number}[l]"

    def _phase(self, phase: ColumnPass) -> list[str]:
        lines = []
        for n in scans_of(self.kernel, phase):
            ctype = carried_type(self.kernel.values[n])
            lines += [self._array(f"run{n}", ctype)] if self._is_first(n, phase) else []
            lines += self._over_lanes("    ", [f"run{n}[l] = {carried_start(self.kernel.values[n])};"])
        for n in phase.reductions:
            r, ctype = self._reducer(n), VALUE_TYPE[self.kernel.values[n].dtype]
            lines += [self._array(f"t{n}", r.total), self._array(f"lane{n}", ctype)]
            lines += [self._array(f"p{n}", r.accumulator)] if r.widens else []
            lines += [self._array(f"nan{n}", "int32_t")] if r.nan_flag else []
            start = f"t{n}[l] = {r.start};" + (f" nan{n}[l] = 0;" if r.nan_flag else "")
            lines += self._over_lanes("    ", [start])
        depth, outer = "    ", self.kernel.cols[:-1]
        for d in outer:
            start, stop = ("c_begin", "c_end") if d == outer[0] else ("0", f"n{d}")
            lines.append(f"{depth}for (int64_t c{d} = {start}; c{d} < {stop}; ++c{d}) {{")
            depth += "  "
        if outer:
            used = [self.kernel.values[n].attr for n in phase.values] + [s.access for s in phase.stores]
            lines += self._column_pointers(depth, [a for a in used if isinstance(a, Access)])
        lines += [f"{depth}{line}" for line in self._innermost(phase)]
        for _ in outer:
            depth = depth[:-2]
            lines.append(f"{depth}}}")
        for n in phase.reductions:
            r = self._reducer(n)
            if r.nan_flag:
                lines += self._over_lanes("    ", [r.noted(f"t{n}[l]", f"nan{n}[l]")])
        if self.parallel and phase.reductions:
            lines += self._share(phase)
        for n in phase.reductions:
            lines += self._over_lanes("    ", [f"lane{n}[l] = {self._reducer(n).finish(f't{n}[l]')};"])
        return lines

    def _share(self, phase: ColumnPass) -> list[str]:
        """C lines with which each thread adds up the totals of all threads, in the same order."""
        lines = ["    if (is_shared) {"]
        for n in phase.reductions:
            ctype = self._reducer(n).total
            lines.append(f"      {ctype}* const s{n} = ({ctype}*)(scratch + at_s{n});")
            lines += self._over_lanes("      ", [f"s{n}[l] = t{n}[l];"])
        lines.append("      #pragma omp barrier")
        for n in phase.reductions:
            r = self._reducer(n)
            lines += self._over_lanes("      ", [f"t{n}[l] = {r.start};"])
            lines.append("      for (int64_t k = 0; k < team; ++k) {")
            lines.append(
                f"        const {r.total}* const s = (const {r.total}*)(everyone + k * scratch_bytes + at_s{n});"
            )
            lines += self._over_lanes("        ", [r.merge(f"t{n}[l]", "s[l]")])
            lines.append("      }")
        return [*lines, "    }"]

    def _innermost(self, phase: ColumnPass) -> list[str]:
        blocked = [n for n in phase.reductions if self._reducer(n).widens]
        body = [
            *self._at_column(phase.values, [s.access for s in phase.stores]),
            *self._over_lanes("", self._columns(phase)),
        ]
        start, stop = ("0", f"n{self.last}") if self.kernel.cols[:-1] else ("c_begin", "c_end")
        if scans_of(self.kernel, phase):
            return self._carrying_lanes(phase, blocked, body)
        if not blocked:
            return [f"for (int64_t c = {start}; c < {stop}; ++c) {{", *(f"  {line}" for line in body), "}"]
        return [
            f"for (int64_t b = {start}; b < {stop}; b += {self.block}) {{",
            f"  const int64_t b_end = {stop} - b < {self.block} ? {stop} : b + {self.block};",
            *self._over_lanes("  ", [" ".join(f"p{n}[l] = 0;" for n in blocked)]),
            "  for (int64_t c = b; c < b_end; ++c) {",
            *(f"    {line}" for line in body),
            "  }",
            *self._over_lanes("  ", [" ".join(f"t{n}[l] += p{n}[l];" for n in blocked)]),
            "}",
        ]

    def _carrying_lanes(self, phase: ColumnPass, blocked: list[int], body: list[str]) -> list[str]:
        """`_innermost` of a pass with scans: columns in the scans' direction."""
        zero, sums = ([f"p{n}[l] = 0;" for n in blocked], [f"t{n}[l] += p{n}[l]; p{n}[l] = 0;" for n in blocked])
        lines = [*(self._over_lanes("", zero) if zero else []), *column_loop(self.kernel, phase, f"n{self.last}")]
        lines += [f"  {line}" for line in body]
        if blocked:
            lines += [f"  if ((c & {self.block - 1}) == 0) {{", *self._over_lanes("    ", sums), "  }"]
        return [*lines, "}", *(self._over_lanes("", sums) if sums else [])]

    def _columns(self, phase: ColumnPass) -> list[str]:
        """Statements for one element."""
        made = [n for n in phase.values if self.kernel.values[n].op != "const"]
        ends = [self.kernel.values[n].args[0] for n in phase.reductions] + [s.value for s in phase.stores]
        lines = self._read([*self._operands(made), *ends])
        lines += [self.declare(n) for n in made if not self._is_inlined(n)]
        for n in phase.reductions:
            r, argument = self._reducer(n), self.text(self.kernel.values[n].args[0])
            lines.append(r.update(f"{'p' if r.widens else 't'}{n}[l]", argument))
            if r.nan_flag:
                lines.append(r.update_flag(f"nan{n}[l]", argument))
        return [*lines, *(self.store(s) for s in phase.stores)]
