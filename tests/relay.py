"""A relay before a server, which can keep back what the server answers.

In: a port of the loopback. Out: another port. Answers go through at once, or each one only when it is let through.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Passes connections on to a server."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._gate = threading.Condition()
        self._is_open = True
        self._held = 0  # answers that wait
        self._passes = 0  # answers that may go through a closed gate
        self._is_over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self) -> None:
        """From now on keep answers back."""
        with self._gate:
            self._is_open = False

    def wait_held(self, seconds: float) -> bool:
        """Wait until an answer is kept back; False where none comes."""
        with self._gate:
            return self._gate.wait_for(lambda: self._held > 0, seconds)

    def step(self) -> None:
        """Let one answer through."""
        with self._gate:
            self._passes += 1
            self._gate.notify_all()
            self._gate.wait_for(lambda: self._passes == 0 or self._is_over)

    def release(self) -> None:
        """Let all answers through again."""
        with self._gate:
            self._is_open = True
            self._gate.notify_all()

    def close(self) -> None:
        """End all connections."""
        with self._gate:
            self._is_over = self._is_open = True
            self._gate.notify_all()
        for one in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                self._wait()
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def _wait(self) -> None:
        with self._gate:
            if self._is_open:
                return
            self._held += 1
            self._gate.notify_all()
            self._gate.wait_for(lambda: self._is_open or self._passes > 0)
            self._held -= 1
            self._passes = max(0, self._passes - 1)
            self._gate.notify_all()


@contextlib.contextmanager
def relayed(port: int) -> Iterator[Relay]:
    """A relay for the time of a test."""
    made = Relay(port)
    try:
        yield made
    finally:
        made.close()
