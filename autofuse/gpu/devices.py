"""The GPUs of this process: their records for decisions, and their timers.

In: the index of a device that the script uses. Out: its `DeviceInfo` (model, multiprocessors, capability, memory);
an `EventTimer` that never starts CUDA itself.
"""

from __future__ import annotations

import torch

from autofuse.gpu.capturing import is_capturing
from autofuse.ir.records import DeviceInfo
from autofuse.observer.device_timer import EventCalls, EventTimer

CPU = torch.device("cpu")


def gpu_device(index: int) -> DeviceInfo:
    """The model of a device that torch calls ``cuda:index``. Starts CUDA where nothing has yet."""
    found = torch.cuda.get_device_properties(index)
    architecture = str(getattr(found, "gcnArchName", "")).partition(":")[0]  # ROCm: "gfx942:sramecc+:xnack-"
    isa = architecture if torch.version.hip else f"sm_{found.major}{found.minor}"
    return DeviceInfo("cuda", found.name, found.multi_processor_count, isa, found.total_memory)


def device_count() -> int:
    """GPUs that this process may use. Starts nothing."""
    return int(torch.cuda.device_count())


def supports_bf16(index: int) -> bool:
    """Whether arithmetic in bfloat16 is the hardware's own, on a device that torch calls ``cuda:index``."""
    return torch.version.hip is not None or int(torch.cuda.get_device_properties(index).major) >= 8


def event_timer() -> EventTimer:
    """A timer of CUDA streams, idle until the script has started CUDA."""
    calls = EventCalls(
        is_active=torch.cuda.is_initialized,
        is_capturing=is_capturing,
        new_event=lambda: torch.cuda.Event(enable_timing=True),
        stream=torch.cuda.current_stream,
        index_of=_index_of,
    )
    return EventTimer(calls)


def _index_of(tensor: torch.Tensor) -> int:
    return int(tensor.get_device()) if tensor.is_cuda else -1
