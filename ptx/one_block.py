"""What one block of a compiled launch does, as a sample of all of them.

In: a program, the number of the block, the grid and the arguments. Out: a `BlockWork`: instructions of its warps, the
sectors that it asks for, how often its threads wait for memory. Guarantee: the code that the compiler made is executed,
but nothing is a time. Memory has no bytes: each read gives 0, so that work which depends on data is that of zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.machine import WARP, Launch, Machine
from ptx.memory import UNSIGNED, Conflicts, Global
from ptx.text import Address, Instruction, Operand, Program

SECTOR = 32  # bytes
_SPAN = 1 << 40  # bytes of address space for each allocation
_WARP_SPAN = 1 << 48  # sectors: more than all allocations have
# Cycles in which a quarter of an H100's multiprocessor issues an instruction of a warp; 1 for others. NVIDIA, CUDA C++
# Programming Guide 12.8, "Arithmetic Instructions"; divisions and roots as the instructions that they become.
_CYCLES = {"ex2": 2, "lg2": 2, "rcp": 2, "rsqrt": 2, "sqrt": 8, "sin": 2, "cos": 2, "tanh": 2, "div": 9}


@dataclass(frozen=True)
class BlockWork:
    """What a block does."""

    warps: int
    cycles: int  # in which its warps issue instructions, all together
    longest: int  # the same of one warp
    waits: int  # how often a thread waits for what it has asked of global memory
    barriers: int
    sectors: int  # that its warps ask global memory for, each access for each once
    touched: Mapping[int, int]  # different sectors of each allocation, by its number

    def __add__(self, other: BlockWork) -> BlockWork:
        return self.scaled(1.0, other, 1.0)

    def scaled(self, factor: float, other: BlockWork, share: float) -> BlockWork:
        """``factor`` times this and ``share`` times the other, as for a loop of which two lengths are known."""

        def both(name: str) -> int:
            return round(factor * getattr(self, name) + share * getattr(other, name))

        numbers = {*self.touched, *other.touched}
        return BlockWork(
            self.warps, both("cycles"), both("longest"), both("waits"), both("barriers"), both("sectors"),
            {n: round(factor * self.touched.get(n, 0) + share * other.touched.get(n, 0)) for n in numbers},
        )  # fmt: skip


def address_of(number: int) -> int:
    """The address of an allocation."""
    return Global(Conflicts()).base + (number + 1) * _SPAN


class _Zeros:
    """Memory that is all zeros, and forgets what is written."""

    def load(self, at: Any, size: int, *_: object) -> Any:
        return np.zeros(len(at), UNSIGNED[size])

    def store(self, *_: object) -> None:
        return None


class _Block(Machine):
    """A machine that notes what the lanes of one block do."""

    def __init__(self, program: Program, launch: Launch) -> None:
        self.cycles = np.zeros(-(-launch.threads // WARP), np.int64)
        self.waits = self.barriers = self.sectors = 0
        self.touched: list[Any] = []  # numbers of sectors
        self._awaited: set[str] = set()  # registers that loads have been asked for
        self._mask: Any = None
        memory = Global(Conflicts())
        memory.tracked = _Zeros()  # type: ignore[assignment]
        super().__init__(program, launch, memory, Conflicts(), dict.fromkeys(program.memory, 0))

    def _step(self, item: Instruction) -> Callable[[Any], None]:
        run, words = super()._step(item), item.opcode
        name, is_global = words[0], "global" in words
        given, taken = _registers(item)
        cost = _CYCLES.get(name, 1) * (2 if words[-1] == "f64" else 1)
        is_wait = words[:2] == ("cp", "async") and words[2] in ("wait_group", "wait_all")

        def noted(mask: Any) -> None:
            if self._awaited & taken or (is_wait and self._awaited):
                self.waits += 1
                self._awaited.clear()
            if name not in ("mov", "cvta"):
                self.cycles[mask.reshape(-1, WARP).any(1)] += cost
            self.barriers += name == "bar" and words[1] == "sync"
            self._mask = mask
            run(mask)
            if is_global and name == "ld":
                self._awaited |= given
            elif words[:2] == ("cp", "async") and not is_wait:
                self._awaited.add("a copy")

        return noted

    def _aligned(self, at: Any, size: int, item: Instruction) -> None:
        super()._aligned(at, size, item)
        if self._space(item) == "global":
            self._ask(at, np.flatnonzero(self._mask) // WARP)

    def _ask(self, at: Any, warps: Any) -> None:
        """Each access of a warp asks for each sector once, whatever its lanes have in common."""
        found = np.unique(warps * _WARP_SPAN + at // SECTOR)
        self.sectors += len(found)
        self.touched.append(np.unique(found % _WARP_SPAN))

    def _copy(self, text: str, to: Any, source: Any, given: Any, mask: Any, size: int) -> None:
        reading = mask & (given > 0)
        self._ask(source[reading], np.flatnonzero(reading) // WARP)
        super()._copy(text, to, source, given, mask, size)


def _registers(item: Instruction) -> tuple[set[str], set[str]]:
    """The registers that an instruction writes, and those that it reads."""
    names = [set(_names(operand)) for operand in item.operands]
    writes = 0 if item.opcode[0] in ("st", "bra", "bar", "cp", "ret") else 1
    read = set().union(*names[writes:], {item.guard} if item.guard else set())
    return set().union(*names[:writes]), read


def _names(operand: Operand) -> Iterator[str]:
    if isinstance(operand, str):
        yield operand
    elif isinstance(operand, Address):
        yield operand.base
    elif isinstance(operand, tuple):
        for part in operand:
            yield from _names(part)


def work_of(program: Program, launch: Launch, block: int, grid: int, storages: Sequence[int]) -> BlockWork:
    """What the block of this number does. ``storages``: numbers of the allocations whose sectors are counted.

    Raises `ptx.text.Unsupported` and `ptx.memory.Fault`.
    """
    machine = _Block(program, launch)
    machine.begin_at(block, (grid, 1, 1))
    machine.run()
    base = Global(Conflicts()).base
    touched = np.unique(np.concatenate(machine.touched)) if machine.touched else np.zeros(0, np.int64)
    owners = Counter(((touched * SECTOR - base) // _SPAN - 1).tolist())
    return BlockWork(
        warps=-(-launch.threads // WARP),
        cycles=int(machine.cycles.sum()),
        longest=int(machine.cycles.max()),
        waits=machine.waits,
        barriers=machine.barriers,
        sectors=machine.sectors,
        touched={n: owners.get(n, 0) for n in storages},
    )
