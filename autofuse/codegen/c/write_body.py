"""The C of a nest that writes to places which are data.

In: a kernel whose stores are puts (`loops.PUTS`). Out: the text of the function of a thread's share, as of any nest.
Guarantee: elements that go to one place are combined in the order of the loops, by one thread: threads share the
outermost row loop where each of its rounds has places of its own, else the columns where each has, else one thread
does all. Columns are vectorised only where each has a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.codegen.c.body import Body
from autofuse.codegen.c.scalar import load_text, store_text
from autofuse.codegen.column_passes import ColumnPass
from autofuse.codegen.loops import PUTS, Access, Store

GRAIN = 16  # columns: a cache line of floats, which two threads should not share


class WriteBody(Body):
    """Prints the loops of a write."""

    @property
    def _own(self) -> frozenset[int]:
        """The loops that move the place by themselves: two of their rounds never write to one place."""
        access = self.kernel.stores[0].access
        return frozenset(dim for dim, stride in access.strides if stride != 0)

    @property
    def _shares(self) -> str:
        """What threads share: "rows", "columns" or nothing."""
        if self.kernel.rows and self.kernel.rows[0] in self._own:
            return "rows"
        return "columns" if len(self.kernel.cols) == 1 and self.last in self._own else ""

    def items_limit(self) -> str:
        """C expression: how many threads can have work."""
        columns = f"(ncols + {GRAIN - 1}) / {GRAIN}"
        return {"rows": f"n{self.kernel.rows[0] if self.kernel.rows else 0}", "columns": columns}.get(self._shares, "1")

    def _items(self) -> list[str]:
        kernel, shared = self.kernel, self._shares
        start, stop = "0", "nrows"
        if shared == "rows":
            inner = " * ".join(f"n{d}" for d in kernel.rows[1:]) or "1"
            first = f"n{kernel.rows[0]}"
            start, stop = f"{first} * tid / team * ({inner})", f"{first} * (tid + 1) / team * ({inner})"
        lines = [f"  const int64_t begin = {start}, end = {stop};"]
        if shared == "columns":
            lines += [
                f"  const int64_t c_begin = (ncols * tid / team) & ~INT64_C({GRAIN - 1});",
                f"  const int64_t c_end = tid == team - 1 ? ncols : "
                f"(ncols * (tid + 1) / team) & ~INT64_C({GRAIN - 1});",
            ]
        digits = [(f"r{d}", f"n{d}") for d in kernel.rows]
        lines += ["  if (begin < end) {", *self._decode(digits)]
        lines += ["  for (int64_t item = begin; item < end; ++item) {", *self._pointer_lines("row", "    ")]
        for phase in self.plan.phases:
            lines += self._phase(phase)
        lines += self._declare_all(self.plan.last_row_values, "    ")
        lines += [f"    {self.store(s)}" for s in self.plan.row_stores]
        return [*lines, *self._advance(digits), "  }", "  }"]

    def _innermost(self, phase: ColumnPass) -> list[str]:
        start, stop = ("c_begin", "c_end") if self._shares == "columns" else ("0", f"n{self.last}")
        simd = [f"#pragma omp simd{self._noted(phase)}"] if self.last in self._own else []
        inner = [f"  {line}" for line in self._columns(phase)]
        return [*simd, f"for (int64_t c = {start}; c < {stop}; ++c) {{", *inner, "}"]

    def _columns(self, phase: ColumnPass) -> list[str]:
        return [line for line in super()._columns(phase) if line]

    def _declare_all(self, numbers: Sequence[int], indent: str) -> list[str]:
        return super()._declare_all([n for n in numbers if self.kernel.values[n].op not in PUTS], indent)

    def declare(self, number: int, c: str = "c") -> str:
        return "" if self.kernel.values[number].op in PUTS else super().declare(number, c)

    def store(self, store: Store, c: str = "c") -> str:
        """The statement that puts a value to its place."""
        put = self.kernel.values[store.value]
        value, place, guard = put.args
        access, memory = store.access, self._memory(store.access)
        assert isinstance(access, Access)
        target = self.element(access, c, self._product(self.text(place), access.indirect))
        new, old = self.text(value), load_text(target, memory)
        found = {
            "put_set": new,
            "put_add": f"{old} + {new}",
            "put_mul": f"{old} * {new}",
            "put_max": f"({new} > {old} || {new} != {new}) ? {new} : {old}",
            "put_min": f"({new} < {old} || {new} != {new}) ? {new} : {old}",
        }[put.op]
        statement = f"{target} = {store_text(f'({found})' if put.op != 'put_set' else found, memory)};"
        always = self.kernel.values[guard].op == "const"
        return statement if always else f"if ({self.text(guard)}) {statement}"
