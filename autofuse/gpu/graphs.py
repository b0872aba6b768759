"""Torch's functions for CUDA graphs of ours: record launches on a private stream, replay them.

In: nothing. Out: `GraphCalls`. Tests without a GPU replace it as a whole with a player that keeps what is launched and
launches it again on the same addresses. Guarantee: a recording runs none of its work; one that fails is ended before
its error goes on. Other threads are left alone: a recording refuses what would disturb it only on its own thread, and
Python collects no garbage while it lasts, which might free another graph.

cuBLAS keeps a workspace for each stream. Torch's streams come from a pool, so that the script may get the one that we
record on: its own workspace must not be in a graph, and a graph's must not be left to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autofuse.gpu.capturing import is_capturing
from autofuse.gpu.torch_calls import Empty, torch_calls
from autofuse.observer.script_modes import modes_are_active
from autofuse.startup import gc_pause


class Graph(Protocol):
    """A recording that can be launched."""

    def replay(self) -> None:
        """Launch it on the current stream."""


class Mark(Protocol):
    """A point of a stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""


Record = Callable[[int, Any, Callable[[], Any]], tuple[Graph, Any]]


@dataclass(frozen=True)
class GraphCalls:
    """Functions of torch, as recordings and replays call them."""

    is_capturing: Callable[[], bool]
    is_left_alone: Callable[[], bool]  # whether nothing looks at single operators
    may_wait: Callable[[], bool]  # whether the script lets calls wait for the device
    device: Callable[[], int]  # index of the current one
    stream: Callable[[int], int]  # handle of a device's current stream
    index_of: Callable[[torch.Tensor], int]  # of the GPU of a tensor; -1 elsewhere
    numerics: Callable[[], Hashable]  # switches by which operators choose other kernels
    empty: Empty  # on the current device
    reserved: Callable[[int], int]  # bytes of the device that torch's allocator holds
    new_pool: Callable[[], Any]  # private memory, which recordings may share
    record: Record  # (device, pool, body): what ``body`` launches, and its result
    mark: Callable[[int], Mark]  # the point that a device's current stream has reached


@functools.cache
def graph_calls() -> GraphCalls:
    """Those of CUDA, which ROCm answers to as well."""
    calls = torch_calls()
    return GraphCalls(
        is_capturing=is_capturing,
        is_left_alone=_is_left_alone,
        may_wait=lambda: not torch.cuda.get_sync_debug_mode(),
        device=calls.current_device,
        stream=calls.raw_stream,
        index_of=lambda tensor: int(tensor.get_device()) if tensor.is_cuda else -1,
        numerics=_numerics,
        empty=calls.empty,
        reserved=torch.cuda.memory_reserved,
        new_pool=torch.cuda.graph_pool_handle,
        record=_record,
        mark=_mark,
    )


def _is_left_alone() -> bool:
    return not (torch._C._len_torch_dispatch_stack() or modes_are_active() or torch.is_anomaly_enabled())


def _numerics() -> Hashable:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
    )


def _record(index: int, pool: Any, body: Callable[[], Any]) -> tuple[Graph, Any]:
    graph = torch.cuda.CUDAGraph()
    side = _side_stream(index)
    side.wait_stream(torch.cuda.current_stream(index))
    _drop_workspaces()
    try:
        with gc_pause.paused(), torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = body()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the driver may have ended it
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        _drop_workspaces()
    return graph, result


def _drop_workspaces() -> None:
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _mark(index: int) -> Mark:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(index))
    found: Mark = event
    return found


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)
