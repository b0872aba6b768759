"""The language model of examples/train_lm.py, end to end, one process a variant.

Out: milliseconds a step over the second half of the run, from when its log lines arrive (each waits for the device),
and the seconds of the whole run, compilation and tuning included.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autofuse.daemon import control
from autofuse.settings.layers import Settings

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_lm.py"
LOG_EVERY = 10


@dataclass(frozen=True)
class Variant:
    name: str
    mode: str  # as the table calls it
    compile: str = ""  # the script's --compile
    tune: str = ""  # autofuse run --tune


# The first run of autofuse fills the store and pauses for it, the second finds it filled.
VARIANTS = (
    Variant("eager", "eager"),
    Variant("autofuse run, tuning", "autofuse", tune="wait"),
    Variant("autofuse run", "autofuse", tune="off"),
    Variant("torch.compile", "default", compile="default"),
    Variant("torch.compile dynamic", "dynamic", compile="dynamic"),
    Variant("torch.compile max-autotune", "max-autotune", compile="max-autotune-no-cudagraphs"),
)


def command(variant: Variant, device: str, is_quick: bool, store: Path, budget_seconds: float) -> list[str]:
    size = (
        ("--steps", "20", "--layers", "1", "--width", "32", "--batch-size", "2", "--context", "32")
        if is_quick
        else ("--steps", "160", "--layers", "4", "--width", "768", "--heads", "12", "--batch-size", "32")
    )
    script = [str(SCRIPT), *size, "--log-every", str(LOG_EVERY), "--device", device]
    if variant.compile:
        script += ["--compile", variant.compile]
    if not variant.tune:
        return [sys.executable, *script]
    options = {"tuner.budget_seconds": budget_seconds, "tuner.job_seconds": 3, "tuner.trials": 2 if is_quick else 12}
    given = [text for name, value in options.items() for text in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "autofuse", "run", "--tune", variant.tune, "--store", str(store), *given, *script]


def run_variant(variant: Variant, device: str, is_quick: bool, settings: Settings, seconds: float) -> dict[str, Any]:
    """A row of results; ``problem`` where it did not come to its end."""
    store = settings.run.store.with_name("lm.sqlite3")
    arguments = command(variant, device, is_quick, store, max(5.0, 0.25 * seconds))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOFUSE_")}
    row: dict[str, Any] = {"variant": variant.name, "command": " ".join(["python", *arguments[1:]])}
    arrived: list[tuple[float, int, float]] = []
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        assert process.stdout is not None
        for text in process.stdout:
            if found := re.match(r"step (\d+) loss (\S+)", text):
                arrived.append((time.perf_counter(), int(found[1]), float(found[2])))
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["nothing on stderr"])[-1]
    if variant.tune:
        control.stop(settings.with_values({"run.store": store}, "benchmark"))
    row["seconds"] = round(time.perf_counter() - began, 1)
    if code != 0:
        row["problem"] = (
            f"killed after {seconds:.0f} s" if row["seconds"] >= seconds else f"exit code {code}: {last[:300]}"
        )
        return row
    half = arrived[len(arrived) // 2 - 1 :] if len(arrived) > 2 else arrived
    (since, first, _), (until, final, loss) = half[0], half[-1]
    return row | {"step_ms": (until - since) / max(1, final - first) * 1e3, "steps": final, "last_loss": loss}
