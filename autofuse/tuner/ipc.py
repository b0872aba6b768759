"""Messages between daemon and worker: JSON with a length in front, over pipes.

In: dictionaries of plain values. Out: the same on the other side, or TimeoutError, or `PipeClosed`.
Guarantee: nothing that a worker sends can run code in the daemon (no pickle: a wild kernel may have written over the
worker's memory); a message that is not one ends the conversation like a closed pipe; a process that stops in the
middle of a message holds nobody beyond the deadline. `multiprocessing.connection` frames messages too, but its
``recv_bytes`` waits without a deadline once a message has begun.
"""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

_HEADER = struct.Struct("<Q")
_LONGEST_BYTES = 256 << 20
TEND_SECONDS = 0.05  # between two calls of ``tend``, which may halt the other process
_SLICE_SECONDS = 0.2  # the longest time until a wait notices that it is to end


class PipeClosed(Exception):
    """The other side has ended, or has sent something that is no message."""


class Interrupted(Exception):
    """A wait was asked to end."""


class _Wait:
    """The deadline of a wait for a message."""

    def __init__(
        self, timeout_seconds: float | None, is_stopping: Callable[[], bool], tend: Callable[[], float] | None
    ) -> None:
        self._deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._is_stopping = is_stopping
        self._tend = tend

    def slice(self) -> float:
        """Seconds to wait until the next look. Raises Interrupted and TimeoutError."""
        stood = self._tend() if self._tend is not None else 0.0
        if self._is_stopping():
            raise Interrupted
        longest = _SLICE_SECONDS if self._tend is None else TEND_SECONDS
        if self._deadline is None:
            return longest
        self._deadline += stood
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return min(longest, left)


class Pipe:
    """One end of a conversation over two file descriptors, which it owns."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def send(
        self,
        message: Mapping[str, Any],
        timeout_seconds: float | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        tend: Callable[[], float] | None = None,
    ) -> None:
        """Send a message. Raises PipeClosed, and TimeoutError or Interrupted (``is_stopping``) where nobody reads it.

        ``tend`` is called regularly while the other side does not read. It may halt that side, and returns for how
        many seconds it did: these do not count towards the timeout.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        view = memoryview(_HEADER.pack(len(data)) + data)
        wait = _Wait(timeout_seconds, is_stopping, tend)
        seconds = 0.0  # a side that reads need not be waited for
        while view:
            try:
                is_ready = bool(select.select([], [self._writing], [], seconds)[1])
                if is_ready:  # it takes PIPE_BUF bytes at once
                    view = view[os.write(self._writing, view[: select.PIPE_BUF]) :]
            except (OSError, ValueError) as error:
                raise PipeClosed(str(error)) from None
            seconds = 0.0 if is_ready else wait.slice()

    def receive(
        self,
        timeout_seconds: float | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
        tend: Callable[[], float] | None = None,
    ) -> dict[str, Any]:
        """Receive a message. Raises PipeClosed, TimeoutError and Interrupted; ``is_stopping`` and ``tend`` as there."""
        wait = _Wait(timeout_seconds, is_stopping, tend)
        (length,) = _HEADER.unpack(self._read(_HEADER.size, wait))
        if length > _LONGEST_BYTES:
            raise PipeClosed(f"a message of {length} bytes")
        data = self._read(length, wait)
        try:
            message = json.loads(data)
        except ValueError as error:
            raise PipeClosed(f"not a message: {error}") from None
        if not isinstance(message, dict):
            raise PipeClosed("not a message")
        return message

    def _read(self, count: int, wait: _Wait) -> bytes:
        parts: list[bytes] = []
        while count:
            seconds = wait.slice()
            try:
                if not select.select([self._reading], [], [], seconds)[0]:
                    continue
                part = os.read(self._reading, min(count, 1 << 20))
            except (OSError, ValueError) as error:
                raise PipeClosed(str(error)) from None
            if not part:
                raise PipeClosed("closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        for descriptor in {self._reading, self._writing}:
            os.close(descriptor)
