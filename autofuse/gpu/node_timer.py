"""The time of one node on a GPU, call after call.

In: begin and end of the node's launches, from the timed call of a graph. Out: seconds of earlier calls, once the device
has finished them. Never synchronises; calls that cannot be timed are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autofuse.observer.device_timer import EventTimer, Stretch

MOST_WAITING = 64  # stretches of a node that the device has not finished; older ones are given up


class NodeTimer:
    """Of one node in one plan, hence of one device."""

    def __init__(self, events: EventTimer, index: int) -> None:
        self._events = events
        self._index = index
        self._begun: Stretch | None = None
        self._waiting: deque[Stretch] = deque()

    def start(self) -> None:
        if self._begun is not None:  # the call before raised half-way
            self._events.drop(self._begun)
        self._begun = self._events.begin(self._index)

    def stop(self) -> None:
        ended, self._begun = self._events.end(self._begun), None
        if ended is not None:
            self._waiting.append(ended)
        if len(self._waiting) > MOST_WAITING:
            self._events.drop(self._waiting.popleft())

    def poll(self) -> Sequence[float]:
        """Seconds of the calls that the device has finished since the last time."""
        found = []
        while self._waiting:
            nanoseconds = self._events.nanoseconds(self._waiting[0])
            if nanoseconds is None:
                break
            self._waiting.popleft()
            found.append(nanoseconds * 1e-9)
        return found
