"""The table of patterns: eager, torch.compile and autofuse side by side, with kernels launched and bytes moved.

    python benchmarks/patterns.py                        # all rows, within 10 minutes
    python benchmarks/patterns.py --only swiglu,rotary   # rows by the beginning of their names
    python benchmarks/patterns.py --quick                # a trial of the benchmark itself

Bars on a CPU: no row slower than eager beyond noise, that is, than both of two identical eager modules; 1.5x eager and
1.5x torch.compile as geometric mean of the rows that no matmul or convolution bounds; the seeds' four rows reach their
figures at memory-sized shapes.

All contenders of a row take turns in one process, on the same tensors and with the same parameters; figures are medians
of rounds, ratios are taken round by round and carry a 95 % interval. autofuse is what `autofuse run --tune wait` gives:
modules are roots, captured and left in eager by the usual rules, with kernels from its own daemon and a store of this
run. Its and torch.compile's stalls are not timed; they are counted beside the row. torch.compile's mode max-autotune is
among the contenders where it is asked for: on a CPU it differs in rows with products, and takes minutes for each.
malloc is set alike for all contenders (``--malloc off``: as glibc has it). Results are written to
benchmarks/results/patterns.json after each row.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# Before torch: compile stalls are those of a machine that has not seen these functions.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="autofuse-patterns-")

import torch
from common import arguments, chosen, interleave, parse, print_end, ratio, save, summary
from patterns_count import Count, count_call, inductor_counters
from patterns_rows import ADAMW, ADAMW_SIZES, ROWS, SHAPES, Row, Tensors, with_gradients
from torch import nn
from torch.optim import adam, adamw

from autofuse.daemon import control
from autofuse.process.apply import keep_freed_memory
from autofuse.runtime.optimizers.hook import MANY_STEPS
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import load

_FOLDER = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])  # of this run
COMPILED: dict[str, dict[str, Any]] = {  # how torch.compile is asked
    "compile": {},
    "compile dynamic": {"dynamic": True},
    "compile max-autotune": {"mode": "max-autotune-no-cudagraphs"},  # on a CPU: templates for products, minutes a row
}
CONTENDERS = ("eager", *COMPILED, "autofuse")
USUAL = ("eager", "compile", "compile dynamic", "autofuse")
UNAVOIDABLE = "unavoidable"
AGAIN = "eager again"  # what two identical modules differ by: their results lie elsewhere in memory
ROUNDS = 15
SAMPLE_SECONDS = 0.016  # least length of a sample
RACE_SECONDS = 2.5  # of one row and shape, all contenders
LEAST_ROUNDS = 11  # however long one takes: the interval of five is their whole range
SETTLE_CALLS = 900  # of autofuse, at most
CALM_CALLS = 340  # since plans last changed: as many as it takes to confirm a gain, or to release what loses to eager
CALM_SECONDS = 4.0  # after which fewer do
RUNNER_SECONDS = 20.0  # in which the library in C has been compiled and loaded
Call = Callable[[], object]


@dataclass
class Prepared:
    """A contender of one row and shape."""

    calls: list[Call]  # one per size, taken in turn
    stall_seconds: float  # of first calls, over what later ones take
    count: Count
    state: str = ""  # of autofuse: what it decided


@dataclass
class Benchmark:
    session: Session
    out: Path
    rounds: int
    is_quick: bool
    malloc: str
    contenders: tuple[str, ...]
    began: float = field(default_factory=time.monotonic)
    minutes: float = 9.5
    copy_gbs: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def left(self) -> float:
        """Seconds."""
        return self.began + self.minutes * 60 - time.monotonic()

    def save(self) -> None:
        save(
            self.out,
            "patterns",
            malloc=self.malloc,
            seconds=round(time.monotonic() - self.began, 1),
            copy_gb_per_s=round(self.copy_gbs, 2),
            bars=bars(self.rows),
            rows=self.rows,
            left_out=self.left_out,
        )


# ---- contenders -----------------------------------------------------------------------------------------------


def module_of(row: Row, parameters: Sequence[torch.Tensor], name: str) -> nn.Module:
    """A module whose class and code are its own.

    What is learnt of other rows is not taken for it; Dynamo's caches and its recompile limit belong to code objects.
    """

    def forward(self: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        return function(*inputs, *(getattr(self, n) for n in names))

    function = types.FunctionType(row.function.__code__.replace(), row.function.__globals__, row.function.__name__)
    names = [f"p{i}" for i in range(len(parameters))]
    forward = types.FunctionType(forward.__code__.replace(), forward.__globals__, None, None, forward.__closure__)
    label = "".join(ch if ch.isalnum() else "_" for ch in f"{row.name}_{name}")
    module: nn.Module = type(label, (nn.Module,), {"forward": forward})()
    for n, p in zip(names, parameters, strict=True):
        if p.requires_grad or not row.trains:
            module.register_parameter(n, nn.Parameter(p, requires_grad=p.requires_grad))
        else:
            module.register_buffer(n, p)
    return module


def whole(row: Row, forward: Callable[..., Any], inputs: Tensors, parameters: Sequence[torch.Tensor]) -> Call:
    """A call as a script makes it: without gradients, or forward and backward."""
    if not row.trains:

        def infer() -> object:
            with torch.no_grad():
                return forward(*inputs)

        return infer
    given: list[torch.Tensor] = []
    leaves = [t for t in (*inputs, *parameters) if t.requires_grad]

    def train() -> object:
        y = forward(*inputs)
        if not given:
            seed = torch.Generator().manual_seed(0)  # the same for all contenders
            given.append(torch.ones_like(y) if y.dim() == 0 else torch.randn(y.shape, generator=seed))
        return (y, *torch.autograd.grad(y, leaves, given))

    return train


def prepare(
    run: Benchmark, row: Row, contender: str, shape: str, sets: Sequence[Tensors], parameters: Tensors
) -> Prepared:
    torch._dynamo.reset_code_caches()
    module = module_of(row, parameters, shape)
    calls = [whole(row, module, inputs, tuple(module.parameters())) for inputs in sets]
    if contender == "autofuse":
        return prepare_autofuse(run, row, module, calls, sets[0])
    if contender in ("eager", AGAIN):
        module.__dict__["_compiled_call_impl"] = None  # as a class without our hook has it
        return Prepared(calls, 0.0, count_call(calls[0]))
    module.compile(**COMPILED[contender])
    with inductor_counters() as generated:
        stall = first_calls(calls)
    if len(calls) > 1:
        return Prepared(calls, stall, Count())  # of several compilations: no call's own
    return Prepared(calls, stall, compiled_count(generated, calls[0]))


def compiled_count(generated: Count, call: Call) -> Count:
    """What Inductor generated, and the kernels of aten that its code calls; their bytes it has counted itself."""
    return Count(generated.kernels + count_call(call).kernels, generated.nbytes)


def first_calls(calls: Sequence[Call]) -> float:
    """Seconds that first calls took longer than second ones."""
    seconds = 0.0
    for call in calls:
        began = time.perf_counter()
        call()
        seconds += time.perf_counter() - began
    began = time.perf_counter()
    for call in calls:
        call()
    return max(0.0, seconds - (time.perf_counter() - began))


def prepare_autofuse(run: Benchmark, row: Row, module: nn.Module, calls: list[Call], inputs: Tensors) -> Prepared:
    known = len(run.session.context.routers)
    paused = run.session.context.paused_seconds
    captured = run.session.context.capture_seconds
    root = run.session.roots.root_of(module)
    settle(run, calls)
    routers = run.session.context.routers[known:]
    # Past the hook of modules, which leaves calls under a foreign dispatch mode alone.
    counted = whole(row, lambda *inputs: root.call(module, inputs, {}), inputs, tuple(module.parameters()))
    count = count_call(counted, routers)
    settle(run, calls)  # the count was a capture of its own, after which gains are confirmed anew
    plans = [p for r in routers for p in r.all_plans() if p.count]
    fused = f"{sum(p.fused_nodes for p in plans)} of {sum(len(p.nodes) for p in plans)} nodes fused"
    stall = run.session.context.paused_seconds - paused + run.session.context.capture_seconds - captured
    state = f"captured, {fused}" if root.state == "captured" else f"{root.state}: {root.reason}"
    return Prepared(calls, stall, count, state)


def settle(run: Benchmark, calls: Sequence[Call]) -> None:
    """Call until nothing changes any more."""
    quiet, seconds = 0, 0.0  # calls, and the time that they took, since plans last changed
    for number in range(SETTLE_CALLS):
        before, began = run.session.context.disturbances, time.perf_counter()
        calls[number % len(calls)]()
        seconds += time.perf_counter() - began
        if number < 8:
            time.sleep(0.005)  # decisions are read by a thread of the session
        if run.session.context.disturbances == before:
            quiet += 1
        else:
            quiet, seconds = 0, 0.0
        if quiet >= CALM_CALLS or (quiet >= 2 * len(calls) + 4 and seconds > CALM_SECONDS):
            break


# ---- a row ------------------------------------------------------------------------------------------------------


def measure(run: Benchmark, row: Row, shape: str) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = row.sizes[shape]
    sets = [row.inputs(*size) for size in (sizes[:3] if run.is_quick else sizes)]
    parameters = row.parameters()
    if row.trains:
        sets = [with_gradients(s) for s in sets]
        if row.bound == "convolution":  # running statistics are no leaves
            parameters = (*with_gradients(parameters[:3]), *parameters[3:])
        else:
            parameters = with_gradients(parameters)
    found: dict[str, Any] = {
        "row": row.name, "shape": shape, "sizes": [list(s) for s in sizes], "bound": row.bound, "contenders": {},
    }  # fmt: skip
    prepared: dict[str, Prepared] = {}
    # autofuse comes last: to prepare another contender drops what Dynamo has compiled.
    for contender in (AGAIN, *run.contenders):
        if run.left() < 0 and contender.startswith("compile"):
            run.left_out.append(f"{row.name} {shape}: {contender}: out of time")
            continue
        try:
            prepared[contender] = prepare(run, row, contender, shape, sets, parameters)
        except Exception as error:
            run.left_out.append(f"{row.name} {shape}: {contender}: {said(error)}")
    if not row.is_random:
        found["largest_difference_to_eager"] = differences({n: p.calls[0] for n, p in prepared.items()})
    if row.unavoidable is not None and len(sets) == 1:
        prepared[UNAVOIDABLE] = prepare_unavoidable(row, sets[0], parameters)
    race(run, found, prepared, row.seed_figure if shape == "memory" else None)
    return found


def prepare_unavoidable(row: Row, inputs: Tensors, parameters: Sequence[torch.Tensor]) -> Prepared:
    """torch's kernels for what no fusion takes away, timed with the contenders."""
    call = whole(replace(row, trains=False), row.unavoidable or row.function, (*inputs, *parameters), ())
    return Prepared([call], 0.0, count_call(call))


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def differences(calls: dict[str, Call]) -> dict[str, float]:
    """Relative to the largest value of each output."""
    answers = {name: tensors_of(call()) for name, call in calls.items()}
    found = {}
    for name, outputs in answers.items():
        if name != "eager":
            pairs = [(a.double(), b.double()) for a, b in zip(outputs, answers["eager"], strict=True)]
            found[name] = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
    return found


def tensors_of(found: Any) -> Tensors:
    return tuple(t.detach() for t in (found if isinstance(found, tuple) else (found,)))


def race(run: Benchmark, found: dict[str, Any], prepared: dict[str, Prepared], seed_figure: float | None) -> None:
    """Times, faults and ratios of all contenders, and the bytes a second that follow."""
    if not prepared:
        return
    turns = {name: in_turn(p.calls) for name, p in prepared.items()}
    began = time.perf_counter()
    for name in turns:
        turns[name]()
    each = max((time.perf_counter() - began) / len(turns), 1e-7)  # of one turn: a call of each size
    repeats = max(1, min(2000, int(SAMPLE_SECONDS / each)))
    rounds = max(
        min(LEAST_ROUNDS, run.rounds), min(run.rounds, int(RACE_SECONDS / ((repeats + 1) * each * len(turns))))
    )
    faults = {name: page_faults(turn, 2) / len(prepared[name].calls) for name, turn in turns.items()}
    gc.collect()
    gc.disable()
    try:
        samples = interleave(turns, rounds, repeats, warm=True)
    finally:
        gc.enable()
    for name, p in prepared.items():
        microseconds = [s / len(p.calls) for s in samples[name]]
        entry: dict[str, Any] = {"us": summary(microseconds), "page_faults": round(faults[name], 1)}
        if p.count.kernels:
            entry |= {"kernels": p.count.kernels, "bytes": p.count.nbytes}
            if len(p.calls) == 1:
                entry["gb_per_s"] = round(p.count.nbytes / statistics.median(microseconds) / 1e3, 2)
        entry["stall_seconds"] = round(p.stall_seconds, 2)
        if p.state:
            entry["state"] = p.state
        found["contenders"][name] = entry
    found["contenders"].pop(AGAIN, None)
    again = samples.pop(AGAIN, None)
    rest = found["contenders"].pop(UNAVOIDABLE, None)
    least = samples.pop(UNAVOIDABLE, None)
    if rest is not None and least is not None and "eager" in samples:
        found["unavoidable"] = rest | {"eager_over": ratio(samples["eager"], least)}
    ours = samples.get("autofuse")
    if ours is not None:
        found["autofuse_over"] = {name: ratio(samples[name], ours) for name in samples if name != "autofuse"}
        if again is not None:
            found["eager_again"] = {"over_eager": ratio(samples["eager"], again), "autofuse_over": ratio(again, ours)}
        if seed_figure is not None:
            found["seed_figure"] = seed_figure
            found["seed_reached"] = found["autofuse_over"]["eager"]["median"] >= seed_figure


def in_turn(calls: Sequence[Call]) -> Call:
    if len(calls) == 1:
        return calls[0]

    def turn() -> None:
        for call in calls:
            call()

    return turn


def page_faults(call: Call, times: int) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times


# ---- AdamW over 100 parameters ------------------------------------------------------------------------------------


def measure_adamw(run: Benchmark, shape: str) -> dict[str, Any]:
    """One step of the optimizer; gradients stay, values stay finite."""
    torch.manual_seed(0)
    values = [torch.randn(n) for n in ADAMW_SIZES[shape]]
    gradients = [torch.randn(n) for n in ADAMW_SIZES[shape]]
    found: dict[str, Any] = {
        "row": ADAMW, "shape": shape, "sizes": [len(values), sum(map(len, values))], "bound": "memory",
        "contenders": {},
    }  # fmt: skip
    prepared: dict[str, Prepared] = {}
    for contender in (*run.contenders, "eager fused=True"):
        if contender.startswith("compile") and (shape, contender) != ("memory", "compile"):
            run.left_out.append(f"{ADAMW} {shape}: {contender}: compiling a step over 100 parameters takes a minute")
            continue
        if contender.startswith("compile") and run.left() < 60:
            run.left_out.append(f"{ADAMW} {shape}: {contender}: out of time")
            continue
        try:
            prepared[contender] = prepare_adamw(run, contender, values, gradients)
        except Exception as error:
            run.left_out.append(f"{ADAMW} {shape}: {contender}: {said(error)}")
    race(run, found, prepared, None)
    return found


def prepare_adamw(
    run: Benchmark, contender: str, values: Tensors | list[torch.Tensor], gradients: list[torch.Tensor]
) -> Prepared:
    parameters = [nn.Parameter(v.clone()) for v in values]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True if "fused" in contender else None)
    step: Callable[[], Any] = optimizer.step
    if contender.startswith("compile"):

        def whole_step() -> None:  # as torch's documentation compiles optimizers
            optimizer.step()

        step = torch.compile(whole_step, **COMPILED[contender])
    paused = run.session.context.paused_seconds
    if contender == "autofuse":
        for number in range(2 * MANY_STEPS):  # from so many on, C does what surrounds the kernel
            step()
            if number < 8:
                time.sleep(0.05)
        end = time.perf_counter() + RUNNER_SECONDS
        while not run.session.optimizers.is_in_c and time.perf_counter() < end:
            time.sleep(0.05)
        return Prepared([step], run.session.context.paused_seconds - paused, count_call(step))
    step = outside_of_the_session(step)
    if contender.startswith("compile"):
        with inductor_counters() as count:
            stall = first_calls([step, step, step])  # the second finds the state that the first has made
        return Prepared([step], stall, compiled_count(count, step))
    return Prepared([step], 0.0, count_call(step))


# What `Optimizer.step` calls; a session puts its own in their place.
_STEPS: dict[Any, tuple[str, Any]] = {
    adam: ("adam", adam.adam), adamw: ("adamw", adamw.adamw), adam.Adam: ("_init_group", adam.Adam._init_group)
}  # fmt: skip


def outside_of_the_session(step: Call) -> Call:
    """A step with torch's own functions in place."""

    def plain() -> object:
        before = {owner: vars(owner)[name] for owner, (name, _) in _STEPS.items()}
        for owner, (name, function) in _STEPS.items():
            setattr(owner, name, function)
        try:
            return step()
        finally:
            for owner, function in before.items():
                setattr(owner, _STEPS[owner][0], function)

    return plain


# ---- the run --------------------------------------------------------------------------------------------------------


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the table is to show."""
    timed = [r for r in rows if "autofuse_over" in r]
    free = [r for r in timed if r["bound"] == "memory"]
    found: dict[str, Any] = {
        "slower_than_eager": [
            f"{r['row']} {r['shape']}: {r['autofuse_over']['eager']['median']:.3f}"
            for r in timed
            if max(r["autofuse_over"]["eager"]["high"], _over_again(r)) < 1.0
        ],
        "seed_figures_missed": [
            f"{r['row']}: {r['autofuse_over']['eager']['median']:.2f} of {r['seed_figure']}{_limit(r)}"
            for r in timed
            if not r.get("seed_reached", True)
        ],
    }
    for name in CONTENDERS[:-1]:
        ratios = [r["autofuse_over"][name]["median"] for r in free if name in r["autofuse_over"]]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            found[f"geometric_mean_over_{name.replace(' ', '_')}"] = {"ratio": round(mean, 3), "rows": len(ratios)}
    best = [
        min(r["autofuse_over"][n]["median"] for n in COMPILED if n in r["autofuse_over"])
        for r in free
        if any(n in r["autofuse_over"] for n in COMPILED)
    ]
    if best:
        mean = math.exp(sum(map(math.log, best)) / len(best))
        found["geometric_mean_over_better_compile"] = {"ratio": round(mean, 3), "rows": len(best)}
    return found


def _over_again(row: dict[str, Any]) -> float:
    """The upper bound against the other eager module; 0 where there was none."""
    again = row.get("eager_again")
    return again["autofuse_over"]["high"] if again else 0.0


def _limit(row: dict[str, Any]) -> str:
    """Why a row cannot get further, where that was measured."""
    rest = row.get("unavoidable")
    if rest is None:
        return ""
    return (
        f"; what no fusion takes away runs alone in {rest['us']['median']:.0f} us ({rest['bytes'] / 1e6:.0f} MB, "
        f"{rest['gb_per_s']:.1f} GB/s), {rest['eager_over']['median']:.2f}x eager's row"
    )


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['row']:34s}{row['shape']:8s}"]
    for name in CONTENDERS:
        entry = row["contenders"].get(name)
        if entry is None:
            cells.append(f"{'-':>22s}")
            continue
        count = f"{entry['kernels']}k {entry['bytes'] / 1e6:.3g}MB" if "kernels" in entry else ""
        cells.append(f"{entry['us']['median']:10.0f} {count:>11s}")
    over = row.get("autofuse_over", {})
    cells.append("".join(f"{over[n]['median']:7.2f}" if n in over else f"{'-':>7s}" for n in CONTENDERS[:-1]))
    return " ".join(cells)


def copy_bandwidth() -> float:
    """GB/s, read and written, of torch's own copy of 256 MiB."""
    source, target = torch.ones(64 << 20), torch.zeros(64 << 20)
    samples = interleave({"copy": lambda: target.copy_(source)}, 7, 1)["copy"]
    return 2 * source.nbytes / statistics.median(samples) / 1e3


def asked() -> argparse.Namespace:
    parser = arguments(
        __doc__, "patterns", quick="short tuning, few rounds; proves nothing about speed", only="rows", malloc=True
    )
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of cache, memory, ragged")
    parser.add_argument("--contenders", default=",".join(USUAL), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="torch.compile is left out of rows after this time")
    parser.add_argument("--store", type=Path, help="a store to keep; a temporary one by default")
    return parse(parser)


def settings_for(options: argparse.Namespace) -> Any:
    values = {
        "run.store": options.store or _FOLDER / "store.sqlite3",
        "run.tune": "wait",
        "run.quiet": True,
        "tuner.budget_seconds": 3600.0,
        "tuner.memory_bytes": 8 << 30,  # tensors of 64 MiB are checked in float64, in several copies
        "tuner.job_seconds": 1.5 if options.quick else 5.0,
        "tuner.trials": 2 if options.quick else 12,
        "tuner.idle_exit_seconds": 60.0,
    }
    return load(cli=values, environ={}, cwd=_FOLDER)


def main() -> int:
    options = asked()
    names = chosen(options.only, [*(row.name for row in ROWS), ADAMW])
    if options.malloc == "on":
        keep_freed_memory()
    settings = settings_for(options)
    session = start_session(settings, "benchmarks/patterns.py")
    contenders = tuple(c for c in CONTENDERS if c in options.contenders.split(","))
    run = Benchmark(
        session, options.out, 5 if options.quick else ROUNDS, options.quick, options.malloc, contenders,
        minutes=options.minutes,
    )  # fmt: skip
    torch._dynamo.config.recompile_limit = 32
    torch._inductor.config.fx_graph_cache = False  # a graph of one shape must not be counted as that of another
    try:
        run.copy_gbs = copy_bandwidth()
        print(f"copy {run.copy_gbs:.1f} GB/s; us a call, kernels, bytes; autofuse over each of the others")
        print(f"{'':43s}" + "".join(f"{name:>23s}" for name in CONTENDERS))
        for name in names:
            for shape in options.shapes.split(","):
                torch._dynamo.reset()
                session.context.routers.clear()  # or later rows would pay for looking through graphs of earlier ones
                gc.collect()
                row = next((r for r in ROWS if r.name == name), None)
                found = measure_adamw(run, shape) if row is None else measure(run, row, shape)
                run.rows.append(found)
                run.save()
                print(line(found), found["contenders"].get("autofuse", {}).get("state", ""), flush=True)
    finally:
        session.finish(0)
        control.stop(settings)
        run.save()
        shutil.rmtree(_FOLDER, ignore_errors=True)
    print_end(bars(run.rows), run.left_out, run.out, run.began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
