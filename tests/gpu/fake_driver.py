"""A GPU driver that launches nothing and remembers everything, compiled from C: the seam at which GPU code is tested.

A function's name ends in ``__N``, the number of its parameters with the two hidden ones. Its parameters are recorded
as 8 bytes each, so a 32-bit number is in the lower half. Where the driver has been given functions of Python that load
an image and execute a launch, those are called, names are free, and nothing is recorded.
"""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.resources import Resources
from autofuse.codegen.triton.source import Assumptions
from autofuse.gpu.driver import VENDORS, Driver
from autofuse.gpu.torch_calls import TorchCalls
from autofuse.wrapper.node_call import empty_like_spec

SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define CONTEXT 0x10000
typedef struct { char name[200]; long module; int shared_limit; } Function;
typedef struct { Function* function; unsigned grid[3], block[3], shared; void* stream; uint64_t params[64];
  int count; } Launch;
Launch fake_launches[1024];
int (*fake_on_load)(long module, const char* image);
int (*fake_on_launch)(long module, unsigned blocks, unsigned threads, unsigned shared, void** params);
int fake_count, fake_error, fake_modules, fake_unloaded, fake_retained, fake_modes;
static __thread long context;
static __thread int mode;
void fake_reset(void) { fake_count = fake_error = 0; }
void fake_drop_context(void) { context = 0; }
long fake_context(void) { return context; }

int cuDeviceGet(int* device, int n) { *device = n; return 0; }
int cuDevicePrimaryCtxRetain(long* found, int device) { ++fake_retained; *found = CONTEXT + device; return 0; }
static __thread long pushed;
int cuCtxPushCurrent_v2(long c) { pushed = context; context = c; return 0; }
int cuCtxPopCurrent_v2(long* c) { *c = context; context = pushed; return 0; }
int cuCtxSetCurrent(long c) { context = c; return 0; }
int cuThreadExchangeStreamCaptureMode(int* m) { int old = mode; mode = *m; *m = old; ++fake_modes; return 0; }
int cuModuleLoadData(long* module, const char* image) {
  if (!context) return 201;
  if (mode != 2) return 900;
  if (!strncmp(image, "bad", 3)) return 209;
  *module = ++fake_modules;
  return fake_on_load ? fake_on_load(*module, image) : 0;
}
int cuModuleUnload(long module) { ++fake_unloaded; return 0; }
int cuModuleGetFunction(Function** found, long module, const char* name) {
  if (!fake_on_launch && !strstr(name, "__")) return 500;
  *found = calloc(1, sizeof(Function));
  strncpy((*found)->name, name, 199);
  (*found)->module = module;
  (*found)->shared_limit = 48 * 1024;
  return 0;
}
int cuFuncSetAttribute(Function* f, int what, int value) { if (what == 8) f->shared_limit = value; return 0; }
int cuFuncGetAttribute(int* value, int what, Function* f) { *value = what == 4 ? 32 : what == 3 ? 16 : 0; return 0; }
int cuGetErrorName(int code, const char** name) {
  *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" :
          code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" :
          code == 710 ? "CUDA_ERROR_ASSERT" : code == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_ERROR_OTHER";
  return 0;
}
static int record(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void* stream, void** params) {
  if (fake_error) return fake_error;
  if ((int)shared > f->shared_limit) return 1;
  if (fake_on_launch) return gy * gz * by * bz == 1 ? fake_on_launch(f->module, gx, bx, shared, params) : 1;
  Launch* l = &fake_launches[fake_count++ % 1024];
  l->function = f;
  l->grid[0] = gx; l->grid[1] = gy; l->grid[2] = gz;
  l->block[0] = bx; l->block[1] = by; l->block[2] = bz;
  l->shared = shared; l->stream = stream;
  l->count = atoi(strstr(f->name, "__") + 2);
  for (int k = 0; k < l->count; ++k) memcpy(&l->params[k], params[k], 8);
  return 0;
}
int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  return context ? record(f, gx, gy, gz, bx, by, bz, shared, stream, params) : 201;
}

static __thread int device;
int hipGetDevice(int* found) { *found = device; return 0; }
int hipSetDevice(int wanted) { device = wanted; return 0; }
int hipThreadExchangeStreamCaptureMode(int* m) { return cuThreadExchangeStreamCaptureMode(m); }
int hipModuleLoadData(long* module, const char* image) { *module = ++fake_modules; return 0; }
int hipModuleUnload(long module) { return cuModuleUnload(module); }
int hipModuleGetFunction(Function** found, long module, const char* name) {
  int code = cuModuleGetFunction(found, module, name);
  if (!code) (*found)->shared_limit = 64 * 1024;
  return code;
}
int hipFuncGetAttribute(int* value, int what, Function* f) { return cuFuncGetAttribute(value, what, f); }
const char* hipGetErrorName(int code) { return code == 1 ? "hipErrorInvalidValue" : "hipErrorOther"; }
int hipModuleLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** params, void** extra) {
  return record(f, gx, gy, gz, bx, by, bz, shared, stream, params);
}
"""


class _Function(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char * 200), ("module", ctypes.c_long), ("shared_limit", ctypes.c_int))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.POINTER(_Function)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.c_uint64 * 64),
        ("count", ctypes.c_int),
    )


@dataclass(frozen=True)
class Launched:
    """What one launch looked like to the driver."""

    function: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    params: tuple[int, ...]


class FakeDriver:
    """The compiled library, as a `Driver` and as what it has seen."""

    def __init__(self, vendor: str, soname: str = "libfake.so") -> None:
        """``soname``: a library that is loaded from now on by this name is this one."""
        toolchain = find_toolchain()
        flags = ("-O1", "-fPIC", "-shared", "-std=gnu11", "-w", f"-Wl,-soname,{soname}")
        folder = tempfile.mkdtemp(prefix="autofuse-test-")
        path = Path(folder) / "libfake.so"
        path.write_bytes(compile_source(SOURCE, toolchain, flags))
        self.library = ctypes.CDLL(str(path))
        self.path = str(path)
        self.driver = Driver.open(VENDORS[vendor], str(path))

    def number(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, f"fake_{name}").value

    def fail_with(self, code: int) -> None:
        ctypes.c_int.in_dll(self.library, "fake_error").value = code

    def forget(self) -> None:
        self.library.fake_reset()

    def execute_by(self, load: Callable[[int, bytes], int], launch: Callable[..., int]) -> None:
        """Call ``load(module, image)`` and ``launch(module, blocks, threads, shared bytes, address of parameters)``;
        each answers with the driver's error code."""
        number, pointer = ctypes.c_uint, ctypes.c_void_p
        self._callbacks = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, ctypes.c_char_p)(load),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long, number, number, number, pointer)(launch),
        )
        for name, callback in zip(("fake_on_load", "fake_on_launch"), self._callbacks, strict=True):
            pointer.in_dll(self.library, name).value = ctypes.cast(callback, pointer).value

    @property
    def launches(self) -> list[Launched]:
        table = (_Launch * 1024).in_dll(self.library, "fake_launches")
        return [
            Launched(
                e.function.contents.name.decode(), tuple(e.grid), tuple(e.block), e.shared, e.stream or 0,
                tuple(e.params[: e.count]),
            )
            for e in table[: self.number("count")]
        ]  # fmt: skip


@functools.cache
def fake_driver(vendor: str = "cuda") -> FakeDriver:
    return FakeDriver(vendor)


def cpu_calls(current: list[int], stream: int = 0x5000) -> TorchCalls:
    """CPU tensors in place of a device's; ``current`` holds the current device's index and follows guards."""

    class OnDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    return TorchCalls(lambda: current[0], lambda index: stream + index, OnDevice, empty_like_spec)


ALIGNED_OR_NOT = (Assumptions(True), Assumptions())


def artifact_of(source, target="cuda:90", assumptions=ALIGNED_OR_NOT, shared=0, image=b"cubin"):
    """An artifact whose images are words; functions tell what they assume and how many parameters they take."""
    images = []
    for assumed in assumptions:
        for number, item in enumerate(source.passes):
            word = "aligned" if assumed.is_aligned else "any"
            word += "".join(f"_{s}" for s in assumed.divisible)
            name = f"{item.function}_{word}__{len(item.arguments) + 2}"
            threads = 128 if assumed.is_aligned else 64
            images.append(Image(number, name, assumed, threads, shared, Resources(32, 0, shared, threads), image))
    return Artifact(source, target, tuple(images))


def as_int32(word: int) -> int:
    return int(torch.tensor(word & 0xFFFFFFFF).to(torch.int32))
