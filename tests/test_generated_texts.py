"""Generated text is the same in every process: it is the key under which a kernel is stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_two_processes_generate_the_same_texts() -> None:
    command = [sys.executable, "-m", "tests.generated_texts", "40"]
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env=os.environ | {"PYTHONHASHSEED": seed, "TEST_FORMS": ""},  # each traces for itself
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=300)[0].splitlines() for process in running)
    assert all(process.returncode == 0 for process in running)
    assert len(one) == 4 and one == other
