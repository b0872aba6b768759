"""The worker: the process in which kernels are first run. The daemon starts ``python -m autofuse.daemon.workers.cpu``.

In: requests over a pipe (open a node, load a kernel, check it, race several). Out: replies.
Guarantee: it dies with the daemon, whose priority it has; it runs within its memory bound, above which allocations
fail; what a kernel does to this process, it does to nobody else (see ``worker_process``).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

# torch first: kernels must use its OpenMP runtime, and the memory that it reserves must not count as a kernel's.
import torch

from autofuse.ir.operation import NodeForm
from autofuse.optim import step_bench as optimizer
from autofuse.optim.candidate import StepCandidate
from autofuse.optim.form import StepForm
from autofuse.process.apply import advise_huge_pages, apply_malloc
from autofuse.startup import gc_pause
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.ipc import Pipe, PipeClosed
from autofuse.tuner.node_bench import CpuRunner, DeviceRunner, NodeBench
from autofuse.tuner.timing import RaceRules
from autofuse.tuner.verify import Wrong

_PR_SET_PDEATHSIG = 1
OPEN_NODES = 64  # benches that are kept; kernels stay mapped in any case, a few pages each
LACK = ("out of memory", "outofmemory")  # CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory


class Fatal(Exception):
    """The process is of no more use, such as with a GPU's context after an illegal access."""


class Benches:
    """The nodes that were opened, least recently used first."""

    def __init__(self, rig: DeviceRunner) -> None:
        self._rig = rig
        self._benches: OrderedDict[str, NodeBench] = OrderedDict()
        self._current: NodeBench | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks; errors are replies too, except `Fatal`."""
        try:
            return {"ok": True, **getattr(self, f"do_{request['do']}")(request)}
        except Wrong as error:
            return _problem("wrong", error)
        except MemoryError as error:
            return _problem("out_of_memory", error)
        except Exception as error:
            if self._rig.is_fatal(error):
                raise Fatal(f"{type(error).__name__}: {error}") from error
            return _problem("out_of_memory" if _is_lack_of_memory(error) else "refused", error)

    def do_open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make a node the current one; ``form`` is its JSON. ``is_new``: the worker has no kernels of it."""
        name, threads = str(request["node"]), int(request["threads"])
        if self._current is not None:
            self._current.close()
        if threads not in (0, torch.get_num_threads()):
            torch.set_num_threads(threads)
        bench = self._benches.pop(name, None)
        is_new = bench is None or bench.threads != threads
        if bench is None or is_new:
            bench = NodeBench(NodeForm.from_json(request["form"]), threads, self._rig)
        self._benches[name] = self._current = bench
        while len(self._benches) > OPEN_NODES:
            self._benches.popitem(last=False)
        return {"is_new": is_new}

    def do_load(self, request: dict[str, Any]) -> dict[str, Any]:
        self._bench.load(request["digest"], request["name"], base64.b64decode(request["binary"]))
        return {}

    def do_check(self, request: dict[str, Any]) -> dict[str, Any]:
        cases = [CheckCase(tuple(values), kind, shifted) for values, kind, shifted in request["cases"]]
        error = self._bench.check(request["digest"], cases, request["budget_seconds"], request["least"])
        return {"error_ratio": error}

    def do_compare_bits(self, request: dict[str, Any]) -> dict[str, Any]:
        cases = [CheckCase(tuple(values), kind, shifted) for values, kind, shifted in request["cases"]]
        budget_seconds, elements = request["budget_seconds"], request["elements"]
        return {"difference": self._bench.compare_bits(request["digest"], cases, elements, budget_seconds)}

    def do_race(self, request: dict[str, Any]) -> dict[str, Any]:
        rules = RaceRules(**request["rules"])
        result = self._bench.race(request["digests"], tuple(request["values"]), rules)
        return asdict(result)

    def do_check_step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Check an optimizer step instead of a node."""
        form = StepForm.from_json(request["step"])
        candidate = StepCandidate.from_json(request["candidate"])
        return {"error_ratio": optimizer.check(form, candidate, request["threads"], self._rig)}

    def do_compare_step_bits(self, request: dict[str, Any]) -> dict[str, Any]:
        form, candidate = StepForm.from_json(request["step"]), StepCandidate.from_json(request["candidate"])
        return {"difference": optimizer.compare_bits(form, candidate, request["threads"], self._rig)}

    def do_race_steps(self, request: dict[str, Any]) -> dict[str, Any]:
        form, rules = StepForm.from_json(request["step"]), RaceRules(**request["rules"])
        candidates = [StepCandidate.from_json(candidate) for candidate in request["candidates"]]
        return asdict(optimizer.race_steps(form, candidates, request["threads"], rules, self._rig))

    @property
    def _bench(self) -> NodeBench:
        if self._current is None:
            raise ValueError("expected a node to be opened first")
        return self._current


def _is_lack_of_memory(error: Exception) -> bool:
    """Whether memory was short: torch's allocators raise RuntimeError, a GPU's driver errors of various types."""
    text = str(error).lower().replace("_", " ")
    return any(words in text for words in LACK) or (
        isinstance(error, RuntimeError) and "alloc" in text and "memory" in text
    )


def _problem(status: str, error: Exception) -> dict[str, Any]:
    text = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
    return {"ok": False, "status": status, "message": text[:500]}


def serve(pipe: Pipe, rig: DeviceRunner) -> None:
    """Answer requests until the other side closes the pipe, or until an error is fatal to this process."""
    benches = Benches(rig)
    with contextlib.suppress(PipeClosed):
        pipe.send({"ok": True})
        while True:
            try:
                pipe.send(benches.answer(pipe.receive()))
            except Fatal as error:
                pipe.send({**_problem("crash", error), "is_fatal": True})
                return


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space to ``memory_bytes`` beyond what is mapped now: torch reserves much of it."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, resource.RLIM_INFINITY))


def main(make_rig: Callable[[int], DeviceRunner], memory_bytes: int, parent: int) -> None:
    """Run as a worker of the process ``parent``; requests come on stdin, replies go to stdout.

    ``make_rig`` gets ``memory_bytes``, the memory that the worker may use, and enforces it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the daemon's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = Pipe(os.dup(0), os.dup(1))
    os.dup2(2, 1)  # whatever a kernel prints must not end up among the replies
    # Page faults of fresh outputs are a matter of the allocator: a fused kernel must not win by having fewer of them.
    apply_malloc()
    try:
        rig = make_rig(memory_bytes)
    except Exception as error:  # such as a missing device: no fault of a kernel
        pipe.send(_problem("refused", error))
        return
    gc_pause.freeze()
    serve(pipe, rig)
    gc_pause.freeze()


def _cpu_rig(memory_bytes: int) -> DeviceRunner:
    limit_memory(memory_bytes)
    advise_huge_pages()  # in small pages a kernel's speed depends on where the process happens to lie, by up to 2x
    return CpuRunner()


if __name__ == "__main__":
    main(_cpu_rig, *(int(text) for text in sys.argv[1:3]))
