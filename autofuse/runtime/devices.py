"""The GPUs of this process as decisions are keyed by them.

In: the index of a device that the script uses. Out: its `DeviceInfo`: model, multiprocessors, capability.
"""

from __future__ import annotations

import torch

from autofuse.ir.records import DeviceInfo


def gpu_device(index: int) -> DeviceInfo:
    """The model of a device that torch calls ``cuda:index``. Starts CUDA where nothing has yet."""
    found = torch.cuda.get_device_properties(index)
    architecture = str(getattr(found, "gcnArchName", "")).partition(":")[0]  # ROCm: "gfx942:sramecc+:xnack-"
    isa = architecture if torch.version.hip else f"sm_{found.major}{found.minor}"
    return DeviceInfo("cuda", found.name, found.multi_processor_count, isa)
