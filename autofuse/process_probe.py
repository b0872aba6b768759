"""Times the optimizer steps of a script in this process, then ends it: one side of a trial of a process setting.

Run by ``process_trial`` as ``python -m autofuse.process_probe OUT STEPS MALLOC [-m] SCRIPT [ARGS]``. Writes to OUT one
JSON object: the time of each step in µs (from one ``optimizer.step`` to the next) and its minor page faults.
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

from autofuse.execute import Target, run_target
from autofuse.process_settings import apply_malloc


class StepClock:
    """Ends the process after ``steps`` timed steps."""

    def __init__(self, out: Path, steps: int) -> None:
        self._out = out
        self._steps = steps
        self._marks: list[tuple[int, int]] = []  # (nanoseconds, minor page faults so far)

    def tick(self, *_: Any) -> None:
        """Called after each optimizer step."""
        self._marks.append((time.perf_counter_ns(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt))
        if len(self._marks) > self._steps:
            self.write()
            # The script has done what was asked of it; it is not to go on for hours, nor to save its model.
            os._exit(0)

    def write(self) -> None:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        found = {
            "step_us": [(b[0] - a[0]) / 1000.0 for a, b in pairs],
            "page_faults": [b[1] - a[1] for a, b in pairs],
        }
        self._out.write_text(json.dumps(found))


def main(arguments: list[str]) -> NoReturn:
    out, steps, malloc, *command = arguments
    if malloc == "on":
        apply_malloc()
    from torch.optim.optimizer import register_optimizer_step_post_hook  # after malloc is set: torch allocates

    clock = StepClock(Path(out), int(steps))
    register_optimizer_step_post_hook(clock.tick)
    is_module = command[0] == "-m"
    name, *rest = command[1:] if is_module else command
    ending = run_target(Target(name, tuple(rest), is_module))
    clock.write()  # a script shorter than asked for
    ending.leave()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(__file__).parent.parent)  # as in autofuse.__main__
    main(sys.argv[1:])
