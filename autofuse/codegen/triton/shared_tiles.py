"""Programs that share tiles: reductions over rows, whose accumulators a program keeps from tile to tile.

`SharedTiles` hold whole rows of a tile; `SharedRows` loop over the columns of each tile of rows. A program loops over
its share of the tiles, and hands its partial results to a second kernel (`finish`) through scratch memory; it finishes
by itself where the configuration has one program. Names in the text: ``a*`` accumulators, ``t*`` partial results in
scratch memory, ``share`` the part of the programs that work on one tile of columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from autofuse.codegen.loops import SINKS, LoopKernel
from autofuse.codegen.triton.finish import after_nest, print_second
from autofuse.codegen.triton.index_width import Limit, index_limits, open_limits
from autofuse.codegen.triton.looped_columns import GrowingSums, passes_over_columns
from autofuse.codegen.triton.program import NestProgram
from autofuse.codegen.triton.signature import Piece
from autofuse.codegen.triton.source import Argument, Scratch
from autofuse.codegen.triton.tile_text import indented
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim, as_dim


@dataclass(frozen=True)
class Walk:
    """How a program goes over its tiles."""

    start: str  # its first tile
    count: str  # of all tiles
    stages: int  # loads in flight ahead of the loop over tiles
    before: list[str] = field(default_factory=list)  # lines above the loop over tiles
    inside: list[str] = field(default_factory=list)  # lines in the loop that find the tile
    extra: str = ""  # mask for what does not vary along columns, where a row has several tiles


ROW_TILES = "tl.cdiv(nrows, BLOCK_ROWS)"
COLUMN_TILES = "col_tiles = tl.cdiv(ncols, BLOCK_COLS)"
FIRST_COLUMNS = "(col_tile == 0)"


class SharedProgram(NestProgram):
    """What `SharedTiles` and `SharedRows` have in common: accumulators, a loop over tiles, and the results."""

    def __init__(self, kernel: LoopKernel, config: Config, constants: Mapping[str, int]) -> None:
        super().__init__(kernel, config, constants)
        self.shared = 1 if self.spread.col_sinks or not self.spread.has_column_tiles or not kernel.rows else 2

    @abstractmethod
    def walk(self) -> Walk: ...

    @abstractmethod
    def work(self, walk: Walk, hoisted: set[int]) -> list[str]:
        """The lines that work on one tile; ``hoisted`` values are calculated already."""

    @property
    @abstractmethod
    def hoists_columns(self) -> bool:
        """Whether the columns are the same in all tiles of a program."""

    @property
    def growing(self) -> GrowingSums:
        """Reductions whose accumulators are in scratch memory, not in registers."""
        return GrowingSums(self.tile, {})

    def lines(self) -> list[str]:
        tile, walk, hoisted = self.tile, self.walk(), self._hoisted()
        lines = [self.number(), *walk.before]
        lines += tile.values(n for n in tile.live if n in hoisted)
        lines += [tile.accumulator(n) for n in self.spread.sinks if n not in self.growing.places]
        lines += self.growing.start()
        lines.append(f"for tile in tl.range({walk.start}, {walk.count}, programs, num_stages={walk.stages}):")
        lines += indented([*walk.inside, *self.work(walk, hoisted)])
        return lines + (self._finish_alone(hoisted) if self.spread.is_alone else self._hand_on())

    def _hoisted(self) -> set[int]:
        """Values that no row changes: made once, before the loop over tiles."""
        found = {n: self.tile.regions[n] for n in self.tile.live if self.kernel.values[n].op not in ("const", *SINKS)}
        return {n for n, r in found.items() if not r.rows and not r.post and (self.hoists_columns or not r.cols)}

    def arguments(self) -> list[Argument]:
        return [*super().arguments(), Argument("programs", "programs", "i32")]

    # ---- results

    def partial(self, number: int) -> str:
        """Pointers to a program's part of a column's result, in scratch memory."""
        share = "share" if self.spread.has_column_tiles else "pid"
        return f"t{self.spread.sinks.index(number)} + {share} * ncols + c"

    def _hand_on(self) -> list[str]:
        """Lines that store partial results in scratch memory, a row for each share, except those that grow there."""
        lines = []
        for k, n in enumerate(self.spread.sinks):
            reducer = self.tile.reducer(n)
            part = reducer.reduced(f"a{n}", 0)
            if n in self.growing.places:
                continue
            if n in self.spread.col_sinks:
                lines.append(f"tl.store({self.partial(n)}, {part}{self.tile.col_mask_argument})")
            else:
                lines.append(f"a{n} = {part}")
                whole = reducer.reduced(f"a{n}", 1)
                lines.append(f"tl.store(t{k} + pid + tl.full([1, 1], 0, tl.int32), {whole})")
        return lines

    def _finish_alone(self, hoisted: set[int]) -> list[str]:
        """With one share: results, the values that depend on them, and the outputs."""
        lines = []
        for n in self.spread.sinks:
            reducer = self.tile.reducer(n)
            lines.append(f"a{n} = {reducer.reduced(f'a{n}', 0)}")
            if n in self.spread.one_sinks:
                lines.append(f"a{n} = {reducer.reduced(f'a{n}', 1)}")
            lines.append(f"x{n} = {reducer.finished(f'a{n}')}")
        return lines + after_nest(self.tile, self.spread.passes, bool(self.spread.col_sinks), hoisted)

    def second(self) -> Piece | None:
        if self.spread.is_alone:
            return None
        return print_second(self.spread, self.tile, self._partial_columns(), self.arguments())

    def scratch(self) -> tuple[Scratch, ...]:
        if self.spread.is_alone:
            return ()
        columns = {
            n: self.tile.ncols if n in self.spread.col_sinks else self._partial_columns() for n in self.spread.sinks
        }
        return tuple(Scratch(self.tile.reducer(n).total, size) for n, size in columns.items())

    def _partial_columns(self) -> Dim:
        """Columns of scratch memory that a single result has.

        One for each tile of columns where a program keeps to its columns, else one in all.
        """
        if self.spread.col_sinks and self.spread.has_column_tiles:
            block = self.tile.config.block_cols
            return as_dim((self.tile.ncols + block - 1) // block)
        return 1


class SharedTiles(SharedProgram):
    """Programs whose tiles hold whole rows, or, without row reductions, parts of rows."""

    @property
    def hoists_columns(self) -> bool:
        return bool(self.spread.col_sinks) or not self.spread.has_column_tiles

    def walk(self) -> Walk:
        stages = self.tile.config.stages
        if not self.spread.has_column_tiles:
            return Walk("pid", ROW_TILES, stages, self.tile.col_positions("0"), self.tile.row_positions("tile"))
        columns = self.tile.col_positions("col_tile * BLOCK_COLS")
        if self.spread.col_sinks:  # a program keeps to its columns
            found = [COLUMN_TILES, "share = pid // col_tiles", "col_tile = pid % col_tiles"]
            inside = self.tile.row_positions("tile")
            return Walk("share", ROW_TILES, stages, [*found, *columns], inside, FIRST_COLUMNS)
        if not self.kernel.rows:
            return Walk("pid", "tl.cdiv(ncols, BLOCK_COLS)", stages, [], ["col_tile = tile", *columns])
        found = ["row_tile = tile // col_tiles", "col_tile = tile % col_tiles"]
        inside = [*found, *self.tile.row_positions("row_tile"), *columns]
        return Walk("pid", f"{ROW_TILES} * col_tiles", stages, [COLUMN_TILES], inside, FIRST_COLUMNS)

    def work(self, walk: Walk, hoisted: set[int]) -> list[str]:
        tile, lines = self.tile, self.tile.whole_tile(hoisted)
        for n in self.spread.sinks:
            lines.append(tile.accumulate(n, walk.extra if self.kernel.values[n].op == "rows_reduce" else ""))
        for store in self.kernel.stores:
            region = tile.place(store)
            if region.rows and not region.post:
                lines.append(tile.store(store, "" if region.cols else walk.extra))
        return lines


class SharedRows(SharedProgram):
    """Rows longer than a tile: the columns are looped over for each tile of rows."""

    hoists_columns = False

    @property
    def growing(self) -> GrowingSums:
        return GrowingSums(self.tile, {n: self.partial(n) for n in self.spread.col_sinks})

    def walk(self) -> Walk:
        return Walk("pid", ROW_TILES, 1, [], self.tile.row_positions("tile"))

    def work(self, walk: Walk, hoisted: set[int]) -> list[str]:
        tile, passes = self.tile, self.spread.passes
        lines = passes_over_columns(tile, passes, self.growing, hoisted)
        lines += [tile.accumulate(n) for n in self.spread.sinks if self.kernel.values[n].op == "rows_reduce"]
        return lines + [tile.store(s) for s in passes.row_stores]

    def limits(self) -> tuple[Limit, ...]:
        grown = [self.tile.ncols * self.programs] if self.spread.col_sinks else []
        return (*super().limits(), *open_limits(index_limits(map(as_dim, grown), self.tile.config.is_wide)))
