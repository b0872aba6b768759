"""A worker whose "device" breaks as GPUs do; which way is the last argument. Run as a module by the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofuse.daemon.workers.cpu import main
from autofuse.errors import DeviceError
from autofuse.ir.operation import NodeForm
from autofuse.tuner.gpu_rig import is_fatal
from autofuse.tuner.node_bench import CpuRunner, DeviceRunner

ERRORS: dict[str, Exception] = {
    "sticky": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "memory": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB."),
    "driver's memory": DeviceError("expected cuModuleLoadData to succeed, found CUDA_ERROR_OUT_OF_MEMORY"),
    "mild": RuntimeError("expected scalar type Float but found Half"),
    "without a name": RuntimeError("CUDA error: unknown error"),
}


def synchronize() -> None:
    """As a device that answers, unless its context is gone."""
    if sys.argv[3] == "without a name":
        raise ERRORS[sys.argv[3]]


class Broken(CpuRunner):
    def unfused(self, form: NodeForm, values: Sequence[int]) -> Callable[..., Any]:
        raise ERRORS[sys.argv[3]]

    def is_fatal(self, error: Exception) -> bool:
        return is_fatal(error, synchronize)


def _rig(memory_bytes: int) -> DeviceRunner:
    if sys.argv[3] == "absent":
        raise RuntimeError("expected a device H200, found none")
    if sys.argv[3] == "dies":
        os._exit(3)
    return Broken()


if __name__ == "__main__":
    main(_rig, *(int(text) for text in sys.argv[1:3]))
