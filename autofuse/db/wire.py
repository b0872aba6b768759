"""Messages between a script and the process that keeps its store: pickled, with a length in front, over a socket.

In: any objects of ours. Out: the same on the other side, `Closed`, or TimeoutError. Guarantee: nothing is written to
or closed but the socket itself: a script may close descriptors that it does not know, and open files under their
numbers. No signal where the other side has gone. Only the two processes hold the ends, so that what comes is ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct("<Q")
LEAST_DESCRIPTOR = 64  # above those that scripts, shells and supervisors close and reuse


class Closed(Exception):
    """The other side has gone, or the script has closed this end."""


class Wire:
    """One end of a conversation over a socket, which it owns."""

    def __init__(self, end: socket.socket) -> None:
        """Take over the socket under a descriptor of LEAST_DESCRIPTOR or more. Raises OSError."""
        with end:
            number = fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR)
        self._socket = socket.socket(fileno=number)
        self._identity = _identity(number)
        self._unsent = bytearray()

    @property
    def number(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any, seconds: float | None = None) -> None:
        """Send a message. Raises Closed, TimeoutError, and what pickling raises, the last before anything is sent.

        After a TimeoutError, what is left of a message that was begun is sent with the next one, which the other side
        would otherwise read from its middle.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        until = None if seconds is None else time.monotonic() + seconds
        self._send_rest(until)
        self._unsent += _HEADER.pack(len(data)) + data
        whole = len(self._unsent)
        try:
            self._send_rest(until)
        finally:
            if len(self._unsent) == whole:  # the caller is told that it was not sent
                self._unsent.clear()

    def _send_rest(self, until: float | None) -> None:
        while self._unsent:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0.0:
                raise TimeoutError
            with self._limited(left) as limited:
                sent = limited.send(self._unsent, socket.MSG_NOSIGNAL)
            del self._unsent[:sent]

    def receive(self, seconds: float | None = None) -> Any:
        """A message, which must begin within ``seconds``. Raises Closed, TimeoutError, and what unpickling raises."""
        with self._limited(seconds) as limited:
            (length,) = _HEADER.unpack(self._read(limited, _HEADER.size))
            limited.settimeout(None)  # the message has begun, so the rest will come
            data = self._read(limited, length)
        return pickle.loads(data)

    @staticmethod
    def _read(limited: socket.socket, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = limited.recv(min(count - len(data), 1 << 20))
            if not part:
                raise Closed
            data += part
        return bytes(data)

    @contextlib.contextmanager
    def _limited(self, seconds: float | None) -> Any:
        if not self._is_ours():
            raise Closed
        try:
            self._socket.settimeout(seconds)
            yield self._socket
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error

    def close(self) -> None:
        """Closing twice is allowed."""
        if self._is_ours():
            self._socket.close()
        else:
            self._socket.detach()  # the number may belong to a file of the script by now

    def _is_ours(self) -> bool:
        return _identity(self._socket.fileno()) == self._identity


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
