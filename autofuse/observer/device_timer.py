"""Times stretches of a GPU's stream with events, without ever waiting for one.

In: ``begin`` and ``end`` around work that a script launches. Out: ``nanoseconds`` of the stretch, once the device has
passed both events; until then None. Guarantee: the script is never synchronised; during CUDA graph capture no event is
recorded or queried (both would end the capture); nothing is raised: the first fault switches the timer off and stays in
``fault``. Events are pooled by device, since an event belongs to the device that first recorded it. Torch-free: torch's
functions come as an ``EventCalls``.

A stretch of a stream is an upper bound of the work in it: where the device waits for the host, waiting is inside.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from autofuse.locks import make_lock

MAX_LATE = 40_000  # stretches that may wait; as many as one sampled step may have calls


Tell = Callable[[int | None], None]


class DeviceEvent(Protocol):
    """What ``torch.cuda.Event`` answers."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(frozen=True)
class EventCalls:
    """The functions of torch that a timer calls."""

    is_active: Callable[[], bool]  # the script uses a GPU
    is_capturing: Callable[[], bool]  # it captures a CUDA graph right now
    new_event: Callable[[], DeviceEvent]
    stream: Callable[[int], Any]  # the current stream of a device
    index_of: Callable[[Any], int]  # the index of a tensor's GPU; -1 for a tensor elsewhere


class Stretch(NamedTuple):
    """A stretch of work from one event to another, on streams of one device."""

    gpu: int  # index of the device
    start: DeviceEvent
    stop: DeviceEvent


class EventTimer:
    """The one timer of a session, for all threads: those of autograd end stretches that others began."""

    def __init__(self, calls: EventCalls) -> None:
        self._calls = calls
        self._pool: defaultdict[int, list[DeviceEvent]] = defaultdict(list)
        self.index_of = calls.index_of
        self.fault: str | None = None  # why nothing is timed any more

    @property
    def is_active(self) -> bool:
        return self.fault is None and self._calls.is_active()

    def begin(self, index: int) -> Stretch | None:
        """Begin a stretch with the next work that is launched on the device; None where it cannot be timed."""
        if self.fault is not None:
            return None
        try:
            if self._calls.is_capturing():
                return None
            pool = self._pool[index]
            stretch = Stretch(index, self._event(pool), self._event(pool))
            stretch.start.record(self._calls.stream(index))
        except Exception as error:  # a broken device raises at every call, also at the script's own
            self._switch_off(error)
            return None
        return stretch

    def _event(self, pool: list[DeviceEvent]) -> DeviceEvent:
        try:
            return pool.pop()
        except IndexError:  # not tested before: another thread may take the last one
            return self._calls.new_event()

    def end(self, stretch: Stretch | None) -> Stretch | None:
        """End a stretch with the work that is launched by now; None where its length will never be known."""
        if stretch is None:
            return None
        try:
            if self.fault is None and not self._calls.is_capturing():
                stretch.stop.record(self._calls.stream(stretch.gpu))
                return stretch
        except Exception as error:
            self._switch_off(error)
        self.drop(stretch)
        return None

    def nanoseconds(self, stretch: Stretch) -> int | None:
        """The length of a stretch that the device has passed, None before; to be asked for only until it is known."""
        if self.fault is not None:
            return None
        try:
            if self._calls.is_capturing() or not (stretch.stop.query() and stretch.start.query()):
                return None
            found = max(0, round(stretch.start.elapsed_time(stretch.stop) * 1e6))
        except Exception as error:
            self._switch_off(error)
            return None
        self.drop(stretch)
        return found

    def drop(self, stretch: Stretch) -> None:
        """Drop a stretch that is no longer needed: its events can be reused."""
        self._pool[stretch.gpu] += (stretch.start, stretch.stop)

    def _switch_off(self, error: Exception) -> None:
        self.fault = f"{type(error).__name__}: {error}"


class LateTimes:
    """Stretches of unknown lengths: polled in the order of adding, each length is reported once it is known."""

    def __init__(self, timer: EventTimer) -> None:
        self._timer = timer
        self._waiting: deque[tuple[Stretch | None, Tell]] = deque()
        self._lock = make_lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, stretch: Stretch | None, tell: Tell) -> None:
        """Add a stretch; ``tell`` is called later, with its nanoseconds, or with None if they stay unknown."""
        dropped: Tell | None = None
        with self._lock:
            if len(self._waiting) >= MAX_LATE:
                _, dropped = self._waiting.popleft()
            self._waiting.append((stretch, tell))
        if dropped is not None:
            dropped(None)

    def collect(self) -> None:
        """Report the lengths that the device knows by now, up to the first that it does not know."""
        with self._lock:
            while self._waiting:
                stretch, tell = self._waiting[0]
                elapsed = None if stretch is None else self._timer.nanoseconds(stretch)
                if elapsed is None and stretch is not None and self._timer.fault is None:
                    return
                self._waiting.popleft()
                tell(elapsed)

    def close(self) -> None:
        """At the end of the run, report the lengths up to the first that is not known, and None for the rest."""
        self.collect()
        with self._lock:
            while self._waiting:
                self._waiting.popleft()[1](None)
