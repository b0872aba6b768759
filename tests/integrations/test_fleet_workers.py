"""As many workers as the queue has work for; and on a real Ray cluster of two nodes, one of which is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.cli.app import parse
from autofuse.db.fleet_queue import FleetQueue
from autofuse.db.fleet_server import FleetServer
from autofuse.errors import AutofuseError, StoreError, UsageError
from autofuse.integrations.fleet_workers import CALM_SECONDS, MOST_FAILURES, FleetWorkers, Scale, WorkerState
from tests.db.store_records import request
from tests.postgres import need_postgres, running_postgres


class Hosts:
    """A cluster with so many rooms."""

    def __init__(self, rooms: int = 99, problem: str = "") -> None:
        self.rooms, self.problem, self.count = rooms, problem, 0

    def start(self) -> None:
        self.count += 1

    def stop(self) -> None:
        self.count -= 1

    def states(self) -> list[WorkerState]:
        return [
            WorkerState(f"host{n}" if n < self.rooms else "", self.problem if n < self.rooms else "")
            for n in range(self.count)
        ]


class Looks:
    """Looks at a queue whose length is set, by a clock that is turned."""

    def __init__(self, hosts: Hosts, **scale: int) -> None:
        self.requests: int | Exception = 0
        self.now = 0.0
        self.said: list[str] = []
        self.hosts = hosts
        self.workers = FleetWorkers(self._length, hosts, Scale(**scale), self.said.append, lambda: self.now)

    def _length(self) -> int:
        if isinstance(self.requests, Exception):
            raise self.requests
        return self.requests

    def look(self, requests: int | Exception, seconds: float = 5.0) -> int:
        self.now += seconds
        self.requests = requests
        self.workers.look()
        return self.hosts.count


def test_workers_grow_at_once_and_shrink_after_a_while() -> None:
    looks = Looks(Hosts(), least=1, most=4, requests_each=8)
    assert looks.look(0) == 1 and looks.look(9) == 2 and looks.look(1000) == 4
    assert looks.look(3) == 4, "the queue is often short for a moment"
    assert looks.look(1000, CALM_SECONDS) == 4 and looks.look(3) == 4, "it was full between"
    assert looks.look(3, CALM_SECONDS) == 1
    looks.workers.close()
    assert looks.hosts.count == 0
    assert looks.said[-1] == "3 requests, 1 workers wanted, 4 at work on host0, host1, host2, host3"


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), st.integers(0, 3), st.integers(1, 6), st.integers(1, 20))
def test_never_fewer_or_more_than_allowed(lengths: list[int], least: int, more: int, each: int) -> None:
    most = least + more
    looks = Looks(Hosts(), least=least, most=most, requests_each=each)
    for length in lengths:
        found = looks.look(length, 30.0)
        assert least <= found <= most and found * each >= min(length, most * each)
    assert looks.look(0, 0.0) >= least and (looks.look(0, CALM_SECONDS), looks.look(0, CALM_SECONDS))[-1] == least


def test_a_server_that_is_down_changes_nothing() -> None:
    looks = Looks(Hosts(rooms=1))
    assert looks.look(20) == 3
    for _ in range(3):
        assert looks.look(StoreError("The server does not answer."), CALM_SECONDS) == 3
    assert looks.said[1:] == ["The server does not answer. The workers stay as they are."]
    assert looks.look(20) == 3 and looks.said[-1] == "20 requests, 3 workers wanted, 1 at work on host0"


def test_workers_that_end_at_once_are_an_error() -> None:
    looks = Looks(Hosts(problem="expected a server, found none (exit code 1)"))
    looks.look(8)
    with pytest.raises(AutofuseError, match="found that they end at once: expected a server, found none"):
        for _ in range(MOST_FAILURES):
            looks.look(8)
    assert looks.said.count("the worker on host0 has ended: expected a server, found none (exit code 1)") >= 1


def test_bad_input(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(["fleet", "up", "--ray", "auto"]) == 2
    assert "expected a server in fleet.url" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    from autofuse.integrations.ray_cluster import Place, RayCluster

    with pytest.raises(UsageError, match=r"pip install 'autofuse\[ray\]'"):
        RayCluster("auto", Place(), [], {})


# ---- a real cluster -------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """Two nodes of one core each, beside a head without any."""
    pytest.importorskip("ray", reason="Ray is not installed; type: pip install 'autofuse[ray]'")
    need_postgres()
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # of actors and daemons
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [found.add_node(num_cpus=1), found.add_node(num_cpus=1)]
    found.wait_for_nodes()
    yield found, nodes
    found.shutdown()


def daemons() -> list[psutil.Process]:
    """Beside actors, whose stores lie in folders that are named so."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "--fleet-worker" in line and "-c" not in line and any("/autofuse-fleet-" in part for part in line):
            found.append(process)
    return found


def until(is_so: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"expected {what}"
        time.sleep(0.2)


def test_ray_places_workers_and_moves_them_from_a_host_that_dies(cluster: Any, tmp_path: Path) -> None:
    """One worker that stays, two for nine requests, which are for hosts of another kind."""
    ray, nodes = cluster
    with running_postgres() as server, (tmp_path / "said").open("wb") as said:
        url = server.url(server.new_database())
        command = [sys.executable, "-u", "-m", "autofuse", "fleet", "up", "--ray", ray.address, "--cores", "1"]
        environment = {**os.environ, "AUTOFUSE_FLEET_URL": url}
        up = subprocess.Popen([*command, "--least", "1", "--most", "3"], env=environment, stdout=said)
        try:
            until(lambda: len(daemons()) == 1, "one worker that stays")
            (first,) = daemons()
            with contextlib.closing(FleetServer(url)) as opened:
                FleetQueue(opened).add([request(f"{n}" * 64) for n in range(9)])
            until(lambda: len(daemons()) == 2, "another one")
            until(lambda: "9 requests, 2 workers wanted, 2 at work on " in (tmp_path / "said").read_text(), "its line")
            (second,) = (found for found in daemons() if found.pid != first.pid)
            host, other = sorted(nodes, key=lambda node: first.pid not in below(node))
            assert second.pid in below(other), "each on a host of its own"
            ray.remove_node(other, allow_graceful=False)
            until(lambda: not second.is_running(), "its daemon to end")
            ray.remove_node(host, allow_graceful=False)
            third = ray.add_node(num_cpus=1)
            until(lambda: not first.is_running() and bool(daemons()), "one elsewhere")
            assert {found.pid for found in daemons()} <= below(third)
            up.terminate()
            assert up.wait(120) == 0
            until(lambda: not daemons(), "no daemon is left")
        finally:
            up.kill()
    lines = (tmp_path / "said").read_text().splitlines()  # Ray says things of its own between
    assert lines[0].startswith("0 requests, 1 workers wanted, ") and "All workers have ended." in lines


def below(node: Any) -> set[int]:
    """Processes of a node of the cluster."""
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    return {child.pid for process in processes for child in psutil.Process(process.pid).children(recursive=True)}
