"""The ways to run a step: a C kernel, a Triton kernel, a variant of torch's own, behind one pair of methods.

In: a `StepForm` and what has won. Out: a `StepCall`: ``pack`` looks at the arguments and says what is in the way,
``run`` makes the step that was packed.
Guarantee: as long as ``run`` raises, nothing has been written; what ``pack`` refuses, torch's function can still have.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from autofuse.codegen.triton.source import TritonSource
from autofuse.gpu.launch_record import make_record
from autofuse.gpu.launcher import launch_of
from autofuse.gpu.modules import LoadedArtifact
from autofuse.gpu.torch_calls import torch_calls
from autofuse.optim.form import StepForm
from autofuse.optim.tensor_table import COLUMNS, MOST_STATES, block_counts, columns, grid_values
from autofuse.optim.tensors import Arguments, StepTensors, with_variant
from autofuse.optim.update_rules import constants, host_constants


class StepCall(Protocol):
    """Runs the steps of a parameter group in one of the ways."""

    def pack(self, arguments: Arguments, threads: int) -> str | None:
        """Take the arguments of one step; why this call cannot make it, None if it can."""

    def run(self) -> None:
        """Make the step whose arguments were packed."""


@runtime_checkable
class OnTensors(Protocol):
    """A Triton module that is called with tensors, as the interpreter calls one."""

    source: TritonSource

    def on_tensors(self, values: Mapping[str, int], *tensors: Tensor) -> None: ...


def make_call(form: StepForm, entry: Any, device: torch.device) -> StepCall:
    """The call of a loaded kernel: of a C entry, of an artifact on a device, or of a module that takes tensors."""
    if isinstance(entry, LoadedArtifact):
        return TritonCall(form, entry.artifact.source, functools.partial(_launch, entry), device)
    if isinstance(entry, OnTensors):
        on_tensors = entry.on_tensors
        return TritonCall(form, entry.source, lambda values: functools.partial(on_tensors, values), device)
    return CCall(form, entry)


# ---- C ----------------------------------------------------------------------------------------------------


class CCall:
    """Calls a C kernel, which reads a table of addresses (see `c_printer`)."""

    def __init__(self, form: StepForm, entry: Callable[..., None]) -> None:
        self._tensors = StepTensors(form, torch.device("cpu"))
        self._entry = entry
        self._generation = 0
        self._rows = array("q", [0] * (COLUMNS * len(form.sizes)))
        self._rows[0::COLUMNS] = array("q", form.sizes)
        self._scalars = array("d", [0.0] * len(form.rule.scalars))
        self._sizes = array("q", [len(form.sizes), 1])
        self._columns = [1, *range(3, 3 + len(form.states)), *([3 + MOST_STATES] if form.rule.has_steps else [])]
        self._addresses = tuple(a.buffer_info()[0] for a in (self._sizes, self._rows, self._scalars))

    def pack(self, arguments: Arguments, threads: int) -> str | None:
        tensors = self._tensors
        problem = tensors.take(arguments)
        if problem is not None:
            return problem
        if tensors.generation != self._generation:
            for column, listed in zip(self._columns, tensors.pointers, strict=True):
                self._rows[column::COLUMNS] = array("q", listed)
            self._generation = tensors.generation
        self._rows[2::COLUMNS] = array("q", tensors.grads)
        self._scalars[:] = array("d", tensors.scalars)
        self._sizes[1] = threads
        return None

    def run(self) -> None:
        self._entry(*self._addresses)


# ---- Triton -----------------------------------------------------------------------------------------------


class HostCounters:
    """Step counters on the host, read and written by address: 20 times as fast as through tensors."""

    def __init__(self) -> None:
        self._generation = 0
        self._counters: list[ctypes.c_float] = []
        self._steps: list[float] = []

    def next_steps(self, tensors: StepTensors) -> list[float]:
        """The number of the coming step, for each tensor."""
        if tensors.generation != self._generation:
            self._counters = [ctypes.c_float.from_address(pointer) for pointer in tensors.pointers[-1]]
            self._generation = tensors.generation
        self._steps = [counter.value + 1.0 for counter in self._counters]
        return self._steps

    def count(self) -> None:
        """Write the counters after the step."""
        for counter, step in zip(self._counters, self._steps, strict=True):
            counter.value = step


class TritonCall:
    """Calls a Triton kernel, which reads a table in the device's memory (see `triton_printer`).

    The table is copied to the device at each step, from pinned memory and without waiting. Torch's allocator of pinned
    memory reuses a block only when the copies from it are done.
    """

    def __init__(
        self,
        form: StepForm,
        source: TritonSource,
        launch: Callable[[Mapping[str, int]], Callable[[Tensor, Tensor], None]],
        device: torch.device,
    ) -> None:
        """``launch``: makes, from the values of the source's symbols, a function of the table and the blocks."""
        self._form = form
        self._tensors = StepTensors(form, device)
        self._counters = HostCounters() if form.rule.has_steps and form.counters == "host" else None
        self._generation = 0
        names = columns(form)
        self._width = len(names)
        self._at = {name: n for n, name in enumerate(names)}
        self._first_constant = self._at[constants(form)[0][0]]
        self._constants = host_constants(form)
        self._rows = array("q", [0] * (self._width * len(form.sizes)))
        self._doubles = memoryview(self._rows).cast("B").cast("d")  # the same memory as float64
        blocks = block_counts(form.sizes, dict(source.passes[-1].constants)["BLOCK"])
        self._launch = launch(grid_values(blocks))
        self._fill("elements", form.sizes)
        self._fill("first", list(itertools.accumulate(blocks, initial=0))[:-1])
        self._table = torch.empty(len(self._rows), dtype=torch.int64, device=device)
        tensors = torch.arange(len(blocks), dtype=torch.int32)
        self._blocks = torch.repeat_interleave(tensors, torch.tensor(blocks)).to(device)

    def pack(self, arguments: Arguments, threads: int) -> str | None:
        tensors = self._tensors
        problem = tensors.take(arguments)
        if problem is not None:
            return problem
        if tensors.generation != self._generation:
            names = ["p", *(f"s{n}" for n in range(len(self._form.states)))]
            for name, listed in zip(names, tensors.pointers, strict=False):
                self._fill(name, listed)
            if "counter" in self._at:
                self._fill("counter", tensors.pointers[-1])
            self._generation = tensors.generation
        self._fill("g", tensors.grads)
        self._fill_numbers()
        return None

    def run(self) -> None:
        upload(self._rows, self._table)
        self._launch(self._table, self._blocks)
        if self._counters is not None:
            self._counters.count()

    def _fill_numbers(self) -> None:
        count, scalars = len(self._form.sizes), self._tensors.scalars
        if "counter" in self._at:  # the device computes the constants
            for name, value in zip(self._form.rule.scalars, scalars, strict=True):
                self._fill_doubles(self._at[f"scalar_{name}"], [value] * count)
            return
        steps = self._counters.next_steps(self._tensors) if self._counters is not None else [1.0] * count
        known = {step: self._constants(step, *scalars) for step in set(steps)}  # usually a single one
        for n, values in enumerate(zip(*map(known.__getitem__, steps), strict=True)):
            self._fill_doubles(self._first_constant + n, values)

    def _fill(self, name: str, values: Sequence[int]) -> None:
        self._rows[self._at[name] :: self._width] = array("q", values)

    def _fill_doubles(self, column: int, values: Sequence[float]) -> None:
        self._doubles[column :: self._width] = memoryview(array("d", values))


def upload(words: array[int] | array[float], target: Tensor) -> None:
    """Copy ``words`` to a tensor on the current stream, without waiting; they may be changed at once."""
    staged = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type != "cpu")
    ctypes.memmove(staged.data_ptr(), words.buffer_info()[0], len(words) * words.itemsize)
    target.copy_(staged, non_blocking=True)


def _launch(loaded: LoadedArtifact, values: Mapping[str, int]) -> Callable[[Tensor, Tensor], None]:
    """A function that launches the kernel on its device's current stream."""
    record = make_record(loaded, values, 2)
    launch, calls, index = launch_of(record), torch_calls(), loaded.device_index

    def run(table: Tensor, blocks: Tensor) -> None:
        if calls.current_device() != index:
            with calls.on_device(index):
                return run(table, blocks)
        launch(record.address, calls.raw_stream(index), table.data_ptr(), blocks.data_ptr())

    return run


# ---- torch's own ------------------------------------------------------------------------------------------


class ExternCall:
    """Calls another of torch's own implementations.

    Torch's fused kernels for GPUs need the step counters on the device. Where the script has them on the host, the
    kernels get copies, so that the optimizer's state stays as the script made it.
    """

    def __init__(self, form: StepForm, function: Callable[..., None], variant: str, device: torch.device) -> None:
        self._form = form
        self._function = function
        self._variant = variant
        self._tensors = StepTensors(form, device)
        self._arguments: Arguments = {}
        self._counters: HostCounters | None = None
        if variant == "fused" and form.device != "cpu" and form.rule.has_steps and form.counters == "host":
            self._counters = HostCounters()
            self._copies = torch.empty(len(form.sizes), dtype=torch.float32, device=device)
            self._views = [self._copies[n] for n in range(len(form.sizes))]

    def pack(self, arguments: Arguments, threads: int) -> str | None:
        problem = self._tensors.take(arguments)
        if problem is None:
            self._arguments = with_variant(self._form, arguments, self._variant)
        return problem

    def run(self) -> None:
        arguments, self._arguments = self._arguments, {}
        if self._counters is None:
            self._function(**arguments)
            return
        steps = self._counters.next_steps(self._tensors)
        upload(array("f", [step - 1.0 for step in steps]), self._copies)  # torch's function adds 1 itself
        self._function(**{**arguments, "state_steps": self._views})
        self._counters.count()
