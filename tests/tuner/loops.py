"""Tuning loops for tests, and races and searches that a test changes or counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autofuse.daemon.loop import TuningLoop
from autofuse.settings.layers import load
from autofuse.tuner.benchmark_provider import NodeBenchmarks
from autofuse.tuner.search import ConfigSearch


@contextlib.contextmanager
def quick_loop(folder: Path, is_urgent: bool) -> Iterator[TuningLoop]:
    """A loop with a store in ``folder`` that tries few configurations."""
    cli = {"run.store": folder / "store.sqlite3", "run.profile": "quick", "tuner.trials": 4, "tuner.job_seconds": 60.0}
    cli["tuner.shared_folder"] = folder / "shared"
    made = TuningLoop(load(cli, environ={}, cwd=folder), is_urgent=lambda: is_urgent)
    yield made
    made.close()


def count_searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each search that is begun from now on."""
    found: list[int] = []
    begin = ConfigSearch.__init__

    def note(self: ConfigSearch, *arguments: object, **named: object) -> None:
        found.append(1)
        begin(self, *arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ConfigSearch, "__init__", note)
    return found


def slow_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on everything but eager loses its races by far."""
    _slow(monkeypatch, eager=1.0, candidates=99.0)


def fast_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on eager loses its races by far, however busy the machine."""
    _slow(monkeypatch, eager=99.0, candidates=1.0)


def _slow(monkeypatch: pytest.MonkeyPatch, eager: float, candidates: float) -> None:
    """Times of races are so many times those that were measured."""
    race = NodeBenchmarks.race

    def slowed(self: NodeBenchmarks, *arguments: object) -> object:
        result = race(self, *arguments)  # type: ignore[arg-type]
        first, *others = result.samples
        samples = [[eager * s for s in first], *([candidates * s for s in own] for own in others)]
        return replace(result, samples=samples)

    monkeypatch.setattr(NodeBenchmarks, "race", slowed)
