"""Fleet workers as actors of a Ray cluster, each with a daemon of its own.

In: a cluster's address, what an actor asks for. Out: a `Cluster` of workers. Guarantee: Ray places the actors on hosts
with room, and starts those anew elsewhere whose host has died; a daemon ends with its actor, and its store, which holds
nothing that the server has not, goes with it.

Autofuse with the extra `fleet` must be installed on the cluster's hosts. The server's URL goes to the actors as an
argument, which Ray keeps in its memory: a password belongs into ``~/.pgpass`` there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autofuse.errors import UsageError
from autofuse.integrations.fleet_workers import WorkerState

STATE_SECONDS = 5.0  # after which an actor that does not answer counts as one that waits for room
STOP_SECONDS = 20.0  # in which a daemon gives its request back
_FOLDER = "autofuse-fleet-"  # in the name of a worker's folder; the number of its process follows
# Linux ends the daemon with its actor, however that ends.
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


@dataclass(frozen=True)
class Place:
    """What a worker asks Ray for."""

    cores: int = 0  # 0: all that the smallest host has
    accelerator_type: str = ""  # as Ray names it, such as "H100"; then it has one GPU


class HostedDaemon:
    """A daemon beside its actor. Ray makes it on the host that it has chosen."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self._options = list(options)
        self._environment = dict(environment)
        _remove_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        self._daemon = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        store = str(self._folder / "store.sqlite3")
        serve = ["-m", "autofuse", "daemon", "serve", "--fleet-worker", "--store", store, *self._options]
        with (self._folder / "said").open("wb") as said:
            return subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *serve],
                env={**os.environ, **self._environment}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip

    def state(self) -> tuple[str, str]:
        """The host's name and number in the cluster; what the daemon said last where it has ended, and begins anew."""
        import ray

        node = f"{os.uname().nodename} ({ray.get_runtime_context().get_node_id()[:8]})"
        code = self._daemon.poll()
        if code is None:
            return node, ""
        lines = (self._folder / "said").read_text(errors="replace").strip().splitlines()
        self._daemon = self._begin()
        return node, f"{lines[-1][:300] if lines else 'it said nothing'} (exit code {code})"

    def stop(self) -> None:
        """End the daemon, which gives its request back."""
        self._daemon.send_signal(signal.SIGTERM)
        try:
            self._daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the folders of actors that were killed with their host."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not psutil.pid_exists(int(pid)) and folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder)


class RayCluster:
    """A Ray cluster with workers."""

    def __init__(self, address: str, place: Place, options: Sequence[str], environment: Mapping[str, str]) -> None:
        """``options``: of ``autofuse daemon serve``. Raises UsageError where Ray is missing or does not answer."""
        try:
            import ray
        except ImportError:
            raise UsageError(
                "expected Ray, found none; type: pip install 'autofuse[ray]', or place workers by another scheduler: "
                "docs/guides/fleet.md"
            ) from None
        self._ray: Any = ray
        try:
            ray.init(address=address, namespace="autofuse", log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            said = str(error).strip().splitlines()
            raise UsageError(
                f"expected a Ray cluster at {address}, found {type(error).__name__}: {said[0] if said else ''}; "
                "type: ray status"
            ) from None
        self._actor = ray.remote(**self._asked(place))(HostedDaemon)
        self._arguments = (list(options), dict(environment))
        self._actors: list[Any] = []

    def _asked(self, place: Place) -> dict[str, Any]:
        """The options of an actor."""
        cores = place.cores or self._smallest()
        asked: dict[str, Any] = {"num_cpus": cores, "max_restarts": -1, "max_task_retries": -1}
        asked["scheduling_strategy"] = "SPREAD"  # two on a host would disturb each other's times
        if place.accelerator_type:
            asked |= {"num_gpus": 1, "accelerator_type": place.accelerator_type}
        return asked

    def _smallest(self) -> int:
        counts = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        return min((count for count in counts if count), default=1)

    def start(self) -> None:
        self._actors.append(self._actor.remote(*self._arguments))

    def stop(self) -> None:
        actor = self._actors.pop()
        asked = actor.stop.remote()
        self._ray.wait([asked], timeout=STOP_SECONDS + STATE_SECONDS)
        self._ray.kill(actor)

    def states(self) -> list[WorkerState]:
        asked = [actor.state.remote() for actor in self._actors]
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=STATE_SECONDS) if asked else ([], [])
        return [self._state(answer) if answer in ready else WorkerState("") for answer in asked]

    def _state(self, answer: Any) -> WorkerState:
        try:
            return WorkerState(*self._ray.get(answer))
        except Exception as error:  # its host has died; Ray starts it elsewhere
            return WorkerState("", "" if "Unavailable" in type(error).__name__ else str(error).splitlines()[0][:300])

    def close(self) -> None:
        self._ray.shutdown()
