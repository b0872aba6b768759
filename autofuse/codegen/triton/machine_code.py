"""What a compiled GPU kernel does, read from its disassembly: memory accesses, barriers, shuffles.

In: the disassembly of a cubin (`disassemble`) or the AMD assembler's text. Out: counts of instructions by kind, bytes
of each access. Guarantee: nothing is run and nothing is timed. Counts are of instructions in the text, not of those
that run: a loop's body counts once. Sources: NVIDIA's CUDA Binary Utilities (instructions of sm_80 and sm_90), AMD's
CDNA 3 instruction set guide. Free of torch and of Triton, whose wheel has the disassembler.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from autofuse.errors import CompilerError

_WIDE = ("loads", "stores")


@dataclass(frozen=True)
class MachineCode:
    """Instructions of one kernel by kind."""

    instructions: int
    loads: Mapping[int, int]  # from global memory: how many of each width in bytes a thread
    stores: Mapping[int, int]
    local: int  # accesses to memory of a thread's own: spills, and arrays that are indexed
    barriers: int
    shuffles: int  # between the threads of a warp
    special: int  # exponentials, reciprocals, roots and so on in their own unit
    matrix: int  # products of tiles

    def to_json(self) -> dict[str, Any]:
        """The counts; widths are text, as JSON has keys."""
        widths = {name: {str(width): n for width, n in getattr(self, name).items()} for name in _WIDE}
        return asdict(self) | widths

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        widths = {name: {int(width): n for width, n in data[name].items()} for name in _WIDE}
        return cls(**{**data, **widths})


def total(codes: Sequence[MachineCode]) -> MachineCode:
    """The counts of several kernels together."""
    found = [asdict(code) for code in codes]
    loads, stores = (dict(sorted(sum((Counter(f[name]) for f in found), Counter()).items())) for name in _WIDE)
    counts = {name: sum(f[name] for f in found) for name in found[0] if name not in _WIDE}
    return MachineCode(loads=loads, stores=stores, **counts)


# ---- reading --------------------------------------------------------------------------------------------------

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}  # suffixes of NVIDIA's accesses; else 4 bytes
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)")
_AMD = re.compile(r"^\s+([a-z][a-z0-9_]*)", re.MULTILINE)
_AMD_WIDTHS = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8,
               "dwordx3": 12, "dwordx4": 16}  # fmt: skip
_AMD_SPECIAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")


def nvidia_tool(name: str) -> Path:
    """A tool of NVIDIA's in Triton's wheel, such as ``nvdisasm``. Raises CompilerError where it is missing."""
    found = importlib.util.find_spec("triton")
    path = Path(str(found and found.origin)).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise CompilerError(f"expected Triton's wheel with {path}: pip install 'autofuse[gpu]'")
    return path


def disassemble(cubin: bytes, nvdisasm: Path, timeout_seconds: float = 120.0) -> str:
    """The text of a cubin. Raises CompilerError where the disassembler cannot read it, or not in time.

    It takes 0.4 s, whatever the kernel: it unpacks its tables of all architectures each time.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, timeout=timeout_seconds)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompilerError(f"expected {nvdisasm} to run, found: {error}") from None
    if done.returncode != 0:
        raise CompilerError(f"expected nvdisasm to read a cubin, found: {done.stderr.strip()[:200]}")
    return done.stdout


def read_nvidia(text: str) -> MachineCode:
    """Counts of a disassembly by nvdisasm. Raises CompilerError for text without instructions."""
    words = [found.split(".") for found in _SASS.findall(text)]
    kinds = Counter(name for name, *_ in words)
    if not kinds:
        raise CompilerError(f"expected instructions of an NVIDIA GPU, found {text[:80]!r}")

    def widths(*names: str) -> dict[int, int]:
        found = Counter(
            next((_WIDTHS[part] for part in parts if part in _WIDTHS), 4) for name, *parts in words if name in names
        )
        return dict(sorted(found.items()))

    return MachineCode(
        instructions=sum(kinds.values()) - kinds["NOP"],
        loads=widths("LDG", "LDGSTS"),
        stores=widths("STG"),
        local=kinds["LDL"] + kinds["STL"],
        barriers=kinds["BAR"],
        shuffles=kinds["SHFL"],
        special=kinds["MUFU"],
        matrix=sum(count for name, count in kinds.items() if name.endswith(("MMA", "GMMA"))),
    )


def read_amd(text: str) -> MachineCode:
    """Counts of the assembler's text that Triton keeps for AMD. Raises CompilerError for text without instructions."""
    body = text.partition("s_endpgm")[0]
    names = [name for name in _AMD.findall(body) if re.match(r"[vsd]s?_|global_|buffer_|flat_|scratch_", name)]
    if not names:
        raise CompilerError(f"expected instructions of an AMD GPU, found {text[:80]!r}")

    def widths(kind: str) -> dict[int, int]:
        found: Counter[int] = Counter()
        for name in names:
            if match := re.match(rf"(?:global|buffer|flat)_{kind}_(\w+?)(?:_d16(?:_hi)?)?$", name):
                found[_AMD_WIDTHS.get(match[1], 4)] += 1
        return dict(sorted(found.items()))

    return MachineCode(
        instructions=len(names),
        loads=widths("load"),
        stores=widths("store"),
        local=sum(name.startswith("scratch_") for name in names),
        barriers=names.count("s_barrier"),
        shuffles=sum("_dpp" in name or name.startswith(("ds_bpermute", "ds_permute", "ds_swizzle")) for name in names),
        special=sum(bool(_AMD_SPECIAL.match(name)) for name in names),
        matrix=sum(name.startswith("v_mfma") for name in names),
    )
