"""An order by a model of time: it saves trials where it is right, costs few where it is wrong, and decides nothing.

The landscapes are of compiled kernels (`benchmarks/ranking_landscapes.py`); their microseconds are no GPU's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from autofuse.codegen.knobs import Knob, Rank
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.templates import LOOP, MATMUL
from autofuse.codegen.triton.ranking import Ranking, rates_of
from autofuse.ir.records import Config, make_config
from autofuse.tuner.backends import InterpreterBackend, TritonBackend, multiprocessors_of
from autofuse.tuner.outcome import JobLimits
from autofuse.tuner.search import LEADS, MOST_RANKED, ConfigSearch
from autofuse.tuner.tune_node import Job
from tests.cases import CASES
from tests.tuner.nodes import chain_form, request
from tests.tuner.replay import LARGE, RecordedBench, bowl, trials_until_near, whole_space

H100 = "cuda:NVIDIA H100:132:sm_90:80GiB"
LANDSCAPES = json.loads(Path(__file__).with_name("landscapes.json").read_text())
SEEDS = range(20)
BUDGET = 24  # `tuner.trials`


def space_of(row: Mapping[str, Any]) -> tuple[tuple[Knob, ...], dict[Config, float | None]]:
    knobs = tuple(Knob(name, tuple(choices), row["defaults"][name], "") for name, choices in row["knobs"].items())
    return knobs, dict(zip(whole_space(knobs), row["us"], strict=True))


def model_of(row: Mapping[str, Any]) -> Ranking:
    form, rates = CASES[row["case"]].form(), rates_of("cuda:90", 132)
    assert rates is not None
    return Ranking(lower(form), dict(zip(form.symbols, row["sizes"], strict=True)), rates)


def reversed_(rank: Rank) -> Rank:
    return lambda config: 1.0 / rank(config)


def at_random(configs: list[Config], seed: int) -> Rank:
    chance = random.Random(seed)
    return {config: chance.random() for config in configs}.__getitem__


def finished(search: ConfigSearch, times: Mapping[Config, float | None]) -> list[Config]:
    """The configurations of a search on exact times, in the order in which they were asked for."""
    asked: list[Config] = []
    while configs := search.ask(4):
        asked += configs
        for config in configs:
            search.tell(config, times[config])
    return asked


# ---- what it saves, and what it costs -----------------------------------------------------------------------


@pytest.mark.parametrize("row", LANDSCAPES, ids=lambda row: f"{row['case']} {row['sizes']}")
def test_the_model_needs_fewer_trials_than_the_search_alone(row: Mapping[str, Any]) -> None:
    knobs, times = space_of(row)
    model = model_of(row)
    alone, ranked, wrong = (
        [trials_until_near(knobs, times, rank, BUDGET, seed) for seed in SEEDS]
        for rank in (None, model, reversed_(model))
    )
    assert sum(ranked) < sum(alone) and median(ranked) < median(alone) and max(ranked) <= max(alone)
    assert median(wrong) <= median(alone) + 4 and max(wrong) <= BUDGET + 1


@pytest.mark.parametrize("turn", [lambda rank: rank, reversed_])
def test_a_wrong_order_of_a_bowl_costs_few_trials(turn: Any) -> None:
    """Orders at random, and the worst that there is: that of the times, turned round."""
    alone, wrong = [], []
    for seed in range(10):
        times: dict[Config, float | None] = dict(bowl(seed))
        truth = at_random(list(times), seed) if turn is not reversed_ else bowl(seed).__getitem__
        for sampler in range(2):
            alone.append(trials_until_near(LARGE, times, None, 100, sampler))
            wrong.append(trials_until_near(LARGE, times, turn(truth), 100, sampler))
    assert median(wrong) <= median(alone) + 6


# ---- what it may not do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_no_order_keeps_a_small_search_from_the_best_of_its_neighbours(seed: int) -> None:
    """Whatever the rank, the search ends where no single step is better, as it does without one."""
    row = LANDSCAPES[seed % len(LANDSCAPES)]
    knobs, times = space_of(row)
    for rank in (None, at_random(list(times), seed), reversed_(model_of(row)), lambda config: float("inf")):
        search = ConfigSearch(knobs, [], len(times), rank=rank)
        asked = finished(search, times)
        assert search.is_over and len(set(asked)) == len(asked)
        assert set(search._steps_from([search._base])) == set()
        best = search.best()
        assert best is not None and best[1] == min(us for c in asked if (us := times[c]) is not None)


def test_seeds_come_before_the_best_ranked_and_those_are_more_than_a_step_apart() -> None:
    times = bowl(0)
    neighbour = make_config({f"k{i}": 2 for i in range(5)})
    asked = ConfigSearch(LARGE, [neighbour], 100, rank=times.__getitem__).ask(4)
    leads = asked[1 : 1 + LEADS]
    assert asked[0] == neighbour and leads[0] == min(times, key=times.__getitem__)
    assert all(sum(a != b for a, b in zip(leads[0], lead, strict=True)) > 1 for lead in leads[1:])


def test_of_equal_ranks_the_nearest_to_the_default_is_tried() -> None:
    _, lead, *_ = ConfigSearch(LARGE, [], 100, rank=lambda config: -float(dict(config)["k3"])).ask(2)
    assert dict(lead) == {"k0": 1, "k1": 1, "k2": 1, "k3": 8, "k4": 1}


def test_an_order_that_measurements_contradict_is_left() -> None:
    """Steps are then in the order of the knobs again."""
    times = bowl(0)
    for rank, in_order in ((times.__getitem__, False), (reversed_(times.__getitem__), True)):
        search = ConfigSearch(LARGE, [], 100, rank=rank)
        for config in search.ask(4):
            search.tell(config, times[config])
        steps = search._steps()
        assert (steps == search._steps_from([search._base])) is in_order
        assert in_order or steps == sorted(steps, key=rank)


def test_of_a_space_that_is_too_large_to_rank_a_part_is_ranked() -> None:
    ranked: list[Config] = []
    knobs = tuple(Knob(f"k{i}", (1, 2, 4, 8), 1, "") for i in range(9))

    def rank(config: Config) -> float:
        ranked.append(config)
        return float(sum(value for _, value in config if isinstance(value, int)))

    found = [ConfigSearch(knobs, [], 24, rank=rank).ask(3) for _ in range(2)]
    assert found[0] == found[1] and len(ranked) <= 2 * MOST_RANKED


@pytest.mark.parametrize("seed", range(3))
def test_jobs_decide_within_5_percent_of_the_oracle_by_any_order(seed: int) -> None:
    times = bowl(seed)
    for rank in (times.__getitem__, reversed_(times.__getitem__), at_random(list(times), seed)):
        bench = RecordedBench(LARGE, times, 1800.0, noise=0.03, seed=seed, rank=rank)
        limits = JobLimits(trials=100, rounds=15, margin=0.03, job_seconds=1e9)
        decision = Job(request(chain_form(), (700,)), bench, limits, (), bench.clock).run().decisions[0]
        assert decision.reason == "won"
        assert bench.true_speedup(decision.candidate.config) >= bench.oracle * 0.95


# ---- where there is one ----------------------------------------------------------------------------------------


def test_only_loops_on_known_gpus_have_a_model() -> None:
    form = CASES["softmax"].form()
    values = dict.fromkeys(form.symbols, 64)
    backend = TritonBackend(H100, lambda *_: pytest.fail("something was compiled"))
    config = make_config({knob.name: knob.default for knob in backend.knobs(form, LOOP, values, values)})
    rank = backend.rank(form, LOOP, values)
    assert rank is not None and rank(config) > 0
    assert backend.rank(form, MATMUL, values) is None
    assert InterpreterBackend().rank(form, LOOP, values) is None
    unknown = TritonBackend("cuda:Tesla T4:40:sm_75:15GiB", lambda *_: pytest.fail("something was compiled"))
    assert unknown.rank(form, LOOP, values) is None


@pytest.mark.parametrize(
    ("key", "count"),
    [
        (H100, 132),
        ("cuda:AMD Instinct MI300X:304:gfx942:192GiB", 304),
        ("cuda:odd: name:7:sm_90:1GiB", 7),
        ("cuda:gfx90a", 0),
    ],
)
def test_a_key_tells_how_many_multiprocessors_there_are(key: str, count: int) -> None:
    assert multiprocessors_of(key) == count
