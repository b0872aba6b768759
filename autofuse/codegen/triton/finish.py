"""The code after the tiles: values and outputs that depend on reductions over rows, in the same kernel or a second one.

In: the kernel's reductions, the tile's text, and for the second kernel the partial results in scratch memory, a row for
each share of the programs. Out: lines, or the second kernel. Guarantee: partial results are added up in a fixed order,
so results repeat bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autofuse.codegen.column_passes import Plan, split_by_columns
from autofuse.codegen.triton.looped_columns import COLUMN_LOOP
from autofuse.codegen.triton.program import Spread, blocks_of
from autofuse.codegen.triton.signature import Piece, make_piece, program_number
from autofuse.codegen.triton.source import Argument
from autofuse.codegen.triton.tile_text import TileText, indented
from autofuse.ir.shape import Dim

PARTIALS = 16  # partial results of a column that the second kernel adds up at a time
FINISH_COLS = 128  # most columns of a tile of the second kernel


def after_nest(tile: TileText, passes: Plan, within: bool, known: set[int]) -> list[str]:
    """Lines of the values and outputs that follow the nest.

    ``within``: the tile's columns are at hand; ``known``: values that are calculated already.
    """
    along_columns = [n for n in passes.post_values if tile.regions[n].cols and n not in known]
    single, along = split_by_columns(tile.kernel, passes.post_stores, tile.regions)
    lines = tile.values(n for n in passes.post_values if not tile.regions[n].cols)
    lines += [tile.store(s) for s in single]
    if not along:
        return lines
    inner = [*tile.values(along_columns), *(tile.store(s) for s in along)]
    if within:
        return [*lines, *inner]
    return [*lines, COLUMN_LOOP, *indented([*tile.col_positions("start"), *inner])]


def print_second(spread: Spread, wide: TileText, partial_columns: Dim, arguments: Sequence[Argument]) -> Piece:
    """The kernel that adds up partial results and writes what depends on them.

    ``wide``: the first kernel's tile; ``partial_columns``: columns of scratch memory that a single result has.
    """
    config = dataclasses.replace(wide.config, block_cols=min(wide.config.block_cols, FINISH_COLS))
    tile = TileText(spread.kernel, config, wide.constants)
    _, along = split_by_columns(tile.kernel, spread.passes.post_stores, tile.regions)
    lines = tile.sizes()
    if along:
        lines += [f"pid = {program_number(config.is_wide)}", *tile.col_positions("pid * BLOCK_COLS")]
    lines += tile.values(spread.passes.entry_values)
    for k, n in enumerate(spread.sinks):
        lines += _add_up_columns(tile, k, n) if n in spread.col_sinks else _add_up(tile, k, n, partial_columns)
    lines += after_nest(tile, spread.passes, True, set())
    tiles: tuple[tuple[Dim, int], ...] = ((tile.ncols, config.block_cols),) if along else ((1, 1),)
    return make_piece(f"{spread.kernel.name}_finish", lines, arguments, blocks_of(config), tiles)


def _add_up_columns(tile: TileText, scratch: int, number: int) -> list[str]:
    """Lines that add up one result for each column, from the partial results of some shares at a time."""
    reducer, name = tile.reducer(number), f"a{number}"
    mask = tile.mask(False, True, "(p < programs)")
    load = f"tl.load(t{scratch} + p * ncols + c, mask={mask}, other={reducer.neutral})"
    return [
        f"{name} = {reducer.start(f'[{PARTIALS}, BLOCK_COLS]')}",
        f"for start in tl.range(0, programs, {PARTIALS}):",
        f"    p = start + tl.arange(0, {PARTIALS})[:, None]",
        f"    {name} = {reducer.merged(name, load)}",
        f"{name} = {reducer.reduced(name, 0)}",
        f"x{number} = {reducer.finished(name)}",
    ]


def _add_up(tile: TileText, scratch: int, number: int, columns: Dim) -> list[str]:
    """Lines that add up a single result."""
    reducer, name = tile.reducer(number), f"a{number}"
    count = f"programs * {tile.size(columns)}" if columns != 1 else "programs"
    load = f"tl.load(t{scratch} + p, mask=p < {count}, other={reducer.neutral})"
    return [
        f"{name} = {reducer.start('[1, BLOCK_PARTIALS]')}",
        f"for start in tl.range(0, {count}, BLOCK_PARTIALS):",
        "    p = start + tl.arange(0, BLOCK_PARTIALS)[None, :]",
        f"    {name} = {reducer.merged(name, load)}",
        f"{name} = {reducer.reduced(name, 1)}",
        f"x{number} = {reducer.finished(name)}",
    ]
