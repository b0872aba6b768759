"""Keeps torch built for CUDA, on a machine without a GPU, from crashing once a thread that has traced ends.

In: nothing. Out: torch's stand-in for CUDA's device guard, made in a thread that never ends. Guarantee: nothing changes
with a GPU, nor with a torch without CUDA.

Why: a trace makes that stand-in where the process has none. All threads use it, but it is freed with the thread that
made it, and the next trace reads freed memory (torch 2.11: a segmentation fault in ``FakeTensorMode.__enter__``, also
with torch.compile alone).
"""

from __future__ import annotations

import _thread
from functools import cache

import torch


@cache
def keep_cuda_guard() -> None:
    """To be called before the first trace."""
    make = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if make is None or not torch.backends.cuda.is_built() or torch.cuda.is_available():
        return
    is_made, forever = _thread.allocate_lock(), _thread.allocate_lock()
    is_made.acquire()
    forever.acquire()

    def make_and_stay() -> None:
        try:
            make()
        finally:
            is_made.release()
        forever.acquire()

    _thread.start_new_thread(make_and_stay, ())  # which `threading` does not list
    is_made.acquire()
