"""The GPUs that kernels are compiled for: their names, their limits, and which binaries fit them.

In: a target such as "cuda:90" or "hip:gfx942", and the assembler's figures for a kernel. Out: figures of the target,
and for a binary that cannot run there, or would run badly, the reason in words. Figures: NVIDIA from the table
"Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide 12.8 (threads and shared memory of a
block, registers of a multiprocessor; the shared memory is what a kernel may opt in to); AMD from the CDNA 2 and CDNA 3
instruction set guides (64 KiB of LDS; 4 SIMDs of 512 vector registers of 64 lanes). Free of torch and of Triton.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.machine_code import MachineCode, total
from autofuse.errors import CompilerError

_TAKEN = ("registers", "spill_bytes", "shared_bytes", "threads")


@dataclass(frozen=True)
class Target:
    """A kind of GPU, as Triton names it."""

    backend: str  # "cuda" or "hip"
    arch: int | str  # 90, "gfx942"
    warp_size: int


@dataclass(frozen=True)
class DeviceLimits:
    """What one program may take of a device."""

    threads: int
    shared_bytes: int
    registers: int  # of all threads of a program together, 32 bits each
    register_unit: int  # a thread is given a multiple of so many


_CUDA_SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}

LIMITS = {f"cuda:{arch}": DeviceLimits(1024, size << 10, 65536, 8) for arch, size in _CUDA_SHARED_KIB.items()}
LIMITS |= {f"hip:{arch}": DeviceLimits(1024, 64 << 10, 4 * 512 * 64, 8) for arch in ("gfx90a", "gfx942")}


def parse_target(text: str) -> Target:
    """The target of a text such as "cuda:90". Raises CompilerError for a text that names none."""
    if found := re.fullmatch(r"cuda:(\d{2,3})", text):
        return Target("cuda", int(found[1]), 32)
    if found := re.fullmatch(r"hip:(gfx[0-9a-f]{3,4})", text):
        return Target("hip", found[1], 64 if found[1].startswith("gfx9") else 32)
    raise CompilerError(f"expected a target such as cuda:90 or hip:gfx942, found {text!r}")


def target_of(isa: str) -> str:
    """The target of a device: "sm_90" is cuda:90, "gfx942:sramecc+:xnack-" is hip:gfx942. Raises CompilerError."""
    name = isa.partition(":")[0]
    text = f"cuda:{name.removeprefix('sm_')}" if name.startswith("sm_") else f"hip:{name}"
    parse_target(text)
    return text


def limits_of(target: str) -> DeviceLimits:
    """The limits of a target. Raises CompilerError where they are not known."""
    if target not in LIMITS:
        raise CompilerError(f"expected one of {', '.join(LIMITS)}, whose limits are known; found {target}")
    return LIMITS[target]


def prune_reason(artifact: Artifact, limits: DeviceLimits) -> str | None:
    """Why these kernels need not be timed, in words; None where they are worth it.

    Beside kernels for aligned tensors, those for tensors at odd addresses may spill: they load element by element,
    which takes more registers, but nearly all calls have aligned tensors, and only their kernels are timed.
    """
    is_aligned = any(image.assumptions.is_aligned for image in artifact.images)
    for image in artifact.images:
        for problem in _problems(image, limits, may_spill=is_aligned and not image.assumptions.is_aligned):
            return f"{image.function} {problem}"
    return None


def _problems(image: Image, limits: DeviceLimits, may_spill: bool) -> Iterator[str]:
    taken = image.resources
    if taken.spill_bytes > 0 and not may_spill:
        yield f"spills {taken.spill_bytes} bytes of registers a thread"
    if taken.threads > limits.threads:
        yield f"has {taken.threads} threads a program, the device {limits.threads} at most"
    if taken.shared_bytes > limits.shared_bytes:
        yield f"takes {taken.shared_bytes} bytes of shared memory, the device has {limits.shared_bytes} for a program"
    registers = -(-taken.registers // limits.register_unit) * limits.register_unit
    if registers * taken.threads > limits.registers:
        yield f"takes {registers} registers for each of {taken.threads} threads, the device has {limits.registers}"


def total_resources(artifact: Artifact) -> dict[str, Any]:
    """What the store keeps of an artifact for people to read.

    The most that any of its kernels takes; as ``code``, where all of it has been read, what the machine code for the
    usual call does in its launches together (`machine_code.MachineCode`).
    """
    codes = [image.code for image in artifact.images if image.code is not None]
    most = {name: max(getattr(image.resources, name) for image in artifact.images) for name in _TAKEN}
    return {"target": artifact.target, **most, **_code(codes, len(artifact.source.passes))}


def total_of(kernels: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of all kernels of one call, from what the store keeps of each; empty where none is for a GPU."""
    found = [kernel for kernel in kernels if kernel]
    if not found:
        return {}
    codes = [MachineCode.from_json(kernel["code"]) for kernel in found if "code" in kernel]
    most = {name: max(kernel[name] for kernel in found) for name in _TAKEN}
    return {"target": found[0]["target"], **most, **_code(codes, len(found))}


def _code(codes: Sequence[MachineCode], launches: int) -> dict[str, Any]:
    return {"code": total(codes).to_json()} if len(codes) == launches else {}
