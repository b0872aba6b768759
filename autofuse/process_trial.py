"""Measures a process setting on a script: the same steps in processes with and without it, taking turns.

In: a script. Out: a ``SettingTrial`` for the store, and page faults for people.
mallopt cannot be undone within a process, so each side gets fresh ones. The same step of both sides sees the same batch
where the script is seeded, so steps are compared pair by pair, and the interval is a bootstrap over steps.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofuse.db.rows import SettingTrial
from autofuse.errors import AutofuseError
from autofuse.execute import Target
from autofuse.process_settings import MALLOC, MALLOC_VALUES

WARM_UP = 5  # first steps of a process: lazy initialisation, first touch of every buffer
RESAMPLES = 1000


@dataclass(frozen=True)
class Side:
    """The steps of all processes of one side; each inner tuple is one process."""

    step_us: tuple[tuple[float, ...], ...]
    page_faults: tuple[tuple[float, ...], ...]


def measure_malloc(
    target: Target, *, steps: int, rounds: int, margin: float, device_key: str, on_progress: Callable[[int], None]
) -> tuple[SettingTrial, float, float]:
    """Run ``rounds`` processes of each side; returns the trial and the median page faults per step without and with.

    ``on_progress`` is told the number of processes done. Raises ``AutofuseError`` where the script has no steps.
    """
    runs: dict[str, list[tuple[list[float], list[float]]]] = {"off": [], "on": []}
    for number in range(rounds):
        # off, on, on, off, ...: a machine that slows down or speeds up steadily favours neither side.
        for malloc in ("off", "on") if number % 2 == 0 else ("on", "off"):
            runs[malloc].append(_probe(target, steps, malloc))
            on_progress(sum(map(len, runs.values())))
    off, on = (_side(runs[malloc]) for malloc in ("off", "on"))
    trial = judge(off, on, margin=margin, device_key=device_key, workload=target.command)
    return trial, _middle(off.page_faults), _middle(on.page_faults)


def judge(off: Side, on: Side, *, margin: float, device_key: str, workload: str) -> SettingTrial:
    """Compare the sides step by step; the setting wins where even the low end of the interval is no loss."""
    pairs = list(zip(_per_step(off.step_us), _per_step(on.step_us), strict=False))
    low, high = _interval(pairs)
    ratio = _ratio(pairs)
    won = ratio > 1.0 + margin and low > 1.0
    return SettingTrial(
        setting=MALLOC,
        value="on: " + " ".join(f"{name}={value}" for name, (_, value) in MALLOC_VALUES.items()),
        baseline_us=statistics.fmean(a for a, _ in pairs),
        with_us=statistics.fmean(b for _, b in pairs),
        ratio=ratio,
        low=low,
        high=high,
        decision="on" if won else "off",
        reason="won" if won else "below_margin",
        device=device_key,
        workload=workload,
    )


def _probe(target: Target, steps: int, malloc: str) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory(prefix="autofuse-trial-") as folder:
        out = Path(folder) / "steps.json"
        name = ("-m", target.name) if target.is_module else (target.name,)
        command = [sys.executable, "-m", "autofuse.process_probe", str(out), str(steps + WARM_UP), malloc, *name]
        done = subprocess.run(
            [*command, *target.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode != 0 or not out.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise AutofuseError(
                f"expected {target.command!r} to run {steps + WARM_UP} optimizer steps, "
                f"found that it ended with exit code {done.returncode}: {last}"
            )
        found = json.loads(out.read_text())
    step_us, faults = found["step_us"][WARM_UP:], found["page_faults"][WARM_UP:]
    if len(step_us) < 5:
        raise AutofuseError(
            f"expected at least {WARM_UP + 6} calls of optimizer.step() in {target.command!r}, "
            f"found {len(found['step_us']) + 1 if found['step_us'] else 'none or one'}. Process settings are measured "
            "on training steps; let the script run longer."
        )
    return step_us, faults


def _side(runs: Sequence[tuple[list[float], list[float]]]) -> Side:
    return Side(tuple(tuple(times) for times, _ in runs), tuple(tuple(faults) for _, faults in runs))


def _per_step(processes: Sequence[Sequence[float]]) -> list[float]:
    """The median over processes of each step."""
    return [statistics.median(values) for values in zip(*processes, strict=False)]


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def _interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    rng = random.Random(0)
    ratios = sorted(_ratio(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return ratios[int(0.025 * RESAMPLES)], ratios[int(0.975 * RESAMPLES) - 1]


def _middle(processes: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for process in processes for value in process)
