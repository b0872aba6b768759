"""A place for one trial: a home and a store of its own, and everything that runs there.

In: commands of autofuse. Out: their results, what the store has, what is wrong with either. Guarantee: nothing outside
the folder is read or written by what runs there, and nothing runs there after `Place.end`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPT = Path(__file__).with_name("net.py")
STEPS = 12
TOLERANCE = 1e-4  # of losses: kernels differ from eager by some units in the last place, and Adam divides by small ones
_QUICK = ("tuner.trials=2", "tuner.rounds=3", "tuner.idle_exit_seconds=3", "capture.at_once=true")
QUICK = tuple(word for setting in _QUICK for word in ("--set", setting))
LONGEST_SECONDS = 240.0  # of a command; beyond it hangs
GONE_SECONDS = 20.0  # in which all processes end after the daemon was asked to
KNOWN_LINES = ("autofuse:", "autofuse ")  # beginnings of our lines on stderr


@dataclass(frozen=True)
class Stored:
    """What a store has that must not be lost."""

    decisions: frozenset[int]
    requests: frozenset[str]  # keys, of any status
    open: frozenset[str]  # keys that are not done

    def lost_in(self, after: Stored) -> list[str]:
        """What is missing later, in words."""
        lost = [("decisions", self.decisions - after.decisions), ("requests", self.requests - after.requests)]
        return [f"{len(keys)} {what} are lost" for what, keys in lost if keys]


@dataclass(frozen=True)
class Done:
    """The end of a command."""

    status: int
    out: str
    err: str


class Place:
    """A folder; ``like``: a folder to begin as a copy of."""

    def __init__(self, folder: Path, like: Path | None = None) -> None:
        self.folder = folder
        if like is not None:
            shutil.copytree(like, folder, symlinks=True, dirs_exist_ok=True)
        self.kept = folder / "kept"
        self.kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.store = self.kept / "store.sqlite3"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AUTOFUSE_")},
            **{f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("DATA", "CONFIG", "CACHE", "STATE")},
            "AUTOFUSE_STORE": str(self.store),  # also tells which processes are of this place
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            "OMP_NUM_THREADS": "1",
        }

    # ---- commands --------------------------------------------------------------------------------------

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[str]:
        """Start ``python -m autofuse ARGUMENTS`` in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "autofuse", *map(str, arguments)],
            cwd=self.folder,  # which comes first in the path of what is imported
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environment, **environment},
            start_new_session=True,
        )

    def run(self, *arguments: object, **environment: str) -> Done:
        return finish(self.start(*arguments, **environment))

    def start_script(self, *options: str, pause: float = 0.0, **environment: str) -> subprocess.Popen[str]:
        """Start the script under ``autofuse run``, with quick tuning."""
        return self.start("run", *options, *QUICK, SCRIPT, STEPS, pause, **environment)

    def run_script(self, *options: str, pause: float = 0.0, **environment: str) -> Done:
        return finish(self.start_script(*options, pause=pause, **environment))

    # ---- what is there ---------------------------------------------------------------------------------

    def stored(self) -> Stored:
        """Read the store past autofuse. Raises sqlite3.Error where it cannot be read."""
        with contextlib.closing(sqlite3.connect(f"{self.store.as_uri()}?mode=ro", uri=True, timeout=30.0)) as database:
            problem = database.execute("PRAGMA quick_check").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
            decisions = database.execute("SELECT id FROM decisions").fetchall()
            requests = database.execute("SELECT key, status FROM requests").fetchall()
        still_open = frozenset(key for key, status in requests if status in ("queued", "running"))
        return Stored(frozenset(row[0] for row in decisions), frozenset(key for key, _ in requests), still_open)

    def processes(self) -> Iterator[psutil.Process]:
        """All processes of this place, the daemon's workers and compilers as well."""
        mark = f"AUTOFUSE_STORE={self.store}"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and mark in _environment(process.pid):
                    yield process

    def daemon(self) -> psutil.Process | None:
        for path in self.kept.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                return psutil.Process(json.loads(path.read_text())["pid"])
        return None

    def bytes(self) -> int:
        total = 0
        for path in self.kept.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    # ---- the end ---------------------------------------------------------------------------------------

    def end(self) -> list[str]:
        """Stop the daemon, and say which processes are left; kill these, and delete the folder."""
        self.run("daemon", "stop")
        until = time.monotonic() + GONE_SECONDS
        while (left := list(self.processes())) and time.monotonic() < until:
            time.sleep(0.1)
        problems = [f"a process is left: {_words(process)}" for process in left]
        self.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)
        return problems

    def kill_all(self) -> None:
        for process in list(self.processes()):
            with contextlib.suppress(psutil.Error):
                process.kill()
                process.wait(10.0)


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for a command; one that hangs is killed, with status -9."""
    try:
        out, err = process.communicate(timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nkilled: it took longer than {LONGEST_SECONDS:.0f} s"
    return Done(process.returncode, out, err)


def plain() -> list[float]:
    """The script's losses in plain Python."""
    command = [sys.executable, str(SCRIPT), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [float(line) for line in done.stdout.split()]


def wrong_with(done: Done, expected: Sequence[float]) -> list[str]:
    """What is wrong with a run of the script: its results, its status, or what a person reads."""
    problems = noise_of(done)
    if done.status:
        problems.append(f"the script ended with status {done.status}: {done.err[-1500:]}")
        return problems
    losses = [float(line) for line in done.out.split()]
    if len(losses) != len(expected):
        problems.append(f"{len(losses)} losses instead of {len(expected)}")
    for number, (found, wanted) in enumerate(zip(losses, expected, strict=False)):
        if not math.isclose(found, wanted, rel_tol=TOLERANCE):
            problems.append(f"loss {number} is {found} instead of {wanted}")
            break
    return problems


def noise_of(done: Done) -> list[str]:
    """Lines on stderr that are not ours, as tracebacks are."""
    lines = [line for line in done.err.splitlines() if line.strip() and not line.startswith(KNOWN_LINES)]
    return [f"on stderr: {' | '.join(lines)[-1500:]}"] if lines else []


def _environment(pid: int) -> list[str]:
    """psutil reads an environment with any value, which is slow; this reads what the process began with."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[-300:]
    return str(process.pid)
