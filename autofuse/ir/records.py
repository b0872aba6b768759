"""The small records that stages exchange: buckets, candidates, measurements, decisions, requests, profiles.

In: the results of one stage. Out: the inputs of the next one, and the contents of the store. Guarantee: frozen,
JSON-serialisable through ``dataclasses.asdict`` (tuples become lists), torch-free. Times are in microseconds (``_us``)
or seconds (``_seconds``), sizes in bytes (``_bytes``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autofuse.ir.strict import is_strict

# ---- where things run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceInfo:
    """What a decision depends on about the machine; two machines with equal fields share decisions."""

    kind: str  # "cpu" or "cuda"; "interpreter" for Triton's, which checks kernels without a GPU
    name: str  # model name, such as "AMD EPYC 9654"
    cores: int  # processors this process may run on (CPU) or multiprocessors (GPU)
    isa: str  # widest vectors and a digest of all instructions ("avx512-1f9a0c"), or compute capability ("sm_90")
    memory_bytes: int = 0  # of a GPU

    @property
    def key(self) -> str:
        """In whole GiB, since drivers set a little more or less of it aside."""
        memory = f":{round(self.memory_bytes / 2**30)}GiB" if self.memory_bytes else ""
        return f"{self.kind}:{self.name}:{self.cores}:{self.isa}{memory}"


# ---- buckets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """A region of symbol values that shares one decision: an inclusive range per symbol of the node."""

    ranges: tuple[tuple[int, int], ...]  # (low, high) per symbol, in the node's symbol order

    @property
    def is_exact(self) -> bool:
        return all(low == high for low, high in self.ranges)

    def contains(self, values: Sequence[int]) -> bool:
        return len(values) == len(self.ranges) and all(
            low <= v <= high for v, (low, high) in zip(values, self.ranges, strict=True)
        )

    @property
    def label(self) -> str:
        """Text for people and for keys: ``s0=4 s1=65..128``; ``static`` for a node without symbols."""
        parts = [f"s{i}={low}" if low == high else f"s{i}={low}..{high}" for i, (low, high) in enumerate(self.ranges)]
        return " ".join(parts) or "static"


# ---- variants, candidates, measurements -----------------------------------------------------------

Config = tuple[tuple[str, int | str | bool], ...]  # sorted (knob, value) pairs

DETAIL_CHARACTERS = 500  # of what is stored of a compiler's or a kernel's message
EAGER = "eager"  # the unfused variant: the node's operations one by one through aten


# Of an eager decision for a group: its operations in eager's order beat its members' kernels between its products.
IN_ONE: Config = (("in_one", True),)


def make_config(values: Mapping[str, int | str | bool]) -> Config:
    return tuple(sorted(values.items()))


@dataclass(frozen=True)
class Candidate:
    """A variant and a point in its search space."""

    # "eager", "c_generic", "c_specialised", "triton_generic", "triton_specialised"; "way" for a strategy, whose name is
    # in the config; of an optimizer's step "c_multi", "triton_multi", and torch's own "foreach" and "fused"
    variant: str
    config: Config = ()


# "not_bit_equal": right, but a strict run may not use it
Status = Literal[
    "ok", "wrong", "crash", "timeout", "out_of_memory", "compile_error", "pruned", "refused", "not_bit_equal"
]


@dataclass(frozen=True)
class Measurement:
    """What became of one candidate in one bucket."""

    candidate: Candidate
    status: Status
    symbol_values: tuple[int, ...] = ()  # the shape it was timed on
    median_us: float | None = None  # wall time of a call
    eager_us: float | None = None  # eager's median in the same interleaved rounds
    speedup: float | None = None  # median of eager/candidate, pair by pair
    speedup_low: float | None = None  # 95 % interval
    speedup_high: float | None = None
    error_ratio: float | None = None  # error against float64 over eager's own error
    compile_key: str | None = None
    compile_seconds: float = 0.0
    measure_seconds: float = 0.0
    message: str = ""  # for people, where status is not "ok"
    host_us: float | None = None  # on a GPU: until a call is handed over; the times above are what decided
    eager_host_us: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A candidate against eager, from the same rounds. Times in microseconds a call."""

    median_us: float
    eager_us: float
    speedup: float  # median of the paired ratios eager / candidate
    low: float  # 95 % interval of that median
    high: float
    strong_low: float  # bounds that the decision stands on; 0 and inf where there are too few rounds for any
    strong_high: float
    rounds: int


# ---- keys ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileKey:
    """Exactly what determines a binary."""

    source_hash: str  # SHA-256 of the generated source
    compiler: str  # first line of ``cc --version``, or Triton's version
    flags: str  # all flags, in order
    target: str  # instruction set the flags resolve to on this machine, or the GPU's ("cuda:90")

    @property
    def digest(self) -> str:
        return _digest((self.source_hash, self.compiler, self.flags, self.target))


@dataclass(frozen=True)
class DecisionKey:
    """What a decision is valid for."""

    fusion_id: str  # content hash of the node: operations, dtypes, layouts, constants
    bucket: str  # label of the region of symbol values
    device: str  # DeviceInfo.key
    threads: int  # torch.get_num_threads() of the workload
    versions: str  # torch major.minor, the code generator's version, and whether the run is strict (`ir.strict`)

    @property
    def is_strict(self) -> bool:
        """Whether only kernels whose results are eager's to the bit may win."""
        return is_strict(self.versions)

    @property
    def family(self) -> str:
        """The same for all buckets of a node on one device; strict decisions are a family of their own."""
        return f"{self.fusion_id}/{self.threads}/{self.device}{'/strict' if self.is_strict else ''}"

    @property
    def digest(self) -> str:
        return _digest((self.fusion_id, self.bucket, self.device, str(self.threads), self.versions))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:32]


# ---- work and its outcome -------------------------------------------------------------------------


@dataclass(frozen=True)
class ObservedShape:
    """One shape signature of a node as the script ran it."""

    symbol_values: tuple[int, ...]
    calls: int


@dataclass(frozen=True)
class TuneRequest:
    """Please find the winner of this node in this bucket."""

    key: DecisionKey
    node: Mapping[str, Any]  # NodeForm.to_json()
    bucket: Bucket
    shapes: tuple[ObservedShape, ...]  # most frequent first
    calls: int  # calls seen in this bucket
    unfused_us: float  # live time of a call, 0.0 where unknown
    estimated_speedup: float  # from the planner's cost model
    run_id: int | None = None

    @property
    def expected_saving_us(self) -> float:
        """Time that a kernel would have saved over the calls seen so far; orders the queue."""
        return self.calls * self.unfused_us * max(0.0, 1.0 - 1.0 / max(self.estimated_speedup, 1e-9))


@dataclass(frozen=True)
class Decision:
    """The winner of a bucket, with its reason."""

    key: DecisionKey
    bucket: Bucket
    candidate: Candidate  # variant "eager" where nothing beat eager by the margin
    compile_key: str | None  # kernel to load, None for eager
    unfused_us: float
    fused_us: float  # of the best verified fused candidate, or of eager where there was none
    speedup: float
    speedup_low: float
    speedup_high: float
    reason: str  # machine-readable code: "won", "below_margin", "all_wrong", "compile_failed", "crashed", ...
    detail: str = ""  # a sentence for people
    trials: int = 0
    tuning_seconds: float = 0.0
    raced_threads: int = 0  # in the race that decided, where others used the cores; 0: those of the key

    @classmethod
    def of(
        cls,
        comparison: Comparison | None,
        request: TuneRequest,
        candidate: Candidate,
        reason: str,
        detail: str,
        *,
        compile_key: str | None = None,
        trials: int = 0,
        tuning_seconds: float = 0.0,
    ) -> Decision:
        """What the race of a request's best candidate has led to; without a race nothing is known but the reason."""
        return cls(
            key=request.key,
            bucket=request.bucket,
            candidate=candidate,
            compile_key=compile_key,
            unfused_us=comparison.eager_us if comparison else 0.0,
            fused_us=comparison.median_us if comparison else 0.0,
            speedup=comparison.speedup if comparison else 1.0,
            speedup_low=comparison.low if comparison else 1.0,
            speedup_high=comparison.high if comparison else 1.0,
            reason=reason,
            detail=detail[:DETAIL_CHARACTERS],
            trials=trials,
            tuning_seconds=tuning_seconds,
        )


@dataclass(frozen=True)
class KernelRecord:
    """A generated kernel: source and binary under their compile key."""

    key: CompileKey
    name: str  # symbol name a profiler shows
    source: str
    binary: bytes
    resources: Mapping[str, Any] = field(default_factory=dict)  # what it takes of a GPU; empty for C


# ---- what a run tells the store -------------------------------------------------------------------


@dataclass(frozen=True)
class RunStart:
    """The start of one process that autofuse watches."""

    command: str
    device: DeviceInfo
    versions: str
    mode: str  # --tune
    pid: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""  # on which the process has that number, as `process_id.this_machine` says it


@dataclass(frozen=True)
class RunTotals:
    """The counters of a run so far; written again and again, the last one stands."""

    steps: int = 0
    fused_calls: int = 0  # calls of nodes that ran a fused kernel
    unfused_calls: int = 0  # calls of nodes that ran eager's kernels
    observer_seconds: float = 0.0  # the observer's own cost
    run_seconds: float = 0.0  # wall time of the script so far
    capture_seconds: float = 0.0
    paused_seconds: float = 0.0  # that the script has waited for tuning
    held_out_calls: int = 0
    exit_code: int | None = None  # None while running


@dataclass(frozen=True)
class StepSample:
    """One timed step: from one call of a root to the next call of the same root."""

    root: str
    signature: str  # shapes of the root's inputs
    held_out: bool  # the original module ran, forward and backward
    fused_nodes: int  # nodes on fused kernels in that call, 0 when held out
    index: int  # running number of the call
    step_us: float
    elements: int = 0  # of the inputs together, 0 where unknown


@dataclass(frozen=True)
class NodeUse:
    """How one node was used in one bucket during a run; counters so far, the last one stands."""

    fusion_id: str
    node: Mapping[str, Any]  # NodeForm.to_json()
    label: str  # af_<kind>_<ops>_<hash>
    operations: str  # short names joined by " + "
    bucket: Bucket
    calls: int
    fused_calls: int
    live_us: float  # median of sampled live calls, 0.0 where none was sampled
    time_share: float  # share of the sampled time of its step, 0..1
    shapes: tuple[ObservedShape, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class OpProfile:
    """What the observer saw of one aten overload with one set of shapes."""

    overload: str
    module: str  # path of the owning nn.Module, "" outside of modules
    phase: Literal["forward", "backward", "other"]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...]
    device: str
    calls: int
    time_us: float  # total
    producers: tuple[str, ...] = ()  # overloads that made its inputs


@dataclass(frozen=True)
class DimHistogram:
    """How often a dim of an argument of a root or op had each size."""

    owner: str  # root key or overload
    argument: str  # path of the argument, such as "args[0]"
    dim: int
    counts: tuple[tuple[int, int], ...]  # (size, calls), most frequent first
    tail_calls: int = 0  # calls with sizes beyond the kept ones


@dataclass(frozen=True)
class RootRecord:
    """What is known of a root, across runs."""

    root: str  # stable key: class and parameter shapes
    name: str  # class name for people
    state: Literal["observing", "captured", "eager"]
    reason: str  # code: "paid_off", "too_small", "capture_failed", "not_yet", ...
    detail: str = ""
    calls: int = 0
    eager_seconds: float = 0.0
    operations: int = 0  # aten calls in one forward
    capture_seconds: float = 0.0
    predicted_capture_seconds: float = 0.0
    dynamic_dims: tuple[tuple[str, int], ...] = ()  # (argument path, dim)
    kept_graphs: int = 0  # that an earlier run had traced
    judged_elements: int = 0  # of its arguments, in the largest calls that a verdict for eager is about; 0: not known
    capture_causes: tuple[tuple[str, float], ...] = ()  # (cause, seconds), which add up to ``capture_seconds``
    model_seconds: float = 0.0  # what the model alone expects of its capture, on a machine of usual speed
    gain: float = 0.0  # eager's time over the captured graph's in held-out calls, the median; 0: not known


@dataclass(frozen=True)
class Refusal:
    """A fusion that was not made, or made, with its reason."""

    code: str  # such as "size_limit", "random_op", "cycle", "no_rule"
    accepted: bool
    operations: str
    detail: str
    bytes_saved: int = 0
    source: str = ""


# Kinds of events that a report shows elsewhere than among its notes.
GRAPH_METRICS = "graph_metrics"  # describes a captured graph, see runtime/graphs/metrics_log.py
PEAK_MEMORY = "peak_memory"  # of a step, see runtime/roots/peak_memory.py
STEP_RECORD = "step_record"  # a step as it ran, see runtime/graphs/step_records.py
LIVE_RACES = "live_races"  # kernels on the script's own calls, see runtime/graphs/live_races.py
DETAILS = (GRAPH_METRICS, PEAK_MEMORY, STEP_RECORD, LIVE_RACES)


@dataclass(frozen=True)
class Event:
    """Something that a person may want to know later."""

    kind: str  # "fallback", "daemon_start", "store_unusable", "graph_metrics", ...
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)
