"""Knobs of Triton kernels: what may vary in the code of one kernel, and the defaults.

In: a loop kernel, the sizes it is timed on and the upper ends of its bucket. Out: the knobs, each with choices.
Guarantee: every configuration made of these choices is right for all sizes of the bucket. Names are those that Triton
users know; blocks are powers of two. Source of the defaults: about 1024 elements a program for element-wise work, 256 a
warp for reductions, as hand-written kernels and Inductor's heuristics have them.
"""

from __future__ import annotations

from autofuse.codegen.dtypes import is_float
from autofuse.codegen.knobs import Knob, Sizes
from autofuse.codegen.loops import COST, Access, LoopKernel
from autofuse.codegen.one_pass import can_merge_passes
from autofuse.codegen.triton.index_width import INDEX_BOUND, extents
from autofuse.codegen.triton.scalar import FAST
from autofuse.ir.shape import Dim, evaluate, product

MAX_ROW = 65536  # columns of a row that may live in registers: 64 floats a thread at 32 warps; what spills is pruned
USUAL_ROW = 16384  # up to here a row is tried in registers first
USUAL_LONG_WORK = 36  # operations on an element of a row of more than 8,192 columns: beyond, 1,024 threads spill
MAX_ROW_BESIDE_SUMS = 8192  # of kernels that hold column sums in registers too; beyond, all of them spill
MOST_PARTIALS = 1 << 26  # of a column sum that grows in scratch memory, all programs together: 256 MiB of float32
LONG_ROW = 16384  # columns from which loops over them may have merged passes
MAX_TILE = 32768  # elements of a tile
ROW_ELEMENTS = 256  # of a warp that holds whole rows: with half as many, a row takes up to twice the instructions
ROWS_ELEMENTS = (
    512  # of a tile of whole rows: with twice as many, one takes a third more instructions (sm_90, 512 columns)
)
FEW_ROWS = 256  # up to here one program adds up a column, and no second kernel is needed
ENOUGH_PROGRAMS = 256  # that keep a GPU busy: nor is one where tiles of columns are as many
WARPS = (1, 2, 4, 8, 16)
HEAVY = (
    480  # operations on an element, twice those in float64: beyond, several elements a thread spill (zeta, polygamma)
)


def triton_knobs(kernel: LoopKernel, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
    """The knobs of a kernel that is timed on ``values``, in a bucket that ends at ``high``."""
    return _Space(kernel, values, high).knobs()


class _Space:
    """The search space of one kernel in one bucket."""

    def __init__(self, kernel: LoopKernel, values: Sizes, high: Sizes) -> None:
        self.kernel = kernel
        ops = {v.op for v in kernel.values}
        self.row_reduce = kernel.needs_whole_rows
        self.col_reduce = "col_reduce" in ops
        self.single = bool(ops & {"full_reduce", "rows_reduce"})
        self.rows = evaluate(_of(kernel, kernel.rows), values)
        self.cols = evaluate(_of(kernel, kernel.cols), values)
        self.most_cols = max(self.cols, evaluate(_of(kernel, kernel.cols), high))
        self.is_crossed = is_crossed(kernel)
        self.beside = tuple(_Space(nest, values, high) for nest in kernel.rest)
        self.needs_64 = any(evaluate(e, s) > INDEX_BOUND for e in extents(kernel) for s in (values, high))
        self.needs_64 |= any(space.needs_64 for space in self.beside)

    def knobs(self) -> tuple[Knob, ...]:
        find = self._rows_in_registers if self.row_reduce else self._sums if self.col_reduce else self._plain
        find = self._nests if self.beside else find
        knobs = find()
        if any(v.op in FAST and v.dtype == "float32" for v in self.kernel.values):
            knobs.append(
                Knob("math", ("precise", "fast"), "precise", "the library's exp, or the approximate instruction")
            )
        if not self.single and not self.col_reduce:
            knobs.append(Knob("eviction", ("none", "first"), "none", "cache policy of loads that are read once"))
        # a single choice, recorded with the configuration, since a kernel for more elements is another one
        bits = 64 if self.needs_64 else 32
        knobs.append(Knob("index_bits", (bits,), bits, "width of positions"))
        return tuple(knobs)

    # ---- element-wise, and sums over everything

    def _plain(self) -> list[Knob]:
        widest = _power(self.cols)
        low, usual, high = (16, 64, 256) if self.is_crossed else (64, 1024, 4096)
        is_heavy = _work(self.kernel) >= HEAVY
        most, each = (256, 32) if is_heavy else (1024, 256)
        cols, col = _powers(min(widest, low), min(widest, high)), min(widest, usual, most)
        knobs = [_blocks("BLOCK_COLS", cols, col)]
        size = col
        if self.kernel.rows:
            row = max(1, min(_power(self.rows), 64 if self.is_crossed and not is_heavy else most // col))
            rows = _powers(1, max(1, min(_power(self.rows), MAX_TILE // cols[0], 256)))
            knobs.append(_blocks("BLOCK_ROWS", rows, row))
            size *= row
        knobs.append(_warps(size // each))
        if self.single:
            knobs += [_programs(self.rows * self.cols // max(size, 1)), _stages()]
        return knobs

    def _nests(self) -> list[Knob]:
        """Horizontal fusion: a tile has the same number of elements in each nest, in a shape of its own."""
        spaces = (self, *self.beside)
        tiles = _powers(256, min(4096, max(_power(space.rows * space.cols) for space in spaces)))
        knobs = [Knob("TILE", tiles, min(tiles[-1], 1024), "elements of a tile"), _warps(min(tiles[-1], 1024) // 256)]
        for k, space in enumerate(spaces):
            width = min(_power(space.cols), tiles[-1])
            knobs.append(Knob(f"WIDTH_{k}", (width,), width, "columns that a tile of this nest may have"))
        return knobs

    # ---- row reductions

    def _rows_in_registers(self) -> list[Knob]:
        whole = _power(self.most_cols)
        if whole > (MAX_ROW_BESIDE_SUMS if self.col_reduce else MAX_ROW):
            return self._looped((False,))
        if whole > (256 if self.is_crossed else 1024) and not self.col_reduce:
            return [*self._looped((True, False)), Knob("ROW_BLOCK", (whole,), whole, "columns of a persistent tile")]
        elements = 1024 if self.col_reduce else ROWS_ELEMENTS
        row = max(1, min(_power(self.rows), max(elements // whole, self._least_rows(whole))))
        rows = _powers(1, max(row, min(_power(self.rows), 4096 // whole, 64)))
        knobs = [_blocks("BLOCK_COLS", (whole,), whole), _blocks("BLOCK_ROWS", rows, row)]
        knobs.append(_warps(row * whole // ROW_ELEMENTS, 32 if self.col_reduce and whole > 2048 else 8))
        knobs.append(Knob("persistent", (True,), True, "a whole row in registers"))
        if self.col_reduce or self.single:
            knobs += [_programs(self.rows // row, usual=256 if self.col_reduce else 1024), _stages()]
        return knobs

    def _looped(self, persistent: tuple[bool, ...]) -> list[Knob]:
        """Rows longer than a tile of 1024: in registers, or in loops over columns."""
        if self.is_crossed:
            knobs = [_blocks("BLOCK_COLS", (16, 32, 64, 128), 64), _blocks("BLOCK_ROWS", (8, 16, 32, 64), 32)]
        elif self.col_reduce:  # several rows each time that the sums in scratch memory are read and written
            knobs = [_blocks("BLOCK_COLS", (256, 512, 1024, 2048), 1024), _blocks("BLOCK_ROWS", (1, 2, 4, 8), 4)]
        else:
            knobs = [_blocks("BLOCK_COLS", (512, 1024, 2048, 4096), 2048), _blocks("BLOCK_ROWS", (1, 2, 4), 1)]
        usual_row = USUAL_ROW if _work(self.kernel) < USUAL_LONG_WORK else 8192
        first = persistent[0] and not self.is_crossed and self.most_cols <= usual_row
        most = 32 if self.most_cols > (4096 if first else 8192) else 16 if first else 8
        wanted = _power(self.most_cols) // ROW_ELEMENTS
        knobs += [_warps(wanted if first else min(8, wanted), most), _stages()]
        knobs.append(Knob("persistent", persistent, first, "a whole row in registers, or loops over columns"))
        if self.most_cols >= LONG_ROW and not self.kernel.has_scan and can_merge_passes(self.kernel):
            usual = "several" if persistent[0] else "one"
            knobs.append(
                Knob("passes", ("one", "several"), usual, "a maximum or mean, and what is relative to it, at once")
            )
        if self.col_reduce:
            knobs.append(_programs(self.rows, MOST_PARTIALS // self.most_cols))
        elif self.single:
            knobs.append(_programs(self.rows))
        return knobs

    def _least_rows(self, whole: int) -> int:
        """The least rows of a tile: several where the reduced dim is not the last, since neighbours are rows then."""
        return max(1, min(16, MAX_TILE // whole)) if self.is_crossed else 1

    # ---- sums over rows

    def _sums(self) -> list[Knob]:
        widest = _power(self.cols)
        cols = _powers(min(widest, 32), min(widest, 512))
        has_few_rows, is_wide = self.rows <= FEW_ROWS, self.cols >= 128 * ENOUGH_PROGRAMS
        is_alone = not self.single and (has_few_rows or is_wide)
        col = min(widest, 32 if is_alone and not is_wide else 128)
        rows = _powers(min(_power(self.rows), 4), min(_power(self.rows), 128))
        row = min(rows[-1], max(rows[0], 4096 // col // 2))
        tiles = max(1, self.rows // row) * max(1, self.cols // col)
        return [
            _blocks("BLOCK_COLS", cols, col),
            _blocks("BLOCK_ROWS", rows, row),
            _warps(row * col // 256),
            _programs(1 if is_alone else tiles),
            _stages(),
        ]


def is_crossed(kernel: LoopKernel) -> bool:
    """Whether some tensor has its neighbours in memory along rows, as a transposed operand has."""
    accesses = [v.attr for v in kernel.values if isinstance(v.attr, Access)] + [s.access for s in kernel.stores]
    return any(
        {d for d, _ in a.strides} & set(kernel.cols) and any(d in kernel.rows for d, stride in a.strides if stride == 1)
        for a in accesses
    )


def _work(kernel: LoopKernel) -> int:
    """Rough arithmetic for an element; a number of float64 takes two registers."""
    floats = [v for v in kernel.values if is_float(v.dtype) and v.op != "where"]
    return sum(COST.get(v.op, 1) * (2 if v.dtype == "float64" else 1) for v in floats)


def _of(kernel: LoopKernel, dims: tuple[int, ...]) -> Dim:
    return product(kernel.dims[d] for d in dims)


def _power(size: int) -> int:
    """The smallest power of two that holds a size."""
    return 1 << max(0, size - 1).bit_length()


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << k for k in range(low.bit_length() - 1, max(low, high).bit_length()))


def _blocks(name: str, choices: tuple[int, ...], default: int) -> Knob:
    return Knob(name, choices, default, f"{'rows' if name == 'BLOCK_ROWS' else 'columns'} of a tile")


def _warps(wanted: int, most_usual: int = 8) -> Knob:
    """``wanted``: warps for the size of a tile. ``most_usual``: 32 where a tile needs the registers of so many."""
    choices = (*WARPS, 32) if most_usual > 16 else WARPS
    usual = [w for w in choices if w <= min(most_usual, max(1, wanted))]
    return Knob("num_warps", choices, usual[-1], "warps of a program")


def _stages() -> Knob:
    return Knob("num_stages", (1, 2, 3), 1, "loads in flight ahead of a loop's work")


def _programs(tiles: int, most: int = 1024, usual: int = 256) -> Knob:
    """How many programs share the tiles; one may finish by itself, several need a second kernel.

    ``usual``: where there are many tiles. Each program of a column sum writes a row of scratch memory.
    """
    choices = tuple(n for n in (1, 64, 256, 1024) if n <= max(1, most))
    return Knob(
        "PROGRAMS", choices, 1 if tiles <= 8 else min(usual, choices[-1]), "programs that share a reduction over rows"
    )
