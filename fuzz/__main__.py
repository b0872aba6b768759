"""``scripts/fuzz``: runs a fuzzer for some minutes, part by part, each part in a process that may crash.

    scripts/fuzz graphs --minutes 60 --corpus ~/fuzz   # random graphs; what failed is kept there, and tried first
    scripts/fuzz samples --minutes 60                  # PyTorch's samples of its operators
    scripts/fuzz samples --only cumsum --seed 7        # one operator, and what repeats a failure
    scripts/fuzz models --minutes 20                   # whole models that nnsmith draws
    scripts/fuzz graphs --march x86-64-v3              # all C generated for a processor with AVX2

Exit status 1 where something differed or a process died.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from autofuse.codegen.c.target import NATIVE, OTHERS, can_run, generated_for
from autofuse.codegen.triton.interpret import import_interpreted

DTYPES = "float32,int64,bfloat16,float64,bool,float16,int32,uint8"
OPERATORS, GRAPHS, MODELS = 12, 100, 20  # of one process
KINDS = ("graphs", "samples", "models")


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if not can_run(options.march):
        parser.error(f"expected a processor that runs code for {options.march}, found another")
    if options.part:
        with generated_for(options.march):
            _work(options)
        return 0
    return run_all(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=60.0, help="the run ends by itself after this time")
    parser.add_argument("--seed", type=int, default=0, help="draws others; repeats a failure")
    parser.add_argument("--json", type=Path, help="a file for the counts, which keeps those of the other fuzzers")
    parser.add_argument("--corpus", type=Path, help="graphs: a folder for what fails, which is tried first")
    parser.add_argument("--graphs", type=int, default=GRAPHS, help="graphs: so many in a process")
    parser.add_argument("--models", type=int, default=MODELS, help="models: so many in a process")
    parser.add_argument("--only", default="", help="samples: beginnings of names of operators, separated by commas")
    parser.add_argument("--dtypes", default=DTYPES, help=f"samples: default {DTYPES}")
    parser.add_argument("--samples", type=int, default=4, help="samples: of an operator in a dtype, at most")
    parser.add_argument("--march", default=NATIVE, choices=(NATIVE, *OTHERS), help="generate all C for this processor")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)
    return parser


def _work(options: argparse.Namespace) -> None:
    """In a process of its own: a part. Each line is a finding, but for the last, which counts."""
    import_interpreted()  # before torch
    if options.what == "graphs":
        from fuzz.search import search

        counts = search(int(options.part), options.graphs, options.corpus, options.note, _tell)
    elif options.what == "models":
        from fuzz.models import try_models

        counts = try_models(int(options.part), options.models, options.note, _tell)
    else:
        from fuzz.samples import try_operators

        counts = try_operators(options, [int(number) for number in options.part.split(",")], _tell)
    print(json.dumps(counts), flush=True)


def _read(line: str) -> object:
    """What a part has said: a finding, or its counts; None for what libraries print."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _tell(finding: str) -> None:
    print(json.dumps(finding), flush=True)


def parts(options: argparse.Namespace) -> Iterator[str]:
    """What one process after the other is to do: a seed, or numbers of operators."""
    if options.what == "graphs":
        yield from map(str, range(options.seed, options.seed + 1_000_000))
        return
    if options.what == "models":
        yield from map(str, range(options.seed, options.seed + 1_000_000, options.models))
        return
    from fuzz.samples import operators

    order = list(range(len(operators(options.only))))
    random.Random(options.seed).shuffle(order)
    for start in range(0, len(order), OPERATORS):
        yield ",".join(map(str, order[start : start + OPERATORS]))


def run_all(options: argparse.Namespace) -> int:
    began = time.monotonic()
    totals: Counter[str] = Counter(wrong=0, crashes=0)
    if options.corpus is not None:
        options.corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="autofuse-fuzz-") as folder:
        note = Path(folder) / "last"
        for part in parts(options):
            note.write_text("")
            command = [sys.executable, "-m", "fuzz", *sys.argv[1:], "--part", part, "--note", str(note)]
            done = subprocess.run(command, capture_output=True, text=True)
            for said in map(_read, done.stdout.splitlines()):
                if isinstance(said, dict):
                    totals.update(said)
                elif isinstance(said, str):
                    totals["wrong"] += 1
                    print(f"WRONG {said}  (--seed {options.seed if options.what == 'samples' else part})", flush=True)
            if done.returncode:
                totals["crashes"] += 1
                print(f"CRASH with status {done.returncode} in part {part}\n{note.read_text()}", flush=True)
                print(done.stderr[-2000:], file=sys.stderr, flush=True)
            totals["seconds"] = round(time.monotonic() - began)
            if options.json is not None:  # each time: a run may be ended
                _save(options, totals)
            if totals["seconds"] > 60.0 * options.minutes:
                break
    print(", ".join(f"{count} {what}" for what, count in sorted(totals.items())))
    return int(bool(totals["wrong"] or totals["crashes"]))


def _save(options: argparse.Namespace, totals: Counter[str]) -> None:
    from benchmarks.common import commit, machine, save

    before = json.loads(options.json.read_text()) if options.json.exists() else {}
    command = " ".join(["scripts/fuzz", *sys.argv[1:]])
    row = {"command": command, "commit": commit(), "machine": machine(), "counts": dict(sorted(totals.items()))}
    name = options.what if options.march == NATIVE else f"{options.what} {options.march}"
    kept = {key: rows for key, rows in before.items() if key.split(" ")[0] in KINDS}
    save(options.json, "fuzz", command="scripts/fuzz", **kept | {name: row})


if __name__ == "__main__":
    sys.exit(main())
