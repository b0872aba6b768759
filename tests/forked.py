"""Scripts in processes of their own that need not import torch and what traces: children of one that has.

In: arguments as ``python`` takes them (a path or ``-m``, then the script's own). Out: what `subprocess.run` gives.
A child is forked before anything of autofuse is imported, sees memory and ``sys.modules`` of its own, and ends as any
process does. All children of one server have the addresses of torch's objects in common: where it matters that two
runs do not, one of them has to be a process of its own or a child of another server.

`run` has a server that all tests of this process share. Real starts are for tests of what is imported, when, in which
order, and of what a process is before its script.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_TO_CHILD = ("stdout", "stderr")
_ENVIRONMENT = dict(os.environ)  # before a test changes it


class Server:
    """Forks a child for each script, one after the other."""

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="autofuse-forked-")
        command = [sys.executable, "-u", __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=_ENVIRONMENT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)
        self._folder.cleanup()

    def run(
        self,
        *arguments: object,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        terminal: str | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """``terminal``: the path of one, which is the child's stderr. Raises `subprocess.TimeoutExpired`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        words = [str(word) for word in arguments]
        files = {name: str(Path(self._folder.name, name)) for name in _TO_CHILD}
        request = {"arguments": words, "folder": str(folder or Path.cwd()), **files}
        request |= {"environment": dict(environment or os.environ), "stderr": terminal or files["stderr"]}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        child = int(self._answer())
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            self._answer()
            raise subprocess.TimeoutExpired(words, timeout)
        code = int(self._answer())
        texts = [Path(files[name]).read_text() if name == "stdout" or not terminal else "" for name in _TO_CHILD]
        return subprocess.CompletedProcess(words, code, *texts)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, "the server of forked scripts has ended"
        return answer


@functools.cache
def _shared() -> Server:
    return Server().__enter__()


def run(
    *arguments: object,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    terminal: str | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """`Server.run` by the server of this process."""
    return _shared().run(*arguments, folder=folder, environment=environment, terminal=terminal, timeout=timeout)


def stop() -> None:
    """At the end of all tests."""
    if _shared.cache_info().currsize:
        _shared().__exit__(None, None, None)
        _shared.cache_clear()


def _serve() -> list[str]:
    """Returns in the children only: the arguments of each."""
    before = dict(os.environ)
    import networkx  # noqa: F401
    import sqlalchemy.orm  # noqa: F401
    import torch._dynamo
    import torch._functorch.partitioners  # noqa: F401

    set_by_torch = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # no child has to look through all that when it ends
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"] | set_by_torch)
            for number, name in enumerate(_TO_CHILD, 1):
                file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY, 0o600)
                os.dup2(file, number)
                os.close(file)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            return list(request["arguments"])
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    arguments = _serve()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
