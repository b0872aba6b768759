"""One node on the worker's bench: inputs, eager, candidates; verified, then timed.

In: a `NodeForm`, symbol values, kernels as bytes. Out: numbers.
What differs between types of devices is a `DeviceRunner`: this module has the CPU's, the others are in `gpu_rig` and
`interpreter`.
On a machine that is too busy for parallel regions (see ``Cores``) eager and kernels are timed on one thread, by its own
time.
Guarantee: what is timed is what is deployed: the router's own launcher against the router's own unfused call, both
with fresh outputs, on inputs that rotate; the last few outputs stay alive, so that calls do not all write one buffer.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from math import inf
from time import perf_counter, process_time, sleep, thread_time
from typing import Any, Protocol

import torch

from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.inputs import make_inputs
from autofuse.ir.composites import without_librarys
from autofuse.ir.operation import BYTES_PER_ELEMENT, NodeForm
from autofuse.ir.shape import evaluate
from autofuse.strategies.bundle import is_bundle
from autofuse.tuner.bit_equal import BitCheck
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.machine_load import OTHERS_SHARE, busy_seconds
from autofuse.tuner.timing import Call, CallSampler, RaceResult, RaceRules, Sampler, race
from autofuse.tuner.verify import GuardedAllocator, MakeCall, Verifier
from autofuse.wrapper.load_strategy import unpack
from autofuse.wrapper.node_call import make_launcher, make_unfused

ROTATED_BYTES = 8 << 20  # inputs are copied until they take this much, so that not all are in the L2
MAX_COPIES = 4
KEPT_OUTPUTS = 3
KEPT_BYTES = 256 << 20  # kept outputs of one callable: larger ones stay in no cache, and five callables keep their own
PROBES = 5
BELIEVED_SECONDS = 2.0  # for so long a busy machine is not probed again, and a quiet one's load not read again
LOOK_SECONDS = 0.05  # five ticks of the system's CPU accounting
PROBE_ELEMENTS = 1 << 17  # four times the size from which torch uses threads
BUSY_SECONDS = 1e-3  # 30 us on a quiet machine, 4 to 60 ms where another process has the other core


class Cores:
    """Whether this machine has cores to spare for parallel regions."""

    def __init__(self) -> None:
        self._tensor = torch.zeros(PROBE_ELEMENTS)
        self._busy_at = self._looked_at = -inf

    def usable_threads(self, threads: int) -> int:
        """``threads``, or 1 where parallel regions would wait for cores that others use, and so measure the others.

        Beside a training script on two cores an eager call of 0.1 ms took 30 ms on two threads and 0.1 ms on one.
        """
        if threads == 1 or perf_counter() - self._busy_at < BELIEVED_SECONDS:
            return 1
        # Read the load before probing: a process that has just slept gets all cores for the few regions of a probe.
        if perf_counter() - self._looked_at > BELIEVED_SECONDS and self._free_cores() < threads - OTHERS_SHARE:
            self._busy_at = perf_counter()
            return 1
        slow = 0
        for number in range(PROBES + 1):
            began = perf_counter()
            torch.neg(self._tensor, out=self._tensor)
            slow += number > 0 and perf_counter() - began > BUSY_SECONDS
            if slow > 1:
                self._busy_at = perf_counter()
                return 1
        return threads

    def _free_cores(self) -> float:
        """The number of cores that are idle just now."""
        began, others = perf_counter(), busy_seconds() - process_time()
        sleep(LOOK_SECONDS)
        others = busy_seconds() - process_time() - others
        self._looked_at = perf_counter()
        return (os.cpu_count() or 1) - others / (self._looked_at - began)


CORES = Cores()


class DeviceRunner(Protocol):
    """The operations of a bench that depend on the type of device."""

    device: torch.device

    def load(self, digest: str, name: str, binary: bytes) -> Any:
        """Load a kernel into this process. Raises what the loader raises."""

    def unfused(self, form: NodeForm, values: Sequence[int]) -> Callable[..., Any]: ...

    def launcher(
        self, form: NodeForm, loaded: Any, values: Sequence[int], threads: int, allocate: GuardedAllocator | None
    ) -> Callable[..., Any]:
        """The callable with which the router would call the kernel."""

    def usable_threads(self, threads: int) -> int:
        """The number of these threads that can be timed just now."""

    def sampler(self, is_shared: bool) -> Sampler:
        """The sampler of a race; ``is_shared``: calls are on one thread because others use the cores."""

    def is_fatal(self, error: Exception) -> bool:
        """Whether this error leaves the process useless."""


class CpuRunner:
    """Runs C kernels."""

    device = torch.device("cpu")

    def load(self, digest: str, name: str, binary: bytes) -> Any:
        return load_kernel(binary, name).entry

    def unfused(self, form: NodeForm, values: Sequence[int]) -> Callable[..., Any]:
        return make_unfused(form, values, self.device)

    def launcher(
        self, form: NodeForm, loaded: Any, values: Sequence[int], threads: int, allocate: GuardedAllocator | None
    ) -> Callable[..., Any]:
        return make_launcher(form, loaded, values, threads, allocate)

    def usable_threads(self, threads: int) -> int:
        return CORES.usable_threads(threads)

    def sampler(self, is_shared: bool) -> Sampler:
        # A thread's own time leaves out when others had its core, for 30 ms at a time: that hid a gain of 6x.
        return CallSampler(thread_time if is_shared else perf_counter)

    def is_fatal(self, error: Exception) -> bool:
        return False  # on a CPU, an error that breaks the process ends it


class NodeBench:
    """The kernels, inputs and references of one node in a worker process."""

    def __init__(self, form: NodeForm, threads: int, rig: DeviceRunner) -> None:
        self.form = form = without_librarys(form)  # whose operators this process does not have
        self.threads = threads
        self._rig = rig
        self._loaded: dict[str, Any] = {}
        self._verifier = Verifier(form, rig.device)
        self._values: tuple[int, ...] | None = None
        self._input_sets: list[list[torch.Tensor]] = []
        self._kept = KEPT_OUTPUTS

    def load(self, digest: str, name: str, binary: bytes) -> None:
        """Map a kernel into the process, once."""
        if digest not in self._loaded:
            is_strategy = is_bundle(binary)
            self._loaded[digest] = (
                unpack(binary, self._rig.load) if is_strategy else self._rig.load(digest, name, binary)
            )

    def check(self, digest: str, cases: Sequence[CheckCase], budget_seconds: float, least: int) -> float:
        """The worst error ratio over the cases. Raises `verify.Wrong`."""
        with torch_threads(self._rig.usable_threads(self.threads)):  # the kernel itself gets all of its threads
            return self._verifier.check(self._maker(digest), cases, budget_seconds, least)

    def compare_bits(self, digest: str, cases: Sequence[CheckCase], elements: int, budget_seconds: float) -> str:
        """How the kernel's results differ from eager's in bits, "" where they do not (`BitCheck`).

        Eager has all of its threads, however busy the machine: it may add in another order on fewer.
        """
        with torch_threads(self.threads):
            return BitCheck(self.form, self._rig.device).difference(
                self._maker(digest), cases, elements, budget_seconds
            )

    def _maker(self, digest: str) -> MakeCall:
        def make_call(allocator: GuardedAllocator, values: Sequence[int]) -> Callable[..., Any]:
            return self._rig.launcher(self.form, self._loaded[digest], values, self.threads, allocator)

        return make_call

    def race(self, digests: Sequence[str], values: tuple[int, ...], rules: RaceRules) -> RaceResult:
        """Race eager and kernels: seconds a call in each round, eager's first."""
        self._prepare(values)
        threads = self._rig.usable_threads(self.threads)
        calls = [self._rig.unfused(self.form, values)]
        calls += [self._rig.launcher(self.form, self._loaded[d], values, threads, None) for d in digests]
        with torch_threads(threads):
            result = race(
                [self._rotating(call) for call in calls], rules, sampler=self._rig.sampler(threads != self.threads)
            )
        return replace(result, threads=threads)

    def close(self) -> None:
        """Free the tensors; kernels stay loaded, since they cannot be unloaded safely."""
        self._values, self._input_sets = None, []
        self._verifier.forget()

    def _prepare(self, values: tuple[int, ...]) -> None:
        if self._values == values:
            return
        self._input_sets = []
        first = make_inputs(self.form, values, 1, "normal", self._rig.device)
        nbytes = sum(t.numel() * t.element_size() for t in first)
        copies = max(1, min(MAX_COPIES, ROTATED_BYTES // max(nbytes, 1)))
        self._input_sets = [first, *([_copy(t) for t in first] for _ in range(copies - 1))]
        self._kept = max(1, min(KEPT_OUTPUTS, KEPT_BYTES // max(self._output_bytes(values), 1)))
        self._values = values

    def _output_bytes(self, values: Sequence[int]) -> int:
        table = dict(zip(self.form.symbols, values, strict=True))
        specs = [self.form.spec(ref) for ref in self.form.outputs]
        return sum(evaluate(spec.numel, table) * BYTES_PER_ELEMENT[spec.dtype] for spec in specs)

    def _rotating(self, call: Callable[..., Any]) -> Call:
        sets = cycle(self._input_sets)
        kept: deque[Any] = deque(maxlen=self._kept)

        def rotated() -> None:
            kept.append(call(*next(sets)))

        return rotated


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch's own kernels use so many threads inside; 0 changes nothing."""
    before = torch.get_num_threads()
    if threads not in (0, before):  # 0: a GPU, where the host's threads do not matter
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads not in (0, before):
            torch.set_num_threads(before)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and values; expanded dims share memory as before."""
    extent = (
        0 if 0 in tensor.shape else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    block = tensor.as_strided((extent,), (1,)).clone()
    return block.as_strided(tuple(tensor.shape), tensor.stride())
