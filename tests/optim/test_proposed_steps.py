"""An optimizer's step that another host proposes: that variant is tried, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofuse.codegen.c.build import find_toolchain
from autofuse.ir.records import EAGER, Candidate, Decision
from autofuse.optim.tune_step import C_MULTI, StepTuning
from autofuse.tuner.backends import CBackend
from autofuse.tuner.outcome import Outcome
from autofuse.tuner.proposed import RACED, has_run
from tests.optim.test_strict_steps import TIMES, Given
from tests.optim.test_tune_step_on_gpus import FORM, LIMITS, request


def tuned(proposed: Candidate | None, seconds: dict[str, float] = TIMES) -> tuple[Decision, Outcome]:
    worker, backend = Given(set(), seconds), CBackend(find_toolchain())
    job = StepTuning(
        request(FORM, "cpu:test"), FORM, backend, worker, LIMITS, proposed=proposed  # type: ignore[arg-type]
    )  # fmt: skip
    outcome = job.run()
    return outcome.decisions[0], outcome


def test_a_generated_step_is_compiled_here_and_no_other_is_tried() -> None:
    searched, all_tried = tuned(None)
    decision, outcome = tuned(searched.candidate)
    assert searched.candidate.variant == C_MULTI and len(all_tried.measurements) > 1
    assert decision.candidate == searched.candidate and decision.reason == "won" and has_run(outcome)
    assert [m.candidate for m in outcome.measurements] == [searched.candidate]
    assert [kernel.key.digest for kernel in outcome.kernels] == [decision.compile_key]


def test_a_step_of_torchs_own_needs_no_compiler() -> None:
    decision, outcome = tuned(Candidate("fused"))
    assert decision.candidate == Candidate("fused") and decision.reason == "won" and outcome.kernels == []


def test_one_that_loses_here_leaves_torchs_step() -> None:
    decision, outcome = tuned(Candidate("fused"), {**TIMES, "fused": 2e-5})
    assert decision.candidate == Candidate(EAGER) and decision.reason in RACED and has_run(outcome)


@pytest.mark.parametrize("candidate", [Candidate("fast"), Candidate(C_MULTI, (("chunk", 7),)), Candidate(C_MULTI)])
def test_one_that_this_host_does_not_know_is_not_tried(candidate: Candidate) -> None:
    decision, outcome = tuned(candidate)
    assert decision.candidate == Candidate(EAGER) and not has_run(outcome) and outcome.measurements == []


def test_a_decision_says_that_others_used_the_cores() -> None:
    """The worker says how many threads a race had: one, in place of the request's two."""
    asked = request(FORM, "cpu:test")
    worker, asked = Given(set(), TIMES, threads=1), replace(asked, key=replace(asked.key, threads=2))
    job = StepTuning(asked, FORM, CBackend(find_toolchain()), worker, LIMITS)  # type: ignore[arg-type]
    (decision,) = job.run().decisions
    assert decision.raced_threads == 1 and "on one thread, for the machine was busy" in decision.detail


def test_what_a_race_dropped_is_not_preferred_for_its_few_rounds() -> None:
    """Of three rounds one may have disturbed torch's step by a factor of ten; the leader was ahead in each."""
    worker, backend = Given(set(), {**TIMES, "fused": 4e-7}, frozenset({"fused"})), CBackend(find_toolchain())
    job = StepTuning(request(FORM, "cpu:test"), FORM, backend, worker, LIMITS)  # type: ignore[arg-type]
    (decision,) = job.run().decisions
    assert decision.candidate.variant == C_MULTI and decision.reason == "won"
