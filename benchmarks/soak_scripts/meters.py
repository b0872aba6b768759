"""What a script measures of itself: its memory in use, and what plain torch takes at the moment.

Memory in use is not the resident memory: an allocator keeps what it cannot give back.
"""

import ctypes
import sys
import time

import torch

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # mallinfo(3), glibc 2.33


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo


def in_use() -> dict[str, int]:
    """Bytes that malloc has given out, and Python's own blocks."""
    found = _libc.mallinfo2()
    return {"malloc_bytes": found.uordblks + found.hblkhd, "python_blocks": sys.getallocatedblocks()}


_LEFT, _RIGHT = torch.randn(192, 192), torch.randn(192, 192)


def reference_seconds():
    """What a fixed piece of plain torch takes now: work beside the script slows it as it slows a step."""
    began = time.perf_counter()
    with torch.no_grad():
        for _ in range(20):
            torch.tanh(_LEFT @ _RIGHT)
    return time.perf_counter() - began
