"""The process that keeps a script's store: ``python -m autofuse.db.serve DESCRIPTOR PATH TIMEOUT``.

In: questions of a `StoreClient`, each a path such as ``queue.add`` with arguments. Out: what that returned or raised.
Guarantee: it ends when the script does, or says ``close``; no signal that ends the script ends it before its last rows
are written. What it cannot do at all, such as import, is the answer to each question.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofuse.db.wire import Closed, Wire
from autofuse.errors import AutofuseError, StoreError
from autofuse.startup import gc_pause

if TYPE_CHECKING:
    from autofuse.db.store import Store


def serve(wire: Wire, path: Path, timeout_seconds: float) -> None:
    """Answer requests until the client closes or is gone."""
    store: Store | None = None
    trouble: Exception | None = None
    try:
        with gc_pause.paused():
            from autofuse.db.store import Store

            gc_pause.freeze()
        store = Store.open(path, timeout_seconds=timeout_seconds)
    except Exception as error:
        trouble = _portable(error)
    with contextlib.closing(wire), contextlib.suppress(Closed):
        while True:
            number, name, args, kwargs = wire.receive()
            is_well, value = False, trouble
            if store is not None:
                is_well, value = _answer(store, name, args, kwargs)
            try:
                wire.send((number, is_well, value))
            except (AttributeError, TypeError, ValueError) as error:  # a value that cannot be pickled
                wire.send((number, False, _portable(error)))
            if name == "close":
                return
    if store is not None:
        store.close()


def _answer(store: Store, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    try:
        return True, attrgetter(name)(store)(*args, **kwargs)
    except Exception as error:
        return False, _portable(error)


def _portable(error: Exception) -> AutofuseError:
    """The error as a StoreError, which the client can unpickle and raise."""
    if isinstance(error, StoreError):
        return type(error)(str(error))
    return StoreError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # may be sent to a whole group
        signal.signal(number, signal.SIG_IGN)
    serve(Wire(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2]), float(sys.argv[3]))
    gc_pause.freeze()
