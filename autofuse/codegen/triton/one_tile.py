"""One tile a program: element-wise work, and row reductions whose row fits the tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.triton.program import NestProgram
from autofuse.ir.records import Config


@dataclass(frozen=True)
class TilePlace:
    """Which tile a program has, as text: lines and expressions."""

    lines: list[str]  # that calculate what the expressions name
    row_tile: str  # the tile's number along rows
    start: str  # the tile's first column
    first_row: str = ""  # whether the tile is the first along rows; empty where there is only one
    first_col: str = ""


class OneTile(NestProgram):
    """Each program works on one tile."""

    def __init__(
        self, kernel: LoopKernel, config: Config, constants: Mapping[str, int], is_called: bool = False
    ) -> None:
        """``is_called``: the text is a function, which the kernel of several nests calls."""
        super().__init__(kernel, config, constants)
        self.is_called = is_called

    def lines(self) -> list[str]:
        tile, place = self.tile, self._place()
        lines = [*([] if self.is_called else [self.number()]), *place.lines]
        lines += [*tile.row_positions(place.row_tile), *tile.col_positions(place.start)]
        lines += tile.whole_tile(set())
        for store in self.kernel.stores:
            region = tile.place(store)
            first = ("" if region.rows else place.first_row, "" if region.cols else place.first_col)
            lines.append(tile.store(store, " & ".join(text for text in first if text)))
        return lines

    def _place(self) -> TilePlace:
        if not self.spread.has_column_tiles:
            return TilePlace([], "pid", "0", "(pid == 0)" if self.kernel.rows else "")
        if not self.kernel.rows:
            return TilePlace(["col_tile = pid"], "", "col_tile * BLOCK_COLS", "", "(col_tile == 0)")
        found = ["col_tiles = tl.cdiv(ncols, BLOCK_COLS)", "row_tile = pid // col_tiles", "col_tile = pid % col_tiles"]
        return TilePlace(found, "row_tile", "col_tile * BLOCK_COLS", "(row_tile == 0)", "(col_tile == 0)")
