"""The first-shape trap: what a contender saw first, against what it is then to be fast on.

    python benchmarks/trap.py                              # all cases, a quarter of an hour
    python benchmarks/trap.py --only add --append          # one case anew, others as the result file has them
    python benchmarks/trap.py --quick                      # a trial of the benchmark itself, within a minute

Each case is timed on a large shape after many calls on a tiny one, and after many on a modest one; and on the tiny
shape after many calls on the large one. Each contender (eager, torch.compile as it is, which compiles anew with dynamic
sizes at the second shape, dynamic=True, autofuse as `autofuse run --tune wait` gives it) is there once for each past,
and once fresh: that one has seen the timed shape alone. The figure is the time after a past over the time of the fresh
one: 1.0 is no trap. Beside it stands eager's time over that after the past, since a contender that is as slow fresh as
trapped has no trap to show.

All of them take turns in one process, on the same tensors, under ``no_grad``, with malloc set alike (``--malloc off``:
as glibc has it). Each is a module whose class and code are its own, so that no graph, guard or frame state is shared;
Inductor's graph cache is off, since it would answer with a graph that was generated for another size; its cache of
compiled C++ is on and starts empty, so stalls of torch.compile are at most what they would be cold. autofuse has one
session and one store a case and timed shape; modules with a past are prepared before the fresh one, so that nothing
tuned for it helps them. A module is prepared until it is calm: plans, captures and held-out calls have come to rest.
Stalls (tracing, compiling, tuning at the second shape) are not timed; they are counted beside the figure.
Results are written to benchmarks/results/trap.json after each case.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before torch: stalls of torch.compile are those of a machine that has not seen these functions.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="autofuse-trap-")

import torch
from common import arguments, chosen, commit, interleave, parse, print_end, ratio, save, summary
from torch import nn
from torch.nn import functional as F

from autofuse.daemon import control
from autofuse.process.apply import keep_freed_memory
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import Settings, load

_FOLDER = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # of this run
CONTENDERS = ("eager", "compile", "compile dynamic", "autofuse")
SHAPES = {"tiny": (8, 64), "modest": (256, 512), "large": (4096, 1024)}
# The timed shape, and what was seen before it; "" is nothing.
PASTS = {"large": ("tiny", "modest", ""), "tiny": ("large", "")}
FRESH = ""
PAST_CALLS = 300  # on the first shape
ROUNDS = 15
SAMPLE_SECONDS = 0.016  # least length of a sample
RACE_SECONDS = 8.0  # of one timed shape, all contenders
SETTLE_CALLS = 900  # of autofuse on one shape, at most
CALM_CALLS = 220  # since plans last changed: as many as it takes to confirm a gain, or to release what loses to eager
CALM_SECONDS = 4.0  # after which fewer do
TRAPPED = 1.05  # times the fresh one's time, with the whole interval above 1: a trap
Tensors = tuple[torch.Tensor, ...]
Call = Callable[[], object]


# ---- cases ----------------------------------------------------------------------------------------------------------


def layer_norm_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias))


def masked_softmax(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return F.softmax((x * 0.125).masked_fill(mask, float("-inf")), dim=-1)


def add_relu(x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.relu(x + y)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def residual_norm(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    h = x + y
    return h, F.layer_norm(h, (h.shape[-1],), weight, bias)


def full_and_rows(full: int, rows: int) -> Callable[[int, int], Tensors]:
    """So many tensors of rows x columns, then so many of columns."""
    return lambda r, c: (*(torch.randn(r, c) for _ in range(full)), *(torch.randn(c) for _ in range(rows)))


def scores_and_mask(rows: int, columns: int) -> Tensors:
    mask = torch.rand(rows, columns) < 0.2
    mask[:, 0] = False  # a row with nothing in it is another question
    return torch.randn(rows, columns), mask


CASES: dict[str, tuple[Callable[..., Any], Callable[[int, int], Tensors]]] = {
    "layer_norm + gelu": (layer_norm_gelu, full_and_rows(1, 2)),
    "scale + mask + softmax": (masked_softmax, scores_and_mask),
    "add + relu": (add_relu, full_and_rows(2, 0)),
    "rms_norm": (rms_norm, full_and_rows(1, 1)),
    "residual + layer_norm": (residual_norm, full_and_rows(2, 2)),
}


# ---- contenders -----------------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """A contender with its past, ready to be timed."""

    call: Call
    stall_seconds: float  # at the timed shape, over what later calls take
    state: str = ""  # of autofuse: what it decided
    graphs: int = 0  # that torch.compile made, over both shapes


@dataclass
class Benchmark:
    out: Path
    is_quick: bool
    malloc: str
    contenders: tuple[str, ...]
    settings: Settings
    commit: str
    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    modules: int = 0

    def save(self) -> None:
        save(
            self.out,
            "trap",
            settings={
                "malloc": self.malloc,
                "recompile_limit": torch._dynamo.config.recompile_limit,
                "automatic_dynamic_shapes": torch._dynamo.config.automatic_dynamic_shapes,
                "dynamic flags": {"compile": None, "compile dynamic": True},
                "fx_graph_cache": torch._inductor.config.fx_graph_cache,
                "autofuse": {name: str(value) for name, value in self.settings.changed().items()},
                "shapes": SHAPES,
                "calls_on_the_first_shape": 20 if self.is_quick else PAST_CALLS,
            },
            bars=bars(self.rows),
            rows=self.rows,
            left_out=self.left_out,
        )

    def module_of(self, function: Callable[..., Any]) -> nn.Module:
        """A module whose class and code are its own: Dynamo keeps what it learnt of sizes by a code's file, line and
        name, autofuse by a module's class."""
        self.modules += 1
        label = f"{function.__name__}_{self.modules}"
        place = {"co_firstlineno": 1000 * self.modules}
        inner = types.FunctionType(
            function.__code__.replace(co_name=f"function_{label}", **place), function.__globals__, function.__name__
        )

        def forward(self: nn.Module, *inputs: torch.Tensor) -> Any:
            return inner(*inputs)

        code = forward.__code__.replace(co_name=f"forward_{label}", **place)
        outer = types.FunctionType(code, forward.__globals__, None, None, forward.__closure__)
        module: nn.Module = type(label, (nn.Module,), {"forward": outer})()
        return module


def call_of(module: nn.Module, inputs: Tensors) -> Call:
    def call() -> object:
        with torch.no_grad():
            return module(*inputs)

    return call


def prepare(
    run: Benchmark, session: Session, contender: str, function: Callable[..., Any], past: Tensors | None, timed: Tensors
) -> Prepared:
    """Many calls on the past, then as many as it takes on what is timed."""
    module = run.module_of(function)
    past_calls = 20 if run.is_quick else PAST_CALLS
    call = call_of(module, timed)
    if contender == "autofuse":
        return prepare_autofuse(session, module, None if past is None else call_of(module, past), call, past_calls)
    module.__dict__["_compiled_call_impl"] = None  # as a class without our hook has it
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if contender != "eager":
        module.compile(dynamic=True if contender == "compile dynamic" else None)
    if past is not None:
        seen = call_of(module, past)
        for _ in range(past_calls):
            seen()
    began = time.perf_counter()
    call()
    first = time.perf_counter() - began
    began = time.perf_counter()
    call()
    stall = max(0.0, first - (time.perf_counter() - began))
    for _ in range(10):
        call()
    return Prepared(call, stall, graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)


def prepare_autofuse(session: Session, module: nn.Module, past: Call | None, call: Call, past_calls: int) -> Prepared:
    known = len(session.context.routers)
    root = session.roots.root_of(module)
    if past is not None:
        settle(session, past, past_calls)
    was = root.state if root.state == "captured" else f"{root.state}: {root.reason}"
    paused, captured = session.context.paused_seconds, session.roots.lost_seconds()
    settle(session, call, 0)
    stall = session.context.paused_seconds - paused + session.roots.lost_seconds() - captured
    routers = session.context.routers[known:]
    # The plan that serves the timed shape is the one that runs now.
    plans = [p for r in routers for p in r.all_plans()]
    counts = [p.count for p in plans]
    call()
    serving = [p for p, count in zip(plans, counts, strict=True) if p.count != count]
    fused = f"{sum(p.fused_nodes for p in serving)} of {sum(len(p.nodes) for p in serving)} nodes fused"
    state = f"captured, {len(routers)} graphs, {fused}" if root.state == "captured" else f"{root.state}: {root.reason}"
    return Prepared(call, stall, state if past is None else f"{state} (after the first shape: {was})")


def settle(session: Session, call: Call, least: int) -> None:
    """Until nothing has changed for a while; ``least`` calls at least."""
    quiet, seconds = 0, 0.0  # calls, and the time that they took, since plans last changed
    for number in range(max(SETTLE_CALLS, least)):
        before, began = session.context.disturbances, time.perf_counter()
        call()
        seconds += time.perf_counter() - began
        if number < 8:
            time.sleep(0.005)  # decisions are read by a thread of the session
        if session.context.disturbances == before:
            quiet += 1
        else:
            quiet, seconds = 0, 0.0
        if number >= least and (quiet >= CALM_CALLS or (quiet >= 6 and seconds > CALM_SECONDS)):
            return


# ---- a row ----------------------------------------------------------------------------------------------------------


def measure(run: Benchmark, name: str, timed: str) -> dict[str, Any]:
    """One case on one timed shape: each contender with each past."""
    function, make = CASES[name]
    torch.manual_seed(0)
    inputs = {shape: make(*sizes) for shape, sizes in SHAPES.items()}
    folder = Path(tempfile.mkdtemp(dir=_FOLDER))
    settings = run.settings.with_values({"run.store": folder / "store.sqlite3"}, origin="trap")
    torch._dynamo.reset()
    gc.collect()
    prepared: dict[tuple[str, str], Prepared] = {}
    session = start_session(settings, "benchmarks/trap.py")
    try:
        for past in PASTS[timed]:
            for contender in run.contenders:
                try:
                    found = prepare(run, session, contender, function, inputs.get(past), inputs[timed])
                except Exception as error:
                    first = str(error).strip().partition("\n")[0][:200]
                    run.left_out.append(f"{name}, {timed} after {past}: {contender}: {type(error).__name__}: {first}")
                    continue
                prepared[contender, past] = found
        for (contender, _), each in prepared.items():
            if contender == "autofuse":  # the captures of modules after it made it confirm its gain once more
                settle(session, each.call, 0)
        row = {
            "case": name, "timed": timed, "shape": list(SHAPES[timed]), "commit": run.commit, **race(run, prepared)
        }  # fmt: skip
    finally:
        session.finish(0)
        control.stop(settings)
        shutil.rmtree(folder, ignore_errors=True)
    return row


def race(run: Benchmark, prepared: dict[tuple[str, str], Prepared]) -> dict[str, Any]:
    """All in turn; times, ratios to the fresh one and to eager with the same past."""
    largest = differences(prepared)
    calls = {f"{contender}|{past}": p.call for (contender, past), p in prepared.items()}
    began = time.perf_counter()
    for call in calls.values():
        call()
    each = max((time.perf_counter() - began) / len(calls), 1e-7)
    repeats = max(1, min(2000, int(SAMPLE_SECONDS / each)))
    rounds = max(5, min(5 if run.is_quick else ROUNDS, int(RACE_SECONDS / ((repeats + 1) * each * len(calls)))))
    gc.collect()
    gc.disable()
    try:
        samples = interleave(calls, rounds, repeats, warm=True)
    finally:
        gc.enable()
    contenders: dict[str, dict[str, Any]] = {}
    for (contender, past), p in prepared.items():
        ours = samples[f"{contender}|{past}"]
        entry: dict[str, Any] = {"us": summary(ours), "stall_seconds": round(p.stall_seconds, 3)}
        if p.state:
            entry["state"] = p.state
        if p.graphs:
            entry["graphs"] = p.graphs
        if past != FRESH and f"{contender}|{FRESH}" in samples:
            entry["over_fresh"] = ratio(ours, samples[f"{contender}|{FRESH}"])
        if contender != "eager" and f"eager|{past}" in samples:
            entry["eager_over"] = ratio(samples[f"eager|{past}"], ours)
        contenders.setdefault(contender, {})[f"after {past}" if past else "fresh"] = entry
    return {"largest_difference_to_eager": largest, "contenders": contenders}


def differences(prepared: dict[tuple[str, str], Prepared]) -> dict[str, float]:
    """Relative to the largest value of each of eager's outputs; the worst of a contender's pasts."""
    expected = tensors_of(prepared["eager", FRESH].call()) if ("eager", FRESH) in prepared else ()
    found: dict[str, float] = {}
    for (contender, _), p in prepared.items():
        if contender != "eager":
            for a, b in zip(tensors_of(p.call()), expected, strict=False):
                apart = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
                found[contender] = max(apart, found.get(contender, 0.0))
    return found


def tensors_of(found: Any) -> Tensors:
    return tuple(found) if isinstance(found, tuple | list) else (found,)


# ---- what it shows --------------------------------------------------------------------------------------------------


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Traps and geometric means of each contender, by timed shape and past."""
    found: dict[str, Any] = {}
    for timed, pasts in PASTS.items():
        for past in pasts:
            if past == FRESH:
                continue
            group = [r for r in rows if r["timed"] == timed]
            key = f"{timed} after {past}"
            for contender in CONTENDERS:
                named = [(r["case"], r["contenders"].get(contender, {}).get(f"after {past}", {})) for r in group]
                entries = [(case, e) for case, e in named if "over_fresh" in e]
                if not entries:
                    continue
                found.setdefault(key, {})[contender] = {
                    "over_fresh": geometric_mean([e["over_fresh"]["median"] for _, e in entries]),
                    "worst_over_fresh": round(max(e["over_fresh"]["median"] for _, e in entries), 3),
                    "eager_over": geometric_mean([e["eager_over"]["median"] for _, e in entries if "eager_over" in e]),
                    "stall_seconds": round(statistics.median(e["stall_seconds"] for _, e in entries), 2),
                    "cases": len(entries),
                    "trapped": [
                        f"{case}: {e['over_fresh']['median']:.2f}x of the fresh one's time"
                        for case, e in entries
                        if e["over_fresh"]["median"] > TRAPPED and e["over_fresh"]["low"] > 1.0
                    ],
                }
    return found


def geometric_mean(values: Sequence[float]) -> float | None:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3) if values else None


def show(row: dict[str, Any]) -> None:
    print(f"{row['case']}, timed on {row['timed']} {tuple(row['shape'])}")
    for contender, pasts in row["contenders"].items():
        for past, e in pasts.items():
            fresh = f"{e['over_fresh']['median']:5.2f}x of fresh" if "over_fresh" in e else " " * 15
            eager = f"{e['eager_over']['median']:5.2f}x eager" if "eager_over" in e else " " * 11
            print(f"  {contender:16s}{past:14s}{e['us']['median']:10.1f} us  {fresh}  {eager}  "
                  f"stall {e['stall_seconds']:6.2f} s  {e.get('state', '')}", flush=True)  # fmt: skip


# ---- the run --------------------------------------------------------------------------------------------------------


def asked() -> argparse.Namespace:
    parser = arguments(
        __doc__, "trap", quick="one case, short tuning; proves nothing about speed", only="cases", malloc=True
    )
    parser.add_argument("--timed", default=",".join(PASTS), help=f"of {', '.join(PASTS)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--append", action="store_true", help="keep what the result file has of other cases")
    return parse(parser)


def settings_for(options: argparse.Namespace) -> Settings:
    values = {
        "run.store": _FOLDER / "store.sqlite3",
        "run.tune": "wait",
        "run.quiet": True,
        "tuner.budget_seconds": 3600.0,
        "tuner.job_seconds": 1.5 if options.quick else 5.0,
        "tuner.trials": 2 if options.quick else 12,
        "tuner.idle_exit_seconds": 60.0,
    }
    return load(cli=values, environ={}, cwd=_FOLDER)


def main() -> int:
    options = asked()
    names, shapes = chosen(options.only, list(CASES)), options.timed.split(",")
    if options.malloc == "on":
        keep_freed_memory()
    out: Path = options.out
    if options.quick:
        names, shapes = names[:1], shapes[:1]
    contenders = tuple(c for c in CONTENDERS if c in options.contenders.split(","))
    run = Benchmark(out, options.quick, options.malloc, contenders, settings_for(options), commit())
    if options.append and out.exists():
        before = json.loads(out.read_text())
        run.rows = [r for r in before["rows"] if r["case"] not in names or r["timed"] not in shapes]
        run.left_out = [text for text in before["left_out"] if not text.startswith(tuple(names))]
    torch._inductor.config.fx_graph_cache = False
    try:
        for name in names:
            for timed in shapes:
                run.rows.append(measure(run, name, timed))
                run.rows.sort(key=lambda r: (list(CASES).index(r["case"]), list(PASTS).index(r["timed"])))
                run.save()
                show(next(r for r in run.rows if r["case"] == name and r["timed"] == timed))
    finally:
        shutil.rmtree(_FOLDER, ignore_errors=True)
    for key, found in bars(run.rows).items():
        for contender, entry in found.items():
            print(f"{key:20s}{contender:16s}{json.dumps(entry)}")
    print_end({}, run.left_out, run.out, run.began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
