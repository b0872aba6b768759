"""Two identical candidates in the tuner's own jobs: how many of them leave eager.

    python benchmarks/aa.py          # 2 minutes
    python benchmarks/aa.py --quick  # a trial of the benchmark itself

Bar: fewer than 1 % of tries, over all tests. Each try is a whole job on real timings: it screens, decides, confirms and
builds sizes in; only what it loads is not what it asked for. Either all contenders are eager's operations, or all are
one kernel; or eager is itself and the kernel with sizes built in is the generic one.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import arguments, parse, print_end, save
from nodes import CALLS, CPU, Case, Node, capture, full, tuning_session
from patterns_rows import add_relu

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.knobs import Knob
from autofuse.ir.buckets import bucket_of
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import (
    Candidate,
    CompileKey,
    Config,
    DecisionKey,
    KernelRecord,
    ObservedShape,
    TuneRequest,
    make_config,
)
from autofuse.process.apply import keep_freed_memory
from autofuse.runtime.session import Session
from autofuse.settings.layers import Settings
from autofuse.tuner.backends import CBackend
from autofuse.tuner.benchmark_provider import BenchmarkProvider, Built
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.node_bench import CpuRunner, NodeBench
from autofuse.tuner.outcome import JobLimits
from autofuse.tuner.timing import RaceResult, RaceRules
from autofuse.tuner.tune_node import Job
from autofuse.tuner.worker_process import CandidateProblem, WorkerProcess
from autofuse.wrapper.node_call import make_launcher, make_unfused

SWITCH_BAR = 0.01
TRIES, SECONDS = 400, 10.0  # of each test, at most
TWINS = (1, 4)  # identical candidates beside the incumbent; 4 are as many as a deciding race has
CASE = Case("add+relu", add_relu, full(2, 1024), tuple, (16, 512))


class TwinRig(CpuRunner):
    """Whatever is loaded is the same thing: eager's operations, or one kernel."""

    def __init__(self, incumbent: Callable[..., Any] | None, twin: Callable[..., Any] | None) -> None:
        """Entries of kernels; None: eager."""
        self._incumbent = incumbent
        self._twin = twin

    def load(self, digest: str, name: str, binary: bytes) -> Any:
        return None

    def _call(self, entry: Callable[..., Any] | None, form: NodeForm, values: Sequence[int], threads: int) -> Any:
        if entry is None:
            return make_unfused(form, values, self.device)
        return make_launcher(form, entry, values, threads)

    def unfused(self, form: NodeForm, values: Sequence[int]) -> Callable[..., Any]:
        call: Callable[..., Any] = self._call(self._incumbent, form, values, torch.get_num_threads())
        return call

    def launcher(
        self, form: NodeForm, loaded: Any, values: Sequence[int], threads: int, allocate: object
    ) -> Callable[..., Any]:
        call: Callable[..., Any] = self._call(self._twin, form, values, threads)
        return call


class TwinBench:
    """A `tuner.benchmark_provider.Bench` on which all candidates are one; timed in this process, for real."""

    variants = ("c_generic", "c_specialised")

    def __init__(self, node: Node, rig: TwinRig, twins: int) -> None:
        self._twins = twins
        self._bench = NodeBench(node.form, torch.get_num_threads(), rig)

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        return (Knob("twin", tuple(range(self._twins)), 0, "another name of the same"),)

    def default(self, values: Sequence[int]) -> Config:
        return make_config({"twin": 0})

    def rank(self, values: Sequence[int]) -> None:
        return None

    def build(
        self, candidates: Sequence[Candidate], values: Sequence[int], others: Sequence[Sequence[int]] = ()
    ) -> list[Built | CandidateProblem]:
        found: list[Built | CandidateProblem] = []
        for candidate in candidates:
            record = KernelRecord(CompileKey(repr(candidate), "twin", "", ""), "twin", "", b"")
            self._bench.load(record.key.digest, record.name, record.binary)
            found.append(Built(candidate, record, 0.0))
        return found

    def complete(self, built: Built, values: Sequence[int], others: Sequence[Sequence[int]]) -> Built:
        return built

    def check(self, built: Built, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        return 1.0

    def has_passed(self, built: Built) -> bool:
        return False

    def note_passed(self, built: Built) -> None:
        return None

    def race(self, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        return self._bench.race([item.digest for item in built], tuple(values), rules)


def entry_of(session: Session, node: Node, values: tuple[int, ...], settings: Settings) -> Callable[..., Any]:
    """The default kernel of a node."""
    worker = WorkerProcess(memory_bytes=1 << 30, timeout_seconds=1.0)  # is never started: nothing is timed here
    threads = torch.get_num_threads()
    provider = BenchmarkProvider(CBackend(find_toolchain()), worker)
    bench = provider.bench(node.fusion_id, node.form, threads, bucket_of(values))
    (built,) = bench.build([Candidate(bench.variants[0], bench.default(values))], values)
    if isinstance(built, CandidateProblem):
        raise built
    record = built.record
    entry: Callable[..., Any] = session.kernels.catalogue.backends.cpu.load(
        record.key.digest, record.name, record.binary, CPU
    )
    return entry


def tests(
    session: Session, node: Node, rows: Sequence[int], tries: int, seconds: float, settings: Settings
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for size in rows:
        values = node.values[size]
        entry = entry_of(session, node, values, settings)
        twins = (("eager against eager", None), ("a kernel against itself", entry))
        asked = [(what, one, one, count, 0) for what, one in twins for count in TWINS]
        # The generic kernel may win, and the one with built-in sizes is that kernel: the exact bucket must get none.
        asked.append(("a kernel against itself with sizes built in", None, entry, 1, 1))
        for what, incumbent, twin, count, winners in asked:
            bench = TwinBench(node, TwinRig(incumbent, twin), count)
            row = {"test": what, "rows": size, "candidates": count}
            found.append(row | run_tries(settings, bench, node, values, tries, seconds, winners))
            print(line(found[-1]), flush=True)
    return found


def run_tries(
    settings: Settings, bench: TwinBench, node: Node, values: tuple[int, ...], tries: int, seconds: float, winners: int
) -> dict[str, Any]:
    """``winners``: decisions for a kernel that are right in each try; more are switches to a twin."""
    tuner, bucket = settings.tuner, bucket_of(values)
    limits = JobLimits(tuner.trials, tuner.rounds, tuner.margin, tuner.job_seconds)
    key = DecisionKey(node.fusion_id, bucket.label, "cpu", torch.get_num_threads(), "aa")
    request = TuneRequest(
        key, node.form.to_json(), bucket, (ObservedShape(values, CALLS),), CALLS, 100.0, estimated_speedup=1.0
    )
    done = switched = 0
    gains: list[float] = []
    reasons: Counter[str] = Counter()
    began = time.monotonic()
    while done < tries and time.monotonic() - began < seconds:
        decisions = Job(request, bench, limits).run().decisions  # type: ignore[arg-type]
        won = sum(d.reason == "won" for d in decisions)
        reasons[" and ".join(d.reason for d in decisions)] += 1
        switched += won > winners
        gains += [d.speedup for d in decisions[winners:] if won > winners]
        done += 1
    return {
        "tries": done,
        "switched": switched,
        "share": switched / done,
        "share_at_most": binomial_bound(switched, done),
        "outcomes": dict(reasons),
        "gains_of_switches": [round(g, 3) for g in sorted(gains)],
        "seconds": round(time.monotonic() - began, 1),
    }


def binomial_bound(hits: int, tries: int, tail: float = 0.05) -> float:
    """The largest share with which ``hits`` or fewer come up at least once in 1 / ``tail`` series of tries."""
    low, high = hits / tries, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        chance = sum(math.comb(tries, k) * middle**k * (1 - middle) ** (tries - k) for k in range(hits + 1))
        low, high = (middle, high) if chance > tail else (low, middle)
    return high


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {}
    switched, tries = (sum(r[what] for r in rows) for what in ("switched", "tries"))
    return {
        "switches": {
            "bar": SWITCH_BAR,
            "share": switched / tries,
            "share_at_most": binomial_bound(switched, tries),
            "worst_share": max(r["share"] for r in rows),
            "worst_share_at_most": max(r["share_at_most"] for r in rows),
            "tries": tries,
        }
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['test']}, {row['rows']} rows, {row['candidates']} candidates: {row['switched']} of {row['tries']} "
        f"switch ({row['share']:.2%}, at most {row['share_at_most']:.2%})"
    )


def main() -> int:
    options = parse(arguments(__doc__, "aa", quick="one size, few tries; proves nothing"))
    keep_freed_memory()  # of this process; the worker does so by itself
    began = time.monotonic()
    with tuning_session("aa") as (session, tuner):
        node = capture(session, CASE)
        sizes, tries, seconds = (CASE.rows[:1], 20, 1.5) if options.quick else (CASE.rows, TRIES, SECONDS)
        rows = tests(session, node, sizes, tries, seconds, tuner.settings)
        save(
            options.out,
            "aa",
            settings={n: getattr(tuner.settings.tuner, n) for n in ("trials", "rounds", "margin", "job_seconds")},
            bars=bars(rows),
            rows=rows,
        )
    print_end(bars(rows), [], options.out, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
