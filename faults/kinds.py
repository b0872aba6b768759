"""The kinds of faults, as a table of trials.

In: the ground, and a source of random numbers. Out: how many faults there were, and what was wrong after them.
Whatever happens, the script's losses are plain Python's, stderr has lines of autofuse alone, later runs are as good as
any, the store keeps its decisions and requests, and no process is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from faults.ground import BEGINNINGS, Ground
from faults.place import QUICK, Place, Stored, finish, noise_of, wrong_with

WHOLE_RUN_SECONDS = 5.0  # about as long as a run of the script takes
DRAIN_SECONDS = 240.0  # in which a daemon works off the requests of the script
KILLS_OF_A_QUEUE = 12
CROWD = 16
WRITES = 60  # each of which fails once by itself, and once with all that follow
SHORT_RUNS = 250  # of one trial
HISTORY_RUNS = 25
HISTORY_BYTES = 200_000
GROWS = 1.2  # times the most bytes of the first half of the short runs


class Draw(random.Random):
    """What one trial draws from."""

    def __init__(self, seed: int, kind: str, number: int) -> None:
        super().__init__(f"{seed} {kind} {number}")
        self.number = number  # of the trial: for what is gone through in turn


@dataclass
class Outcome:
    """Of one trial."""

    faults: int = 1
    wrong: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)  # counts that are neither
    most_bytes: int = 0  # that the store's folder had

    def keep(self, before: Stored, place: Place) -> Stored:
        """Check that the store still has what it had; returns what it has now."""
        try:
            now = place.stored()
        except sqlite3.Error as error:
            self.wrong.append(f"the store cannot be read: {error}")
            return before
        self.wrong += before.lost_in(now)
        return now


@dataclass(frozen=True)
class Kind:
    """One kind: a trial, and how many of them a whole run makes."""

    trial: Callable[[Ground, Draw], Outcome]
    times: int


# ---- killed processes ---------------------------------------------------------------------------------------------


def kill_daemon(ground: Ground, rng: Draw) -> Outcome:
    """The daemon, a worker or a compiler is killed at random moments until the queue is worked off."""
    place, outcome = ground.place("waiting"), Outcome(faults=0)
    stored = place.stored()
    while stored.open and outcome.faults < KILLS_OF_A_QUEUE:
        outcome.wrong += noise_of(place.run("daemon", "start", *QUICK))
        time.sleep(rng.uniform(0.0, 3.0))
        outcome.faults += _kill_one(place, rng)
        stored = outcome.keep(stored, place)
    outcome.wrong += wrong_with(place.run_script(), ground.expected)
    until = time.monotonic() + DRAIN_SECONDS
    while stored.open and time.monotonic() < until and not outcome.wrong:
        place.run("daemon", "start", *QUICK)
        time.sleep(1.0)
        stored = outcome.keep(stored, place)
    if stored.open:
        outcome.wrong.append(f"{len(stored.open)} requests are never worked off")
    outcome.wrong += place.end()
    return outcome


def _kill_one(place: Place, rng: Draw) -> int:
    """Kill the daemon, or any process below it; 0 where it has ended by itself."""
    daemon = place.daemon()
    with contextlib.suppress(psutil.Error):
        if daemon is not None:
            below = daemon.children(recursive=True)
            victim = daemon if not below or rng.random() < 0.5 else rng.choice(below)
            victim.send_signal(signal.SIGKILL)
            return 1
    return 0


def kill_script(ground: Ground, rng: Draw) -> Outcome:
    """The script itself is killed; the next run is as good as any."""
    place, outcome = ground.any_place(rng), Outcome()
    before = place.stored() if place.store.exists() else None
    process = place.start_script(pause=0.05)
    time.sleep(rng.uniform(0.0, WHOLE_RUN_SECONDS))
    outcome.notes["ended before"] = int(process.poll() is not None)
    process.kill()
    finish(process)
    if before is not None:
        outcome.keep(before, place)
    return _afterwards(ground, place, outcome)


def _afterwards(ground: Ground, place: Place, outcome: Outcome) -> Outcome:
    """One more run without a fault, a report, and the end of the place."""
    outcome.wrong += [f"in the run after it: {text}" for text in wrong_with(place.run_script(), ground.expected)]
    shown = place.run("report")
    if shown.status:
        outcome.wrong.append(f"no report after it: {shown.err[-500:]}")
    outcome.wrong += noise_of(shown) + place.end()
    return outcome


# ---- disks, clocks, files -----------------------------------------------------------------------------------------


def full_disk(ground: Ground, rng: Draw) -> Outcome:
    """A write to the store's folder fails, or all from one on: the first one, then the second one, and so on."""
    place, outcome = ground.any_place(rng), Outcome()
    before = place.stored() if place.store.exists() else None
    lasts, write = divmod(rng.number, WRITES)
    extra = {"FAULT_LASTS": "1"} if lasts % 2 else {}
    faulty = {"LD_PRELOAD": str(ground.preload), "FAULT_FOLDER": str(place.kept), **extra}
    done = place.run_script(pause=0.05, FAULT_WRITE=str(1 + write), **faulty)
    outcome.wrong += wrong_with(done, ground.expected)
    place.run("daemon", "stop")
    if before is not None:
        outcome.keep(before, place)
    return _afterwards(ground, place, outcome)


YEAR = 365 * 86400


def set_clock(ground: Ground, rng: Draw) -> Outcome:
    """The clock is wrong, and is set while the script runs."""
    place, outcome = ground.any_place(rng), Outcome()
    before = place.stored() if place.store.exists() else None
    steps = (0, -5 * YEAR, 5 * YEAR, -86400, 86400, -3600, 3600, -2, 2)
    clock = f"{rng.choice(steps)},{rng.choice(steps)},{rng.randint(1, 3000)}"
    done = place.run_script(pause=0.05, LD_PRELOAD=str(ground.preload), FAULT_CLOCK=clock)
    outcome.wrong += wrong_with(done, ground.expected)
    if before is not None:
        outcome.keep(before, place)
    return _afterwards(ground, place, outcome)


def damage(ground: Ground, rng: Draw) -> Outcome:
    """A file of the store's folder, or of the home, is truncated, or some bytes of it are changed."""
    place, outcome = ground.place(rng.choice(BEGINNINGS[1:])), Outcome()
    before = place.stored()
    files = sorted(path for path in place.folder.rglob("*") if path.is_file() and path.stat().st_size)
    victim = rng.choice(files)
    _damage(victim, rng)
    damaged = victim.read_bytes()
    done = place.run_script(pause=0.02)
    outcome.wrong += wrong_with(done, ground.expected)
    shown = place.run("report")
    outcome.wrong += noise_of(shown)
    if victim == place.store:
        if not victim.exists() or (shown.status and victim.read_bytes() != damaged):
            outcome.wrong.append("a store that cannot be read was changed")
    elif victim.name != place.store.name + "-wal":  # what a torn log had is lost, as SQLite says
        outcome.keep(before, place)
    outcome.wrong += [f"{victim.name}: {text}" for text in place.end()]
    outcome.wrong = [text if victim.name in text else f"{victim.name}: {text}" for text in outcome.wrong]
    return outcome


def _damage(path: Path, rng: Draw) -> None:
    data = bytearray(path.read_bytes())
    if rng.random() < 0.4:
        del data[rng.randrange(len(data)) :]
    else:
        for _ in range(rng.choice((1, 1, 8, 64))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def take_store(ground: Ground, rng: Draw) -> Outcome:
    """The store is deleted, moved or replaced while a script and a daemon use it."""
    place, outcome = ground.any_place(rng), Outcome()
    process = place.start_script(pause=0.1)
    time.sleep(rng.uniform(0.0, WHOLE_RUN_SECONDS))
    _take(place, ground, rng)
    outcome.wrong += wrong_with(finish(process), ground.expected)
    return _afterwards(ground, place, outcome)


def _take(place: Place, ground: Ground, rng: Draw) -> None:
    other = ground.place("tuned")
    with contextlib.suppress(OSError):
        match rng.choice(("file", "files", "folder", "moved", "replaced")):
            case "file":
                place.store.unlink()
            case "files":
                for path in list(place.kept.iterdir()):
                    path.unlink()
            case "folder":
                shutil.rmtree(place.kept)
            case "moved":
                place.kept.rename(place.folder / "elsewhere")
            case "replaced":
                os.replace(other.store, place.store)
    shutil.rmtree(other.folder)


# ---- many at once -------------------------------------------------------------------------------------------------


def two_daemons(ground: Ground, rng: Draw) -> Outcome:
    """Many start a daemon at the same time: one serves."""
    place, outcome = ground.place("waiting"), Outcome(faults=8)
    before = place.stored()
    starts = [place.start("daemon", "start", *QUICK) for _ in range(outcome.faults)]
    outcome.wrong += [text for start in starts for text in noise_of(finish(start))]
    serving = [p for p in place.processes() if "serve" in p.cmdline() and not _is_below(p)]
    if len(serving) > 1:
        outcome.wrong.append(f"{len(serving)} daemons serve")
    outcome.keep(before, place)
    return _afterwards(ground, place, outcome)


def _is_below(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        return parent is not None and "serve" in parent.cmdline()
    return True


def crowd(ground: Ground, rng: Draw) -> Outcome:
    """Many scripts at once on one store."""
    place, outcome = ground.any_place(rng), Outcome(faults=CROWD)
    before = place.stored() if place.store.exists() else None
    with ThreadPoolExecutor(CROWD) as pool:
        ends = list(pool.map(lambda _: place.run_script(), range(CROWD)))
    outcome.wrong += [text for done in ends for text in wrong_with(done, ground.expected)]
    if before is not None:
        outcome.keep(before, place)
    return _afterwards(ground, place, outcome)


def two_versions(ground: Ground, rng: Draw) -> Outcome:
    """Two versions of autofuse at the same time on one store; the other generates other code."""
    place, outcome = ground.any_place(rng), Outcome()
    before = place.stored() if place.store.exists() else None
    other = place.folder / "other"
    shutil.copytree(Path(place.environment["PYTHONPATH"], "autofuse"), other / "autofuse")
    changed = 0
    for path in (other / "autofuse").rglob("*.py"):
        text = path.read_text()
        new = text.replace('\nCODEGEN_VERSION = "', '\nCODEGEN_VERSION = "other ')
        changed += new != text
        path.write_text(new)
    assert changed, "the version of the code generator was not found"
    processes = [place.start_script(PYTHONPATH=str(other)), place.start_script()]
    outcome.wrong += [text for process in processes for text in wrong_with(finish(process), ground.expected)]
    if before is not None:
        outcome.keep(before, place)
    return _afterwards(ground, place, outcome)


def short_runs(ground: Ground, rng: Draw) -> Outcome:
    """Many short runs one after the other: the store stays as large as its settings say."""
    place, outcome = ground.place("tuned"), Outcome(faults=SHORT_RUNS)
    bounds = ("--set", f"cache.history_bytes={HISTORY_BYTES}", "--set", f"cache.history_runs={HISTORY_RUNS}")
    sizes = []
    for _ in range(SHORT_RUNS):
        done = place.run_script(*bounds)
        outcome.wrong += wrong_with(done, ground.expected)
        sizes.append(place.bytes())
    if max(sizes[SHORT_RUNS // 2 :]) > GROWS * max(sizes[: SHORT_RUNS // 2]):
        outcome.wrong.append(f"the store grows: {sizes}")
    outcome.most_bytes = max(sizes)
    return _afterwards(ground, place, outcome)


KINDS = {
    "kill-daemon": Kind(kill_daemon, 24),
    "kill-script": Kind(kill_script, 50),
    "full-disk": Kind(full_disk, 2 * WRITES),
    "clock": Kind(set_clock, 40),
    "damage": Kind(damage, 400),
    "take-store": Kind(take_store, 40),
    "two-daemons": Kind(two_daemons, 5),
    "two-versions": Kind(two_versions, 5),
    "crowd": Kind(crowd, 3),
    "short-runs": Kind(short_runs, 4),
}
