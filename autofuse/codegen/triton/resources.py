"""What a compiled kernel takes of a GPU, and how much of the GPU it can occupy with that.

In: the assembler's figures for a kernel, and a target such as "cuda:90". Out: how many warps of the kernel one
multiprocessor can hold, and what allows no more. Sources: the CUDA C++ Programming Guide 12.8 (limits of a
multiprocessor, units of registers), AMD's CDNA 3 instruction set guide. Free of torch, of Triton and of sympy: reports
import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a device, as the assembler reports it."""

    registers: int  # a thread
    spill_bytes: int  # a thread, stores and loads of spilled registers together
    shared_bytes: int  # a program
    threads: int  # a program


@dataclass(frozen=True)
class Occupancy:
    """How many warps (waves of AMD) of a kernel a multiprocessor holds at once."""

    warps: int
    most: int
    limiter: str  # what allows no more: "warps", "programs", "registers", "kilobytes of shared memory"

    @property
    def share(self) -> float:
        return self.warps / self.most


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor (compute unit of AMD) holds."""

    warp_size: int
    warps: int
    programs: int
    registers: int  # of 32 bits, for all lanes of all warps
    register_unit: int  # a warp is given a multiple of so many
    shared_bytes: int
    reserved_bytes: int  # of shared memory, for each program


def _nvidia(warps: int, programs: int, shared_kib: int) -> Multiprocessor:
    return Multiprocessor(32, warps, programs, 65536, 256, shared_kib << 10, 1024)


MULTIPROCESSORS: Mapping[str, Multiprocessor] = {
    "cuda:80": _nvidia(64, 32, 164),
    "cuda:86": _nvidia(48, 16, 100),
    "cuda:89": _nvidia(48, 24, 100),
    "cuda:90": _nvidia(64, 32, 228),
    "cuda:100": _nvidia(64, 32, 228),
    "cuda:120": _nvidia(48, 24, 100),
    "hip:gfx90a": Multiprocessor(64, 32, 32, 4 * 512 * 64, 8 * 64, 64 << 10, 0),
    "hip:gfx942": Multiprocessor(64, 32, 32, 4 * 512 * 64, 8 * 64, 64 << 10, 0),
}


def occupancy(taken: Resources, target: str) -> Occupancy | None:
    """How many warps of a kernel fit a multiprocessor of a target; None for a target that is not in the table."""
    device = MULTIPROCESSORS.get(target)
    if device is None:
        return None
    warps = -(-taken.threads // device.warp_size)
    of_warp = -(-taken.registers * device.warp_size // device.register_unit) * device.register_unit
    limits = {
        "warps": device.warps // warps,
        "programs": device.programs,
        "registers": device.registers // of_warp // warps if of_warp else device.programs,
        "kilobytes of shared memory": device.shared_bytes // (taken.shared_bytes + device.reserved_bytes)
        if taken.shared_bytes
        else device.programs,
    }
    limiter = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limiter] * warps, device.warps, limiter)
