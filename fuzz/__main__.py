"""``scripts/fuzz``: runs a fuzzer for some minutes, each operator's part in a process that may crash.

    scripts/fuzz samples --minutes 60            # PyTorch's samples of its operators
    scripts/fuzz samples --only cumsum --seed 7  # one operator, and what repeats a failure

Exit status 1 where something differed or a process died.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fuzz.samples import Outcome, name_of, samples, try_sample

DTYPES = "float32,int64,bfloat16,float64,bool,float16"
LEFT_OUT = ("fft.", "sparse.", "_refs", "torch.ops")
TOGETHER = 12  # operators of one process
END = "fuzz: "


def operators(only: str) -> list[Any]:
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        sys.exit(f"expected {error.name}, which torch's table of operators imports: pip install {error.name}")
    wanted = tuple(name for name in only.split(",") if name)
    found = [op for op in op_db if not name_of(op).startswith(LEFT_OUT)]
    return [op for op in found if not wanted or name_of(op).startswith(wanted)]


def work(options: argparse.Namespace, numbers: Sequence[int]) -> None:
    """In a process of its own: some operators; the last line counts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, outcome = operators(options.only), Outcome()
    for number in numbers:
        op = found[number]
        for name in options.dtypes.split(","):
            dtype = getattr(torch, name)
            if dtype not in op.supported_dtypes("cpu"):
                continue
            print(f"at {name_of(op)} {name}", file=sys.stderr, flush=True)
            before = len(outcome.wrong)
            try:
                for sample in samples(op, dtype, random.Random(options.seed), options.samples):
                    try_sample(sample, outcome, options.seed)
            except Exception as error:  # of torch's own samples
                outcome.skip(f"no samples: {type(error).__name__}")
            for line in outcome.wrong[before:]:
                print(line, flush=True)
    print(f"{END}{outcome.ran} {outcome.nodes} {sum(outcome.skipped.values())} {len(outcome.wrong)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("samples",))
    parser.add_argument("--minutes", type=float, default=60.0, help="the run ends by itself after this time")
    parser.add_argument("--seed", type=int, default=0, help="draws other samples; repeats a failure")
    parser.add_argument("--only", default="", help="beginnings of names of operators, separated by commas")
    parser.add_argument("--dtypes", default=DTYPES, help=f"default: {DTYPES}")
    parser.add_argument("--samples", type=int, default=4, help="samples of an operator in a dtype, at most")
    parser.add_argument("--numbers", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.numbers is not None:
        work(options, [int(number) for number in options.numbers.split(",")])
        return 0
    return run_all(options)


def run_all(options: argparse.Namespace) -> int:
    order = list(range(len(operators(options.only))))
    random.Random(options.seed).shuffle(order)
    ends, totals, tried, crashes = time.monotonic() + 60.0 * options.minutes, [0, 0, 0, 0], 0, 0
    for start in range(0, len(order), TOGETHER):
        if time.monotonic() > ends:
            break
        part = order[start : start + TOGETHER]
        command = [sys.executable, "-m", "fuzz", *sys.argv[1:], "--numbers", ",".join(map(str, part))]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        for line in lines:
            if line.startswith(END):
                totals = [a + int(b) for a, b in zip(totals, line.removeprefix(END).split(), strict=True)]
            else:
                print(f"WRONG {line}  (--seed {options.seed})", flush=True)
        if done.returncode:
            crashes += 1
            last = [line for line in done.stderr.splitlines() if line.startswith("at ")][-1:]
            print(f"CRASH with status {done.returncode} {''.join(last)}  (--seed {options.seed})", flush=True)
        tried += len(part)
    ran, nodes, skipped, wrong = totals
    print(f"{tried} operators, {ran} samples, {nodes} nodes on kernels, {skipped} not compared")
    print(f"{wrong} wrong, {crashes} crashes")
    return int(bool(wrong or crashes))


if __name__ == "__main__":
    sys.exit(main())
