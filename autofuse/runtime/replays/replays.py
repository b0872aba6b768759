"""All recorded graphs of a session: their memory, how many are kept, and what became of each.

In: settings, the functions of torch. Out: pools of memory, room for one more recording, records for the report.
Guarantee: at most so many recordings and bytes are kept; the one that was replayed longest ago goes first. Its memory
is freed once the device has passed its last replay. Recordings of one stream share memory: their replays follow each
other there, and each copies its results out before the next. After failures in two graphs no more are recorded.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autofuse.gpu.graphs import Graph, GraphCalls, Mark
from autofuse.ir.records import Refusal
from autofuse.locks import make_lock
from autofuse.runtime.replays.inputs import Inputs
from autofuse.runtime.replays.results import Results
from autofuse.settings.groups import ReplaySettings

MOST_FAILURES = 2  # graphs whose recording raised
MOST_REPORTED = 200  # graphs of which the report tells


class Pool:
    """Memory for the recordings that are replayed on one stream."""

    def __init__(self, index: int, stream: int) -> None:
        self.index = index
        self.stream = stream
        self.handle: Any = None  # torch's; None until something is recorded
        self.lock = make_lock()  # held from copying inputs in to copying results out; never waited for


@dataclass(eq=False)
class Recording:
    """One graph in memory of ours."""

    owner: Holder
    pool: Pool
    inputs: Inputs
    numerics: object
    graph: Graph | None = None
    results: Results | None = None
    bytes: int = 0
    used: int = 0  # the number of its last replay among all

    def replay(self, args: Sequence[Any]) -> Any:
        """The results of a call that fits. Under the pool's lock."""
        assert self.graph is not None and self.results is not None
        self.graph.replay()
        return self.results.hand_out(args)


class Holder(Protocol):
    """The plan of a recording."""

    def evict(self) -> None:
        """Let go of it, to record again later."""


@dataclass(eq=False)
class _Retired:
    recording: Recording
    mark: Mark | None = None  # behind its last replay


@dataclass(eq=False)
class Replays:
    """Of one session."""

    settings: ReplaySettings
    margin: float  # gain over launches one by one that a replay must show
    calls: GraphCalls
    note: Callable[[Refusal], object]  # for the report
    report_fallback: Callable[[str, str, BaseException], None]  # kind, what happened, error
    disturb: Callable[[], None]  # steps around this moment are not compared
    failures: int = 0
    kept: list[Recording] = field(default_factory=list)
    _pools: dict[tuple[int, int], Pool] = field(default_factory=dict)
    _retired: list[_Retired] = field(default_factory=list)
    _threads: set[int] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _reported: int = 0
    _lock: Any = field(default_factory=make_lock)

    # ---- whether -----------------------------------------------------------------------------------------

    def called(self, phase: str) -> None:
        """Note the thread of a call."""
        if phase != "backward":  # which runs on threads of autograd's
            self._threads.add(threading.get_ident())

    def why_not_now(self) -> str:
        """Why nothing may be recorded at this moment; "" where it may."""
        if self.calls.is_capturing():
            return "another recording is under way"
        if len(self._threads) > 1:
            return "several threads call graphs: one might wait for the device while another records"
        if not self.calls.is_left_alone():
            return "operators are watched one by one"
        return "" if self.calls.may_wait() else "the script forbids to wait for the device"

    @property
    def is_off(self) -> bool:
        return self.failures >= MOST_FAILURES

    # ---- memory ------------------------------------------------------------------------------------------

    def pool(self, index: int) -> Pool:
        """Of the current stream."""
        key = (index, self.calls.stream(index))
        with self._lock:
            if key not in self._pools:
                self._pools[key] = Pool(*key)
            return self._pools[key]

    def handle(self, pool: Pool) -> Any:
        """The pool's memory for a new recording. Torch gives it up with the last graph in it."""
        held = [*self.kept, *(item.recording for item in self._retired)]
        if pool.handle is None or not any(recording.pool is pool for recording in held):
            pool.handle = self.calls.new_pool()
        return pool.handle

    def used(self, recording: Recording) -> None:
        recording.used = next(self._numbers)

    def admit(self, recording: Recording) -> bool:
        """Make room for a recording, whose pool's lock is held; False where it is too large."""
        most = self.settings
        if recording.bytes > most.max_bytes:
            return False
        self.used(recording)
        with self._lock:
            self.kept.append(recording)
        while len(self.kept) > most.max_graphs or sum(r.bytes for r in list(self.kept)) > most.max_bytes:
            oldest = min(list(self.kept), key=lambda kept: kept.used)
            is_ours = oldest.pool is recording.pool
            if not is_ours and not oldest.pool.lock.acquire(blocking=False):
                return False
            try:
                oldest.owner.evict()
            finally:
                if not is_ours:
                    oldest.pool.lock.release()
        return True

    def retire(self, recording: Recording) -> None:
        """No call replays it again. Its memory is freed by `tidy`."""
        with self._lock:
            if recording in self.kept:
                self.kept.remove(recording)
            if recording.graph is not None:
                self._retired.append(_Retired(recording))

    def tidy(self, pool: Pool) -> None:
        """Free what the device has done with, of the current stream. Not while anything is recorded."""
        if not self._retired:
            return
        with self._lock:
            left = []
            for item in self._retired:
                if item.recording.pool is pool and item.mark is None:
                    item.mark = self.calls.mark(pool.index)
                if item.mark is None or not item.mark.query():
                    left.append(item)
            self._retired = left

    # ---- what became of them -----------------------------------------------------------------------------

    def tell(self, is_kept: bool, what: str, detail: str) -> None:
        """A line for the report."""
        self._reported += 1
        if self._reported <= MOST_REPORTED:
            self.note(Refusal("replayed" if is_kept else "not_replayed", is_kept, what, detail))

    def failed(self, what: str, error: BaseException) -> None:
        """One line for the user."""
        self.failures += not isinstance(error, torch.OutOfMemoryError)
        self.tell(False, what, f"{type(error).__name__}: {error}"[:300])
        self.report_fallback("replay_failed", f"a {what} is launched kernel by kernel, not as a CUDA graph", error)
