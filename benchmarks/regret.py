"""What the tuner's choices cost: chosen kernels against the best of the whole search space, bucket by bucket.

    python benchmarks/regret.py                          # all nodes, then the A/A tests: 8 minutes
    python benchmarks/regret.py --only softmax,rms_norm  # these nodes; the rest of the results file stays
    python benchmarks/regret.py --only aa                # the A/A tests alone
    python benchmarks/regret.py --quick                  # a trial of the benchmark itself

Bars on a CPU: regret within 5 % in 95 % of the buckets, with 10 % of the oracle's measurements; two identical
candidates switch in less than 1 % of tries.

A node is captured from a function by the same backend that scripts use. For each bucket (``small``: launch-bound,
``cache``: a few MiB, ``memory``: 64 MiB a tensor) the daemon's own loop decides, with default settings, as for a
script that waits; races are counted where it asks the worker for them. The oracle then builds every configuration of
the same knobs, with sizes as arguments and with sizes built in, and narrows them down in interleaved rounds. What
counts is a last race of chosen, best and eager in one process, which neither of them was chosen by: regret is the
chosen one's time over the best one's, round by round. Where both are the same binary, the bucket counts as within, and
its figure says what the race itself gets wrong. The best may be eager. Cuts into two kernels, which the loop
tries for nodes that gain little, are beyond the oracle's space.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine, summary
from patterns_rows import (
    Tensors,
    add_relu,
    affine_relu,
    cross_entropy,
    layer_norm_gelu,
    masked_softmax,
    rms_norm,
    rotary,
    swiglu,
)
from torch.nn import functional as F

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.knobs import Knob
from autofuse.db.store import Store
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import (
    EAGER,
    Bucket,
    Candidate,
    CompileKey,
    Config,
    Decision,
    DecisionKey,
    KernelRecord,
    ObservedShape,
    TuneRequest,
    make_config,
)
from autofuse.process_settings import apply_malloc
from autofuse.runtime.catalogue import DecisionTable
from autofuse.runtime.launch import make_launcher, make_unfused
from autofuse.runtime.session import Session, start_session
from autofuse.settings import Settings, load
from autofuse.tuner.backends import CBackend
from autofuse.tuner.bench import CpuRig, NodeBench
from autofuse.tuner.buckets import bucket_of, exact_bucket
from autofuse.tuner.cases import CheckCase, first_cases, full_cases
from autofuse.tuner.comparison import INTERVAL_TAIL, bounds, compare
from autofuse.tuner.job import WAVE, Job, JobLimits
from autofuse.tuner.serving import TuningLoop
from autofuse.tuner.timing import Call, RaceResult, RaceRules, WallSampler
from autofuse.tuner.worker_process import CandidateProblem, WorkerProcess
from autofuse.tuner.workshop import Built, NodeWorkshop, Workshop, is_specialised

BUCKETS = ("small", "cache", "memory")
CALLS = 1000  # of the shape, in the request: one that a script has used for a while, so that sizes may be built in
STAGES = ((3, 16), (9, 5), (25, 1))  # rounds of the oracle, and how many configurations are left after them
TOGETHER = 8  # configurations in one race of the oracle: outputs of all of them stay alive
FINAL_ROUNDS = 31
MOST_FINALS = 4  # races of FINAL_ROUNDS, until the interval is narrow
NARROW = 0.02
REGRET_BAR, SHARE_BAR, MEASUREMENTS_BAR, SWITCH_BAR = 1.05, 0.95, 0.10, 0.01
AA_TRIES, AA_SECONDS = 400, 7.0  # of each kind of A/A test, at most
TWINS = (1, 4)  # identical candidates beside the incumbent; 4 are as many as a deciding race has
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A function with one node of interest."""

    name: str
    function: Callable[..., Any]  # of the inputs, then the parameters
    inputs: Callable[[int], Tensors]  # of a number of rows, which varies
    parameters: Callable[[], Tensors]
    rows: tuple[int, ...]  # in each bucket
    phase: str = "inference"  # of the graph that has the node


@dataclass(frozen=True)
class Node:
    """A node as capture and planner made it."""

    fusion_id: str
    form: NodeForm
    values: dict[int, tuple[int, ...]]  # of its symbols, by number of rows


# ---- nodes ----------------------------------------------------------------------------------------------------


def full(count: int, *columns: int) -> Callable[[int], Tensors]:
    return lambda rows: tuple(torch.randn(rows, *columns) for _ in range(count))


def vectors(*sizes: int) -> Callable[[], Tensors]:
    return lambda: tuple(torch.randn(n) for n in sizes)


def angles(length: int) -> Callable[[], Tensors]:
    def tables() -> Tensors:
        turn = torch.arange(length).unsqueeze(1) * torch.exp(torch.arange(32) * (-math.log(10000.0) / 32))
        whole = torch.cat((turn, turn), -1)
        return whole.cos(), whole.sin()

    return tables


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean(-1)


def batch_norm_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.batch_norm(x, None, None, weight, bias, True))


def casts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """Several loop nests in one kernel, as the casts of autocast make them."""
    return x.to(torch.bfloat16), weight.to(torch.bfloat16), bias.to(torch.bfloat16)


_ROWS = (16, 512, 16384)  # of 1024 columns
CASES: tuple[Case, ...] = (
    Case("add+relu", add_relu, full(2, 1024), tuple, _ROWS),
    Case("affine+relu", affine_relu, full(1, 1024), vectors(1024, 1024), _ROWS),
    Case("swiglu", swiglu, full(2, 1024), tuple, _ROWS),
    Case("rotary", rotary, full(1, 8, 256, 64), angles(256), (2, 8, 128)),
    Case("casts of three sizes", casts, full(1, 1024), vectors(512 * 1024, 1000), _ROWS),
    Case("mean of squares", mean_square, full(1, 1024), tuple, _ROWS),
    Case("rms_norm", rms_norm, full(1, 1024), vectors(1024), _ROWS),
    Case("batch_norm+relu", batch_norm_relu, full(1, 64, 28, 28), vectors(64, 64), (2, 16, 320)),
    Case("cross_entropy", cross_entropy,
         lambda rows: (torch.randn(rows, 8191), torch.randint(8191, (rows,))), tuple, (4, 64, 2048)),
    Case("swiglu backward", swiglu, full(2, 1024), tuple, _ROWS, "backward"),
    Case("layer_norm+gelu backward", layer_norm_gelu, full(1, 1024), vectors(1024, 1024), _ROWS, "backward"),
    Case("softmax+scale+mask", masked_softmax, full(1, 8, 128, 128),
         lambda: (torch.triu(torch.ones(128, 128, dtype=torch.bool), 1),), (2, 8, 128)),
    Case("layer_norm+gelu", layer_norm_gelu, full(1, 1024), vectors(1024, 1024), _ROWS),
)  # fmt: skip


def capture(session: Session, case: Case) -> Node:
    """The case's largest node, with sizes from real calls. Raises ValueError where the planner made none."""
    torch._dynamo.reset()
    session.routers.clear()
    trains = case.phase != "inference"
    compiled = torch.compile(case.function, backend="autofuse")
    found: dict[int, tuple[int, ...]] = {}
    largest = None
    for rows in case.rows:
        inputs, parameters = case.inputs(rows), case.parameters()
        if trains:
            inputs, parameters = ([t.requires_grad_() for t in ts] for ts in (inputs, parameters))
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.set_grad_enabled(trains):
            result = compiled(*inputs, *parameters)
            if trains:
                result.backward(torch.ones_like(result))
        plans = [p for r in session.routers if r.phase == case.phase for p in r.all_plans()]
        nodes = [n for p in plans for n in p.nodes if not n.slot.is_group]
        if not nodes:
            raise ValueError(f"{case.name}: expected a node in the {case.phase} graph, found none")
        size = max(len(n.form.operations) for n in nodes)
        largest = next(n for n in reversed(nodes) if len(n.form.operations) == size)
        found[rows] = largest.values
    assert largest is not None
    return Node(largest.fusion_id, largest.form, found)


# ---- what the tuner decides -----------------------------------------------------------------------------------


@dataclass
class Measured:
    """What was timed: different configurations, samples of them, and of eager beside them."""

    candidates: set[Candidate] = field(default_factory=set)
    samples: int = 0
    eager_samples: int = 0
    seconds: float = 0.0

    def add(self, built: Sequence[Built], result: RaceResult) -> None:
        self.candidates |= {item.candidate for item in built}
        self.eager_samples += len(result.samples[0])
        self.samples += sum(map(len, result.samples[1:]))

    def to_json(self) -> dict[str, Any]:
        return {
            "configurations": len(self.candidates),
            "samples": self.samples,
            "eager_samples": self.eager_samples,
            "seconds": round(self.seconds, 2),
        }


@contextlib.contextmanager
def counted() -> Iterator[Measured]:
    """Counts the races that are asked of the worker meanwhile."""
    measured, race = Measured(), NodeWorkshop.race

    def counting(self: NodeWorkshop, built: Sequence[Built], values: Sequence[int], rules: RaceRules) -> RaceResult:
        result = race(self, built, values, rules)
        measured.add(built, result)
        return result

    NodeWorkshop.race = counting  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        yield measured
    finally:
        measured.seconds = time.monotonic() - began
        NodeWorkshop.race = race  # type: ignore[method-assign]


class Tuner:
    """The daemon's loop in this process, on a store of its own."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self.settings = settings
        self._session = session
        self._loop = TuningLoop(settings, is_urgent=lambda: True, nice=settings.tuner.nice)

    def decide(self, node: Node, values: tuple[int, ...]) -> tuple[Decision, KernelRecord | None, Measured]:
        """What a script would run at these sizes, its kernel, and what was measured for it."""
        place = self._session.tunable(CPU)
        assert place is not None
        bucket = bucket_of(values)
        request = TuneRequest(
            key=DecisionKey(node.fusion_id, bucket.label, place.key, place.threads, self._session.versions),
            node=node.form.to_json(),
            bucket=bucket,
            shapes=(ObservedShape(values, CALLS),),
            calls=CALLS,
            unfused_us=100.0,
            estimated_speedup=self._session.estimates.get(node.fusion_id, 1.0),
        )
        with Store.open(self.settings.run.store) as store:
            store.add_requests([request])
            with counted() as measured:
                self._loop.drain(lambda done, total: None)
            table = DecisionTable()
            table.update(row.decision for row in store.decision_history(node.fusion_id))
            decision = table.find(node.fusion_id, values, place)
            if decision is None:
                failed = [row.message for row in store.requests(node.fusion_id)]
                raise ValueError(f"expected a decision, found none: {failed}")
            return decision, store.get_kernel(decision.compile_key) if decision.compile_key else None, measured

    def close(self) -> None:
        self._loop.close()


# ---- what the oracle finds ------------------------------------------------------------------------------------


def whole_space(bench: NodeWorkshop, values: Sequence[int]) -> list[Candidate]:
    """Every configuration, with sizes as arguments and with sizes built in."""
    knobs = bench.knobs(values)
    choices = itertools.product(*(knob.choices for knob in knobs))
    configs = [make_config({k.name: c for k, c in zip(knobs, choice, strict=True)}) for choice in choices]
    variants = bench.variants if bench.form.symbols else bench.variants[1:]
    return [Candidate(variant, config) for variant in variants for config in configs]


def at_length(rounds: int) -> RaceRules:
    """So many rounds of all, whoever leads."""
    return RaceRules(rounds, rounds, 60.0, 0.0, least_rounds=rounds, drop_factor=math.inf)


@dataclass
class Oracle:
    """The best of a search space, by measuring all of it."""

    best: Built | None  # None: eager
    configurations: int
    binaries: int  # different ones among them
    wrong: list[str]
    leaders: list[dict[str, Any]]  # of the last stage, the best first
    measured: Measured


def consult(bench: NodeWorkshop, bucket: Bucket, values: tuple[int, ...]) -> Oracle:
    """Narrow all configurations down, in interleaved rounds with eager."""
    candidates = whole_space(bench, values)
    smallest = [case.values for case in first_cases(bench.form, bucket, values)]
    wrong: list[str] = []
    rivals: dict[str, Built] = {}
    speedups: dict[str, float] = {}
    ranked: list[Built] = []
    with counted() as measured:
        for built in bench.build(candidates, values, smallest):
            if isinstance(built, CandidateProblem):
                wrong.append(f"{built.status}: {built}")
            else:
                rivals.setdefault(built.digest, built)
        binaries, left = len(rivals), list(rivals.values())
        for rounds, kept in STAGES:
            if rounds == STAGES[-1][0]:
                left = [built for built in left if _is_right(bench, bucket, built, values, wrong)]
            waves = -(-len(left) // TOGETHER)
            for wave in (left[n::waves] for n in range(waves)):  # of equal sizes
                samples = bench.race(wave, values, at_length(rounds)).samples
                speedups |= {b.digest: compare(samples[0], s).speedup for b, s in zip(wave, samples[1:], strict=True)}
            ranked = sorted(left, key=lambda built: -speedups[built.digest])
            left = ranked[:kept]
    leaders = [_named(built) | {"over_eager": speedups[built.digest]} for built in ranked]
    best = left[0] if left and speedups[left[0].digest] > 1.0 else None
    return Oracle(best, len(candidates), binaries, wrong, leaders, measured)


def _is_right(bench: NodeWorkshop, bucket: Bucket, built: Built, values: tuple[int, ...], wrong: list[str]) -> bool:
    """Whether it gives right results, on sizes that it is made for."""
    own = exact_bucket(values) if is_specialised(built.candidate) else bucket
    cases: list[CheckCase] = [*first_cases(bench.form, own, values), *full_cases(bench.form, own, (), values)[:1]]
    try:
        bench.check(built, cases, 0.0, len(cases))
    except CandidateProblem as problem:
        wrong.append(f"{dict(built.candidate.config)}: {problem.status}: {problem}")
        return False
    return True


# ---- a bucket -------------------------------------------------------------------------------------------------


def measure(tuner: Tuner, shop: Workshop, case: Case, node: Node, label: str, rows: int) -> dict[str, Any]:
    values = node.values[rows]
    bucket = bucket_of(values)
    decision, kernel, measured = tuner.decide(node, values)
    bench = shop.bench(node.fusion_id, node.form, torch.get_num_threads(), bucket)
    oracle = consult(bench, bucket, values)
    chosen = Built(decision.candidate, kernel, 0.0) if kernel is not None else None
    runners = [built for built in (chosen, oracle.best) if built is not None]
    samples: list[list[float]] = [[] for _ in range(1 + len(runners))]
    regret: dict[str, float] = {}
    for _ in range(MOST_FINALS):
        for kept, new in zip(samples, bench.race(runners, values, at_length(FINAL_ROUNDS)).samples, strict=True):
            kept += new
        ours = samples[1] if chosen is not None else samples[0]
        best = samples[-1] if oracle.best is not None else samples[0]
        regret = ratio(ours, best)
        if regret["high"] - regret["low"] <= NARROW:
            break
    is_same = (chosen.digest if chosen else EAGER) == (oracle.best.digest if oracle.best else EAGER)
    return {
        "node": case.name,
        "bucket": label,
        "rows": rows,
        "symbol_values": list(values),
        "operations": [op.short_name for op in node.form.operations],
        "configurations": oracle.configurations,
        "binaries": oracle.binaries,
        "chosen": _named(chosen) | {"reason": decision.reason, "detail": decision.detail, "us": _us(ours)},
        "best": _named(oracle.best) | {"us": _us(best)},
        "eager_us": _us(samples[0]),
        "regret": regret,
        "is_same_binary": is_same,
        "tuner": measured.to_json(),
        "oracle": oracle.measured.to_json() | {"flat_samples": oracle.binaries * FINAL_ROUNDS},
        "leaders": oracle.leaders,
        "not_timed": oracle.wrong,
    }


def _named(built: Built | None) -> dict[str, Any]:
    if built is None:
        return {"variant": EAGER, "configuration": {}}
    return {"variant": built.candidate.variant, "configuration": dict(built.candidate.config)}


def _us(samples: Sequence[float]) -> dict[str, float]:
    return summary([s * 1e6 for s in samples])


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """over / under, round by round."""
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    low, high = bounds(ratios, INTERVAL_TAIL)
    low, high = max(low, ratios[0]), min(high, ratios[-1])  # of few rounds: their range
    return {"median": statistics.median(ratios), "low": low, "high": high, "rounds": len(ratios)}


# ---- A/A ------------------------------------------------------------------------------------------------------


class EvenSampler(WallSampler):
    """A control: as many calls in each sample of one callable as of another, however the first calls went."""

    def prepare(self, calls: Sequence[Call]) -> None:
        super().prepare(calls)
        self._repeats = [max(self._repeats)] * len(calls)


class WarmSampler(EvenSampler):
    """A control: besides, one call before each sample that is not timed."""

    def round(self, order: Sequence[int]) -> list[float]:
        found = []
        for index in order:
            self._calls[index]()
            found += super().round([index])
        return found


CONTROLS: dict[str, Callable[[], WallSampler]] = {"even samples": EvenSampler, "even and warm samples": WarmSampler}


class TwinRig(CpuRig):
    """Whatever is loaded is the same thing: eager's operations, or one kernel."""

    def __init__(
        self,
        incumbent: Callable[..., Any] | None,
        twin: Callable[..., Any] | None,
        sampler: Callable[[], WallSampler] = WallSampler,
    ) -> None:
        """Entries of kernels; None: eager."""
        self._incumbent = incumbent
        self._twin = twin
        self._sampler = sampler

    def sampler(self) -> WallSampler:
        return self._sampler()

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
    """A job's bench (`tuner.workshop.Bench`) on which all candidates are one; timed in this process, for real."""

    variants = ("c_generic", "c_specialised")

    def __init__(self, node: Node, rig: TwinRig, twins: int) -> None:
        self._twins = twins
        self._bench = NodeBench(node.form, torch.get_num_threads(), rig)

    def knobs(self, values: Sequence[int]) -> tuple[Knob, ...]:
        return (Knob("twin", tuple(range(self._twins)), 0, "another name of the same"),)

    def default(self, values: Sequence[int]) -> Config:
        return make_config({"twin": 0})

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


def aa_tests(
    tuner: Tuner, session: Session, node: Node, rows: Sequence[int], tries: int, seconds: float, left_out: list[str]
) -> list[dict[str, Any]]:
    """Whole jobs on candidates that are identical: how many of them switch. With controls, at each size."""
    found: list[dict[str, Any]] = []
    for size in rows:
        values = node.values[size]
        decision, kernel, _ = tuner.decide(node, values)
        if kernel is None:
            left_out.append(f"aa: {size} rows: no kernel has won to be tested: {decision.reason}: {decision.detail}")
            continue
        entry = session.backends.cpu.load(kernel.key.digest, kernel.name, kernel.binary, CPU)
        twins = (("eager against eager", None), ("a kernel against itself", entry))
        tests = [(what, "", one, one, count, 0, WallSampler) for what, one in twins for count in TWINS]
        # Eager loses, the kernel with built-in sizes is the generic winner itself: the exact bucket must get none.
        tests.append(("a kernel against itself with sizes built in", "", None, entry, 1, 1, WallSampler))
        for name, sampler in CONTROLS.items():
            tests += [(what, name, one, one, TWINS[-1], 0, sampler) for what, one in twins]
        for what, control, incumbent, twin, count, winners, sampler in tests:
            bench = TwinBench(node, TwinRig(incumbent, twin, sampler), count)
            row = {"test": what, "rows": size, "candidates": count, "control": control}
            found.append(row | _tries(tuner, bench, node, values, tries, seconds, winners))
            print(aa_line(found[-1]), flush=True)
    return found


def _tries(
    tuner: Tuner, bench: TwinBench, node: Node, values: tuple[int, ...], tries: int, seconds: float, winners: int
) -> dict[str, Any]:
    """``winners``: decisions for a kernel that are right in each try; more are switches to a twin."""
    settings, bucket = tuner.settings.tuner, bucket_of(values)
    limits = JobLimits(settings.trials, settings.rounds, settings.margin, settings.job_seconds)
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


# ---- the run --------------------------------------------------------------------------------------------------


def bars(rows: Sequence[dict[str, Any]], aa: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rows:
        # A kernel is no choice away from itself: what it takes in two places of one race is that race's error.
        within = [r for r in rows if r["is_same_binary"] or r["regret"]["median"] <= REGRET_BAR]
        itself = sorted(r["regret"]["median"] for r in rows if r["is_same_binary"])
        tuner, oracle = ([r[who] for r in rows] for who in ("tuner", "oracle"))
        timed = sum(t["samples"] for t in tuner)
        found["regret"] = {
            "bar": SHARE_BAR,
            "share_within_5_percent": len(within) / len(rows),
            "buckets": len(rows),
            "beyond": [
                f"{r['node']} {r['bucket']}: {r['regret']['median']:.3f} "
                f"({r['regret']['low']:.3f} to {r['regret']['high']:.3f})"
                for r in rows
                if r not in within
            ],
            "beyond_for_certain": sum(r["regret"]["low"] > REGRET_BAR for r in rows if r not in within),
            "same_binary_as_the_best": len(itself),
            "same_binary_against_itself": [itself[0], itself[-1]] if itself else [],
            "geometric_mean": math.exp(statistics.fmean(math.log(r["regret"]["median"]) for r in rows)),
        }
        found["measurements"] = {
            "bar": MEASUREMENTS_BAR,
            "configurations_a_bucket": statistics.median(r["configurations"] for r in rows),
            "most_configurations": max(r["configurations"] for r in rows),
            "configurations_that_the_bar_allows": MEASUREMENTS_BAR
            * statistics.median(r["configurations"] for r in rows),
            "of_configurations": sum(t["configurations"] for t in tuner) / sum(r["configurations"] for r in rows),
            "of_flat_samples": timed / sum(o["flat_samples"] for o in oracle),
            "of_samples_narrowed_down": timed / sum(o["samples"] for o in oracle),
            "tuner_samples": timed,
            "tuner_seconds": sum(t["seconds"] for t in tuner),
            "oracle_seconds": sum(o["seconds"] for o in oracle),
        }
        allowed = found["measurements"]["configurations_that_the_bar_allows"]
        if found["measurements"]["of_configurations"] > MEASUREMENTS_BAR and allowed < WAVE:
            found["measurements"]["bound_by"] = (
                f"the spaces are small: 10 % of the median {found['measurements']['configurations_a_bucket']:g} "
                f"configurations are {allowed:.1f}; the search begins with {WAVE}, built and screened together"
            )
    real, controls = [r for r in aa if not r["control"]], [r for r in aa if r["control"]]
    if real:
        found["aa"] = {
            "bar": SWITCH_BAR,
            "share": sum(r["switched"] for r in real) / sum(r["tries"] for r in real),
            "worst_share": max(r["share"] for r in real),
            "worst_share_at_most": max(r["share_at_most"] for r in real),
            "tries": sum(r["tries"] for r in real),
        }
        for name in dict.fromkeys(r["control"] for r in controls):
            under = [r for r in controls if r["control"] == name]
            # The same tests without the control, at the same sizes.
            same = {(r["test"], r["rows"], r["candidates"]) for r in under}
            plain = [r for r in real if (r["test"], r["rows"], r["candidates"]) in same]
            found["aa"][name] = {
                "share": sum(r["switched"] for r in under) / sum(r["tries"] for r in under),
                "share_without": sum(r["switched"] for r in plain) / sum(r["tries"] for r in plain),
            }
    return found


def save(
    path: Path,
    commands: Sequence[str],
    settings: Settings,
    rows: list[dict[str, Any]],
    aa: list[dict[str, Any]],
    out: list[str],
) -> None:
    document = {
        "benchmark": "regret",
        "command": "; ".join(commands),
        "machine": machine(),
        "settings": {n: getattr(settings.tuner, n) for n in ("trials", "rounds", "margin", "job_seconds")}
        | {
            "calls": CALLS,
            "oracle_stages": STAGES,
            "final_rounds": FINAL_ROUNDS,
            "malloc": "kept, as the worker has it",
        },
        "bars": bars(rows, aa),
        "rows": rows,
        "aa": aa,
        "left_out": out,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def line(row: dict[str, Any]) -> str:
    r, chosen, best = row["regret"], row["chosen"], row["best"]
    same = "the same binary" if row["is_same_binary"] else f"{best['variant']} {_text(best['configuration'])}"
    return (
        f"{row['node']:26s}{row['bucket']:8s}{row['eager_us']['median']:10.1f}{chosen['us']['median']:10.1f}"
        f"{best['us']['median']:10.1f}  {r['median']:.3f} ({r['low']:.3f} to {r['high']:.3f})"
        f"{row['tuner']['configurations']:4d} of{row['configurations']:4d}"
        f"{row['tuner']['samples']:6d} of{row['oracle']['flat_samples']:6d}  "
        f"{chosen['variant']} {_text(chosen['configuration'])}; best: {same}"
    )


def aa_line(row: dict[str, Any]) -> str:
    control = f", {row['control']}" if row["control"] else ""
    return (
        f"A/A {row['test']}, {row['rows']} rows, {row['candidates']} candidates{control}: "
        f"{row['switched']} of {row['tries']} switch ({row['share']:.2%}, at most {row['share_at_most']:.2%})"
    )


def _text(configuration: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def command_line() -> str:
    """How this run was asked for; where it writes to does not matter."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings of names of nodes, or aa, separated by commas")
    parser.add_argument("--quick", action="store_true", help="two nodes, small sizes, few tries; proves nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "regret.json")
    return parser.parse_args()


def main() -> int:
    options = parse()
    wanted = [w.strip() for w in options.only.split(",") if w.strip()] or (["add", "rms", "aa"] * options.quick)
    names = [*(case.name for case in CASES), "aa"]
    unknown = [w for w in wanted if not any(n.startswith(w) for n in names)]
    if unknown:
        sys.exit(f"--only: expected beginnings of {', '.join(names)}; found {', '.join(unknown)}")
    asked = [n for n in names if not wanted or any(n.startswith(w) for w in wanted)]
    folder = Path(tempfile.mkdtemp(prefix="autofuse-regret-"))
    out = Path(tempfile.gettempdir()) / "regret-quick.json" if options.quick else options.out
    before = json.loads(out.read_text()) if options.only and out.exists() else {"rows": [], "aa": [], "left_out": []}
    commands = [*([before["command"]] if "command" in before else []), command_line()]
    rows = [r for r in before["rows"] if r["node"] not in asked]
    aa = [] if "aa" in asked else before["aa"]
    left_out: list[str] = [text for text in before["left_out"] if text.partition(":")[0] not in asked]

    apply_malloc()  # of this process, for the A/A tests; the worker does so by itself
    values = {
        "run.store": folder / "store.sqlite3",
        "run.tune": "off",
        "run.quiet": True,
        "tuner.budget_seconds": 3600.0,
    }
    settings = load(cli=values, environ={}, cwd=folder)
    session = start_session(settings, "benchmarks/regret.py")
    tuner = Tuner(settings, session)
    worker = WorkerProcess(memory_bytes=8 << 30, timeout_seconds=120.0, nice=settings.tuner.nice)
    shop = Workshop(CBackend(find_toolchain()), worker, compilers=lambda: 2)
    began = time.monotonic()
    print("us of eager, chosen, best; regret; configurations and samples of the tuner, of all")
    try:
        for case in CASES:
            if case.name not in asked:
                continue
            try:
                node = capture(session, case)
            except ValueError as problem:
                left_out.append(str(problem))
                continue
            for label, size in list(zip(BUCKETS, case.rows, strict=True))[: 1 if options.quick else None]:
                try:
                    rows.append(measure(tuner, shop, case, node, label, size))
                except (ValueError, CandidateProblem) as problem:
                    left_out.append(f"{case.name}: {label}: {problem}")
                    continue
                save(out, commands, settings, rows, aa, left_out)
                print(line(rows[-1]), flush=True)
        if "aa" in asked:
            node = capture(session, CASES[0])
            tries, seconds = (20, 1.5) if options.quick else (AA_TRIES, AA_SECONDS)
            aa = aa_tests(tuner, session, node, CASES[0].rows[: 1 if options.quick else 2], tries, seconds, left_out)
    finally:
        save(out, commands, settings, rows, aa, left_out)
        tuner.close()
        worker.kill()
        session.finish(0)
        shutil.rmtree(folder, ignore_errors=True)
    for what, result in bars(rows, aa).items():
        print(f"{what}: {result}")
    for text in left_out:
        print(f"left out: {text}")
    print(f"written to {out} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
