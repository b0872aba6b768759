"""Keeps operators whole while AOTAutograd traces, where torch's own Python code for them computes something else.

In: nothing. Out: graphs with the operators below, which run eager's kernels. Guarantee: torch's tables are as before
once the trace has ended.

With Python's dispatcher on, torch runs Python code in place of these operators' kernels. That of the multi-label margin
loss counts targets behind the first -1, which ends the list (torch 2.13). Its backward has no shapes for a trace, so a
module with it stays in eager.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey

from autofuse.locks import make_lock

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_NAMES = ("multilabel_margin_loss_forward",)
_lock = make_lock()
_traces = 0  # that need eager's kernels now
_aside: list[tuple[Any, Any, Any]] = []  # operator, key, torch's Python code


@contextlib.contextmanager
def eagers_kernels() -> Iterator[None]:
    """While it is open, traces keep these operators."""
    global _traces
    with _lock:
        _traces += 1
        if _traces == 1:
            for operator in (getattr(torch.ops.aten, name).default for name in _NAMES):
                found = [key for key in _KEYS if key in operator.py_kernels]
                _aside.extend((operator, key, operator.py_kernels.pop(key)) for key in found)
                operator._dispatch_cache.clear()
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if not _traces:
                for operator, key, kernel in _aside:
                    operator.py_kernels[key] = kernel
                    operator._dispatch_cache.clear()
                _aside.clear()
