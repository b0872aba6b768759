"""The script's side of a store that a process of its own keeps (`serve`).

In: calls of `Store`'s methods. Out: what they return or raise. Guarantee: SQLAlchemy is not imported here, which would
cost each script 0.25 s before its first line, and work on the store does not hold the script's interpreter. The process
ends when the script does, however that ends. If it ends earlier, the next call raises `StoreError`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autofuse.detached import python_module, spawn
from autofuse.errors import AutofuseError, StoreError
from autofuse.locks import make_lock

if TYPE_CHECKING:
    from autofuse.db.store import Store

CLOSE_SECONDS = 5.0


class StoreClient:
    """A `Store` in another process: it has the same methods. May be used from several threads, one at a time."""

    def __init__(self, path: Path, timeout_seconds: float) -> None:
        """Starts the process, and does not wait for it. ``timeout_seconds`` as of `Store.open`. Raises OSError."""
        self.path = path
        self.was_there = os.path.exists(path)
        self._lock = make_lock()
        self._number = 0  # of the last question
        ours, theirs = socket.socketpair()
        with theirs:
            command, environment = python_module("autofuse.db.serve")
            arguments = [str(theirs.fileno()), os.path.abspath(path), str(timeout_seconds)]
            spawn([*command, *arguments], environment, subprocess.DEVNULL, [theirs.fileno()])
        self._connection = Connection(ours.detach())
        _clients.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self.ask, name)

    @property
    def kernels_refused(self) -> int:
        return int(self.ask("kernels_refused"))

    def as_store(self) -> Store:
        return cast("Store", self)

    def ask(self, name: str, *args: Any, within_seconds: float | None = None, **kwargs: Any) -> Any:
        """What a method of the store returns. Raises what it raises; StoreError where no answer comes."""
        try:
            with self._lock:
                self._number += 1
                self._connection.send((self._number, name, args, kwargs))
                answered, is_well, value = 0, False, None
                while answered != self._number:  # one that came too late is still to be read
                    if not self._connection.poll(within_seconds):
                        raise StoreError(f"expected an answer from the store {self.path} in {within_seconds:.1f} s")
                    answered, is_well, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise StoreError(
                f"expected an answer of the process that keeps the store {self.path}, found that it has ended"
            ) from error
        if is_well:
            return value
        raise value if isinstance(value, AutofuseError) else StoreError(str(value))

    def close(self) -> None:
        """Give the store back, and let the process end."""
        with contextlib.suppress(StoreError):  # it has ended, or will once it finds nobody there
            self.ask("close", within_seconds=CLOSE_SECONDS)
        self._forget()

    def _forget(self) -> None:
        self._connection.close()


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _forget_in_child() -> None:
    """The process ends once nobody holds the other end: a forked child must not keep it."""
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_forget_in_child)
