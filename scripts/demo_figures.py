"""Sums up a run of the demo: ``scripts/demo_figures.py build/demo`` prints it, and writes figures.json there.

In: what ``scripts/demo`` left: losses of plain Python and of two runs, their reports as JSON. Out: the figures that the
README shows, for which they are copied to docs/demo.json (``scripts/generate_docs.py`` then writes them into it).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from autofuse.process.apply import MALLOC

RUNS = ("first", "second")
LOSS = re.compile(r"step (\d+) loss (\S+)")


def losses(path: Path) -> dict[str, float]:
    return {step: float(loss) for step, loss in LOSS.findall(path.read_text())}


def figures(folder: Path) -> dict[str, Any]:
    """Of both runs, and of the trial of malloc's thresholds where there was one."""
    reports = {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}
    plain, run = losses(folder / "plain.txt"), reports["first"]["run"]
    device = run["device"]
    machine = f"{device['cores']} cores, {device['name']} ({device['isa'].partition('-')[0]})"
    found: dict[str, Any] = {"machine": machine, "versions": run["versions"]}
    for name, report in reports.items():
        totals, ours = report["totals"], losses(folder / f"{name}.txt")
        cost = ("capture_seconds", "tuning_seconds", "paused_seconds", "seconds_saved", "break_even_step")
        found[name] = {key: totals[f"speedup_{key}"] for key in ("median", "low", "high", "pairs")}
        found[name] |= {key: totals[key] for key in ("steps", *cost)}
        found[name]["loss_error"] = max(abs(ours[step] / loss - 1) for step, loss in plain.items())
    trials = [trial for trial in reports["second"]["settings"] if trial["setting"] == MALLOC]
    keys = ("baseline_us", "with_us", "speedup", "speedup_low", "speedup_high", "decision")
    found["malloc"] = {key: trials[-1][key] for key in keys} if trials else None
    return found


def in_short(name: str, run: dict[str, Any]) -> str:
    """A run in one line."""
    gain = "gain not measured" if run["median"] is None else f"{run['median']:.2f}x faster hot steps than held-out ones"
    return (
        f"{name:>6} run: {gain}, {run['capture_seconds']:.1f} s capture, {run['tuning_seconds']:.1f} s tuning,"
        f" losses within {run['loss_error']:.0e} of plain python's"
    )


if __name__ == "__main__":
    place = Path(sys.argv[1])
    told = figures(place)
    (place / "figures.json").write_text(json.dumps(told, indent=1) + "\n")
    print(*(in_short(name, told[name]) for name in RUNS), sep="\n")
