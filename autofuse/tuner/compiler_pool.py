"""Several processes in which Triton compiles, for threads that ask at the same time.

In: a function that makes a `TritonCompiler`, and how many there may be. Out: artifacts, as from one compiler.
Guarantee: each process compiles one source at a time; the one that was used last is used first, so a single thread
keeps to one process, and others are started only when several threads ask at once. A caller waits while all are busy.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence

from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.source import Assumptions, TritonSource
from autofuse.tuner.triton_compiler import TritonCompiler

MOST_PROCESSES = 4  # as many as a wave of the search has configurations; each takes some 400 MB
CORES_EACH = 2  # the script, its data loaders and the worker need cores too


def process_count() -> int:
    """The number of compile processes that suits this machine."""
    return max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // CORES_EACH))


class CompilerPool:
    """Compile processes that threads share."""

    def __init__(self, make: Callable[[], TritonCompiler], count: int) -> None:
        self.count = count
        self._all = [make() for _ in range(count)]  # none runs before its first request
        self._free: queue.LifoQueue[TritonCompiler] = queue.LifoQueue()
        for compiler in reversed(self._all):
            self._free.put(compiler)

    def compile(self, source: TritonSource, target: str, assumptions: Sequence[Assumptions]) -> Artifact:
        """As `TritonCompiler.compile`, by a process that is free."""
        compiler = self._free.get()
        try:
            return compiler.compile(source, target, assumptions)
        finally:
            self._free.put(compiler)

    def close(self) -> None:
        """End the processes and remove their files; the next request starts new ones."""
        for compiler in self._all:
            compiler.close()
