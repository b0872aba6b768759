"""The C of the loop nest: rows, passes over columns, reductions, and what follows the nest.

In: a kernel, its passes and the chosen knobs. Out: the text of the function that works on a share of the rows, and
the statements that come before and after it.
Layout of a share: items are rows (or, without row reductions, parts of rows too), split evenly among threads.
Names in the text: ``r*`` row dims, ``c*`` column dims (``c`` is the vectorised one), ``x*`` values, ``p*`` partial sums
of a block, ``t*`` totals, ``buf*`` row buffers, ``acc*`` and ``tot*`` column sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from autofuse.codegen.c_reduce import REDUCERS, Reducer
from autofuse.codegen.c_scalar import dim_text, expression, literal, load_text, memory_type, store_text
from autofuse.codegen.dtypes import VALUE_TYPE
from autofuse.codegen.loops import COST, SINKS, Access, LoopKernel, Store, regions
from autofuse.codegen.phases import Phase, Plan
from autofuse.ir.shape import Dim

BLOCK = 256  # columns whose partial sums stay in the compute dtype; their sums are added in double
FLUSH = 32  # rows whose column sums stay in the compute dtype
COLUMN_SPLIT = 4096  # a row is shared among threads only in parts of at least so many columns


_COMPARISON = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class Body:
    """Prints one kernel's loops."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        self.kernel = kernel
        self.plan = plan
        self.regions = regions(kernel)
        self.parallel = knobs.get("threads", "parallel") == "parallel"
        self.inline_math = knobs.get("math", "inline") == "inline"
        self.last = kernel.cols[-1]
        self.splits_columns = kernel.kind in ("pointwise", "full") and len(kernel.cols) == 1
        heavy = any(COST.get(v.op, 1) >= 12 for v in kernel.values)
        self.serial_below = 8192 if heavy else 32768
        self._widened = frozenset(n for p in plan.phases for n in p.widened)
        self._place = "lin + c" if len(kernel.cols) > 1 else "c"  # a column's place in a row buffer
        self._pointers: dict[Access, str] = {}
        for access in self._accesses():
            name = kernel.params[access.param].name
            taken = sum(1 for a in self._pointers if a.param == access.param)
            self._pointers.setdefault(access, f"{name}_{taken}" if taken else f"{name}_")

    # ---- facts

    def _accesses(self) -> list[Access]:
        loads = [v.attr for v in self.kernel.values if isinstance(v.attr, Access)]
        return [*loads, *(s.access for s in self.kernel.stores)]

    def _reducer(self, number: int) -> Reducer:
        value = self.kernel.values[number]
        reducer = REDUCERS[str(value.attr)](value.dtype)
        if value.op == "full_reduce" and reducer.widens:
            # A loss adds up a whole tensor and may cancel to almost nothing: in double from the first addition on.
            return dataclasses.replace(reducer, accumulator=reducer.total, widens=False)
        return reducer

    def items_limit(self) -> str:
        """How many threads can have something to do."""
        return f"nrows * ((ncols + {COLUMN_SPLIT - 1}) / {COLUMN_SPLIT})" if self.splits_columns else "nrows"

    def work_text(self) -> str:
        return "nrows * ncols"

    def _sinks(self, op: str) -> list[int]:
        return [n for n in self.kernel.sinks if self.kernel.values[n].op == op]

    # ---- expressions

    def text(self, number: int) -> str:
        """A value where it is used."""
        value = self.kernel.values[number]
        if value.op == "const":
            return literal(value.attr, value.dtype)
        return f"({self._inline(number)})" if self._is_inlined(number) else f"x{number}"

    def _is_inlined(self, number: int) -> bool:
        """Truth values inside of column loops are written where they are used: as variables they cost a register."""
        value = self.kernel.values[number]
        return value.dtype == "bool" and self.regions[number].cols and value.op not in ("const", *SINKS)

    def _inline(self, number: int) -> str:
        if number in self._widened:
            return f"buf{number}[{self._place}] != 0"
        return self.compute(number)

    def compute(self, number: int, c: str = "c") -> str:
        """The C expression that makes a value."""
        value = self.kernel.values[number]
        if value.op == "load":
            return load_text(self.element(value.attr, c), self._memory(value.attr))  # type: ignore[arg-type]
        if value.op == "gather":
            access: Access = value.attr  # type: ignore[assignment]
            place = self._product(self.text(value.args[0]), access.indirect)
            return load_text(self.element(access, c, place), self._memory(access))
        if value.op == "size":
            return f"({VALUE_TYPE[value.dtype]}){dim_text(value.attr)}"
        if value.op == "index":
            return " + ".join(self._product(self._loop(d, c), s) for d, s in value.attr)  # type: ignore[attr-defined]
        if (narrow := self._position_test(number, c)) is not None:
            return narrow
        operands = [self.kernel.values[a] for a in value.args]
        plain = [o.op == "const" and o.attr != "nan" for o in operands]
        return expression(
            value, [self.text(a) for a in value.args], [o.dtype for o in operands], plain, self.inline_math
        )

    def _position_test(self, number: int, c: str) -> str | None:
        """A comparison of the column's position with something known per row, in 32 bits.

        In 64 bits it would halve the vector length of a whole loop of floats. Exact below 2^31 columns, which
        the driver checks: the other side is clamped to the range of 32 bits.
        """
        value = self.kernel.values[number]
        if value.op not in ("eq", "ne", "lt", "le", "gt", "ge") or not self.kernel.rows:
            return None
        a, b = value.args
        for here, other, op in ((a, b, value.op), (b, a, _MIRRORED[value.op])):
            position = self.kernel.values[here]
            if position.op == "index" and position.attr == ((self.last, 1),) and not self.regions[other].cols:
                return f"(int32_t){c} {_COMPARISON[op]} af_narrow({self.text(other)})"
        return None

    @property
    def tests_positions(self) -> bool:
        return any(self._position_test(n, "c") for n in range(len(self.kernel.values)))

    def _memory(self, access: Access) -> str:
        return self.kernel.params[access.param].dtype

    def _loop(self, dim: int, c: str) -> str:
        if dim == self.last:
            return c
        return f"{'r' if dim in self.kernel.rows else 'c'}{dim}"

    @staticmethod
    def _product(name: str, stride: Dim) -> str:
        return name if stride == 1 else f"{name} * {dim_text(stride)}"

    def element(self, access: Access, c: str, extra: str = "") -> str:
        """The lvalue of an access inside the innermost loop."""
        terms = [self._product(c, s) for d, s in access.strides if d == self.last]
        if extra:
            terms.append(extra)
        return f"{self._pointers[access]}[{' + '.join(terms) or '0'}]"

    def declare(self, number: int, c: str = "c") -> str:
        value = self.kernel.values[number]
        return f"const {VALUE_TYPE[value.dtype]} x{number} = {self.compute(number, c)};"

    def _declare_all(self, numbers: Sequence[int], indent: str) -> list[str]:
        return [
            f"{indent}{self.declare(n)}"
            for n in numbers
            if self.kernel.values[n].op not in ("const", "row_reduce", *SINKS) and not self._is_inlined(n)
        ]

    def store(self, store: Store, c: str = "c") -> str:
        value = store_text(self.text(store.value), self._memory(store.access))
        return f"{self.element(store.access, c)} = {value};"

    # ---- pointers

    def _parameters(self) -> list[str]:
        lines = []
        for n, param in enumerate(self.kernel.params):
            const = "" if param.is_output else "const "
            ctype = memory_type(param.dtype)
            lines.append(
                f"  {const}{ctype}* restrict const {param.name} = ({const}{ctype}*)ptrs[{n}]; (void){param.name};"
            )
        return lines

    def _pointer_lines(self, where: str, indent: str) -> list[str]:
        """Pointers that move with the row (``row``), with nothing (``entry``)."""
        lines = []
        for access, name in self._pointers.items():
            moving = [(d, s) for d, s in access.strides if d in self.kernel.rows]
            if bool(moving) != (where == "row"):
                continue
            param = self.kernel.params[access.param]
            const = "" if param.is_output else "const "
            offset = "".join(f" + {self._product(f'r{d}', s)}" for d, s in moving)
            label = name + ("b" if self._column_terms(access) else "")
            lines.append(
                f"{indent}{const}{memory_type(param.dtype)}* const {label} = {param.name}{offset}; (void){label};"
            )
        return lines

    def _column_terms(self, access: Access) -> list[tuple[int, Dim]]:
        """Outer column dims an access moves with: its pointer is set anew in their loops."""
        return [(d, s) for d, s in access.strides if d in self.kernel.cols and d != self.last]

    def _column_pointers(self, indent: str, used: Sequence[Access]) -> list[str]:
        lines = []
        for access in dict.fromkeys(used):
            moving = self._column_terms(access)
            if moving:
                param = self.kernel.params[access.param]
                const = "" if param.is_output else "const "
                name = self._pointers[access]
                offset = "".join(f" + {self._product(f'c{d}', s)}" for d, s in moving)
                lines.append(f"{indent}{const}{memory_type(param.dtype)}* const {name} = {name}b{offset};")
        return lines

    # ---- scratch memory

    def scratch_layout(self) -> list[str]:
        """Offsets of a thread's scratch memory, in bytes; empty where a kernel needs none."""
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
        lines = [
            f"static void {kernel.name}_rows(",
            "    const int64_t* sizes, void** ptrs, char* scratch, int64_t tid, int64_t team) {",
            "@SIZES@",
            *self._parameters(),
            "  (void)scratch; (void)tid; (void)team;",
            *self._scratch_pointers(),
            *self._pointer_lines("entry", "  "),
            *self._declare_all(self.plan.entry_values, "  "),
            *self._items(),
        ]
        lines += self._finish_share()
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
        """The first item's position in each row dim; later ones follow by counting."""
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

    def _phase(self, phase: Phase) -> list[str]:
        lines = self._declare_all(phase.row_values, "    ")
        for n in phase.reductions:
            reducer = self._reducer(n)
            lines.append(f"    {reducer.total} t{n} = {reducer.start};")
        scalars = [*phase.reductions, *(n for n in phase.sinks if self.kernel.values[n].op == "full_reduce")]
        flagged = [n for n in scalars if self._reducer(n).nan_flag]
        lines += [f"    int32_t nan{n} = 0;" for n in flagged]
        body, depth = self._innermost(phase), "    "
        outer = self.kernel.cols[:-1]
        for d in outer:
            lines.append(f"{depth}for (int64_t c{d} = 0; c{d} < n{d}; ++c{d}) {{")
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
        for n in phase.widened:
            stop = f"n{self.last}"
            source = self.compute(n)
            lines += [
                f"{depth}#pragma omp simd",
                f"{depth}for (int64_t c = 0; c < {stop}; ++c) buf{n}[{self._place}] = {source};",
            ]
        lines += [f"{depth}{line}" for line in body]
        for _ in outer:
            depth = depth[:-2]
            lines.append(f"{depth}}}")
        lines += [f"    {self._reducer(n).noted(f't{n}', f'nan{n}')}" for n in flagged]
        for n in phase.reductions:
            value = self.kernel.values[n]
            lines.append(f"    const {VALUE_TYPE[value.dtype]} x{n} = {self._reducer(n).finish(f't{n}')};")
        return lines

    def _innermost(self, phase: Phase) -> list[str]:
        start, stop = ("c_begin", "c_end") if self.splits_columns else ("0", f"n{self.last}")
        scalars = [*phase.reductions, *(n for n in phase.sinks if self.kernel.values[n].op == "full_reduce")]
        blocked = [n for n in scalars if self._reducer(n).widens]
        clauses = "".join(f" reduction({self._reducer(n).clause}:{'p' if n in blocked else 't'}{n})" for n in scalars)
        clauses += "".join(f" reduction(|:nan{n})" for n in scalars if self._reducer(n).nan_flag)
        inner = [f"  {line}" for line in self._columns(phase)]
        if not blocked:
            return [f"#pragma omp simd{clauses}", f"for (int64_t c = {start}; c < {stop}; ++c) {{", *inner, "}"]
        lines = [
            f"for (int64_t b = {start}; b < {stop}; b += {BLOCK}) {{",
            f"  const int64_t b_end = {stop} - b < {BLOCK} ? {stop} : b + {BLOCK};",
        ]
        lines += [f"  {self._reducer(n).accumulator} p{n} = 0;" for n in blocked]
        lines += [f"  #pragma omp simd{clauses}", "  for (int64_t c = b; c < b_end; ++c) {"]
        lines += [f"  {line}" for line in inner]
        lines += ["  }", *(f"  t{n} += p{n};" for n in blocked), "}"]
        return lines

    def _columns(self, phase: Phase) -> list[str]:
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
        return [*lines, *(self.store(s) for s in phase.stores)]

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
        """Combine the threads' results in thread order and write what depends on them."""
        if not self.plan.post_stores:
            return []
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
        along = [s for s in plan.post_stores if self._has_columns(s)]
        lines += [f"  {self.store(s)}" for s in plan.post_stores if s not in along]
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

    def _has_columns(self, store: Store) -> bool:
        dims = {d for d, _ in store.access.strides}
        return self.regions[store.value].cols or bool(dims & set(self.kernel.cols))
