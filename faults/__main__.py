"""``scripts/faults``: does to autofuse what machines and people do, and counts what it survives.

    scripts/faults                                  # every kind, some two hours on two cores
    scripts/faults kill-script damage --times 20    # some kinds, so many trials of each
    scripts/faults damage --seed 3 --trial 17       # repeats one trial

Exit status 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults.ground import Ground
from faults.kinds import KINDS, Draw, Outcome


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="autofuse-faults-") as folder:
        ground = Ground(Path(folder))
        wrong = [_try_kind(kind, ground, options) for kind in options.kinds or KINDS]
    return int(any(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", choices=(*KINDS, []), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--times", type=int, help="trials of each kind; left out: as many as a whole run makes")
    parser.add_argument("--seed", type=int, default=0, help="draws other moments, places and sizes")
    parser.add_argument("--trial", type=int, help="only the trial of this number")
    parser.add_argument("--jobs", type=int, default=2, help="trials at the same time")
    parser.add_argument("--json", type=Path, help="a file for the counts, which keeps those of the other kinds")
    return parser


def _try_kind(name: str, ground: Ground, options: argparse.Namespace) -> int:
    """All trials of one kind; returns how many went wrong."""
    began, counts = time.monotonic(), Counter[str](trials=0, faults=0, wrong=0)
    kind = KINDS[name]
    numbers = [options.trial] if options.trial is not None else range(options.times or kind.times)

    def attempt(number: int) -> tuple[int, Outcome]:
        try:
            return number, kind.trial(ground, Draw(options.seed, name, number))
        except Exception as error:
            return number, Outcome(wrong=[f"{type(error).__name__}: {error}"])

    with ThreadPoolExecutor(options.jobs) as pool:
        for number, outcome in pool.map(attempt, numbers):
            counts.update(trials=1, faults=outcome.faults, wrong=bool(outcome.wrong), **outcome.notes)
            if outcome.most_bytes:
                counts["most bytes"] = max(counts["most bytes"], outcome.most_bytes)
            for text in outcome.wrong:
                print(f"WRONG {name}: {text}  (--seed {options.seed} --trial {number})", flush=True)
    counts["seconds"] = round(time.monotonic() - began)
    print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)
    if options.json is not None:
        _save(options, name, counts)
    return counts["wrong"]


def _save(options: argparse.Namespace, name: str, counts: Counter[str]) -> None:
    from benchmarks.common import commit, machine, save

    before = json.loads(options.json.read_text()) if options.json.exists() else {}
    row = {"seed": options.seed, "commit": commit(), "machine": machine(), "counts": dict(counts)}
    rows = {kind: before[kind] for kind in KINDS if kind in before} | {name: row}
    save(options.json, "faults", command="scripts/faults", **rows)


if __name__ == "__main__":
    sys.exit(main())
