"""How near memory-bound kernels come to a copy: bytes a second of tuned kernels over those of a measured copy.

    python benchmarks/bandwidth.py                  # all rows: 4 minutes
    python benchmarks/bandwidth.py --only add,cast  # rows by the beginning of their names; the rest of the file stays
    python benchmarks/bandwidth.py --quick          # a trial of the benchmark itself

Bar on a CPU: 85 % of a copy's bytes a second, for rows whose tensors take 64 MiB and more together.

A row is one node, captured and tuned as in `regret.py`. The bytes of a kernel are those of its inputs and outputs, each
once (`patterns_count.py`). ``copy`` is torch's ``Tensor.copy_`` of as many bytes, half of them read and half written,
into memory that was touched before. ``streams`` is a loop in C that reads and writes in the row's own proportion, past
the caches, and computes nothing: what this memory gives for that proportion. Kernels allocate their outputs as the
router does. malloc keeps freed memory for all of them, as `autofuse run` sets it where that wins (``--malloc off``: as
glibc has it, where fresh outputs of this size fault in page by page); page faults are counted.

Where a row misses the bar, ``bound_by`` says what was measured: the same kernel on tensors that stay in a core's caches
(no faster there: arithmetic bounds it), and what ``streams`` gets (no faster either: memory does; the times of both
add up to the kernel's: they take turns instead of overlapping). Rows for which none of it holds have no ``bound_by``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from common import arguments, chosen, interleave, parse, print_end, ratio, save, summary
from nodes import CPU, Case, Node, Tuner, angles, capture, full, tuning_session, vectors
from patterns_count import tensor_bytes
from patterns_rows import Tensors, add_relu, affine_relu, layer_norm_gelu, masked_softmax, rms_norm, rotary, swiglu
from torch.nn import functional as F

from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.templates import LOOP
from autofuse.db.store import Store
from autofuse.ir.records import Config, Decision, KernelRecord, make_config
from autofuse.process.apply import keep_freed_memory
from autofuse.runtime.session import Session
from autofuse.tuner.backends import CBackend
from autofuse.wrapper.node_call import make_launcher, make_unfused

BAR = 0.85
LEAST_BYTES = 64 << 20
ROUNDS = 31
ALIKE = 1.10  # figures this near to each other are no difference worth a cause
SMALL_ELEMENTS = 64 << 10  # of the widest tensor of the probe: a share of it in each core's own cache
PROBE_SECONDS = 2e-3
Call = Callable[[], object]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


def scaled_cast(x: torch.Tensor) -> torch.Tensor:
    return (x * 0.5).to(torch.bfloat16)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(-1)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum(0)


def adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Tensors:
    """A step as a script writes it out: four tensors read, three written."""
    m = m * 0.9 + g * 0.1
    v = v * 0.999 + g * g * 0.001
    return p * 0.9999 - 0.001 * m / (v.sqrt() + 1e-8), m, v


ROWS: tuple[Case, ...] = (
    Case("add", add, full(2, 1024), tuple, (16384,)),
    Case("add+relu", add_relu, full(2, 1024), tuple, (16384,)),
    Case("affine+relu", affine_relu, full(1, 1024), vectors(1024, 1024), (16384,)),
    Case("swiglu", swiglu, full(2, 1024), tuple, (16384,)),
    Case("rotary", rotary, full(1, 8, 512, 64), angles(512), (64,)),
    Case("cast to bfloat16", scaled_cast, full(1, 1024), tuple, (24576,)),
    Case("sum of squares, rows", row_sums, full(1, 1024), tuple, (32768,)),
    Case("sum of squares, columns", column_sums, full(1, 1024), tuple, (32768,)),
    Case("softmax", lambda x: torch.softmax(x, -1), full(1, 1024), tuple, (16384,)),
    Case("softmax+scale+mask", masked_softmax, full(1, 8, 512, 512),
         lambda: (torch.triu(torch.ones(512, 512, dtype=torch.bool), 1),), (8,)),
    Case("layer_norm", layer_norm, full(1, 1024), vectors(1024, 1024), (16384,)),
    Case("layer_norm+gelu", layer_norm_gelu, full(1, 1024), vectors(1024, 1024), (16384,)),
    Case("rms_norm", rms_norm, full(1, 1024), vectors(1024), (16384,)),
    Case("adamw, written out", adamw, lambda rows: tuple(torch.rand(rows, 1024) for _ in range(4)), tuple, (8192,)),
)  # fmt: skip


# ---- what memory gives ----------------------------------------------------------------------------------------

_STREAMS = """
#include <stdint.h>
#include <omp.h>
#include <immintrin.h>
#if defined(__AVX512F__)
typedef __m512 vec;
#define LOAD(p) _mm512_loadu_ps(p)
#define ADD(a, b) _mm512_add_ps(a, b)
#define STREAM(p, v) _mm512_stream_ps(p, v)
#else
typedef __m256 vec;
#define LOAD(p) _mm256_loadu_ps(p)
#define ADD(a, b) _mm256_add_ps(a, b)
#define STREAM(p, v) _mm256_stream_ps(p, v)
#endif
enum { LANES = sizeof(vec) / 4 };
__attribute__((visibility("default"))) float af_entry(float** in, float** out, int64_t n, int threads) {
  float kept = 0;
  #pragma omp parallel num_threads(threads) reduction(+:kept)
  {
    const int64_t team = omp_get_num_threads(), tid = omp_get_thread_num(), blocks = n / LANES;
    vec sum = {0};
    for (int64_t b = blocks * tid / team; b < blocks * (tid + 1) / team; ++b) {
      vec v = LOAD(in[0] + b * LANES);
@READS@
      sum = ADD(sum, v);
@WRITES@
    }
    _mm_sfence();
    kept += ((float*)&sum)[0];
  }
  return kept;
}
"""


@dataclass
class Streams:
    """So many arrays read and so many written by a loop in C that does nothing else."""

    call: Call
    reads: int
    writes: int
    nbytes: int


def make_streams(read_bytes: int, written_bytes: int, threads: int) -> Streams:
    """A loop that moves about as many bytes in the same proportion."""
    parts = Fraction(written_bytes, read_bytes).limit_denominator(8)
    reads, writes = parts.denominator, parts.numerator
    count = (read_bytes + written_bytes) // (reads + writes) // 4 // 64 * 64
    text = _STREAMS.replace(
        "@READS@", "\n".join(f"      v = ADD(v, LOAD(in[{k}] + b * LANES));" for k in range(1, reads))
    )
    text = text.replace("@WRITES@", "\n".join(f"      STREAM(out[{k}] + b * LANES, v);" for k in range(writes)))
    toolchain = find_toolchain()
    loaded = load_kernel(compile_source(text, toolchain, toolchain.flags), "streams")
    function = loaded.library.af_entry
    function.restype = ctypes.c_float
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    arrays = [aligned(count) for _ in range(reads + writes)]
    pointers = (ctypes.c_void_p * len(arrays))(*(a.data_ptr() for a in arrays))
    outs = ctypes.addressof(pointers) + reads * ctypes.sizeof(ctypes.c_void_p)

    def call() -> object:
        return (function(ctypes.addressof(pointers), outs, count, threads), arrays)[0]

    return Streams(call, reads, writes, 4 * count * (reads + writes))


def aligned(count: int) -> torch.Tensor:
    """Touched floats from an address that is a multiple of 64."""
    whole = torch.ones(count + 16)
    return whole[(-whole.data_ptr() % 64) // 4 :][:count]


def make_copy(nbytes: int) -> Call:
    """``copy_`` of half as many bytes, which reads one half and writes the other."""
    source, target = torch.ones(nbytes // 8), torch.zeros(nbytes // 8)
    return lambda: target.copy_(source)


# ---- a row ----------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """What all rows share."""

    session: Session
    tuner: Tuner
    backend: CBackend
    rounds: int


def best_kernel(run: Bench, node: Node, values: tuple[int, ...], decision: Decision) -> tuple[KernelRecord, Config]:
    """The fastest that was measured where eager has won. Raises ValueError where none ran."""
    with Store.open(run.tuner.settings.run.store, readonly=True) as store:
        rows = [m.measurement for m in store.results.measurements(node.fusion_id) if m.measurement.speedup is not None]
    best = max(
        (
            m
            for m in rows
            if m.symbol_values == values and m.candidate.variant in (run.backend.generic, run.backend.specialised)
        ),
        key=lambda m: m.speedup or 0.0,
        default=None,
    )
    if best is None:
        raise ValueError(f"expected a kernel that ran, found: {decision.reason}: {decision.detail}")
    named = dict(zip(node.form.symbols, values, strict=True))
    constants = named if best.candidate.variant == run.backend.specialised else {}
    recipe = run.backend.recipe(node.form, LOOP, best.candidate.config, constants, [named], is_final=True)
    return recipe.make(), best.candidate.config


def measure(run: Bench, case: Case) -> dict[str, Any]:
    try:
        node = capture(run.session, case)
    except ValueError:
        return measure_eager(run, case)
    (values,) = node.values.values()
    decision, kernel, _ = run.tuner.decide(node, values)
    config = decision.candidate.config
    is_kernel = kernel is not None
    if kernel is None:
        kernel, config = best_kernel(run, node, values, decision)
    threads = torch.get_num_threads()
    entry = run.session.kernels.catalogue.backends.cpu.load(kernel.key.digest, kernel.name, kernel.binary, CPU)
    inputs = make_inputs(node.form, values, 1)
    fused, unfused = make_launcher(node.form, entry, values, threads), make_unfused(node.form, values)
    found = {
        "row": case.name,
        "symbol_values": list(values),
        "operations": [op.short_name for op in node.form.operations],
        "decision": {
            "variant": decision.candidate.variant, "reason": decision.reason, "detail": decision.detail,
            "configuration": dict(config), "is_kernel_in_use": is_kernel,
        },
    } | race(run, inputs, {"kernel": lambda: fused(*inputs), "eager": lambda: unfused(*inputs)})  # fmt: skip
    found["in_cache_gb_per_s"] = round(in_cache(run, node, values, config, threads), 2)
    if not found["is_bar_met"]:
        found |= why(found)
    return found


def measure_eager(run: Bench, case: Case) -> dict[str, Any]:
    """A row that the planner leaves to eager's own kernel, which then is what a script runs."""
    inputs = [*case.inputs(case.rows[0]), *case.parameters()]
    refusals = [f"{r.code}: {r.detail}" for r in run.session.context.refusals if not r.accepted][-1:]
    decision = {
        "variant": "eager", "reason": "no_node", "detail": "".join(refusals), "configuration": {},
        "is_kernel_in_use": False,
    }  # fmt: skip
    found = {"row": case.name, "operations": [], "decision": decision}
    with torch.no_grad():
        found |= race(run, inputs, {"eager": lambda: case.function(*inputs)})
    found["in_cache_gb_per_s"] = 0.0
    return found if found["is_bar_met"] else found | why(found)


def race(run: Bench, inputs: Sequence[torch.Tensor], calls: dict[str, Call]) -> dict[str, Any]:
    """What was moved, how fast, and how fast a copy and bare streams move as much; the first call is the row's own."""
    own = next(iter(calls))
    outputs = calls[own]()
    written = sum(map(tensor_bytes, outputs if isinstance(outputs, tuple) else (outputs,)))
    read = sum(map(tensor_bytes, inputs))
    del outputs
    nbytes = read + written
    if nbytes < LEAST_BYTES:
        raise ValueError(f"expected {LEAST_BYTES} bytes and more, found {nbytes}")
    streams = make_streams(read, written, torch.get_num_threads())
    calls = {"copy": make_copy(nbytes), **calls, "streams": streams.call}
    faults = {name: page_faults(call, 2) for name, call in calls.items()}
    samples = timed(calls, run.rounds)
    # Microseconds for as many bytes as the row moves.
    samples["streams"] = [s * nbytes / streams.nbytes for s in samples["streams"]]
    share = ratio(samples["copy"], samples[own])
    return {
        "bytes_read": read,
        "bytes_written": written,
        "contenders": {
            name: {
                "us": summary(samples[name]),
                "gb_per_s": round(nbytes / statistics.median(samples[name]) / 1e3, 2),
                "page_faults": faults[name],
            }
            for name in calls
        },
        "streams": {"reads": streams.reads, "writes": streams.writes, "bytes": streams.nbytes},
        "share_of_copy": share,
        "share_of_streams": ratio(samples["streams"], samples[own]),
        "eager_share_of_copy": ratio(samples["copy"], samples["eager"]),
        "is_bar_met": share["median"] >= BAR,
    }


def timed(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    gc.collect()
    gc.disable()
    try:
        return interleave(calls, rounds, 1)
    finally:
        gc.enable()


def page_faults(call: Call, times: int) -> float:
    call()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / times


# ---- why a row is slower ---------------------------------------------------------------------------------------


def in_cache(run: Bench, node: Node, values: tuple[int, ...], config: Config, threads: int) -> float:
    """GB/s of the same configuration, stores through the caches, on tensors that stay in them; 0.0 where none fit.

    On one thread, since parallel regions would take longer than the work; times the threads that share the real one.
    """
    knobs = {name: choice for name, choice in config if name != "nontemporal"}
    if not node.form.symbols or "way" in knobs:
        return 0.0
    small = tuple(max(1, v * SMALL_ELEMENTS // widest(node, values)) for v in values)
    recipe = run.backend.recipe(node.form, LOOP, make_config(knobs), {}, [], is_final=True)
    record = recipe.make()
    entry = run.session.kernels.catalogue.backends.cpu.load(record.key.digest, record.name, record.binary, CPU)
    inputs = make_inputs(node.form, small, 1)
    call = make_launcher(node.form, entry, small, 1)
    outputs = call(*inputs)
    nbytes = sum(map(tensor_bytes, (*inputs, *(outputs if isinstance(outputs, tuple) else (outputs,)))))
    call(*inputs)
    began = time.perf_counter()
    call(*inputs)
    repeats = max(1, int(PROBE_SECONDS / (time.perf_counter() - began)))
    samples = interleave({"kernel": lambda: call(*inputs)}, 9, repeats)["kernel"]
    used = threads if dict(config).get("threads") == "parallel" else 1
    return used * nbytes / statistics.median(samples) / 1e3


def widest(node: Node, values: Sequence[int]) -> int:
    return max(t.numel() for t in make_inputs(node.form, values, 1))


def why(row: dict[str, Any]) -> dict[str, str]:
    """What bounds a row, as far as it was measured."""
    gbs = {name: entry["gb_per_s"] for name, entry in row["contenders"].items()}
    ours, streams, copy, cached = gbs.get("kernel", gbs["eager"]), gbs["streams"], gbs["copy"], row["in_cache_gb_per_s"]
    proportion = f"{row['streams']['reads']} reads to {row['streams']['writes']} writes"
    if 0.0 < cached <= ALIKE * ours:
        return {"bound_by": f"arithmetic: {ours} GB/s from memory, {cached} GB/s from the caches; a copy {copy} GB/s"}
    if streams <= ALIKE * ours:
        return {"bound_by": f"memory: a loop that only moves {proportion} gets {streams} GB/s, the kernel {ours}"}
    if cached and abs((1 / cached + 1 / streams) * ours - 1) <= ALIKE - 1:
        return {
            "bound_by": f"memory and arithmetic in turns: {streams} GB/s for {proportion} alone and {cached} GB/s from "
            f"the caches make {1 / (1 / cached + 1 / streams):.1f} GB/s one after the other; found {ours}"
        }
    return {}


# ---- the run ---------------------------------------------------------------------------------------------------


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "bar": BAR,
        "rows": len(rows),
        "met": sum(r["is_bar_met"] for r in rows),
        "missed": {
            r["row"]: f"{r['share_of_copy']['median']:.3f} ({r['share_of_copy']['low']:.3f} to "
            f"{r['share_of_copy']['high']:.3f}); {r.get('bound_by', 'cause not found')}"
            for r in rows
            if not r["is_bar_met"]
        },
    }


def keep(path: Path, malloc: str, rows: list[dict[str, Any]], left_out: list[str]) -> None:
    words = "freed memory is kept (thresholds of process.malloc=on)" if malloc == "on" else "as glibc has it"
    save(path, "bandwidth", malloc=words, bars=bars(rows), rows=rows, left_out=left_out)


def line(row: dict[str, Any]) -> str:
    gbs = {name: entry["gb_per_s"] for name, entry in row["contenders"].items()}
    share, streams = row["share_of_copy"], row["share_of_streams"]
    use = "" if row["decision"]["is_kernel_in_use"] else f" (eager stays: {row['decision']['reason']})"
    return (
        f"{row['row']:26s}{(row['bytes_read'] + row['bytes_written']) / 2**20:6.0f} MiB"
        + "".join(f"{gbs.get(name, 0.0):9.1f}" for name in ("copy", "streams", "eager", "kernel"))
        + f"{row['in_cache_gb_per_s']:9.1f}   {share['median']:.3f} ({share['low']:.3f} to {share['high']:.3f})"
        f"   {streams['median']:.3f}{use}  {' '.join(f'{k}={v}' for k, v in row['decision']['configuration'].items())}"
        f"  {row.get('bound_by', '')}"
    )


def main() -> int:
    options = parse(
        arguments(
            __doc__, "bandwidth", quick="two rows, few rounds; proves nothing about speed", only="rows", malloc=True
        )
    )
    names = chosen(options.only, [case.name for case in ROWS], "affine,layer_norm" if options.quick else "")
    rows: list[dict[str, Any]] = []
    if options.only and options.out.exists():
        rows = [r for r in json.loads(options.out.read_text())["rows"] if r["row"] not in names]
    left_out: list[str] = []
    if options.malloc == "on":
        keep_freed_memory()
    began = time.monotonic()
    print("GB/s of copy, streams, eager, kernel, kernel in caches; share of copy, of streams")
    # Tensors of this size are checked in float64, in several copies.
    with tuning_session("bandwidth", memory_bytes=8 << 30) as (session, tuner):
        run = Bench(session, tuner, CBackend(find_toolchain()), 5 if options.quick else ROUNDS)
        try:
            for case in (case for case in ROWS if case.name in names):
                try:
                    rows.append(measure(run, case))
                except ValueError as problem:
                    left_out.append(f"{case.name}: {problem}")
                    continue
                keep(options.out, options.malloc, rows, left_out)
                print(line(rows[-1]), flush=True)
        finally:
            keep(options.out, options.malloc, rows, left_out)
    print_end(bars(rows), left_out, options.out, began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
