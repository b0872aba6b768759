"""The C of rows that are shared among threads in chunks: fewer rows than threads, and long ones.

In: a kernel of which `knobs.can_chunk` is true. Out: the text of the function that works on a share, as `Body` gives
it. Layout of a share: items are chunks of rows, split evenly among threads. Each pass over the columns is done for all
chunks, and what a chunk has reduced is kept in memory that threads share; the next pass begins behind a barrier, and
each of its items brings the parts of its row together, in their order. What stands behind the last pass, one thread
does. Guarantee: the number of chunks and their places depend on sizes alone, so results have the same bits for any
number of threads. Names in the text: as in `tiled_sums.py`; ``part*`` hold what chunks have reduced.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofuse.codegen.c.body import COLUMN_SPLIT, SHARES
from autofuse.codegen.c.merge import fields, finish_lines, join_lines
from autofuse.codegen.c.tiled_sums import TiledBody
from autofuse.codegen.column_passes import ColumnPass, Plan
from autofuse.codegen.dtypes import VALUE_TYPE
from autofuse.codegen.loops import LoopKernel

_PART_BYTES = 8  # of a part, whatever its type


class ChunkBody(TiledBody):
    """Prints one kernel's loops in chunks of rows. The plan keeps no row buffers."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        super().__init__(kernel, plan, knobs)
        self.has_shares = False
        self.split_dim = kernel.cols[0]
        self.splits_columns = self.split_dim == self.last

    def items_limit(self) -> str:
        return f"nrows * {self._chunks()}"

    def _chunks(self) -> str:
        """C expression: chunks of a row."""
        size = f"n{self.split_dim}"
        wanted = f"nrows < {SHARES} && nrows > 0 ? {SHARES} / nrows : 1"
        by_length = f"ncols / {COLUMN_SPLIT}"
        return f"af_chunks({wanted}, {by_length}, {size})"

    def _column_range(self, dim: int) -> tuple[str, str]:
        return ("c_begin", "c_end") if dim == self.split_dim else ("0", f"n{dim}")

    def _next_row(self, phase: ColumnPass) -> list[str]:
        return []

    # ---- parts

    def _reduced(self, phase: ColumnPass) -> list[int]:
        """The reductions of a pass that chunks have parts of."""
        sinks = [n for n in phase.sinks if self.kernel.values[n].op == "full_reduce"]
        return [*phase.reductions, *sinks]

    def _fields(self, number: int) -> list[str]:
        return fields(self.kernel, number) if self.kernel.values[number].op == "row_merge" else [f"t{number}"]

    def _field_types(self) -> dict[str, str]:
        """The C type of each variable that chunks have parts of."""
        numbers = [n for phase in self.plan.phases for n in self._reduced(phase)]
        return {name: self._reducer(n).total for n in numbers for name in self._fields(n)}

    def scratch_layout(self) -> list[str]:
        lines = [f"  const int64_t chunks = {self._chunks()};"]
        offset = "0"
        for name in self._field_types():
            lines.append(f"  const int64_t at_part_{name} = {offset};")
            offset = f"at_part_{name} + AF_ALIGNED(nrows * chunks * {_PART_BYTES})"
        for n in (*self._sinks("full_reduce"), *self._sinks("rows_reduce")):
            lines.append(f"  const int64_t at_one{n} = {offset};")
            offset = f"at_one{n} + 64"
        return [*lines, f"  const int64_t scratch_bytes = {offset};"]

    def _scratch_pointers(self) -> list[str]:
        lines = [*self.scratch_layout(), "  char* const everyone = scratch - tid * scratch_bytes;"]
        for name, ctype in self._field_types().items():
            lines.append(f"  {ctype}* const part_{name} = ({ctype}*)(everyone + at_part_{name});")
        return lines

    def _complete(self, phase: ColumnPass) -> list[str]:
        names = [name for n in self._reduced(phase) for name in self._fields(n)]
        return [f"    part_{name}[item] = {name};" for name in names]

    def _joined(self, phase: ColumnPass) -> list[str]:
        """C lines of a pass's results, from the parts of the row."""
        lines: list[str] = []
        for n in phase.reductions:
            lines += [f"    {self._reducer(n).total} {name} = {self._start(n, name)};" for name in self._fields(n)]
        lines += ["    for (int64_t k = row * chunks; k < (row + 1) * chunks; ++k) {"]
        # A merge looks at the maximum before it has taken the part in.
        for n in sorted(phase.reductions, key=lambda n: self.kernel.values[n].op != "row_merge"):
            part = {name: f"part_{name}[k]" for name in self._field_types()}
            if self.kernel.values[n].op == "row_merge":
                lines += [f"      {line}" for line in join_lines(self.kernel, n, part)]
            else:
                lines.append(f"      {self._reducer(n).merge(f't{n}', part[f't{n}'])}")
        lines.append("    }")
        for n in phase.reductions:
            value = self.kernel.values[n]
            if value.op == "row_merge":
                lines += [f"    {line}" for line in finish_lines(self.kernel, n)]
            lines.append(f"    const {VALUE_TYPE[value.dtype]} x{n} = {self._reducer(n).finish(f't{n}')};")
        return lines if phase.reductions else []

    def _start(self, number: int, name: str) -> str:
        return self._reducer(number).start if name == f"t{number}" else "0"

    # ---- the function of a share of the rows

    def _items(self) -> list[str]:
        lines = ["  const int64_t begin = nrows * chunks * tid / team, end = nrows * chunks * (tid + 1) / team;"]
        for number, phase in enumerate(self.plan.phases):
            lines += self._pass(number, phase)
        return [*lines, *self._after_passes()]

    def _pass(self, number: int, phase: ColumnPass) -> list[str]:
        """One pass over the columns of all chunks."""
        digits = [*((f"r{d}", f"n{d}") for d in self.kernel.rows), ("chunk", "chunks")]
        size = f"n{self.split_dim}"
        mask = " & ~INT64_C(63)" if self.splits_columns else ""
        lines = ["  if (begin < end) {", *self._decode(digits)]
        lines += [
            "  for (int64_t item = begin; item < end; ++item) {",
            "    const int64_t row = item / chunks; (void)row;",
            f"    const int64_t c_begin = ({size} * chunk / chunks){mask};",
            f"    const int64_t c_end = chunk == chunks - 1 ? {size} : ({size} * (chunk + 1) / chunks){mask};",
            *self._pointer_lines("row", "    "),
            *self._known_before(number),
        ]
        for n in self._reduced(phase):
            if self.kernel.values[n].op == "full_reduce":
                lines.append(f"    {self._reducer(n).total} t{n} = {self._reducer(n).start};")
        lines += self._phase(phase)
        barrier = ["  if (team > 1) {", "    #pragma omp barrier", "  }"]
        return [*lines, *self._advance(digits), "  }", "  }", *barrier]

    def _known_before(self, number: int) -> list[str]:
        """C lines of what the passes before have made of the row."""
        lines: list[str] = []
        for phase in self.plan.phases[:number]:
            lines += self._declare_all(phase.row_values, "    ")
            lines += self._joined(phase)
        return lines

    def _after_passes(self) -> list[str]:
        """C lines of what follows the passes: values and stores of rows, and single results, by one thread."""
        sinks = [n for phase in self.plan.phases for n in phase.sinks]
        single = [*self._sinks("full_reduce"), *self._sinks("rows_reduce")]
        lines = [f"  {self._reducer(n).total} t{n} = {self._reducer(n).start};" for n in single]
        if self.plan.row_stores or self.plan.row_sinks:
            digits = [(f"r{d}", f"n{d}") for d in self.kernel.rows]
            lines += ["  if (tid == 0 && nrows > 0) {", "  const int64_t begin = 0;", *self._decode(digits)]
            lines += ["  for (int64_t row = 0; row < nrows; ++row) {", *self._pointer_lines("row", "    ")]
            lines += self._known_before(len(self.plan.phases))
            lines += self._declare_all(self.plan.last_row_values, "    ")
            for n in self.plan.row_sinks:
                lines.append(f"    {self._reducer(n).merge(f't{n}', self.text(self.kernel.values[n].args[0]))}")
            lines += [f"    {self.store(s)}" for s in self.plan.row_stores]
            lines += [*self._advance(digits), "  }", "  }"]
        if sinks:
            merged = " ".join(self._reducer(n).merge(f"t{n}", f"part_t{n}[k]") for n in sinks)
            lines.append(f"  if (tid == 0) for (int64_t k = 0; k < nrows * chunks; ++k) {{ {merged} }}")
        return lines
