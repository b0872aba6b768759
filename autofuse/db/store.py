"""The store: one SQLite file that scripts, the daemon and the reports share.

In: records of ``ir``. Out: the same records, and the plain rows of ``rows``.

What it promises:

- **Nothing is lost** but the details of old runs, by ``prune``, and most timed steps of long ones (`thinning`).
  ``add_`` and ``put_measurements``, ``put_decision`` append; the other ``put_`` bring counters of the same run up to
  date. Only binaries of kernels are evicted, their sources stay.
- **All or nothing.** Each method is one transaction: after ``kill -9`` its rows are all there or none is.
- **Many processes.** WAL: readers see a consistent state and wait for nobody; writers wait for each other, up to
  ``timeout_seconds``. One object per thread is fastest; sharing one is safe and takes turns.
- **One error.** Whatever goes wrong with the file is a ``StoreError`` whose message says what was expected, what was
  found and what to type; after it the object is as usable as the file allows.
- **Not our file, not touched.** Garbage, another program's database and a newer schema are left as they are.
- **One clock.** Times are UTC epoch seconds.
"""

from __future__ import annotations

from autofuse.db.history import StoreHistory
from autofuse.db.results import TuneResults
from autofuse.db.run_notes import RunNotes
from autofuse.db.tune_queue import TuneQueue


class Store(RunNotes, TuneQueue, TuneResults, StoreHistory):
    """An open store: ``RunLog`` and ``RunNotes`` (runs), ``TuneQueue`` (requests), ``TuneResults`` (decisions)."""
