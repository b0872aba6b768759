"""The text of one tile: its positions, values, stores and reductions.

In: a loop kernel, the sides of the tile, constants for some symbols. Out: lines and expressions, from which the
programs (`one_tile`, `looped_columns`, `shared_tiles`, `finish`, and the templates) build kernels. A tile is BLOCK_ROWS
rows by BLOCK_COLS columns. A value that depends on neither is one element, on rows a [R, 1] block, on columns a [1, C]
block, on both an [R, C] block; broadcasting does the rest.

Names in the text: ``r`` and ``c`` positions of rows and columns, ``r0`` .. ``c1`` those along single dims, ``x*``
values, ``a*`` accumulators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.column_passes import ROW_RESULTS, store_region
from autofuse.codegen.loops import (
    GUARDED,
    SINKS,
    Access,
    LoopKernel,
    LoopValue,
    Region,
    Scan,
    Store,
    live_values,
    regions,
)
from autofuse.codegen.triton.scalar import (
    TAKES_LITERALS,
    TYPES,
    Reducer,
    Scanner,
    TritonScalars,
    can_be_literal,
    constant,
    literal,
    load_text,
    store_text,
)
from autofuse.codegen.triton.signature import RANDOM_ARGUMENTS
from autofuse.ir.shape import Dim, as_dim, product
from autofuse.ir.size_text import TRITON, dim_text

Knobs = Mapping[str, int | str | bool]


@dataclass(frozen=True)
class TileConfig:
    """What a configuration says of a tile."""

    block_rows: int
    block_cols: int
    stages: int  # loads in flight ahead of a loop's work
    is_wide: bool  # positions have 64 bits
    is_fast: bool  # approximate functions
    streams: bool  # loads that are read once are the first to leave the cache

    @classmethod
    def of(cls, knobs: Knobs, block_rows: int, block_cols: int) -> TileConfig:
        return cls(
            block_rows,
            block_cols,
            stages=int(knobs.get("num_stages", 1)),
            is_wide=int(knobs.get("index_bits", 32)) == 64,
            is_fast=knobs.get("math", "precise") == "fast",
            streams=knobs.get("eviction", "none") == "first",
        )


class TileText:
    """Prints what happens at the places of a tile."""

    def __init__(
        self,
        kernel: LoopKernel,
        config: TileConfig,
        constants: Mapping[str, int],
        given: Mapping[int, str] | None = None,
        outer: Mapping[int, str] | None = None,
    ) -> None:
        """``given``: parameters that are not loaded but at hand under a name, such as a template's accumulator.

        ``outer``: names of positions along dims that are neither rows nor columns.
        """
        self.kernel = kernel
        self.config = config
        self.constants = constants
        self.live = live_values(kernel)
        self.regions = regions(kernel)
        self.nrows: Dim = as_dim(product(self._known(kernel.dims[d]) for d in kernel.rows)) if kernel.rows else 1
        self.ncols: Dim = as_dim(product(self._known(kernel.dims[d]) for d in kernel.cols))
        self.scalars = TritonScalars(config.is_fast)
        self._given = given or {}
        self._outer = outer or {}
        self._places = {id(s): store_region(kernel, s, self.regions) for s in kernel.stores}

    def place(self, store: Store) -> Region:
        """The region in which a store is done."""
        return self._places[id(store)]

    # ---- sizes and positions

    def _known(self, dim: Dim) -> Dim:
        if isinstance(dim, int):
            return dim
        return as_dim(dim.xreplace({s: self.constants[str(s)] for s in dim.free_symbols if str(s) in self.constants}))

    def size(self, dim: Dim) -> str:
        return dim_text(self._known(dim), TRITON)

    def sizes(self) -> list[str]:
        return [f"nrows = {self.size(self.nrows)}", f"ncols = {self.size(self.ncols)}"]

    def arange(self, start: str, block: str, axis: int) -> str:
        span = f"tl.arange(0, {block})" + (".to(tl.int64)" if self.config.is_wide else "")
        return f"{start} + {span}"[4 * (start == "0") :] + ("[:, None]" if axis == 0 else "[None, :]")

    def positions(self, what: str, dims: Sequence[int]) -> list[str]:
        """Positions along single dims from the flat position ``r`` or ``c``."""
        if len(dims) == 1:
            return []
        lines, rest = [], what
        for d in reversed(dims[1:]):
            size = self.size(self.kernel.dims[d])
            size = size if size.isalnum() else f"({size})"
            lines.append(f"{what}{d} = {rest} % {size}")
            lines.append(f"{what}_rest = {rest} // {size}")
            rest = f"{what}_rest"
        return [*lines, f"{what}{dims[0]} = {rest}"]

    def row_positions(self, tile: str) -> list[str]:
        """Lines of the positions and the mask of a tile's rows. ``tile``: its number along rows, as text."""
        if not self.kernel.rows:
            return []
        lines = [f"r = {self.arange(f'{tile} * BLOCK_ROWS', 'BLOCK_ROWS', 0)}"]
        if self.row_mask:
            lines.append("row_mask = r < nrows")
        return lines + self.positions("r", self.kernel.rows)

    def col_positions(self, start: str) -> list[str]:
        """Lines of the positions and the mask of a tile's columns. ``start``: its first column, as text."""
        lines = [f"c = {self.arange(start, 'BLOCK_COLS', 1)}"]
        if self.col_mask:
            lines.append("col_mask = c < ncols")
        return lines + self.positions("c", self.kernel.cols)

    def _position(self, dim: int) -> str:
        if dim in self._outer:
            return self._outer[dim]
        what, dims = ("r", self.kernel.rows) if dim in self.kernel.rows else ("c", self.kernel.cols)
        return what if len(dims) == 1 else f"{what}{dim}"

    def _linear(self, strides: Iterable[tuple[int, Dim]]) -> str:
        return " + ".join(self.times(self._position(d), stride) for d, stride in strides)

    def times(self, place: str, stride: Dim) -> str:
        """A product of a position and a stride, as text."""
        text = self.size(stride)
        return place if text == "1" else f"{place} * {text}"

    def _pointer(self, access: Access, extra: str = "") -> str:
        name = self.kernel.params[access.param].name
        start = self.size(access.offset) if access.offset != 0 else ""
        moving = " + ".join(t for t in (self._linear(access.strides), extra) if t)
        if not moving:  # one place, as a tile of one element: constants that are stored there are tiles
            return f"{name} + tl.full([1, 1], {start or 0}, tl.{'int64' if self.config.is_wide else 'int32'})"
        return f"{name} + {moving} + {start}" if start else f"{name} + {moving}"

    # ---- masks

    @property
    def row_mask(self) -> str:
        """The mask of rows, where they may end within a tile."""
        return "" if not self.kernel.rows or _fills(self.nrows, self.config.block_rows) else "row_mask"

    @property
    def col_mask(self) -> str:
        return "" if _fills(self.ncols, self.config.block_cols) else "col_mask"

    def mask(self, rows: bool, cols: bool, extra: str = "") -> str:
        parts = [self.row_mask if rows else "", self.col_mask if cols else "", extra]
        return " & ".join(p for p in parts if p)

    @property
    def col_mask_argument(self) -> str:
        """The mask argument of a load or a store that varies along columns only."""
        return ", mask=col_mask" if self.col_mask else ""

    # ---- values

    def text(self, number: int, as_literal: bool = False) -> str:
        value = self.kernel.values[number]
        if value.op != "const":
            return f"x{number}"
        if as_literal and can_be_literal(value.dtype):
            return literal(value.attr, value.dtype)
        return constant(value.attr, value.dtype)

    def values(self, numbers: Iterable[int]) -> list[str]:
        """The lines that calculate values; constants and reductions have none."""
        skipped = ("const", *ROW_RESULTS, "scan", *SINKS)
        return [f"x{n} = {self._compute(n)}" for n in numbers if self.kernel.values[n].op not in skipped]

    def _compute(self, number: int) -> str:
        value = self.kernel.values[number]
        if isinstance(value.attr, Access):
            return self._given.get(value.attr.param) or self._load(number, value.attr)
        if value.op == "size":
            return f"tl.full([1, 1], {self.size(value.attr)}, {TYPES[value.dtype]})"
        if value.op == "index":
            return f"({self._linear(value.attr)}).to(tl.int64)"  # type: ignore[arg-type]
        if value.op == "checked":
            index = self.text(value.args[0])
            region = self.regions[number]
            mask = self.mask(region.rows, region.cols) or "None"
            return f"af_checked({index}, {self.size(value.attr)}, {mask})"
        if value.op == "uniform":
            place = self.text(value.args[0]) + ("" if self.config.is_wide else ".to(tl.int32)")
            return f"af_uniform({', '.join([place, *(a.name for a in RANDOM_ARGUMENTS)])})"
        operands = [self.kernel.values[a] for a in value.args]
        # a literal takes its type from the operand beside it, so that one must not be a constant
        inline = value.op in TAKES_LITERALS and any(o.op != "const" for o in operands[-2:])
        operands = self._with_sizes(operands) if value.op == "div" else operands
        return self.scalars.expression(value, [self.text(a, inline) for a in value.args], operands)

    def _with_sizes(self, operands: Sequence[LoopValue]) -> list[LoopValue]:
        """The operands, with sizes that are built in as constants."""
        known = {o: self._known(as_dim(o.attr)) for o in operands if o.op == "size"}
        return [LoopValue("const", o.dtype, (), n) if isinstance(n := known.get(o), int) else o for o in operands]

    def _load(self, number: int, access: Access) -> str:
        value, region = self.kernel.values[number], self.regions[number]
        index, gathers = "", value.op.startswith("gather")
        guard = self.text(value.args[-1]) if value.op in GUARDED else ""
        if gathers:
            index = self.times(self.text(value.args[0]), access.indirect)
        dims = {d for d, _ in access.strides}
        in_rows = region.rows if gathers else bool(dims & set(self.kernel.rows))
        in_cols = region.cols
        policy = "evict_first" if self.config.streams and in_rows and in_cols else ""
        memory = self.kernel.params[access.param].dtype
        if guard:  # the mask is as wide as the guard, and the pointers must be as wide as the mask
            index = " + ".join(t for t in (index, f"{guard}.to(tl.int32) * 0") if t)
        return load_text(self._pointer(access, index), memory, self.mask(in_rows, in_cols, guard), policy)

    def store(self, store: Store, extra: str = "") -> str:
        """A store at the tile's positions.

        ``extra``: a further mask, such as that of the first tile, which alone stores what rows or columns do not
        change.
        """
        dims = {d for d, _ in store.access.strides}
        in_rows, in_cols = bool(dims & set(self.kernel.rows)), bool(dims & set(self.kernel.cols))
        value, repeats = self.regions[store.value], ""
        if self.kernel.rows and value.rows and not in_rows:  # what each row finds anew, to one place
            in_rows, repeats = True, "r * 0"
        mask = self.mask(in_rows, in_cols, extra)
        memory = self.kernel.params[store.access.param].dtype
        return store_text(self._pointer(store.access, repeats), self.text(store.value), memory, mask)

    # ---- reductions

    def reducer(self, number: int) -> Reducer:
        value = self.kernel.values[number]
        is_single = value.op in SINKS and value.op != "col_reduce"
        return Reducer(str(value.attr), value.dtype, wide=is_single)

    def element(self, number: int, in_rows: bool, in_cols: bool, extra: str = "") -> str:
        """What a reduction takes from each place of the tile: neutral beyond the ends."""
        argument, reducer = self.kernel.values[number].args[0], self.reducer(number)
        text = reducer.taken(self.text(argument), self.kernel.values[argument].dtype)
        mask = self.mask(in_rows, in_cols, extra)
        return f"tl.where({mask}, {text}, {reducer.neutral})" if mask else text

    def accumulator(self, number: int) -> str:
        """An accumulator of a reduction, before the first element."""
        shape = "[BLOCK_ROWS, 1]" if self.kernel.values[number].op == "rows_reduce" else "[BLOCK_ROWS, BLOCK_COLS]"
        return f"a{number} = {self.reducer(number).start(shape)}"

    def accumulate(self, number: int, extra: str = "") -> str:
        op = self.kernel.values[number].op
        element = self.element(number, op != "row_reduce", op != "rows_reduce", extra)
        return f"a{number} = {self.reducer(number).merged(f'a{number}', element)}"

    def whole_tile(self, hoisted: set[int]) -> list[str]:
        """All values of a tile that holds whole rows, in order, with the row reductions."""
        lines: list[str] = []
        for n in self.live:
            if n in hoisted or self.regions[n].post:
                continue
            op = self.kernel.values[n].op
            if op == "scan":
                lines += self.scan(n)
            else:
                lines += self._whole_rows(n) if op == "row_reduce" else self.values([n])
        return lines

    def carried(self, number: int) -> str:
        """The line before a loop over columns that begins what a scan carries from tile to tile."""
        return f"a{number} = {self._scanner(number)[0].start()}"

    def _scanner(self, number: int) -> tuple[Scanner, bool]:
        """How a scan is written, and whether it goes backwards."""
        value = self.kernel.values[number]
        assert isinstance(value.attr, Scan)
        return Scanner(value.attr.kind, value.dtype), value.attr.is_reversed

    def scan(self, number: int, carries: bool = False) -> list[str]:
        """The lines of a scan along a tile; what lies beyond the ends of rows counts as nothing.

        ``carries``: a row has several tiles, and what the last one has reached is carried on.
        """
        argument, (scanner, is_reversed) = self.kernel.values[number].args[0], self._scanner(number)
        element, region = scanner.taken(self.text(argument)), self.regions[argument]
        if self.col_mask:
            element = f"tl.where({self.col_mask}, {element}, {scanner.neutral})"
        if not region.cols or (self.kernel.rows and not region.rows):
            element = broadcast(element)
        if not carries:
            return [f"x{number} = {scanner.finished(scanner.scanned(element, is_reversed))}"]
        tile, join = f"b{number}", scanner.function
        return [
            f"{tile} = {element}",
            f"x{number} = {join}(a{number}, {scanner.scanned(tile, is_reversed)})",
            f"a{number} = {join}(a{number}, tl.reduce({tile}, 1, {join}, keep_dims=True))",
            *([f"x{number} = {scanner.finished(f'x{number}')}"] if scanner.is_wider else []),
        ]

    def _whole_rows(self, number: int) -> list[str]:
        """A row reduction over a tile that holds whole rows."""
        reducer = self.reducer(number)
        argument = self.element(number, False, True)
        lines = []
        if not self.regions[self.kernel.values[number].args[0]].cols:
            argument = broadcast(argument)
        if reducer.adds_floats and not self.mask(False, True):
            argument = f"af_apart({argument})"
        if reducer.keeps_nan or not argument.isidentifier():
            lines.append(f"a{number} = {argument}")
            argument = f"a{number}"
        return [*lines, f"x{number} = {reducer.finished(reducer.reduced(argument, 1))}"]


def broadcast(element: str) -> str:
    """An element that is broadcast to all places of the tile."""
    return f"tl.broadcast_to({element}, [BLOCK_ROWS, BLOCK_COLS])"


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _fills(size: Dim, block: int) -> bool:
    """Whether a size is filled by whole tiles; an empty size is not, since it has a tile too."""
    return isinstance(size, int) and size > 0 and size % block == 0
