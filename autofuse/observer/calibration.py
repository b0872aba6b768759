"""Measures the cost of observing an op on this machine, so that the observer can account for it.

In: nothing. Out: ``OpCost``. The cost inside of torch's dispatcher cannot be seen from the mode's handler, so a few
hundred tiny ops are timed with and without the mode: about 3 ms, once per run. Guarantee: no random number is used, no
mode of the script sees the ops, the mode stack is left as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack

from autofuse.observer.mode import ObserverMode, attach, detach

_OPS_PER_ROUND = 50
_ROUNDS = 4

# Real steps cost more than the tiny ops timed here: caches that other work has emptied, more arguments, module marks.
# A 4-layer GPT's training step (1,235 ops, CPU time of one thread, AVX-512, 2026-11) cost 10 us an op inside the
# step and 15 to 18 us an op altogether where the loop below says 5.
_REAL_OVER_TINY = 2.6


@dataclass(frozen=True)
class OpCost:
    """Seconds that an op costs on top of itself."""

    recorded_seconds: float  # watched; summing up is timed when it happens
    passed_seconds: float  # through a mode that is in place without recording

    @classmethod
    def typical(cls) -> OpCost:
        """Where measuring is not possible: 2 cores AVX-512, torch 2.13."""
        return cls(6.5e-6, 3e-6)


def measure_op_cost() -> OpCost:
    """Time tiny ops with and without the mode. Falls back to typical values where other modes are active."""
    if _len_torch_dispatch_stack() or _len_torch_function_stack() or torch.autograd._profiler_enabled():
        return OpCost.typical()
    a = torch.empty(2, 2, device="cpu", dtype=torch.float32)
    a.fill_(1.0)
    mode = ObserverMode(_OPS_PER_ROUND * (_ROUNDS + 1))

    def run() -> None:
        with torch.no_grad():
            for _ in range(_OPS_PER_ROUND):
                torch.add(a, a)

    bare = _fastest(run)
    if not attach(mode):
        return OpCost.typical()
    try:
        passed = _fastest(run)
        mode.recording = True
        recorded = _fastest(run)
        mode.recording = False
    finally:
        detach(mode)
    return OpCost(max(1e-6, (recorded - bare) * _REAL_OVER_TINY), max(5e-7, passed - bare))


def _fastest(run: Callable[[], None]) -> float:
    """Seconds per op, the fastest of a few rounds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best / _OPS_PER_ROUND
