"""Launches of compiled GPU kernels as data, and what each of them does to memory.

In: a compiled kernel of Triton's, whoever wrote it, its grid and its arguments. Out: a `Kernel`; `measure` gives what
the assembler and the disassembler say of it, and what its PTX does when it is executed on the CPU: the bytes of global
memory that it touches, and those that it asks for. Guarantee: nothing is a speed. Execution is of all blocks and
threads, with 0 in all memory: kernels whose work depends on data have the work that zeros give them.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from autofuse.codegen.triton.machine_code import MachineCode, disassemble, nvidia_tool, read_nvidia
from autofuse.codegen.triton.resources import Resources, occupancy
from autofuse.errors import CompilerError
from ptx.machine import WARP, Launch, Machine, places_of
from ptx.memory import UNSIGNED, Conflicts, Global, Tracked
from ptx.text import Instruction, parse

ARCHITECTURE = "cuda:90"
MOST_LANES = 1 << 15  # threads that are executed at a time
SECTOR = 32  # bytes that memory moves at once, as NVIDIA's profiler counts; allocations begin at a multiple of it
_BEYOND = 1 << 40  # sectors


@dataclass(frozen=True)
class Buffer:
    """A pointer among a kernel's arguments."""

    storage: int  # which allocation
    nbytes: int  # of the allocation
    offset: int = 0  # bytes from its beginning


@dataclass(frozen=True)
class Kernel:
    """One launch."""

    name: str
    ptx: str
    grid: tuple[int, int, int]
    threads: int  # of a block
    shared_bytes: int
    arguments: tuple[int | Buffer, ...]


@dataclass
class Launches:
    """What one call of a graph launches."""

    phase: str
    kernels: list[Kernel] = field(default_factory=list)
    library: list[str] = field(default_factory=list)  # operators that a library runs: products, convolutions
    eager: list[tuple[str, int]] = field(default_factory=list)  # operators by eager's kernels, each with its bytes


@dataclass(frozen=True)
class Measured:
    """One launch's figures."""

    name: str
    blocks: int
    resources: Resources
    occupancy: float
    code: MachineCode
    bytes: int  # that it reads, and that it writes, each byte once
    executed: int  # PTX instructions of all threads, without moves between registers
    sectors: int  # that all warps ask for, each access for each once
    width: float  # bytes of a thread's access, in the mean over sectors
    reads: Mapping[int, int]  # of the sectors, what is read from each storage


def from_triton(kernel: Any, grid: tuple[int, int, int], arguments: Sequence[int | Buffer]) -> Kernel:
    """A launch of a kernel that Triton has compiled for NVIDIA."""
    about = kernel.metadata
    return Kernel(about.name, kernel.asm["ptx"], grid, about.num_warps * 32, about.shared, tuple(arguments))


# ---- the assembler ---------------------------------------------------------------------------------------------------


def assembled(kernel: Kernel) -> tuple[Resources, MachineCode]:
    """What the assembler makes of a kernel's PTX. Raises CompilerError."""
    architecture = re.search(r"^\.target (sm_\w+)", kernel.ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="autofuse-race-") as folder:
        text, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(kernel.ptx)
        command = [nvidia_tool("ptxas"), "-v", f"--gpu-name={architecture and architecture[1]}", text, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise CompilerError(f"expected ptxas to take {kernel.name}, found: {done.stderr[:200]}")
        image = cubin.read_bytes()
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", done.stderr)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)]
    resources = Resources(max(registers), sum(spills), kernel.shared_bytes, kernel.threads)
    return resources, read_nvidia(disassemble(image, nvidia_tool("nvdisasm")))


# ---- execution -------------------------------------------------------------------------------------------------------


class Touched(Tracked):
    """Memory of which it is known what was read and what was written."""

    def __init__(self, size: int) -> None:
        super().__init__(0, Conflicts(), "global memory", np.zeros(size, np.uint8))
        self.was_read, self.was_written = np.zeros(size, np.bool_), np.zeros(size, np.bool_)

    def load(self, at: Any, size: int, who: Any, when: Any, text: str) -> Any:
        self.was_read.reshape(-1, size)[at // size] = True
        return self.data.view(UNSIGNED[size])[at // size]

    def store(self, at: Any, size: int, values: Any, who: Any, when: Any, text: str) -> None:
        self.was_written.reshape(-1, size)[at // size] = True
        self.data.view(UNSIGNED[size])[at // size] = values.astype(UNSIGNED[size])


class _Counting(Machine):
    """A machine that counts what its lanes do."""

    def __init__(self, *arguments: Any) -> None:
        self.executed = self.sectors = self.widths = 0
        self.sectors_read: list[Any] = []  # their addresses over `SECTOR`, once for each request
        self._warps: Any = None
        super().__init__(*arguments)

    def _step(self, item: Instruction) -> Callable[[Any], None]:
        run, words = super()._step(item), item.opcode
        if words[0] in ("mov", "cvta"):
            return run

        def counted(mask: Any) -> None:
            self._warps = np.flatnonzero(mask) // WARP
            self.executed += len(self._warps)
            run(mask)

        return counted

    def _aligned(self, at: Any, size: int, item: Instruction) -> None:
        """Each access of a warp asks for each sector once, whatever its lanes have in common."""
        super()._aligned(at, size, item)
        if self._space(item) != "global":
            return
        keys = self._warps * _BEYOND + (at - self._global.base) // SECTOR
        sectors = np.unique(keys[np.append(True, keys[1:] != keys[:-1])]) % _BEYOND
        if item.opcode[0] == "ld":
            self.sectors_read.append(sectors)
        self.sectors += len(sectors)
        self.widths += size * len(sectors)


def measure(kernel: Kernel) -> Measured:
    """All figures of a launch. Raises CompilerError, `ptx.text.Unsupported` and `ptx.memory.Fault`."""
    resources, code = assembled(kernel)
    held = occupancy(resources, ARCHITECTURE)
    program, memory = parse(kernel.ptx), Global(Conflicts())
    sizes = {a.storage: a.nbytes for a in kernel.arguments if isinstance(a, Buffer)}
    places = {storage: memory.reserve(size) for storage, size in sizes.items()}
    named = {name: memory.reserve(size) for name, _, size in places_of(program)}
    memory.allocate()
    touched = memory.tracked = Touched(len(memory.tracked.data))
    for name, data, _ in places_of(program):
        memory.write(named[name], data)
    arguments = [places[a.storage] + a.offset if isinstance(a, Buffer) else a for a in kernel.arguments]
    arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's own memory: none
    blocks, sums = math.prod(kernel.grid), np.zeros(3, np.int64)
    most, reads = max(1, MOST_LANES // kernel.threads), np.zeros(len(touched.data) // SECTOR + 1, np.int64)
    for first in range(0, blocks, most):
        launch = Launch(min(most, blocks - first), kernel.threads, kernel.shared_bytes, tuple(arguments))
        machine = _Counting(program, launch, memory, Conflicts(), named)
        machine.begin_at(first, kernel.grid)
        machine.run()
        sums += (machine.executed, machine.sectors, machine.widths)
        for sectors in machine.sectors_read:
            reads += np.bincount(sectors, minlength=len(reads))
    executed, sectors_asked, widths = map(int, sums)
    spans = {n: ((place - memory.base) // SECTOR, -(-sizes[n] // SECTOR)) for n, place in places.items()}
    return Measured(
        name=kernel.name,
        blocks=blocks,
        resources=resources,
        occupancy=held.share if held else 0.0,
        code=code,
        bytes=int(touched.was_read.sum()) + int(touched.was_written.sum()),
        executed=executed,
        sectors=sectors_asked,
        width=widths / max(sectors_asked, 1),
        reads={n: int(reads[begin : begin + count].sum()) for n, (begin, count) in spans.items()},
    )
