"""Stored codes have words."""

from __future__ import annotations

from autofuse.ir.records import EAGER
from autofuse.optim.algorithms import ALGORITHMS
from autofuse.optim.tune_step import C_MULTI, TRITON_MULTI
from autofuse.report.wording import VARIANTS
from autofuse.tuner.backends import CBackend, InterpreterBackend, TritonBackend
from autofuse.tuner.strategy_provider import STRATEGY


def test_every_variant_that_is_stored_has_words() -> None:
    backends = (CBackend, InterpreterBackend, TritonBackend)
    stored = {EAGER, STRATEGY, C_MULTI, TRITON_MULTI}
    stored |= {name for backend in backends for name in (backend.generic, backend.specialised)}
    stored |= {name for algorithm in ALGORITHMS.values() for name in algorithm.vendors}
    assert stored == set(VARIANTS)
