"""Ski rental and held-out calls: pure functions."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.capture.speed import slowness
from autofuse.errors import SettingsError
from autofuse.ir.records import RootRecord
from autofuse.observer.policy import (
    Confirmation,
    Held,
    HeldOut,
    HeldOutCalls,
    advise_capture,
    advise_release,
    is_unsure,
    learn_cost,
    predict_seconds,
)


def advice(**values: Any) -> Any:
    defaults = {"spent_seconds": 0.1, "operations": 100, "seconds_per_op": 0.02, "calls": 10}
    return advise_capture(**{**defaults, **values})


def record(**values: Any) -> RootRecord:
    defaults = {"root": "r", "name": "R", "state": "captured", "reason": "paid_off"}
    return RootRecord(**{**defaults, **values})


@given(st.floats(0.001, 1.0), st.integers(1, 2000), st.integers(1, 20_000), st.booleans())
def test_ski_rental_costs_at_most_twice_the_best_choice(
    step: float, operations: int, steps: int, is_first: bool
) -> None:
    """Whatever the length of the run, and even if a captured step cost nothing."""
    price = predict_seconds(operations, 0.02, is_first=is_first)
    assert not is_first or price > predict_seconds(operations, 0.02)
    spent = paid = 0.0
    for call in range(min(steps, 500)):
        found = advice(
            spent_seconds=spent, operations=operations, calls=call, is_first=is_first,
            min_root_us=0.0, max_seconds=float("inf"),
        )  # fmt: skip
        if found.capture:
            paid = spent + price
            break
        spent += step
        paid = spent
    best = min(price, min(steps, 500) * step)
    assert paid <= 2 * best + step


def test_a_slow_machine_expects_more() -> None:
    fast, slow = (advice(seconds_per_op=0.01 * by, slowness=by, is_first=True).predicted_seconds for by in (1.0, 2.5))
    assert slow == pytest.approx(2.5 * fast)
    assert slowness() > 0.0 and slowness() == slowness(), "measured once"


def test_reasons() -> None:
    assert advice().reason == "not_yet"
    assert advice(operations=None).reason == "not_observed"
    assert advice(spent_seconds=10.0).reason == "paid_off"
    assert advice(spent_seconds=1e-3).reason == "too_small"
    assert not advice(spent_seconds=1e-3, calls=5).final
    assert advice(spent_seconds=1e-3, calls=50).final
    assert advice(spent_seconds=1e-3, call_us=5000.0).reason == "not_yet"
    assert advice(spent_seconds=10.0, operations=10_000).reason == "too_expensive"
    assert advice(failures=1).reason == "capture_failed"
    assert advice(failures=1).final
    assert advice(failures=1, max_failures=2).reason == "not_yet"


def test_at_once_needs_no_rent_but_a_look_at_the_shapes() -> None:
    assert not advice(at_once=True, calls=1, spent_seconds=1.0).capture
    found = advice(at_once=True, calls=2, operations=None, spent_seconds=1.0)
    assert found.capture
    assert found.reason == "at_once"


def test_asked_for_at_the_first_call_nothing_is_weighed() -> None:
    found = advice(at_first_call=True, calls=0, operations=None, spent_seconds=0.0, max_seconds=0.0)
    assert found.capture and found.reason == "first_call"
    assert not advice(at_first_call=True, failures=1).capture


def test_a_warm_store_knows_better() -> None:
    known = record(operations=80, capture_seconds=3.0, calls=500)
    assert advice(calls=0, spent_seconds=0.0, known=known).reason == "not_yet"
    assert not advice(calls=1, spent_seconds=5.0, known=known).capture, "a first call warms up"
    sampled = {"spent_seconds": 6.1, "first_seconds": 5.0, "operations": None, "known": known}
    assert not advice(calls=3, **sampled).capture, "one of the first calls is sampled, and looks long"
    found = advice(calls=6, **sampled)
    assert found.capture
    assert found.reason == "known_to_pay"
    assert found.predicted_seconds > 1.0
    assert advice(calls=1, spent_seconds=0.05, known=known, at_once=True).capture, "someone waits for it"
    warmed = advice(calls=6, spent_seconds=5.0, first_seconds=4.999, known=known)
    assert not warmed.capture, "its first call says nothing about those to come"
    long = advice(calls=2, spent_seconds=30.0, first_seconds=16.0, operations=300, known=known)
    assert long.reason == "known_to_pay", "calls of seconds: nobody waits for six"
    assert not advice(calls=2, spent_seconds=16.1, first_seconds=16.0, operations=300, known=known).capture
    short = advice(calls=6, spent_seconds=0.3, operations=None, known=record(operations=80, calls=4))
    assert not short.capture, "a run as long as the last one would not pay for the capture"
    some = record(operations=300, capture_seconds=6.0, calls=80)  # 8 s in eager, of which a capture saves 2
    early = advice(calls=50, spent_seconds=5.0, operations=300, known=some)
    assert not early.capture and "80 calls" in early.detail
    rented = {"calls": 70, "spent_seconds": 7.0, "operations": 300}
    assert advice(**rented).capture and not advice(**rented, known=some).capture
    assert advice(calls=80, spent_seconds=8.0, operations=300, known=some).capture, "longer than the last run"
    assert advice(calls=1, spent_seconds=0.1, known=some, uses_known=True).capture, "a frozen run uses what is stored"
    small = record(operations=300, capture_seconds=1.7, calls=80)
    assert advice(calls=6, spent_seconds=0.06, operations=300, known=small).capture, "little is at stake"
    failed = advice(calls=0, known=record(state="eager", reason="capture_failed", detail="no"))
    assert failed.final
    assert "no" in failed.detail
    assert advice(known=record(state="eager", reason="too_small")).reason == "not_yet"
    assert advice(known=record(state="observing", reason="not_yet")).reason == "not_yet"


def test_cost_is_learnt_from_captures() -> None:
    assert learn_cost([], 0.02) == 0.02
    assert learn_cost([record(state="eager", operations=10, capture_seconds=9.0)], 0.02) == 0.02
    records = [record(operations=100, capture_seconds=s) for s in (1.3, 2.3, 90.3)]
    assert learn_cost(records, 0.02) == pytest.approx(0.02)
    kept = record(operations=100, capture_seconds=0.4, kept_graphs=2)
    assert learn_cost([*records, kept, kept, kept], 0.02) == pytest.approx(0.02), "nothing was traced there"
    assert advice(calls=1, spent_seconds=0.05, known=kept).predicted_seconds == 0.4, "but this root's own cost it is"
    by_order = record(operations=0, capture_seconds=9.0, calls=12)  # nobody asked what it would cost
    found = advice(calls=6, spent_seconds=0.02, operations=None, known=by_order)
    assert not found.capture and found.predicted_seconds == 9.0, "what it took then is known"
    assert learn_cost([record(operations=100, capture_seconds=0.1)], 0.02) > 0


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


def test_policy_and_statistics_need_no_torch() -> None:
    text = (
        "import sys; import autofuse.observer.policy, autofuse.observer.statistics, autofuse.observer.sampler;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=60).returncode == 0


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


def test_a_new_shape_runs_before_it_is_held_out() -> None:
    calls = HeldOutCalls(0.5, pairs=12)
    assert {calls.next(1, True, False, False) for _ in range(100)} == {Held.NO}
    assert Held.COMPARED in {calls.next(1, False, False, False) for _ in range(100)}
    none = HeldOutCalls(0.0, pairs=12)
    assert {none.next(1, False, True, True) for _ in range(1000)} == {Held.NO}
