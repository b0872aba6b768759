"""A tile of a matmul's result, and the epilogue at each of its elements.

In: the epilogue (`epilogue.Epilogue`), and the sides of the tile. Out: lines of text for a kernel that has the matmul's
result in a register block named ``acc``. Guarantee: the lines need ``r``, ``c`` and ``b`` (positions), ``row_mask``,
``col_mask``, ``nrows``, ``ncols``, ``row_tile`` and ``col_tile``, and nothing else of the kernel around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from autofuse.codegen.loops import LoopKernel, Store
from autofuse.codegen.matmul_operands import Operand
from autofuse.codegen.triton.signature import pointer_arguments, symbol_arguments
from autofuse.codegen.triton.source import Argument
from autofuse.codegen.triton.templates.epilogue import Epilogue
from autofuse.codegen.triton.tile_text import Knobs, TileConfig, TileText
from autofuse.ir.shape import Dim, SymbolicShape, free_symbols, product


class Tile:
    """The epilogue of one matmul, at the elements of a tile."""

    def __init__(self, following: Epilogue, block: tuple[int, int], knobs: Knobs, constants: Mapping[str, int]) -> None:
        """``block``: rows and columns of the tile."""
        self.batch_dims, rows, cols = following.dims
        # A batch is constant within a program: for the epilogue it is neither a row nor a column.
        outer = {d: "b" if len(self.batch_dims) == 1 else f"b{d}" for d in self.batch_dims}
        kernel = dataclasses.replace(following.kernel, rows=rows, cols=cols)
        self.kernel = kernel
        self.text = TileText(kernel, TileConfig.of(knobs, *block), constants, {following.product: "acc"}, outer)

    # ---- lines

    def alone(self) -> list[str]:
        """Lines for a result of one row or column: ``acc`` is reduced to it, since the epilogue has no such dim."""
        lines = []
        if not self.kernel.rows:
            lines.append("acc = tl.sum(tl.where(row_mask, acc, 0.0), axis=0, keep_dims=True)")
        if not self.kernel.cols:
            lines.append("acc = tl.sum(tl.where(col_mask, acc, 0.0), axis=1, keep_dims=True)")
        return lines

    def values(self) -> list[str]:
        """All values of the tile."""
        spread = (("b", self.batch_dims), ("r", self.kernel.rows), ("c", self.kernel.cols))
        lines = [line for what, dims in spread if len(dims) > 1 for line in self.text.positions(what, dims)]
        return lines + self.text.values(self.text.live)

    def stores(self) -> list[str]:
        """The stores of all outputs; the first tile alone stores what rows or columns do not change."""
        return [self._store_once(store) for store in self.kernel.stores]

    @property
    def row_mask(self) -> str:
        """The mask of rows where they may end within a tile, else empty; a single row needs it too."""
        return self.text.row_mask if self.kernel.rows else "row_mask"

    @property
    def col_mask(self) -> str:
        return self.text.col_mask

    def matrix(self, operand: Operand, rows: str, cols: str) -> str:
        """Pointers to the elements of an operand at positions of rows and columns."""
        places = ((rows, operand.rows), (cols, operand.cols))
        start = [] if operand.offset == 0 else [self.text.size(operand.offset)]
        terms = [operand.name, *start, *self._of_batch(operand)]
        terms += [self.text.times(place, stride) if stride != 0 else f"{place} * 0" for place, stride in places]
        return " + ".join(terms)

    # ---- inside

    def _of_batch(self, operand: Operand) -> list[str]:
        """The terms of the batch ``b``, which divides into the parts of the batch as a number into digits."""
        terms = []
        sizes = [size for size, _ in operand.batch]
        for at, (size, stride) in enumerate(operand.batch):
            inner = product(sizes[at + 1 :])
            place = "b" if inner == 1 else f"b // ({self.text.size(inner)})"
            if at > 0:
                place = f"{place} % ({self.text.size(size)})"
            if stride != 0:
                terms.append(self.text.times(place if place == "b" else f"({place})", stride))
        return terms

    def _store_once(self, store: Store) -> str:
        place = self.text.place(store)
        first = [] if place.rows else ["(row_tile == 0)"]
        first += [] if place.cols else ["(col_tile == 0)"]
        return self.text.store(store, " & ".join(first))


def arguments_of(kernel: LoopKernel, text: TileText) -> list[Argument]:
    """All tensors and symbols of a node as arguments; the text has some symbols built in."""
    symbols = symbol_arguments(kernel.symbols, text.constants, text.config.is_wide)
    return [*pointer_arguments(kernel.params), *symbols]


def load(pointer: str, *masks: str) -> str:
    """A load of operands: 0 beyond the ends."""
    mask = " & ".join(m for m in masks if m)
    return f"tl.load({pointer}, mask={mask}, other=0.0)" if mask else f"tl.load({pointer})"


def with_constants(dim: Dim, constants: Mapping[str, int]) -> Dim:
    """A size where the values of some symbols are known."""
    known = {name: value for name, value in constants.items() if name in free_symbols(dim)}
    return SymbolicShape([dim]).substitute(known)[0]


def is_multiple(dim: Dim, block: int, constants: Mapping[str, int]) -> bool:
    """Whether steps of a block end just where a size ends, for every call."""
    size = with_constants(dim, constants)
    return isinstance(size, int) and size % block == 0
