"""The settings themselves, group by group: each declared once with its type, default, range, unit and help.

``autofuse.settings.layers.layers`` reads their values from the layers; a line here is all that a new setting needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autofuse.errors import SettingsError
from autofuse.private_files import default_store


def declare(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    is_secret: bool = False,
) -> Any:
    """One setting: default, help, unit, and the inclusive range of a number. ``is_secret``: see `secrets`."""
    return Field(
        default=default, description=doc, ge=low, le=high, json_schema_extra={"unit": unit}, repr=not is_secret
    )


# Settings of earlier versions. A file or variable that still names one is warned about, not refused.
GONE = ("observe.min_samples",)


class Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CheckedGroup(Group):
    """A group that code makes by itself, from settings or in their place.

    A value that is unknown or out of range is a SettingsError, as it is where settings are read.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name, found = first["loc"][0], first["input"]
            if first["type"] == "extra_forbidden":
                known = ", ".join(type(self).model_fields)
                raise SettingsError(f"expected one of {known}, found {name!r}") from None
            raise SettingsError(
                f"expected {name} {first['msg'].removeprefix('Input should be ')}, found {found!r}"
            ) from None

    @classmethod
    def of(cls, settings: Group, **values: Any) -> Self:
        """The values of ``settings``, but for those that are named."""
        return cls(**{**dict(settings), **values})


class RunSettings(Group):
    """How a script is run."""

    tune: Literal["background", "wait", "after", "off"] = declare(
        "background",
        "When kernels are tuned: beside the running script, by pausing it, when it has ended, or never.",
    )
    frozen: bool = declare(False, "Use stored decisions only; nothing is queued for tuning.")
    snapshot: Path | None = declare(
        None,
        "A file of 'autofuse export', or a folder of them: only decisions of the store that it names are used, and "
        "nothing is queued.",
    )
    disable: bool = declare(False, "Run the script as if autofuse were not there.")
    store: Path = Field(default_factory=default_store, description="The SQLite file that keeps all results.")
    cc: str = declare("", "C compiler; empty looks for cc, gcc and clang. CC is read where AUTOFUSE_CC is not set.")
    debug: int = declare(
        0, "Tell on stderr: 1 routes, 2 timings, 3 plan with reasons, 4 source, 5 graphs, 6 compiler output.", low=0,
        high=6,
    )  # fmt: skip
    check: bool = declare(False, "Compare every routed call with eager. Slow; for hunting a wrong kernel.")
    strict: bool = declare(
        False,
        "Use only kernels whose results equal eager's bit by bit in every check; the report says what that costs.",
    )
    graphs_in_c: bool = declare(
        True,
        "Captured graphs whose kernels are settled are called from C, not from Python, and the tensors of fused "
        "optimizer steps are looked at in C; for work on a CPU.",
    )
    fuel: int | None = declare(
        None, "At most this many fusions, to find a wrong one by halving; none: no limit.", low=0
    )
    quiet: bool = declare(False, "Print nothing of our own on stderr.")
    profile: str = declare("default", "Effort: quick, default or thorough.")

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is queued for tuning."""
        return self.frozen or self.snapshot is not None


class ObserveSettings(Group):
    """How operators and shapes are watched."""

    enabled: bool = declare(True, "Watch operators and shapes; without it nothing new is learnt.")
    sample_every: int = declare(16, "One of this many calls of a module is observed in full.", unit="calls", low=1)
    max_overhead_percent: float = declare(
        1.0, "The observer slows down or stops beyond this share of run time.", unit="%", low=0.0, high=100.0
    )
    max_shapes: int = declare(
        64, "Distinct shapes kept per operator and per module; the rest is only counted.", unit="shapes", low=1
    )
    memory: bool = declare(
        False, "Measure peak memory, in eager and with autofuse: a few steps, to the module's next call, run profiled."
    )


class CaptureSettings(Group):
    """When a module is captured as a graph."""

    max_slowdown: float = declare(
        1.25,
        "A module is captured once that cannot make the run so far take more than this many times as long as eager.",
        unit="x",
        low=1.0,
    )
    predicted_seconds_per_op: float = declare(
        0.0025, "Expected cost of capture per operator of constant sizes where Python is fast.", unit="s", low=0.0
    )
    max_seconds: float = declare(
        300.0, "A module whose capture is expected to take longer stays eager.", unit="s", low=0.0
    )
    min_root_us: float = declare(200.0, "Modules faster than this per call stay eager.", unit="µs", low=0.0)
    min_inference_root_us: float = declare(
        100.0, "The same for calls without gradients, whose graphs cost less to call.", unit="µs", low=0.0
    )
    at_once: bool = declare(
        False, "Capture every module at its first call, whatever that costs; 'autofuse explain SCRIPT.py' does."
    )
    max_failures: int = declare(
        1, "Failed captures of one module before it stays eager for good.", unit="failures", low=1
    )
    release_factor: float = declare(
        1.02, "A captured module this much slower than held-out eager is released to eager.", unit="x", low=1.0
    )
    held_out_share: float = declare(
        0.02,
        "Share of calls that keep running the original module, so that gain is measured; a quarter where it is sure.",
        low=0.0,
        high=0.5,
    )
    min_blocks: int = declare(
        6,
        "From so many equal blocks in a row on one is captured for all, several times sooner; 0: never.",
        unit="blocks",
        low=0,
    )
    keep_graphs: bool = declare(
        True, "Keep traced graphs in a folder beside the store, so that the next run captures in half the time."
    )
    recompile_limit: int = declare(
        8, "Graphs kept for one module before further shapes run eager.", unit="graphs", low=1
    )


class FusionSettings(Group):
    """Which operators are fused."""

    enabled: bool = declare(True, "Fuse at all.")
    enable_elementwise: bool = declare(True, "Chains of element-wise operators.")
    enable_reduction: bool = declare(True, "Reductions, softmax and normalisations with the work around them.")
    enable_matmul: bool = declare(True, "Matrix products with what follows them: vendors' fused kernels compete.")
    enable_conv: bool = declare(True, "Convolutions with normalisation, residual and activation as one.")
    enable_attention: bool = declare(True, "Attention written out by hand as one kernel.")
    enable_optimizer: bool = declare(True, "The optimizer's step over all parameters in one call.")
    max_fusion_size: int = declare(
        32, "Operators in one fused kernel at most, views not counted.", unit="operators", low=2, high=256
    )
    min_fusion_benefit: float = declare(
        1.0, "Estimated speedup below which a fusion is not tried.", unit="x", low=0.01, high=100.0
    )
    min_tensor_size: int = declare(0, "Fusions whose largest tensor is smaller are not made.", unit="elements", low=0)
    patterns: Path | None = declare(None, "A TOML file of custom patterns; docs/guides/add-a-pattern.md shows one.")
    cpu_fusion: bool = declare(True, "Fuse what runs on the CPU.")
    cuda_fusion: bool = declare(True, "Fuse what runs on a GPU.")
    enabled_patterns: tuple[str, ...] | None = declare(
        None, "Names of the custom patterns that apply, separated by commas; none: all of them."
    )


class TunerSettings(Group):
    """How much effort the search for kernels may take."""

    trials: int = declare(24, "Configurations tried per node and bucket.", unit="trials", low=1, high=100_000)
    budget_seconds: float = declare(
        180.0, "Tuning time per run: how long 'wait' pauses and how long the daemon works on it.", unit="s", low=0.0
    )
    job_seconds: float = declare(8.0, "Tuning time for one node in one bucket.", unit="s", low=0.0)
    cpu_percent: float = declare(
        50.0, "Share of one core that the daemon may use beside a running script.", unit="%", low=1.0, high=100.0
    )
    busy_percent: float = declare(
        1.5,
        "The same beside scripts that fill all cores, of their time and for all daemons of a user together.",
        unit="%",
        low=0.0,
        high=100.0,
    )
    shared_folder: Path | None = declare(
        None, "Where scripts and daemons of a user find each other; none: a private folder for this machine."
    )
    start_after_seconds: float = declare(
        30.0,
        "A daemon is started beside a script that has run for this long and whose time pays for it; otherwise when the "
        "script ends.",
        unit="s",
        low=0.0,
    )
    memory_bytes: int = declare(4 << 30, "Memory that the tuning worker may use.", unit="bytes", low=64 << 20)
    gpu_memory_bytes: int = declare(
        8 << 30, "Memory of a GPU that its tuning worker may use.", unit="bytes", low=64 << 20
    )
    margin: float = declare(0.03, "Gain over eager that a kernel must show to win.", low=0.0, high=1.0)
    rounds: int = declare(
        15, "Interleaved timing rounds for the candidates that survive screening.", unit="rounds", low=3
    )
    live_races: bool = declare(
        True,
        "Race each kernel once more on single calls of the script; one that is slower there than eager is given up.",
    )
    idle_exit_seconds: float = declare(300.0, "The daemon ends after this long without work.", unit="s", low=0.0)
    recheck_days: float = declare(
        30.0, "Decisions older than this that are still used are raced again while no script runs; 0: never.",
        unit="days", low=0.0,
    )  # fmt: skip
    compile_timeout_seconds: float = declare(
        60.0, "A compiler run that takes longer counts as failed.", unit="s", low=0.1
    )
    worker_timeout_seconds: float = declare(
        60.0, "A candidate that takes longer is killed and recorded as a timeout.", unit="s", low=0.1
    )
    nice: int = declare(
        10,
        "Scheduling priority of daemon and worker, as for nice(1): 19 is the lowest.",
        low=0,
        high=19,
    )


class ReplaySettings(Group):
    """On GPUs: the launches of a captured graph as one CUDA graph."""

    enabled: bool = declare(
        False, "Record graphs that are called often and draw no random numbers; replay those that are faster so."
    )
    after: int = declare(
        16, "Calls of a graph with the same sizes and kernels before it is recorded.", unit="calls", low=4
    )
    max_graphs: int = declare(
        64, "Recordings kept; the one that was replayed longest ago goes first.", unit="graphs", low=1
    )
    max_bytes: int = declare(256 << 20, "Memory of a GPU that all recordings may take.", unit="bytes", low=1 << 20)


class ProcessSettings(Group):
    """What is set for the whole process; measured and reported apart from fusion."""

    malloc: Literal["auto", "on", "off"] = declare(
        "auto",
        "Keep freed memory, in huge pages where the kernel has them (glibc); auto: where it was measured to win.",
    )
    threads: int | None = declare(
        None, "Threads that torch computes with; none leaves torch's own choice.", unit="threads", low=1
    )


class CacheSettings(Group):
    """How much the store keeps."""

    max_bytes: int = declare(
        512 << 20, "Kernels kept in the store; the least used go first.", unit="bytes", low=1 << 20
    )
    history_days: float = declare(
        90.0, "Details of older runs (steps, operators, shapes) are removed; totals and decisions stay.", unit="days",
        low=0.0,
    )  # fmt: skip
    history_bytes: int = declare(
        1 << 30, "So much history is kept, kernels left out; the oldest runs' details go first.", unit="bytes", low=0
    )
    history_runs: int = declare(
        10_000, "So many runs are listed; of older ones only what later runs learn from stays.", unit="runs", low=1
    )


class FleetSettings(Group):
    """What hosts share by a PostgreSQL server; docs/guides/fleet.md."""

    url: str = declare(
        "",
        "Server by which hosts share what they have tuned: postgresql+psycopg://USER@HOST/DATABASE; empty: none. "
        "Only the daemon speaks to it.",
        is_secret=True,
    )
    help: bool = declare(True, "A daemon without work of its own tunes what other hosts ask for.")
    worker: bool = declare(
        False, "The daemon stays to tune for other hosts, as 'autofuse daemon serve --fleet-worker' says."
    )
    poll_seconds: float = declare(5.0, "The daemon exchanges with the server this often.", unit="s", low=0.05)
    connect_seconds: int = declare(
        2, "The server is taken to be down where it does not answer for so long.", unit="s", low=2, high=60
    )
    keep_days: float = declare(
        180.0,
        "What no host has asked for, measured or decided on for so long is removed from the server, as are hosts that "
        "were silent; from the store, proposals that nobody here asks for.",
        unit="days",
        low=1.0,
    )
    keep_keys: int = declare(
        1_000_000,
        "So many nodes with sizes are kept on the server, and proposals in the store; the least used go first.",
        unit="keys",
        low=1,
    )
    keep_measurements: int = declare(
        100, "So many measurements of a node with sizes are kept on the server, the newest.", unit="rows", low=1
    )
