"""Anomaly mode: one switch for all threads of the process, which AOTAutograd turns on while it traces.

In: a backward pass of one thread, while another may compile. Out: whether the script has turned the mode on; and the
mode off for a while. Guarantee: a mode that a compilation turns on ends with it. Two threads whose times overlap, and
which each restore the mode that they found, would leave it on for good: Dynamo's lock keeps them apart.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autofuse.locks import make_rlock


def is_on() -> bool:
    """Whether the script has the mode on; a compilation in another thread does not count. 0.1 us where it is off."""
    if not torch.is_anomaly_enabled():
        return False
    lock = _compile_lock()
    if not lock.acquire(blocking=False):
        return False  # whether eager would have warned the script is unknown then
    try:
        return bool(torch.is_anomaly_enabled())
    finally:
        lock.release()


@contextlib.contextmanager
def is_off() -> Iterator[None]:
    """Turn the mode off inside of this context; where it is on, wait for a running compilation first."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with _compile_lock(), torch.autograd.set_detect_anomaly(False):
        yield


def _compile_lock() -> Any:
    """Dynamo's lock, if Dynamo is imported: a run on an earlier run's traces does not import it."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(dynamo, "compile_lock", None) or _OURS


_OURS = make_rlock()
