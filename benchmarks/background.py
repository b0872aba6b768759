"""Step times of a training script with and without tuning daemons at work beside it.

    python benchmarks/background.py          # 4 minutes
    python benchmarks/background.py --quick  # a trial of the benchmark itself

Bar: the mean step at most 1.02x of that without, over pairs of stretches. One process trains in eager on all cores, as
a script that its daemons know of; the daemons of two stores have real requests to work off in one stretch of each pair
and stand still in the other, so that both see the same machine. Which comes first alternates. A stretch is a script of
its own to the daemons, with an account that begins at nothing. Writes benchmarks/results/background.json.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from common import arguments, parse, print_end, ratio, save

from autofuse.daemon import control
from autofuse.daemon.peers import Peers, peers_folder
from autofuse.daemon.throttle import cpu_seconds
from autofuse.db.store import Store
from autofuse.ir.device import cpu_device
from autofuse.ir.records import DecisionKey, TuneRequest
from autofuse.settings import layers as settings_module
from autofuse.settings.layers import Settings
from autofuse.tuner.machine_load import busy_seconds

BAR = 1.02
PAIRS, SECONDS = 8, 10.0
WARM_SECONDS = 30.0  # without a script: daemons import, their workers import torch and begin
STORES = 2
FOREIGN = 0.1  # of a core: somebody else computes
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def collect_requests(store: Path, steps: int) -> int:
    """Run the example once, in a process of its own that never tunes but asks for everything."""
    command = [sys.executable, "-m", "autofuse", "run", "--tune", "after", "--store", str(store)]
    command += ["--set", "tuner.budget_seconds=100000", "--set", "capture.at_once=true"]
    command += [str(EXAMPLES / "train_lm.py"), "--steps", str(steps)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with Store.open(store, readonly=True) as opened:
        status = opened.queue.length()
    if not status.queued + status.running + status.done:
        raise SystemExit("the example asked for no tuning: nothing to measure the daemon at")
    return status.queued + status.running + status.done


def trainer(length: int) -> Callable[[], float]:
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


def percentile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Daemons:
    """Those of all stores, which stand still until they are let go."""

    def __init__(self, all_settings: Sequence[Settings]) -> None:
        self._settings = all_settings
        self.pids = [control.ensure_running(settings) for settings in all_settings]

    def signal(self, number: signal.Signals) -> None:
        """To the daemons first, so that what they have just halted stays so."""
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                process.send_signal(number)
                for child in process.children(recursive=True):
                    child.send_signal(number)

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(pid) for pid in self.pids)

    def done(self) -> int:
        done = 0
        for settings in self._settings:
            with Store.open(settings.run.store, readonly=True) as opened:
                done += opened.queue.length().done
        return done


def stretch(step: Callable[[], float], seconds: float) -> list[float]:
    found, deadline = [], time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        found.append(step())
    return found


def main() -> None:
    parser = arguments(__doc__, "background", quick="two pairs of short stretches")
    parser.add_argument("--length", type=int, default=128, help="sequence length of the training steps")
    options = parse(parser)
    pairs, seconds = (2, 3.0) if options.quick else (PAIRS, SECONDS)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp())
    first = folder / "0.sqlite3"
    values = {"tuner.budget_seconds": 100000, "tuner.shared_folder": str(folder / "shared")}
    stores = [settings_module.load({"run.store": str(folder / f"{i}.sqlite3"), **values}) for i in range(STORES)]
    queued = collect_requests(first, 40)
    control.stop(stores[0])
    for settings in stores[1:]:
        shutil.copy(first, settings.run.store)
    requests = all_requests(first)
    for settings in stores:
        with Store.open(settings.run.store) as opened:
            opened.queue.add(requests, force=True)
    step = trainer(options.length)
    peers = Peers(peers_folder(stores[0]))
    daemons = Daemons(stores)
    try:
        time.sleep(3.0 if options.quick else WARM_SECONDS)
        daemons.signal(signal.SIGSTOP)
        before_steps = daemons.done()
        stretch(step, 2.0)
        times: dict[str, list[list[float]]] = {"without": [], "with": []}
        foreign = []
        taken = 0.0
        for number in range(2 * pairs):
            name = ("without", "with", "with", "without")[number % 4]
            if name == "with":
                peers.announce(0.0)
                daemons.signal(signal.SIGCONT)
            used = daemons.cpu_seconds()
            others, began_at = busy_seconds() - used - time.process_time(), time.perf_counter()
            times[name].append(stretch(step, seconds))
            taken += daemons.cpu_seconds() - used
            others = busy_seconds() - daemons.cpu_seconds() - time.process_time() - others
            foreign.append(others / (time.perf_counter() - began_at))
            if name == "with":
                daemons.signal(signal.SIGSTOP)
                peers.withdraw()
    finally:
        for settings, pid in zip(stores, daemons.pids, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            control.stop(settings)
    quiet = [pair for pair in range(pairs) if max(foreign[2 * pair : 2 * pair + 2]) < FOREIGN]
    if not quiet:
        sys.exit("expected a quiet machine, found that others used it all the time")
    times = {name: [blocks[pair] for pair in quiet] for name, blocks in times.items()}
    means = {name: [statistics.fmean(block) for block in blocks] for name, blocks in times.items()}
    every = {name: [t for block in blocks for t in block] for name, blocks in times.items()}
    found = ratio(means["with"], means["without"])
    save(
        options.out,
        "background",
        mean_ms={name: [mean * 1e3 for mean in found] for name, found in means.items()},
        pairs_left_out=pairs - len(quiet),
        steps={name: len(t) for name, t in every.items()},
        median_ms={name: statistics.median(t) * 1e3 for name, t in every.items()},
        p99_ms={name: percentile(t, 0.99) * 1e3 for name, t in every.items()},
        mean_step_with_over_without=found,
        p50_with_over_without=statistics.median(every["with"]) / statistics.median(every["without"]),
        p99_with_over_without=percentile(every["with"], 0.99) / percentile(every["without"], 0.99),
        stores=STORES,
        requests_queued=STORES * queued,
        requests_tuned_before=before_steps,
        cpu_seconds_taken=taken,
        seconds_with=seconds * pairs,
        busy_percent=stores[0].tuner.busy_percent,
    )
    text = f"{found['median']:.3f}x ({found['low']:.3f} to {found['high']:.3f}), bar {BAR}x"
    share = f"{taken:.2f} CPU seconds in {seconds * pairs:.0f} s of steps"
    print_end({"mean step with daemons over without": text, "they took": share}, [], options.out, began)


def all_requests(store: Path) -> list[TuneRequest]:
    """Everything the example asked for, whether the daemon has begun on it or not."""
    device, threads = cpu_device().key, torch.get_num_threads()
    with Store.open(store, readonly=True) as opened:
        versions = {row.key.versions for row in opened.queue.requests()}
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
            for use in opened.nodes.uses()
            for version in versions
        ]


if __name__ == "__main__":
    main()
