"""What a loop kernel does in one shape of program, for each element and in all: what `ranking` reckons with.

In: a loop kernel, a configuration, sizes. Out: a `Shape`: its passes over the elements with their accesses, arithmetic,
reductions and the registers that they keep alive. Guarantee: nothing here depends on the sides of a tile or the number
of warps, so a space of configurations has few shapes. Free of torch and of Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autofuse.codegen.column_passes import ColumnPass
from autofuse.codegen.dtypes import DTYPES
from autofuse.codegen.knobs import Sizes
from autofuse.codegen.loops import COST, TRANSCENDENTAL, Access, LoopKernel
from autofuse.codegen.one_pass import merge_passes
from autofuse.codegen.triton.program import Spread
from autofuse.ir.records import Config
from autofuse.ir.shape import evaluate, product

SHAPING = ("persistent", "passes", "math")  # knobs that a shape depends on
FAST_COST = 3  # of a function that is one approximate instruction
# Registers of an element for each load that is kept, and for what else it takes. Of 442 kernels for sm_90 nine in ten
# have 0.6 to 1.5 times what is guessed by them.
KEPT, TEMPORARIES = 0.75, 0.5
LOADS = ("load", "load_if", "gather", "gather_if")


@dataclass(frozen=True)
class Touch:
    """One access to a tensor."""

    nbytes: int  # of an element
    elements: int  # different ones, in the whole nest
    along: str  # where neighbours in memory are: "cols", "rows" or "" for neither
    in_rows: bool  # whether it varies along rows, and along columns
    in_cols: bool
    waits: int = 1  # for memory, until it is there: twice behind an index that is loaded


@dataclass(frozen=True)
class Phase:
    """One pass over the elements of a tile, or of all tiles of its rows."""

    loads: tuple[Touch, ...]
    stores: tuple[Touch, ...]
    work: float  # instructions for an element
    reductions: int  # of rows that it completes
    words: float  # registers of an element that it keeps alive


@dataclass(frozen=True)
class Shape:
    """A kernel in one shape of program."""

    kernel: LoopKernel
    rows: int
    cols: int
    phases: tuple[Phase, ...]
    is_looped: bool
    has_column_tiles: bool
    columns: int  # how many sums of columns it has
    singles: int  # and results of everything
    sums: float  # registers of an element that hold them from tile to tile
    touches: tuple[Touch, ...]  # each tensor once

    @property
    def grows(self) -> bool:
        """Whether sums of columns grow in scratch memory."""
        return self.is_looped and self.columns > 0

    def is_alone(self, programs: int) -> bool:
        """Whether so many programs, as a configuration asks for, finish by themselves: `Spread.is_alone`."""
        if not self.columns and not self.singles:
            return True
        return programs == 1 and not (self.columns and (self.is_looped or self.singles))


def shape_of(kernel: LoopKernel, config: Config, values: Sizes) -> Shape:
    """The shape that a configuration gives a kernel of one nest."""
    knobs, spread = dict(config), Spread.of(kernel, config)
    if spread.is_looped and knobs.get("passes") == "one":
        kernel = merge_passes(kernel)
        spread = Spread.of(kernel, config)
    reader = _Reader(kernel, values, knobs.get("math") == "fast")
    phases = spread.passes.phases
    words = {n: _words(kernel, n) for n in spread.sinks}
    return Shape(
        kernel=kernel,
        rows=max(1, reader.size(kernel.rows)),
        cols=max(1, reader.size(kernel.cols)),
        phases=tuple(reader.phase(found, phases, spread.is_looped) for found in phases),
        is_looped=spread.is_looped,
        has_column_tiles=spread.has_column_tiles,
        columns=len(spread.col_sinks),
        singles=len(spread.one_sinks),
        sums=sum(words[n] for n in (spread.one_sinks if spread.is_looped else spread.sinks)),
        touches=tuple(reader.tensors().values()),
    )


class _Reader:
    """Reads one kernel at some sizes."""

    def __init__(self, kernel: LoopKernel, values: Sizes, is_fast: bool) -> None:
        self._kernel, self._values, self._is_fast = kernel, values, is_fast

    def size(self, dims: Iterable[int]) -> int:
        return evaluate(product(self._kernel.dims[d] for d in dims), self._values)

    def touch(self, access: Access, waits: int = 1) -> Touch:
        kernel = self._kernel
        dims = {d for d, _ in access.strides}
        unit = {d for d, stride in access.strides if stride == 1}
        return Touch(
            nbytes=DTYPES[kernel.params[access.param].dtype].nbytes,
            elements=self.size(dims),
            along="cols" if unit & set(kernel.cols) else "rows" if unit & set(kernel.rows) else "",
            in_rows=bool(dims & set(kernel.rows)) or access.indirect != 0,
            in_cols=bool(dims & set(kernel.cols)),
            waits=waits,
        )

    def phase(self, found: ColumnPass, phases: tuple[ColumnPass, ...], is_looped: bool) -> Phase:
        """A pass. Without a loop over columns it loads what no pass before it has loaded, and keeps the rest."""
        earlier = {n for other in phases if other.stage < found.stage for n in other.values}
        later = {n for other in phases if other.stage > found.stage for n in other.values}
        fresh = [n for n in found.values if is_looped or n not in earlier]
        kept = {n for n in found.values if self._is_load(n)}
        kept |= set() if is_looped else {n for n in earlier & later if self._is_load(n)}
        carried = len(found.reductions) if is_looped else 0
        return Phase(
            loads=tuple(self._load(n) for n in (*fresh, *found.row_values) if self._is_load(n)),
            stores=tuple(self.touch(store.access) for store in found.stores),
            work=float(sum(self._cost(n) for n in fresh)),
            reductions=len(found.reductions),
            words=KEPT * sum(_words(self._kernel, n) for n in kept) + carried + TEMPORARIES,
        )

    def tensors(self) -> dict[int, Touch]:
        """The largest access to each parameter."""
        found: dict[int, Touch] = {}
        values = [v.attr for v in self._kernel.values if isinstance(v.attr, Access)]
        for access in (*values, *(store.access for store in self._kernel.stores)):
            touch = self.touch(access)
            if access.param not in found or found[access.param].elements < touch.elements:
                found[access.param] = touch
        return found

    def _is_load(self, number: int) -> bool:
        return self._kernel.values[number].op in LOADS

    def _load(self, number: int) -> Touch:
        value = self._kernel.values[number]
        assert isinstance(value.attr, Access)
        return self.touch(value.attr, 2 if value.op.startswith("gather") else 1)

    def _cost(self, number: int) -> int:
        value = self._kernel.values[number]
        cost = FAST_COST if self._is_fast and value.op in TRANSCENDENTAL else COST.get(value.op, 1)
        return cost * (2 if value.dtype == "float64" else 1)


def _words(kernel: LoopKernel, number: int) -> int:
    """Registers of one element of a value."""
    return 2 if kernel.values[number].dtype in ("float64", "int64") else 1
