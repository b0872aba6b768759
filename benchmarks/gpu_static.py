"""What compiled GPU kernels do, read from their machine code on a machine without a GPU. Nothing here is a speed.

    python benchmarks/gpu_static.py                     # all cases for sm_80, sm_90 and gfx942
    python benchmarks/gpu_static.py --only softmax,gelu --targets cuda:90
    python benchmarks/gpu_static.py --minutes 10        # stops taking new cases; rows of earlier runs are kept
    python benchmarks/gpu_static.py --quick             # two cases
    python benchmarks/gpu_static.py --counts            # reads nothing anew: only sums up what the files say

For each case of the tests' table its kernel with default settings, in float32, compiled for sizes that 16 divides and
aligned tensors, as nearly all calls have them: registers, spills, shared memory, occupancy with what limits it, the
width of loads from and stores to global memory, barriers, shuffles, special functions. Bars: nothing spills; what
occupies less than half of a multiprocessor is listed. Needs Triton, whose wheel has the disassembler, and a torch
without a GPU. Writes benchmarks/results/gpu_static.json, with the counts of all that is known without a GPU: kernels
read here, kernels proved (`ptx/proofs.py`), executed with their opcodes (ptx.json), beside Inductor's
(static_race.json).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import arguments, chosen, commit, encode_rows, parse, print_end, save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the tests' cases are

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.artifact import Artifact, Image
from autofuse.codegen.triton.compile import compile_source
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.machine_code import MachineCode, disassemble, nvidia_tool, read_amd, read_nvidia
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.resources import occupancy
from autofuse.codegen.triton.source import natural_assumptions
from autofuse.errors import CompilerError, LoweringError
from tests.cases import CASES, ON_GPUS

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
SIZE = 1024  # of each symbol
QUICK = "add_layer_norm,softmax"
LOW = 0.5  # of the warps that a multiprocessor can hold
_CACHE = tempfile.TemporaryDirectory(prefix="autofuse-static-")  # Triton's, which has AMD's text beside each kernel


def code_of(image: Image, target: str, disassembler: Path) -> MachineCode:
    if target.startswith("cuda"):
        return read_nvidia(disassemble(image.image, disassembler))
    texts = sorted(Path(_CACHE.name).rglob(f"{image.function}.amdgcn"), key=lambda path: path.stat().st_mtime)
    if not texts:
        raise CompilerError(f"expected {image.function}.amdgcn in Triton's cache, found none")
    return read_amd(texts[-1].read_text())


def compiled(name: str, target: str) -> Artifact:
    """A case's kernel. Raises LoweringError and CompilerError."""
    form = CASES[name].form()
    kernel = lower(form)
    values = dict.fromkeys(form.symbols, SIZE)
    source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
    return compile_source(source, target, [natural_assumptions(form.symbols, values)])


def rows_of(name: str, target: str, disassembler: Path) -> Iterator[dict[str, Any]]:
    """A row for each kernel of a case."""
    for image in compiled(name, target).images:
        code, held = code_of(image, target, disassembler), occupancy(image.resources, target)
        yield {
            "case": name,
            "target": target,
            "kernel": image.number,
            **asdict(image.resources),
            **({} if held is None else {"occupancy": held.share, "limiter": held.limiter}),
            **asdict(code),
        }


def bars_of(rows: list[dict[str, Any]], refused: dict[str, str]) -> dict[str, Any]:
    """Per target: kernels, spills, low occupancy, and the widths of accesses."""
    found: dict[str, Any] = {}
    for target in TARGETS:
        of_target = [row for row in rows if row["target"] == target]
        widths: dict[str, int] = {}
        for row in of_target:
            for width, count in row["loads"].items():
                widths[str(width)] = widths.get(str(width), 0) + count  # JSON's keys are text
        if of_target:
            found[target] = {
                "kernels": len(of_target),
                "cases": len({row["case"] for row in of_target}),
                "spill": [row["case"] for row in of_target if row["spill_bytes"]],
                "local memory": sorted({row["case"] for row in of_target if row["local"] and not row["spill_bytes"]}),
                "below half": {row["case"]: row["limiter"] for row in of_target if row.get("occupancy", 1.0) < LOW},
                "loads by bytes": dict(sorted(widths.items(), key=lambda item: int(item[0]))),
            }
    return found | {"refused": refused}


def counts(document: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """How much each of the checks without a GPU covers, from this document and the results beside it."""

    def results(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    executed = results("ptx")
    shares = [part for name, part in executed.items() if name.startswith("share")]
    sums = sum((Counter(part["counts"]) for part in shares), Counter[str]())
    opcodes = {opcode for part in shares for opcode in part["opcodes"]}
    sums.pop("opcodes", None)
    sums.pop("seconds", None)
    race = results("static_race").get("bars", {})
    return {
        "read": {target: found["kernels"] for target, found in document["bars"].items() if target in TARGETS},
        "proved": document.get("proofs", {}).get("bars", {}),
        "executed": {**sums, "opcodes": len(opcodes)},
        "trained": sorted(name.removeprefix("train ") for name in executed if name.startswith("train")),
        "beside Inductor": {
            column: {name: its[name] for name in ("win", "tie", "loss")} for column, its in race.items()
        },
    }


def sum_up(path: Path) -> None:
    """Write the counts into the file of results."""
    document = json.loads(path.read_text())
    found = counts(document, path.parent)
    partial = path.with_suffix(".partial")
    partial.write_text(encode_rows({**document, "counts": found}) + "\n")
    partial.replace(path)
    print(json.dumps(found))


def main() -> int:
    parser = arguments(__doc__, "gpu_static", quick="two cases", only="cases")
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no new case is begun")
    parser.add_argument("--counts", action="store_true", help="only sum up")
    options = parse(parser)
    if options.counts:
        sum_up(options.out)
        return 0
    os.environ["TRITON_CACHE_DIR"] = _CACHE.name
    began, disassembler = time.monotonic(), nvidia_tool("nvdisasm")
    targets = chosen(options.targets, TARGETS)
    names = chosen(options.only or (QUICK if options.quick else ""), sorted(ON_GPUS))
    before = json.loads(options.out.read_text()) if options.out.exists() and not options.quick else {}
    known, proofs = before.get("rows", []), before.get("proofs")
    rows = [row for row in known if row["case"] not in names or row["target"] not in targets]
    refused: dict[str, str] = {}
    for name in names:
        if time.monotonic() - began > 60 * options.minutes:
            rows += [row for row in known if row["case"] == name and row["target"] in targets]
            continue
        for target in targets:
            try:
                rows += [row | {"commit": commit()} for row in rows_of(name, target, disassembler)]
            except (LoweringError, CompilerError) as error:
                refused[f"{name}, {target}"] = str(error).splitlines()[0]
    bars = bars_of(rows, refused)
    rows.sort(key=lambda row: (row["case"], row["target"]))
    kept = {} if proofs is None else {"proofs": proofs}
    save(options.out, "gpu_static", encode=encode_rows, bars=bars, rows=rows, **kept)
    sum_up(options.out)
    print_end(bars, [], options.out, began)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
