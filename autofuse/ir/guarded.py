"""Losses that say by a NaN that eager refuses their operands, and what keeps that NaN.

In: an operation. Out: whether a NaN that it reads is one of its results. Guarantee: the planner and the lowering ask
the same question; `runtime/graphs/loss_guard.py` looks for the NaN.
"""

from __future__ import annotations

from autofuse.ir.operation import Operation
from autofuse.ir.optable import OpKind, info

# What eager refuses, such as a class that does not exist, makes these losses NaN.
GUARDED = ("nll_loss_forward", "binary_cross_entropy")
_KEEPING = frozenset(
    ("add", "sub", "rsub", "mul", "div", "neg", "abs", "square", "sqrt", "exp", "log", "relu", "sum", "mean")
)


def keeps_nan(op: Operation) -> bool:
    """Whether every NaN that the operation reads is a NaN of its result: so of floats, not of a sum of integers."""
    known = op.short_name in _KEEPING or info(op.target).kind is OpKind.VIEW
    return known and all(spec.dtype.startswith(("float", "bfloat")) for spec in op.outputs)
