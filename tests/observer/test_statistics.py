"""Shape statistics: bounded, conserving, and independent of the order of the calls."""

from __future__ import annotations

import random
from collections import Counter, UserDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.observer.signatures import call_signature, tensor_leaves, tensors_by_path
from autofuse.observer.statistics import HeavyHitters, PendingCalls, ShapeStatistics

streams = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=300)


@given(streams, st.integers(1, 12))
def test_heavy_hitters_conserve_and_stay_bounded(stream: list[tuple[int, int]], capacity: int) -> None:
    found: HeavyHitters[int] = HeavyHitters(capacity)
    truth: Counter[int] = Counter()
    for key, weight in stream:
        found.add(key, weight)
        truth[key] += weight
    total = sum(truth.values())
    counts = found.counts()
    assert len(counts) <= capacity
    held = [len(value) for value in vars(found).values() if isinstance(value, dict | list)]
    assert len(held) == 3 and set(held) == {len(found)}, "counts, errors and the queue"
    assert found.total == total
    assert sum(count for _, count in counts) + found.tail == total
    assert all(0 <= count <= truth[key] for key, count in counts)
    kept = {key for key, _ in counts}
    assert all(key in kept for key, count in truth.items() if count > total / capacity)


@given(streams)
def test_heavy_hitters_are_exact_while_there_is_room(stream: list[tuple[int, int]]) -> None:
    found: HeavyHitters[int] = HeavyHitters(64)
    truth: Counter[int] = Counter()
    for key, weight in stream:
        assert found.add(key, weight) is None
        truth[key] += weight
    assert dict(found.counts()) == dict(truth)
    assert found.tail == 0


shapes = st.tuples(st.integers(1, 4), st.integers(1, 300), st.just(16))


@given(st.lists(shapes, min_size=1, max_size=120), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_varying_dims_are_found_in_any_order(calls: list[tuple[int, int, int]], order: random.Random) -> None:
    truth = {(path, d) for path in ("args[0]", "kwargs['x']") for d in range(3) if len({c[d] for c in calls}) > 1}
    for _ in range(2):
        statistics = ShapeStatistics("root", max_shapes=4, max_sizes=4)
        for call in calls:
            statistics.add([("args[0]", call), ("kwargs['x']", call)])
        assert set(statistics.dynamic_dims()) == truth
        assert statistics.calls == len(calls)
        assert sum(n for _, n in statistics.shapes()) + statistics.tail_calls == len(calls)
        histograms = statistics.histograms()
        assert len(histograms) == 6
        for record in histograms:
            assert len(record.counts) <= 4
            assert sum(n for _, n in record.counts) + record.tail_calls == len(calls)
        order.shuffle(calls)


@given(st.lists(st.integers(1, 30), max_size=200), st.integers(1, 8))
@settings(deadline=None)
def test_pending_calls_lose_nothing(sizes: list[int], capacity: int) -> None:
    statistics = ShapeStatistics("root", 64, 64)
    pending: PendingCalls[int] = PendingCalls(statistics, capacity)
    for size in sizes:
        if not pending.hit(size):
            pending.learn(size, [("args[0]", (size, 4))])
    assert dict(pending.flush().shapes()) == {(("args[0]", (s, 4)),): n for s, n in Counter(sizes).items()}
    assert statistics.calls == len(sizes)
    pending.flush()
    assert statistics.calls == len(sizes)


def test_a_varying_dim_is_known_before_the_flush() -> None:
    statistics = ShapeStatistics("root", 8, 8)
    pending: PendingCalls[int] = PendingCalls(statistics, 8)
    for size in (4, 4, 5):
        if not pending.hit(size):
            pending.learn(size, [("args[0]", (size, 4))])
    assert statistics.dynamic_dims() == (("args[0]", 0),)


def test_ranks_are_not_compared() -> None:
    statistics = ShapeStatistics("root", 8, 8)
    statistics.add([("args[0]", (4, 8))])
    statistics.add([("args[0]", (2, 4, 8))])
    assert statistics.dynamic_dims() == ()
    statistics.add([("args[0]", (2, 5, 8))])
    assert statistics.dynamic_dims() == (("args[0]", 1),)


def test_memory_is_bounded_for_endless_new_shapes_and_paths() -> None:
    statistics = ShapeStatistics("root", 16, 16)
    for step in range(5000):
        statistics.add([(f"args[{step % 1000}]", (step, step % 7))])
    assert len(statistics.shapes()) == 16
    assert len(statistics.histograms()) == 2 * 256
    assert statistics.untracked_arguments > 0
    assert statistics.calls == 5000


class Point(NamedTuple):
    x: torch.Tensor
    y: int


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor | None = None


def test_paths_of_arguments() -> None:
    t = torch.ones
    args = (t(2), 3, [t(3), (t(4), None)], {"k": t(5)}, Point(t(6), 1), Batch(t(7)), UserDict(u=t(8)))
    assert tensor_leaves(args, {"mask": t(9), "flag": True}) == [
        ("args[0]", (2,)),
        ("args[2][0]", (3,)),
        ("args[2][1][0]", (4,)),
        ("args[3]['k']", (5,)),
        ("args[4].x", (6,)),
        ("args[5].ids", (7,)),
        ("args[6]['u']", (8,)),
        ("kwargs['mask']", (9,)),
    ]
    assert list(tensors_by_path(args, {})) == [path for path, _ in tensor_leaves(args, {})]


nested = st.recursive(
    st.one_of(st.none(), st.integers(0, 3), st.lists(st.integers(0, 3), max_size=3).map(lambda s: torch.ones(s))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("ab"), inner),
    ),
    max_leaves=6,
)
calls = st.tuples(st.lists(nested, max_size=3).map(tuple), st.dictionaries(st.sampled_from("pq"), nested))


@given(calls, calls)
@settings(deadline=None, max_examples=200)
def test_equal_signatures_mean_equal_leaves(first, second) -> None:  # type: ignore[no-untyped-def]
    assert hash(call_signature(*first)) == hash(call_signature(*first))
    if call_signature(*first) == call_signature(*second):
        assert tensor_leaves(*first) == tensor_leaves(*second)


def test_a_list_that_contains_itself_ends() -> None:
    knot: list[object] = [torch.ones(2)]
    knot.append(knot)
    assert tensor_leaves((knot,), {})[0] == ("args[0][0]", (2,))
    call_signature((knot,), {})
