"""Scripts in processes of their own that need not import torch and what traces: children of one that has.

In: arguments as ``python`` takes them (a path or ``-m``, then the script's own). Out: what `subprocess.run` gives.
A child is forked before anything of autofuse is imported, sees memory and ``sys.modules`` of its own, and ends as any
process does. All children of one server have the addresses of torch's objects in common: where it matters that two
runs do not, one of them has to be a process of its own or a child of another server.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

_TO_CHILD = ("stdout", "stderr")


class Server:
    """Forks a child for each script, one after the other."""

    def __enter__(self) -> Server:
        self._folder = tempfile.TemporaryDirectory(prefix="autofuse-forked-")
        command = [sys.executable, "-u", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)
        self._folder.cleanup()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        files = {name: str(Path(self._folder.name, name)) for name in _TO_CHILD}
        request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ), **files}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the server of forked scripts has ended"
        texts = [Path(files[name]).read_text() for name in _TO_CHILD]
        return subprocess.CompletedProcess(arguments, int(answer), *texts)


def _serve() -> list[str]:
    """Returns in the children only: the arguments of each."""
    import networkx  # noqa: F401
    import sqlalchemy.orm  # noqa: F401
    import torch._dynamo
    import torch._functorch.partitioners  # noqa: F401

    gc.freeze()  # no child has to look through all that when it ends
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            for number, name in enumerate(_TO_CHILD, 1):
                file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(file, number)
                os.close(file)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            return list(request["arguments"])
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
