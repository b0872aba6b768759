"""One question to a store without SQLAlchemy: its import takes half a second, for which a script would wait.

In: a store's path. Out: what stands there, nothing where it cannot be read: whoever opens the store says why.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

TIMEOUT_SECONDS = 1.0


def setting_decisions(path: Path, device: str, setting: str) -> list[tuple[str, str]]:
    """(workload, "on" or "off") of all trials of a process setting on a kind of machine, the newest last."""
    query = "SELECT workload, decision FROM setting_trials WHERE device = ? AND setting = ? ORDER BY id"
    with contextlib.suppress(sqlite3.Error, OSError):
        uri = f"{path.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=TIMEOUT_SECONDS)) as connection:
            rows = connection.execute(query, (device, setting))
            return [(str(workload), str(decision)) for workload, decision in rows]
    return []
