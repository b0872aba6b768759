"""The worker: a killable process in which kernels are first run. ``python -m autofuse.tuner.worker`` is its side.

In: requests as pickled tuples over a pipe. Out: replies, or the way the process ended.
Guarantee: the daemon survives whatever a kernel does: a crash, a hang and a lack of memory come back as
`WorkerLost` with a status, and the next request starts a new process. The worker dies with the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Status

_HEADER = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1
START_SECONDS = 120.0  # importing torch on a busy machine


class WorkerLost(Exception):
    """The worker process ended or was killed while it worked on a request."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class CandidateError(Exception):
    """The worker is well, the candidate is not: ``status`` is "wrong", "out_of_memory" or "refused"."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


# ---- the daemon's side --------------------------------------------------------------------------------


class Worker:
    """A worker process, started at the first request and again after each loss."""

    def __init__(self, *, memory_bytes: int, timeout_seconds: float, nice: int = 19) -> None:
        self._memory_bytes = memory_bytes
        self._timeout_seconds = timeout_seconds
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self.generation = 0  # grows with each new process, whose benches are empty

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def ask(self, command: str, *arguments: Any, timeout_seconds: float | None = None) -> Any:
        """Send a request and wait for its reply. Raises WorkerLost and CandidateError."""
        process = self._ensure()
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, (command, arguments))
            ok, value = _receive(process.stdout, timeout_seconds or self._timeout_seconds)
        except TimeoutError:
            self.kill()
            seconds = timeout_seconds or self._timeout_seconds
            raise WorkerLost("timeout", f"no answer within {seconds:.0f} s; killed") from None
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._reap()
            raise WorkerLost("crash", _describe(code)) from None
        if ok:
            return value
        raise CandidateError(*value)

    def kill(self) -> None:
        """End the process, however busy it is."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reap()

    def _ensure(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._reap()
        arguments = [str(self._memory_bytes), str(self._nice), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "autofuse.tuner.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.generation += 1
        assert self._process.stdout is not None
        try:
            _receive(self._process.stdout, START_SECONDS)
        except (TimeoutError, OSError, EOFError, pickle.UnpicklingError):
            self.kill()
            raise WorkerLost("crash", "the worker process did not start") from None
        return self._process

    def _reap(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            return process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"the worker process died by {signal.Signals(-code).name}"
    return f"the worker process ended with exit code {code}"


def _send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(_HEADER.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes], timeout_seconds: float) -> Any:
    deadline = time.monotonic() + timeout_seconds
    (length,) = _HEADER.unpack(_read(stream, _HEADER.size, deadline))
    return pickle.loads(_read(stream, length, deadline))


def _read(stream: IO[bytes], count: int, deadline: float) -> bytes:
    chunks: list[bytes] = []
    while count:
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = os.read(stream.fileno(), min(count, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)


# ---- the worker's side ---------------------------------------------------------------------------------


class _Server:
    """Benches by node; a request names the node by its fusion_id."""

    def __init__(self) -> None:
        self._benches: dict[str, Any] = {}

    def handle(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self, f"do_{command}")(*arguments)

    def do_open(self, fusion_id: str, form: Mapping[str, Any], threads: int) -> None:
        import torch

        from autofuse.tuner.bench import Bench

        torch.set_num_threads(threads)
        if fusion_id not in self._benches or self._benches[fusion_id].threads != threads:
            self._benches[fusion_id] = Bench(NodeForm.from_json(dict(form)), threads)

    def do_check(
        self, fusion_id: str, digest: str, name: str, binary: bytes, shapes: list[tuple[tuple[int, ...], str]]
    ) -> float:
        bench = self._benches[fusion_id]
        bench.load(digest, name, binary)
        error: float = bench.verify(digest, shapes)
        return error

    def do_race(
        self, fusion_id: str, digests: list[str], values: tuple[int, ...], rounds: int, budget_seconds: float
    ) -> Any:
        return self._benches[fusion_id].race(digests, values, rounds, budget_seconds)

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def main(memory_bytes: int, nice: int, parent: int) -> None:
    """Serve requests on stdin until it closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the daemon died before the line above
    with contextlib.suppress(OSError):
        os.nice(nice)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the replies
    # Reserved addresses count, and torch reserves some GiB at import: the bound is on top of that.
    import torch  # noqa: F401

    from autofuse.process_settings import apply_malloc
    from autofuse.tuner.verify import Wrong

    apply_malloc()  # page faults of fresh outputs are the allocator's, not the kernel's
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, resource.RLIM_INFINITY))
    server = _Server()
    _send(replies, (True, None))
    while True:
        try:
            command, arguments = _receive(requests, 1e9)
        except (EOFError, OSError):
            return
        try:
            reply: tuple[bool, Any] = (True, server.handle(command, arguments))
        except Wrong as error:
            reply = (False, ("wrong", str(error)))
        except MemoryError:
            reply = (False, ("out_of_memory", "no memory left in the worker"))
        except RuntimeError as error:
            lack = "memory" in str(error).lower() and "alloc" in str(error).lower()
            reply = (False, ("out_of_memory" if lack else "refused", str(error)[:500]))
        except Exception as error:
            reply = (False, ("refused", f"{type(error).__name__}: {error}"[:500]))
        _send(replies, reply)


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:4]))
