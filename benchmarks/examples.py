"""The examples as a person runs them: what a first run gains with tuning, and a second one on its store.

    python benchmarks/examples.py                        # all, about three minutes each
    python benchmarks/examples.py --only train_speech    # by the beginning of their names; keeps other rows
    python benchmarks/examples.py --quick                # a trial of one; proves nothing about speed

For each script, one after the other: plain Python, `autofuse run --tune wait` on an empty store with at most
`BUDGET_SECONDS` of pauses, `autofuse run` on the store that it left, plain Python again. Gain: hot steps over held-out
eager steps of the same run, as `autofuse report` says. Whole: the time of the process, launch to end, over the mean of
both plain runs. Losses: the largest relative difference to plain Python's; a loss after hundreds of steps differs as
far as training multiplies the rounding of one step. Writes benchmarks/results/examples.json after each script, and
prints the rows of examples/README.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import arguments, chosen, commit, parse, print_end, save

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# As long as a person would train to see whether it works.
SCRIPTS = {
    "train_lm": "--steps 400",
    "train_hf": "--steps 400",
    "train_diffusion": "--steps 150",
    "train_cnn": "",
    "train_gnn": "--steps 400",
    "train_recommender": "--steps 1000",
    "train_speech": "--steps 300",
    "train_packed": "--steps 400",
    "infer": "",
    "serve": "--requests 1000",
}
BUDGET_SECONDS = 90
NUMBERS = re.compile(r"^(?:step (\d+) loss|(.*checksum)) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One process: its seconds and what it printed."""

    seconds: float
    out: str

    @property
    def numbers(self) -> dict[str, float]:
        return {step or what: float(value) for step, what, value in NUMBERS.findall(self.out)}


def run(*command: object) -> Run:
    """Exits where the process fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("AUTOFUSE_")}
    began = time.monotonic()
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return Run(time.monotonic() - began, done.stdout)


def apart(found: Run, expected: Run) -> float:
    """The largest relative difference of losses and checksums."""
    ours, theirs = found.numbers, expected.numbers
    if ours.keys() != theirs.keys() or not ours:
        sys.exit(f"expected the lines of plain Python, found others: {found.out[-300:]}")
    return max(abs(ours[key] / theirs[key] - 1) for key in theirs)


def totals(store: Path) -> dict[str, Any]:
    """Of the last run."""
    found: dict[str, Any] = json.loads(run("-m", "autofuse", "report", "--json", "--store", store).out)["totals"]
    return found


def row_of(name: str, words: str) -> dict[str, Any]:
    script = (EXAMPLES / f"{name}.py", *words.split())
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store.sqlite3")
        plain = run(*script)
        try:
            budget = ("--set", f"tuner.budget_seconds={BUDGET_SECONDS}")
            first = run("-m", "autofuse", "run", "--tune", "wait", *budget, "--store", store, *script)
            tuned = totals(store)
            second = run("-m", "autofuse", "run", "--tune", "off", "--store", store, *script)
            warm = totals(store)
        finally:
            run("-m", "autofuse", "daemon", "stop", "--store", store)
        again = run(*script)
    whole = (plain.seconds + again.seconds) / 2
    kept = ("speedup_median", "speedup_low", "speedup_high", "fused_calls", "unfused_calls", "capture_seconds",
            "paused_seconds")  # fmt: skip
    return {
        "example": name,
        "command": f"examples/{name}.py {words}".strip(),
        "commit": commit(),
        "plain_seconds": [plain.seconds, again.seconds],
        "first": {key: tuned[key] for key in kept} | {"whole": first.seconds / whole, "losses": apart(first, plain)},
        "second": {key: warm[key] for key in kept} | {"whole": second.seconds / whole, "losses": apart(second, plain)},
    }


def gain(found: dict[str, Any]) -> str:
    if found["speedup_median"] is None:
        return "not measured"
    if found["speedup_low"] is None:
        return f"{found['speedup_median']:.2f}x, too few pairs for an interval"
    return f"{found['speedup_median']:.2f}x ({found['speedup_low']:.2f} to {found['speedup_high']:.2f})"


def line(row: dict[str, Any]) -> str:
    first, second = row["first"], row["second"]
    paused = first["paused_seconds"] or 0.0
    return (
        f"| `{row['command']}` | {gain(first)} | {first['whole']:.2f}x, {paused:.0f} s of it for tuning "
        f"| {gain(second)} | {second['whole']:.2f}x |"
    )


def main() -> int:
    parser = arguments(__doc__, "examples", quick="one script, a few steps", only="examples")
    options = parse(parser)
    began = time.monotonic()
    scripts = {"train_recommender": "--steps 40"} if options.quick else SCRIPTS
    before = json.loads(options.out.read_text())["rows"] if options.only and options.out.exists() else []
    rows = {row["example"]: row for row in before}
    for name in chosen(options.only, list(scripts)):
        rows[name] = row_of(name, scripts[name])
        save(options.out, "examples", rows=[rows[key] for key in scripts if key in rows])
        print(line(rows[name]), flush=True)
    print_end({}, [], options.out, began)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
