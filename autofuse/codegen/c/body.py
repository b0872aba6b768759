"""The C of the loop nest: rows, passes over columns, reductions, and the code after the nest.

In: a kernel, its passes and the chosen knobs. Out: the text of the function that works on a share of the rows, and
the statements that come before and after it.
Layout of a share: items are rows (or, without row reductions, parts of rows too), split evenly among threads.
Names in the text: ``r*`` row dims, ``c*`` column dims (``c`` is the vectorised one), ``x*`` values, ``p*`` partial sums
of a block, ``t*`` totals, ``buf*`` row buffers, ``acc*`` and ``tot*`` column sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.c.knobs import can_stream, is_streamable
from autofuse.codegen.c.scalar import memory_type, store_text
from autofuse.codegen.c.scan import carried_start, carried_type
from autofuse.codegen.c.values import ValuePrinter
from autofuse.codegen.column_passes import ColumnPass, Plan, scans_of, split_by_columns
from autofuse.codegen.dtypes import DTYPES, VALUE_TYPE
from autofuse.codegen.loops import COST, Access, LoopKernel, Scan, Store
from autofuse.ir.size_text import dim_text

BLOCK = 256  # columns that are summed in the compute dtype; the sums of blocks are added in double
FLUSH = 32  # rows whose column sums are added in the compute dtype, before they go to the double totals
TILE = 512  # columns of a tile that is converted to half or stored past the caches as a whole
LINE_BYTES = 64
SHARES = 64  # parts of a nest's work, where its single results are the same for any number of threads
COLUMN_SPLIT = 4096  # a row is shared among threads only in parts of at least so many columns


def column_loop(kernel: LoopKernel, phase: ColumnPass, stop: str) -> list[str]:
    """C lines that open the loop over columns of a pass with scans, in their direction."""
    attr = kernel.values[scans_of(kernel, phase)[0]].attr
    if isinstance(attr, Scan) and attr.is_reversed:
        return [f"for (int64_t c = {stop}; c-- > 0;) {{"]
    return [f"for (int64_t c = 0; c < {stop}; ++c) {{"]


class Body(ValuePrinter):
    """Prints one kernel's loops."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        super().__init__(kernel, plan, knobs)
        self.parallel = knobs.get("threads", "parallel") == "parallel"
        self.splits_columns = kernel.kind in ("pointwise", "full") and len(kernel.cols) == 1
        heavy = any(COST.get(v.op, 1) >= 12 for v in kernel.values)
        self.serial_below = 8192 if heavy else 32768  # in points of the nest; aten's own grain is 32768
        self.block = int(str(knobs.get("sum_block", BLOCK)))
        self.streams = bool(knobs.get("nontemporal", False)) and can_stream(kernel)
        # Each share has column sums and row buffers of its own: 64 times their memory would be too much.
        keeps_rows = bool(plan.buffered) or bool(self._sinks("col_reduce"))
        self.has_shares = bool(self._sinks("full_reduce") or self._sinks("rows_reduce")) and not keeps_rows

    def items_limit(self) -> str:
        """C expression: how many threads can have work."""
        return f"nrows * ((ncols + {COLUMN_SPLIT - 1}) / {COLUMN_SPLIT})" if self.splits_columns else "nrows"

    def work_text(self) -> str:
        return "nrows * ncols"

    @property
    def outside(self) -> str:
        """C text of a further parameter of a share's function: where it notes that an index is out of its bounds."""
        return ", int64_t* outside" if self.kernel.bounds else ""

    # ---- scratch memory

    def scratch_layout(self) -> list[str]:
        """C lines that define the offsets in a thread's scratch memory, in bytes; none where a kernel needs none."""
        pieces: list[tuple[str, str]] = []
        for n in self.plan.buffered:
            pieces.append((f"buf{n}", f"ncols * sizeof({VALUE_TYPE[self.kernel.values[n].dtype]})"))
        for n in self._sinks("col_reduce"):
            reducer = self._reducer(n)
            pieces.append((f"acc{n}", f"ncols * sizeof({reducer.accumulator})"))
            if reducer.widens:
                pieces.append((f"tot{n}", f"ncols * sizeof({reducer.total})"))
        for n in (*self._sinks("full_reduce"), *self._sinks("rows_reduce")):
            pieces.append((f"one{n}", "64"))
        lines, offset = [], "0"
        for name, size in pieces:
            lines.append(f"  const int64_t at_{name} = {offset};")
            offset = f"at_{name} + AF_ALIGNED({size})"
        return [*lines, f"  const int64_t scratch_bytes = {offset};"] if lines else []

    def _scratch_pointers(self) -> list[str]:
        lines = [line for line in self.scratch_layout() if "scratch_bytes" not in line]
        for n in self.plan.buffered:
            ctype = VALUE_TYPE[self.kernel.values[n].dtype]
            lines.append(f"  {ctype}* restrict const buf{n} = ({ctype}*)(scratch + at_buf{n});")
        for n in self._sinks("col_reduce"):
            reducer = self._reducer(n)
            start = f"acc{n}[k] = {reducer.start};"
            lines.append(
                f"  {reducer.accumulator}* restrict const acc{n} = ({reducer.accumulator}*)(scratch + at_acc{n});"
            )
            if reducer.widens:
                lines.append(f"  {reducer.total}* restrict const tot{n} = ({reducer.total}*)(scratch + at_tot{n});")
                start += f" tot{n}[k] = 0;"
            lines.append(f"  for (int64_t k = 0; k < ncols; ++k) {{ {start} }}")
        for n in (*self._sinks("full_reduce"), *self._sinks("rows_reduce")):
            reducer = self._reducer(n)
            lines.append(f"  {reducer.total} t{n} = {reducer.start};")
        return lines

    # ---- the function of a share of the rows

    def function(self) -> str:
        kernel = self.kernel
        # Of a function that works on one row, gcc 12 thinks that it runs once, and leaves its loops as they are: the
        # logarithm of a sum of exponentials of 4M floats took 80 ms, 3 ms where gcc must not look at the call (AVX2).
        apart = "" if kernel.rows or not kernel.has_row_reduce else "__attribute__((noipa)) "
        lines = [
            f"static {apart}void {kernel.name}_rows(",
            f"    const int64_t* sizes, void** ptrs, char* scratch, int64_t tid, int64_t team{self.outside}) {{",
            "@SIZES@",
            *(["  int64_t bad = 0;"] if kernel.bounds else []),
            *self._parameters(),
            "  (void)scratch; (void)tid; (void)team;",
            *self._scratch_pointers(),
            *self._pointer_lines("entry", "  "),
            *self._declare_all(self.plan.entry_values, "  "),
            *self._items(),
        ]
        lines += self._finish_share()
        if self.streams:
            lines.append("  af_stream_fence();")
        if kernel.bounds:
            lines.append("  if (bad < 0) __atomic_store_n(outside, -1, __ATOMIC_RELAXED);")
        return "\n".join([*lines, "}", ""])

    def _items(self) -> list[str]:
        digits = [(f"r{d}", f"n{d}") for d in self.kernel.rows]
        lines: list[str] = []
        if self.splits_columns:
            lines.append(f"  const int64_t nblk = team == 1 || nrows >= 4 * team || ncols < {COLUMN_SPLIT} ? 1 : team;")
            digits.append(("blk", "nblk"))
            total = "nrows * nblk"
        else:
            total = "nrows"
        lines += [
            f"  const int64_t begin = ({total}) * tid / team, end = ({total}) * (tid + 1) / team;",
            "  if (begin < end) {",
        ]
        if self._flushed():
            lines.append("  int64_t pending = 0;")
        lines += self._decode(digits)
        lines.append("  for (int64_t item = begin; item < end; ++item) {")
        if self.splits_columns:
            lines += [
                "    const int64_t c_begin = blk == 0 ? 0 : (ncols * blk / nblk) & ~INT64_C(63);",
                "    const int64_t c_end = blk == nblk - 1 ? ncols : (ncols * (blk + 1) / nblk) & ~INT64_C(63);",
            ]
        lines += self._pointer_lines("row", "    ")
        for phase in self.plan.phases:
            lines += self._phase(phase)
        lines += self._declare_all(self.plan.last_row_values, "    ")
        for n in self.plan.row_sinks:
            lines.append(f"    {self._reducer(n).merge(f't{n}', self.text(self.kernel.values[n].args[0]))}")
        lines += [f"    {self.store(s)}" for s in self.plan.row_stores]
        lines += self._flush("    ", f"if (++pending == {FLUSH}) {{ pending = 0;", "}")
        lines += self._advance(digits)
        lines += ["  }", *self._flush("  ", "", ""), "  }"]
        return lines

    def _decode(self, digits: list[tuple[str, str]]) -> list[str]:
        """C lines that calculate the first item's position in each row dim; `_advance` counts on from it."""
        if not digits:
            return []
        if len(digits) == 1:
            return [f"  int64_t {digits[0][0]} = begin;"]
        lines = ["  int64_t rest = begin;"]
        for name, size in reversed(digits[1:]):
            lines.append(f"  int64_t {name} = rest % {size}; rest /= {size};")
        return [*lines, f"  int64_t {digits[0][0]} = rest;"]

    def _advance(self, digits: list[tuple[str, str]]) -> list[str]:
        if not digits:
            return []
        text = f"++{digits[0][0]};"
        for name, size in digits[1:]:
            text = f"if (++{name} == {size}) {{ {name} = 0; {text} }}"
        return [f"    {text}"]

    # ---- a pass over the columns

    def _phase(self, phase: ColumnPass) -> list[str]:
        lines = self._declare_all(phase.row_values, "    ")
        for n in scans_of(self.kernel, phase):
            value = self.kernel.values[n]
            ctype = f"{carried_type(value)} " if self._is_first(n, phase) else ""
            lines.append(f"    {ctype}run{n} = {carried_start(value)};")
        for n in phase.reductions:
            reducer = self._reducer(n)
            lines.append(f"    {reducer.total} t{n} = {reducer.start};")
        scalars = [*phase.reductions, *(n for n in phase.sinks if self.kernel.values[n].op == "full_reduce")]
        flagged = [n for n in scalars if self._reducer(n).nan_flag]
        # OpenMP combines a total with those of the lanes, and loses the NaN of an earlier row.
        lines += [f"    int32_t nan{n} = {'0' if n in phase.reductions else f't{n} != t{n}'};" for n in flagged]
        body, depth = self._innermost(phase), "    "
        outer = self.kernel.cols[:-1]
        for d in outer:
            start, stop = self._column_range(d)
            lines.append(f"{depth}for (int64_t c{d} = {start}; c{d} < {stop}; ++c{d}) {{")
            depth += "  "
        if outer:
            linear = f"c{outer[0]}"
            for d in outer[1:]:
                linear = f"({linear} * n{d} + c{d})"
            lines.append(f"{depth}const int64_t lin = {linear} * n{self.last}; (void)lin;")
            used = [self.kernel.values[n].attr for n in (*phase.values, *phase.widened)] + [
                s.access for s in phase.stores
            ]
            lines += self._column_pointers(depth, [a for a in used if isinstance(a, Access)])
        lines += [f"{depth}{line}" for line in (*self._widen(phase), *body)]
        for _ in outer:
            depth = depth[:-2]
            lines.append(f"{depth}}}")
        lines += [f"    {self._reducer(n).noted(f't{n}', f'nan{n}')}" for n in flagged]
        return lines + self._complete(phase)

    def _widen(self, phase: ColumnPass) -> list[str]:
        """Loops over the columns that fill the row buffers of narrow loads."""
        lines = []
        for n in phase.widened:
            lines.append("#pragma omp simd")
            lines.append(f"for (int64_t c = 0; c < n{self.last}; ++c) buf{n}[{self._place}] = {self.compute(n)};")
        return lines

    def _column_range(self, dim: int) -> tuple[str, str]:
        """Where the loop over a column dim begins and ends."""
        return ("c_begin", "c_end") if self.splits_columns and dim == self.last else ("0", f"n{dim}")

    def _complete(self, phase: ColumnPass) -> list[str]:
        """C lines that name the results of a pass."""
        lines = []
        for n in phase.reductions:
            value = self.kernel.values[n]
            lines.append(f"    const {VALUE_TYPE[value.dtype]} x{n} = {self._reducer(n).finish(f't{n}')};")
        return lines

    def _is_first(self, number: int, phase: ColumnPass) -> bool:
        """Whether no earlier pass makes a value too."""
        return not any(number in p.values for p in self.plan.phases if p.stage < phase.stage)

    def _innermost(self, phase: ColumnPass) -> list[str]:
        start, stop = self._column_range(self.last)
        scalars = [*phase.reductions, *(n for n in phase.sinks if self.kernel.values[n].op == "full_reduce")]
        blocked = [n for n in scalars if self._reducer(n).widens]
        clauses = self._clauses(scalars, blocked) + self._noted(phase)
        inner = [f"  {line}" for line in self._columns(phase)]
        packs = any(self._memory(s.access) == "float16" for s in phase.stores)
        ahead = self._next_row(phase)
        if (self.streams or packs) and is_streamable(self.kernel, phase):
            return self._tiled(phase, start, stop, ahead)
        if scans_of(self.kernel, phase):
            return self._carrying(phase, blocked, inner)
        if not blocked:
            return [f"#pragma omp simd{clauses}", f"for (int64_t c = {start}; c < {stop}; ++c) {{", *inner, "}"]
        lines = [
            f"for (int64_t b = {start}; b < {stop}; b += {self.block}) {{",
            f"  const int64_t b_end = {stop} - b < {self.block} ? {stop} : b + {self.block};",
        ]
        lines += [f"  {self._reducer(n).accumulator} p{n} = 0;" for n in blocked] + ahead
        lines += [f"  #pragma omp simd{clauses}", "  for (int64_t c = b; c < b_end; ++c) {"]
        lines += [f"  {line}" for line in inner]
        lines += ["  }", *(f"  t{n} += p{n};" for n in blocked), "}"]
        return lines

    def _clauses(self, scalars: list[int], blocked: list[int]) -> str:
        """OpenMP's names of the reductions of a loop."""
        clauses = "".join(f" reduction({self._reducer(n).clause}:{'p' if n in blocked else 't'}{n})" for n in scalars)
        return clauses + "".join(f" reduction(|:nan{n})" for n in scalars if self._reducer(n).nan_flag)

    def _carrying(self, phase: ColumnPass, blocked: list[int], inner: list[str]) -> list[str]:
        """A loop over columns that scans carry something along: one by one, and perhaps from the last to the first."""
        stop = f"n{self.last}"
        lines = [f"{self._reducer(n).accumulator} p{n} = 0;" for n in blocked]
        lines += [*column_loop(self.kernel, phase, stop), *inner]
        if blocked:
            sums = " ".join(f"t{n} += p{n}; p{n} = 0;" for n in blocked)
            lines.append(f"  if ((c & {self.block - 1}) == 0) {{ {sums} }}")
        return [*lines, "}", *(f"t{n} += p{n};" for n in blocked)]

    def _next_row(self, phase: ColumnPass) -> list[str]:
        """C lines that prefetch the next row during a block's arithmetic, so that the two overlap.

        Only for tensors that are larger than the caches, and in the first costly pass after the one that reads the row.
        """
        costly = [p for p in self.plan.phases if p.stage > 0 and self._is_costly(p)]
        if not self.streams or not costly or phase is not costly[0] or len(self.kernel.cols) > 1:
            return []
        lines = []
        for value in self.kernel.values:
            if value.op != "load" or not isinstance(value.attr, Access):
                continue
            strides, name = dict(value.attr.strides), self._pointers[value.attr]
            step = LINE_BYTES // DTYPES[self._memory(value.attr)].nbytes
            if self.kernel.rows and self.kernel.rows[-1] in strides and strides.get(self.last) == 1:
                place = f"&{name}[c + {dim_text(strides[self.kernel.rows[-1]])}]"
                lines.append(f"  for (int64_t c = b; c < b_end; c += {step}) __builtin_prefetch({place});")
        return list(dict.fromkeys(lines))

    def _is_costly(self, phase: ColumnPass) -> bool:
        return any(COST.get(self.kernel.values[n].op, 1) >= 12 for n in phase.values)

    def _tiled(self, phase: ColumnPass, start: str, stop: str, ahead: list[str]) -> list[str]:
        """A loop over tiles of columns that stay in the first-level cache until they are converted or streamed.

        Tiles are converted to half, which no compiler vectorises with the CPU's own instructions, though these need
        half of the time; streams go to memory past the caches.
        """
        lines = [f"for (int64_t b = {start}; b < {stop}; b += {TILE}) {{"]
        lines.append(f"  const int64_t b_end = {stop} - b < {TILE} ? {stop} : b + {TILE};")
        stores, after = [], []
        for k, store in enumerate(phase.stores):
            memory, target = self._memory(store.access), f"&{self.element(store.access, 'b')}"
            value = self._unrounded(store, phase)
            if self.streams:
                lines.append(f"  _Alignas(64) {memory_type(memory)} tile{k}[{TILE}];")
            if memory == "float16":
                lines.append(f"  _Alignas(64) float wide{k}[{TILE}];")
                stores.append(f"    wide{k}[c - b] = {self.text(value)};")
                after.append(f"  af_pack_float16({f'tile{k}' if self.streams else target}, wide{k}, b_end - b);")
            elif self.streams:
                stores.append(f"    tile{k}[c - b] = {store_text(self.text(value), memory)};")
            else:
                stores.append(f"    {self.store(dataclasses.replace(store, value=value))}")
            if self.streams:
                after.append(f"  af_stream({target}, tile{k}, (b_end - b) * (int64_t)sizeof(tile{k}[0]));")
        lines += [*ahead, f"  #pragma omp simd{self._noted(phase)}", "  for (int64_t c = b; c < b_end; ++c) {"]
        values = dataclasses.replace(phase, stores=())
        lines += [f"    {line}" for line in self._columns(values)] + stores + ["  }"]
        return [*lines, *after, "}"]

    def _noted(self, phase: ColumnPass) -> str:
        """The clause of a loop that looks at indices."""
        return " reduction(|:bad)" if any(self.kernel.values[n].op == "checked" for n in phase.values) else ""

    def _columns(self, phase: ColumnPass) -> list[str]:
        """Statements for one column."""
        place = self._place
        lines = []
        for n in sorted((*phase.values, *phase.buffer_reads)):
            if self._is_inlined(n):
                continue
            if n in phase.buffer_reads:
                lines.append(f"const {VALUE_TYPE[self.kernel.values[n].dtype]} x{n} = buf{n}[{place}];")
            elif self.kernel.values[n].op != "const":
                lines.append(self.declare(n))
            if n in phase.buffer_writes:
                lines.append(f"buf{n}[{place}] = x{n};")
        for n in (*phase.reductions, *phase.sinks):
            reducer, argument = self._reducer(n), self.text(self.kernel.values[n].args[0])
            if self.kernel.values[n].op == "col_reduce":
                lines.append(reducer.merge(f"acc{n}[{place}]", argument))
                continue
            lines.append(reducer.update(f"{'p' if reducer.widens else 't'}{n}", argument))
            if reducer.nan_flag:
                lines.append(reducer.update_flag(f"nan{n}", argument))
        return [*lines, *(self.store(dataclasses.replace(s, value=self._unrounded(s, phase))) for s in phase.stores)]

    def _unrounded(self, store: Store, phase: ColumnPass) -> int:
        """The value to store, without a cast to the store's own dtype: with it, it would be converted three times."""
        value = self.kernel.values[store.value]
        repeats = value.op == "round_to" and value.attr == self._memory(store.access)
        is_made_here = store.value in phase.values and store.value not in phase.buffer_reads
        return value.args[0] if repeats and is_made_here else store.value

    # ---- column sums and single results

    def _flushed(self) -> list[int]:
        return [n for n in self._sinks("col_reduce") if self._reducer(n).widens]

    def _flush(self, indent: str, opening: str, closing: str) -> list[str]:
        """Add the column sums of the last rows to their totals."""
        flushed = self._flushed()
        if not flushed:
            return []
        inner = " ".join(f"tot{n}[k] += acc{n}[k]; acc{n}[k] = 0;" for n in flushed)
        lines = [f"{indent}{opening}"] if opening else []
        lines += [f"{indent}#pragma omp simd", f"{indent}for (int64_t k = 0; k < ncols; ++k) {{ {inner} }}"]
        return [*lines, f"{indent}{closing}"] if closing else lines

    def _finish_share(self) -> list[str]:
        lines = []
        for n in (*self._sinks("full_reduce"), *self._sinks("rows_reduce")):
            lines.append(f"  *({self._reducer(n).total}*)(scratch + at_one{n}) = t{n};")
        return lines

    # ---- after the nest

    def post(self) -> list[str]:
        """Combine the results of threads or shares in their order and write what depends on them."""
        if not self.plan.post_stores:
            return []
        self._widened = frozenset()  # buffers of a row are the nest's
        kernel, plan = self.kernel, self.plan
        lines = [*self._parameters(), *self._pointer_lines("entry", "  ")]
        lines += self._declare_all(plan.entry_values, "  ")
        for n in (*self._sinks("full_reduce"), *self._sinks("rows_reduce")):
            reducer = self._reducer(n)
            lines += [
                f"  {reducer.total} t{n} = {reducer.start};",
                f"  for (int64_t k = 0; k < used; ++k) "
                f"{reducer.merge(f't{n}', f'*({reducer.total}*)(scratch + k * scratch_bytes + at_one{n})')}",
                f"  const {VALUE_TYPE[kernel.values[n].dtype]} x{n} = {reducer.finish(f't{n}')};",
            ]
        per_column = [n for n in plan.post_values if self.regions[n].cols]
        lines += self._declare_all(
            [n for n in plan.post_values if not self.regions[n].cols and n not in plan.entry_values], "  "
        )
        single, along = split_by_columns(kernel, plan.post_stores, self.regions)
        lines += [f"  {self.store(s)}" for s in single]
        if not along:
            return lines
        depth = "  "
        for d in kernel.cols[:-1]:
            lines.append(f"{depth}for (int64_t c{d} = 0; c{d} < n{d}; ++c{d}) {{")
            depth += "  "
        outer = kernel.cols[:-1]
        linear = f"c{outer[0]}" if outer else ""
        for d in outer[1:]:
            linear = f"({linear} * n{d} + c{d})"
        if outer:
            lines.append(f"{depth}const int64_t lin = {linear} * n{self.last}; (void)lin;")
            used = [kernel.values[n].attr for n in per_column] + [s.access for s in along]
            lines += self._column_pointers(depth, [a for a in used if isinstance(a, Access)])
        lines.append(f"{depth}for (int64_t c = 0; c < n{self.last}; ++c) {{")
        place = "lin + c" if outer else "c"
        for n in self._sinks("col_reduce"):
            reducer = self._reducer(n)
            array, ctype = ("tot", reducer.total) if reducer.widens else ("acc", reducer.accumulator)
            source = f"(({ctype}*)(scratch + k * scratch_bytes + at_{array}{n}))[{place}]"
            lines += [
                f"{depth}  {ctype} t{n} = {reducer.start};",
                f"{depth}  for (int64_t k = 0; k < used; ++k) {reducer.merge(f't{n}', source)}",
                f"{depth}  const {VALUE_TYPE[kernel.values[n].dtype]} x{n} = {reducer.finish(f't{n}')};",
            ]
        lines += self._declare_all(per_column, f"{depth}  ")
        lines += [f"{depth}  {self.store(s)}" for s in along]
        lines.append(f"{depth}}}")
        for _ in outer:
            depth = depth[:-2]
            lines.append(f"{depth}}}")
        return lines
