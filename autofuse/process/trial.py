"""Measures a process setting on a script: the same steps in two processes, with and without it, taking turns.

In: a script. Out: a ``SettingTrial`` for the store, and page faults for people.
mallopt cannot be undone within a process, so each side is one; they take turns after every step, so that a machine that
is busy for a while slows both alike. The same step of both sides sees the same batch where the script is seeded:
steps are compared pair by pair, by the median of their ratios, with a bootstrap over steps for the interval.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from autofuse.db.rows import SettingTrial
from autofuse.errors import AutofuseError
from autofuse.process.apply import MALLOC, MALLOC_IN_WORDS
from autofuse.startup.script import Target

WARM_UP = 5  # first steps of a process: lazy initialisation, first touch of every buffer
RESAMPLES = 1000


@dataclass(frozen=True)
class StepPair:
    """The same step on both sides."""

    off_us: float
    on_us: float
    off_faults: float
    on_faults: float


def measure_malloc(
    target: Target, *, steps: int, margin: float, device_key: str, on_progress: Callable[[int], None]
) -> tuple[SettingTrial, list[StepPair]]:
    """Run ``steps`` steps of each side, after a warm-up. ``on_progress`` is told how many are done.

    Raises ``AutofuseError`` where the script has too few.
    """
    pairs: list[StepPair] = []
    with _Probe(target, "off") as off, _Probe(target, "on") as on:
        for number in range(-WARM_UP, steps):
            first, second = (off, on) if number % 2 == 0 else (on, off)
            found = {first: first.step(), second: second.step()}
            a, b = found[off], found[on]
            if a is None or b is None:
                break
            if number >= 0:
                pairs.append(StepPair(a[0], b[0], a[1], b[1]))
                on_progress(len(pairs))
        if len(pairs) < 5:
            raise AutofuseError(off.too_few())
    return judge(pairs, margin=margin, device_key=device_key, workload=target.command), pairs


class _Probe:
    """A process that runs the script up to the end of its first step, and then one step at a time."""

    def __init__(self, target: Target, malloc: str) -> None:
        self._target = target
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in __exit__; a full pipe would stop the script)
        go_read, self._go = os.pipe()
        done_read, done = os.pipe()
        name = ("-m", target.name) if target.is_module else (target.name,)
        command = [sys.executable, "-m", "autofuse.process.probe", malloc, str(go_read), str(done)]
        self._process = subprocess.Popen(
            [*command, *name, *target.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(go_read, done),
        )
        os.close(go_read)
        os.close(done)
        self._done = os.fdopen(done_read)
        self._done.readline()  # the first step includes the script's start

    def step(self) -> tuple[float, float] | None:
        """Time in µs and page faults of the next step; None where the script has ended."""
        try:
            os.write(self._go, b"1")
        except BrokenPipeError:
            return None
        line = self._done.readline()
        return tuple(json.loads(line)) if line else None

    def too_few(self) -> str:
        """What to say of a script that ended too early."""
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        return (
            f"expected at least {WARM_UP + 6} calls of optimizer.step() in {self._target.command!r}, found that it "
            f"ended before, with exit code {code} ({last}). Process settings are measured on training steps."
        )

    def __enter__(self) -> _Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._go)
        self._done.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._errors.close()


def judge(pairs: Sequence[StepPair], *, margin: float, device_key: str, workload: str) -> SettingTrial:
    """The setting wins where it gains more than the margin and the low end of the interval is a gain too."""
    ratios = [pair.off_us / pair.on_us for pair in pairs]
    ratio = statistics.median(ratios)
    low, high = _interval(ratios)
    won = ratio > 1.0 + margin and low > 1.0
    return SettingTrial(
        setting=MALLOC,
        value=MALLOC_IN_WORDS,
        baseline_us=statistics.median(pair.off_us for pair in pairs),
        with_us=statistics.median(pair.on_us for pair in pairs),
        ratio=ratio,
        low=low,
        high=high,
        decision="on" if won else "off",
        reason="won" if won else "below_margin",
        device=device_key,
        workload=workload,
    )


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
