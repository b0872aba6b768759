"""Looped columns: rows longer than a tile, with one pass over the columns per dependent row reduction.

In: the tile's text and the passes. Out: the lines of the passes, for programs that have rows of their own
(`LoopedColumns`) and for those that share them (`shared_tiles.SharedRows`). With looped columns no register can hold a
column's sum until the next row: it accumulates in scratch memory.
"""

from __future__ import annotations

from autofuse.codegen.column_passes import ColumnPass, Plan, scans_of, split_by_columns
from autofuse.codegen.loops import Scan
from autofuse.codegen.triton import merge
from autofuse.codegen.triton.program import NestProgram
from autofuse.codegen.triton.tile_text import TileText, broadcast, indented

COLUMN_LOOP = "for start in tl.range(0, ncols, BLOCK_COLS):"


class GrowingSums:
    """Reductions to columns whose accumulators are in scratch memory, a row of it for each program."""

    def __init__(self, tile: TileText, places: dict[int, str]) -> None:
        """``places``: for each reduction, the text of the pointers to the program's part of it."""
        self.tile = tile
        self.places = places

    def start(self) -> list[str]:
        """Lines that store neutral elements: a share without rows has results too."""
        if not self.places:
            return []
        inner = self.tile.col_positions("start")
        for n, place in self.places.items():
            start = self.tile.reducer(n).start("[1, BLOCK_COLS]")
            inner.append(f"tl.store({place}, {start}{self.tile.col_mask_argument})")
        return [COLUMN_LOOP, *indented(inner), "tl.debug_barrier()"]

    def add(self, number: int) -> list[str]:
        """Add the rows of a tile to what scratch memory holds of its columns."""
        tile, place, name = self.tile, self.places[number], f"a{number}"
        reducer, mask = tile.reducer(number), tile.col_mask_argument
        before = f"tl.load({place}{mask}{f', other={reducer.neutral}' if mask else ''})"
        element = tile.element(number, True, True)
        if not tile.regions[tile.kernel.values[number].args[0]].rows:  # each row adds the same element
            element = broadcast(element)
        return [
            f"{name} = {element}",
            f"{name} = {reducer.reduced(name, 0)}",
            f"{name} = {reducer.merged(name, before)}",
            f"tl.store({place}, {name}{mask})",
        ]


def passes_over_columns(tile: TileText, passes: Plan, growing: GrowingSums, hoisted: set[int]) -> list[str]:
    """Lines of the passes: for each stage of row reductions a loop, which makes anew what it needs.

    ``hoisted``: values that are calculated already.
    """
    lines: list[str] = []
    for found in passes.phases:
        lines += tile.values(n for n in found.row_values if n not in hoisted)
        lines += _pass_over_columns(tile, found, growing)
    return lines + tile.values(n for n in passes.last_row_values if n not in hoisted)


def _pass_over_columns(tile: TileText, found: ColumnPass, growing: GrowingSums) -> list[str]:
    scans = scans_of(tile.kernel, found)
    merges = [n for n in found.reductions if merge.is_merge(tile.kernel, n)]
    plain = [n for n in found.reductions if n not in merges]
    lines = [tile.accumulator(n) for n in plain] + [tile.carried(n) for n in scans]
    lines += [line for n in merges for line in merge.start(tile, n)]
    is_reversed = any(v.attr.is_reversed for v in tile.kernel.values if isinstance(v.attr, Scan)) and bool(scans)
    counter = "behind" if is_reversed else "start"
    lines.append(f"for {counter} in tl.range(0, ncols, BLOCK_COLS, num_stages={tile.config.stages}):")
    grown = [n for n in found.sinks if n in growing.places]
    inner = ["start = (ncols - 1) // BLOCK_COLS * BLOCK_COLS - behind"] if is_reversed else []
    inner += tile.col_positions("start")
    for n in found.values:
        inner += tile.scan(n, carries=True) if n in scans else tile.values([n])
    inner += [line for n in merges for line in merge.before(tile, n)]
    inner += [tile.accumulate(n) for n in (*plain, *found.sinks) if n not in grown]
    inner += [line for n in merges for line in merge.take(tile, n)]
    inner += [line for n in grown for line in growing.add(n)]
    inner += [tile.store(s) for s in found.stores]
    lines += indented(inner)
    lines += ["tl.debug_barrier()"] * bool(grown)  # other threads read the sums for the next rows
    for n in plain:
        reducer = tile.reducer(n)
        lines.append(f"x{n} = {reducer.finished(reducer.reduced(f'a{n}', 1))}")
    return lines + [line for n in merges for line in merge.finish(tile, n)]


class LoopedColumns(NestProgram):
    """Each program has some rows, and loops over their columns."""

    def lines(self) -> list[str]:
        tile, passes = self.tile, self.spread.passes
        lines = [self.number(), *tile.row_positions("pid"), *tile.values(passes.entry_values)]
        lines += passes_over_columns(tile, passes, GrowingSums(tile, {}), set())
        lines += [tile.store(s) for s in passes.row_stores]
        return lines + self._stores_without_rows("(pid == 0)" if self.kernel.rows else "")

    def _stores_without_rows(self, first: str) -> list[str]:
        """Outputs that no row changes: written by the first program, in a loop of their own."""
        tile, passes = self.tile, self.spread.passes
        single, along = split_by_columns(self.kernel, passes.post_stores, tile.regions)
        lines = [tile.store(s, first) for s in single]
        if along:
            inner = [*tile.col_positions("start"), *tile.values(n for n in passes.post_values if tile.regions[n].cols)]
            lines += [COLUMN_LOOP, *indented([*inner, *(tile.store(s, first) for s in along)])]
        return lines
