"""Memory that a process has in use, which its resident memory is not: an allocator keeps what it cannot give back."""

import ctypes
import sys

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # mallinfo(3), glibc 2.33


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


def in_use() -> dict[str, int]:
    """Bytes that malloc has given out, and Python's own blocks."""
    found = _libc.mallinfo2()
    return {"malloc_bytes": found.uordblks + found.hblkhd, "python_blocks": sys.getallocatedblocks()}
