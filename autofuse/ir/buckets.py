"""Buckets: the regions of symbol values that share one decision.

In: the values of the symbols of a node, or of a graph. Out: a `Bucket` (`ir.records`), an inclusive range per symbol.
Guarantee: the ranges of one symbol partition the sizes from 0 on, so every shape is in exactly one bucket of
`bucket_of`. A shape with a kernel of its own has one of `exact_bucket` beside it.

Sizes 0 and 1 stand alone, because Dynamo specialises on them and broadcasting depends on them. Above, ranges end at
powers of two: 2, 3..4, 5..8, 9..16, ... The largest sizes of a range are the round ones that scripts pad to.
Within a range work varies by 2x at most for each symbol, and so do the best settings of a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.errors import ShapeError
from autofuse.ir.records import Bucket, ObservedShape

DOMINANT_SHARE = 0.8  # of a bucket's calls: from here on a kernel for that very shape is worth its own binary


def bucket_of(values: Sequence[int]) -> Bucket:
    """The bucket that these values fall in. Raises ShapeError for a negative size."""
    return Bucket(tuple(_range_of(v) for v in values))


def exact_bucket(values: Sequence[int]) -> Bucket:
    """The bucket that holds these values and nothing else."""
    return Bucket(tuple((v, v) for v in values))


def _range_of(value: int) -> tuple[int, int]:
    if value < 0:
        raise ShapeError(f"expected a size of 0 and more, found {value}")
    if value <= 1:
        return value, value
    high = 1 << (value - 1).bit_length()
    return high // 2 + 1, high


def distance(a: Bucket, b: Bucket) -> int:
    """How many steps apart two buckets of one node are; buckets of powers of two only."""
    return sum(abs(x[1].bit_length() - y[1].bit_length()) for x, y in zip(a.ranges, b.ranges, strict=True))


def dominant_shape(shapes: Sequence[ObservedShape]) -> tuple[int, ...] | None:
    """The exact shape that makes up nearly all calls, None where there is no such shape."""
    total = sum(shape.calls for shape in shapes)
    best = max(shapes, key=lambda shape: shape.calls, default=None)
    if best is None or total == 0 or best.calls < DOMINANT_SHARE * total:
        return None
    return best.symbol_values


def awkward_values(bucket: Bucket) -> list[tuple[int, ...]]:
    """Shapes of a bucket on which kernels go wrong first: both ends, and a prime inside each range; no repeats."""
    corners = [
        tuple(low for low, _ in bucket.ranges),
        tuple(_prime_in(low, high) for low, high in bucket.ranges),
        tuple(high for _, high in bucket.ranges),
    ]
    return list(dict.fromkeys(corners))


def _prime_in(low: int, high: int) -> int:
    """The largest prime of the range, or its middle where it has none."""
    for value in range(high, max(low, 2) - 1, -1):
        if all(value % divisor for divisor in range(2, int(value**0.5) + 1)):
            return value
    return (low + high) // 2
