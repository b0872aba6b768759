"""The GPU's driver through ctypes: load an image, find its functions, name an error.

In: the path of a driver library, or the vendor that torch was built for. Out: `Driver`. Guarantee: the context is the
one that torch uses on the device (CUDA's primary context); images are loaded in the thread's relaxed capture mode, so
that a CUDA graph capture on another thread is not disturbed. The two vendors are rows of one table; where their calls
differ in form, the row has a function.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from autofuse.errors import DeviceError

DEFAULT_SHARED_BYTES = 48 * 1024  # dynamic shared memory that needs no opt-in
RELAXED = 2  # cudaStreamCaptureModeRelaxed, and HIP's

_LOCAL_BYTES, _REGISTERS, _MOST_DYNAMIC_SHARED = 3, 4, 8  # of CUfunction_attribute and of hipFunction_attribute


@dataclass(frozen=True)
class Vendor:
    """The names of one vendor's driver."""

    name: str  # as in an artifact's target
    libraries: tuple[str, ...]
    load: str
    unload: str
    function: str
    launch: str
    get_attribute: str
    set_attribute: str | None  # None: all shared memory may be used without asking
    capture_mode: str
    error_name: str
    is_name_returned: bool  # by ``const char* name(code)``; else by ``name(code, const char**)``
    bind_context: str | None  # makes a context current, None where the runtime finds it by itself
    no_context: int  # error of a launch on a thread without a context
    context: Callable[[Driver, int], AbstractContextManager[int]]


class Driver:
    """One loaded driver library."""

    def __init__(self, vendor: Vendor, library: ctypes.CDLL) -> None:
        self.vendor = vendor
        self.path = library._name  # as it was found
        self._library = library
        self._contexts: dict[int, int] = {}  # retained for good, as torch's own are
        self._error_name = getattr(library, vendor.error_name)
        self._error_name.restype = ctypes.c_char_p if vendor.is_name_returned else ctypes.c_int

    @classmethod
    def open(cls, vendor: Vendor, path: str | None = None) -> Driver:
        """Raises DeviceError where there is no such library."""
        names = (path,) if path else (*_mapped(vendor.libraries), *vendor.libraries)
        for name in names:
            with contextlib.suppress(OSError):
                return cls(vendor, ctypes.CDLL(name))
        raise DeviceError(
            f"expected the GPU's driver, found none of {', '.join(names)}; check it with nvidia-smi or rocm-smi"
        )

    # ---- calls -------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: object) -> None:
        """Raises DeviceError with the driver's own name of the error."""
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceError(f"expected {name} to succeed, found {self.error_name(code)}")

    def error_name(self, code: int) -> str:
        if self.vendor.is_name_returned:
            found = self._error_name(code)
        else:
            text = ctypes.c_char_p()
            self._error_name(code, ctypes.byref(text))
            found = text.value
        return f"{(found or b'an unknown error').decode()} ({code})"

    def address(self, name: str | None) -> int:
        """Of a function, 0 for None."""
        if name is None:
            return 0
        return ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0

    @property
    def launch(self) -> ctypes._NamedFuncPointer:
        """``(function, grid x y z, block x y z, shared bytes, stream, parameters, NULL) -> error code``."""
        found: ctypes._NamedFuncPointer = getattr(self._library, self.vendor.launch)
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        found.argtypes = (pointer, *[number] * 7, pointer, pointer, pointer)
        return found

    def retain_context(self, index: int) -> int:
        """The primary context of a device."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), index)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context.value or 0
        return self._contexts[index]

    def bind(self, context: int) -> None:
        """Make a context current on this thread."""
        if self.vendor.bind_context is not None:
            self.call(self.vendor.bind_context, ctypes.c_void_p(context))

    # ---- images, all inside of `on_device` -----------------------------------------------------------------

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[int]:
        """The context that torch uses on a device, current inside; nothing inside disturbs a recording elsewhere."""
        mode = ctypes.c_int(RELAXED)
        self.call(self.vendor.capture_mode, ctypes.byref(mode))  # swaps: the mode before comes back
        try:
            with self.vendor.context(self, index) as context:
                yield context
        finally:
            self.call(self.vendor.capture_mode, ctypes.byref(mode))

    def load(self, image: bytes) -> int:
        """The module of an image, in the current context."""
        module = ctypes.c_void_p()
        self.call(self.vendor.load, ctypes.byref(module), image)
        return module.value or 0

    def unload(self, module: int) -> None:
        self.call(self.vendor.unload, ctypes.c_void_p(module))

    def function(self, module: int, name: str) -> int:
        function = ctypes.c_void_p()
        self.call(self.vendor.function, ctypes.byref(function), ctypes.c_void_p(module), name.encode())
        return function.value or 0

    def allow_shared(self, function: int, count: int) -> None:
        """Let a function's launches take ``count`` bytes of dynamic shared memory."""
        if count > DEFAULT_SHARED_BYTES and self.vendor.set_attribute is not None:
            self.call(self.vendor.set_attribute, ctypes.c_void_p(function), _MOST_DYNAMIC_SHARED, count)

    def resources(self, function: int) -> tuple[int, int]:
        """Registers and local bytes of a thread. Asking also makes a lazily loading driver load the code now."""
        found = []
        for attribute in (_REGISTERS, _LOCAL_BYTES):
            value = ctypes.c_int()
            self.call(self.vendor.get_attribute, ctypes.byref(value), attribute, ctypes.c_void_p(function))
            found.append(value.value)
        return found[0], found[1]


@contextlib.contextmanager
def _cuda_context(driver: Driver, index: int) -> Iterator[int]:
    """The device's primary context, current inside. A thread that never used the device has none."""
    context = driver.retain_context(index)
    driver.call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
    try:
        yield context
    finally:
        driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@contextlib.contextmanager
def _hip_context(driver: Driver, index: int) -> Iterator[int]:
    before = ctypes.c_int()
    driver.call("hipGetDevice", ctypes.byref(before))
    driver.call("hipSetDevice", index)
    try:
        yield 0
    finally:
        driver.call("hipSetDevice", before)


CUDA = Vendor(
    name="cuda",
    libraries=("libcuda.so.1", "libcuda.so"),
    load="cuModuleLoadData",
    unload="cuModuleUnload",
    function="cuModuleGetFunction",
    launch="cuLaunchKernel",
    get_attribute="cuFuncGetAttribute",
    set_attribute="cuFuncSetAttribute",
    capture_mode="cuThreadExchangeStreamCaptureMode",
    error_name="cuGetErrorName",
    is_name_returned=False,
    bind_context="cuCtxSetCurrent",
    no_context=201,  # CUDA_ERROR_INVALID_CONTEXT
    context=_cuda_context,
)
HIP = Vendor(
    name="hip",
    libraries=("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"),
    load="hipModuleLoadData",
    unload="hipModuleUnload",
    function="hipModuleGetFunction",
    launch="hipModuleLaunchKernel",
    get_attribute="hipFuncGetAttribute",
    set_attribute=None,
    capture_mode="hipThreadExchangeStreamCaptureMode",
    error_name="hipGetErrorName",
    is_name_returned=True,
    bind_context=None,
    no_context=-1,
    context=_hip_context,
)
VENDORS = {vendor.name: vendor for vendor in (CUDA, HIP)}


@functools.cache
def torch_driver() -> Driver:
    """The driver under this build of torch, started by torch if nothing has yet."""
    torch.cuda.init()
    return Driver.open(HIP if torch.version.hip else CUDA)


def _mapped(names: tuple[str, ...]) -> list[str]:
    """Paths of such libraries that this process has mapped already: torch's wheels may bring their own."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    stems = tuple(name.partition(".so")[0] + ".so" for name in names)
    return [path for path in paths if Path(path).name.startswith(stems)]
