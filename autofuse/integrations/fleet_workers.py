"""As many fleet workers as a server's queue has work for, wherever a cluster's own scheduler places them.

In: the queue's length, a `Cluster` that starts and ends workers. Out: more workers while more waits, fewer when it has
been less for a while. Guarantee: a server that does not answer changes nothing; a worker that ends by itself is said
once, in its own words, and started again; where none of them stays, that is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autofuse.errors import AutofuseError, StoreError

MOST_FAILURES = 5  # looks in a row at which a worker had ended and none was at work
CALM_SECONDS = 60.0  # before a worker too many is ended: between two requests of a script the queue is empty


@dataclass(frozen=True)
class Scale:
    """How many workers there may be, and for how many requests one is started."""

    least: int = 0
    most: int = 4
    requests_each: int = 8

    def wanted(self, requests: int) -> int:
        """Workers for so many requests that wait or are in work."""
        return max(self.least, min(self.most, math.ceil(requests / self.requests_each)))


@dataclass(frozen=True)
class WorkerState:
    """Of one worker."""

    name: str  # where it runs, for people; "" while no host has room for it
    problem: str = ""  # why it has ended; "" while it is at work


class Cluster(Protocol):
    """What places workers."""

    def start(self) -> None:
        """One worker more, as soon as a host has room for it."""

    def stop(self) -> None:
        """One worker less, the last one that was started."""

    def states(self) -> Sequence[WorkerState]:
        """Of all workers. One that has ended is started again."""


class FleetWorkers:
    """Keeps a cluster's workers as many as wanted."""

    def __init__(
        self,
        requests: Callable[[], int],
        cluster: Cluster,
        scale: Scale,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """``requests()``: how many wait or are in work; raises StoreError where the server does not answer."""
        self._requests = requests
        self._cluster = cluster
        self._scale = scale
        self._say = say
        self._clock = clock
        self._calm_since: float | None = None
        self._failures = 0
        self._told = ""

    def look(self) -> None:
        """Look at queue and workers once. Raises AutofuseError where workers cannot stay."""
        states = self._cluster.states()
        self._judge(states)
        try:
            requests = self._requests()
        except StoreError as error:
            self._tell(f"{error} The workers stay as they are.")
            return
        wanted, now = self._scale.wanted(requests), self._clock()
        if wanted >= len(states):
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        for _ in range(wanted - len(states)):
            self._cluster.start()
        if self._calm_since is not None and now - self._calm_since >= CALM_SECONDS:
            for _ in range(len(states) - wanted):
                self._cluster.stop()
            self._calm_since = None
        at_work = sorted(state.name for state in states if state.name and not state.problem)
        places = f" on {', '.join(dict.fromkeys(at_work))}" if at_work else ""
        self._tell(f"{requests} requests, {wanted} workers wanted, {len(at_work)} at work{places}")

    def close(self) -> None:
        """End all workers."""
        for _ in self._cluster.states():
            self._cluster.stop()

    def _judge(self, states: Sequence[WorkerState]) -> None:
        problems = [state for state in states if state.problem]
        is_failing = bool(problems) and not any(state.name and not state.problem for state in states)
        self._failures = self._failures + 1 if is_failing else 0
        for state in problems:
            self._tell(f"the worker on {state.name} has ended: {state.problem}")
        if self._failures >= MOST_FAILURES:
            raise AutofuseError(
                f"expected workers that stay, found that they end at once: {problems[0].problem}; "
                "type on such a host: autofuse daemon serve --fleet-worker"
            )

    def _tell(self, line: str) -> None:
        if line != self._told:
            self._told = line
            self._say(line)
