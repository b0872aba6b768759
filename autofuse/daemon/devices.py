"""The devices of this machine, as one daemon tunes for them: compilers and workers.

In: the key of a device. Out: its `BenchmarkProvider`, with a worker process of its own.
Guarantee: a device that cannot be used just now fails at once for a while, so that nobody waits for it; nothing is
started for a device that nobody asks for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import IO

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.triton.key import find_triton
from autofuse.daemon.gpus import Gpus
from autofuse.daemon.open_runs import OpenRuns
from autofuse.daemon.scheduler import Scheduler
from autofuse.daemon.visible_devices import as_seen_by
from autofuse.db.kernels import Kernels
from autofuse.db.tune_queue import NOT_READY_SECONDS
from autofuse.ir.device import cpu_device
from autofuse.settings.layers import Settings
from autofuse.tuner.backends import Backend, CBackend, InterpreterBackend, TritonBackend
from autofuse.tuner.benchmark_provider import BenchmarkProvider
from autofuse.tuner.compiler_pool import CompilerPool, process_count
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.worker_process import Main, NotReady, WorkerProcess

OTHER_DEVICES = ("cuda:", "interpreter:")  # prefixes of keys: every GPU of this machine, and the interpreter


class Devices:
    """One `BenchmarkProvider` for each device; GPUs share Triton's compile processes."""

    def __init__(
        self,
        settings: Settings,
        kernels: Kernels,
        scheduler: Scheduler,
        runs: OpenRuns,
        worker_log: IO[bytes] | int | None = None,
    ) -> None:
        """``runs`` tells which script's GPUs a worker may see."""
        self.cpu = cpu_device().key
        self.keys = (self.cpu, *OTHER_DEVICES)  # keys of devices, or prefixes of them
        self._settings = settings
        self._kernels = kernels
        self._scheduler = scheduler
        self._runs = runs
        self._worker_log = worker_log
        self._providers: dict[str, BenchmarkProvider] = {}
        self._triton: CompilerPool | None = None
        self._gpus = Gpus()
        self._not_ready: dict[str, tuple[float, str]] = {}  # by device: until when (monotonic), and why

    def provider(self, device: str) -> BenchmarkProvider:
        """The provider that builds and times a device's candidates. Raises CompilerError where there is no compiler."""
        if device not in self._providers:
            backend = self._backend(device)
            worker = WorkerProcess(
                memory_bytes=self.memory_bytes(device),
                timeout_seconds=self._settings.tuner.worker_timeout_seconds,
                is_stopping=self._scheduler.is_stopping,
                stderr=self._worker_log,
                main=Main(
                    backend.worker_module,
                    backend.worker_arguments,
                    lambda variables: as_seen_by(self._runs.asking_pid(), variables),
                ),
                tend=self._scheduler.tend,
            )
            most = len(os.sched_getaffinity(0)) if isinstance(backend, CBackend) else 1
            if isinstance(backend, TritonBackend) and self._triton is not None:
                most = self._triton.count
            self._providers[device] = BenchmarkProvider(
                backend,
                worker,
                compilers=lambda: most if self._scheduler.is_urgent() else 1,
                stored=self._kernels.get,
                rest=self._scheduler.rest,
            )
        return self._providers[device]

    def memory_bytes(self, device: str) -> int:
        """The memory in bytes that a worker may use on a device."""
        tuner = self._settings.tuner
        return tuner.gpu_memory_bytes if device.startswith("cuda:") else tuner.memory_bytes

    def lent(self, is_asked_for: Callable[[str], bool]) -> list[str]:
        """Keys of the devices here that requests of other hosts may use now. Called by the fleet's thread.

        ``is_asked_for``: whether a request for a device waits; before that nobody looks whether a GPU is free.
        """
        lent = [self.cpu]
        if (self._gpus.is_known or not self._gpu_workers()) and any(map(is_asked_for, self._gpus.models())):
            lent += self._gpus.free()
        return [key for key in lent if time.monotonic() >= self._not_ready.get(key, (0.0, ""))[0]]

    def leave_gpus(self) -> None:
        """End workers on GPUs that have been lent for long: only without them it is seen whether others came."""
        if not self._gpus.is_known:
            for worker in self._gpu_workers():
                worker.kill()

    def _gpu_workers(self) -> list[WorkerProcess]:
        workers = [made.worker for device, made in list(self._providers.items()) if device.startswith("cuda:")]
        return [worker for worker in workers if worker.pid is not None]

    def check_ready(self, device: str) -> None:
        """Raises NotReady for a device that could not be used within the last NOT_READY_SECONDS."""
        until, problem = self._not_ready.get(device, (0.0, ""))
        if time.monotonic() < until:
            raise NotReady(problem)
        self._not_ready.pop(device, None)

    def note_not_ready(self, device: str, problem: str) -> None:
        """Refuse a device that could not be used for the next NOT_READY_SECONDS."""
        self._not_ready.setdefault(device, (time.monotonic() + NOT_READY_SECONDS, problem))

    def close(self) -> None:
        """End all processes of ours."""
        self.kill_workers()
        self._gpus.close()

    def kill_workers(self) -> None:
        """End all workers and Triton's compilers, to free their memory; they start again when needed."""
        for provider in self._providers.values():
            provider.worker.kill()
        if self._triton is not None:
            self._triton.close()

    def _backend(self, device: str) -> Backend:
        if device == self.cpu:
            toolchain = find_toolchain(self._settings.run.cc or None)
            return CBackend(toolchain, self._settings.tuner.compile_timeout_seconds, self._scheduler.tend)
        if device.startswith("interpreter:"):
            return InterpreterBackend()
        find_triton()
        if self._triton is None:
            self._triton = CompilerPool(self._triton_compiler, process_count())
        return TritonBackend(device, self._triton.compile)

    def _triton_compiler(self) -> TritonCompiler:
        return TritonCompiler(
            self._kernels.get_triton_files,
            self._kernels.put_triton_files,
            is_stopping=self._scheduler.is_stopping,
            stderr=self._worker_log,
            tend=self._scheduler.tend,
        )
