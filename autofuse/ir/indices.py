"""What may stand between a tensor of indices and the operator that reads by them.

In: an operation. Out: whether indices that are within the bounds of a dim still are so behind it. Guarantee: the
lowering and the making of inputs for checks ask the same question.
"""

from __future__ import annotations

from typing import Any

from autofuse.ir.operation import Operation
from autofuse.ir.optable import VIEWS, info


def passes_indices(op: Operation) -> bool:
    """Whether an operation converts, copies, views, or clamps from 0 or less on: places in a dim stay places in it."""
    if info(op.target).kind in VIEWS or op.short_name in ("_to_copy", "clone"):
        return True
    if op.target not in ("aten.clamp.default", "aten.clamp_min.default"):
        return False
    named = dict(op.kwargs)
    low: Any = named.get("min", op.arg(1))
    high: Any = named.get("max", op.arg(2))
    return _is_number(low) and _is_number(high) and (low is None or low <= 0) and (high is None or high >= 0)


def _is_number(bound: Any) -> bool:
    return bound is None or isinstance(bound, int | float)
