"""The tables of the store, as SQLAlchemy models.

In: nothing. Out: ``Base.metadata``, which the migrations must reproduce exactly (a test compares the two).
Guarantee: lists and mappings are stored as JSON text, times as UTC epoch seconds, microseconds where a
name ends in ``_us``. Rows are appended or brought up to date; `history` deletes details of old runs, and on a fleet's
server `fleet_retention` what nobody uses any more.

Every key is stored as its fields beside its digest, so that a miss can say which field differed.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

JsonList = list[Any]
JsonObject = dict[str, Any]


class Base(DeclarativeBase):
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy's own declaration)
        JsonList: JSON,
        JsonObject: JSON,
        str: Text,
        float: Float,
        int: BigInteger().with_variant(Integer, "sqlite"),  # whose integers have 64 bits anyway
    }


# ---- where and what ran -------------------------------------------------------------------------


class Device(Base):
    __tablename__ = "devices"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)  # DeviceInfo.key
    kind: Mapped[str]
    name: Mapped[str]
    cores: Mapped[int]
    isa: Mapped[str]


class Run(Base):
    """One process that autofuse watched."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("devices.id"))
    command: Mapped[str]
    versions: Mapped[str]
    mode: Mapped[str]
    pid: Mapped[int]
    settings: Mapped[JsonObject]
    started_at: Mapped[float]
    # NULL while running, or when the process was killed. Of a host on a fleet's server: when it was last heard of.
    finished_at: Mapped[float | None]
    machine: Mapped[str] = mapped_column(server_default=text("''"))  # where ``pid`` counts; "": not known
    steps_one_in: Mapped[int] = mapped_column(server_default=text("1"))  # captured steps for which a row stands


class RunTotal(Base):
    __tablename__ = "run_totals"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    values: Mapped[JsonObject]  # RunTotals
    updated_at: Mapped[float]


# ---- what the observer saw ----------------------------------------------------------------------


class Op(Base):
    """An aten overload at one place of one run."""

    __tablename__ = "ops"
    __table_args__ = (UniqueConstraint("run_id", "overload", "module", "phase", "dtypes", "device"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    overload: Mapped[str]
    module: Mapped[str]
    phase: Mapped[str]
    dtypes: Mapped[str]  # JSON text, because it is part of a key
    device: Mapped[str]


class OpShape(Base):
    """The histogram of an op: one row for each set of shapes and strides."""

    __tablename__ = "op_shapes"
    __table_args__ = (UniqueConstraint("op_id", "shapes", "strides"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    op_id: Mapped[int] = mapped_column(ForeignKey("ops.id"))
    shapes: Mapped[str]  # JSON text, because it is part of a key
    strides: Mapped[str]  # likewise
    producers: Mapped[JsonList]
    calls: Mapped[int]
    time_us: Mapped[float]


class DimHistogramRow(Base):
    __tablename__ = "dim_histograms"
    __table_args__ = (UniqueConstraint("run_id", "owner", "argument", "dim"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    owner: Mapped[str]
    argument: Mapped[str]
    dim: Mapped[int]
    counts: Mapped[JsonList]  # [[size, calls], ...]
    tail_calls: Mapped[int]


# ---- roots and nodes ----------------------------------------------------------------------------


class Root(Base):
    """What one run knew last of a root; `RootLog.known` chooses among the rows of several runs."""

    __tablename__ = "roots"
    __table_args__ = (UniqueConstraint("run_id", "root"), Index("ix_roots_root", "root"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    root: Mapped[str]
    state: Mapped[str]
    record: Mapped[JsonObject]  # RootRecord
    updated_at: Mapped[float]


class Capture(Base):
    """The history of roots: a row for each change of a root's state, reason or capture time."""

    __tablename__ = "captures"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    root: Mapped[str]
    state: Mapped[str]
    reason: Mapped[str]
    detail: Mapped[str]
    capture_seconds: Mapped[float]
    at: Mapped[float]


class Node(Base):
    __tablename__ = "nodes"

    fusion_id: Mapped[str] = mapped_column(String, primary_key=True)
    label: Mapped[str]
    operations: Mapped[str]
    form: Mapped[JsonObject]  # NodeForm.to_json()
    source: Mapped[str]
    first_seen_at: Mapped[float]


class BucketRow(Base):
    __tablename__ = "buckets"
    __table_args__ = (UniqueConstraint("fusion_id", "label"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    fusion_id: Mapped[str] = mapped_column(ForeignKey("nodes.fusion_id"))
    label: Mapped[str]
    ranges: Mapped[JsonList]


class NodeUseRow(Base):
    __tablename__ = "node_uses"
    __table_args__ = (UniqueConstraint("run_id", "bucket_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    bucket_id: Mapped[int] = mapped_column(ForeignKey("buckets.id"))  # and so the node
    calls: Mapped[int]
    fused_calls: Mapped[int]
    live_us: Mapped[float]
    time_share: Mapped[float]
    shapes: Mapped[JsonList]  # [[[symbol values], calls], ...]
    source: Mapped[str]


# ---- tuning -------------------------------------------------------------------------------------


class DecisionKeyRow(Base):
    """The fields of a decision key beside their digest."""

    __tablename__ = "decision_keys"
    __table_args__ = (Index("ix_decision_keys_fusion_id", "fusion_id"),)

    digest: Mapped[str] = mapped_column(String, primary_key=True)
    # No foreign key to nodes: a decision can arrive before, or without, the node it is for (import).
    fusion_id: Mapped[str]
    bucket: Mapped[str]
    device: Mapped[str]
    threads: Mapped[int]
    versions: Mapped[str]


class Request(Base):
    """A tuning request: queued, in work, or answered."""

    __tablename__ = "requests"
    __table_args__ = (
        # On a fleet's server: the largest request of a kind, however many there are of others; and leases that end. An
        # index without device and versions would mislead the planner, where only requests of other kinds are queued.
        Index("ix_requests_queue", "status", "device", "versions", "expected_saving_us", "calls"),
        Index(
            "ix_requests_lease",
            "lease_until",
            sqlite_where=text("lease_until IS NOT NULL"),
            postgresql_where=text("lease_until IS NOT NULL"),
        ),
        Index("ix_requests_bucket_id", "bucket_id"),  # before a bucket or a host goes, a server looks for its requests
        Index("ix_requests_run_id", "run_id"),
    )

    key: Mapped[str] = mapped_column(ForeignKey("decision_keys.digest"), primary_key=True)
    device: Mapped[str] = mapped_column(server_default=text("''"))  # of the key, as in its own row; so are the versions
    versions: Mapped[str] = mapped_column(server_default=text("''"))
    bucket_id: Mapped[int] = mapped_column(ForeignKey("buckets.id"))
    calls: Mapped[int]  # of all runs
    unfused_us: Mapped[float]
    estimated_speedup: Mapped[float]
    expected_saving_us: Mapped[float]
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))  # the run that asked last
    status: Mapped[str]  # "queued", "running", "done", "failed"
    pid: Mapped[int | None]  # of the daemon that works on it; on a fleet's server the host's run
    host: Mapped[str]  # the kind of that daemon, see `DaemonFiles.kind`
    attempts: Mapped[int]  # how many daemons died over it
    lease_until: Mapped[float | None]  # on a fleet's server: when it is given to another host, by the server's clock
    message: Mapped[str]
    created_at: Mapped[float]
    updated_at: Mapped[float]


class RequestRun(Base):
    """What one run saw of a request; a run's counters replace its older ones, those of several runs add up."""

    __tablename__ = "request_runs"

    key: Mapped[str] = mapped_column(ForeignKey("requests.key"), primary_key=True)
    run_id: Mapped[int] = mapped_column(primary_key=True)  # 0 for a request made outside of a run
    calls: Mapped[int]
    shapes: Mapped[JsonList]


class CandidateRow(Base):
    __tablename__ = "candidates"
    __table_args__ = (UniqueConstraint("key", "variant", "config"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(ForeignKey("decision_keys.digest"))
    variant: Mapped[str]
    config: Mapped[str]  # JSON text, because it is part of a key


class MeasurementRow(Base):
    __tablename__ = "measurements"
    __table_args__ = (
        Index(
            "ix_measurements_origin",
            "origin",
            unique=True,
            sqlite_where=text("origin IS NOT NULL"),
            postgresql_where=text("origin IS NOT NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    candidate_id: Mapped[int] = mapped_column(ForeignKey("candidates.id"), index=True)
    status: Mapped[str]
    symbol_values: Mapped[JsonList]
    median_us: Mapped[float | None]
    eager_us: Mapped[float | None]
    speedup: Mapped[float | None]
    speedup_low: Mapped[float | None]
    speedup_high: Mapped[float | None]
    error_ratio: Mapped[float | None]
    host_us: Mapped[float | None]
    eager_host_us: Mapped[float | None]
    compile_key: Mapped[str | None]
    compile_seconds: Mapped[float]
    measure_seconds: Mapped[float]
    message: Mapped[str]
    at: Mapped[float]
    # On a fleet's server: a digest of the store and row it comes from, so that one that arrives twice counts once.
    origin: Mapped[str | None]


class DecisionRow(Base):
    """The history of decisions; the newest row of a key is valid."""

    __tablename__ = "decisions"
    __table_args__ = (
        Index("ix_decisions_key", "key"),
        Index(
            "ix_decisions_run_id",
            "run_id",
            sqlite_where=text("run_id IS NOT NULL"),
            postgresql_where=text("run_id IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)  # grows, so that readers can ask for what is new
    key: Mapped[str] = mapped_column(ForeignKey("decision_keys.digest"))
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))  # whose request it answered
    ranges: Mapped[JsonList]
    variant: Mapped[str]
    config: Mapped[JsonList]
    compile_key: Mapped[str | None]
    unfused_us: Mapped[float]
    fused_us: Mapped[float]
    speedup: Mapped[float]
    speedup_low: Mapped[float]
    speedup_high: Mapped[float]
    reason: Mapped[str]
    detail: Mapped[str]
    trials: Mapped[int]
    tuning_seconds: Mapped[float]
    raced_threads: Mapped[int] = mapped_column(server_default=text("0"))
    at: Mapped[float]


class Kernel(Base):
    """A generated kernel; an evicted one keeps its source and loses its binary."""

    __tablename__ = "kernels"

    digest: Mapped[str] = mapped_column(String, primary_key=True)  # CompileKey.digest
    source_hash: Mapped[str]
    compiler: Mapped[str]
    flags: Mapped[str]
    target: Mapped[str]
    name: Mapped[str]
    source: Mapped[str]
    binary: Mapped[bytes | None] = mapped_column(LargeBinary)
    checksum: Mapped[str]  # seal of the binary, see `seals`
    size_bytes: Mapped[int]  # of the binary, 0 when evicted
    created_at: Mapped[float]
    used_at: Mapped[float] = mapped_column(index=True)
    resources: Mapped[JsonObject | None] = mapped_column(JSON(none_as_null=True))  # registers, spills; NULL for C


class TritonFile(Base):
    """A file of Triton's own cache; an evicted one keeps its row and loses its bytes."""

    __tablename__ = "triton_files"

    key: Mapped[str] = mapped_column(String, primary_key=True)  # Triton's key of a kernel
    name: Mapped[str] = mapped_column(String, primary_key=True)  # the file's
    data: Mapped[bytes | None] = mapped_column(LargeBinary)
    checksum: Mapped[str]  # seal of the bytes, see `seals`
    size_bytes: Mapped[int]  # 0 when evicted
    used_at: Mapped[float] = mapped_column(index=True)


class SettingTrialRow(Base):
    """A process setting against its default, measured in separate processes."""

    __tablename__ = "setting_trials"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    device: Mapped[str]
    workload: Mapped[str]
    setting: Mapped[str]
    value: Mapped[str]
    baseline_us: Mapped[float]
    with_us: Mapped[float]
    ratio: Mapped[float]
    low: Mapped[float]
    high: Mapped[float]
    decision: Mapped[str]
    reason: Mapped[str]
    at: Mapped[float]


# ---- fleet --------------------------------------------------------------------------------------


class FleetMark(Base):
    """A database's own name, how far it has exchanged rows with a fleet's server, and how far a server was swept."""

    __tablename__ = "fleet_marks"

    server: Mapped[str] = mapped_column(String, primary_key=True)  # the server's name; "": about this database
    name: Mapped[str] = mapped_column(String, primary_key=True)
    value: Mapped[str]


class ProposalRow(Base):
    """What another host of the fleet has decided: to be built, checked and raced here before it counts."""

    __tablename__ = "proposals"

    key: Mapped[str] = mapped_column(ForeignKey("decision_keys.digest"), primary_key=True)
    variant: Mapped[str]
    config: Mapped[JsonList]
    reason: Mapped[str]
    speedup: Mapped[float]
    status: Mapped[str]  # "open", "adopted", "overridden", "refused"
    message: Mapped[str]
    at: Mapped[float]


# ---- logs ---------------------------------------------------------------------------------------


class RefusalRow(Base):
    __tablename__ = "refusals"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"), index=True)
    code: Mapped[str]
    accepted: Mapped[bool]
    operations: Mapped[str]
    detail: Mapped[str]
    bytes_saved: Mapped[int]
    source: Mapped[str]
    at: Mapped[float]


class StepSeries(Base):
    """A root with one signature in one run, so that samples need not repeat these texts."""

    __tablename__ = "step_series"
    __table_args__ = (UniqueConstraint("run_id", "root", "signature"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    root: Mapped[str]
    signature: Mapped[str]


class StepSampleRow(Base):
    __tablename__ = "step_samples"

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("step_series.id"), index=True)
    held_out: Mapped[bool]
    fused_nodes: Mapped[int]
    call_index: Mapped[int]
    step_us: Mapped[float]
    elements: Mapped[int] = mapped_column(server_default=text("0"))


class EventRow(Base):
    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"), index=True)
    kind: Mapped[str]
    message: Mapped[str]
    data: Mapped[JsonObject]
    at: Mapped[float]


class Daemon(Base):
    """The last heartbeat of any daemon of this store; a single row."""

    __tablename__ = "daemon"

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[JsonObject]  # DaemonState
    heartbeat_at: Mapped[float]
