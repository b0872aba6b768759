"""Thirty functions through torch.compile(backend="autofuse") and autofuse.optimize, beside eager and torch.compile.

    python benchmarks/doors.py                                # all functions in three sizes, within 12 minutes
    python benchmarks/doors.py --only inside,"outside: mish"  # by the beginning of their names; keeps other rows
    python benchmarks/doors.py --quick                        # a trial of the benchmark itself

Bars on a CPU, of torch.compile(backend="autofuse"): no case below 0.97x of eager where eager takes 100 us and more; in
the geometric mean of all cases 1.8x eager and 1.3x torch.compile.

A contender is one function with a code object of its own, called on the three sizes in turn, first to be compiled,
tuned (AUTOFUSE_TUNE=wait, on a store of this run or the one that ``--store`` keeps) and judged, then to be timed size
by size: contenders take turns in one process, ratios are taken round by round and carry a 95 % interval. Stalls are
not timed. "empty" is Dynamo's empty backend, which is what a released function of torch.compile's costs. malloc is set
alike for all. Rows carry the commit they were measured at; results are written to benchmarks/results/doors.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before torch; a folder that is named outside keeps what torch.compile makes.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="autofuse-doors-"))

import torch
from common import arguments, chosen, commit, interleave, machine, parse, print_end, ratio, save, summary
from doors_rows import ROWS, SIZES, Row, Tensors

import autofuse
from autofuse.daemon import control
from autofuse.process.apply import apply_malloc
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import load

Call = Callable[[], object]
_FOLDER = Path(tempfile.mkdtemp(prefix="autofuse-doors-"))  # of this run
OURS, OPTIMIZED = "compile, autofuse", "optimize"
CONTENDERS = ("eager", "empty", "compile", OURS, OPTIMIZED)
LEAST_US = 100.0  # of eager, for the bar of single cases
ROUNDS = 11
SAMPLE_SECONDS = 0.006
RACE_SECONDS = 0.8  # of one case, all contenders
SETTLE_CALLS = 400  # of one size: as many as it takes to confirm a gain, or to release what loses
SETTLE_SECONDS = 1.5


def function_of(row: Row) -> Callable[..., Any]:
    """The function with a code of its own: Dynamo's caches belong to code objects."""
    return types.FunctionType(row.function.__code__.replace(), row.function.__globals__, row.function.__name__)


def through(contender: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if contender == "eager":
        return function
    if contender == "empty":
        return torch.compile(function, backend=lambda graph, inputs: graph.forward)
    if contender == "compile":
        return torch.compile(function)
    return autofuse.optimize(function) if contender == OPTIMIZED else torch.compile(function, backend="autofuse")


def as_called(row: Row, function: Callable[..., Any], inputs: Tensors) -> Call:
    """A call as a script makes it; gradients are new each time."""
    leaves = [t for t in inputs if t.requires_grad]
    given: list[torch.Tensor] = []

    def forget() -> None:
        for leaf in leaves:
            leaf.grad = None

    def forward() -> object:
        return function(*inputs)

    def inside() -> object:
        forget()
        return function(*inputs)

    def outside() -> object:
        forget()
        y = function(*inputs)
        if not given:
            given.append(torch.ones_like(y) if y.dim() == 0 else torch.randn(y.shape))
        y.backward(given[0])
        return y

    return {"forward": forward, "inside": inside, "outside": outside}[row.kind]


def settle(session: Session, calls: Sequence[Call]) -> None:
    """Call on all sizes in turn, then on each, until all is compiled, tuned and judged."""
    for number in range(6 * len(calls)):
        calls[number % len(calls)]()
        time.sleep(0.002)  # decisions are read by a thread of the session
    for call in calls:
        quiet, seconds = 0, 0.0
        for _ in range(3 * SETTLE_CALLS):
            before, began = session.context.disturbances, time.perf_counter()
            call()
            seconds += time.perf_counter() - began
            quiet += 1
            if session.context.disturbances != before:
                quiet, seconds = 0, 0.0
            if quiet >= SETTLE_CALLS or (quiet > 8 and seconds > SETTLE_SECONDS):
                break


def states(session: Session) -> list[str]:
    found = [(one.record(), one.trial) for one in session.roots.watched().values()]
    return [f"{one.name} {one.state} ({one.reason}): {one.detail}" for one, trial in found if trial.shapes]


def measure(session: Session, row: Row, contenders: Sequence[str], is_quick: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    session.context.routers.clear()  # or later rows would pay for looking through the graphs of earlier ones
    sets = {size: row.inputs(rows) for size, rows in SIZES.items()}
    found: dict[str, Any] = {"row": row.name, "commit": commit(), "cases": {}, "states": {}, "stall_seconds": {}}
    calls: dict[str, dict[str, Call]] = {}
    for contender in contenders:
        session.roots.groups.clear()
        session.roots.graphs.clear()
        function = through(contender, function_of(row))
        calls[contender] = {size: as_called(row, function, inputs) for size, inputs in sets.items()}
        began = time.perf_counter()
        if contender in (OURS, OPTIMIZED):
            settle(session, list(calls[contender].values()))
            found["states"][contender] = states(session)
        else:
            for _ in range(3):
                for call in calls[contender].values():
                    call()
        found["stall_seconds"][contender] = round(time.perf_counter() - began, 2)
    for contender in contenders:
        if contender in (OURS, OPTIMIZED):  # kernels that came for a later contender have its gain confirmed anew
            settle(session, list(calls[contender].values()))
    for size in sets:
        found["cases"][size] = race({name: calls[name][size] for name in contenders}, is_quick)
    return found


def race(calls: dict[str, Call], is_quick: bool) -> dict[str, Any]:
    began = time.perf_counter()
    for call in calls.values():
        call()
    each = max((time.perf_counter() - began) / len(calls), 1e-7)
    repeats = max(1, min(500, int(SAMPLE_SECONDS / each)))
    rounds = 3 if is_quick else max(7, min(ROUNDS, int(RACE_SECONDS / ((repeats + 1) * each * len(calls)))))
    gc.collect()
    gc.disable()
    try:
        samples = interleave(calls, rounds, repeats, warm=True)
    finally:
        gc.enable()
    found: dict[str, Any] = {"us": {name: summary(its) for name, its in samples.items()}}
    for ours in (OURS, OPTIMIZED):
        if ours in samples:
            others = [name for name in samples if name not in (OURS, OPTIMIZED)]
            found[f"{ours} over"] = {name: ratio(samples[name], samples[ours]) for name in others}
    return found


def mean(ratios: Sequence[float]) -> dict[str, float]:
    return {"ratio": round(math.exp(statistics.fmean(map(math.log, ratios))), 3), "cases": len(ratios)}


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the table is to show, of each door."""
    cases = [(f"{row['row']}, {size}", case) for row in rows for size, case in row["cases"].items()]
    found: dict[str, Any] = {}
    for ours in (OURS, OPTIMIZED):
        mine = [
            (name, case[f"{ours} over"], case["us"]["eager"]["median"])
            for name, case in cases
            if f"{ours} over" in case
        ]
        if not mine:
            continue
        below = [(o["eager"]["median"], n, us) for n, o, us in mine if us >= LEAST_US and o["eager"]["median"] < 0.97]
        found[f"{ours}: below 0.97x of eager at 100 us and more"] = [
            f"{name}: {over:.2f} of {us:.0f} us" for over, name, us in sorted(below)
        ]
        for other in ("eager", "compile", "empty"):
            ratios = [o[other]["median"] for _, o, _ in mine if other in o]
            if ratios:
                found[f"{ours}: geometric mean over {other}"] = mean(ratios)
    return found


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['row']:28s}"]
    for case in row["cases"].values():
        us = case["us"]["eager"]["median"]
        over = [
            f"{case[f'{o} over'][n]['median']:.2f}"
            for o in (OURS, OPTIMIZED)
            if f"{o} over" in case
            for n in ("eager", "compile")
            if n in case[f"{o} over"]
        ]
        cells.append(f"{us:8.0f} us {' '.join(over)}")
    return " |".join(cells)


def asked() -> argparse.Namespace:
    parser = arguments(
        __doc__, "doors", quick="short tuning, few rounds; proves nothing about speed", only="functions", malloc=True
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="functions left after this time are left out")
    parser.add_argument("--store", type=Path, help="a store to keep; a temporary one by default")
    parser.add_argument("--contenders", default="; ".join(CONTENDERS), help="separated by semicolons")
    return parse(parser)


def settings_for(options: argparse.Namespace) -> Any:
    values = {
        "run.store": options.store or _FOLDER / "store.sqlite3",
        "run.tune": "wait",
        "run.quiet": True,
        "tuner.budget_seconds": 3600.0,
        "tuner.job_seconds": 1.0 if options.quick else 2.0,
        "tuner.trials": 2 if options.quick else 8,
        "tuner.idle_exit_seconds": 60.0,
    }
    return load(cli=values, environ={}, cwd=_FOLDER)


def main() -> int:
    options = asked()
    began = time.monotonic()
    names = chosen(options.only, [row.name for row in ROWS])
    contenders = [c.strip() for c in options.contenders.split(";")]
    if options.malloc == "on":
        apply_malloc()
    settings = settings_for(options)
    session = start_session(settings, "benchmarks/doors.py")
    rows: dict[str, dict[str, Any]] = {}
    if options.only and options.out.exists():
        before = json.loads(options.out.read_text())
        if before["machine"]["cpu"] == machine()["cpu"]:
            rows = {row["row"]: row for row in before["rows"]}
    left_out: list[str] = []
    print(
        "of each size: eager's time, then eager and torch.compile over torch.compile(backend='autofuse'), over optimize"
    )
    try:
        for row in (r for r in ROWS if r.name in names):
            if time.monotonic() - began > options.minutes * 60:
                left_out.append(f"{row.name}: out of time")
                continue
            rows[row.name] = measure(session, row, contenders, options.quick)
            ordered = [rows[r.name] for r in ROWS if r.name in rows]
            save(options.out, "doors", malloc=options.malloc, bars=bars(ordered), rows=ordered, left_out=left_out)
            print(line(rows[row.name]), flush=True)
    finally:
        session.finish(0)
        control.stop(settings)
        shutil.rmtree(_FOLDER, ignore_errors=True)
    print_end(bars(ordered), left_out, options.out, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
