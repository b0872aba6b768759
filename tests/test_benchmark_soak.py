"""What counts as growing in an hour's run, and what as slower. No process is run."""

from __future__ import annotations

import importlib
import math
import random
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("soak")


def series_of(soak, value):
    series = soak.Series()
    for number in range(720):
        series.add(number / 720, value(number / 720))
    return series


@pytest.mark.parametrize(
    ("value", "an_hour", "verdict"),
    [
        (lambda hour: 500.0 + 2 * math.sin(90 * hour), 0.0, "flat"),
        (lambda hour: 500.0 + 30 * hour + 5 * math.sin(90 * hour), 30.0, "grows"),
        (lambda hour: 500.0 + 3 * hour, 3.0, "flat"),  # less than 1 % an hour
        (lambda hour: 500.0 + 300 * min(hour, 0.3), 0.0, "flat"),  # while shapes are new
        (lambda hour: 500.0 - 30 * hour, -30.0, "flat"),
        (lambda hour: 500.0 + 50 * math.sin(90 * hour), 0.0, "open"),
    ],
)
def test_slopes(soak, value, an_hour, verdict):
    found = soak.with_interval(series_of(soak, value), random.Random(1))
    assert found["an_hour"] == pytest.approx(an_hour, abs=3.0)
    assert found["low"] <= found["an_hour"] <= found["high"] and found["verdict"] == verdict


def test_the_last_third_tells_what_has_stopped_growing(soak):
    series = series_of(soak, lambda hour: 500.0 + 60 * min(hour, 0.6))
    assert soak.with_interval(series, random.Random(1))["verdict"] == "grows"
    late = soak.with_interval(series, random.Random(1), after=2 / 3)
    assert late["an_hour"] == pytest.approx(0.0, abs=1e-6) and late["verdict"] == "flat"


def test_a_run_too_short_for_an_interval_says_nothing(soak):
    series = soak.Series([0.0, 0.001], [1.0, 9.0])
    found = soak.with_interval(series, random.Random(1))
    assert found["low"] is None and found["verdict"] == "open"


def test_steps_that_get_slower(soak):
    draw = random.Random(2)
    printed = [
        {"at": at, "probes": [draw.gauss(1.2 if at > 60 else 1.0, 0.02) for _ in range(5)]} for at in range(0, 90, 2)
    ]
    found = soak.pace(printed, 90.0, draw)
    assert found["low"] > 1.15 and found["high"] < 1.25
    assert soak.pace(printed[:3], 90.0, draw) is None
