"""Loading kernels: bytes of a shared object become a Python builtin.

In: a binary. Out: `LoadedKernel`, whose ``entry`` takes the address of the sizes and the pointers as ints.
Guarantee: torch is imported first, so that libgomp.so.1 is the copy torch already runs on; the bytes go through
a file in a fresh directory only this user can enter, or a memory file, never through a path others could swap; a
library is never unloaded.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch  # noqa: F401  (first: its OpenMP runtime is the one kernels must use)

_METH_FASTCALL = 0x0080


class MethodDef(ctypes.Structure):
    """CPython's record of a function in C; it must live as long as the function."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


new_builtin = ctypes.pythonapi.PyCFunction_NewEx
new_builtin.restype = ctypes.py_object
new_builtin.argtypes = (ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)

_kept: list[object] = []  # method tables and libraries live as long as the process


def method_of(name: str, address: int | None, flags: int, doc: bytes) -> MethodDef:
    """The record of a function in C, which stays valid: a function made of it may outlive whoever made it."""
    method = MethodDef(name.encode(), address, flags, doc)
    _kept.append(method)
    return method


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in this process."""

    name: str
    entry: Callable[..., None]  # (address of sizes, input pointers..., output pointers...), all ints; see `address_of`
    library: Any

    def call(self, sizes: Sequence[int], pointers: Sequence[int]) -> None:
        """Run once. ``sizes``: the symbols' values in order, then the thread count; ``pointers``: inputs, then outputs.

        Raises MemoryError without memory for its buffers, ValueError for 2^31 columns or more, and FloatingPointError
        or IndexError where the work is left to eager: numbers that are not finite, an index out of its bounds.
        """
        array = (ctypes.c_int64 * len(sizes))(*sizes)
        self.entry(ctypes.addressof(array), *pointers)


def load_kernel(binary: bytes, name: str) -> LoadedKernel:
    """Map a shared object into the process; raises OSError where the loader refuses it."""
    return kernel_in(open_library(binary, name), name)


def kernel_in(library: ctypes.CDLL, name: str, prefix: str = "af") -> LoadedKernel:
    """The kernel of a library whose exported functions begin with ``prefix``."""
    address = ctypes.cast(library[f"{prefix}_entry"], ctypes.c_void_p).value
    method = method_of(name, address, _METH_FASTCALL, b"(sizes, *pointers) -> None")
    _kept.append(library)
    call = f"{prefix}_call"
    inner = ctypes.cast(library[call], ctypes.c_void_p).value if hasattr(library, call) else 0
    return LoadedKernel(name, new_builtin(ctypes.addressof(method), inner, None), library)


def address_of(entry: object) -> int:
    """The address of the kernel's function in C, ``int (sizes, pointers)``; 0 where the entry is none of a C kernel."""
    found = entry.__self__ if isinstance(entry, BuiltinFunctionType) else 0
    return found if type(found) is int else 0


def open_library(binary: bytes, name: str) -> ctypes.CDLL:
    """Raises OSError where the loader refuses it."""
    # A fresh directory each time: the dynamic linker takes an equal path for the library it already has.
    with tempfile.TemporaryDirectory(prefix="autofuse-") as folder:  # mode 0700
        path = os.path.join(folder, f"{name[:120]}.so")
        with open(path, "wb") as file:
            file.write(binary)
        try:
            return ctypes.CDLL(path)
        except OSError:
            if not hasattr(os, "memfd_create"):
                raise
    return _open_memory(binary, name)  # the temporary directory is mounted noexec


def _open_memory(binary: bytes, name: str) -> ctypes.CDLL:
    descriptor = os.memfd_create(name[:200], os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(binary)
    library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    _kept.append(descriptor)  # stays open: a second library under the same path would be taken for this one
    return library
