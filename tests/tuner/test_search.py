"""The search finds what is there to find, on recorded timings; no configuration twice, seeds first."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from autofuse.codegen.knobs import Knob
from autofuse.db.rows import StoredMeasurement
from autofuse.ir.records import Bucket, Candidate, Config, DecisionKey, Measurement, ObservedShape, make_config
from autofuse.tuner.outcome import WAVE, JobLimits
from autofuse.tuner.search import ConfigSearch
from autofuse.tuner.tune_node import Job
from autofuse.tuner.worker_process import CandidateProblem
from tests.tuner.nodes import chain_form, request
from tests.tuner.replay import LARGE, RecordedBench, bowl, recorded_times, whole_space

KNOBS = (Knob("a", (1, 2, 4, 8), 1, ""), Knob("b", ("x", "y"), "x", ""), Knob("c", (False, True), False, ""))


def cost_of(config: Config) -> float:
    values = dict(config)
    return abs(values["a"] - 4) + (values["b"] == "x") * 2.0 + values["c"] * 0.5 + 1.0  # type: ignore[operator]


def search_all(search: ConfigSearch, costs: dict[Config, float], wave: int = 4) -> ConfigSearch:
    """Run a search on recorded costs; configurations not recorded count as failed."""
    while configs := search.ask(wave):
        for config in configs:
            search.tell(config, costs.get(config))
    return search


def test_a_small_space_is_stepped_through_and_nothing_is_asked_twice() -> None:
    search = ConfigSearch(KNOBS, [], trials=100)
    asked = []
    while configs := search.ask(2):
        asked += configs
        for config in configs:
            search.tell(config, cost_of(config))
    assert len(set(asked)) == len(asked) < len(whole_space(KNOBS)) and search.is_over
    assert asked[:2] == [make_config({"a": 1, "b": "x", "c": False}), make_config({"a": 2, "b": "x", "c": False})]
    assert search.best() == (make_config({"a": 4, "b": "y", "c": False}), 1.0)


def test_noise_does_not_make_a_small_search_go_on() -> None:
    chance = random.Random(0)
    costs = {config: chance.uniform(1.0, 1.01) for config in whole_space(KNOBS)}
    assert search_all(ConfigSearch(KNOBS, [], 100), costs, 2).tried == 1 + 3


def test_a_single_knob_is_tried_in_full() -> None:
    knob = Knob("way", ("a", "b", "c", "d"), "c", "")
    costs = {make_config({"way": name}): 1.0 for name in knob.choices}
    assert search_all(ConfigSearch([knob], [], 4), costs, 2).tried == 4


def test_seeds_come_first_with_what_they_say_of_the_knobs_and_failures_are_survived() -> None:
    default = make_config({"a": 1, "b": "x", "c": True})
    other = make_config({"a": 3, "b": "y", "d": 7})  # of a space with another knob, and with other choices of this one
    search = ConfigSearch(KNOBS, [default, other, other], trials=4)
    assert search.ask(3)[:2] == [default, make_config({"a": 1, "b": "y", "c": True})]
    search.tell(default, None)
    while configs := search.ask(1):
        search.tell(configs[0], cost_of(configs[0]))
    assert search.tried >= 2 and search.best() is not None


def test_equal_answers_give_equal_searches() -> None:
    times = bowl(0)
    first, second = (search_all(ConfigSearch(LARGE, [], 64), times) for _ in range(2))
    assert first.best() == second.best() and first.tried == second.tried


def test_a_sampled_search_ends_when_it_gets_no_better() -> None:
    flat = dict.fromkeys(whole_space(LARGE), 5.0)
    assert search_all(ConfigSearch(LARGE, [], 500), flat).tried < 30


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_of_the_space_is_enough_to_come_within_5_percent_of_the_oracle(seed: int) -> None:
    times = bowl(seed)
    neighbour = make_config({f"k{i}": 2 for i in range(5)})
    best = search_all(ConfigSearch(LARGE, [neighbour], 100), times).best()
    assert best is not None and best[1] <= min(times.values()) * 1.05


# ---- whole jobs on recorded times -----------------------------------------------------------------------

LIMITS = JobLimits(trials=100, rounds=15, margin=0.03, job_seconds=1e9)


def replay(bench: RecordedBench, limits: JobLimits = LIMITS, seeds: tuple[Config, ...] = ()) -> tuple[float, str]:
    """The true speedup of what a job decides for, and its reason."""
    outcome = Job(request(chain_form(), (700,)), bench, limits, seeds, bench.clock).run()
    decision = outcome.decisions[0]
    chosen = decision.candidate.config
    return (bench.true_speedup(chosen) if decision.reason == "won" else 1.0), decision.reason


@pytest.mark.parametrize("seed", range(5))
def test_jobs_decide_within_5_percent_of_the_oracle_in_spite_of_noise(seed: int) -> None:
    bench = RecordedBench(LARGE, bowl(seed), 1800.0, noise=0.03, seed=seed)
    speedup, reason = replay(bench)
    assert reason == "won" and speedup >= bench.oracle * 0.95


def test_a_neighbours_winner_saves_trials() -> None:
    times = bowl(1)
    best = min(times, key=times.__getitem__)
    few = JobLimits(trials=2, rounds=9, margin=0.03, job_seconds=1e9)
    speedup, _ = replay(RecordedBench(LARGE, times, 1800.0), few, (best,))
    assert speedup == pytest.approx(1800.0 / times[best])


def test_jobs_keep_eager_where_it_is_fastest() -> None:
    times = dict.fromkeys(whole_space(KNOBS), 120.0)
    assert replay(RecordedBench(KNOBS, times, 100.0)) == (1.0, "no_gain")
    assert replay(RecordedBench(KNOBS, dict.fromkeys(times, 100.0), 100.0))[1] == "below_margin"


def test_wrong_ones_do_not_win_and_the_next_best_does() -> None:
    times = {config: 50.0 + 10.0 * cost_of(config) for config in whole_space(KNOBS)}
    ranked = sorted(times, key=times.__getitem__)
    problems = {config: CandidateProblem("wrong", "off by one") for config in ranked[:3]}
    bench = RecordedBench(KNOBS, times, 200.0, noise=0.001, problems=problems)
    assert replay(bench)[0] == pytest.approx(200.0 / times[ranked[3]])
    everything = dict.fromkeys(times, CandidateProblem("wrong", "off by one"))
    assert replay(RecordedBench(KNOBS, times, 200.0, problems=everything)) == (1.0, "all_wrong")


@pytest.mark.parametrize(
    ("status", "reason"),
    [("crash", "crashed"), ("timeout", "timeout"), ("out_of_memory", "out_of_memory"), ("refused", "refused")],
)
def test_reasons_of_failure(status: str, reason: str) -> None:
    times = dict.fromkeys(whole_space(KNOBS), 50.0)
    problems = dict.fromkeys(times, CandidateProblem(status, "no"))  # type: ignore[arg-type]
    assert replay(RecordedBench(KNOBS, times, 100.0, problems=problems)) == (1.0, reason)
    assert replay(RecordedBench(KNOBS, {}, 100.0)) == (1.0, "compile_failed")


def test_more_is_tried_where_it_can_pay() -> None:
    """Kernels of 5 us are decided after the first wave, of 5 ms they are searched through."""
    tried = []
    for scale in (0.005, 5.0):
        bench = RecordedBench(LARGE, {config: us * scale for config, us in bowl(3).items()}, 1800.0 * scale)
        replay(bench, JobLimits(trials=24, rounds=9, margin=0.03, job_seconds=1e9))
        tried.append(len(bench.built))
    assert tried[0] == WAVE and tried[1] == 24


def test_a_wave_is_tried_in_full() -> None:
    """What is built already is raced even where another wave would not pay: so are the ways of a group."""
    bench = RecordedBench(LARGE, {config: us * 0.005 for config, us in bowl(3).items()}, 9.0)
    replay(bench, JobLimits(trials=7, rounds=9, margin=0.03, job_seconds=1e9, wave=7))
    assert len(bench.built) == 7


def test_a_jobs_time_is_bounded() -> None:
    times = bowl(2)
    bench = RecordedBench(LARGE, times, 1800.0)
    limits = JobLimits(trials=1000, rounds=9, margin=0.03, job_seconds=2.0)
    replay(bench, limits)
    assert bench.clock() < 4.0 and len(bench.built) < 30


def test_stored_measurements_can_be_replayed(tmp_path: Path) -> None:
    bucket = Bucket(((513, 1024),))
    key = DecisionKey("f" * 64, bucket.label, "cpu", 2, "x")
    rows = [
        StoredMeasurement(key, Measurement(Candidate("c_generic", config), "ok", (700,), 5e3, 1e4, speedup), 0.0)
        for config, speedup in zip(whole_space(KNOBS), itertools.count(1.0, 0.1), strict=False)
    ]
    times, eager_us = recorded_times(rows, bucket)
    bench = RecordedBench(KNOBS, times, eager_us)
    assert eager_us == 1e4 and bench.oracle == pytest.approx(1.0 + 0.1 * 15)
    assert replay(bench)[0] >= 0.95 * bench.oracle
    assert recorded_times(rows, Bucket(((1, 1),))) == ({}, 0.0)


def test_shapes_outside_of_the_bucket_are_not_timed() -> None:
    """A request may carry the shapes of merged runs."""
    asked = request(chain_form(), (700,))
    odd = (ObservedShape((4,), 10**6), *asked.shapes)
    job = Job(type(asked)(**{**asked.__dict__, "shapes": odd}), RecordedBench(KNOBS, {}, 1.0), LIMITS)
    assert job.timed_values() == (700,)
