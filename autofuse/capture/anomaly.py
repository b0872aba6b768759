"""Anomaly mode, which is the process's own and which AOTAutograd turns on while it traces, for all threads.

In: a backward pass of one thread, while another may compile. Out: whether the script has turned the mode on; and the
mode off for a while. Guarantee: what a compilation turns on ends with it. Two who each put the mode back as they found
it, one inside of the other's time, would leave it on for good: Dynamo's lock keeps them apart.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from autofuse.locks import make_rlock


def is_on() -> bool:
    """Whether the mode is on, and not for a compilation in another thread. 0.1 us where it is off."""
    if not torch.is_anomaly_enabled():
        return False
    lock = _compile_lock()
    if not lock.acquire(blocking=False):
        return False  # what the script would be told by eager is not known then
    try:
        return bool(torch.is_anomaly_enabled())
    finally:
        lock.release()


@contextlib.contextmanager
def is_off() -> Iterator[None]:
    """While this lasts; at the price of a wait for a compilation, where the mode is on."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with _compile_lock(), torch.autograd.set_detect_anomaly(False):
        yield


def _compile_lock() -> Any:
    """Dynamo's, where it has come at all: a run on traces of an earlier one does without."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(dynamo, "compile_lock", None) or _OURS


_OURS = make_rlock()
