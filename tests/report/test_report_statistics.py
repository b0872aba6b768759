"""What the steps of a run say about fusion; the expected numbers are computed by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.ir.records import StepSample
from autofuse.report.statistics import MIN_PAIRS_FOR_INTERVAL, Speedup, measure_gain, pair_ratios, summarise


def routed(index: int, step_us: float, signature: str = "a", fused_nodes: int = 3, root: str = "M") -> StepSample:
    return StepSample(root, signature, False, fused_nodes, index, step_us)


def held(index: int, step_us: float, signature: str = "a", root: str = "M") -> StepSample:
    return StepSample(root, signature, True, 0, index, step_us)


def test_a_pair_is_a_held_out_step_over_the_median_of_its_nearest_routed_steps() -> None:
    steps = [routed(i, us) for i, us in enumerate([900, 100, 110, 120, 130, 140, 150, 900])]
    # At 4.5 the six nearest are 1..6 (and 2..7 lie as near as 1..6 at one end: the earlier ones win):
    # distances 4.5 3.5 2.5 1.5 0.5 0.5 1.5 2.5 -> 4, 5, 3, 6, 2, 7: median of 110 120 130 140 150 900 is 135.
    assert pair_ratios(steps, [replace(held(0, 270.0), index=4.5)]) == [2.0]  # type: ignore[arg-type]
    assert pair_ratios(steps[1:3], [held(0, 210.0)]) == [2.0]
    assert pair_ratios(steps[1:2], [held(65, 200.0)]) == [2.0]
    assert pair_ratios(steps[1:2], [held(66, 200.0)]) == []
    assert pair_ratios([], [held(0, 100.0)]) == []


def test_warm_up_disturbed_and_unfused_steps_count_for_nothing() -> None:
    samples = [
        routed(1, 0.0),  # disturbed by capture
        routed(2, 9e9),  # warm-up
        routed(3, 100.0),
        held(4, 9e9),  # warm-up
        routed(5, 100.0, fused_nodes=0),  # captured, nothing fused yet
        routed(5, 1.0, fused_nodes=0),
        held(6, 150.0),
        held(7, -1.0),
        routed(8, 100.0),
        routed(9, float("nan")),
    ]
    gain = measure_gain(samples, cost_seconds=0.0)
    assert gain.speedup == Speedup(1.5, None, None, 1)
    assert (gain.routed_steps, gain.held_out_steps) == (2, 1)
    assert gain.seconds_saved == pytest.approx(2 * 100 * 0.5 / 1e6)
    assert gain.break_even_step == 3


def test_savings_and_break_even() -> None:
    samples = [routed(0, 1e5), held(1, 1e5)]
    samples += [routed(i, 1e5) for i in range(2, 12)]
    samples += [held(12, 1.4e5)]
    # ten routed steps of 0.1 s, each saving 0.04 s
    assert measure_gain(samples, 0.2).seconds_saved == pytest.approx(0.4)
    assert measure_gain(samples, 0.19).break_even_step == 6  # the fifth, 2 3 4 5 6
    assert measure_gain(samples, 0.0).break_even_step == 2
    assert measure_gain(samples, 0.5).break_even_step is None
    slower = [replace(step, step_us=0.8e5) if step.held_out else step for step in samples]
    assert measure_gain(slower, 0.0).seconds_saved == pytest.approx(-0.2)
    assert measure_gain(slower, 0.0).break_even_step is None


def test_a_pause_between_two_calls_saves_next_to_nothing_and_makes_no_shape_hot() -> None:
    samples = [routed(0, 1e5), held(1, 1e5), *(routed(i, 1e5) for i in range(2, 42)), held(42, 1.4e5)]
    samples += [routed(0, 1e4, "b"), routed(1, 1e4, "b"), held(2, 2e4, "b")]
    saved = measure_gain(samples, 0.0).seconds_saved
    assert saved == pytest.approx(40 * 0.04 + 0.01)
    hours = [replace(step, step_us=1e10) if step.signature == "b" and step.index == 1 else step for step in samples]
    hours += [routed(i, 1e4, "b") for i in (3, 4)]
    gain = measure_gain(hours, 0.0)
    assert gain.seconds_saved == pytest.approx(40 * 0.04 + 12 * 0.01)
    assert {row.signature: row.hot for row in gain.rows} == {"a": True, "b": False}


def test_only_hot_signatures_make_the_speedup() -> None:
    def series(signature: str, step_us: float, ratio: float) -> list[StepSample]:
        return [routed(0, step_us, signature), routed(2, step_us, signature), held(3, step_us * ratio, signature)]

    # shares of routed time: 70 %, 20 %, 10 %; 80 % is reached with the second
    cold, hot, warm = series("cold", 10, 9.0), series("hot", 70, 1.2), series("warm", 20, 1.4)
    gain = measure_gain([held(0, 1.0, "first"), *cold, *hot, *warm], 0.0)
    assert [(row.signature, row.hot, round(row.time_share, 3)) for row in gain.rows] == [
        ("hot", True, 0.7), ("warm", True, 0.2), ("cold", False, 0.1),
    ]  # fmt: skip
    assert gain.speedup.median == pytest.approx(1.3)
    assert gain.rows[2].speedup.median == pytest.approx(9.0)


def test_a_script_with_many_lengths_is_measurable() -> None:
    """400 steps of 12 lengths in a random order, 1.5 % held out: few held-out steps, hardly two of a length."""
    order = random.Random(1)
    samples = []
    for i in range(400):
        size = 16 * order.randint(4, 15)
        held_out = i % 67 == 30
        step = held(i, 1.3 * size, str(size)) if held_out else routed(i, 1.0 * size, str(size))
        samples.append(step)
    gain = measure_gain(samples, 0.0)
    assert gain.held_out_steps == 5
    assert gain.speedup.median == pytest.approx(1.3)
    assert 3 <= gain.speedup.pairs <= 5


def test_roots_and_signatures_are_never_compared_with_each_other() -> None:
    samples = [routed(i, 100.0) for i in range(5)]
    samples += [held(i, 300.0, "b") for i in range(5)] + [held(i, 300.0, root="Other") for i in range(5)]
    gain = measure_gain(samples, 0.0)
    assert gain.speedup == Speedup() and gain.seconds_saved is None and gain.break_even_step is None


def test_an_empty_run() -> None:
    gain = measure_gain([], 5.0)
    assert gain.rows == () and gain.speedup == Speedup() and gain.seconds_saved is None


@given(
    st.lists(st.floats(0.5, 2.0), min_size=20, max_size=120),
    st.floats(1e-3, 1e6),
    st.floats(0.5, 3.0),
)
@settings(max_examples=40, deadline=None)
def test_the_unit_of_time_does_not_matter_and_equal_steps_make_no_gain(
    noise: list[float], unit: float, ratio: float
) -> None:
    def run(base: float, factor: float) -> list[StepSample]:
        return [held(i, base * factor) if i % 5 == 4 else routed(i, base) for i, _ in enumerate(noise)]

    assert measure_gain(run(unit, ratio), 0.0).speedup.median == pytest.approx(ratio)
    noisy = [replace(step, step_us=step.step_us * n) for step, n in zip(run(1.0, ratio), noise, strict=True)]
    scaled = [replace(step, step_us=step.step_us * unit) for step in noisy]
    first, second = measure_gain(noisy, 0.0).speedup, measure_gain(scaled, 0.0).speedup
    assert first.pairs == second.pairs
    assert first.median == pytest.approx(second.median)


@given(st.floats(1.0001, 1.02), st.floats(0.7, 1.6))
@settings(max_examples=30, deadline=None)
def test_a_drifting_machine_makes_no_gain(drift: float, ratio: float) -> None:
    """Steps grow by up to 2 % a step; pairs see neighbours on both sides, so that the ratio stays."""
    samples = []
    for i in range(200):
        base = 100.0 * drift**i
        samples.append(held(i, base * ratio) if i % 10 == 5 else routed(i, base))
    assert measure_gain(samples, 0.0).speedup.median == pytest.approx(ratio, rel=0.002)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60))
@settings(max_examples=40, deadline=None)
def test_the_interval_holds_the_median_and_is_the_same_each_time(ratios: list[float]) -> None:
    found = summarise(ratios)
    assert found == summarise(list(reversed(ratios)))
    assert found.median is not None and found.pairs == len(ratios)
    if len(ratios) < MIN_PAIRS_FOR_INTERVAL:
        assert found.low is None and found.high is None
    else:
        assert found.low is not None and found.high is not None
        assert min(ratios) <= found.low <= found.median <= found.high <= max(ratios)


def test_what_counts_as_a_gain() -> None:
    assert Speedup(1.3, 1.1, 1.5, 9).is_gain and Speedup(1.3, None, None, 2).is_gain
    assert not Speedup(1.3, 0.99, 1.5, 9).is_gain and not Speedup(0.9, 0.8, 0.95, 9).is_gain
    assert not Speedup().is_gain
