"""Step times of a training script with and without the tuning daemon at work beside it.

    python benchmarks/background.py

Bars: p50 at most 1.15x and p99 at most 1.5x of those without. One process trains in eager; the daemon works
on a queue of real requests in every second block of steps and is stopped in the others, so that both see the
same machine. Writes benchmarks/results/background.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import write

from autofuse import settings as settings_module
from autofuse.db.store import Store
from autofuse.ir.device import cpu_device
from autofuse.ir.records import DecisionKey, TuneRequest
from autofuse.tuner import daemon

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def collect_requests(store: Path, steps: int) -> int:
    """Run the example once, in a process of its own that never tunes but asks for everything."""
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "after", "--store", str(store)]
    command += ["--set", "tuner.budget_seconds=100000", "--set", "capture.at_once=true"]
    command += [str(EXAMPLES / "train_lm.py"), "--steps", str(steps)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with Store.open(store, readonly=True) as opened:
        status = opened.queue_length()
    if not status.queued + status.running + status.done:
        raise SystemExit("the example asked for no tuning: nothing to measure the daemon at")
    return status.queued + status.running + status.done


def trainer(length: int) -> object:
    sys.path.insert(0, str(EXAMPLES))
    from train_lm import GPT

    torch.manual_seed(0)
    model = GPT(4, 256, 4, 256, 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randint(0, 256, (4, length)), torch.randint(0, 256, (4, length))

    def step() -> float:
        began = time.perf_counter()
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - began

    return step


def percentile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help="blocks with and as many without the daemon")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a block")
    parser.add_argument("--length", type=int, default=128, help="sequence length of the training steps")
    options = parser.parse_args()
    store = Path(tempfile.mkdtemp()) / "store.sqlite3"
    settings = settings_module.load({"run.store": str(store), "tuner.budget_seconds": 100000})
    queued = collect_requests(store, 40)
    daemon.stop(settings)
    requests = all_requests(store)
    step = trainer(options.length)
    for _ in range(10):
        step()
    times: dict[str, list[float]] = {"without": [], "with": []}
    handled = 0
    for block in range(2 * options.blocks):
        name = ("without", "with")[block % 2]
        if name == "with":
            with Store.open(store) as opened:  # everything again: the daemon must not run out of work in a block
                opened.add_requests(requests, force=True)
            daemon.ensure_running(settings)
            time.sleep(4.0)  # the worker imports torch once for each block; a long run pays that once
        deadline = time.perf_counter() + options.seconds
        while time.perf_counter() < deadline:
            times[name].append(step())
        if name == "with":
            state = daemon.status(settings)
            handled += state.done if state else 0
            daemon.stop(settings)
    ratios = {
        "p50": percentile(times["with"], 0.5) / percentile(times["without"], 0.5),
        "p99": percentile(times["with"], 0.99) / percentile(times["without"], 0.99),
    }
    results = {
        "steps": {name: len(t) for name, t in times.items()},
        "median_ms": {name: statistics.median(t) * 1e3 for name, t in times.items()},
        "p99_ms": {name: percentile(t, 0.99) * 1e3 for name, t in times.items()},
        "with / without": ratios,
        "requests queued": queued,
        "requests tuned beside the steps": handled,
        "cpu_percent": settings.tuner.cpu_percent,
    }
    path = write("background", results)
    print(f"p50 {ratios['p50']:.3f}x, p99 {ratios['p99']:.3f}x with the daemon at work ({handled} requests tuned)")
    print(f"written to {path}")


def all_requests(store: Path) -> list[TuneRequest]:
    """Everything the example asked for, whether the daemon has begun on it or not."""
    device, threads = cpu_device().key, torch.get_num_threads()
    with Store.open(store, readonly=True) as opened:
        versions = {row.key.versions for row in opened.requests()}
        return [
            TuneRequest(
                DecisionKey(use.fusion_id, use.bucket.label, device, threads, version),
                use.node,
                use.bucket,
                use.shapes,
                use.calls,
                100.0,
                2.0,
            )
            for use in opened.node_uses()
            for version in versions
        ]


if __name__ == "__main__":
    main()
