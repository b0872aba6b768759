"""Runs a script step by step on demand: one side of a trial of a process setting.

Run by ``trial`` as ``python -m autofuse.process.probe MALLOC GO DONE [-m] SCRIPT [ARGS]``; GO and DONE are file
descriptors. After each ``optimizer.step`` it writes a JSON line to DONE, ``[µs, minor page faults]`` of the step, and
waits for a byte from GO: while it waits, the other side has the machine for itself. When GO is closed it ends.
Nothing else of autofuse is active: what is timed is the script's own eager steps.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from autofuse.process.apply import keep_freed_memory
from autofuse.startup.script import Target, run_target


class StepGate:
    """Stops the script after each step until it may go on."""

    def __init__(self, go: int, done: int) -> None:
        self._go = go
        self._done = done
        self._start = self._now()

    def tick(self, *_: Any) -> None:
        """Called after each optimizer step."""
        now = self._now()
        line = json.dumps([(now[0] - self._start[0]) / 1000.0, now[1] - self._start[1]])
        try:
            os.write(self._done, line.encode() + b"\n")
            more = os.read(self._go, 1)
        except OSError:
            more = b""
        if not more:
            # The script has done the requested steps; it must not go on for hours, nor save its model.
            os._exit(0)
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        return time.perf_counter_ns(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(arguments: list[str]) -> NoReturn:
    malloc, go, done, *command = arguments
    if malloc == "on":
        keep_freed_memory()
    from torch.optim.optimizer import register_optimizer_step_post_hook  # after malloc is set: torch allocates

    register_optimizer_step_post_hook(StepGate(int(go), int(done)).tick)
    is_module = command[0] == "-m"
    name, *rest = command[1:] if is_module else command
    run_target(Target(name, tuple(rest), is_module)).leave()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(__file__).parents[2])  # as in autofuse.__main__
    main(sys.argv[1:])
