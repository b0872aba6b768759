"""The device under the GPU benchmark: what it is, and how calls on it are timed.

A sample on a GPU: the L2 is overwritten, the device is made to wait until the host has launched everything, then two
events stand around the call. So ``device_us`` is the device's own time, whatever the launches cost; ``host_us`` is
what the launches cost. On a CPU, which only shows that the benchmark runs, both are the clock's.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autofuse.codegen.triton.key import find_triton
from autofuse.gpu.devices import gpu_device

Call = Callable[[], object]

CYCLES_PER_US = 2000  # of the wait; more than any GPU's clock
LONGEST_WAIT_US = 5000.0


@dataclass
class Samples:
    """Microseconds, one per round."""

    device_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)


class DeviceRunner(Protocol):
    device: torch.device
    rotated_bytes: int  # inputs take turns until they take this much

    def describe(self) -> dict[str, Any]: ...

    def synchronise(self) -> None: ...

    def sample(self, calls: Sequence[tuple[Call, Samples, float]]) -> None:
        """One round: each call once, in this order; with each, the host time it is known to take in us."""


class GpuRunner:
    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        found = torch.cuda.get_device_properties(index)
        self._l2 = int(getattr(found, "L2_cache_size", 0)) or 64 << 20
        self.rotated_bytes = 2 * self._l2
        self._flushed = torch.empty(max(4 * self._l2, 256 << 20), dtype=torch.int8, device=self.device)
        self._events: list[torch.cuda.Event] = []

    def describe(self) -> dict[str, Any]:
        found = gpu_device(self.device.index)
        return {
            "gpu": found.name, "isa": found.isa, "multiprocessors": found.cores, "memory_bytes": found.memory_bytes,
            "l2_bytes": self._l2, "cuda": torch.version.cuda, "hip": torch.version.hip,
            "triton": find_triton().version,
        }  # fmt: skip

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)

    def sample(self, calls: Sequence[tuple[Call, Samples, float]]) -> None:
        while len(self._events) < 2 * len(calls):
            self._events.append(torch.cuda.Event(enable_timing=True))
        for number, (call, samples, host_us) in enumerate(calls):
            start, stop = self._events[2 * number : 2 * number + 2]
            self._flushed.fill_(number)
            torch.cuda._sleep(int(min(2 * host_us + 50.0, LONGEST_WAIT_US) * CYCLES_PER_US))
            start.record()
            began = time.perf_counter()
            call()
            samples.host_us.append((time.perf_counter() - began) * 1e6)
            stop.record()
            self.synchronise()  # here and not at the end: a full queue of launches would make the host wait
            samples.device_us.append(start.elapsed_time(stop) * 1e3)


class CpuRunner:
    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.rotated_bytes = 8 << 20
        self._flushed = torch.empty(16 << 20, dtype=torch.int8)

    def describe(self) -> dict[str, Any]:
        return {"gpu": "none: a trial of the benchmark itself, on a CPU"}

    def synchronise(self) -> None:
        pass

    def sample(self, calls: Sequence[tuple[Call, Samples, float]]) -> None:
        for number, (call, samples, _) in enumerate(calls):
            self._flushed.fill_(number % 100)
            began = time.perf_counter()
            call()
            samples.host_us.append((time.perf_counter() - began) * 1e6)
            samples.device_us.append(samples.host_us[-1])


def race(rig: DeviceRunner, calls: Mapping[str, Call], rounds: int, seconds: float) -> dict[str, Samples]:
    """All calls take turns, in an order that rotates; ends after ``rounds``, or after three once time is up."""
    names = list(calls)
    host_us = {}
    for name in names:
        calls[name]()
        rig.synchronise()
        began = time.perf_counter()
        calls[name]()
        host_us[name] = (time.perf_counter() - began) * 1e6
        rig.synchronise()
    found = {name: Samples() for name in names}
    ends = time.perf_counter() + seconds
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            turn = number % len(names)
            order = names[turn:] + names[:turn]
            rig.sample([(calls[name], found[name], host_us[name]) for name in order])
            if number >= 2 and time.perf_counter() > ends:
                break
    finally:
        if was_enabled:
            gc.enable()
    return found


def copy_bandwidth(rig: DeviceRunner, nbytes: int, rounds: int) -> float:
    """Bytes a second, read and written, of copying a tensor onto another."""
    source = torch.ones(nbytes // 4, device=rig.device)
    target = torch.empty_like(source)
    samples = race(rig, {"copy": lambda: target.copy_(source)}, rounds, 10.0)["copy"].device_us
    return 2.0 * nbytes / (statistics.median(samples) / 1e6)
