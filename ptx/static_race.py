"""A static race: our kernels beside Inductor's for the same graphs, by what their compiled code does. Never a speed.

    scripts/gpu-static --against-inductor                       # thirty functions in four sizes, forward and backward
    scripts/gpu-static --against-inductor --only rotary --sizes small
    scripts/gpu-static --against-inductor --append --minutes 20 # rows that are not there yet
    scripts/gpu-static --against-inductor --dtype bfloat16 --sizes middle

In: the thirty functions of `benchmarks/doors_rows.py`. Out: a row for each of their graphs in each size, with the
figures of both sides, in benchmarks/results/static_race.json; wins, ties and losses by column. Both sides see the same
static sizes and have their default settings without any tuning; products and convolutions are a library's on both and
are left out on both. Kernels are compiled for sm_90. Bytes, passes, widths and instructions are those of the execution
of all threads of the compiled PTX on the CPU; registers and spills are the assembler's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import commit, encode_rows, machine
from benchmarks.doors_rows import ROWS, SIZES, Row

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "static_race.json"
ALL_SIZES = SIZES | {"ragged": 1021}
DTYPES = ("float32", "bfloat16")
OURS, THEIRS = "ours", "inductor"
EAGERS_WIDTH = 16  # bytes of an access of eager's element-wise kernels


@dataclass(frozen=True)
class Column:
    """One figure of a row."""

    name: str
    least_is_best: bool = True
    within: float = 0.0  # relative difference that is a tie


COLUMNS = (
    Column("kernels"),
    Column("bytes", within=0.02),
    Column("sectors", within=0.05),
    Column("passes", within=0.05),
    Column("registers"),
    Column("occupancy", least_is_best=False),
    Column("spill bytes"),
    Column("bytes an access", least_is_best=False, within=0.05),
    Column("instructions", within=0.05),
)


def figures(found: Any) -> dict[str, Any]:
    """What all kernels of a graph do together. ``found``: `static_kernels.Launches`.

    ``passes``: how often the largest tensors are read, the one most; ``instructions``: of all threads.
    """
    from ptx.static_kernels import SECTOR, Buffer, measure

    made = [measure(kernel) for kernel in found.kernels]
    eager = sum(nbytes for _, nbytes in found.eager)
    sizes = {a.storage: a.nbytes for k in found.kernels for a in k.arguments if isinstance(a, Buffer)}
    reads: Counter[int] = Counter()  # bytes
    for one in made:
        reads.update({storage: SECTOR * sectors for storage, sectors in one.reads.items() if storage >= 0})
    large = max((sizes[s] for s, asked in reads.items() if asked), default=1) / 2
    sectors = sum(one.sectors for one in made) + eager // SECTOR
    widths = sum(one.sectors * one.width for one in made) + eager // SECTOR * EAGERS_WIDTH
    return {
        "kernels": len(made) + len(found.eager),
        "bytes": sum(one.bytes for one in made) + eager,
        "sectors": sectors,
        "passes": round(max((n / sizes[s] for s, n in reads.items() if sizes[s] >= large), default=0.0), 2),
        "registers": max((one.resources.registers for one in made), default=0),
        "occupancy": round(min((one.occupancy for one in made), default=1.0), 2),
        "spill bytes": sum(one.resources.spill_bytes for one in made),
        "bytes an access": round(widths / max(sectors, 1), 2),
        "instructions": sum(one.executed for one in made),
        "library": found.library,
        "eager": [name for name, _ in found.eager],
        "each": [[one.name, one.blocks, one.bytes, one.executed, one.code.instructions] for one in made],
    }


def in_dtype(tensors: Sequence[torch.Tensor], dtype: str) -> list[torch.Tensor]:
    wanted = getattr(torch, dtype)
    return [
        t.detach().to(wanted if t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad) for t in tensors
    ]


def rows_of(row: Row, size: str, dtype: str) -> Iterator[dict[str, Any]]:
    """A row for each graph of a function."""
    from ptx import inductor, ours

    torch.manual_seed(0)
    tensors = in_dtype(row.inputs(ALL_SIZES[size]), dtype)
    sides = {name: side.launches(row.function, tensors) for name, side in ((OURS, ours), (THEIRS, inductor))}
    phases = [[one.phase for one in found] for found in sides.values()]
    if phases[0] != phases[1]:
        raise RuntimeError(f"expected the same graphs on both sides, found {phases}")
    for number, phase in enumerate(phases[0]):
        yield {
            "function": row.name, "size": size, "dtype": dtype, "phase": phase, "commit": commit(),
            **{name: figures(found[number]) for name, found in sides.items()},
        }  # fmt: skip


def result(column: Column, ours: float, theirs: float) -> str:
    """ "win", "tie" or "loss" of ours."""
    if abs(ours - theirs) <= column.within * max(abs(ours), abs(theirs)):
        return "tie"
    return "win" if (ours < theirs) == column.least_is_best else "loss"


def counted(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Wins, ties and losses of each column, and the sums or means of both sides."""
    found: dict[str, dict[str, Any]] = {}
    for column in COLUMNS:
        pairs = [(row[OURS][column.name], row[THEIRS][column.name]) for row in rows]
        sums = Counter(result(column, *pair) for pair in pairs)
        found[column.name] = {name: sums[name] for name in ("win", "tie", "loss")}
        found[column.name]["ours, mean"], found[column.name]["inductor, mean"] = (
            round(sum(side) / max(len(rows), 1), 2) for side in zip(*pairs, strict=True)
        )
    return found


def key_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["function"], row["size"], row["dtype"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu-static --against-inductor", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", help="parts of names of functions, separated by commas")
    parser.add_argument("--sizes", default=",".join(ALL_SIZES), help="separated by commas")
    parser.add_argument("--dtype", default=DTYPES[0], choices=DTYPES)
    parser.add_argument("--append", action="store_true", help="only rows that are not there yet")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no new function is begun")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    began, caches = time.monotonic(), tempfile.TemporaryDirectory(prefix="autofuse-race-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["TRITON_CACHE_DIR"] = caches.name
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    rows = {(*key_of(row), row["phase"]): row for row in known.get("rows", [])}
    refused: dict[str, str] = dict(known.get("refused", {}))
    there = {key[:3] for key in rows} if options.append else set()
    torch.set_num_threads(1)
    for size in options.sizes.split(","):
        for row in ROWS:
            key = (row.name, size, options.dtype)
            is_named = not options.only or any(word in row.name for word in options.only.split(","))
            if not is_named or key in there or time.monotonic() - began > 60 * options.minutes:
                continue
            refused.pop(", ".join(key), None)
            try:
                rows |= {(*key, made["phase"]): made for made in rows_of(row, size, options.dtype)}
            except Exception as error:  # of any of the compilers: told, and the next one goes on
                refused[", ".join(key)] = f"{type(error).__name__}: {str(error)[:200]}"
            _save(options.out, list(rows.values()), refused)
            print(f"{time.monotonic() - began:.0f} s: {', '.join(key)} {refused.get(', '.join(key), '')}", flush=True)
    print(json.dumps(counted(list(rows.values())), indent=1))
    return int(bool(refused))


def _save(path: Path, rows: list[dict[str, Any]], refused: Mapping[str, str]) -> None:
    import triton

    versions = machine() | {"triton": triton.__version__}
    document = {"benchmark": "static_race", "command": "scripts/gpu-static --against-inductor", "machine": versions,
                "bars": counted(rows), "refused": dict(refused), "rows": rows}  # fmt: skip
    partial = path.with_suffix(".partial")
    partial.write_text(encode_rows(document) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
