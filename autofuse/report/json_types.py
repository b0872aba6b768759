"""What ``autofuse report --json`` prints, as types: the schema for programs is made from them.

In: nothing. Out: records of plain values; ``scripts/generate_docs.py`` makes ``report.schema.json`` of them.
Guarantee: every key is always there, null where nothing was measured; times end in ``_us`` (microseconds) or
``_seconds``; ``started_at``, ``finished_at`` and ``at`` are UTC epoch seconds; shares are 0 to 1; of a speedup,
above 1 is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autofuse.db.rows import QueueStatus
from autofuse.ir.records import DeviceInfo
from autofuse.report.decided import Decided
from autofuse.report.live import LiveVerdicts
from autofuse.report.operators import OperatorLine
from autofuse.report.report import MemoryLine
from autofuse.report.strictness import StrictCost

SCHEMA_VERSION = 1  # changes when a key goes or changes its meaning; new keys may come


@dataclass(frozen=True)
class JsonRun:
    """The run."""

    id: int
    command: str
    mode: str
    device: DeviceInfo
    versions: str
    pid: int
    settings: dict[str, Any]
    started_at: float
    finished_at: float | None
    run_seconds: float
    exit_code: int | None
    steps_one_in: int


@dataclass(frozen=True)
class JsonTotals:
    """The numbers of a run. The speedup is that of hot steps, against held-out eager ones."""

    steps: int
    fused_calls: int
    unfused_calls: int
    speedup_median: float | None
    speedup_low: float | None
    speedup_high: float | None
    speedup_pairs: int
    held_out_steps: int
    tuning_seconds: float
    paused_seconds: float
    seconds_saved: float | None
    break_even_step: int | None
    observer_overhead_percent: float | None
    capture_seconds: float


@dataclass(frozen=True)
class JsonNode:
    """One node in one bucket of sizes, with the times of a call."""

    node: str
    operations: str
    bucket: str
    calls: int
    time_share: float
    unfused_us: float | None
    fused_us: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    variant: str | None
    decision: str
    reason: str
    source: str


@dataclass(frozen=True)
class JsonStep:
    """The steps of one module with one shape of its inputs; times are medians."""

    root: str
    signature: str
    steps: int
    held_out_steps: int
    routed_us: float | None
    held_out_us: float | None
    time_share: float
    hot: bool
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None


@dataclass(frozen=True)
class JsonSize:
    """The size of a call of a graph, or of a mean step."""

    nodes: float
    edges: float
    depth: float
    kernels: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class JsonFusion:
    """What the planner counted."""

    num_fused: int
    efficiency: float
    applied: int
    failed: int
    memory_saved: int
    mean_speedup: float
    dynamic: int
    patterns_used: dict[str, int]


@dataclass(frozen=True)
class JsonGraph:
    """A captured graph, before fusion and as planned."""

    phase: str
    source: str
    captures: int
    calls: int
    times: int
    before: JsonSize
    after: JsonSize
    fusion: JsonFusion


@dataclass(frozen=True)
class JsonGraphSum:
    """All graphs of a mean step."""

    steps: int
    before: JsonSize
    after: JsonSize


@dataclass(frozen=True)
class JsonRoot:
    """A module that may be captured."""

    root: str
    name: str
    state: str
    reason: str
    detail: str
    calls: int
    operations: int
    eager_seconds: float
    capture_seconds: float
    predicted_capture_seconds: float
    capture_causes: dict[str, float]
    kept_graphs: int
    dynamic_dims: list[tuple[str, int]]


@dataclass(frozen=True)
class JsonSetting:
    """A trial of a process setting, which is never part of the speedup."""

    setting: str
    value: str
    baseline_us: float
    with_us: float
    speedup: float
    speedup_low: float
    speedup_high: float
    decision: str
    reason: str
    workload: str


@dataclass(frozen=True)
class JsonExample:
    """One of the fusions that a line counts."""

    operations: str
    detail: str
    source: str


@dataclass(frozen=True)
class JsonRefusal:
    """How often fusions were accepted or refused for one reason."""

    code: str
    accepted: bool
    count: int
    bytes_saved: int
    example: JsonExample


@dataclass(frozen=True)
class JsonEvent:
    """A note."""

    kind: str
    message: str
    at: float
    data: dict[str, Any]


@dataclass(frozen=True)
class JsonReport:
    """A report of autofuse on one run; ``run`` is null for a store without runs."""

    schema_version: int
    store: str
    run: JsonRun | None
    totals: JsonTotals
    nodes: list[JsonNode]
    operators: list[OperatorLine]
    steps: list[JsonStep]
    graphs: list[JsonGraph]
    graph_sum: JsonGraphSum | None
    fusion: JsonFusion
    roots: list[JsonRoot]
    settings: list[JsonSetting]
    refusals: list[JsonRefusal]
    events: list[JsonEvent]
    queue: QueueStatus
    strict: StrictCost | None
    decided: Decided | None
    live_races: LiveVerdicts | None
    memory: list[MemoryLine]
