"""The Triton of a loop nest: which program works on which tile, what it calculates there, what it hands on.

In: a loop kernel and a configuration. Out: the text of one or two kernels, and how they are launched.
A tile is BLOCK_ROWS rows by BLOCK_COLS columns. A value that depends on neither is one element, on rows a [R, 1]
block, on columns a [1, C] block, on both an [R, C] block; broadcasting does the rest. Three forms:

- one tile a program (no reduction over rows): element-wise work, and row reductions whose row fits the tile;
- looped columns (``persistent=False``): a pass over the columns for each row reduction that the next one needs;
- shared tiles (reductions over rows): programs loop over tiles, keep accumulators, and hand their results to a second
  kernel through scratch memory, or finish by themselves where the configuration gives the work to one program. Beside
  looped columns no register can hold a column's sum until the next row: it grows in scratch memory.

Names in the text: ``r`` and ``c`` positions of rows and columns, ``r0`` .. ``c1`` those along single dims, ``x*``
values, ``a*`` accumulators, ``t*`` partial results in scratch memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.column_passes import ColumnPass, plan, store_region
from autofuse.codegen.loops import GUARDED, SINKS, Access, LoopKernel, Region, Store, regions
from autofuse.codegen.triton.scalar import (
    POINTERS,
    TAKES_LITERALS,
    TYPES,
    Reducer,
    can_be_literal,
    constant,
    expression,
    literal,
    load_text,
    store_text,
)
from autofuse.codegen.triton.source import RANDOM, Argument, Pass, Scratch
from autofuse.ir.dims import TRITON, dim_text
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim, as_dim, product

PARTIALS = 16  # partial results of a column that the second kernel adds up at a time
FINISH_COLS = 128  # columns of its tiles


@dataclass(frozen=True)
class Piece:
    """One kernel of the module."""

    text: str
    launch: Pass


class Body:
    """Prints one loop kernel with one configuration."""

    def __init__(
        self, kernel: LoopKernel, config: Config, constants: Mapping[str, int], is_called: bool = False
    ) -> None:
        """``is_called``: by a kernel that finds the program's number and has it as the first argument."""
        knobs = dict(config)
        self.kernel = kernel
        self.is_called = is_called
        self.constants = constants
        self.block_rows = int(knobs.get("BLOCK_ROWS", 1)) if kernel.rows else 1
        self.is_persistent = bool(knobs.get("persistent", True))
        self.block_cols = int(knobs["ROW_BLOCK" if "ROW_BLOCK" in knobs and self.is_persistent else "BLOCK_COLS"])
        self.shared_cols = self.block_cols  # columns of the tiles that the first kernel shares out
        self.stages = int(knobs.get("num_stages", 1))
        self.programs = int(knobs.get("PROGRAMS", 0))
        self.wide = int(knobs.get("index_bits", 32)) == 64
        self.fast = knobs.get("math", "precise") == "fast"
        self.streams = knobs.get("eviction", "none") == "first"
        self.regions = regions(kernel)
        self.plan = plan(kernel, keep=False, widen=False)
        self.live = self._live()
        self.sinks = [n for n in self.live if kernel.values[n].op in SINKS]
        self.row_reduces = [n for n in self.live if kernel.values[n].op == "row_reduce"]
        self.nrows: Dim = as_dim(product(self._dim(d) for d in kernel.rows)) if kernel.rows else 1
        self.ncols: Dim = as_dim(product(self._dim(d) for d in kernel.cols))
        self.is_looped = bool(self.row_reduces) and not self.is_persistent
        self.col_sinks = [n for n in self.sinks if kernel.values[n].op == "col_reduce"]
        self.one_sinks = [n for n in self.sinks if n not in self.col_sinks]
        self.has_column_tiles = not self.row_reduces  # else a program sees whole rows
        self._places = {id(s): store_region(kernel, s, self.regions) for s in kernel.stores}
        self.grown = self.col_sinks if self.is_looped else []  # in scratch memory from the first row on
        needs_second = bool(self.grown) or bool(self.col_sinks and self.one_sinks)
        self.is_alone = bool(self.sinks) and self.programs == 1 and not needs_second

    # ---- facts

    def _dim(self, number: int) -> Dim:
        dim = self.kernel.dims[number]
        if isinstance(dim, int):
            return dim
        return as_dim(dim.xreplace({s: self.constants[str(s)] for s in dim.free_symbols if str(s) in self.constants}))

    def _live(self) -> list[int]:
        wanted = {s.value for s in self.kernel.stores}
        for n in range(len(self.kernel.values) - 1, -1, -1):
            if n in wanted:
                wanted.update(self.kernel.values[n].args)
        return sorted(wanted)

    def limits(self) -> tuple[tuple[Dim, int], ...]:
        """Sizes beyond which the kernels are wrong: rows longer than their tile, offsets beyond 32 bits."""
        found: list[tuple[Dim, int]] = []
        if self.row_reduces and not self.is_looped:
            found.append((self.ncols, self.block_cols))
        if not self.wide:
            found += [(extent, INDEX_BOUND) for extent in self._extents()]
            found += [(as_dim(self.ncols * self.programs), INDEX_BOUND)] * bool(self.grown)
        return tuple((size, bound) for size, bound in found if not (isinstance(size, int) and size <= bound))

    def _extents(self) -> tuple[Dim, ...]:
        return extents(self.kernel)

    @property
    def _row_mask(self) -> str:
        return "" if not self.kernel.rows or _fills(self.nrows, self.block_rows) else "row_mask"

    @property
    def _col_mask(self) -> str:
        return "" if _fills(self.ncols, self.block_cols) else "col_mask"

    def _mask(self, rows: bool, cols: bool, extra: str = "") -> str:
        parts = [self._row_mask if rows else "", self._col_mask if cols else "", extra]
        return " & ".join(p for p in parts if p)

    def _reducer(self, number: int) -> Reducer:
        value = self.kernel.values[number]
        return Reducer(str(value.attr), value.dtype, wide=number in self.one_sinks)

    def _region(self, number: int) -> Region:
        return self.regions[number]

    # ---- sizes and positions

    def size(self, dim: Dim) -> str:
        if not isinstance(dim, int):
            table = {s: self.constants[str(s)] for s in dim.free_symbols if str(s) in self.constants}
            dim = as_dim(dim.xreplace(table))
        return dim_text(dim, TRITON)

    def _sizes(self) -> list[str]:
        return [f"nrows = {self.size(self.nrows)}", f"ncols = {self.size(self.ncols)}"]

    def _arange(self, start: str, block: str, axis: int) -> str:
        span = f"tl.arange(0, {block})" + (".to(tl.int64)" if self.wide else "")
        return f"{start} + {span}"[4 * (start == "0") :] + ("[:, None]" if axis == 0 else "[None, :]")

    def _positions(self, what: str, dims: Sequence[int]) -> list[str]:
        """Positions along single dims from the flat position ``r`` or ``c``."""
        if len(dims) == 1:
            return []
        lines, rest = [], what
        for d in reversed(dims[1:]):
            size = self.size(self._dim(d))
            size = size if size.isalnum() else f"({size})"
            lines.append(f"{what}{d} = {rest} % {size}")
            lines.append(f"{what}_rest = {rest} // {size}")
            rest = f"{what}_rest"
        return [*lines, f"{what}{dims[0]} = {rest}"]

    def _row_positions(self, tile: str) -> list[str]:
        if not self.kernel.rows:
            return []
        lines = [f"r = {self._arange(f'{tile} * BLOCK_ROWS', 'BLOCK_ROWS', 0)}"]
        if self._row_mask:
            lines.append("row_mask = r < nrows")
        return lines + self._positions("r", self.kernel.rows)

    def _col_positions(self, start: str) -> list[str]:
        lines = [f"c = {self._arange(start, 'BLOCK_COLS', 1)}"]
        if self._col_mask:
            lines.append("col_mask = c < ncols")
        return lines + self._positions("c", self.kernel.cols)

    def _loop(self, dim: int) -> str:
        what, dims = ("r", self.kernel.rows) if dim in self.kernel.rows else ("c", self.kernel.cols)
        return what if len(dims) == 1 else f"{what}{dim}"

    def _linear(self, strides: Iterable[tuple[int, Dim]]) -> str:
        terms = []
        for d, stride in strides:
            text = self.size(stride)
            terms.append(self._loop(d) if text == "1" else f"{self._loop(d)} * {text}")
        return " + ".join(terms)

    def _pointer(self, access: Access, extra: str = "") -> str:
        name = self.kernel.params[access.param].name
        start = self.size(access.offset) if access.offset != 0 else ""
        offset = " + ".join(t for t in (self._linear(access.strides), extra, start) if t)
        return f"{name} + {offset}" if offset else f"{name} + tl.full([1, 1], 0, tl.int32)"

    # ---- values

    def text(self, number: int, as_literal: bool = False) -> str:
        value = self.kernel.values[number]
        if value.op != "const":
            return f"x{number}"
        if as_literal and can_be_literal(value.dtype):
            return literal(value.attr, value.dtype)
        return constant(value.attr, value.dtype)

    def _compute(self, number: int) -> str:
        value, region = self.kernel.values[number], self._region(number)
        if isinstance(value.attr, Access):
            access = value.attr
            index, gathers = "", value.op.startswith("gather")
            guard = self.text(value.args[-1]) if value.op in GUARDED else ""
            if gathers:
                stride = self.size(access.indirect)
                index = self.text(value.args[0]) + ("" if stride == "1" else f" * {stride}")
            dims = {d for d, _ in access.strides}
            in_rows = region.rows if gathers else bool(dims & set(self.kernel.rows))
            in_cols = region.cols
            policy = "evict_first" if self.streams and in_rows and in_cols else ""
            memory = self.kernel.params[access.param].dtype
            if guard:  # the mask is as wide as the guard, and the pointers must be as wide as the mask
                index = " + ".join(t for t in (index, f"{guard}.to(tl.int32) * 0") if t)
            return load_text(self._pointer(access, index), memory, self._mask(in_rows, in_cols, guard), policy)
        if value.op == "size":
            return f"tl.full([1, 1], {self.size(value.attr)}, {TYPES[value.dtype]})"
        if value.op == "index":
            return f"({self._linear(value.attr)}).to(tl.int64)"  # type: ignore[arg-type]
        if value.op == "uniform":
            place = self.text(value.args[0]) + ("" if self.wide else ".to(tl.int32)")
            return f"af_uniform({', '.join([place, *(a.name for a in self._random())])})"
        operands = [self.kernel.values[a] for a in value.args]
        # a literal takes its type from the operand beside it: one must not be a constant
        inline = value.op in TAKES_LITERALS and any(o.op != "const" for o in operands[-2:])
        return expression(value, [self.text(a, inline) for a in value.args], operands, self.fast)

    def _values(self, numbers: Iterable[int]) -> list[str]:
        skipped = ("const", "row_reduce", *SINKS)
        return [f"x{n} = {self._compute(n)}" for n in numbers if self.kernel.values[n].op not in skipped]

    def _store(self, store: Store, extra: str = "") -> str:
        """A store at the tile's positions; one that rows or columns do not reach is done by the first tile alone."""
        dims = {d for d, _ in store.access.strides}
        in_rows, in_cols = bool(dims & set(self.kernel.rows)), bool(dims & set(self.kernel.cols))
        mask = self._mask(in_rows, in_cols, extra)
        memory = self.kernel.params[store.access.param].dtype
        return store_text(self._pointer(store.access), self.text(store.value), memory, mask)

    # ---- reductions

    def _element(self, number: int, reducer: Reducer, in_rows: bool, in_cols: bool, extra: str = "") -> str:
        """What a reduction takes from each place of the tile: neutral beyond the ends."""
        argument = self.kernel.values[number].args[0]
        text = reducer.taken(self.text(argument), self.kernel.values[argument].dtype)
        mask = self._mask(in_rows, in_cols, extra)
        return f"tl.where({mask}, {text}, {reducer.neutral})" if mask else text

    def _whole_rows(self, number: int) -> list[str]:
        """A row reduction over a tile that holds whole rows."""
        reducer = self._reducer(number)
        argument = self._element(number, reducer, False, True)
        lines = []
        if not self._region(self.kernel.values[number].args[0]).cols:
            argument = f"tl.broadcast_to({argument}, [BLOCK_ROWS, BLOCK_COLS])"
        if reducer.keeps_nan or not argument.isidentifier():
            lines.append(f"a{number} = {argument}")
            argument = f"a{number}"
        return [*lines, f"x{number} = {reducer.finished(reducer.reduced(argument, 1))}"]

    def _accumulator_shape(self, number: int) -> str:
        value = self.kernel.values[number]
        if value.op == "rows_reduce":
            return "[BLOCK_ROWS, 1]"
        return "[BLOCK_ROWS, BLOCK_COLS]"

    def _accumulate(self, number: int, extra: str = "") -> str:
        value, reducer = self.kernel.values[number], self._reducer(number)
        in_cols = value.op != "rows_reduce"
        element = self._element(number, reducer, value.op != "row_reduce", in_cols, extra)
        return f"a{number} = {reducer.merged(f'a{number}', element)}"

    # ---- one tile

    def _tile(self, hoisted: set[int]) -> list[str]:
        """All values of a tile in order, with the row reductions, which see whole rows."""
        lines: list[str] = []
        for n in self.live:
            if n in hoisted or self._region(n).post:
                continue
            lines += self._whole_rows(n) if n in self.row_reduces else self._values([n])
        return lines

    def _hoisted(self) -> set[int]:
        """Values that no row changes: made once, before a loop over tiles of rows."""
        with_columns = not self.is_looped and not (self.one_sinks and not self.col_sinks and self.has_column_tiles)
        return {
            n
            for n in self.live
            if not self._region(n).rows
            and not self._region(n).post
            and (with_columns or not self._region(n).cols)
            and self.kernel.values[n].op not in ("const", *SINKS)
        }

    def _passes_over_columns(self, indent: str, hoisted: set[int]) -> list[str]:
        """Looped columns: row reductions in stages, each stage a loop that makes anew what it needs."""
        lines: list[str] = []
        for phase in self.plan.phases:
            lines += [indent + t for t in self._values(n for n in phase.row_values if n not in hoisted)]
            lines += self._pass_over_columns(phase, indent)
        lines += [indent + t for t in self._values(n for n in self.plan.last_row_values if n not in hoisted)]
        return lines

    def _pass_over_columns(self, phase: ColumnPass, indent: str) -> list[str]:
        reducers = {n: self._reducer(n) for n in phase.reductions}
        lines = [f"a{n} = {r.start(self._accumulator_shape(n))}" for n, r in reducers.items()]
        lines.append(f"for start in tl.range(0, ncols, BLOCK_COLS, num_stages={self.stages}):")
        inner = [*self._col_positions("start"), *self._values(phase.values)]
        inner += [self._accumulate(n) for n in (*phase.reductions, *phase.sinks) if n not in self.grown]
        grown = [n for n in phase.sinks if n in self.grown]
        inner += [line for n in grown for line in self._grow(n)]
        inner += [self._store(s) for s in phase.stores]
        lines += [f"    {t}" for t in inner]
        lines += ["tl.debug_barrier()"] * bool(grown)  # other threads read the sums for the next rows
        lines += [f"x{n} = {r.finished(r.reduced(f'a{n}', 1))}" for n, r in reducers.items()]
        return [indent + t for t in lines]

    def _share_of(self, number: int) -> str:
        """Where a program keeps its part of a column's result."""
        share = "share" if self.has_column_tiles else "pid"
        return f"t{self.sinks.index(number)} + {share} * ncols + c"

    def _grow(self, number: int) -> list[str]:
        """Add the rows of a tile to what scratch memory holds of its columns."""
        reducer, name = self._reducer(number), f"a{number}"
        mask = self._tail_mask()
        before = f"tl.load({self._share_of(number)}{mask}{f', other={reducer.neutral}' if mask else ''})"
        element = self._element(number, reducer, True, True)
        if not self._region(self.kernel.values[number].args[0]).rows:  # each row adds it all the same
            element = f"tl.broadcast_to({element}, [BLOCK_ROWS, BLOCK_COLS])"
        return [
            f"{name} = {element}",
            f"{name} = {reducer.reduced(name, 0)}",
            f"{name} = {reducer.merged(name, before)}",
            f"tl.store({self._share_of(number)}, {name}{mask})",
        ]

    def _begin_growing(self) -> list[str]:
        """Neutral elements in scratch memory: a share of no rows has results too."""
        if not self.grown:
            return []
        inner = self._col_positions("start")
        for n in self.grown:
            start = self._reducer(n).start("[1, BLOCK_COLS]")
            inner.append(f"tl.store({self._share_of(n)}, {start}{self._tail_mask()})")
        return ["for start in tl.range(0, ncols, BLOCK_COLS):", *(f"    {t}" for t in inner), "tl.debug_barrier()"]

    # ---- the first kernel

    def first(self) -> Piece:
        lines = self._sizes()
        if self.sinks:
            lines += self._shared()
            shared = 1 if self.col_sinks or not self.has_column_tiles or not self.kernel.rows else 2
        else:
            lines += self._single()
            shared = 0
        tiles: list[tuple[Dim, int]] = []
        if self.kernel.rows or (shared and not self.has_column_tiles):
            tiles.append((self.nrows, self.block_rows))
        if self.has_column_tiles:
            tiles.append((self.ncols, self.block_cols))
        if not tiles:
            tiles.append((1, 1))
        arguments = [*self._parameters(), *self._scratch_arguments(), *self._symbols()]
        if self.sinks:
            arguments.append(Argument("programs", "programs", "i32"))
        return self._piece(self.kernel.name, arguments, lines, tuple(tiles), shared)

    def _single(self) -> list[str]:
        """One tile a program."""
        lines = [] if self.is_called else [f"pid = {self._pid()}"]
        row_tile, first_col, first_row = "pid", "", ""
        if self.has_column_tiles:
            if self.kernel.rows:
                lines += ["col_tiles = tl.cdiv(ncols, BLOCK_COLS)", "row_tile = pid // col_tiles"]
                lines += ["col_tile = pid % col_tiles"]
                row_tile, first_col, first_row = "row_tile", "(col_tile == 0)", "(row_tile == 0)"
            else:
                lines.append("col_tile = pid")
                first_col = "(col_tile == 0)"
            start = "col_tile * BLOCK_COLS"
        else:
            start, first_row = "0", "(pid == 0)" if self.kernel.rows else ""
        lines += self._row_positions(row_tile)
        if self.is_looped:
            lines += self._values(self.plan.entry_values)
            lines += self._passes_over_columns("", set())
            lines += [self._store(s) for s in self.plan.row_stores]
            lines += self._stores_without_rows(first_row)
            return lines
        lines += self._col_positions(start)
        lines += self._tile(set())
        for store in self.kernel.stores:
            place = self._places[id(store)]
            extra = " & ".join(t for t in ("" if place.rows else first_row, "" if place.cols else first_col) if t)
            lines.append(self._store(store, extra))
        return lines

    def _stores_without_rows(self, first: str) -> list[str]:
        """Outputs of a looped kernel that no row changes: written by the first program, in a loop of their own."""
        lines = [self._store(s, first) for s in self.plan.post_stores if not self._places[id(s)].cols]
        along = [s for s in self.plan.post_stores if self._places[id(s)].cols]
        if along:
            lines.append("for start in tl.range(0, ncols, BLOCK_COLS):")
            inner = [
                *self._col_positions("start"),
                *self._values(n for n in self.plan.post_values if self._region(n).cols),
            ]
            lines += [f"    {t}" for t in [*inner, *(self._store(s, first) for s in along)]]
        return lines

    def _shared(self) -> list[str]:
        """Programs that loop over tiles and reduce over rows."""
        lines = [f"pid = {self._pid()}"]
        hoisted = self._hoisted()
        in_loop: list[str] = []
        extra = ""  # of reductions whose element has no columns, where tiles of columns share a row
        if self.col_sinks and self.has_column_tiles:
            lines += [
                "col_tiles = tl.cdiv(ncols, BLOCK_COLS)",
                "share = pid // col_tiles",
                "col_tile = pid % col_tiles",
            ]
            lines += self._col_positions("col_tile * BLOCK_COLS")
            count, start, row_tile, extra = "tl.cdiv(nrows, BLOCK_ROWS)", "share", "tile", "(col_tile == 0)"
        elif not self.has_column_tiles:
            lines += [] if self.is_looped else self._col_positions("0")
            count, start, row_tile = "tl.cdiv(nrows, BLOCK_ROWS)", "pid", "tile"
        elif self.kernel.rows:
            lines.append("col_tiles = tl.cdiv(ncols, BLOCK_COLS)")
            in_loop += ["row_tile = tile // col_tiles", "col_tile = tile % col_tiles"]
            count, start, row_tile, extra = (
                "tl.cdiv(nrows, BLOCK_ROWS) * col_tiles",
                "pid",
                "row_tile",
                "(col_tile == 0)",
            )
        else:
            in_loop.append("col_tile = tile")
            count, start, row_tile = "tl.cdiv(ncols, BLOCK_COLS)", "pid", "tile"
        lines += self._values(n for n in self.live if n in hoisted)
        kept = [n for n in self.sinks if n not in self.grown]
        lines += [f"a{n} = {self._reducer(n).start(self._accumulator_shape(n))}" for n in kept]
        lines += self._begin_growing()
        stages = 1 if self.is_looped else self.stages
        lines.append(f"for tile in tl.range({start}, {count}, programs, num_stages={stages}):")
        in_loop += self._row_positions(row_tile)
        if not self.col_sinks and self.has_column_tiles:
            in_loop += self._col_positions("col_tile * BLOCK_COLS")
        rows_extra = {n: extra for n in self.sinks if self.kernel.values[n].op == "rows_reduce"}
        if self.is_looped:
            in_loop += self._passes_over_columns("", hoisted)
            in_loop += [self._accumulate(n) for n in self.sinks if self.kernel.values[n].op == "rows_reduce"]
            in_loop += [self._store(s) for s in self.plan.row_stores]
        else:
            in_loop += self._tile(hoisted)
            in_loop += [self._accumulate(n, rows_extra.get(n, "")) for n in self.sinks]
            for store in self.kernel.stores:
                place = self._places[id(store)]
                if place.rows and not place.post:
                    in_loop.append(self._store(store, "" if place.cols else extra))
        lines += [f"    {t}" for t in in_loop]
        return lines + (self._finish_alone() if self.is_alone else self._hand_on())

    def _hand_on(self) -> list[str]:
        """Partial results to scratch memory, a row for each share."""
        lines = []
        for k, n in enumerate(self.sinks):
            reducer = self._reducer(n)
            part = reducer.reduced(f"a{n}", 0)
            if n in self.grown:
                continue  # is there already
            if n in self.col_sinks:
                lines.append(f"tl.store({self._share_of(n)}, {part}{self._tail_mask()})")
            else:
                lines.append(f"a{n} = {part}")
                whole = reducer.reduced(f"a{n}", 1)
                lines.append(f"tl.store(t{k} + pid + tl.full([1, 1], 0, tl.int32), {whole})")
        return lines

    def _tail_mask(self) -> str:
        return ", mask=col_mask" if self._col_mask else ""

    def _finish_alone(self) -> list[str]:
        """One share does it all: results, what follows from them, and the outputs."""
        lines = []
        for n in self.sinks:
            reducer = self._reducer(n)
            lines.append(f"a{n} = {reducer.reduced(f'a{n}', 0)}")
            if n in self.one_sinks:
                lines.append(f"a{n} = {reducer.reduced(f'a{n}', 1)}")
            lines.append(f"x{n} = {reducer.finished(f'a{n}')}")
        return lines + self._after(bool(self.col_sinks), self._hoisted())

    def _after(self, within: bool, known: set[int]) -> list[str]:
        """Values and outputs that follow the nest. ``within``: the columns of the tile are at hand."""
        plan = self.plan
        along_columns = [n for n in plan.post_values if self._region(n).cols and n not in known]
        lines = self._values(n for n in plan.post_values if not self._region(n).cols)
        lines += [self._store(s) for s in plan.post_stores if not self._has_columns(s)]
        along = [s for s in plan.post_stores if self._has_columns(s)]
        if not along:
            return lines
        if within:
            inner = self._values(along_columns)
            return [*lines, *inner, *(self._store(s) for s in along)]
        lines.append("for start in tl.range(0, ncols, BLOCK_COLS):")
        inner = [*self._col_positions("start"), *self._values(along_columns)]
        return [*lines, *(f"    {t}" for t in [*inner, *(self._store(s) for s in along)])]

    def _has_columns(self, store: Store) -> bool:
        return self._places[id(store)].cols

    # ---- the second kernel

    def second(self) -> Piece | None:
        """Adds up the partial results and writes what depends on them; None where the first does it."""
        if not self.sinks or self.is_alone:
            return None
        return self._of_columns(min(self.block_cols, FINISH_COLS))._finish()

    def _of_columns(self, block: int) -> Body:
        """The same kernel with other tiles of columns."""
        other = copy.copy(self)
        other.block_cols = block
        return other

    def _finish(self) -> Piece:
        along = any(self._has_columns(s) for s in self.plan.post_stores)
        lines = self._sizes()
        if along:
            lines += [f"pid = {self._pid()}", *self._col_positions("pid * BLOCK_COLS")]
        lines += self._values(self.plan.entry_values)
        for k, n in enumerate(self.sinks):
            lines += self._add_up(k, n)
        lines += self._after(True, set())
        tiles: tuple[tuple[Dim, int], ...] = ((self.ncols, self.block_cols),) if along else ((1, 1),)
        arguments = [*self._parameters(), *self._scratch_arguments(), *self._symbols()]
        arguments.append(Argument("programs", "programs", "i32"))
        return self._piece(f"{self.kernel.name}_finish", arguments, lines, tiles, 0)

    def _add_up(self, k: int, number: int) -> list[str]:
        reducer = self._reducer(number)
        if number in self.col_sinks:
            shape, count, position = (
                f"[{PARTIALS}, BLOCK_COLS]",
                "programs",
                f"start + tl.arange(0, {PARTIALS})[:, None]",
            )
            mask = self._mask(False, True, "(p < programs)")
            load = f"tl.load(t{k} + p * ncols + c, mask={mask}, other={reducer.neutral})"
            step, axes = PARTIALS, (0,)
        else:
            columns = self._partials(number)
            shape, step = "[1, BLOCK_PARTIALS]", 0
            count = f"programs * {self.size(columns)}" if columns != 1 else "programs"
            position = "start + tl.arange(0, BLOCK_PARTIALS)[None, :]"
            load = f"tl.load(t{k} + p, mask=p < {count}, other={reducer.neutral})"
            axes = (1,)
        lines = [
            f"a{number} = {reducer.start(shape)}",
            f"for start in tl.range(0, {count}, {step or 'BLOCK_PARTIALS'}):",
            f"    p = {position}",
            f"    a{number} = {reducer.merged(f'a{number}', load)}",
        ]
        for axis in axes:
            lines.append(f"a{number} = {reducer.reduced(f'a{number}', axis)}")
        return [*lines, f"x{number} = {reducer.finished(f'a{number}')}"]

    def _partials(self, number: int) -> Dim:
        """Columns of scratch memory of a single result: a place for each tile of columns where those are apart."""
        if self.col_sinks and self.has_column_tiles:
            return as_dim((self.ncols + self.shared_cols - 1) // self.shared_cols)
        return 1

    def scratch(self) -> tuple[Scratch, ...]:
        if not self.sinks or self.is_alone:
            return ()
        return tuple(
            Scratch(self._reducer(n).total, self.ncols if n in self.col_sinks else self._partials(n))
            for n in self.sinks
        )

    # ---- signatures

    def _pid(self) -> str:
        return "tl.program_id(0)" + (".to(tl.int64)" if self.wide else "")

    def _parameters(self) -> list[Argument]:
        return [Argument(p.name, "param", POINTERS[p.dtype], n) for n, p in enumerate(self.kernel.params)]

    def _scratch_arguments(self) -> list[Argument]:
        return [Argument(f"t{k}", "scratch", POINTERS[s.dtype], k) for k, s in enumerate(self.scratch())]

    def _symbols(self) -> list[Argument]:
        kind = "i64" if self.wide else "i32"
        return [Argument(s, "symbol", kind) for s in self.kernel.symbols if s not in self.constants]

    def _random(self) -> list[Argument]:
        """The state of the generator; the offset counts further than 32 bits."""
        types = {"seed": "i64", "offset": "i64"}
        return [Argument(f"rng_{name}", "random", types.get(name, "i32"), n) for n, name in enumerate(RANDOM)]

    def _blocks(self) -> dict[str, int]:
        """The constants that the text may name."""
        return {"BLOCK_ROWS": self.block_rows, "BLOCK_COLS": self.block_cols, "BLOCK_PARTIALS": 256}

    def _piece(
        self, name: str, arguments: list[Argument], lines: list[str], tiles: tuple[tuple[Dim, int], ...], shared: int
    ) -> Piece:
        body = "\n".join(f"    {line}" for line in lines)
        used = [a for a in (*arguments, *self._random()) if _occurs(a.name, body)]
        constants = tuple((k, v) for k, v in self._blocks().items() if _occurs(k, body))
        head = ["pid"] * self.is_called + [a.name for a in used] + [f"{k}: tl.constexpr" for k, _ in constants]
        text = f"@triton.jit\ndef {name}({', '.join(head)}):\n{body}\n"
        return Piece(text, Pass(name, tuple(used), constants, tiles, shared))


def _fills(size: Dim, block: int) -> bool:
    """Whether tiles end where the size ends; an empty size has a tile too, with nothing in it."""
    return isinstance(size, int) and size > 0 and size % block == 0


def _occurs(name: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


INDEX_BOUND = 2**31 - 2**21  # room for a tile that reaches beyond the end


def extents(kernel: LoopKernel) -> tuple[Dim, ...]:
    """The flat sizes and memory extents that 32-bit indices must reach."""
    found: list[Dim] = [as_dim(product(kernel.dims))]
    accesses = [v.attr for v in kernel.values if isinstance(v.attr, Access)] + [s.access for s in kernel.stores]
    for access in accesses:
        reach: Dim = access.offset
        for d, stride in access.strides:
            reach = reach + kernel.dims[d] * stride
        found.append(as_dim(reach))
    return tuple(dict.fromkeys(found))
