"""The machine that decisions are keyed by.

In: /proc/cpuinfo and the affinity of this process. Out: a `DeviceInfo`. Torch-free: the daemon asks the same question.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from autofuse.ir.records import DeviceInfo

_ISA = (("avx512f", "avx512"), ("avx2", "avx2"), ("avx", "avx"), ("asimd", "neon"), ("sse2", "sse2"))


@functools.cache
def cpu_device() -> DeviceInfo:
    """The CPU that this process may use. As it was when first asked: a script may pin its threads later on."""
    name, flags = _cpuinfo()
    isa = next((isa for flag, isa in _ISA if flag in flags), platform.machine())
    return DeviceInfo("cpu", name, len(usable_cores()), isa)


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
