"""Care of a store as a whole: putting it aside.

In: a path. Out: where the store lies now.
Guarantee: the file, SQLite's log and index, and kept graphs move together, under the lock that makers of a store take,
with the log written into the file first: what is left at the path belongs to nobody, and nothing is lost. The store
need not be sound.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
from pathlib import Path

from filelock import FileLock, Timeout

from autofuse.db.connection import BESIDE, store_error
from autofuse.errors import StoreError
from autofuse.private_files import Untrusted, check_beside

LOCK_SECONDS = 10.0
BELONGING = ("-wal", "-shm", "-journal", ".graphs", ".strict.graphs")


def set_aside(path: Path) -> Path | None:
    """Move a store out of the way; returns its new path, None where there is none. Raises StoreError."""
    if not os.path.lexists(path):
        return None
    try:
        check_beside(path, BESIDE)
        with FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_SECONDS, mode=0o600):
            _empty_log(path)
            aside = next(p for p in _places(path) if not os.path.lexists(p))
            for suffix in ("", *BELONGING):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path.with_name(path.name + suffix), aside.with_name(aside.name + suffix))
            return aside
    except Untrusted as error:
        raise StoreError(f"expected a store that only this user may write to, found: {error}") from error
    except Timeout as error:
        raise StoreError(
            f"expected the store {path} to be free, found its lock held; end the runs that use it"
        ) from error
    except OSError as error:
        raise store_error(path, error) from error


def _places(path: Path) -> itertools.chain[Path]:
    numbered = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(2))
    return itertools.chain([path.with_name(f"{path.name}.old")], numbered)


def _empty_log(path: Path) -> None:
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path, timeout=1.0)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
