"""The sampler on a clock of the test's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.errors import SettingsError
from autofuse.observer.config import ObserverConfig
from autofuse.observer.sampler import Sampler


class Run:
    """A script that calls one root again and again, with a given cost of a sampled step."""

    def __init__(self, config: ObserverConfig) -> None:
        self.now = 0.0
        self.sampler = Sampler(config, clock=lambda: self.now)
        self.sampled: list[int] = []

    def steps(
        self, count: int, step_seconds: float, cost_seconds: float, learnt: bool = False, root: str = "r"
    ) -> None:
        for step in range(count):
            if self.sampler.wants(root):
                self.sampled.append(step)
                self.now += cost_seconds
                self.sampler.spend(cost_seconds)
                self.sampler.finish_step(root, cost_seconds, learnt)
            self.now += step_seconds

    @property
    def percent(self) -> float:
        return 100.0 * self.sampler.cost_seconds / self.sampler.run_seconds


def test_first_steps_then_every_nth() -> None:
    run = Run(ObserverConfig(first_steps=3, skip_steps=1, sample_every=10))
    run.steps(40, 1.0, 0.001, learnt=True)
    assert run.sampled == [1, 2, 3, 13, 23, 33]


def test_nothing_new_doubles_the_interval() -> None:
    run = Run(ObserverConfig(first_steps=1, skip_steps=0, sample_every=10, settled_after=2))
    run.steps(200, 1.0, 0.001)
    gaps = [b - a for a, b in pairwise(run.sampled)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 40


@given(st.floats(1e-3, 1.0), st.floats(1e-4, 0.5), st.floats(0.1, 5.0), st.integers(1, 50), st.booleans())
def test_cost_stays_within_the_budget(step: float, cost: float, percent: float, every: int, learnt: bool) -> None:
    config = ObserverConfig(max_overhead_percent=percent, sample_every=every, burst_seconds=0.05)
    run = Run(config)
    run.steps(3000, step, cost, learnt)
    allowed = percent / 100.0 * run.sampler.run_seconds + config.burst_seconds
    # The very first sample is taken without knowing its cost.
    assert run.sampler.cost_seconds <= max(allowed, cost) + 1e-9


def test_a_costly_root_is_still_sampled_now_and_then() -> None:
    run = Run(ObserverConfig(max_overhead_percent=1.0, sample_every=2))
    run.steps(5000, 0.1, 0.03, learnt=True)
    assert run.sampler.throttled > 0
    assert 0.5 < run.percent <= 1.1


def test_decided_roots_cost_nothing() -> None:
    run = Run(ObserverConfig(skip_steps=0))
    run.steps(5, 1.0, 0.001)
    assert not run.sampler.is_idle
    run.sampler.decide("r")
    assert run.sampler.is_idle
    run.sampled.clear()
    run.steps(500, 1.0, 0.001)
    assert run.sampled == []
    run.steps(10, 1.0, 0.001, root="new")
    assert run.sampled
    run.sampled.clear()
    run.sampler.reopen("r")
    run.steps(3, 1.0, 0.001)
    assert run.sampled


def test_credited_roots_are_not_sampled_again_at_once() -> None:
    sampler = Sampler(ObserverConfig(skip_steps=0, first_steps=1, sample_every=50), clock=lambda: 0.0)
    assert sampler.wants("model")
    sampler.count("loss")
    sampler.finish_step("model", 0.0, False)
    sampler.credit("loss", False)
    assert not any(sampler.wants("loss") for _ in range(40))


def test_disabled_never_samples() -> None:
    run = Run(ObserverConfig(enabled=False))
    run.steps(100, 1.0, 0.001)
    assert run.sampled == []
    run = Run(ObserverConfig(max_overhead_percent=0.0))
    run.steps(100, 1.0, 0.001)
    assert run.sampled == []


def test_roots_are_bounded() -> None:
    sampler = Sampler(ObserverConfig(max_owners=10))
    roots = [f"root{number}" for number in range(100)]
    for root in roots:
        sampler.wants(root)
    assert sum(sampler.count(root) is not None for root in roots) == 10
    assert sampler.knows("root99")


@pytest.mark.parametrize(
    "values", [{"sample_every": 0}, {"max_shapes": 0}, {"max_overhead_percent": -1.0}, {"max_overhead_percent": 101.0}]
)
def test_bad_config(values: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=next(iter(values))):
        ObserverConfig(**values)  # type: ignore[arg-type]
