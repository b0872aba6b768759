"""Inductor's kernels for an H100, made and compiled on a machine without a GPU.

In: a function and its arguments on the CPU. Out: what one call of its forward graph, and one of its backward graph,
would launch: kernels as `Kernel` records, and calls of libraries. `install` changes this process for good; a torch
without CUDA is needed. Nothing is run: Inductor's own generated Python is called on tensors without data, and its
kernels note how they would have been launched. Settings are Inductor's defaults without autotuning: of several
configurations of a kernel the first one, which it would begin with.

Inductor has no switch for this; what stands in for CUDA is what torch 2.13 asks for. The device's properties are those
of an H100 (NVIDIA's data sheet and `cudaGetDeviceProperties`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._dynamo.device_interface
import torch._functorch.config
import torch._inductor.config
import torch.utils._triton
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from benchmarks.patterns_count import is_free
from ptx import device
from ptx.static_kernels import ARCHITECTURE, Buffer, Launches, from_triton

_BYTES = 4 << 20  # of the device: Inductor makes numbers of its constants there
DEVICE = torch.device("cuda:0")
_BOUND = (  # by Dynamo, from torch.cuda
    "current_device", "device_count", "exchange_device", "get_device_properties", "is_bf16_supported",
    "maybe_exchange_device",
)  # fmt: skip
_CONFIG = {
    "use_static_triton_launcher": False,
    "compile_threads": 1,
    "fx_graph_cache": False,
    "assume_aligned_inputs": True,
    "shape_padding": False,  # of products, decided by timing them on the device
}


class Compiled(Exception):
    """All graphs of a call are compiled; the call itself goes no further."""


@functools.cache
def install() -> None:
    """Let torch believe that there is an H100. Raises RuntimeError where there is CUDA."""
    device.install(_BYTES, device.H100)
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    torch._C._cuda_getCurrentRawStream = lambda index: 0  # type: ignore[attr-defined]
    import torch._inductor.fx_passes.misc_patterns as misc_patterns

    misc_patterns._misc_patterns_init = lambda *args, **kwargs: None  # traces a permutation drawn on the device
    interface: Any = torch._dynamo.device_interface
    for name in _BOUND:
        own = f"_{name}" if "exchange" in name else name
        setattr(interface.CudaInterface, name, staticmethod(getattr(torch.cuda, own)))
    interface.caching_worker_device_properties["cuda"] = [device.H100]
    interface.caching_worker_current_devices["cuda"] = 0
    interface.init_device_reg()
    backend = make_backend(GPUTarget("cuda", int(ARCHITECTURE.partition(":")[2]), 32))
    torch.utils._triton.triton_backend = lambda: backend  # type: ignore[assignment]
    from torch._inductor.runtime import triton_helpers

    triton_helpers.set_driver_to_gpu = lambda: None


def on_device(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these on the device, without data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty_like(t, device=DEVICE).requires_grad_(t.requires_grad) for t in tensors]


def until_compiled(function: Callable[..., Any], arguments: Sequence[torch.Tensor], backend: Any) -> None:
    """Compile the graphs of a call, the backward one too, by a backend whose callables raise `Compiled`."""
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._dynamo.config.patch(suppress_errors=False),
    ):
        try:
            torch.compile(function, backend=backend)(*arguments)
        except Compiled:
            return
    raise RuntimeError("expected a function with a graph that can be compiled, found none")


def launches(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[Launches]:
    """What a call of each of the function's graphs launches, the forward one first."""
    install()
    found: list[Launches] = []

    def compile_to_module(graph: GraphLowering) -> Any:
        found.append(_noted(graph))

        def call(arguments: Any) -> Any:
            raise Compiled

        return SimpleNamespace(call=call, __file__="", key="")

    with (
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        torch._inductor.config.patch(_CONFIG),
    ):
        until_compiled(function, on_device(tensors), "inductor")
    return found


# ---- calling what Inductor wrote ---------------------------------------------------------------------------------


@dataclass
class _Noting:
    """Stands in for one of Inductor's kernels: notes its launches."""

    name: str
    source: str
    into: Launches
    kept: list[Any]  # or memory that is given back would be taken for the same

    def run(self, *arguments: Any, stream: Any = None, **named: Any) -> None:
        tuner = _compiled(self.name, self.source)
        made = tuner.compile_results[0]
        signature = tuner.triton_meta["signature"]
        names = list(tuner.fn.arg_names)
        given = dict(zip(names, arguments, strict=False))
        meta = {**given, **made.config.kwargs, "num_warps": made.config.num_warps}
        grid = _grid(tuner, made.config, meta)
        self.kept.append(given)
        passed = [given[name] for name in names if signature.get(name, "constexpr") != "constexpr"]
        self.into.kernels.append(from_triton(made.kernel, grid, [_argument(value) for value in passed]))


def _argument(value: Any) -> int | Buffer:
    if not isinstance(value, torch.Tensor):
        return int(value)
    storage = value.untyped_storage()
    return Buffer(storage._cdata, storage.nbytes(), value.storage_offset() * value.element_size())


def _grid(tuner: Any, config: Any, meta: dict[str, Any]) -> tuple[int, int, int]:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    x, y, z = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(meta)
    return int(x), int(y), int(z)


def _compiled(name: str, source: str) -> Any:
    from torch._inductor.codecache import PyCodeCache

    tuner = getattr(PyCodeCache.load(source), name)
    if not tuner.compile_results:
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            tuner.configs = tuner.configs[:1]
            tuner.precompile(warm_cache_only=True)
    return tuner


class _Libraries(TorchDispatchMode):
    """Notes the operators that run, but for views and allocations."""

    def __init__(self, into: Launches) -> None:
        super().__init__()
        self._into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_free(func):
            self._into.library.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def _noted(graph: GraphLowering) -> Launches:
    """What a call of a lowered graph launches: its Python is called on tensors without data."""
    text = graph.codegen()[0].value
    found, kept = Launches(_phase(graph)), list[Any]()
    compiler = SimpleNamespace(
        triton=lambda name, source, **kwargs: _Noting(name, source, found, kept), wait=lambda scope: None
    )
    space: dict[str, Any] = {"__name__": "inductor_graph"}
    with (
        unset_fake_temporarily(),
        mock.patch("torch._inductor.async_compile.AsyncCompile", lambda: compiler),
        mock.patch.multiple(torch.cuda, _DeviceGuard=lambda index: nullcontext(), set_device=lambda index: None),
    ):
        exec(compile(text, "<inductor>", "exec"), space)
        space["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype, device="meta"
        )
        inputs = [_without_data(value) for value in graph.graph_inputs.values()]
        call = space["call"] if "call" in space else space["Runner"]([]).call
        with _Libraries(found):
            call(inputs)
    return found


def _phase(graph: GraphLowering) -> str:
    return "backward" if graph.is_backward else "forward"


def _without_data(value: Any) -> torch.Tensor:
    size, stride = [int(n) for n in value.get_size()], [int(n) for n in value.get_stride()]
    return torch.empty_strided(size, stride, dtype=value.get_dtype(), device="meta")
