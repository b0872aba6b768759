"""Buckets partition the sizes; timing does not switch on noise; the search finds what is there to find."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.codegen.knobs import Knob
from autofuse.errors import ShapeError
from autofuse.ir.records import make_config
from autofuse.tuner.buckets import bucket_of, exact_bucket
from autofuse.tuner.search import ConfigSearch, replay
from autofuse.tuner.timing import compare, measure_rounds, median_interval, wins


@given(st.lists(st.integers(0, 1 << 40), max_size=4))
def test_each_value_has_exactly_one_bucket(values):
    bucket = bucket_of(values)
    assert bucket.contains(values)
    for value, (low, high) in zip(values, bucket.ranges, strict=True):
        assert bucket_of([low]) == bucket_of([high]) == bucket_of([value])
        assert not bucket_of([high + 1]).contains([value])
    assert exact_bucket(values).is_exact and exact_bucket(values).contains(values)


def test_the_first_buckets():
    assert [bucket_of([v]).ranges[0] for v in range(10)] == [
        (0, 0), (1, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (5, 8), (5, 8), (9, 16),
    ]  # fmt: skip
    with pytest.raises(ShapeError, match="-1"):
        bucket_of([-1])


def noisy(rng, seconds, rounds):
    """Samples with drift shared by a round, jitter and rare long ones, as a shared machine gives them."""
    return [seconds * rng.lognormvariate(0.0, 0.05) * (4.0 if rng.random() < 0.03 else 1.0) for _ in range(rounds)]


def test_two_equal_candidates_hardly_ever_switch():
    rng = random.Random(7)
    tries = 4000
    switched = sum(wins(compare(noisy(rng, 1e-4, 15), noisy(rng, 1e-4, 15)), 0.03) for _ in range(tries))
    assert switched / tries < 0.01


def test_a_real_gain_is_found():
    rng = random.Random(8)
    found = sum(wins(compare(noisy(rng, 1.5e-4, 15), noisy(rng, 1e-4, 15)), 0.03) for _ in range(200))
    assert found > 195


def test_the_interval_covers_the_median():
    rng = random.Random(9)
    covered = 0
    for _ in range(1000):
        low, high = median_interval(sorted(rng.gauss(1.0, 0.1) for _ in range(15)))
        covered += low <= 1.0 <= high
    assert covered / 1000 > 0.93


def test_rounds_interleave_and_end_with_the_budget():
    now = itertools.count()
    order = []
    calls = [lambda i=i: order.append(i) for i in range(3)]
    samples = measure_rounds(calls, 100, budget_seconds=50, clock=lambda: next(now))
    assert all(len(s) == len(samples[0]) for s in samples) and 3 <= len(samples[0]) < 100
    timed = order[6:]
    assert timed[:9] == [0, 1, 2, 1, 2, 0, 2, 0, 1]


KNOBS = (Knob("a", (1, 2, 4, 8), 1, ""), Knob("b", ("x", "y"), "x", ""), Knob("c", (False, True), False, ""))


def cost(values):
    return abs(values["a"] - 4) + (values["b"] == "x") * 2.0 + values["c"] * 0.5 + 1.0


def test_a_small_space_is_tried_whole_and_never_twice():
    search = ConfigSearch(KNOBS, [], 100)
    asked = []
    while configs := search.ask(3):
        asked += configs
        for config in configs:
            search.tell(config, cost(dict(config)))
    assert len(asked) == len(set(asked)) == 16
    assert dict(search.best()[0]) == {"a": 4, "b": "y", "c": False}


def test_replay_of_recorded_timings_comes_near_the_oracle():
    knobs = tuple(Knob(f"k{i}", (1, 2, 3, 4), 1, "") for i in range(5))  # 1024 configurations
    recorded = {}
    for values in itertools.product((1, 2, 3, 4), repeat=5):
        config = make_config({f"k{i}": v for i, v in enumerate(values)})
        recorded[config] = 100.0 + sum((v - 3) ** 2 * (5 - i) for i, v in enumerate(values))
    oracle = min(recorded.values())
    seeds = [make_config({f"k{i}": 2 for i in range(5)})]
    search = replay(knobs, recorded, seeds, trials=100)
    assert search.best()[1] <= oracle * 1.05
    assert len(list(search.ranking())) <= 100  # a tenth of the oracle's measurements


def test_seeds_come_first_and_failures_are_survived():
    seed = make_config({"a": 8, "b": "y", "c": True})
    foreign = make_config({"a": 3, "b": "y", "c": True})
    search = ConfigSearch(KNOBS, [foreign, seed], 4)
    first = search.ask(1)
    assert first == [seed]
    search.tell(seed, None)
    while configs := search.ask(1):
        search.tell(configs[0], cost(dict(configs[0])))
    assert search.best() is not None and len(list(search.ranking())) == 3
