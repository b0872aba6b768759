"""Timing calls on a GPU by its own events.

In: callables that enqueue work on the current stream. Out: samples for a race (`timing.Sampler`).
Each sample: the L2 is overwritten, the device is kept busy until the whole call is enqueued, and two events stand
around the call's work; so the time between them is the device's alone, from memory, without gaps of the host. The time
until the call had been handed over is kept beside it. One synchronisation a round.
What decides: the device's time; where eager takes the host longer than the device (launch-bound), the larger of the
two, for then the host is what a script waits for.
Guarantee: samples are positive; the order within a round is the race's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from autofuse.tuner.timing import Call, RaceResult

WARM_UP = 3  # calls before timing; the first may load modules and fill torch's caches
SPIN_FACTOR = 2.0  # the device is kept busy for so many times the host's time of a call
SPIN_SECONDS = 20e-6  # plus this
L2_TIMES = 2  # so many times the L2's size is written to clear it


@dataclass(frozen=True)
class DeviceCalls:
    """The functions of torch that a sampler needs; tests replace them."""

    new_event: Callable[[], Any]  # an event that records its time
    synchronize: Callable[[], None]
    clear_l2: Callable[[], None]
    spin: Callable[[float], None]  # keep the device busy for so many seconds, without waiting
    clock: Callable[[], float] = perf_counter


def device_calls(device: torch.device) -> DeviceCalls:
    """The functions for a real device."""
    properties = torch.cuda.get_device_properties(device)
    nbytes = L2_TIMES * int(getattr(properties, "L2_cache_size", 0) or 64 << 20)
    buffer = torch.empty(nbytes, dtype=torch.int8, device=device)

    def clear_l2() -> None:
        buffer.zero_()

    cycles_per_second = _cycles_per_second()
    return DeviceCalls(
        new_event=lambda: torch.cuda.Event(enable_timing=True),
        synchronize=lambda: torch.cuda.synchronize(device),
        clear_l2=clear_l2,
        spin=lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_second)),
    )


def _cycles_per_second() -> float:
    """The measured rate of the counter that ``torch.cuda._sleep`` uses; no property of the device tells it."""
    cycles = 2_000_000
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    stop.record()
    torch.cuda.synchronize()
    return cycles / max(float(start.elapsed_time(stop)) * 1e-3, 1e-9)


class GpuSampler:
    """Device and host time of each call (`timing.Sampler`)."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._device = calls
        self._calls: Sequence[Call] = ()
        self._host_seconds: list[float] = []  # host time of each call, from warming up
        self.is_launch_bound = False
        self._device_samples: list[list[float]] = []
        self._host_samples: list[list[float]] = []

    def prepare(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._host_seconds = [self._warm_up(call) for call in calls]
        self._device_samples = [[] for _ in calls]
        self._host_samples = [[] for _ in calls]
        trial = [self._enqueue(0) for _ in range(WARM_UP)]
        self._device.synchronize()
        times = [self._read(*item) for item in trial]
        self.is_launch_bound = median(host for _, host in times) > median(device for device, _ in times)

    def _warm_up(self, call: Call) -> float:
        """Warm a call up; its host time in seconds."""
        for _ in range(WARM_UP):
            call()
        self._device.synchronize()
        began = self._device.clock()
        call()
        seconds = self._device.clock() - began
        self._device.synchronize()
        return seconds

    def round(self, order: Sequence[int]) -> list[float]:
        enqueued = [self._enqueue(index) for index in order]
        self._device.synchronize()
        found = []
        for index, item in zip(order, enqueued, strict=True):
            device, host = self._read(*item)
            self._device_samples[index].append(device)
            self._host_samples[index].append(host)
            found.append(max(device, host) if self.is_launch_bound else device)
        return found

    def _enqueue(self, index: int) -> tuple[Any, Any, float]:
        start, stop = self._device.new_event(), self._device.new_event()
        self._device.clear_l2()
        self._device.spin(SPIN_FACTOR * self._host_seconds[index] + SPIN_SECONDS)
        start.record()
        began = self._device.clock()
        self._calls[index]()
        host = self._device.clock() - began
        stop.record()
        return start, stop, host

    @staticmethod
    def _read(start: Any, stop: Any, host: float) -> tuple[float, float]:
        return max(float(start.elapsed_time(stop)) * 1e-3, 1e-9), max(host, 1e-9)

    def note(self, result: RaceResult) -> None:
        result.device, result.host = self._device_samples, self._host_samples
