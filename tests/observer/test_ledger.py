"""Accounts by a clock that only the tests move."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.observer.ledger import CAUSES, EagerTimes, Ledger


class Script:
    """Steps of a root; each takes what it is said to take."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.clock = 0.0

    def eager(self, busy: float, outside: float = 0.0, elements: int = 100, observed: bool = False) -> None:
        self.clock += busy + outside
        self.ledger.add_eager(elements, busy, busy + outside, observed)

    def captured(self, busy: float, outside: float = 0.0, elements: int = 100, **noted: float) -> None:
        self.clock += busy + outside
        for cause, seconds in noted.items():
            self.ledger.note(cause, seconds)
        self.ledger.add_captured(elements, busy, busy + outside)


def started(steps: int = 10, busy: float = 0.1, outside: float = 0.02) -> Script:
    script = Script()
    for _ in range(steps):
        script.eager(busy, outside)
    return script


def test_eager_time_is_what_passed_by_the_clock() -> None:
    script = started()
    assert script.ledger.eager_seconds == pytest.approx(1.0)
    assert script.ledger.eager_seconds < script.clock, "what the script did between is not the root's"


def test_an_observed_step_counts_as_long_as_it_takes_unobserved() -> None:
    script = Script()
    script.eager(2.0, observed=True)  # the first call is: nothing is known yet
    assert script.ledger.eager_seconds == 0.0
    script.eager(0.1)
    assert script.ledger.eager_seconds == pytest.approx(0.2)
    script.eager(0.7, observed=True)
    assert script.ledger.eager_seconds == pytest.approx(0.3)
    script.eager(0.05, observed=True)
    assert script.ledger.eager_seconds == pytest.approx(0.35), "never more than the clock says"


@pytest.mark.parametrize("is_sampled", [False, True])
def test_steps_that_were_only_counted_count_as_the_ones_around_them(is_sampled: bool) -> None:
    for busy, wanted in ((0.1, 10.0), (5.0, 30.0), (0.15, 10.0), (0.25, 25.0)):
        ledger = started().ledger  # of 0.1 s
        before = ledger.eager_seconds
        ledger.count_unwatched(100, 30.0)
        assert ledger.eager_seconds - before == pytest.approx(10.0), "who knows what else the script did"
        if is_sampled:
            ledger.add_eager(100, 9.0, 9.0, True)
            before += 0.1
        for steps in (1, 2):
            ledger.add_eager(100, busy, busy, False)
            assert ledger.eager_seconds - before == pytest.approx(wanted + steps * busy)


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0.0, 1.0), st.booleans()), max_size=40))
def test_counted_steps_take_no_more_than_the_clock_says(steps: list[Any]) -> None:
    script = Script()
    for calls, seconds, observed in steps:
        if calls:
            script.clock += seconds
            script.ledger.count_unwatched(calls, seconds)
        else:
            script.eager(seconds, observed=observed)
        assert script.ledger.eager_seconds <= script.clock + 1e-9


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(1, 1000), st.booleans()), max_size=80))
def test_eager_time_is_never_more_than_the_clocks(steps: list[Any]) -> None:
    script = Script()
    for busy, outside, elements, observed in steps:
        script.eager(busy, outside, elements, observed)
        assert script.ledger.eager_seconds <= sum(step[0] for step in steps) + 1e-9
        assert script.ledger.eager_seconds <= script.clock + 1e-9


def test_a_capture_costs_all_that_the_script_lost_to_it() -> None:
    script = started()
    before = script.clock
    script.captured(5.1, 0.02, imports=1.0, tracing=3.0, planning=0.5)
    script.captured(0.8, 0.02)
    script.captured(0.4, 0.12)
    for _ in range(40):
        script.captured(0.1, 0.02)
    lost = script.clock - before - 43 * 0.12
    assert script.ledger.lost_seconds == pytest.approx(lost)
    found = script.ledger.lost()
    assert found == pytest.approx({"imports": 1.0, "tracing": 3.0, "planning": 0.5, "slow steps": lost - 4.5})
    assert not script.ledger.is_open


def test_what_a_settled_graph_gains_or_loses_is_no_cost_of_its_capture() -> None:
    for busy in (0.07, 0.11):
        script = started()
        script.captured(2.1, 0.02, tracing=2.0)
        for _ in range(8):
            script.captured(0.1, 0.02)
        assert not script.ledger.is_open
        for _ in range(100):
            script.captured(busy, 0.02)
        assert script.ledger.lost_seconds == pytest.approx(2.0)
        assert script.ledger.behind_seconds == pytest.approx(1.0 if busy > 0.1 else 0.0), "but it is known"


def test_steps_that_stay_slow_are_counted_for_a_while() -> None:
    script = started()
    script.captured(2.1, 0.02, tracing=2.0)
    for _ in range(1000):
        script.captured(0.2, 0.02)
    assert 2.0 + 40 * 0.1 < script.ledger.lost_seconds < 2.0 + 100 * 0.1


def test_a_later_trace_opens_the_account_again() -> None:
    script = started()
    script.captured(2.1, 0.02, tracing=2.0)
    for _ in range(20):
        script.captured(0.1, 0.02)
    script.captured(1.6, 0.02, elements=120, tracing=1.3)
    assert script.ledger.is_open
    for _ in range(20):
        script.captured(0.1, 0.02)
    assert script.ledger.lost()["tracing"] == pytest.approx(3.3)
    assert script.ledger.lost()["slow steps"] == pytest.approx(0.2 - 0.02, abs=0.01), "a step of 120 takes 0.12 s"


def test_a_pause_of_the_scripts_own_is_no_loss() -> None:
    script = started()
    script.captured(2.1, 600.0, tracing=2.0)  # an evaluation follows
    assert script.ledger.lost_seconds <= 2.0 + 0.12
    script = started(outside=600.0)  # each step is followed by one
    script.captured(2.1, 5.0, tracing=2.0)
    assert script.ledger.lost_seconds <= 2.0 + 1e-9


def test_what_is_lost_in_a_step_is_never_more_than_the_step() -> None:
    script = started()
    script.captured(0.6, 0.02, imports=3.0, tracing=3.0)
    assert script.ledger.lost_seconds == pytest.approx(0.5)


def test_a_root_captured_at_its_first_call_has_nothing_to_compare_with() -> None:
    script = Script()
    script.captured(9.0, imports=1.0, tracing=4.0)
    assert script.ledger.lost_seconds == pytest.approx(5.0) and script.ledger.eager_seconds == 0.0
    assert not script.ledger.is_open


def test_what_is_noted_counts_at_once() -> None:
    script = started()
    script.ledger.note("imports", 1.0)
    assert script.ledger.lost_seconds == script.ledger.lost()["imports"] == 1.0
    script.ledger.lose("imports", 0.5)
    assert script.ledger.lost_seconds == 1.5 and list(script.ledger.lost()) == list(CAUSES)


def test_captured_steps_count_as_what_they_would_have_taken() -> None:
    script = started()
    for _ in range(10):
        script.captured(0.05, 0.02)
    assert script.ledger.equal_seconds == pytest.approx(2.0) and script.ledger.eager_seconds == pytest.approx(1.0)


def test_times_go_by_size() -> None:
    times = EagerTimes()
    assert times.busy(10) is None
    times.add(100, 0.1, 0.12)
    assert times.busy(200) == pytest.approx(0.2) and times.typical(100) == (0.1, 0.12)
    for _ in range(5):
        times.add(100, 0.1, 0.12)
        times.add(400, 0.25, 0.27)
    times.add(100, 9.0, 9.0)
    assert times.busy(100) == 0.1 and times.busy(400) == 0.25, "medians"
    assert times.typical(100) == (0.1, 0.12) and times.typical(400) == (0.25, 0.27)
    times.add(400, 0.75, 0.75)
    assert times.typical(400) == (0.25, 0.27) and times.typical(100) == (0.1, 0.12), "asked again after a step"
    assert times.busy(110) == pytest.approx(0.11)
    lone = EagerTimes()
    for elements in (100, 200):
        lone.add(elements, 0.05 + elements / 1000, 1.0)
    assert lone.busy(1000) == pytest.approx(1.05) and lone.typical(1000) == pytest.approx((1.05, 1.0))


def test_no_torch() -> None:
    text = (
        "import sys; import autofuse.observer.ledger, autofuse.observer.capture_cost; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=60).returncode == 0
