"""Triton programs of a loop kernel: one or two kernels, in one of several program shapes.

In: a loop kernel, a configuration and constants for some symbols. Out: the `Spread`: the kernel's reductions, and how
its work is spread over programs; `Program`, the base class of the shapes:

- `one_tile`: a tile a program (no reduction over rows): element-wise work, and row reductions whose row fits the tile;
- `looped_columns` (``persistent=False``): a pass over the columns for each row reduction that the next one needs;
- `shared_tiles` (reductions over rows): programs loop over tiles, keep accumulators, and hand their results to a second
  kernel (`finish`) through scratch memory, or finish by themselves where the configuration has one program; also with
  looped columns (`SharedRows`);
- `horizontal`: several nests in one launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autofuse.codegen.column_passes import Plan, plan
from autofuse.codegen.loops import SINKS, LoopKernel, live_values
from autofuse.codegen.triton.index_width import Limit, extents, index_limits, open_limits
from autofuse.codegen.triton.scalar import POINTERS
from autofuse.codegen.triton.signature import (
    Piece,
    make_piece,
    pointer_arguments,
    program_number,
    symbol_arguments,
)
from autofuse.codegen.triton.source import Argument, Scratch
from autofuse.codegen.triton.tile_text import TileConfig, TileText
from autofuse.ir.records import Config
from autofuse.ir.shape import Dim

BLOCK_PARTIALS = 256  # partial results of a single result that the second kernel adds up at a time


@dataclass(frozen=True)
class Spread:
    """What a kernel reduces, and how a configuration spreads its work over programs. Numbers are those of values."""

    kernel: LoopKernel
    is_looped: bool  # columns are looped over: a row does not fit the tile
    programs: int  # that share the tiles of a reduction over rows

    @classmethod
    def of(cls, kernel: LoopKernel, config: Config) -> Spread:
        knobs = dict(config)
        is_looped = needs_whole_rows(kernel) and not bool(knobs.get("persistent", True))
        return cls(kernel, is_looped, int(knobs.get("PROGRAMS", 0)))

    @cached_property
    def passes(self) -> Plan:
        """The passes over the columns."""
        return plan(self.kernel, keep=False, widen=False)

    @cached_property
    def sinks(self) -> list[int]:
        """Reductions over rows, in the order of their scratch tensors."""
        return [n for n in live_values(self.kernel) if self.kernel.values[n].op in SINKS]

    @cached_property
    def col_sinks(self) -> list[int]:
        return [n for n in self.sinks if self.kernel.values[n].op == "col_reduce"]

    @cached_property
    def one_sinks(self) -> list[int]:
        """The reductions over rows with a single result."""
        return [n for n in self.sinks if n not in self.col_sinks]

    @cached_property
    def has_column_tiles(self) -> bool:
        """Whether columns are tiled too; with a row reduction a program sees whole rows."""
        return not needs_whole_rows(self.kernel)

    @property
    def is_alone(self) -> bool:
        """Whether one program finishes what it reduces, without a second kernel.

        It does not where column sums come with single results, or with columns that are looped over.
        """
        needs_second = bool(self.col_sinks) and (self.is_looped or bool(self.one_sinks))
        return bool(self.sinks) and self.programs == 1 and not needs_second


def needs_whole_rows(kernel: LoopKernel) -> bool:
    """Whether a value that some store needs is made of a whole row: a reduction of it, or a scan along it."""
    return any(kernel.values[n].op in ("row_reduce", "scan") for n in live_values(kernel))


class Program(ABC):
    """The Triton kernels of one loop kernel."""

    programs = 0  # that share tiles

    @abstractmethod
    def first(self) -> Piece:
        """The kernel that does the work."""

    def second(self) -> Piece | None:
        """Adds up the partial results and writes what depends on them; None where the first does it."""
        return None

    def scratch(self) -> tuple[Scratch, ...]:
        """Memory in which the first kernel hands results to the second."""
        return ()

    @abstractmethod
    def limits(self) -> tuple[Limit, ...]:
        """Sizes beyond which the kernels are wrong: rows longer than their tile, offsets beyond 32 bits."""


class NestProgram(Program):
    """The kernels of one nest of loops."""

    shared = 0  # leading tiles that programs share, as in `Pass`
    is_called = False  # the text is a function, which a kernel calls with the program's number as first argument

    def __init__(self, kernel: LoopKernel, config: Config, constants: Mapping[str, int]) -> None:
        self.kernel = kernel
        self.spread = Spread.of(kernel, config)
        self.programs = self.spread.programs
        self.tile = TileText(kernel, tile_config(kernel, config), constants)

    @abstractmethod
    def lines(self) -> list[str]:
        """The body of the first kernel, behind its sizes."""

    def first(self) -> Piece:
        lines = [*self.tile.sizes(), *self.lines()]
        blocks = blocks_of(self.tile.config)
        return make_piece(self.kernel.name, lines, self.arguments(), blocks, self.tiles(), self.shared, self.is_called)

    def arguments(self) -> list[Argument]:
        return [
            *pointer_arguments(self.kernel.params),
            *(Argument(f"t{k}", "scratch", POINTERS[s.dtype], k) for k, s in enumerate(self.scratch())),
            *symbol_arguments(self.kernel.symbols, self.tile.constants, self.tile.config.is_wide),
        ]

    def tiles(self) -> tuple[tuple[Dim, int], ...]:
        """(extent, block) of rows and columns, from which the number of programs follows, as in `Pass`."""
        tile, found = self.tile, []
        if self.kernel.rows or (self.shared and not self.spread.has_column_tiles):
            found.append((tile.nrows, tile.config.block_rows))
        if self.spread.has_column_tiles:
            found.append((tile.ncols, tile.config.block_cols))
        return tuple(found) or ((1, 1),)

    def limits(self) -> tuple[Limit, ...]:
        tile, found = self.tile, []
        if not self.spread.has_column_tiles and not self.spread.is_looped:
            found.append((tile.ncols, tile.config.block_cols))
        return open_limits([*found, *index_limits(extents(self.kernel), tile.config.is_wide)])

    def number(self) -> str:
        """The line that finds the number of the program."""
        return f"pid = {program_number(self.tile.config.is_wide)}"


def tile_config(kernel: LoopKernel, config: Config) -> TileConfig:
    """The sides of a tile; a persistent one has a width of its own where the knobs have a ``ROW_BLOCK``."""
    knobs = dict(config)
    rows = int(knobs.get("BLOCK_ROWS", 1)) if kernel.rows else 1
    has_own_width = "ROW_BLOCK" in knobs and bool(knobs.get("persistent", True))
    return TileConfig.of(knobs, rows, int(knobs["ROW_BLOCK" if has_own_width else "BLOCK_COLS"]))


def blocks_of(config: TileConfig) -> dict[str, int]:
    """The constants that the text of a nest may name."""
    return {
        "BLOCK_ROWS": config.block_rows, "BLOCK_COLS": config.block_cols, "BLOCK_PARTIALS": BLOCK_PARTIALS,
    }  # fmt: skip
