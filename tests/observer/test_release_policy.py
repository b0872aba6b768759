"""Which sizes of a root's calls stay in eager."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.observer.release_policy import (
    CLEAR_PAIRS,
    PAIRS_BEFORE_RELEASE,
    SURE_PAIRS,
    Loss,
    ReleasePolicy,
    advise_release,
    is_unsure,
    magnitude,
)

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
    found = verdicts(one=(64, 1.05, MANY - 1))
    assert found.gain == 0.0
    found.add(4096, 1.05)
    assert found.gain == pytest.approx(1.05)
    assert verdicts(one=(64, 1.5, CLEAR_PAIRS)).gain == pytest.approx(1.5) and not verdicts(one=(64, 1.5, 5)).gain
    lost = verdicts(one=(64, 0.5, MANY))
    loss = lost.find_loss(64, False, 1.02)
    assert loss is not None and not lost.any_lost and len(lost.ratios(64)) == MANY
    lost.forget(loss.magnitudes)
    assert not lost.ratios(64) and not lost.is_lost(64)


def test_a_large_gain_is_clear_after_few_pairs_and_sooner_where_it_is_known() -> None:
    found = verdicts(one=(64, 1.5, 3))
    assert not found.is_clear(64, 0.0) and not found.is_clear(64, 1.05) and found.is_clear(64, 1.4)
    assert not found.is_clear(4096, 1.4), "another magnitude has no pairs yet"
    found = verdicts(one=(64, 1.5, CLEAR_PAIRS))
    assert found.is_clear(64, 0.0)
    found.add(64, 1.0)
    assert not found.is_clear(64, 1.4), "one that gained nothing leaves it open"


def test_short_calls_are_clear_where_they_gain_a_quarter() -> None:
    assert not verdicts(one=(64, 1.2, CLEAR_PAIRS)).is_clear(64, 0.0, is_short=True)
    assert verdicts(one=(64, 1.3, CLEAR_PAIRS)).is_clear(64, 0.0, is_short=True)
    found = verdicts(one=(64, 0.7, 2))
    for _ in range(3):
        assert not found.is_clear(64, 1.4, is_short=True)
        found.add(64, 1.3)
    assert found.is_clear(64, 1.4, is_short=True), "the first calls of a graph were slow"


def test_twelve_pairs_of_a_large_gain_leave_no_doubt() -> None:
    assert not verdicts(one=(64, 1.5, 11)).is_sure(64) and not verdicts(one=(64, 1.2, 12)).is_sure(64)
    found = verdicts(one=(64, 1.5, 12))
    assert found.is_sure(64)
    found.add(64, 1.1)
    assert not found.is_sure(64)


@pytest.mark.parametrize(("is_short", "scatter"), [(False, 0.1), (True, 0.25)])
@pytest.mark.parametrize(("known", "most"), [(0.0, 0.01), (1.4, 0.1)])
def test_what_loses_is_hardly_ever_clear(known: float, most: float, is_short: bool, scatter: float) -> None:
    """Of 2,000 roots that lose a tenth, on machines that scatter by a tenth, short calls by a quarter."""
    draw = random.Random(3)
    wrong = 0
    for _ in range(2000):
        found = ReleasePolicy()
        for _ in range(MANY):
            found.add(64, draw.gauss(0.9, scatter))
            if found.is_clear(64, known, is_short):
                wrong += 1
                break
    assert wrong / 2000 < most


def released(gain: float, spread: float, is_short: bool, pairs: int = 12) -> float:
    """Share of roots released, whose ratios scatter around a gain."""
    draw = random.Random(f"{gain} {spread}")
    runs = [[draw.gauss(gain, spread) for _ in range(pairs)] for _ in range(2000)]
    return sum(advise_release(ratios, is_short, 1.02) is not None for ratios in runs) / len(runs)


def test_roots_that_lose_are_released_and_those_that_gain_are_kept() -> None:
    assert released(0.9, 0.05, is_short=False) > 0.95 and released(0.9, 0.05, is_short=True) > 0.99
    assert released(1.05, 0.15, is_short=True) < 0.06 and released(1.1, 0.15, is_short=True) < 0.01
    assert released(1.0, 0.05, is_short=False) < 0.03, "long calls that gain nothing lose nothing either"


@pytest.mark.parametrize("is_short", [False, True])
def test_small_losses_are_found_over_time(is_short: bool) -> None:
    """The ratios of two dozen calls or more, as many as confirm kernels whose gain is in doubt."""

    def outcome(gain: float) -> bool:
        ratios: list[float] = []
        while len(ratios) < 48:
            ratios += [draw.gauss(gain, 0.08) for _ in range(12)]
            if advise_release(ratios, is_short, 1.02) is not None:
                return True
            if not is_unsure(ratios):
                return False
        return False

    draw = random.Random(7)
    assert sum(outcome(0.94) for _ in range(500)) > 440
    assert sum(outcome(1.06) for _ in range(500)) < 20


def test_a_release_has_its_reason() -> None:
    assert advise_release([0.8] * 12, False, 1.02) == advise_release([0.8] * 12, True, 1.02) == "slower_than_eager"
    assert advise_release([0.99] * 12, True, 1.02) == "no_gain"
    assert advise_release([0.99] * 12, False, 1.02) is None
    assert advise_release([0.99] * 7 + [1.2] * 5, True, 1.02) is None, "seven of twelve may be chance"


def test_a_gain_is_beyond_doubt_after_enough_pairs_until_the_last_ones_lose() -> None:
    found = ReleasePolicy()
    for number in range(SURE_PAIRS):
        assert not found.is_sure(1000), number
        found.add(1000, 1.2)
    assert found.is_sure(1000) and not found.is_sure(100_000), "of its own magnitude"
    for is_sure in (True, True, False):
        found.add(1000, 0.9)
        assert found.is_sure(1000) is is_sure
    found.clear()
    assert not found.is_sure(1000)


@given(st.lists(st.sampled_from([0.8, 1.2]), max_size=64))
def test_what_is_beyond_doubt_is_no_loss(ratios: list[float]) -> None:
    found = ReleasePolicy()
    for ratio in ratios:
        found.add(1000, ratio)
    if found.is_sure(1000):
        assert found.find_loss(1000, True, 1.0) is None
