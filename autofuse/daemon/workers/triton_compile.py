"""The process in which Triton compiles; ``python -m autofuse.daemon.workers.triton_compile`` is started by the daemon.

In: requests over a pipe: compile a source for a target under assumptions. Out: the artifact, or why there is none.
While it compiles it asks back for the files of Triton's cache, and hands over new ones: it never opens the store.
Guarantee: it dies with the daemon, runs at low priority and within its memory bound; Triton is only here, so that a
compiler that crashes, hangs or leaks does so alone. No GPU is touched.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from autofuse.codegen.triton import cache
from autofuse.codegen.triton.compile import compile_source
from autofuse.codegen.triton.source import Assumptions, TritonSource
from autofuse.errors import CompilerError
from autofuse.startup import gc_pause
from autofuse.tuner.ipc import Pipe, PipeClosed

_PR_SET_PDEATHSIG = 1


class StoreFiles:
    """Triton's files, kept by the process on the other side of the pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def load(self, key: str) -> dict[str, bytes] | None:
        files = self._ask({"ask": "load", "key": key})["files"]
        return None if files is None else {name: base64.b64decode(data) for name, data in files.items()}

    def save(self, key: str, files: Mapping[str, bytes]) -> None:
        text = {name: base64.b64encode(data).decode() for name, data in files.items()}
        self._ask({"ask": "save", "key": key, "files": text})

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self._pipe.send(question)
        return self._pipe.receive()


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compile what a request asks for; errors are replies too, except the end of the pipe."""
    try:
        source = TritonSource.from_json(request["source"])
        assumptions = [Assumptions(is_aligned, tuple(divisible)) for is_aligned, divisible in request["assumptions"]]
        artifact = compile_source(source, request["target"], assumptions, request["reads_code"])
        return {"ok": True, "artifact": base64.b64encode(artifact.pack()).decode()}
    except PipeClosed:
        raise
    except CompilerError as error:
        return {"ok": False, "status": "compile_error", "message": str(error)[:2000]}
    except MemoryError:
        return {"ok": False, "status": "out_of_memory", "message": "the compile process ran out of its memory"}
    except Exception as error:
        return {"ok": False, "status": "refused", "message": f"{type(error).__name__}: {error}"[:500]}


def serve(pipe: Pipe) -> None:
    """Answer requests until the other side closes the pipe."""
    files = StoreFiles(pipe)
    cache.install(files.load, files.save)
    gc_pause.freeze()
    with contextlib.suppress(PipeClosed):
        pipe.send({"ok": True})
        while True:
            pipe.send(answer(pipe.receive()))


def main(memory_bytes: int, parent: int) -> None:
    """Run as the compile process of the process ``parent``; requests come on stdin, replies go to stdout."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Pipe(os.dup(0), os.dup(1))
    os.dup2(2, 1)  # whatever is printed must not end up among the replies
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, resource.RLIM_INFINITY))
    serve(pipe)
    gc_pause.freeze()


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:3]))
