"""Proofs that compiled kernels are free of races and deadlocks, by SentryWard.

    scripts/gpu-static --proofs                       # all nodes of the table of cases and products, sm_80 and sm_90
    scripts/gpu-static --proofs --only softmax --targets cuda:90
    scripts/gpu-static --proofs --minutes 20          # goes on where an earlier call stopped

In: nodes and targets. Out: a `Proof` of each kernel, and the file of results. A proof is of all schedules of one
launch: each pair of accesses to shared or global memory of which one writes is ordered, and all threads meet at the
same barriers. Guarantee: nothing is proved of bounds, other launches, or what the assembler makes of PTX. What the
prover does not know, or has no time or memory for, never counts as proved. It does not see values: where it finds two
writes without order, `ptx.schedules` proves that they are of one value, or our own executor runs the launch and sees
whether they are. Source: SentryWard 0.1.1 (Apache-2.0, PyPI).
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import triton  # noqa: F401

from autofuse.codegen.call import allocate
from autofuse.codegen.knobs import default_config
from autofuse.codegen.reference import make_inputs
from autofuse.codegen.triton.compile import Compiled, compiled_kernels
from autofuse.codegen.triton.source import TritonSource, natural_assumptions, resolve
from autofuse.errors import AutofuseError, CompilerError, ShapeError
from autofuse.ir.records import make_config
from benchmarks.common import commit, encode_rows, machine
from ptx.accesses import Findings
from ptx.kernels import PtxKernel
from ptx.machine import Launch
from ptx.memory import Conflicts, Fault, Global
from ptx.schedules import AllSchedules
from ptx.text import Program, Unsupported
from ptx.work import GENERATOR, Work, all_work

TARGETS = ("cuda:80", "cuda:90")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu_static.json"
FREE, RACE = "race_free", "potential_race"
ONE_VALUE = "one_value"  # race free but for unordered writes, each proved to be of one value
DUPLICATES = "duplicates"  # the same as far as one execution shows
PROVED = (FREE, ONE_VALUE)
SECONDS, MEBIBYTES = 15, 3000
PROGRAMS, SEVERAL = "PROGRAMS", 4  # the knob, and a choice that makes two passes
BLOCKS = range(2, 5)  # with one, nothing is seen between blocks; with many the prover ends too late
LEAST_WARPS = 2  # of a block, so that its barriers have something to order
MOST_LAUNCHES = 3  # that are tried where time is short
# Ragged, and few: of as many symbols as a node has.
SIZES = {1: ((700,), (70,)), 2: ((3, 700), (5, 33), (33, 5)), 3: ((1, 3, 700), (1, 5, 33), (3, 5, 9))}
_ENTRY = re.compile(r"\.visible \.entry \w+\(\s*(.*?)\s*\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param \.(\w+)[^,]*?(\w+)\s*(?:,|$)")


@dataclass(frozen=True)
class Proof:
    """What is known of one kernel of a node."""

    case: str
    target: str
    kernel: str
    sizes: tuple[int, ...]
    blocks: int
    warps: int  # of a block
    result: str  # "race_free", "one_value", "duplicates", or why nothing is proved: "unsupported", "timeout", ...
    reason: str = ""


def prover() -> Path | None:
    """The program of the installed package; None where it is not installed."""
    found = importlib.util.find_spec("sentryward")
    path = Path(str(found and found.origin)).parent / "_native" / "sentryward-ptx"
    return path if path.exists() else None


# ---- one node --------------------------------------------------------------------------------------------


def proofs_of(work: Work, target: str, programs: int = 0) -> Iterator[Proof]:
    """Of each kernel of a node, at the first sizes at which all of them are settled in time. Raises AutofuseError.

    ``programs``: of the first of two passes, for a node that can have two.
    """
    found: list[Proof] = []
    for values, source in _launches(work, programs):
        found = [replace(proof, case=label(work, programs)) for proof in _prove(work, values, source, target)]
        if not any(proof.result in ("timeout", "memory_budget_exceeded") for proof in found):
            break
    yield from found


def label(work: Work, programs: int) -> str:
    return f"{work}, in two passes" if programs else str(work)


def _launches(work: Work, programs: int) -> list[tuple[Mapping[str, int], TritonSource]]:
    """Sizes with the source for them: those first whose launches have several blocks and warps; the smallest last."""
    symbols = work.form.symbols
    own = () if work.sizes_are_any else tuple(tuple(values.values()) for values in work.sizes)
    found = []
    for sizes in own or SIZES.get(len(symbols), ()) or ((5,) * len(symbols),):
        values = dict(zip(symbols, sizes, strict=True))
        try:
            config = {**dict(default_config(GENERATOR.knobs(work.form, values, values))), **work.config}
            if programs and PROGRAMS not in config:
                continue
            source = GENERATOR.source(work.form, make_config(config | ({PROGRAMS: programs} if programs else {})), {})
            grids = [launch.grid for launch in resolve(source, values).launches]
        except ShapeError:
            continue
        most = max(grids, default=0)
        if most:
            rank = (source.num_warps < LEAST_WARPS) + (most not in BLOCKS)
            found.append(((rank, most * source.num_warps), values, source))
    ordered = [(values, source) for _, values, source in sorted(found, key=lambda item: item[0])]
    quickest = [(values, source) for _, values, source in sorted(found, key=lambda item: item[0][1])[:1]]
    return [*ordered[: MOST_LAUNCHES - 1], *quickest]


def _prove(work: Work, values: Mapping[str, int], source: TritonSource, target: str) -> Iterator[Proof]:
    assumed = natural_assumptions(source.symbols, values)
    kernels = {found.number: found for found in compiled_kernels(source, target, [assumed])}
    for launch in resolve(source, values).launches:
        kernel = kernels[launch.number]
        kinds = [a.kind for a in source.passes[launch.number].arguments]
        config = _config(kernel, launch.grid, kinds, launch.scalars)
        result, reason = _verdict(body_of(kernel.kernel.asm["ptx"]), json.dumps(config))
        if result == RACE:
            result, reason = _looked_at(work, values, source, target, reason)
        name = kernel.kernel.metadata.name
        yield Proof(str(work), target, name, tuple(values.values()), launch.grid, source.num_warps, result, reason)


def _config(kernel: Compiled, grid: int, kinds: Sequence[str], scalars: Sequence[int]) -> dict[str, Any]:
    """The prover's record of a launch: pointers are left out."""
    left = iter(scalars)
    given = [None if kind in ("param", "scratch") else next(left) for kind in kinds]
    entry = _ENTRY.search(kernel.kernel.asm["ptx"])
    assert entry is not None
    return {
        "schema": "spverify.kernel-input/v1",
        "launch": {
            "grid_dim": [grid, 1, 1],
            "block_dim": [kernel.resources.threads, 1, 1],
            "dynamic_shared_bytes": kernel.resources.shared_bytes,
        },
        "arguments": [
            {"parameter": name, "type": kind, "value": number}
            for (kind, name), number in zip(_PARAMETER.findall(entry[1]), given, strict=False)
            if number is not None
        ],
    }


def body_of(text: str) -> str:
    """PTX without what names its target, and without comments."""
    return re.sub(r"^\.(version|target).*$|^//.*$", "", text, flags=re.MULTILINE)


@functools.cache
def _verdict(text: str, config: str) -> tuple[str, str]:
    """The prover's result and reason. Cached: code for two targets often differs in the head alone."""
    program = prover()
    if program is None:
        raise RuntimeError("expected SentryWard, found none; install it with: pip install sentryward==0.1.1")
    with tempfile.TemporaryDirectory(prefix="autofuse-proof-") as folder:
        ptx, given = Path(folder) / "k.ptx", Path(folder) / "k.json"
        ptx.write_text(HEAD + text)
        given.write_text(config)
        words = ["--ptx", ptx, "--config", given, "--sync-threads", "1", "--rss-limit-mib", str(MEBIBYTES)]
        words += ["--timeout-seconds", str(SECONDS)]
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=10 * SECONDS)
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return "tool_failure", (done.stderr or done.stdout).strip()[-200:]
    if found["result"] == FREE:
        return FREE, ""
    first = next(iter(found["diagnostics"]), {"code": "no reason"})
    message = str(first.get("message", "")).replace(folder + "/", "")
    return str(found["result"]), f"{first['code']}: {message}".removesuffix(": ")


HEAD = ".version 8.7\n.target sm_90a\n"


def _looked_at(work: Work, values: Mapping[str, int], source: TritonSource, target: str, said: str) -> tuple[str, str]:
    """What is known of a call in which the prover has found accesses without order."""
    try:
        kernel = PtxKernel.compile(source, [values], target)
    except Unsupported as error:
        return RACE, f"{said}; not executed: {error}"
    found = _all_schedules(kernel, work, values)
    if isinstance(found, Findings) and found.one_value and not found.races:
        return ONE_VALUE, f"{found.one_value} bytes are written by several threads, always with one value"
    try:
        _call(kernel, work, values)
    except (Unsupported, Fault, AssertionError, MemoryError) as error:
        return RACE, f"{said}; not executed: {error}"
    if kernel.conflicts.races:
        return RACE, kernel.conflicts.races[0]
    twice = kernel.conflicts.counts["duplicates"]
    if not twice:
        return RACE, f"{said}; none seen"
    why = found.races[0] if isinstance(found, Findings) else found
    return DUPLICATES, f"{twice} bytes are written twice, with one value; not proved: {why}"


def _all_schedules(kernel: PtxKernel, work: Work, values: Mapping[str, int]) -> Findings | str:
    """What holds for all schedules of a call's launches, or why that is not known."""
    launches: list[Findings] = []

    def follow(program: Program, launch: Launch, memory: Global, _: Conflicts, named: dict[str, int]) -> None:
        memory.launches += 1
        launches.append(AllSchedules(program, launch, memory, named).findings())

    try:
        _call(replace(kernel, execute=follow), work, values)
    except (Unsupported, Fault, AssertionError, MemoryError) as error:
        return str(error)
    races = [race for found in launches for race in found.races]
    return Findings(races, sum(found.one_value for found in launches))


def _call(kernel: PtxKernel, work: Work, values: Mapping[str, int]) -> None:
    outputs = [allocate(work.form.spec(ref), values, poison=True) for ref in work.form.outputs]
    kernel(values, [*make_inputs(work.form, values, seed=1), *outputs])


# ---- all of them -----------------------------------------------------------------------------------------


def counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By target: kernels by result."""
    return {
        target: dict(sorted(Counter(row["result"] for row in rows if row["target"] == target).items()))
        for target in sorted({str(row["target"]) for row in rows})
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-static --proofs", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--share", default="0/1", help="number of a share, from 0, and how many there are")
    parser.add_argument("--minutes", type=float, default=120.0, help="after which no new node is begun")
    parser.add_argument("--anew", action="store_true", help="do not keep what is known of these nodes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    if prover() is None:
        parser.error("expected SentryWard, found none; install it with: pip install sentryward==0.1.1")
    began = time.monotonic()
    document = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = list(document.get("proofs", {}).get("rows", []))
    share, shares = map(int, options.share.split("/"))
    all_of_them = list(all_work(("float32",), tuple(filter(None, options.only.split(",")))))
    for work in all_of_them[share::shares]:
        for programs, target in itertools.product((0, SEVERAL), options.targets.split(",")):
            known = [row for row in rows if (row["case"], row["target"]) == (label(work, programs), target)]
            if (known and not options.anew) or time.monotonic() - began > 60 * options.minutes:
                continue
            rows = [row for row in rows if row not in known]
            try:
                made = [asdict(proof) for proof in proofs_of(work, target, programs)]
            except (AutofuseError, CompilerError) as error:
                reason = str(error).splitlines()[0]
                made = [asdict(Proof(label(work, programs), target, "", (), 0, 0, "not compiled", reason))]
            for row in made:
                if row["result"] not in PROVED:
                    print(*(row[name] for name in ("case", "target", "kernel", "result", "reason")), flush=True)
            rows += made
            _keep(options.out, rows)
    print(json.dumps(counted(rows)))
    return int(any(row["result"] == RACE for row in rows))


def _keep(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    document = json.loads(path.read_text()) if path.exists() else {"rows": []}
    proofs = {"command": "scripts/gpu-static --proofs", "commit": commit(), "machine": machine(), "bars": counted(rows)}
    partial = path.with_suffix(".partial")
    partial.write_text(encode_rows({**document, "proofs": {**proofs, "rows": list(rows)}}) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
