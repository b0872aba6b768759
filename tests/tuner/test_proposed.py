"""A job on a proposed candidate: built, checked and raced as any other, and nothing else is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofuse.codegen.knobs import Knob
from autofuse.ir.records import EAGER, IN_ONE, Candidate, Config
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.proposed import RACED, has_run, is_eager, misfit
from autofuse.tuner.tune_node import Job
from autofuse.tuner.worker_process import CandidateProblem
from tests.tuner.nodes import chain_form, request
from tests.tuner.replay import RecordedBench

KNOBS = [Knob("a", (1, 2, 4), 1, ""), Knob("b", (False, True), False, "")]
TIMES: dict[Config, float] = {(("a", a), ("b", b)): 20.0 * a for a in (1, 2, 4) for b in (False, True)}
BEST: Config = (("a", 1), ("b", True))
LIMITS = JobLimits(trials=6, rounds=9, margin=0.03, job_seconds=8.0)
EAGER_US = 40.0


def tune(proposed: Candidate, problem: CandidateProblem | None = None) -> tuple[Outcome, RecordedBench]:
    problems = {proposed.config: problem} if problem is not None else {}
    bench = RecordedBench(KNOBS, TIMES, EAGER_US, problems=problems)
    outcome = Job(request(chain_form(), (700,)), bench, LIMITS, (), bench.clock, proposed).run()
    return outcome, bench


def test_a_winner_is_adopted_and_nothing_else_was_built() -> None:
    outcome, bench = tune(Candidate("c_generic", BEST))
    (decision,) = outcome.decisions
    assert decision.reason == "won" and decision.candidate.config == BEST and decision.trials == 1
    assert set(bench.built) == {BEST} and has_run(outcome)
    assert [m.candidate.config for m in outcome.measurements] == [BEST]


def test_one_that_loses_here_stays_out_and_leaves_its_measurement() -> None:
    slow: Config = (("a", 4), ("b", False))  # 80 us; eager takes 40
    outcome, bench = tune(Candidate("c_generic", slow))
    (decision,) = outcome.decisions
    assert decision.candidate.variant == EAGER and decision.reason in RACED and has_run(outcome)
    assert set(bench.built) == {slow}, "no search"
    assert [m.speedup is not None and m.speedup < 1.0 for m in outcome.measurements] == [True]


@pytest.mark.parametrize("status", ["wrong", "crash", "compile_error", "timeout"])
def test_one_that_is_wrong_here_wins_nothing(status: str) -> None:
    problem = CandidateProblem(status, "not as it should be")  # type: ignore[arg-type]
    outcome, _ = tune(Candidate("c_generic", BEST), problem)
    (decision,) = outcome.decisions
    assert decision.candidate.variant == EAGER and not has_run(outcome) and not outcome.kernels
    assert [m.status for m in outcome.measurements] == [status]


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (Candidate("c_generic", (("a", 1), ("b", True), ("c", 1))), "expected a knob of this version, found 'c'"),
        (Candidate("c_generic", (("a", 3), ("b", True))), "expected a of 1, 2, 4, found 3"),
        (Candidate("c_generic", (("a", True), ("b", True))), "expected a of 1, 2, 4, found True"),
        (Candidate("c_generic", (("a", "1; system(0)"), ("b", True))), "expected a of 1, 2, 4, found '1; system(0)'"),
        (Candidate("c_generic", (("a", 1), ("b", 1))), "expected b of False, True, found 1"),
        (Candidate("c_generic", (("a", 1),)), "expected a value of b, found none"),
        (Candidate("triton_generic", BEST), "expected one of c_generic, c_specialised, found 'triton_generic'"),
    ],
)
def test_one_that_this_host_does_not_know_is_not_built(candidate: Candidate, words: str) -> None:
    assert misfit(candidate, ("c_generic", "c_specialised"), KNOBS) == words
    outcome, bench = tune(candidate)
    assert bench.built == [] and not has_run(outcome)
    assert [(d.reason, d.detail) for d in outcome.decisions] == [("refused", words)]


def test_the_two_ways_of_staying_in_eager() -> None:
    assert is_eager(Candidate(EAGER)) and is_eager(Candidate(EAGER, IN_ONE))
    assert not is_eager(Candidate(EAGER, (("x", 1),))) and not is_eager(Candidate("c_generic"))


def test_a_proposal_of_other_sizes_is_not_specialised_without_calls() -> None:
    bench = RecordedBench(KNOBS, TIMES, EAGER_US)
    asked = replace(request(chain_form(), (700,)), shapes=())
    outcome = Job(asked, bench, LIMITS, (), bench.clock, Candidate("c_generic", BEST)).run()
    assert [d.key for d in outcome.decisions] == [asked.key]
