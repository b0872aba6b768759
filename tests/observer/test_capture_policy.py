"""Ski rental: rules over what is known of a root."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autofuse.ir.records import RootRecord
from autofuse.observer.capture_policy import Budget, CaptureFacts, advise_capture, may_trace_again
from autofuse.settings.groups import CaptureSettings


def advice(**values: Any) -> Any:
    """Of a root that has cost 0.1 s, where all roots together have cost as much and a capture takes 2 s."""
    spent = values.pop("spent_seconds", 0.1)
    defaults = {"spent_seconds": spent, "predicted_seconds": 2.0, "calls": 10, "budget": Budget(spent, 0.0, 1.25)}
    return advise_capture(CaptureFacts(**{**defaults, **values}))


def record(**values: Any) -> RootRecord:
    defaults = {"root": "r", "name": "R", "state": "captured", "reason": "paid_off"}
    return RootRecord(**{**defaults, **values})


BAR = 1.3  # times eager's, at any number of steps


@given(
    st.lists(
        st.tuples(
            st.floats(1e-3, 0.5),  # an eager step of the root
            st.floats(0.1, 30.0),  # what its capture is expected to take
            st.floats(1 / 1.5, 1.5),  # what it takes in truth, over that
            st.floats(0.9, 2.0),  # how much faster its steps are afterwards
            st.lists(st.floats(0.1, 10.0), max_size=3),  # further traces, expected at once after the capture
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 3000),
)
def test_no_run_takes_more_than_its_bar_at_any_step(roots: list[Any], steps: int) -> None:
    """Whatever captures cost, as long as predictions hold within 1.5, and whatever they gain."""
    eager = total = lost = 0.0
    behind = [0.0] * len(roots)
    captured = [False] * len(roots)
    own = [0.0] * len(roots)
    traces = [list(root[4]) for root in roots]
    for call in range(steps):
        for number, (step, expected, error, gain, _) in enumerate(roots):
            budget = Budget(eager, lost + sum(max(0.0, seconds) for seconds in behind), 1.25)
            price = 0.0
            if captured[number]:
                if traces[number] and may_trace_again(own[number], traces[number][0], budget):
                    price = traces[number].pop(0) * error
            elif advice(
                spent_seconds=own[number], predicted_seconds=expected, budget=budget, calls=call, min_root_us=0.0
            ).capture:
                captured[number], price = True, expected * error
                own[number] = 0.0
            lost += price
            own[number] += step
            eager += step
            longer = step / gain - step if captured[number] else 0.0
            behind[number] += longer
            total += price + step + longer
            assert total <= BAR * eager


def test_a_capture_comes_though_late() -> None:
    """Six times its expected cost, where nothing is known."""
    found = [advice(spent_seconds=seconds / 10).capture for seconds in range(200)]
    assert found.index(True) == 120 and all(found[120:])


def test_a_learnt_cost_is_trusted_sooner_than_a_guess() -> None:
    known = {"known": record(calls=10_000, capture_seconds=2.0), "known_seconds": 2.0, "step_seconds": 0.1}
    assert not advice(spent_seconds=11.0).capture
    assert advice(spent_seconds=11.0, calls=110, **known).reason == "paid_off"
    assert not advice(spent_seconds=9.0, calls=90, **known).capture


def test_what_captures_have_cost_is_waited_out() -> None:
    assert advice(spent_seconds=13.0).capture
    assert not advice(spent_seconds=13.0, budget=Budget(13.0, 1.0, 1.25)).capture
    assert advice(spent_seconds=13.0, budget=Budget(17.0, 1.0, 1.25)).capture
    assert not advice(spent_seconds=1.0, budget=Budget(100.0, 0.0, 1.25)).capture, "a root pays for itself as well"
    assert not advice(spent_seconds=1e6, budget=Budget(1e6, 0.0, 1.0)).capture, "no slowdown at all is allowed"


def test_one_more_graph_is_paid_for_by_calls_that_need_it() -> None:
    assert may_trace_again(2.0, 2.0, Budget(12.0, 0.0, 1.25))
    assert not may_trace_again(1.9, 2.0, Budget(100.0, 0.0, 1.25))
    assert not may_trace_again(2.0, 2.0, Budget(12.0, 0.5, 1.25))


def test_reasons() -> None:
    assert advice().reason == "not_yet"
    assert advice(predicted_seconds=None).reason == "not_observed"
    assert advice(spent_seconds=13.0).reason == "paid_off"
    assert advice(spent_seconds=1e-3).reason == "too_small"
    assert not advice(spent_seconds=1e-3, calls=5).final
    assert advice(spent_seconds=1e-3, calls=50).final
    assert advice(spent_seconds=1e-3, call_us=5000.0).reason == "not_yet"
    assert advice(spent_seconds=10.0, predicted_seconds=200.0, max_seconds=120.0).reason == "too_expensive"
    assert advice(failures=1).reason == "capture_failed"
    assert advice(failures=1).final
    assert advice(failures=1, max_failures=2).reason == "not_yet"


def test_at_once_needs_no_rent_but_a_look_at_the_shapes() -> None:
    assert not advice(at_once=True, calls=1, spent_seconds=0.9, predicted_seconds=2.0).capture
    assert not advice(at_once=True, calls=1, spent_seconds=0.9, predicted_seconds=None).capture
    assert advice(at_once=True, calls=1, spent_seconds=1.0, predicted_seconds=2.0).capture, "calls that take so long"
    found = advice(at_once=True, calls=2, predicted_seconds=None, spent_seconds=1.0)
    assert found.capture
    assert found.reason == "at_once"


def test_asked_for_at_the_first_call_nothing_is_weighed() -> None:
    found = advice(at_first_call=True, calls=0, predicted_seconds=None, spent_seconds=0.0, max_seconds=0.0)
    assert found.capture and found.reason == "first_call"
    assert not advice(at_first_call=True, failures=1).capture


def test_a_warm_store_knows_better() -> None:
    known = record(capture_seconds=0.8, calls=500)
    warm: dict[str, Any] = {"known": known, "known_seconds": 0.8, "step_seconds": 0.1}
    assert advice(calls=0, spent_seconds=0.0, **warm).reason == "not_yet"
    assert not advice(calls=1, spent_seconds=5.0, known=known, known_seconds=0.8).capture, "no step tells how long"
    found = advice(calls=3, spent_seconds=0.3, **warm)
    assert found.capture and found.reason == "known_to_pay" and found.predicted_seconds == 0.8
    dear = advice(calls=3, spent_seconds=0.3, **{**warm, "known_seconds": 3.0})
    assert not dear.capture and dear.predicted_seconds == 3.0, "a capture that is felt is paid for first"
    assert advice(calls=3, spent_seconds=0.3, **{**warm, "known_seconds": 3.0}, factor=3.0).capture, "a slow machine"
    assert advice(calls=1, spent_seconds=0.05, known=known, at_once=True).capture, "someone waits for it"
    assert advice(calls=1, spent_seconds=0.1, known=known, uses_known=True).capture, "a frozen run uses what is stored"
    short = advice(calls=3, spent_seconds=0.3, **{**warm, "known": record(calls=40)})
    assert not short.capture, "a run as long as the last one would not soon pay for the capture"
    some = {"known": record(calls=80), "known_seconds": 3.0, "step_seconds": 0.1}
    late = advice(calls=60, spent_seconds=20.0, **some)
    assert not late.capture and "80 calls" in late.detail, "no calls are left to pay for it"
    assert advice(calls=200, spent_seconds=20.0, **some).capture, "longer than the last run"
    failed = advice(calls=0, known=record(state="eager", reason="capture_failed", detail="no"))
    assert failed.final
    assert "no" in failed.detail
    assert advice(known=record(state="eager", reason="too_small")).reason == "not_yet"
    assert advice(known=record(state="observing", reason="not_yet")).reason == "not_yet"


def test_a_kept_trace_is_read_where_it_soon_pays() -> None:
    def kept(calls: int = 1, spent: float = 0.1, run: float = 5.0, lost: float = 0.0, **values: Any) -> Any:
        known = record(**{"capture_seconds": 0.5, "calls": 400, "kept_graphs": 2, "gain": 1.5} | values)
        some = {"known": known, "known_seconds": 0.5, "has_kept_trace": True, "run_seconds": run}
        some["budget"] = Budget(spent, lost, 1.25)
        return advice(calls=calls, spent_seconds=spent, **some)

    found = kept()
    assert kept(run=3.0).capture and not kept(run=2.0).capture, "more than 1.25 times what eager takes"
    assert not kept(lost=0.8).capture, "other modules' traces have been read for that already"
    assert kept(run=5.0, lost=0.5).capture and kept(run=3.0, spent=0.011).capture, "400 such steps save 1.5 s"
    assert found.capture and found.reason == "kept_trace" and found.predicted_seconds == 0.5
    assert not kept(calls=0, spent=0.0).capture, "no step tells how long the run will be"
    assert not kept(calls=1, spent=5e-3).capture, "400 such steps save 0.67 s, half of them less than it costs"
    assert kept(calls=1, spent=5e-3, gain=0.0).reason == "not_yet"
    assert not kept(gain=0.98).capture, "nothing was gained when it was measured"
    assert not kept(calls=350, spent=10.0).capture, "too late to pay in a run like the last one"
    assert kept(calls=500, spent=20.0).reason == "kept_trace", "longer than the last run"
    untuned = {"state": "eager", "reason": "slower_untuned", "gain": 0.0}
    assert not kept(**untuned).capture
    assert kept(calls=401, spent=20.0, **untuned).reason == "kept_trace", "paid for like any other capture"


def test_defaults_are_the_settings_own() -> None:
    facts, capture = CaptureFacts(0.0, None, Budget(0.0, 0.0, 1.25), 0), CaptureSettings()
    assert (facts.min_root_us, facts.max_seconds) == (capture.min_root_us, capture.max_seconds)
    assert (facts.max_failures, facts.at_first_call) == (capture.max_failures, capture.at_once)


def test_policy_and_statistics_need_no_torch() -> None:
    text = (
        "import sys; import autofuse.observer.capture_policy, autofuse.observer.release_policy,"
        "autofuse.observer.held_out, autofuse.observer.statistics, autofuse.observer.sampler;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], timeout=60).returncode == 0
