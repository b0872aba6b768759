"""Torch's functions for a launch: the current device, its stream, uninitialised memory.

In: nothing. Out: `TorchCalls`, the cheapest functions of this build of torch. Tests without a GPU replace it as a
whole: with CPU tensors in place of a device's, everything except the driver runs as on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

try:  # as in launch.py: cheaper than torch.empty_strided
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined]
        _empty_strided_cuda as empty_strided_cuda,
    )
except ImportError:
    empty_strided_cuda = None

Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class TorchCalls:
    """Functions of torch, as launches call them."""

    current_device: Callable[[], int]  # index
    raw_stream: Callable[[int], int]  # handle of a device's current stream
    on_device: Callable[[int], AbstractContextManager[object]]
    empty: Empty  # (sizes, strides, dtype) on the current device


@functools.cache
def torch_calls() -> TorchCalls:
    """Those of CUDA, which ROCm answers to as well."""
    return TorchCalls(
        getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device),
        getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream),
        torch.cuda.device,
        empty_strided_cuda or _empty,
    )


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _empty(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cuda")
