"""Plain rows that the store hands out beside the records of ``ir``.

In: what the tables hold. Out: frozen dataclasses without a trace of SQLAlchemy, for the daemon, the
script and the reports. Times are UTC epoch seconds (``_at``), microseconds (``_us``) or seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autofuse.ir.records import CompileKey, Decision, DecisionKey, DeviceInfo, Event, Measurement, RunTotals

RequestStatus = Literal["queued", "running", "done", "failed"]
RequestEnd = Literal["done", "failed", "requeued"]  # what becomes of a request that was worked on


@dataclass(frozen=True)
class RunRow:
    """One watched process."""

    id: int
    command: str
    device: DeviceInfo
    versions: str
    mode: str
    pid: int
    settings: Mapping[str, Any]
    started_at: float
    finished_at: float | None  # None while running, or when the process was killed
    totals: RunTotals
    machine: str = ""  # where ``pid`` counts; "": stored by a version that did not say so
    steps_one_in: int = 1  # one in so many timed captured steps is kept; of held-out ones see `held_out_one_in`


@dataclass(frozen=True)
class QueueStatus:
    """How many requests are in which state."""

    queued: int = 0
    running: int = 0
    done: int = 0
    failed: int = 0

    @property
    def open(self) -> int:
        """Requests that still wait for an answer."""
        return self.queued + self.running

    @property
    def total(self) -> int:
        return self.queued + self.running + self.done + self.failed


@dataclass(frozen=True)
class NamedDecisions:
    """What a store has of the decisions that a file names."""

    rows: tuple[tuple[int, Decision], ...]  # (id, decision), by growing id
    missing: tuple[DecisionKey, ...]  # decided otherwise here, or not at all


@dataclass(frozen=True)
class RequestRow:
    """A request of the queue, without its node."""

    key: DecisionKey
    status: RequestStatus
    calls: int
    expected_saving_us: float
    message: str
    updated_at: float


@dataclass(frozen=True)
class StoredMeasurement:
    """A measurement and the key it was made for."""

    key: DecisionKey
    measurement: Measurement
    at: float


@dataclass(frozen=True)
class StoredDecision:
    """A decision as stored."""

    id: int
    decision: Decision
    run_id: int | None  # the run whose request it answered
    at: float


@dataclass(frozen=True)
class NodeRow:
    """A fusion node that some run used or asked to be tuned."""

    fusion_id: str
    label: str
    operations: str
    form: Mapping[str, Any]  # NodeForm.to_json()
    source: str


@dataclass(frozen=True)
class KernelSource:
    """A kernel without its binary, for people to read."""

    key: CompileKey
    name: str
    source: str
    size_bytes: int
    resources: Mapping[str, Any]  # registers, spills and so on of a GPU's kernel; empty for C

    @property
    def is_strategy(self) -> bool:
        """Whether it is several steps in one (`strategies.bundle`), whose compilers stand with each of its kernels."""
        return self.key.compiler == "way"


@dataclass(frozen=True)
class EventRow:
    """An event and when it happened."""

    event: Event
    run_id: int | None
    at: float


@dataclass(frozen=True)
class RootChange:
    """A moment at which a root's state changed."""

    run_id: int
    root: str
    state: str
    reason: str
    detail: str
    capture_seconds: float
    at: float


@dataclass(frozen=True)
class SettingTrial:
    """A process setting against its default, measured in separate processes; never credited to fusion."""

    setting: str  # such as "malloc_thresholds"
    value: str  # what was tried, such as "mmap=1GiB trim=2GiB"
    baseline_us: float  # a step without it
    with_us: float  # a step with it
    ratio: float  # baseline over with: above 1 is faster
    low: float  # 95 % interval of the ratio
    high: float
    decision: str  # "on" or "off"
    reason: str  # code: "won", "below_margin", "failed", ...
    device: str = ""  # DeviceInfo.key
    workload: str = ""  # what ran: the command of the script


@dataclass(frozen=True)
class DaemonState:
    """What the daemon says of itself at each heartbeat."""

    pid: int
    host: str
    started_at: float
    state: str  # "idle", "tuning", "yielding", "stopping", "stopped"
    job: str = ""  # label of the node and the bucket in work
    queued: int = 0
    done: int = 0
    failed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    heartbeat_at: float = 0.0  # set by the store
