"""The process that keeps a script's store: ``python -m autofuse.db.serve DESCRIPTOR PATH TIMEOUT``.

In: questions of a `StoreClient`, each a method of `Store` with its arguments. Out: what it returned, or what it raised.
Guarantee: it ends when the script does, or says ``close``. What comes in is pickled: only the script that has started
this process holds the other end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autofuse.db.store import Store
from autofuse.errors import AutofuseError, StoreError


def serve(connection: Connection, path: Path, timeout_seconds: float) -> None:
    """Answer until the other side is gone."""
    store: Store | None = None
    trouble: Exception | None = None
    try:
        store = Store.open(path, timeout_seconds=timeout_seconds)
    except Exception as error:
        trouble = _portable(error)
    with contextlib.closing(connection), contextlib.suppress(EOFError, OSError):
        while True:
            number, name, args, kwargs = connection.recv()
            is_well, value = False, trouble
            if store is not None:
                is_well, value = _answer(store, name, args, kwargs)
            connection.send((number, is_well, value))
            if name == "close":
                return
    if store is not None:
        store.close()


def _answer(store: Store, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    try:
        found = getattr(store, name)
        return True, found(*args, **kwargs) if callable(found) else found
    except Exception as error:
        return False, _portable(error)


def _portable(error: Exception) -> AutofuseError:
    """An error that the other side can raise."""
    if isinstance(error, StoreError):
        return type(error)(str(error))
    return StoreError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what ends the script ends this process, after its last rows
    serve(Connection(int(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3]))
