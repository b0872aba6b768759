"""Which sizes of a root's calls stay in eager."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.observer.release_policy import PAIRS_BEFORE_RELEASE, Loss, ReleasePolicy, magnitude

MANY = PAIRS_BEFORE_RELEASE


def judge(found: ReleasePolicy, elements: int, is_short: bool, release_factor: float) -> Loss | None:
    loss = found.find_loss(elements, is_short, release_factor)
    if loss is not None:
        found.lose(loss)
    return loss


def verdicts(**ratios: tuple[int, float, int]) -> ReleasePolicy:
    """Of (elements, ratio, pairs)."""
    found = ReleasePolicy()
    for elements, ratio, pairs in ratios.values():
        for _ in range(pairs):
            found.add(elements, ratio)
    return found


@given(st.integers(0, 1 << 60))
def test_a_magnitude_spans_a_factor_of_four(elements: int) -> None:
    assert magnitude(elements) <= magnitude(elements * 4) <= magnitude(elements) + 1
    assert magnitude(max(1, elements) * 4) == magnitude(elements) + 1


def test_a_magnitude_that_loses_leaves_the_others_alone() -> None:
    found = verdicts(small=(64, 0.7, MANY), large=(4096, 1.5, MANY))
    assert judge(found, 4096, True, 1.02) is None and not found.any_lost
    loss = judge(found, 64, True, 1.02)
    assert loss is not None and loss.reason == "slower_than_eager" and loss.gain == pytest.approx(0.7)
    assert found.is_lost(64) and found.is_lost(100) and not found.is_lost(4096) and not found.is_lost(4)
    assert found.ratios(64) == found.ratios(4096), "its pairs are gone"


def test_the_largest_that_lost_is_known() -> None:
    found = verdicts(small=(64, 0.7, MANY))
    assert found.lost_elements == 0
    judge(found, 64, True, 1.02)
    assert magnitude(found.lost_elements) == magnitude(64)
    found.lose_up_to(5000)
    assert magnitude(found.lost_elements) == magnitude(5000) != magnitude(found.lost_elements + 1)


def test_few_pairs_of_each_are_judged_together_and_lose_together() -> None:
    found = verdicts(one=(64, 0.7, MANY // 2), other=(4096, 0.8, MANY // 2))
    assert judge(found, 64, False, 1.02) is not None
    assert found.is_lost(64) and found.is_lost(4096) and not found.is_lost(1 << 20)


def test_what_won_its_few_pairs_does_not_lose_with_the_others() -> None:
    found = verdicts(large=(4096, 2.0, 1), small=(64, 0.8, MANY - 1))
    assert judge(found, 4096, True, 1.02) is not None
    assert found.is_lost(64) and not found.is_lost(4096)
    assert judge(verdicts(large=(4096, 2.0, 1)), 16, True, 1.02) is None


def test_whoever_has_been_judged_by_its_own_pairs_is_not_judged_by_those_of_others() -> None:
    found = verdicts(
        large=(4096, 1.03, MANY), tiny=(4, 0.5, MANY - 1), less=(16, 0.6, MANY - 1), small=(64, 0.6, MANY - 1)
    )
    loss = judge(found, 4, False, 1.02)
    assert loss is not None and found.is_lost(4) and found.is_lost(64)
    assert not found.is_lost(4096) and len(found.ratios(4096)) == MANY


def test_nothing_is_judged_by_few_pairs_nor_by_those_of_other_kernels() -> None:
    found = verdicts(one=(64, 0.1, MANY - 1))
    assert judge(found, 64, True, 1.02) is None
    found.add(64, 0.1)
    found.clear()
    assert judge(found, 64, True, 1.02) is None and not found.is_lost(64)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0.1, 10.0)), max_size=80), st.integers(1, 1 << 40))
def test_what_is_too_small_is_so_with_all_that_is_smaller(pairs: list[tuple[int, float]], limit: int) -> None:
    found = ReleasePolicy()
    found.lose_up_to(limit)
    for elements, ratio in pairs:
        found.add(elements, ratio)
        judge(found, elements, False, 1.02)
    assert found.any_lost and found.is_lost(limit) and found.is_lost(1) and found.is_lost(limit // 2)
    assert not found.is_lost(1 << 50)


def test_a_gain_is_told_by_pairs_enough_and_a_loss_alone_changes_nothing() -> None:
    found = verdicts(one=(64, 1.5, MANY - 1))
    assert found.gain == 0.0
    found.add(4096, 1.5)
    assert found.gain == pytest.approx(1.5)
    lost = verdicts(one=(64, 0.5, MANY))
    loss = lost.find_loss(64, False, 1.02)
    assert loss is not None and not lost.any_lost and len(lost.ratios(64)) == MANY
    lost.forget(loss.magnitudes)
    assert not lost.ratios(64) and not lost.is_lost(64)
