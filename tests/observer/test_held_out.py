"""Which calls stay on the original module, and which of them are compared."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.errors import SettingsError
from autofuse.observer.held_out import Confirmation, Held, HeldOut, HeldOutCalls


@given(st.floats(0.002, 0.5), st.integers(0, 5))
def test_held_out_calls_are_spread_evenly(share: float, seed: int) -> None:
    held_out = HeldOut(share, seed)
    calls = 40 * held_out.period
    taken = [call for call in range(calls) if held_out.takes(call)]
    assert 36 <= len(taken) <= 40  # the first calls are never among them
    assert min(taken) >= 8
    gaps = [b - a for a, b in pairwise(taken)]
    assert max(gaps) < 2 * held_out.period + 8


def test_held_out_is_deterministic_and_leaves_random_alone() -> None:
    random.seed(0)
    state = random.getstate()
    first = [HeldOut(0.02, 1).takes(call) for call in range(1000)]
    stepwise = HeldOut(0.02, 1)
    assert [stepwise.next() for _ in range(1000)] == first
    assert [HeldOut(0.02, 2).takes(call) for call in range(1000)] != first
    assert random.getstate() == state


def test_no_share_holds_nothing_out() -> None:
    assert not any(HeldOut(0.0).next() for _ in range(100))
    with pytest.raises(SettingsError):
        HeldOut(0.6)


def test_new_kernels_are_confirmed_by_a_burst_of_held_out_calls() -> None:
    confirmation = Confirmation(pairs=5, every=4, calm=8, times=2)
    first = [confirmation.next(1, True) for _ in range(200)]
    assert sum(first) == 5 and not any(first[:8]) and not any(first[-100:])
    assert not any(a and b for a, b in pairwise(first)), "calls to compare with lie between"
    assert sum(confirmation.next(2, True) for _ in range(200)) == 5
    assert not any(confirmation.next(3, True) for _ in range(200)), "often enough"


def test_nothing_is_confirmed_while_kernels_change_or_without_calls_to_compare_with() -> None:
    confirmation = Confirmation(pairs=5, every=4, calm=8, times=2)
    assert not any(confirmation.next(call // 6, True) for call in range(200))
    assert not any(confirmation.next(1000, False) for _ in range(200))
    assert sum(confirmation.next(1000, True) for _ in range(200)) == 5, "what was not used is not lost"
    assert not any(Confirmation(times=0).next(1, True) for _ in range(200))


def test_more_pairs_follow_where_the_first_leave_it_open() -> None:
    confirmation = Confirmation(pairs=5, every=4, calm=8, times=1, extensions=2)
    confirmation.extend()
    assert sum(confirmation.next(1, True) for _ in range(10)) == 0, "not before the first ones"
    for pairs in (5, 5, 5, 0):
        assert sum(confirmation.next(1, True) for _ in range(100)) == pairs
        assert confirmation.is_over
        confirmation.extend()
    assert not any(confirmation.next(2, True) for _ in range(200)), "an extension is no time of its own"
    confirmation.extend()
    assert not any(confirmation.next(2, True) for _ in range(200)), "nor is there one where the times are over"


def test_what_is_clear_is_not_confirmed_further_until_the_kernels_change() -> None:
    calls = HeldOutCalls(0.0, pairs=12)
    assert not any(calls.next(1, False, True, False) is Held.COMPARED for _ in range(200)), "nor begun without a share"
    calls = HeldOutCalls(0.001, pairs=12)
    found = 0
    for _ in range(400):
        found += calls.next(1, False, True, False, 5) is Held.COMPARED
        if found == 6:
            calls.end(5)
    assert found == 6 and calls.free(6)
    kinds = [calls.next(2, False, True, False, 5) for _ in range(200)]
    assert kinds.count(Held.COMPARED) >= 12, "other kernels are another matter"


@pytest.mark.parametrize("is_short", [False, True])
def test_short_held_out_calls_are_compared_warm(is_short: bool) -> None:
    """Each compared call follows one that is not; the share of calls on eager stays what was asked for."""
    calls = HeldOutCalls(0.02, pairs=12)
    kinds = [calls.next(1, False, True, is_short) for _ in range(20_000)]
    first, later = Counter(kinds[:250]), Counter(kinds[250:])
    assert 12 <= first[Held.COMPARED] <= 18 and first[Held.COLD] == (first[Held.COMPARED] if is_short else 0)
    assert 0.018 < (later[Held.COMPARED] + later[Held.COLD]) / len(kinds[250:]) < 0.022
    if is_short:
        assert all((b is Held.COMPARED) == (a is Held.COLD) for a, b in pairwise(kinds))


def test_each_magnitude_is_confirmed_by_itself() -> None:
    """Sizes that come one after the other: the first does not use up what is held out of the second."""
    calls = HeldOutCalls(0.02, pairs=12)
    for magnitude in (5, 8):
        kinds = Counter(calls.next(1, False, True, True, magnitude) for _ in range(250))
        assert 12 <= kinds[Held.COMPARED] <= 18
    assert calls.next(1, False, True, True, 9) is Held.NO and not calls.free(6), "a third one is to be confirmed"
    assert any(calls.next(1, False, True, True, 8) is Held.NO and calls.free(6) for _ in range(150)), "it comes no more"


@given(st.integers(2, 60), st.integers(0, 9), st.integers(0, 300), st.integers(1, 3))
def test_free_calls_end_at_the_next_that_is_held_out(period: int, seed: int, calls: int, every: int) -> None:
    asked, skipping = (HeldOut(1 / period, seed) for _ in range(2))
    taken = [asked.next() and asked.stretch % every == 0 for _ in range(calls + 8 + 4 * every * period)]
    skipping.skip(calls)
    free = skipping.free(every)
    assert not any(taken[calls : calls + free]) and taken[calls + free]
    skipping.skip(free)
    assert skipping.next() and skipping.stretch % every == 0


def test_few_short_calls_are_watched_once_their_gain_is_confirmed() -> None:
    calls = HeldOutCalls(0.02, pairs=12)
    for _ in range(250):
        calls.next(1, False, True, True)
    watched, number = 0, 0
    while number < 10_000:
        free = calls.free(6)
        if free >= 2:
            calls.skip(free)
            number += free
        else:
            calls.next(1, False, True, True)
            watched += 1
            number += 1
    assert 0.07 < watched / number < 0.09, "of a hundred calls two are held out, and six are compared with them"


def test_a_quarter_is_held_out_of_calls_that_gain_beyond_doubt() -> None:
    calls = HeldOutCalls(0.02, pairs=12)

    def held_out(is_short: bool, number: int = 10_000) -> set[int]:
        """Numbers of the calls."""
        return {n for n in range(number) if calls.next(1, False, True, is_short, 5) is Held.COMPARED}

    held_out(False, 400)
    often = held_out(False)
    assert 195 <= len(often) <= 205
    calls.note_sure(5, True)
    calls.note_sure(6, True)
    assert 45 <= len(held_out(False)) <= 55 and 24 <= len(held_out(True)) <= 26
    assert max(calls.free(6) for _ in range(1000) if calls.next(1, False, True, True, 5)) > 250
    calls.doubt()
    assert 195 <= len(held_out(False)) <= 205
    calls.note_sure(5, True)
    calls.note_sure(5, False)
    assert 195 <= len(held_out(False)) <= 205
    calls.note_sure(5, True)
    assert sum(calls.next(1, False, True, False, 6) is Held.COMPARED for _ in range(10_000)) > 200, "others are not"


def test_of_two_magnitudes_in_turn_both_are_beyond_doubt_or_calls_are_held_out_as_often() -> None:
    calls = HeldOutCalls(0.02, pairs=12)
    free = []
    for number in range(4000):
        if number == 2000:
            calls.note_sure(5, True)
        if number == 3000:
            calls.note_sure(6, True)
        calls.next(1, False, True, True, 5 + number % 2)
        free.append(calls.free(6))
    assert max(free[1000:2000]) < 200 and max(free[2000:3000]) < 200 < max(free[3000:])


def test_a_new_shape_runs_before_it_is_held_out() -> None:
    calls = HeldOutCalls(0.5, pairs=12)
    assert {calls.next(1, True, False, False) for _ in range(100)} == {Held.NO}
    assert Held.COMPARED in {calls.next(1, False, False, False) for _ in range(100)}
    none = HeldOutCalls(0.0, pairs=12)
    assert {none.next(1, False, True, True) for _ in range(1000)} == {Held.NO}


FIRST = (0, 137, 790)  # call of each rank
MISSED = {(first + after) % 97 for first in FIRST for after in (0, 1)}


@pytest.mark.parametrize("is_short", [False, True])
def test_ranks_that_begin_at_different_calls_hold_out_the_same_ones(is_short: bool) -> None:
    def held_out(first: int) -> list[int]:
        calls = HeldOutCalls(0.02, pairs=12)
        kinds: dict[int, Held] = {}
        for call in range(first, 3000):
            if call % 97 != first % 97:  # others are not asked about: they rest, or run what is released
                calls.count_to(call)
                kinds[call] = calls.next(1, False, True, is_short)
        return [
            call for call, kind in kinds.items() if kind is not Held.NO and call >= 1000 and call % 97 not in MISSED
        ]

    found = [held_out(first) for first in FIRST]
    assert found[0] == found[1] == found[2] and 25 < len(found[0]) < 50
