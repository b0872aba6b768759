"""The decisions of a file as all that a run knows (``run.snapshot``): later ones of the store change nothing.

In: the file's path; the store, which alone reads it. Out: those of its decisions that the store has made too, with
their kernels; one line for what keeps others from being used. Guarantee: the same file and the same store give the same
decisions from the run's start to its end. No code is read from the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autofuse.errors import StoreError

if TYPE_CHECKING:
    from autofuse.db.store import Store
    from autofuse.ir.records import Decision, DecisionKey

VARIABLE = "AUTOFUSE_SNAPSHOT"


class Snapshot:
    """The decisions of one file."""

    def __init__(self, path: Path, device: str, versions: str) -> None:
        """``device``: the key of the machine's CPU; ``versions``: of valid decisions."""
        self._path = path
        self._device = device
        self._versions = versions
        self._rows: list[tuple[int, Decision]] = []

    def read(self, store: Store) -> str:
        """Read the file; in words what is wrong, "" for nothing. On the background thread, before any decision."""
        try:
            named = store.results.named_in(self._path)
        except StoreError as error:
            return f"{error}; this run stays on eager's kernels. Mend the file, or unset {VARIABLE}"
        self._rows = [row for row in named.rows if row[1].key.versions == self._versions]
        ours = [key for key in named.missing if self._is_ours(key)]
        known = sum(self._is_ours(decision.key) for _, decision in self._rows)
        if not known and not ours:
            return (
                f"{self._path}: expected decisions for {self._device} and {self._versions}, found none; this run stays "
                f"on eager's kernels. Export them on such a machine, or unset {VARIABLE}"
            )
        if ours:
            return (
                f"{len(ours)} of {known + len(ours)} decisions of {self._path} are not in this store, so their nodes "
                f"stay on eager's kernels; type: autofuse import {self._path}, then run once without {VARIABLE}"
            )
        return ""

    def decisions(self, device: str, since_id: int) -> list[tuple[int, Decision]]:
        """As `TuneResults.decisions`: of one model of device, with ids above ``since_id``."""
        return [row for row in self._rows if row[1].key.device == device and row[0] > since_id]

    def _is_ours(self, key: DecisionKey) -> bool:
        # Which GPUs there are is not known before the script uses them.
        return key.versions == self._versions and (key.device == self._device or not key.device.startswith("cpu:"))
