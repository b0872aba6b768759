"""The store: one SQLite file that scripts, the daemon and the reports share.

In: records of ``ir``. Out: the same records, and the plain rows of ``rows``.

What it promises:

- **Nothing is lost** but the details of old runs, by ``prune``, and most timed steps of long ones (`thinning`).
  ``add`` and ``put_measurements``, ``put_decision`` append; the other ``put`` bring counters of the same run up to
  date. Only binaries of kernels are evicted, their sources stay.
- **All or nothing.** Each method of a part is one transaction: after ``kill -9`` its rows are all there or none is.
- **Many processes.** WAL: readers see a consistent state and wait for nobody; writers wait for each other, up to
  ``timeout_seconds``. One object per thread is fastest; sharing one is safe and takes turns.
- **One error.** Whatever goes wrong with the file is a ``StoreError`` whose message says what was expected, what was
  found and what to type; after it the object is as usable as the file allows.
- **Not our file, not touched.** Garbage, another program's database and a newer schema are left as they are.
- **One clock.** Times are UTC epoch seconds.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Self

from autofuse.db.base import StoreFile
from autofuse.db.connection import BUSY_TIMEOUT_SECONDS
from autofuse.db.history import StoreHistory
from autofuse.db.kernels import Kernels
from autofuse.db.node_log import NodeLog, ProfileLog
from autofuse.db.old_decisions import OldDecisions
from autofuse.db.proposals import FleetMarks, Proposals
from autofuse.db.results import TuneResults
from autofuse.db.run_log import RunLog, StepLog
from autofuse.db.run_notes import RootLog, RunNotes, TrialLog
from autofuse.db.tune_queue import DaemonLog, TuneQueue
from autofuse.preserve_rng import untouched


class Store:
    """An open store: several parts on one file, each a class that can be used alone."""

    def __init__(self, file: StoreFile) -> None:
        self.file = file
        # what runs write
        self.runs = RunLog(file)
        self.steps = StepLog(file)
        self.nodes = NodeLog(file)
        self.profiles = ProfileLog(file)
        self.roots = RootLog(file, self.runs)
        self.notes = RunNotes(file)
        self.trials = TrialLog(file)
        # what scripts and the daemon exchange
        self.queue = TuneQueue(file)
        self.daemon = DaemonLog(file)
        self.results = TuneResults(file)
        self.old_decisions = OldDecisions(file)
        self.kernels = Kernels(file)
        # what a fleet's other hosts have found
        self.proposals = Proposals(file)
        self.marks = FleetMarks(file)
        # upkeep of the whole
        self.history = StoreHistory(file)

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False, timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> Self:
        """Open the store at ``path``, as `StoreFile.open` does and with its errors."""
        return cls(StoreFile.open(path, readonly=readonly, timeout_seconds=timeout_seconds))

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def was_moved(self) -> bool:
        """Whether the path leads to another file by now, or to none."""
        return self.file.was_moved

    def data_version(self) -> int:
        """A number that changes when another process or store has written (about 0.1 ms)."""
        return self.file.data_version()

    def apply(self, function: str, *args: Any) -> Any:
        """Call a function, given as ``module:name``, with this store and ``args``, in the process that keeps it."""
        with untouched():
            module, _, name = function.partition(":")
            called = getattr(importlib.import_module(module), name)
        return called(self, *args)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
