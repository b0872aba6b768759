"""Landscapes for the search of GPU kernels, made from compiled code: what a model makes of each configuration.

    python benchmarks/ranking_landscapes.py --minutes 30     # goes on where it ended before

In: kernels of the tests' table with sizes. Out: results/ranking_landscapes.json: of each configuration in a space what
its launches do (`Run`), or null where the tuner would not time it, since it spills or does not fit; of a few landscapes
also the microseconds, in tests/tuner/landscapes.json. Compiled for sm_90; registers, spills and shared memory are the
assembler's; instructions, sectors, waits and barriers come from executing the PTX of one block (`ptx/one_block.py`).
`microseconds` makes a time of them. It is no time of a GPU: only a GPU can show that. But such a landscape has what
makes a search hard there: cliffs, plateaus, knobs that depend on each other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import prod
from pathlib import Path
from typing import Any

from common import RESULTS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the tests' cases are

from autofuse.codegen.call import torch_dtype
from autofuse.codegen.knobs import Choice, Knob
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.compile import Compiled, _image, compiled_kernels
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.program import tile_config
from autofuse.codegen.triton.resources import Resources, occupancy
from autofuse.codegen.triton.source import Launch as Call
from autofuse.codegen.triton.source import TritonSource, natural_assumptions, resolve
from autofuse.codegen.triton.targets import limits_of, prune_reason
from autofuse.errors import CompilerError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config, make_config
from autofuse.ir.shape import evaluate
from ptx.machine import Launch
from ptx.memory import Fault
from ptx.one_block import SECTOR, BlockWork, address_of, work_of
from ptx.text import Unsupported, parse
from tests.cases import CASES

OUT = RESULTS / "ranking_landscapes.json"
FOR_TESTS = Path(__file__).parents[1] / "tests" / "tuner" / "landscapes.json"
TARGET = "cuda:90"
MOST_CONFIGS = 90  # of a space: knobs with more choices lose every other one
FIXED = ("eviction", "math", "num_stages", "index_bits")  # knobs whose effect is not seen here, or is always the same
SCRATCH = 100  # number of the first allocation of scratch memory
MOST_EACH = 128  # elements of a thread: with more, a kernel spills, and compiling it takes minutes
MOST_TRIPS = 16  # of a loop over tiles that are executed; of longer ones two lengths are

SIZES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "gelu_backward": ((4096, 4096), (256, 300)),
    "add_bias_gelu": ((8192, 1024), (64, 500)),
    "clone_transposed": ((4096, 4096), (500, 300)),
    "transposed_add": ((2048, 2048), (256, 512)),
    "softmax": ((64, 64, 1024), (1, 64, 32768), (16, 1024, 128)),
    "softmax_backward": ((1, 8192, 512), (1, 256, 8192)),
    "add_layer_norm": ((16, 512, 768), (1, 512, 4096)),
    "layer_norm_backward": ((16, 512, 768), (4, 64, 2048)),
    "rms_norm_parts": ((4, 1024, 4096), (1, 128, 16384)),
    "bias_gradient": ((16, 512, 1024), (1, 256, 4096)),
    "sum_first": ((4096, 16, 64), (65536, 1, 64)),
    "sum_all": ((64, 512, 512), (16, 64, 64)),
    "cross_entropy": ((4096, 8192), (512, 1000)),
    "logsumexp": ((1, 64, 32768), (8, 1024, 2048)),
    "batch_norm_backward": ((64, 16, 16), (32, 56, 56)),
    "mean_last": ((1, 16384, 256), (1, 32, 32768)),
    "moves_of_parts": ((64, 1000, 31, 3, 5000), (512, 4096, 64, 16, 65536)),
}

TESTED = (
    ("gelu_backward", (256, 300)), ("transposed_add", (256, 512)), ("softmax", (1, 64, 32768)),
    ("layer_norm_backward", (16, 512, 768)), ("bias_gradient", (16, 512, 1024)), ("sum_all", (64, 512, 512)),
    ("mean_last", (1, 32, 32768)),
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """An H100 SXM. Sources: NVIDIA's H100 white paper; latencies and the L2 as published microbenchmarks have them."""

    multiprocessors: int = 132
    hertz: float = 1.7e9
    memory: float = 3.35e12  # bytes a second
    cache: float = 5.5e12  # of the L2
    port: float = 64 * 1.7e9  # of one multiprocessor
    latency: float = 650e-9  # of global memory
    issue: int = 4  # instructions of warps that a multiprocessor begins in a cycle
    dependent: int = 5  # cycles from an instruction of a warp to its next one
    barrier: int = 40  # cycles
    launch: float = 2.5e-6
    next_launch: float = 1.5e-6
    power: float = 4.0  # how well one limit hides the others: 1 not at all


@dataclass(frozen=True)
class Run:
    """One launch: its blocks, what one of them does and takes, and what all of them move."""

    blocks: int
    warps: int
    registers: int
    shared: int  # bytes
    cycles: int  # in which its warps issue instructions, all together
    longest: int  # the same of one warp
    waits: int
    barriers: int
    sectors: int  # that it asks for
    moved: int  # bytes, of all blocks


def microseconds(runs: Sequence[Run], device: Device) -> float:
    """What a call takes by this model."""
    total = device.launch + device.next_launch * (len(runs) - 1)
    for run in runs:
        held = occupancy(Resources(run.registers, 0, run.shared, 32 * run.warps), TARGET)
        assert held is not None
        at_once = max(1, held.warps // run.warps)
        each = -(-run.blocks // device.multiprocessors)  # of the busiest multiprocessor
        waves = -(-run.blocks // (device.multiprocessors * at_once))
        one = run.waits * device.latency
        one += (run.longest * device.dependent + run.barriers * device.barrier) / device.hertz
        limits = (
            run.moved / device.memory,
            run.blocks * run.sectors * SECTOR / device.cache,
            each * run.sectors * SECTOR / device.port,
            each * run.cycles / device.issue / device.hertz,
            waves * one,
        )
        total += sum(limit**device.power for limit in limits) ** (1 / device.power)
    return total * 1e6


# ---- one configuration -------------------------------------------------------------------------------------------


def runs_of(
    kernel: LoopKernel, config: Config, values: Mapping[str, int], nbytes: Mapping[int, int]
) -> list[Run] | None:
    """The launches of a configuration; None where the tuner would not time it. ``nbytes``: of each parameter."""
    tile = tile_config(kernel, config) if not kernel.rest else None
    if tile and tile.block_rows * tile.block_cols > MOST_EACH * 32 * int(dict(config)["num_warps"]):
        return None
    source = print_triton(kernel, config)
    try:
        made = compiled_kernels(source, TARGET, [natural_assumptions(source.symbols, values)])
        artifact = Artifact(source, TARGET, tuple(_image(*item) for item in made))
    except CompilerError:
        return None
    if prune_reason(artifact, limits_of(TARGET)) is not None:
        return None
    call = resolve(source, values)
    scratch = {SCRATCH + n: count * torch_dtype(dtype).itemsize for n, (dtype, count) in enumerate(call.scratch)}
    sizes = {**nbytes, **scratch}
    return [_run(source, item, launch, values, sizes) for item, launch in zip(made, call.launches, strict=True)]


def _run(source: TritonSource, item: Compiled, call: Call, values: Mapping[str, int], nbytes: Mapping[int, int]) -> Run:
    program, launched = parse(item.kernel.asm["ptx"]), source.passes[call.number]
    scalars = iter(call.scalars)
    first = {"param": 0, "scratch": SCRATCH}
    arguments = [address_of(a.index + first[a.kind]) if a.kind in first else next(scalars) for a in launched.arguments]
    kinds = [a.kind for a in launched.arguments]
    arguments += [0] * (len(program.parameters) - len(arguments))  # Triton's own memory: none

    def work(trips: int | None) -> BlockWork:
        given = list(arguments)
        if trips is not None:  # so many programs that each has so many tiles
            given[kinds.index("programs")] = max(1, tiles // trips)
        launch = Launch(1, item.resources.threads, item.resources.shared_bytes, tuple(given))
        block = call.grid // 2 if trips is None else 0
        return work_of(program, launch, block, call.grid, tuple(nbytes))

    if not launched.shared:
        return _of_all(call.grid, work(None), item.resources, nbytes)
    tiles = prod(-(-evaluate(extent, values) // block) for extent, block in launched.tiles[: launched.shared])
    trips = -(-tiles // arguments[kinds.index("programs")])
    if trips <= MOST_TRIPS:
        return _of_all(call.grid, work(None), item.resources, nbytes)
    short, long = work(MOST_TRIPS // 2), work(MOST_TRIPS)
    more = (trips - MOST_TRIPS) / (MOST_TRIPS / 2)
    return _of_all(call.grid, long.scaled(1.0 + more, short, -more), item.resources, nbytes)


def _of_all(blocks: int, work: BlockWork, taken: Resources, nbytes: Mapping[int, int]) -> Run:
    """Of memory each byte is moved once; whatever blocks have in common comes from the cache."""
    moved = sum(min(blocks * n * SECTOR, nbytes[k]) for k, n in work.touched.items())
    return Run(
        blocks, work.warps, taken.registers, taken.shared_bytes, work.cycles, work.longest, work.waits, work.barriers,
        work.sectors, moved,
    )  # fmt: skip


# ---- one landscape -----------------------------------------------------------------------------------------------


def thinned(knobs: Sequence[Knob]) -> dict[str, tuple[Choice, ...]]:
    """The choices of a space that is not too large."""
    choices = {knob.name: (knob.default,) if knob.name in FIXED else knob.choices for knob in knobs}
    defaults = {knob.name: knob.default for knob in knobs}
    while prod(map(len, choices.values())) > MOST_CONFIGS:
        name = max(choices, key=lambda n: len(choices[n]))
        at = choices[name].index(defaults[name])
        choices[name] = choices[name][at % 2 :: 2]
    return choices


def bytes_of(form: NodeForm, kernel: LoopKernel, values: Mapping[str, int]) -> dict[int, int]:
    """Of each parameter of a kernel, by its number."""
    specs = [given.spec for given in form.inputs] + [form.spec(ref) for ref in form.outputs]
    return {
        n: evaluate(spec.numel, values) * torch_dtype(param.dtype).itemsize
        for n, (param, spec) in enumerate(zip(kernel.params, specs, strict=True))
    }


def landscape(name: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """All configurations of a kernel."""
    form = CASES[name].form()
    kernel, values = lower(form), dict(zip(form.symbols, sizes, strict=True))
    knobs = triton_knobs(kernel, values, values)
    choices, nbytes = thinned(knobs), bytes_of(form, kernel, values)
    found: list[list[list[int]] | None] = []
    for chosen in itertools.product(*choices.values()):
        try:
            runs = runs_of(kernel, make_config(dict(zip(choices, chosen, strict=True))), values, nbytes)
        except (Unsupported, Fault) as error:
            raise SystemExit(f"{name} {sizes} {chosen}: {error}") from None
        found.append(None if runs is None else [list(astuple(run)) for run in runs])
    return {
        "case": name,
        "sizes": list(sizes),
        "knobs": {n: list(c) for n, c in choices.items()},
        "defaults": {knob.name: knob.default for knob in knobs},
        "runs": found,
    }


def times_of(row: Mapping[str, Any], device: Device) -> dict[Config, float | None]:
    """Microseconds of each configuration of a stored landscape; None for one that is not timed."""
    configs = [make_config(dict(zip(row["knobs"], c, strict=True))) for c in itertools.product(*row["knobs"].values())]
    runs = [None if found is None else [Run(*run) for run in found] for found in row["runs"]]
    return {
        config: None if found is None else microseconds(found, device)
        for config, found in zip(configs, runs, strict=True)
    }


def write_for_tests(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A few landscapes with their microseconds alone."""
    short = [
        {
            **{name: row[name] for name in ("case", "sizes", "knobs", "defaults")},
            "us": _rounded(times_of(row, Device())),
        }
        for row in rows
        if (row["case"], tuple(row["sizes"])) in TESTED
    ]
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in short) + "\n]\n")


def _rounded(times: Mapping[Config, float | None]) -> list[float | None]:
    return [None if us is None else round(us, 2) for us in times.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no new landscape is begun")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    began = time.monotonic()
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    known = {(row["case"], tuple(row["sizes"])) for row in rows}
    with tempfile.TemporaryDirectory(prefix="autofuse-landscapes-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for name, all_sizes in SIZES.items():
            for sizes in all_sizes:
                if (name, sizes) in known or time.monotonic() - began > 60 * options.minutes:
                    continue
                row = landscape(name, sizes)
                rows.append(row)
                options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
                timed = sorted(us for us in times_of(row, Device()).values() if us is not None)
                told = f"{len(row['runs'])}, {len(timed)} timed, {timed[0]:.1f} to {timed[-1]:.1f} us"
                print(f"{name} {sizes}: {told}", flush=True)
    if options.out == OUT:
        write_for_tests(rows, FOR_TESTS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
