"""Strict jobs: what differs from eager in a bit is timed, never wins, and is named in the decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from autofuse.codegen.knobs import Knob
from autofuse.ir.records import Config, Decision, TuneRequest
from autofuse.ir.strict import is_strict, strictly
from autofuse.tuner.benchmark_provider import Built
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.tune_node import Job
from tests.tuner.nodes import chain_form, request, versions
from tests.tuner.replay import RecordedBench

FORM = chain_form(1)
LIMITS = JobLimits(trials=8, rounds=15, margin=0.03, job_seconds=1e9)
KNOB = Knob("a", ("slow", "middle", "fast"), "slow", "")  # without an order, so that all are in the first wave
FAST, MIDDLE, SLOW = ((("a", "fast"),), (("a", "middle"),), (("a", "slow"),))
TIMES = {FAST: 40.0, MIDDLE: 60.0, SLOW: 99.5}
AT_ONCE, LATE = 1, 2


def asked(is_for_strict_run: bool = True, calls: int = 5) -> TuneRequest:
    found = request(FORM, (24,), calls=calls)
    key = replace(found.key, versions=strictly(found.key.versions)) if is_for_strict_run else found.key
    return replace(found, key=key)


def tuned(differing: Mapping[Config, int], is_for_strict_run: bool = True) -> tuple[Decision, Outcome]:
    bench = RecordedBench((KNOB,), TIMES, 100.0, differing=differing)
    outcome = Job(asked(is_for_strict_run), bench, LIMITS, (), bench.clock).run()
    (decision,) = outcome.decisions
    return decision, outcome


def test_versions_of_strict_runs_are_others() -> None:
    assert is_strict(strictly(versions())) and not is_strict(versions())
    usual, strict = asked(False).key, asked().key
    assert usual.digest != strict.digest and usual.family != strict.family and strict.is_strict
    assert replace(strict, bucket="other").family == strict.family


@pytest.mark.parametrize("when", [AT_ONCE, LATE], ids=["at once", "in the last check"])
def test_where_all_differ_eager_stays_and_the_gain_is_told(when: int) -> None:
    decision, outcome = tuned(dict.fromkeys(TIMES, when))
    assert (decision.reason, decision.candidate.variant, decision.compile_key) == ("not_bit_equal", "eager", None)
    assert decision.speedup == pytest.approx(2.5, rel=0.1) and not outcome.kernels
    assert (
        decision.detail == f"c_generic would be {decision.speedup:.2f}x as fast as eager, but output 0 has other bits"
    )
    rows = {m.candidate.config: m for m in outcome.measurements}
    assert rows[FAST].status == "not_bit_equal" and rows[FAST].message == "output 0 has other bits"
    assert rows[FAST].speedup == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("when", [AT_ONCE, LATE], ids=["at once", "in the last check"])
def test_the_fastest_that_is_eagers_to_the_bit_wins(when: int) -> None:
    decision, outcome = tuned({FAST: when})
    assert decision.reason == "won" and decision.candidate.config == MIDDLE
    assert decision.detail.endswith("x as fast as eager, but output 0 has other bits")
    assert {m.candidate.config: m.status for m in outcome.measurements}[FAST] == "not_bit_equal"
    assert [k.key.digest for k in outcome.kernels] == [decision.compile_key]


def test_a_slower_one_that_differs_is_not_worth_a_word() -> None:
    decision, _ = tuned({SLOW: AT_ONCE})
    assert decision.reason == "won" and decision.candidate.config == FAST and "bits" not in decision.detail


def test_one_that_differs_and_gains_nothing_is_no_loss() -> None:
    bench = RecordedBench((Knob("a", ("slow",), "slow", ""),), {SLOW: 120.0}, 100.0, differing={SLOW: AT_ONCE})
    outcome = Job(asked(), bench, LIMITS, (), bench.clock).run()
    assert [d.reason for d in outcome.decisions] == ["no_gain"]


def test_usual_jobs_do_not_ask_for_bits() -> None:
    decision, outcome = tuned(dict.fromkeys(TIMES, AT_ONCE), is_for_strict_run=False)
    assert decision.reason == "won" and decision.candidate.config == FAST
    assert all(m.status in ("ok", "pruned") for m in outcome.measurements)


def test_a_kernel_for_one_shape_is_compared_too() -> None:
    asked_of: list[str] = []

    class OfOneShape(RecordedBench):
        def compare_bits(self, built: Built, cases: Any, elements: int, budget_seconds: float) -> str:
            asked_of.append(built.candidate.variant)
            return "" if built.candidate.variant == "c_generic" else "output 0 has other bits"

    bench = OfOneShape((KNOB,), TIMES, 100.0)
    outcome = Job(asked(calls=500), bench, LIMITS, (), bench.clock).run()
    assert "c_specialised" in asked_of
    assert [d.candidate.variant for d in outcome.decisions] == ["c_generic"]
