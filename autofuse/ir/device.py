"""The machine that decisions are keyed by.

In: /proc/cpuinfo and the affinity of this process. Out: a `DeviceInfo`. Torch-free: the daemon uses it too. Guarantee:
processors with other instructions have other keys, though clouds give them the same name.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

from autofuse.ir.records import DeviceInfo

_ISA = (("avx512f", "avx512"), ("avx2", "avx2"), ("avx", "avx"), ("asimd", "neon"), ("sse2", "sse2"))
# Of /proc/cpuinfo's flags those that a compiler may use; others come and go with kernels and microcode.
_INSTRUCTIONS = (
    *(
        "avx",
        "amx",
        "sse",
        "ssse3",
        "pni",
        "fma",
        "f16c",
        "bmi",
        "gfni",
        "vaes",
        "vpclmulqdq",
        "aes",
        "pclmulqdq",
        "sha",
    ),
    *("popcnt", "abm", "lzcnt", "adx", "movbe", "movdir", "xop", "tbm", "rdrand", "rdseed", "clwb", "serialize"),
    *("asimd", "sve", "sme", "i8mm", "bf16", "crc32", "atomics", "fphp", "dcpop"),
)


@functools.cache
def cpu_device() -> DeviceInfo:
    """The CPU that this process may use. As it was when first asked: a script may pin its threads later on."""
    name, flags = _cpuinfo()
    return DeviceInfo("cpu", name, len(usable_cores()), instruction_set(flags))


def instruction_set(flags: frozenset[str]) -> str:
    """The widest vectors, and a digest of all that a compiler may use, such as ``avx512-1f9a0c``."""
    isa = next((isa for flag, isa in _ISA if flag in flags), platform.machine())
    known = sorted(flag for flag in flags if flag.startswith(_INSTRUCTIONS))
    return f"{isa}-{hashlib.sha256(' '.join(known).encode()).hexdigest()[:6]}" if known else isa


@functools.cache
def usable_cores() -> frozenset[int]:
    """The cores that this process may run on, likewise."""
    return frozenset(os.sched_getaffinity(0))


def _cpuinfo() -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return name, flags
