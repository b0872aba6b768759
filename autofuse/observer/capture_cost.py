"""The expected cost of a capture: a model of a few terms over the traits of an untraced root.

In: ``RootTraits`` of a root; the costs of earlier captures in this store. Out: all seconds that the script will lose to
it: imports, tracing, planning, the slow steps after. Guarantee: torch-free; pure functions of numbers.

The coefficients are a fit to twelve models of different kinds (`benchmarks/capture.py --costs`) by the script's clock:
AMD EPYC with AVX-512, 2 cores, torch 2.13, 2026-11, where `capture.python_speed` says 1.15. Eleven are within 1.4x; the
twelfth breaks its graph where Dynamo then gives up, which takes 1.1 s of 2.9 expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from autofuse.ir.records import RootRecord

IMPORT_SECONDS = 1.1  # Dynamo, AOTAutograd, planner, and what they set up at their first graph: once a process
FIXED_SECONDS = 0.1  # whatever the graph
MODULE_SECONDS = 16e-3  # Dynamo goes into the code of each
DYNAMO_SHARE = 0.2  # of an operation's costs: equal blocks are traced by Dynamo one by one, what follows is done once
SYMBOL_SHARE = 1.3  # a size that varies makes an operation so much dearer: expressions in symbols in place of numbers
KEPT_SHARE = 0.5  # of a capture is left where its graphs were kept
# Where its trace was kept, by the script's clock and at the same speed. Six scripts of `benchmarks/foreign_scripts` on
# an AMD EPYC without AVX-512, where `capture.python_speed` says 1.64, took 0.5 s (VAE, 0.1 MB) to 1.5 s (Llama, 1.5).
KEPT_TRACE_SECONDS = 0.15  # to import what reads it
KEPT_TRACE_SECONDS_PER_BYTE = 0.45e-6  # to read it, and to plan the shapes that come
DYNAMO_SECONDS = 0.2  # and to import Dynamo, unless the script's optimizer has
_FACTOR_LIMITS = 0.25, 4.0


@dataclass(frozen=True)
class RootTraits:
    """Traits of a root before it is captured."""

    forward_operations: int  # aten calls
    backward_operations: int = 0
    modules: int = 0
    symbols: int = 0  # sizes of its arguments that vary, those that vary alike counted once
    once: float = 1.0  # share of the operations that is left if equal blocks count once


def model_seconds(traits: RootTraits, seconds_per_op: float, is_first: bool) -> float:
    """Expected loss on a machine of the coefficients. ``is_first``: of the process."""
    fixed = FIXED_SECONDS + (IMPORT_SECONDS if is_first else 0.0)
    operations = traits.forward_operations + traits.backward_operations
    each = seconds_per_op * (1.0 + SYMBOL_SHARE * traits.symbols)
    of_blocks = DYNAMO_SHARE + (1.0 - DYNAMO_SHARE) * traits.once
    return fixed + traits.modules * MODULE_SECONDS + operations * each * of_blocks


def kept_trace_seconds(size: int) -> float:
    """Expected loss to a trace of so many bytes that an earlier run has left, where Dynamo is there."""
    return KEPT_TRACE_SECONDS + size * KEPT_TRACE_SECONDS_PER_BYTE


def learn_factor(records: Sequence[RootRecord], default: float) -> float:
    """By how much captures of this store took longer than the model says; ``default`` before the first.

    The median, so that one capture on a busy machine does not scare all others off. Captures from an earlier run's
    graphs do not count: they do not tell the cost of tracing.
    """
    low, high = _FACTOR_LIMITS
    traced = [
        r for r in records if r.state == "captured" and not r.kept_graphs and r.model_seconds and r.capture_seconds
    ]
    return median(min(max(r.capture_seconds / r.model_seconds, low), high) for r in traced) if traced else default
