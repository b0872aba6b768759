"""A topological order that stays near the given one."""

from __future__ import annotations

import graphlib
import random

import pytest

from autofuse.ir.ordering import ordered_near


def test_what_may_come_next_comes_in_its_place() -> None:
    before = {"d": {"a"}, "c": set(), "a": set(), "b": {"c", "a"}}
    assert ordered_near(before, "dcab".index) == ["c", "a", "d", "b"]
    assert ordered_near(dict[int, set[int]](), int) == []


def test_it_is_what_taking_the_first_that_may_come_gives() -> None:
    chance = random.Random(0)
    for _ in range(100):
        names = list(range(chance.randrange(1, 12)))
        rank = {name: chance.random() for name in names}
        before = {n: {m for m in names if rank[m] < rank[n] and chance.random() < 0.3} for n in names}
        expected: list[int] = []
        while len(expected) < len(names):
            expected.append(next(n for n in names if n not in expected and before[n] <= set(expected)))
        assert ordered_near(before, lambda name: name) == expected


def test_a_circle_is_told() -> None:
    with pytest.raises(graphlib.CycleError):
        ordered_near({0: {1}, 1: {0}, 2: set()}, int)
