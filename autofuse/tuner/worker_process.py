"""The daemon's hold on a process of its own: one that is started, asked, killed and started again.

In: requests. Out: replies; or `Lost` for what the process did not survive, `Refused` for what it did, `NotReady` where
it could not begin. While it works on a request the process may ask back; ``answers`` has what it may ask for.
Guarantee: the daemon survives whatever a kernel does. A crash, a hang and a lack of memory come back as a status, and
the next request starts a new process, in which nothing is loaded (``generation`` tells). Must be used from a thread
that lives as long as the worker: Linux signals the death of the parent when the starting thread ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from autofuse.detached import python_module
from autofuse.ir.records import Status
from autofuse.tuner.ipc import Pipe, PipeClosed

START_SECONDS = 120.0  # for importing torch on a busy machine
WORKER = "autofuse.daemon.workers.cpu"

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class CandidateProblem(Exception):
    """Something is wrong with a candidate; ``status`` is the outcome to record."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


class Lost(CandidateProblem):
    """The worker process ended or was killed during a request."""


class Refused(CandidateProblem):
    """The worker goes on, but the candidate failed: "wrong", "out_of_memory" or "refused"."""


class NotReady(Exception):
    """The worker cannot work at all just now, such as on a GPU that is hidden or full: no fault of any candidate."""


@dataclass(frozen=True)
class Main:
    """What a worker process runs."""

    module: str = WORKER
    arguments: Sequence[str] = ()  # at the end of the command line
    environment: Callable[[Mapping[str, str]], dict[str, str]] = dict  # makes its environment from ours


MAIN = Main()  # the CPU's worker


class WorkerProcess:
    """A worker process, started at the first request and again after each loss."""

    def __init__(
        self,
        *,
        memory_bytes: int,
        timeout_seconds: float,
        is_stopping: Callable[[], bool] = lambda: False,
        stderr: IO[bytes] | int | None = None,
        main: Main = MAIN,
        answers: Mapping[str, Answer] | None = None,
        tend: Callable[[int], float] | None = None,
    ) -> None:
        """``stderr`` takes what kernels print (None: our stderr). Requests raise Interrupted once ``is_stopping``.

        ``answers``: functions that answer the worker's own questions, by name. ``tend`` is called regularly with the
        worker's process group while it works; it may halt the group, and returns for how many seconds it did: these do
        not count as the worker's.
        """
        self._main = main
        self._answers = answers or {}
        self._tend = tend
        self._memory_bytes = memory_bytes
        self.timeout_seconds = timeout_seconds  # of a request that names no other
        self._is_stopping = is_stopping
        self._stderr = stderr
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe | None = None
        self._is_ready = False
        self.generation = 0  # grows with each started process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process unless it runs, without waiting until it is ready (importing torch takes 1 to 3 s)."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        command, environment = python_module(self._main.module)
        self._process = subprocess.Popen(
            [*command, str(self._memory_bytes), str(os.getpid()), *self._main.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            process_group=0,  # killed as a group; in our session, whose priority it shares
            env=self._main.environment(environment),
            cwd="/",
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = Pipe(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        self._is_ready = False
        self.generation += 1

    def ask(self, do: str, *, timeout_seconds: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its reply. Raises Lost, Refused, NotReady and Interrupted."""
        self.start()
        pipe = cast(Pipe, self._pipe)
        limit = timeout_seconds or self.timeout_seconds
        assert self._process is not None
        tend = functools.partial(self._tend, self._process.pid) if self._tend is not None else None
        try:
            if not self._is_ready:
                self._check_ready(pipe.receive(START_SECONDS, self._is_stopping, tend))
                self._is_ready = True
            pipe.send({"do": do, **arguments}, limit, self._is_stopping, tend)
            reply = pipe.receive(limit, self._is_stopping, tend)
            while "ask" in reply:
                pipe.send(self._answer(reply), limit, self._is_stopping, tend)
                reply = pipe.receive(limit, self._is_stopping, tend)
        except TimeoutError:
            self.kill()
            if not self._is_ready:
                raise NotReady(f"the worker did not start within {START_SECONDS:g} s") from None
            raise Lost("timeout", f"no answer within {limit:g} s; the worker was killed") from None
        except PipeClosed as error:
            end = self._describe_end(str(error))
            raise (Lost("crash", end) if self._is_ready else NotReady(end)) from None
        except BaseException:  # Interrupted, or an error of an answer: the pipe is in the middle of an exchange
            self.kill()
            raise
        if reply.get("ok"):
            return reply
        if reply.get("is_fatal"):
            self.kill()
            raise Lost("crash", str(reply.get("message", "")))
        raise Refused(reply.get("status", "refused"), str(reply.get("message", "")))

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = self._answers.get(question["ask"])
        if answer is None:
            raise PipeClosed(f"it asked for {question['ask']!r}")
        return answer(question)

    @staticmethod
    def _check_ready(reply: dict[str, Any]) -> None:
        if not reply.get("ok"):
            raise NotReady(str(reply.get("message", "")))

    def kill(self) -> int | None:
        """End the process, however busy it is; returns its exit code, None where there was no process."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def _describe_end(self, problem: str) -> str:
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2.0)  # its pipe closes a moment before the process is gone
        code = process.poll() if process is not None else None
        self.kill()
        if code is None:
            return f"the worker stopped making sense ({problem}); it was killed"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the worker died by {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"
