"""The script's side of a store that a process of its own keeps (`serve`).

In: calls of methods of `Store`'s parts. Out: what they return or raise.
Guarantee: SQLAlchemy is not imported here, which would cost each script 0.25 s before its first line, and work on the
store does not hold the script's interpreter. The process ends when the script does, however that ends. If it ends
earlier, the next call raises `StoreError`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autofuse.db.wire import Closed, Wire
from autofuse.detached import python_module, spawn
from autofuse.errors import AutofuseError, StoreError
from autofuse.locks import make_lock

if TYPE_CHECKING:
    from autofuse.db.store import Store

CLOSE_SECONDS = 5.0


class StoreClient:
    """A `Store` in another process: its parts have the same methods. May be used by several threads, one at a time."""

    def __init__(self, path: Path, timeout_seconds: float) -> None:
        """Start the process without waiting for it; ``timeout_seconds`` as in `Store.open`. Raises OSError."""
        self.path = path
        self.was_there = os.path.exists(path)
        self._lock = make_lock()
        self._number = 0  # of the last request
        ours, theirs = map(Wire, socket.socketpair())
        try:
            command, environment = python_module("autofuse.db.serve")
            arguments = [str(theirs.number), os.path.abspath(path), str(timeout_seconds)]
            spawn([*command, *arguments], environment, subprocess.DEVNULL, [theirs.number])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._wire = ours
        _clients.add(self)

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(self, name)

    def as_store(self) -> Store:
        return cast("Store", self)

    def ask(self, name: str, *args: Any, within_seconds: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the store, such as ``queue.add``; returns what the method returns.

        Raises StoreError where the method fails, and where no answer comes ``within_seconds`` (None: no limit).
        """
        until = None if within_seconds is None else time.monotonic() + within_seconds

        def left() -> float | None:
            return None if until is None else max(1e-3, until - time.monotonic())

        try:
            if not self._lock.acquire(timeout=-1 if within_seconds is None else within_seconds):
                raise TimeoutError
            try:
                self._number += 1
                self._wire.send((self._number, name, args, kwargs), left())
                answered, is_well, value = 0, False, None
                while answered != self._number:  # an answer that came too late for its request is read first
                    answered, is_well, value = self._wire.receive(left())
            finally:
                self._lock.release()
        except TimeoutError:
            raise StoreError(f"expected an answer from the store {self.path} in {within_seconds:.1f} s") from None
        except Closed:
            raise StoreError(
                f"expected an answer of the process that keeps the store {self.path}, found that it has ended"
            ) from None
        if is_well:
            return value
        raise value if isinstance(value, AutofuseError) else StoreError(str(value))

    def close(self) -> None:
        """Close the store, and let its process end."""
        with contextlib.suppress(StoreError):  # the process has ended, or will end once it finds no client
            self.ask("close", within_seconds=CLOSE_SECONDS)
        self._wire.close()


class _Remote:
    """A part of the other process's store, or a method of a part, known by its dotted path."""

    def __init__(self, client: StoreClient, path: str) -> None:
        if path.rpartition(".")[2].startswith("_"):
            raise AttributeError(path)
        self._client = client
        self._path = path

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(self._client, f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._client.ask(self._path, *args, **kwargs)


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Close a forked child's copies of the sockets: a store's process ends only when no other process holds one."""
    for client in list(_clients):
        client._wire.close()


os.register_at_fork(after_in_child=_forget_in_child)
