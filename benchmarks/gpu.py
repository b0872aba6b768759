"""Correctness and speed of routed kernels on a GPU, beside eager and torch.compile.

    python benchmarks/gpu.py                      # all of it, within 8 minutes
    python benchmarks/gpu.py --only softmax,trap  # sections (check, table, steps, ...) or cases, or both
    python benchmarks/gpu.py --device cpu --quick # a trial of the benchmark itself, without a GPU

check  every case of tests/cases.py in float32, bfloat16 and float16 against float64, by the tuner's rule; then torch's
       own attention in training, as autofuse calls it
table  memory-bound cases, all variants side by side: time, bytes a second, share of what a copy reaches
steps  optimizers' steps beside torch's foreach and fused ones
trap   the first call on a small shape, then a large one: who is slow because of the first
host   host time of a routed launch (benchmarks/launch.py)
lm     examples/train_lm.py end to end, each variant in a process of its own

Kernels of autofuse are tuned by its own daemon in `wait` mode, into a store of this run: what is timed is what a user
gets. Each section has a share of the time; what does not fit is named at the end and in the results, which are written
to benchmarks/results/gpu.json after each row. Without a GPU: exit code 2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# For the table of cases, which the tests share; spawned processes get it too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gpu_attention
import gpu_checks
import torch
from common import RESULTS
from gpu_cases import CASES, QUICK_SIZES, SIZES, SMALL_FIRST, TRAPS, SpeedCase
from gpu_lm import VARIANTS, run_variant
from gpu_measure import MODES, QUICK_MODES, ROUNDS, Benchmark, Clock, measure
from gpu_rig import CpuRunner, DeviceRunner, GpuRunner, copy_bandwidth
from gpu_steps import steps

from autofuse.codegen.triton.key import find_triton
from autofuse.codegen.triton.targets import target_of
from autofuse.daemon import control
from autofuse.errors import CompilerError
from autofuse.gpu.devices import gpu_device
from autofuse.sessions import start_session
from autofuse.settings.layers import Settings, load

SHARES = {"check": 0.15, "table": 0.37, "steps": 0.08, "trap": 0.09, "host": 0.04, "lm": 0.27}  # of the time
QUICK_CHECKS = ("unary_exp", "add_bias_gelu", "softmax", "layer_norm_backward")


# ---- check ----------------------------------------------------------------------------------------------


def check(run: Benchmark) -> None:
    target = None if run.rig.device.type == "cpu" else target_of(gpu_device(run.rig.device.index).isa)
    wanted = gpu_checks.checks(QUICK_CHECKS if run.is_quick else ())
    rows = run.rows("check")
    known = gpu_checks.right_rows(json.loads(run.checked.read_text())) if run.checked else {}
    for built in gpu_checks.build_all(wanted, target, run.clock.left, known):
        key = built.check.case, built.check.dtype
        rows.append(known[key] if built.is_known else gpu_checks.verify(built, run.rig.device))
        if len(rows) % 20 == 0:
            run.save()
    took = gpu_checks.seconds_by_phase(rows)
    rows += gpu_attention.rows(run.rig.device)
    done = {(row["case"], row["dtype"]) for row in rows}
    missing = [f"{c.case} {c.dtype}" for c in wanted if (c.case, c.dtype) not in done]
    run.left_out += [f"check: {name}" for name in missing]
    counts = {outcome: sum(r["outcome"] == outcome for r in rows) for outcome in sorted({r["outcome"] for r in rows})}
    run.sections["check"] |= {"counts": counts, "seconds": took}
    print(f"check: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}, {len(missing)} left out")
    print(f"  {', '.join(f'{seconds} s to {phase}' for phase, seconds in took.items())}, summed over the processes")
    for row in rows:
        if row["outcome"] not in ("right", "refused"):
            print(f"  {row['case']} {row['dtype']}: {row['outcome']}: {row['detail'].splitlines()[0][:200]}")


# ---- table ----------------------------------------------------------------------------------------------


def table(run: Benchmark) -> None:
    print(f"copying reaches {run.copy_bytes_per_second / 1e9:.0f} GB/s")
    for size in run.sizes:
        print(f"\n{size.name}: {size.rows} x {size.columns} {str(size.dtype).removeprefix('torch.')}, device us")
        print(f"{'':28s}" + "".join(f"{mode:>14s}" for mode in run.modes) + "   share of a copy")
        for case in run.cases:
            if run.clock.left() < 0:
                run.left_out.append(f"table: {case.name} {size.name}")
                continue
            try:
                row = measure(run, case, size)
            except Exception as error:
                run.leave_out(f"table: {case.name} {size.name}", error)
                continue
            run.rows("table").append(row)
            summarise(run)
            run.save()
            print(line(row, run.modes), flush=True)
    summarise(run)


def line(row: dict[str, Any], modes: Sequence[str]) -> str:
    text = f"{row['case']:28s}"
    for mode in modes:
        found = row["modes"].get(mode)
        text += f"{found['device_us']['median']:14.1f}" if found else f"{'-':>14s}"
    best = row["modes"].get("autofuse")
    if best:
        text += f"   {best['share_of_copy']:6.1%}   {best.get('nodes_fused', '')} nodes fused"
    for mode, error in row["errors"].items():
        text += f"\n    {mode}: {error.splitlines()[0][:160]}"
    return text


def summarise(run: Benchmark) -> None:
    """Geometric means of the gain over each other variant, over the rows that both are in."""
    rows = run.rows("table")
    gains = {}
    for mode in run.modes:
        ratios = [
            r["modes"][mode]["device_us"]["median"] / r["modes"]["autofuse"]["device_us"]["median"]
            for r in rows
            if mode != "autofuse" and mode in r["modes"] and "autofuse" in r["modes"]
        ]
        if ratios:
            gains[mode] = {"geometric_mean": math.exp(statistics.fmean(map(math.log, ratios))), "rows": len(ratios)}
    shares = [
        r["modes"]["autofuse"]["share_of_copy"]
        for r in rows
        if "autofuse" in r["modes"] and r["rows"] * r["columns"] * (2 if "16" in r["dtype"] else 4) >= 64 << 20
    ]
    run.sections["table"]["autofuse_over"] = gains
    run.sections["table"]["least_share_of_copy_from_64_MiB"] = min(shares, default=None)


# ---- trap, host, lm ---------------------------------------------------------------------------------------


def trap(run: Benchmark) -> None:
    size = run.sizes[0]
    print(f"\ntrap: first {SMALL_FIRST.rows} x {SMALL_FIRST.columns}, then {size.name}; device us")
    print(f"{'':28s}" + "".join(f"{mode:>14s}" for mode in run.modes))
    chosen = [c for c in CASES if c.name in TRAPS]
    for case in chosen[:1] if run.is_quick else chosen:
        if run.clock.left() < 0:
            run.left_out.append(f"trap: {case.name}")
            continue
        try:
            row = measure(run, case, size, SMALL_FIRST)
        except Exception as error:
            run.leave_out(f"trap: {case.name}", error)
            continue
        row["over_fresh"] = over_fresh(run, row)
        run.rows("trap").append(row)
        run.save()
        print(line(row, run.modes), flush=True)


def over_fresh(run: Benchmark, row: dict[str, Any]) -> dict[str, float]:
    """How much longer each variant takes than where the large shape was its first."""
    same = [r for r in run.rows("table") if (r["case"], r["size"]) == (row["case"], row["size"])]
    return {
        mode: found["device_us"]["median"] / same[0]["modes"][mode]["device_us"]["median"]
        for mode, found in row["modes"].items()
        if same and mode in same[0]["modes"]
    }


def host(run: Benchmark) -> None:
    import launch  # the benchmark of that name; here, because it sets variables of the environment

    here = launch.standing_in() if run.rig.device.type == "cpu" else launch.real()
    run.sections["host"] = {"device": here.describe, "cases": {}}
    for name, what in launch.CASES.items():
        if run.clock.left() < 0:
            run.left_out.append(f"host: {name}")
            continue
        result = launch.case(here, *what, 5 if run.is_quick else 15)
        run.sections["host"]["cases"][name] = result
        run.save()
        print(f"\nhost: {name}")
        for variant, found in result["us"].items():  # type: ignore[attr-defined]
            print(f"  {variant:32s} {found['median']:7.2f} us")


def lm(run: Benchmark) -> None:
    print("\nlm: examples/train_lm.py, ms a step once warm (seconds in all)")
    for variant in VARIANTS:
        if variant.mode not in run.modes:
            continue
        if run.clock.left() < 5:
            run.left_out.append(f"lm: {variant.name}")
            continue
        row = run_variant(variant, run.rig.device.type, run.is_quick, run.settings, run.clock.left())
        run.rows("lm").append(row)
        run.save()
        if "problem" in row:
            run.left_out.append(f"lm: {variant.name}: {row['problem']}")
            print(f"  {variant.name:28s} {row['problem']}")
        else:
            print(f"  {variant.name:28s} {row['step_ms']:9.2f}  ({row['seconds']:.0f} s), loss {row['last_loss']:.4f}")


SECTIONS: dict[str, Callable[[Benchmark], None]] = {
    "check": check,
    "table": table,
    "steps": steps,
    "trap": trap,
    "host": host,
    "lm": lm,
}


# ---- the run ----------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sections and beginnings of names of cases, separated by commas")
    parser.add_argument("--minutes", type=float, default=8.0, help="the run ends by itself within this time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, few cases; proves nothing about speed")
    parser.add_argument("--modes", default="", help=f"of {', '.join(MODES)}")
    text = "results of an earlier run on this model of GPU, whose kernels are not checked again where they are the same"
    parser.add_argument("--checked", type=Path, help=text)
    parser.add_argument("--keep", action="store_true", help="keep the store, for autofuse explain")
    parser.add_argument("--out", type=Path, help="result file; for --device cpu a temporary one unless given")
    return parser.parse_args()


def chosen(parser_only: str) -> tuple[list[str], tuple[SpeedCase, ...]]:
    """Sections and cases that ``--only`` names: a case brings the table with it."""
    names = [name.strip() for name in parser_only.split(",") if name.strip()]
    if not names:
        return list(SECTIONS), CASES
    cases = tuple(c for c in CASES if any(c.name.startswith(n) for n in names if n not in SECTIONS))
    unknown = [n for n in names if n not in SECTIONS and not any(c.name.startswith(n) for c in CASES)]
    if unknown:
        known = ", ".join([*SECTIONS, *(c.name for c in CASES)])
        sys.exit(f"--only: expected some of {known}; found {', '.join(unknown)}")
    return [s for s in SECTIONS if s in names or (s == "table" and cases)], cases or CASES


def modes_of(text: str, is_quick: bool) -> tuple[str, ...]:
    names = tuple(n.strip() for n in text.split(",") if n.strip()) or (QUICK_MODES if is_quick else tuple(MODES))
    unknown = [n for n in names if n not in MODES]
    if unknown:
        sys.exit(f"--modes: expected some of {', '.join(MODES)}; found {', '.join(unknown)}")
    return names


def settings_for(folder: Path, is_quick: bool) -> Settings:
    """Of the session that tunes: it waits, and as long as it takes; the sections have their own clocks."""
    values = {
        "run.store": folder / "store.sqlite3",
        "run.tune": "wait",
        "run.quiet": True,
        "observe.enabled": False,
        "tuner.budget_seconds": 3600.0,
        "tuner.job_seconds": 2.0 if is_quick else 5.0,
        "tuner.trials": 2 if is_quick else 16,
        "tuner.idle_exit_seconds": 60.0,
    }
    return load(cli=values, environ={}, cwd=folder)


def stop_at_the_end(run: Benchmark) -> threading.Timer:
    """Whatever hangs, the run ends in time with what it has."""

    def give_up() -> None:
        print(f"time is up; what was found by then is in {run.out}", flush=True)
        control.stop(run.settings)
        os._exit(0)

    timer = threading.Timer(run.clock.began + run.clock.minutes * 60 - time.monotonic(), give_up)
    timer.daemon = True
    timer.start()
    return timer


def main() -> int:
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a GPU that torch can use, found none; see: autofuse doctor", file=sys.stderr)
        return 2
    if options.device == "cuda":
        try:
            find_triton()
        except CompilerError as error:
            print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
            return 2
    wanted, cases = chosen(options.only)
    folder = Path(tempfile.mkdtemp(prefix="autofuse-gpu-"))
    rig: DeviceRunner = GpuRunner() if options.device == "cuda" else CpuRunner()
    settings = settings_for(folder, options.quick)
    run = Benchmark(
        rig=rig,
        modes=modes_of(options.modes, options.quick),
        sizes=QUICK_SIZES if options.quick else SIZES,
        cases=cases[:2] if options.quick and not options.only else cases,
        rounds=5 if options.quick else ROUNDS,
        is_quick=options.quick,
        clock=Clock(options.minutes),
        out=options.out or (RESULTS if options.device == "cuda" else folder) / "gpu.json",
        settings=settings,
        checked=options.checked,
        session=start_session(settings, "benchmarks/gpu.py"),
    )
    guard = stop_at_the_end(run)
    try:
        copied = (16 << 20) if options.quick or options.device == "cpu" else (1 << 30)
        run.copy_bytes_per_second = copy_bandwidth(rig, copied, run.rounds)
        for number, section in enumerate(wanted):
            # Of what is left: time that a section does not need goes to those after it.
            share = SHARES[section] / sum(SHARES[later] for later in wanted[number:])
            run.clock.start(share)
            try:
                SECTIONS[section](run)
            except Exception as error:
                run.leave_out(section, error)
            run.save()
    finally:
        run.session.finish(0)
        run.sections["notes"] = run.notes()
        run.save()
        control.stop(settings)
        guard.cancel()
    if options.keep:
        shutil.copytree(folder, run.out.with_suffix(".store"), dirs_exist_ok=True)
    if run.out.parent != folder and not run.sections["notes"]:  # else its logs may tell more
        shutil.rmtree(folder, ignore_errors=True)
    for note in dict.fromkeys(run.sections["notes"]):
        print(f"autofuse: {note}")
    for mode, gain in run.sections.get("table", {}).get("autofuse_over", {}).items():
        print(f"autofuse over {mode}: {gain['geometric_mean']:.2f}x, geometric mean of {gain['rows']} rows")
    for what in run.left_out[:20]:
        print(f"left out: {what}")
    if len(run.left_out) > 20:
        print(f"left out: {len(run.left_out) - 20} more, named in the results")
    print(f"written to {run.out} after {time.monotonic() - run.clock.began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
