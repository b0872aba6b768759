"""What the tuner's choices cost: chosen kernels against the best of the whole search space, bucket by bucket.

    python benchmarks/regret.py                          # all nodes: 7 minutes
    python benchmarks/regret.py --only softmax,rms_norm  # these nodes; the rest of the results file stays
    python benchmarks/regret.py --quick                  # a trial of the benchmark itself

Bars on a CPU: regret within 5 % in 95 % of the buckets, with 10 % of the oracle's measurements.

For each node and bucket (``small``: launch-bound, ``cache``: a few MiB, ``memory``: 64 MiB a tensor) the daemon's own
loop decides (`nodes.py`). The oracle then builds every configuration of the same knobs, with sizes as arguments and
with sizes built in, and narrows them down in interleaved rounds. What counts are last races of chosen, best and eager
in one process, which neither of them was chosen by, each with memory of its own: regret is the chosen one's time over
the best one's, round by round. Where both are the same binary, the bucket counts as within, and its figure says what
the races themselves get wrong. The best may be eager. Cuts into two kernels, which the loop tries for nodes that gain
little, are beyond the oracle's space.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import arguments, chosen, command_line, parse, print_end, ratio, save, summary
from nodes import CALLS, Case, Measured, Node, Tuner, angles, capture, counted, full, tuning_session, vectors
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
from autofuse.ir.buckets import bucket_of, exact_bucket
from autofuse.ir.records import EAGER, Bucket, Candidate, make_config
from autofuse.settings.layers import Settings
from autofuse.tuner.backends import CBackend
from autofuse.tuner.benchmark_provider import BenchmarkProvider, Built, NodeBenchmarks, is_specialised
from autofuse.tuner.cases import CheckCase, first_cases, full_cases
from autofuse.tuner.comparison import compare
from autofuse.tuner.outcome import WAVE
from autofuse.tuner.timing import RaceRules
from autofuse.tuner.worker_process import CandidateProblem, WorkerProcess

BUCKETS = ("small", "cache", "memory")
STAGES = ((3, 16), (9, 5), (25, 1))  # rounds of the oracle, and how many configurations are left after them
TOGETHER = 8  # configurations in one race of the oracle: outputs of all of them stay alive
FINAL_ROUNDS = 16
FLAT_ROUNDS = 31  # that would tell all configurations apart without narrowing them down
FINALS = (2, 8)  # races of FINAL_ROUNDS, at least, and at most until the interval is narrow
NARROW = 0.02
REGRET_BAR, SHARE_BAR, MEASUREMENTS_BAR = 1.05, 0.95, 0.10


# ---- nodes ----------------------------------------------------------------------------------------------------


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


# ---- what the oracle finds ------------------------------------------------------------------------------------


def whole_space(bench: NodeBenchmarks, values: Sequence[int]) -> list[Candidate]:
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
    screened: list[dict[str, Any]]  # every binary, by the stage that it came to
    measured: Measured


def consult(bench: NodeBenchmarks, bucket: Bucket, values: tuple[int, ...]) -> Oracle:
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
    screened = [_named(built) | {"over_eager": speedups[digest]} for digest, built in rivals.items()]
    return Oracle(best, len(candidates), binaries, wrong, leaders, screened, measured)


def _is_right(bench: NodeBenchmarks, bucket: Bucket, built: Built, values: tuple[int, ...], wrong: list[str]) -> bool:
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


def measure(tuner: Tuner, provider: BenchmarkProvider, case: Case, node: Node, label: str, rows: int) -> dict[str, Any]:
    values = node.values[rows]
    bucket = bucket_of(values)
    decision, kernel, measured = tuner.decide(node, values)
    bench = provider.bench(node.fusion_id, node.form, torch.get_num_threads(), bucket)
    oracle = consult(bench, bucket, values)
    chosen = Built(decision.candidate, kernel, 0.0) if kernel is not None else None
    runners = [built for built in (chosen, oracle.best) if built is not None]
    samples: list[list[float]] = [[] for _ in range(1 + len(runners))]
    regret: dict[str, float] = {}
    for number in range(FINALS[1]):
        turn = 1 if number % 2 == 0 else -1  # what favours a callable for a whole race favours the other in the next
        found = bench.race(runners[::turn], values, at_length(FINAL_ROUNDS)).samples
        for kept, new in zip(samples, [found[0], *found[1:][::turn]], strict=True):
            kept += new
        ours = samples[1] if chosen is not None else samples[0]
        best = samples[-1] if oracle.best is not None else samples[0]
        regret = ratio(ours, best)
        if number + 1 >= FINALS[0] and regret["high"] - regret["low"] <= NARROW:
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
        "oracle": oracle.measured.to_json() | {"flat_samples": oracle.binaries * FLAT_ROUNDS},
        "leaders": oracle.leaders,
        "screened": oracle.screened,
        "not_timed": oracle.wrong,
    }


def _named(built: Built | None) -> dict[str, Any]:
    if built is None:
        return {"variant": EAGER, "configuration": {}}
    return {"variant": built.candidate.variant, "configuration": dict(built.candidate.config)}


def _us(samples: Sequence[float]) -> dict[str, float]:
    return summary([s * 1e6 for s in samples])


# ---- the run --------------------------------------------------------------------------------------------------


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
    return found


def keep(path: Path, commands: Sequence[str], settings: Settings, rows: list[dict[str, Any]], out: list[str]) -> None:
    changed = {n: getattr(settings.tuner, n) for n in ("trials", "rounds", "margin", "job_seconds")}
    ours = {"calls": CALLS, "oracle_stages": STAGES, "final_rounds": FINAL_ROUNDS, "finals": FINALS}
    save(
        path,
        "regret",
        command="; ".join(commands),
        settings=changed | ours | {"malloc": "kept, as the worker has it"},
        bars=bars(rows),
        rows=rows,
        left_out=out,
    )


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


def _text(configuration: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def main() -> int:
    options = parse(arguments(__doc__, "regret", quick="two nodes, small sizes; proves nothing", only="nodes"))
    asked = chosen(options.only, [case.name for case in CASES], "add,rms" if options.quick else "")
    before = json.loads(options.out.read_text()) if options.only and options.out.exists() else {}
    commands = [*([before["command"]] if before else []), command_line()]
    rows = [r for r in before.get("rows", ()) if r["node"] not in asked]
    left_out: list[str] = [text for text in before.get("left_out", ()) if text.partition(":")[0] not in asked]
    began = time.monotonic()
    print("us of eager, chosen, best; regret; configurations and samples of the tuner, of all")
    with tuning_session("regret") as (session, tuner):
        worker = WorkerProcess(memory_bytes=8 << 30, timeout_seconds=120.0)
        provider = BenchmarkProvider(CBackend(find_toolchain()), worker, compilers=lambda: 2)
        try:
            for case in (case for case in CASES if case.name in asked):
                try:
                    node = capture(session, case)
                except ValueError as problem:
                    left_out.append(str(problem))
                    continue
                for label, size in list(zip(BUCKETS, case.rows, strict=True))[: 1 if options.quick else None]:
                    try:
                        rows.append(measure(tuner, provider, case, node, label, size))
                    except (ValueError, CandidateProblem) as problem:
                        left_out.append(f"{case.name}: {label}: {problem}")
                        continue
                    keep(options.out, commands, tuner.settings, rows, left_out)
                    print(line(rows[-1]), flush=True)
        finally:
            keep(options.out, commands, tuner.settings, rows, left_out)
            worker.kill()
    print_end(bars(rows), left_out, options.out, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
