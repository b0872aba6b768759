"""A CUDA device that has a CPU's memory: torch's own tensors, with eager's kernels of the CPU.

In: nothing; `install` changes this process for good, and a torch without CUDA is needed. Out: a `Heap`, the device's
memory, in which `torch.empty(..., device="cuda")` takes places. Tensors are torch's own in every respect: device,
dispatch key, storage, autograd on a thread of its own. An operator that no other rule answers is run by the CPU's
kernel on the same bytes, by the dispatcher's fallback for CUDA. Guarantee: fresh memory is full of `POISON`, memory
that is given back belongs to nobody, and places are multiples of 512 bytes, as those of torch's allocator.

What a CPU build of torch lacks is put in its place here, and nothing else: the guard of devices, a stream that does
nothing, events that read a clock, the properties of an A100, the allocation of strided tensors, pinned memory. Random
numbers of the device are those of the CPU's generator.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ptx.memory import GAP, POISON, Conflicts, Global

TORCH = "2.13."  # whose tables of virtual functions `_answer_for_the_hooks` knows
ALIGNED = 512  # bytes
_CPU, _CUDA = 1, 2  # DLPack's kinds of devices
_KEY = torch._C.DispatchKey.CPU
# What torch has a kernel of for all devices, which needs code for the device.
CPUS = ("copy_", "convolution", "convolution_backward", "native_layer_norm", "native_group_norm", "sum.dim_IntList")


@dataclass(frozen=True)
class Properties:
    """What a device says of itself, under the names that torch has for it."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int  # bytes
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 << 10
    total_memory: int = 80 << 30
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    gcnArchName: str = ""


A100 = Properties("NVIDIA A100-SXM4-80GB", 8, 0, 108, 163 << 10, 164 << 10, 40 << 20)  # of sm_80, which `ptx` executes
H100 = Properties("NVIDIA H100 80GB HBM3", 9, 0, 132, 227 << 10, 228 << 10, 50 << 20)


class Heap(Global):
    """Memory at its true addresses: places are taken and given back one by one."""

    def __init__(self, size: int) -> None:
        self.conflicts = Conflicts()
        super().__init__(self.conflicts)
        whole = np.full(size + ALIGNED, POISON, np.uint8)
        begin = -whole.ctypes.data % ALIGNED
        self.bytes = whole[begin : begin + size]
        self.base = self.bytes.ctypes.data
        self.hold(self.bytes)
        self._free = {0: size}  # bytes from each place on
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Memory of so many bytes, full of poison, until nobody has it any more. Raises MemoryError."""
        needed = -(-(size + GAP) // ALIGNED) * ALIGNED
        begin = next((place for place, room in self._free.items() if room >= needed), None)
        if begin is None:
            raise torch.OutOfMemoryError(f"expected {needed} free bytes of {len(self.bytes)}, found none in a row")
        room = self._free.pop(begin)
        if room > needed:
            self._free[begin + needed] = room - needed
        self._taken[begin] = needed
        self.tracked.valid[begin : begin + size] = True
        found = self.bytes[begin : begin + size]
        found[:] = POISON
        weakref.finalize(found, self._give_back, begin).atexit = False
        return found

    def _give_back(self, begin: int) -> None:
        needed = self._taken.pop(begin)
        self.tracked.valid[begin : begin + needed] = False
        behind = self._free.pop(begin + needed, 0)
        before = next((place for place, room in self._free.items() if place + room == begin), None)
        if before is not None:
            self._free[before] += needed + behind
        else:
            self._free[begin] = needed + behind

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the device that nothing has been written to."""
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        memory = torch.from_numpy(self.take(extent * dtype.itemsize))
        flat = moved(memory.view(dtype), _CUDA)
        return _as_strided(flat, shape, strides, 0)


# ---- tensors of both devices on the same bytes -----------------------------------------------------------

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def moved(tensor: torch.Tensor, kind: int) -> torch.Tensor:
    """The same bytes as a tensor of another device: DLPack's record of it, with another device in it."""
    capsule = torch._C._to_dlpack(tensor)  # type: ignore[attr-defined]
    record = _pointer(capsule, b"dltensor")  # {void* data; struct {int kind, index;} device; ...}
    ctypes.c_int.from_address(record + 8).value = kind
    ctypes.c_int.from_address(record + 12).value = 0
    return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined, no-any-return]


def _as_strided(tensor: torch.Tensor, shape: Any, strides: Any, offset: Any) -> torch.Tensor:
    return torch.ops.aten.as_strided.default._op_dk(_KEY, tensor, shape, strides, offset)  # type: ignore[no-any-return]


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    found = moved(tensor, _CPU)
    return found if found.stride() == tensor.stride() else found.as_strided(tensor.shape, tensor.stride())


# ---- the dispatcher's fallback ---------------------------------------------------------------------------


_SET = torch.ops.aten.set_.source_Storage_storage_offset


@functools.cache
def _outputs(op: Any) -> frozenset[str]:
    return frozenset(argument.name for argument in op._schema.arguments if argument.is_out)


class Fallback:
    """Runs an operator of the device by the CPU's kernel."""

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.calls = 0

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if op.is_view:  # a view needs no memory: the CPU's kernel makes one of any tensor
            return op._op_dk(_KEY, *args, **kwargs)
        given, structure = tree_flatten((args, kwargs))
        aliases = [_on_cpu(x) if isinstance(x, torch.Tensor) and x.is_cuda else x for x in given]
        known = {id(alias): x for alias, x in zip(aliases, given, strict=True) if alias is not x}
        aliases = [torch.device("cpu") if isinstance(x, torch.device) else x for x in aliases]
        cpu_args, cpu_kwargs = tree_unflatten(aliases, structure)
        empty = {n: x for n, x in kwargs.items() if n in _outputs(op) and not x.numel()}  # which the kernel sizes
        cpu_kwargs |= {name: torch.empty(0, dtype=x.dtype) for name, x in empty.items()}
        found = op(*cpu_args, **cpu_kwargs)
        for name, x in empty.items():
            made = self._back(cpu_kwargs[name], {})
            _SET._op_dk(_KEY, x, made.untyped_storage(), 0, made.shape, made.stride())
            known[id(cpu_kwargs[name])] = x
        return tree_map(lambda x: self._back(x, known), found)

    def _back(self, found: Any, known: dict[int, Any]) -> Any:
        """A result on the device: what was given, or a copy of what the CPU has made."""
        if not isinstance(found, torch.Tensor) or id(found) in known:
            return known.get(id(found), found)
        made = self._heap.empty(tuple(found.shape), found.stride(), found.dtype)
        _on_cpu(made).copy_(found)
        return made


# ---- what torch.cuda says --------------------------------------------------------------------------------


class Event:
    """Time on the host: all work is done when its call returns."""

    def __init__(self, **flags: bool) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._at - self._at) * 1e3


def _surface(properties: Properties) -> dict[str, Any]:
    """Functions of `torch.cuda`, for one device with one stream."""
    stream = SimpleNamespace(cuda_stream=0x5000, synchronize=lambda: None, wait_stream=lambda other: None)

    def nothing() -> Callable[..., None]:
        return lambda *args, **kwargs: None  # Dynamo refuses one function under two names

    return {
        **{name: nothing() for name in ("init", "_lazy_init", "synchronize", "set_device", "empty_cache")},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *device: stream,
        "get_device_properties": lambda *device: properties,
        "get_device_capability": lambda *device: (properties.major, properties.minor),
        "get_device_name": lambda *device: properties.name,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_rng_state": lambda *device: torch.get_rng_state(),
        "set_rng_state": lambda state, *device: torch.set_rng_state(state),
        "get_sync_debug_mode": lambda: 0,
        "memory_reserved": lambda *device: 0,
        "memory_allocated": lambda *device: 0,
        "max_memory_allocated": lambda *device: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "Event": Event,
    }


def _register_guard() -> None:
    """Torch's guard that does nothing, which it makes where a build with CUDA finds no device: it is told of such a
    build by an object all of whose virtual functions answer 0, the number of devices among them."""
    registry = (ctypes.c_void_p * 2).in_dll(_library("c10"), "_ZN3c104impl26device_guard_impl_registryE")
    zero = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(lambda this: 0)
    functions = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    guard = (ctypes.c_void_p * 2)(ctypes.addressof(functions), 0)
    registry[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    if registry[1] == ctypes.addressof(guard):
        raise RuntimeError("expected torch to put its own guard of CUDA devices in place, found none")


def _answer_for_the_hooks() -> None:
    """Torch asks virtual functions of its hooks for CUDA. They get a table with other answers in a few places: whether
    there is such a device, whether it is in use, and the allocator of pinned memory, which is the CPU's."""
    hooks = _library("torch_cpu")["_ZN2at6detail12getCUDAHooksEv"]
    allocator = _library("c10")["_ZN3c1015GetCPUAllocatorEv"]
    hooks.restype = allocator.restype = ctypes.c_void_p
    table = ctypes.c_void_p.from_address(hooks())
    before = (table.value or 0) - _HEAD * _WORD
    own = (ctypes.c_void_p * _VIRTUAL).from_buffer_copy(ctypes.string_at(before, _VIRTUAL * _WORD))
    answer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    answers = {n: answer(lambda this: 1) for n in (_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT, _INIT)}
    answers[_PINNED_ALLOCATOR] = answer(lambda this: allocator())
    for n, function in answers.items():
        own[_HEAD + n] = ctypes.cast(function, ctypes.c_void_p).value
    table.value = ctypes.addressof(own) + _HEAD * _WORD
    _KEPT.extend((own, answers))
    if torch.accelerator.current_accelerator() is None:
        raise RuntimeError("expected torch to find an accelerator now, found none")


# Places in the table: ATen/detail/AcceleratorHooksInterface.h, behind two destructors.
_IS_BUILT, _IS_AVAILABLE, _HAS_PRIMARY_CONTEXT, _INIT, _PINNED_ALLOCATOR = 2, 3, 4, 5, 12
_HEAD, _VIRTUAL, _WORD = 2, 60, ctypes.sizeof(ctypes.c_void_p)  # words before the functions; words in all, at most
_KEPT: list[Any] = []  # of this process, for good


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}.so"))


@functools.cache
def install(size: int = 32 << 20, properties: Properties = A100) -> tuple[Heap, Fallback]:
    """Give this process a CUDA device with so many bytes; ``properties``: what it says of itself.

    Raises RuntimeError where torch has one or is another one.
    """
    if not torch.__version__.startswith(TORCH):
        raise RuntimeError(f"expected torch {TORCH}*, whose virtual functions are known, found {torch.__version__}")
    if torch.backends.cuda.is_built():
        raise RuntimeError("expected a torch without CUDA, whose kernels would be in the way")
    _register_guard()
    _answer_for_the_hooks()
    for name, value in _surface(properties).items():
        setattr(torch.cuda, name, value)
    heap = Heap(size)
    fallback = Fallback(heap)
    libraries = torch.library.Library("_", "IMPL", "CUDA"), torch.library.Library("aten", "IMPL", "CUDA")
    libraries[0].fallback(fallback, "CUDA")  # type: ignore[attr-defined]
    _KEPT.extend(libraries)
    libraries[1].impl("empty.memory_format", functools.partial(_empty, heap))
    libraries[1].impl("empty_strided", functools.partial(_empty_strided, heap))
    for name in CPUS:
        space, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, space), overload or "default")
        libraries[1].impl(name, functools.partial(fallback, op))
    torch._C._dynamo.guards._empty_strided_cuda = heap.empty  # type: ignore[attr-defined]
    return heap, fallback


def _empty(heap: Heap, shape: Any, dtype: Any = None, memory_format: Any = None, **rest: Any) -> torch.Tensor:
    like = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return heap.empty(tuple(shape), like.stride(), like.dtype)


def _empty_strided(heap: Heap, shape: Any, strides: Any, dtype: Any = None, **rest: Any) -> torch.Tensor:
    return heap.empty(tuple(shape), tuple(strides), dtype or torch.get_default_dtype())
