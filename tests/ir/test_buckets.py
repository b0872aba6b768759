"""Buckets partition the shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.errors import ShapeError
from autofuse.ir.buckets import awkward_values, bucket_of, distance, dominant_shape, exact_bucket
from autofuse.ir.records import Bucket, ObservedShape

sizes = st.integers(0, 1 << 40)
shapes = st.lists(sizes, max_size=4)


@given(shapes)
def test_a_bucket_contains_the_values_it_was_made_for(values: list[int]) -> None:
    assert bucket_of(values).contains(values)


@given(sizes, sizes)
def test_every_size_is_in_exactly_one_bucket(a: int, b: int) -> None:
    """Two buckets either are the same or have nothing in common."""
    first, second = bucket_of([a]), bucket_of([b])
    ((low_a, high_a),), ((low_b, high_b),) = first.ranges, second.ranges
    assert first == second or high_a < low_b or high_b < low_a


@given(st.integers(2, 1 << 40))
def test_sizes_within_a_bucket_differ_by_less_than_two_times(value: int) -> None:
    ((low, high),) = bucket_of([value]).ranges
    assert high < 2 * low and high & (high - 1) == 0


def test_the_first_buckets() -> None:
    found = [bucket_of([v]).ranges[0] for v in range(10)]
    assert found == [(0, 0), (1, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (5, 8), (5, 8), (9, 16)]


def test_no_symbols_and_negative_sizes() -> None:
    assert bucket_of([]) == Bucket(()) and bucket_of([]).label == "static"
    with pytest.raises(ShapeError):
        bucket_of([3, -1])


@given(shapes)
def test_exact_buckets(values: list[int]) -> None:
    bucket = exact_bucket(values)
    assert bucket.is_exact and bucket.contains(values)


@given(shapes)
def test_awkward_values_are_inside(values: list[int]) -> None:
    bucket = bucket_of([min(v, 1 << 16) for v in values])
    found = awkward_values(bucket)
    assert found and all(bucket.contains(v) for v in found) and len(set(found)) == len(found)


def test_distance_counts_steps() -> None:
    assert distance(bucket_of([700, 3]), bucket_of([700, 3])) == 0
    assert distance(bucket_of([700, 3]), bucket_of([300, 5])) == 2


def test_dominant_shape() -> None:
    assert dominant_shape([]) is None
    assert dominant_shape([ObservedShape((4, 96), 9), ObservedShape((4, 70), 1)]) == (4, 96)
    assert dominant_shape([ObservedShape((4, 96), 6), ObservedShape((4, 70), 4)]) is None
