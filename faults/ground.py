"""What the trials share: the script's losses in plain Python, stores to begin with, and the library of `preload.c`.

In: a folder. Out: new places. The store "waiting" has requests that no daemon has worked on, "tuned" has decisions.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sqlite3
import subprocess
import time
from pathlib import Path

from faults.place import Place, finish, plain, wrong_with

BEGINNINGS = ("empty", "waiting", "tuned")
SOURCE = Path(__file__).with_name("preload.c")


class Ground:
    """Of one run of the harness. Raises RuntimeError where autofuse does not even run without faults."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.expected = plain()
        self.preload = folder / "preload.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self.preload), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        self._prepare_waiting(Place(folder / "waiting"))
        self._prepare_tuned(Place(folder / "tuned"))

    def _prepare_waiting(self, place: Place) -> None:
        """A run that waits is killed, with its daemon, as soon as it has requested something."""
        process = place.start_script("--tune", "wait")
        while process.poll() is None and not _has_requests(place):
            time.sleep(0.02)
        place.kill_all()
        done = finish(process)
        if not place.stored().open:
            raise RuntimeError(f"no requests to begin with: {done.err}")

    def _prepare_tuned(self, place: Place) -> None:
        done = place.run_script("--tune", "wait")
        place.kill_all()
        wrong = wrong_with(done, self.expected)
        if wrong or not place.stored().decisions:
            raise RuntimeError(f"no decisions to begin with: {wrong or done.err}")

    def place(self, beginning: str) -> Place:
        """A new place, "empty" or a copy of another."""
        like = None if beginning == "empty" else self._folder / beginning
        return Place(self._folder / f"trial-{next(self._numbers)}", like)

    def any_place(self, rng: random.Random) -> Place:
        return self.place(rng.choice(BEGINNINGS))


def _has_requests(place: Place) -> bool:
    with contextlib.suppress(sqlite3.Error):
        return bool(place.stored().open)
    return False
