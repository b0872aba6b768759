"""Cases: the sizes and kinds of inputs on which a candidate is checked before it may win.

In: a node, the bucket, the shapes that were seen. Out: `CheckCase`s, the most telling first.
Guarantee: all sizes lie in the bucket; cases whose tensors would take more than ``CASE_BYTES`` are left out, unless
nothing smaller exists. Torch-free: the daemon chooses, the worker runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm
from autofuse.ir.records import Bucket, ObservedShape
from autofuse.ir.shape import evaluate
from autofuse.tuner.buckets import awkward_values

CASE_BYTES = 64 << 20  # the float64 reference takes up to three times that
SHAPES_SEEN = 2  # observed shapes that are checked, besides the one that is timed

Kind = Literal["normal", "large", "zeros", "special"]
Values = tuple[int, ...]


@dataclass(frozen=True)
class CheckCase:
    """One call to check."""

    values: Values  # of the node's symbols
    kind: Kind
    shifted: bool = False  # inputs begin one element behind an aligned address, as slices do


def call_bytes(form: NodeForm, values: Sequence[int]) -> int:
    """Bytes of all tensors of one call, those between the operations included."""
    table = dict(zip(form.symbols, values, strict=True))
    specs = [item.spec for item in form.inputs] + [spec for op in form.operations for spec in op.outputs]
    return sum(evaluate(spec.numel, table) * BYTES_PER_ELEMENT[spec.dtype] for spec in specs)


def is_empty(form: NodeForm, values: Sequence[int]) -> bool:
    """Whether no output has an element."""
    table = dict(zip(form.symbols, values, strict=True))
    return all(evaluate(form.spec(ref).numel, table) == 0 for ref in form.outputs)


def first_cases(form: NodeForm, bucket: Bucket, timed: Values) -> list[CheckCase]:
    """What a candidate must pass before it is timed: one call at the timed shape, or the largest that fits."""
    sizes = [timed, *reversed(_by_size(form, awkward_values(bucket)))]
    fitting = [values for values in sizes if call_bytes(form, values) <= CASE_BYTES]
    return [CheckCase(fitting[0] if fitting else sizes[-1], "normal")]


def full_cases(form: NodeForm, bucket: Bucket, shapes: Sequence[ObservedShape], timed: Values) -> list[CheckCase]:
    """What a candidate must pass before it is used, beyond ``first_cases``.

    The first ``ESSENTIAL`` are all kinds of values on the smallest sizes of the bucket.
    """
    sizes = _by_size(form, awkward_values(bucket))
    low, others = sizes[0], sizes[1:]
    seen = [shape.symbol_values for shape in shapes if bucket.contains(shape.symbol_values)][: SHAPES_SEEN + 1]
    cases = [
        CheckCase(low, "special"),
        CheckCase(low, "normal", True),
        CheckCase(low, "large"),
        CheckCase(low, "zeros"),
    ]
    cases += [CheckCase(values, "normal") for values in (*others, *seen)]
    cases += [CheckCase(timed, "special"), CheckCase(timed, "large")]
    done = set(first_cases(form, bucket, timed))
    kept = [c for c in cases if c not in done and (c.values == low or call_bytes(form, c.values) <= CASE_BYTES)]
    return list(dict.fromkeys(kept))


ESSENTIAL = 4  # cases of ``full_cases`` that are run whatever they take


def _by_size(form: NodeForm, sizes: Sequence[Values]) -> list[Values]:
    return sorted(sizes, key=lambda values: call_bytes(form, values))
