"""Cases: the sizes and kinds of inputs on which a candidate is checked before it may win.

In: a node, the bucket, the shapes that were seen. Out: `CheckCase`s, the most telling first.
Guarantee: all sizes lie in the bucket; cases whose tensors would take more than a limit are made on its smallest sizes
instead. Torch-free: the daemon chooses, the worker runs them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autofuse.ir.buckets import awkward_values
from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm
from autofuse.ir.records import Bucket, ObservedShape
from autofuse.ir.shape import evaluate
from autofuse.tuner.possible_sizes import Values, possible_sizes

CASE_BYTES = 64 << 20  # of a call; its float64 reference takes up to three times as much
GPU_CASE_BYTES = 1 << 30  # a GPU checks 1 GiB in the time in which a CPU checks 64 MiB
SIZES_DRAWN = 8
STRICT_ELEMENTS, STRICT_ELEMENTS_16 = 1 << 19, 1 << 22
SHAPES_SEEN = 2  # observed shapes that are checked besides the timed one

Kind = Literal["normal", "large", "zeros", "special"]


@dataclass(frozen=True)
class CheckCase:
    """One call to check."""

    values: Values  # sizes of the node's symbols
    kind: Kind
    shifted: bool = False  # inputs begin one element behind an aligned address, as slices do


def call_bytes(form: NodeForm, values: Sequence[int]) -> int:
    """Bytes of all tensors of one call, including those between its operations."""
    table = dict(zip(form.symbols, values, strict=True))
    specs = [item.spec for item in form.inputs] + [spec for op in form.operations for spec in op.outputs]
    return sum(evaluate(spec.numel, table) * BYTES_PER_ELEMENT[spec.dtype] for spec in specs)


def is_empty(form: NodeForm, values: Sequence[int]) -> bool:
    """Whether no output has an element."""
    table = dict(zip(form.symbols, values, strict=True))
    return all(evaluate(form.spec(ref).numel, table) == 0 for ref in form.outputs)


def first_cases(form: NodeForm, bucket: Bucket, timed: Values) -> list[CheckCase]:
    """The cases before a candidate is timed: one call on the smallest sizes; the next, should these be impossible."""
    sizes = dict.fromkeys((_by_size(form, [*_awkward(form, bucket, timed), timed])[0], timed))
    return [CheckCase(values, "normal") for values in sizes]


def full_cases(
    form: NodeForm,
    bucket: Bucket,
    shapes: Sequence[ObservedShape],
    timed: Values,
    *,
    is_known: bool = False,
    most_bytes: int = CASE_BYTES,
) -> list[CheckCase]:
    """The cases before a candidate is used, besides ``first_cases``; ``most_bytes``: the most that a call may take.

    The first ``ESSENTIAL`` cases cover all kinds of values. ``is_known``: the same binary has passed in another bucket
    of the node, so that only cases which depend on the sizes are left.
    """
    sizes = _by_size(form, _awkward(form, bucket, timed))
    low, inner = sizes[0], sizes[len(sizes) // 2]
    seen = [shape.symbol_values for shape in shapes if bucket.contains(shape.symbol_values)]
    cases = [CheckCase(timed, "normal"), CheckCase(inner, "special"), CheckCase(low, "large", True)]
    if not is_known:
        cases.append(CheckCase(low, "zeros"))
        cases += [CheckCase(values, "normal") for values in (sizes[-1], inner, *seen[: SHAPES_SEEN + 1])]
    done = first_cases(form, bucket, timed)[:1]
    smaller = {timed: low, inner: low}
    fitting = [
        c if call_bytes(form, c.values) <= most_bytes else replace(c, values=smaller.get(c.values, low)) for c in cases
    ]
    return [case for case in dict.fromkeys(fitting) if case not in done]


def strict_cases(
    form: NodeForm, bucket: Bucket, shapes: Sequence[ObservedShape], timed: Values, most_bytes: int = CASE_BYTES
) -> list[CheckCase]:
    """The cases in which a kernel has to be eager's to the bit: all others, and some more sizes of the bucket.

    Eager may add in another order at each size, so sizes that nobody chose are among them.
    """
    draw = random.Random(bucket.label)
    # At one share of all ranges: sizes may depend on each other, as those of an index and of what it is for.
    shares = [draw.random() for _ in range(SIZES_DRAWN)]
    sizes = [tuple(low + round(share * (high - low)) for low, high in bucket.ranges) for share in shares]
    sizes = possible_sizes(form, bucket, timed, sizes)
    drawn = [CheckCase(values, "normal") for values in sizes if call_bytes(form, values) <= most_bytes]
    known = full_cases(form, bucket, shapes, timed, most_bytes=most_bytes)
    return list(dict.fromkeys([*first_cases(form, bucket, timed), *known, *drawn]))


def strict_elements(form: NodeForm) -> int:
    """How many elements more are compared with eager's.

    A result of 16 bits shows a difference in the last place of float32 in one element of 65536.
    """
    specs = [item.spec for item in form.inputs] + [form.spec(ref) for ref in form.outputs]
    return STRICT_ELEMENTS_16 if any(spec.dtype in ("float16", "bfloat16") for spec in specs) else STRICT_ELEMENTS


ESSENTIAL = 4  # the first cases of ``full_cases``, which are run however long they take


def _awkward(form: NodeForm, bucket: Bucket, timed: Values) -> list[Values]:
    return possible_sizes(form, bucket, timed, awkward_values(bucket))


def _by_size(form: NodeForm, sizes: Sequence[Values]) -> list[Values]:
    return sorted(sizes, key=lambda values: call_bytes(form, values))
