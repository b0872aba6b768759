"""What a configuration of a Triton kernel may cost on a GPU, guessed before anything is compiled.

In: a loop kernel, sizes, a few rates of a device, a configuration. Out: seconds, for an order in which configurations
are tried, and for nothing else: the guess may be wrong by a factor, and no decision rests on it. Guarantee: every
configuration has a cost; finding it takes some 50 us. The model is a roofline with Little's law: a launch takes as long
as the most of moving its bytes, issuing its instructions, and waiting for memory as often as a program waits, times the
rounds in which programs fit the device. Occupancy follows from registers, which are guessed from what an element keeps
alive. Sources: Williams, Waterman and Patterson 2009 (roofline); Volkov 2016 (latency and occupancy). Free of torch and
of Triton.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autofuse.codegen.knobs import Sizes
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.triton.finish import FINISH_COLS, PARTIALS
from autofuse.codegen.triton.horizontal import nest_config
from autofuse.codegen.triton.program import BLOCK_PARTIALS, tile_config
from autofuse.codegen.triton.resources import MULTIPROCESSORS, Resources, occupancy
from autofuse.codegen.triton.work import SHAPING, Phase, Shape, Touch, shape_of
from autofuse.ir.records import Config

SECTOR = 32  # bytes that memory moves at once
WIDEST = 16  # bytes of a thread's access
LATENCY_SECONDS = 650e-9  # of global memory under load
ISSUED = 4  # instructions of warps that a multiprocessor begins in a cycle
DEPENDENT = 5  # cycles from an instruction of a warp to its next one
BARRIER = 40  # cycles
NEXT_LAUNCH = 0.6  # of a launch: the part that its predecessor does not hide
OWN_REGISTERS = 18  # of a thread beside elements: positions, masks, pointers
MOST_REGISTERS = 255
SPILLS = 10.0  # times the cost: what spills is never timed, but the guess of registers may be wrong
CACHE = 1.6  # bytes that the cache moves while memory moves one
PORT_BYTES = 64  # that a multiprocessor moves in a cycle
OWN_INSTRUCTIONS = 16  # of a tile beside elements: positions, masks
ACCESS = 4  # instructions of an access, with its address and its mask


@dataclass(frozen=True)
class Rates:
    """A model of GPU, as far as an order of configurations needs it."""

    target: str  # "cuda:90"
    multiprocessors: int
    bytes_per_second: float  # of its memory
    hertz: float
    launch_seconds: float = 2.5e-6


# Of the usual card of each architecture, from its maker's data sheet: bytes a second, cycles a second.
_USUAL: Mapping[str, tuple[float, float]] = {
    "cuda:80": (2.0e12, 1.41e9), "cuda:86": (0.7e12, 1.7e9), "cuda:89": (0.86e12, 2.5e9), "cuda:90": (3.35e12, 1.7e9),
    "cuda:100": (8.0e12, 1.85e9), "cuda:120": (1.8e12, 2.4e9),
    "hip:gfx90a": (1.6e12, 1.7e9), "hip:gfx942": (5.3e12, 2.1e9),
}  # fmt: skip


def rates_of(target: str, multiprocessors: int) -> Rates | None:
    """The rates of a device; None for a target that is not in the tables."""
    if target not in _USUAL or target not in MULTIPROCESSORS or multiprocessors < 1:
        return None
    return Rates(target, multiprocessors, *_USUAL[target])


class Ranking:
    """The expected cost of each configuration of one kernel at some sizes."""

    def __init__(self, kernel: LoopKernel, values: Sizes, rates: Rates) -> None:
        self._kernel, self._values, self._rates = kernel, values, rates
        self._shapes: dict[tuple[int, Config], Shape] = {}  # by the nest, and the knobs that shape it

    def __call__(self, config: Config) -> float:
        """Seconds of a call, more or less."""
        rates = self._rates
        if self._kernel.rest:
            nests = (dataclasses.replace(self._kernel, rest=()), *self._kernel.rest)
            parts = [self._launches(nest, nest_config(config, nest, k), k)[0] for k, nest in enumerate(nests)]
            launches = [_side_by_side(parts)]
        else:
            launches = self._launches(self._kernel, config)
        start = rates.launch_seconds * (1.0 + NEXT_LAUNCH * (len(launches) - 1))
        return start + sum(_seconds(launch, rates) for launch in launches)

    def _launches(self, kernel: LoopKernel, config: Config, number: int = 0) -> list[_Launch]:
        """``number``: of the nest."""
        key = number, tuple(pair for pair in config if pair[0] in SHAPING)
        if key not in self._shapes:
            self._shapes[key] = shape_of(kernel, config, self._values)
        warp = MULTIPROCESSORS[self._rates.target].warp_size
        return _Work(self._shapes[key], config, warp).launches()


# ---- what a program does ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launch:
    """One launch: what each of its programs does, and what all of them move."""

    programs: int
    warps: int  # of a program, as are the figures that follow
    registers: int  # a thread
    issued: float  # instructions of one warp
    waits: float  # for memory
    barriers: float
    asked: float  # bytes, the same ones again counted again
    moved: float  # bytes between memory and the device, of all programs


def _seconds(launch: _Launch, rates: Rates) -> float:
    device = MULTIPROCESSORS[rates.target]
    threads = launch.warps * device.warp_size
    most = min(MOST_REGISTERS, device.registers // threads)
    held = occupancy(Resources(min(launch.registers, most), 0, 0, threads), rates.target)
    at_once = max(1, held.warps // launch.warps) if held is not None else 1
    each = math.ceil(launch.programs / rates.multiprocessors)  # of the busiest multiprocessor
    rounds = math.ceil(launch.programs / (rates.multiprocessors * at_once))
    one = launch.waits * LATENCY_SECONDS + (launch.issued * DEPENDENT + launch.barriers * BARRIER) / rates.hertz
    limits = (
        launch.moved / rates.bytes_per_second,
        launch.programs * launch.asked / (CACHE * rates.bytes_per_second),
        each * launch.asked / (PORT_BYTES * rates.hertz),
        each * launch.issued * launch.warps / (ISSUED * rates.hertz),
        rounds * one,
    )
    longest = max(limits)  # others are hidden behind it, but for what comes near
    hidden = math.fsum((limit / longest) ** 4 for limit in limits)
    return longest * math.sqrt(math.sqrt(hidden)) * (SPILLS if launch.registers > most else 1.0)


def _side_by_side(parts: Sequence[_Launch]) -> _Launch:
    """Several nests in one launch: a program is one of the mean."""
    programs = sum(part.programs for part in parts)

    def mean(name: str) -> float:
        return float(sum(part.programs * getattr(part, name) for part in parts)) / programs

    return _Launch(
        programs=programs,
        warps=parts[0].warps,
        registers=max(part.registers for part in parts),
        issued=mean("issued"),
        waits=mean("waits"),
        barriers=mean("barriers"),
        asked=mean("asked"),
        moved=sum(part.moved for part in parts),
    )


class _Work:
    """The launches of one configuration."""

    def __init__(self, shape: Shape, config: Config, warp_size: int) -> None:
        knobs, tile = dict(config), tile_config(shape.kernel, config)
        self.shape, self.stages = shape, tile.stages
        self.height, self.width = tile.block_rows, tile.block_cols
        self.warps, self.warp = int(knobs.get("num_warps", 4)), warp_size
        self.threads = self.warps * warp_size
        self.each = max(1, self.height * self.width // self.threads)  # elements of a thread
        row_tiles, col_tiles = math.ceil(shape.rows / self.height), math.ceil(shape.cols / self.width)
        self.steps = col_tiles if shape.is_looped else 1  # over the columns of a tile's rows
        col_tiles = col_tiles if shape.has_column_tiles else 1
        tiles = max(1, row_tiles * col_tiles)
        others = col_tiles if shape.columns and shape.has_column_tiles else 1
        wanted = int(knobs.get("PROGRAMS", 0)) if shape.columns or shape.singles else tiles
        self.is_alone = shape.is_alone(wanted)
        self.sharing = min(max(1, wanted // others), tiles // others)
        self.programs = others * self.sharing
        self.trips = math.ceil(tiles / self.programs)
        self.filled = shape.rows * shape.cols / (tiles * self.steps * self.height * self.width)

    def launches(self) -> list[_Launch]:
        shape, again = self.shape, self.trips * self.steps
        first = _Launch(
            programs=self.programs,
            warps=self.warps,
            registers=self._registers(),
            issued=OWN_INSTRUCTIONS + again * sum(map(self._issued, shape.phases)),
            waits=sum(self._waits(phase) for phase in shape.phases) * (again / min(self.stages, again)),
            barriers=self.trips * sum(phase.reductions for phase in shape.phases) * self._barriers()
            + (again * shape.columns if shape.is_looped else 0),
            asked=again * sum(map(self._asked, shape.phases)),
            moved=sum(t.elements * t.nbytes for t in shape.touches),
        )
        return [first] if self.is_alone else [first, self._second()]

    def _registers(self) -> int:
        most = max((phase.words for phase in self.shape.phases), default=0)
        return round(OWN_REGISTERS + self.each * (most + self.shape.sums))

    def _issued(self, phase: Phase) -> float:
        """Instructions of a warp for a phase of a tile."""
        found = self.each * phase.work + OWN_INSTRUCTIONS
        for touch in (*phase.loads, *phase.stores):
            found += ACCESS * (self.each / self._wide(touch) if touch.in_cols and touch.in_rows else 1)
        return found + phase.reductions * self._rows_of_a_thread() * 2 * math.log2(self.warp)

    def _wide(self, touch: Touch) -> int:
        """Elements of one access of a thread."""
        side = {"cols": self.width, "rows": self.height}.get(touch.along, 1)
        return max(1, min(WIDEST // touch.nbytes, self.each, side))

    def _rows_of_a_thread(self) -> int:
        return max(1, self.height // max(1, self.threads // self.width))

    def _barriers(self) -> int:
        """For the sum of a row: none where one warp has all of it."""
        return 2 if self.width // 4 > self.warp and self.warps > 1 else 0

    def _waits(self, phase: Phase) -> float:
        return max((touch.waits for touch in phase.loads), default=0) + (1 if self.shape.grows else 0)

    def _asked(self, phase: Phase) -> float:
        """Bytes that a phase of a tile asks for, in whole sectors."""
        found = 0.0
        for touch in (*phase.loads, *phase.stores):
            side = {"cols": self.width, "rows": self.height}.get(touch.along, 1)
            sparse = max(1.0, SECTOR / (side * touch.nbytes))
            count = (self.height if touch.in_rows else 1) * (self.width if touch.in_cols else 1)
            found += count * touch.nbytes * sparse
        if self.shape.grows:
            found += 2 * self.shape.columns * self.width * 4
        return found * self.filled

    def _second(self) -> _Launch:
        """The launch that adds up what the programs have left."""
        shape, sums = self.shape, self.shape.columns + self.shape.singles
        columns = shape.cols if shape.columns else 1
        width, at_once = (min(self.width, FINISH_COLS), PARTIALS) if shape.columns else (1, BLOCK_PARTIALS)
        programs, steps, taken = math.ceil(columns / width), math.ceil(self.sharing / at_once), at_once * width
        each = max(1, taken // self.threads)
        return _Launch(
            programs=programs,
            warps=self.warps,
            registers=OWN_REGISTERS + 2 * each,
            issued=OWN_INSTRUCTIONS + steps * sums * (OWN_INSTRUCTIONS + ACCESS * each),
            waits=steps * sums,
            barriers=2 * sums,
            asked=steps * sums * taken * 4,
            moved=self.sharing * columns * sums * 4,
        )
