"""The C of kernels some of whose tensors are dense along the rows and some along the columns: blocks of both.

In: a kernel of which `knobs.can_transpose` is true. Out: the text of the function that works on a share, as `Body`
gives it. Layout of a share: items are blocks of ``BLOCK_COLUMNS`` columns and ``BLOCK_ROWS`` rows. A block transposes
what it reads from tensors that are dense along the rows into a tile, and transposes what it writes to such tensors out
of a tile, in registers; in between its rows run along the columns as usual. Names in the text: as in `body.py`;
``turn*`` tiles of a block, ``turn*_`` a row of one.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofuse.codegen.c.body import Body
from autofuse.codegen.c.knobs import stride_along
from autofuse.codegen.c.scalar import memory_type
from autofuse.codegen.column_passes import Plan
from autofuse.codegen.dtypes import DTYPES
from autofuse.codegen.loops import Access, LoopKernel
from autofuse.ir.size_text import dim_text

BLOCK_ROWS, BLOCK_COLUMNS = 64, 16  # best of 8 to 64 each on an EPYC
_TILE_BYTES = 16 << 10  # of all tiles of a block: half of a first-level cache
_ELEMENT_BYTES = 4  # of an element that `af_turn` moves


class TransposedBody(Body):
    """Prints one kernel's loops in blocks of rows and columns."""

    def __init__(self, kernel: LoopKernel, plan: Plan, knobs: Mapping[str, object]) -> None:
        super().__init__(kernel, plan, knobs)
        self.streams = False
        self.row = kernel.rows[-1]
        # What is read under a test may lie outside of its tensor, so no tile can be filled with it beforehand.
        guarded = {v.attr for v in kernel.values if isinstance(v.attr, Access) and v.op != "load"}
        tiles = [a for a in self._pointers if a not in guarded and self._is_turned(a)]
        self._tiles = {access: f"turn{n}" for n, access in enumerate(tiles)}
        rows = BLOCK_ROWS
        while rows > 16 and len(tiles) * rows * BLOCK_COLUMNS * _ELEMENT_BYTES > _TILE_BYTES:
            rows //= 2
        self.block_rows = rows

    def _is_turned(self, access: Access) -> bool:
        along, across = (stride_along(access, dim) for dim in (self.row, self.last))
        return along == 1 and across not in (0, 1) and DTYPES[self._memory(access)].nbytes == _ELEMENT_BYTES

    def element(self, access: Access, c: str, extra: str = "") -> str:
        tile = self._tiles.get(access)
        return f"{tile}_[{c} - c_begin]" if tile is not None else super().element(access, c, extra)

    def _items(self) -> list[str]:
        """Items are blocks of rows and columns."""
        row, rows = f"r{self.row}", self.block_rows
        digits = [(f"r{d}", f"n{d}") for d in self.kernel.rows[:-1]]
        digits += [("rb", "row_blocks"), ("cb", "column_blocks")]
        total = " * ".join(size for _, size in digits)
        written = [s.access for s in self.kernel.stores if s.access in self._tiles]
        lines = [
            f"  const int64_t row_blocks = (n{self.row} + {rows - 1}) / {rows};",
            f"  const int64_t column_blocks = (ncols + {BLOCK_COLUMNS - 1}) / {BLOCK_COLUMNS};",
            *(f"  _Alignas(64) {self._tile_type(a)} {t}[{rows * BLOCK_COLUMNS}];" for a, t in self._tiles.items()),
            f"  const int64_t begin = ({total}) * tid / team, end = ({total}) * (tid + 1) / team;",
            "  if (begin < end) {",
            *self._decode(digits),
            "  for (int64_t item = begin; item < end; ++item) {",
            f"    const int64_t c_begin = cb * {BLOCK_COLUMNS}, r_begin = rb * {rows};",
            f"    const int64_t c_end = ncols - c_begin < {BLOCK_COLUMNS} ? ncols : c_begin + {BLOCK_COLUMNS};",
            f"    const int64_t r_end = n{self.row} - r_begin < {rows} ? n{self.row} : r_begin + {rows};",
            *self._turns([a for a in self._tiles if a not in written], is_read=True),
            f"    for (int64_t {row} = r_begin; {row} < r_end; ++{row}) {{",
            *self._pointer_lines("row", "    "),
        ]
        for access, tile in self._tiles.items():
            lines.append(
                f"    {self._tile_type(access)}* const {tile}_ = {tile} + ({row} - r_begin) * {BLOCK_COLUMNS};"
            )
        for phase in self.plan.phases:
            lines += self._phase(phase)
        lines += self._declare_all(self.plan.last_row_values, "    ")
        lines += [f"    if (cb == 0) {self.store(s)}" for s in self.plan.row_stores]
        return [*lines, "    }", *self._turns(written, is_read=False), *self._advance(digits), "  }", "  }"]

    def _tile_type(self, access: Access) -> str:
        return memory_type(self._memory(access))

    def _turns(self, accesses: list[Access], is_read: bool) -> list[str]:
        """C lines that fill tiles before the rows of a block, or write them out after these rows."""
        if not accesses:
            return []
        lines = ["    {", f"    const int64_t r{self.row} = r_begin;", *self._pointer_lines("row", "    ")]
        for access in accesses:
            step = dim_text(stride_along(access, self.last))
            memory = f"{self._pointers[access]} + c_begin * {step}, {step}"
            tile = f"{self._tiles[access]}, {BLOCK_COLUMNS}"
            if is_read:
                lines.append(f"    af_turn({tile}, {memory}, r_end - r_begin, c_end - c_begin);")
            else:
                lines.append(f"    af_turn({memory}, {tile}, c_end - c_begin, r_end - r_begin);")
        return [*lines, "    }"]
