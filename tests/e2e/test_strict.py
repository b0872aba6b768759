"""A strict run of a real script prints eager's losses to the bit, whatever its store knows from usual runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofuse.db.store import Store
from autofuse.ir.strict import is_strict
from tests import forked
from tests.e2e.commands import report, stop_daemon

SCRIPT = Path(__file__).with_name("strict_net.py")
STEPS = "50"
QUICK = ("--set", "tuner.trials=2", "--set", "tuner.rounds=5", "--set", "tuner.idle_exit_seconds=20")


def losses(*command: object, **environment: str) -> list[str]:
    found = forked.run(*command, environment={**os.environ, **environment}, timeout=400)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def autofuse(store: Path, *options: str, **environment: str) -> list[str]:
    start = ("-m", "autofuse", "run", "--store", store, "--tune", "wait")
    return losses(*start, *QUICK, *options, SCRIPT, STEPS, **environment)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    return losses(SCRIPT, STEPS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("strict") / "store.sqlite3"
    yield path
    stop_daemon(path)


def test_a_usual_run_differs_and_a_strict_run_on_its_store_does_not(store: Path, expected: list[str]) -> None:
    usual = autofuse(store)
    found = report(store)
    assert found["strict"] is None and len(usual) == len(expected) == int(STEPS)
    norms = [row for row in found["nodes"] if "layer_norm" in row["operations"] and row["decision"] == "fused"]
    if any(row["calls"] for row in norms):  # on a machine that is busy otherwise nothing may win
        assert usual != expected
    assert autofuse(store, "--strict") == expected
    found = report(store)
    assert found["strict"]["refused_nodes"] >= 0 and is_strict(found["run"]["versions"])
    assert autofuse(store, AUTOFUSE_STRICT="1") == expected, "the second run starts with what the first has found"
    with Store.open(store, readonly=True) as opened:
        made = [d for _, d in opened.results.decisions()]
    strict, others = ([d for d in made if d.key.is_strict is which] for which in (True, False))
    assert strict and others
    assert all(d.compile_key is None or d.reason == "won" for d in strict)
