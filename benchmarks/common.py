"""What every benchmark shares: the machine in the result file, interleaved samples, medians with intervals."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autofuse.ir.device import cpu_device
from autofuse.tuner.comparison import INTERVAL_TAIL, bounds

RESULTS = Path(__file__).with_name("results")


def machine() -> dict[str, Any]:
    device = cpu_device()
    return {
        "cpu": device.name,
        "cores": device.cores,
        "isa": device.isa,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "date": time.strftime("%Y-%m-%d"),
    }


def interleave(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    repeats: int,
    before: Callable[[], object] = lambda: None,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Microseconds a call, one sample per round and callable; the order rotates. ``before`` is called untimed.

    ``warm``: so is each callable before its sample, which then finds its own code and data in the caches, not the
    others', as in a script that calls nothing else.
    """
    names = list(calls)
    for name in names:
        for _ in range(repeats):
            calls[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for position in range(len(names)):
            name = names[(position + number) % len(names)]
            call = calls[name]
            before()
            if warm:
                call()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            samples[name].append((time.perf_counter() - began) / repeats * 1e6)
    return samples


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median with its 95 % interval."""
    low, high = bounds(sorted(samples), INTERVAL_TAIL)
    return {"median": statistics.median(samples), "low": low, "high": high, "samples": len(samples)}


def difference(left: Sequence[float], right: Sequence[float]) -> dict[str, float]:
    """left - right, round by round."""
    return summary([a - b for a, b in zip(left, right, strict=True)])


def write(name: str, results: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    document = {"benchmark": name, "command": " ".join(["python", *sys.argv]), "machine": machine(), **results}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
