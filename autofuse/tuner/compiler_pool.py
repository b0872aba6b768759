"""Several processes in which Triton compiles, for threads that ask at the same time.

In: a function that makes a `TritonCompiler`, and how many there may be. Out: artifacts, as from one compiler.
Guarantee: each process compiles one source at a time; the one that was used last is used first, so a single thread
keeps to one process, and others are started only when several threads ask at once. A caller waits while all are busy.
A compile process ends with the thread that started it (`prctl`: the parent is a thread), so all are started and asked
by the main thread or by threads that live as long as the pool.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

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
        self._threads = ThreadPoolExecutor(count, "autofuse-triton")  # they never end while the pool is there
        self._free: queue.LifoQueue[TritonCompiler] = queue.LifoQueue()
        for compiler in reversed(self._all):
            self._free.put(compiler)

    def compile(
        self, source: TritonSource, target: str, assumptions: Sequence[Assumptions], reads_code: bool = False
    ) -> Artifact:
        """As `TritonCompiler.compile`, by a process that is free."""
        if threading.current_thread() is threading.main_thread():  # which alone may halt a process (`Scheduler.tend`)
            return self._compile(source, target, assumptions, reads_code)
        return self._threads.submit(self._compile, source, target, assumptions, reads_code).result()

    def _compile(
        self, source: TritonSource, target: str, assumptions: Sequence[Assumptions], reads_code: bool
    ) -> Artifact:
        compiler = self._free.get()
        try:
            return compiler.compile(source, target, assumptions, reads_code)
        finally:
            self._free.put(compiler)

    def close(self) -> None:
        """End the processes and remove their files; the next request starts new ones."""
        for compiler in self._all:
            compiler.close()
