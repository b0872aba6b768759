"""``scripts/ptx``: compiles kernels for a GPU and executes what was compiled on the CPU.

    scripts/ptx                                   # all nodes of the table of cases, products and attentions
    scripts/ptx --only softmax,product --sizes 1  # by the beginnings of their names; the largest sizes of each
    scripts/ptx --share 3/10                      # the fourth tenth of all
    scripts/ptx --built-in 32                     # kernels for this size of all symbols, and for no other
    scripts/ptx --json out.json
    scripts/ptx train --only gpt --steps 20       # models, on a CUDA device whose driver executes PTX

Exit status 1 where a result is wrong, an access is outside of its memory, or accesses are not ordered.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import triton  # noqa: F401

DTYPES = "float32,bfloat16,float16,float64"
WRONG = ("wrong", "faults", "races")


def main() -> int:
    if sys.argv[1:2] == ["train"]:
        from ptx import train  # gives this process a device

        return train.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="scripts/ptx", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--dtypes", default=DTYPES, help=f"default {DTYPES}")
    parser.add_argument("--sizes", type=int, default=2, help="so many of each node, at most")
    parser.add_argument("--share", default="0/1", help="number of a share, from 0, and how many there are")
    parser.add_argument("--built-in", type=int, default=0, help="kernels for this size of all symbols, built in")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    options = parser.parse_args()
    import torch  # behind Triton, which is not to be interpreted here

    from ptx.results import keep
    from ptx.work import Outcome, all_work, execute

    torch.set_num_threads(1)
    began, outcome = time.monotonic(), Outcome()
    wanted = tuple(filter(None, options.only.split(",")))
    share, shares = map(int, options.share.split("/"))
    work = list(all_work(options.dtypes.split(","), wanted))
    if not work[share::shares]:
        parser.error(f"expected names of nodes such as softmax, found {options.only!r}")
    for item in work[share::shares]:
        told = len(outcome.findings)
        execute(item, outcome, options.sizes, options.built_in)
        for text in outcome.findings[told:]:
            print(text, flush=True)
    counts = {**outcome.counts, "opcodes": len(outcome.opcodes), "seconds": round(time.monotonic() - began)}
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    if options.json is not None:
        findings = {"findings": sorted(outcome.findings), "opcodes": sorted(outcome.opcodes)}
        size = f"--built-in {options.built_in}" if options.built_in else f"--sizes {options.sizes}"
        name = f"built-in {options.built_in}, " * bool(options.built_in) + f"share {options.share}"
        row = {"command": f"scripts/ptx --share {options.share} {size} --dtypes {options.dtypes}"}
        keep(options.json, name, {**row, "counts": dict(sorted(counts.items())), **findings})
    return int(any(outcome.counts[name] for name in WRONG))


if __name__ == "__main__":
    sys.exit(main())
