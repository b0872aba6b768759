"""The benchmark of a fleet runs as a whole, with a few hosts; what hosts ask for adds up. No time is looked at."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests import forked
from tests.postgres import need_postgres

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fleet_hosts")


def test_all_keys_are_asked_for_by_hosts_of_their_kind(hosts: ModuleType) -> None:
    demand = hosts.make_demand(50, 1000, random.Random(1))
    assert len(demand.savings) == 1000
    asked: dict[str, float] = {}
    for number, requests in enumerate(demand.of_host):
        device = hosts.DEVICES[hosts.kind_of(number)]
        assert bool(requests) == (number % len(hosts.KINDS) not in hosts.SPARE)
        assert all(request.key.device == device.key for request in requests)
        savings = [request.expected_saving_us for request in requests]
        assert savings == sorted(savings, reverse=True)
        for request in requests:
            asked[request.key.digest] = asked.get(request.key.digest, 0.0) + request.expected_saving_us
    assert asked == pytest.approx(demand.savings)
    ranked = sorted(demand.savings.values(), reverse=True)
    assert sum(ranked[:100]) > 0.5 * sum(ranked), "demand is skewed"


def test_a_quick_run(tmp_path: Path) -> None:
    need_postgres()
    out = tmp_path / "fleet.json"
    done = forked.run(ROOT / "benchmarks/fleet.py", "--quick", "--out", out, folder=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["cpu"] and found["server"]["server_version"]
    (fleet,), (crowd,) = found["fleets"], found["crowds"]
    assert fleet["hosts"] == 10 and fleet["keys"] == 100 and "seconds_to_95%" in fleet
    assert not fleet["errors"] and not fleet["requests_failed"] and fleet["hosts_lost"] == 1
    assert fleet["searches"] - fleet["searched_keys"] == fleet["duplicate_searches"]
    assert fleet["then"]["keys"] == fleet["keys_decided"] and fleet["statements"] and fleet["sizes"]
    assert crowd["hosts"] == 10 and not crowd["errors"] and crowd["statements"]
