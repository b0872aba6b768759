"""The devices of a script's nodes: the keys of their decisions, and the loading of their kernels.

In: the device of a graph's tensors. Out: its `Place`, and why tuning for it is impossible, if it is. Guarantee:
decisions belong to the model of a device and loaded kernels to its index, so equal GPUs share decisions and different
ones never do. A GPU is queried only after the script has put tensors there: this module never starts CUDA first. A
problem of one backend does not affect the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from autofuse.codegen.c.build import Toolchain, find_toolchain, is_for_this_cpu
from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.key import find_triton
from autofuse.errors import CompilerError
from autofuse.gpu.devices import CPU, gpu_device
from autofuse.gpu.modules import load_artifact
from autofuse.ir.device import cpu_device
from autofuse.ir.records import DeviceInfo, KernelRecord
from autofuse.private_files import PrivateFolder
from autofuse.strategies.bundle import has_machine_code, is_bundle
from autofuse.wrapper.load_strategy import unpack
from autofuse.wrapper.node_call import Entry


@dataclass(frozen=True)
class Place:
    """A device as decisions see it."""

    device: torch.device
    key: str  # DeviceInfo.key of its model
    threads: int  # torch's threads on a CPU; 0 on a GPU


class Backend(Protocol):
    """All nodes of one type of device."""

    @property
    def problem(self) -> tuple[str, str] | None:
        """Why nothing can be tuned: a code, and a sentence with what to do about it."""

    def describe(self, device: torch.device) -> DeviceInfo: ...

    def threads(self) -> int: ...

    def load(self, digest: str, name: str, binary: bytes, device: torch.device) -> Entry: ...


class CpuBackend:
    """C kernels, compiled by the system's compiler."""

    def __init__(self, cc: str | None, device: DeviceInfo, folder: PrivateFolder | None) -> None:
        self._cc = cc
        self._folder = folder
        self._device = device

    @functools.cached_property
    def _found(self) -> Toolchain | CompilerError | OSError:
        """The compiler, searched on first use: its probes take 0.5 s."""
        try:
            return find_toolchain(self._cc, self._folder)
        except (CompilerError, OSError) as error:  # the latter: no folder for temporary files
            return error

    @property
    def toolchain(self) -> Toolchain | None:
        return self._found if isinstance(self._found, Toolchain) else None

    @property
    def problem(self) -> tuple[str, str] | None:
        if isinstance(self._found, Toolchain):
            return None
        return "no_compiler", f"{self._found} Work on the CPU runs on eager's kernels."

    def describe(self, device: torch.device) -> DeviceInfo:
        return self._device

    def threads(self) -> int:
        """Torch's thread count, read at each use: the script may change it at any time."""
        return int(torch.get_num_threads())

    def load(self, digest: str, name: str, binary: bytes, device: torch.device) -> Entry:
        entry: Callable[..., None] = load_kernel(binary, name).entry
        return entry


class GpuBackend:
    """Triton kernels. Tuning needs Triton, launching tuned kernels does not."""

    def __init__(self) -> None:
        self.problem: tuple[str, str] | None = None
        try:
            find_triton()
        except CompilerError as error:
            self.problem = "no_triton", f"{error}. What is not tuned yet runs on eager's kernels on the GPU."

    def describe(self, device: torch.device) -> DeviceInfo:
        return gpu_device(device.index)

    def threads(self) -> int:
        return 0

    def load(self, digest: str, name: str, binary: bytes, device: torch.device) -> Entry:
        return load_artifact(Artifact.unpack(binary), device.index, digest)


class Backends:
    """The devices in use."""

    def __init__(self, cc: str | None, cpu: DeviceInfo, folder: PrivateFolder | None = None) -> None:
        """``cpu``: read before the script could pin its threads to some cores; ``folder``: for notes."""
        self.cpu = CpuBackend(cc, cpu, folder)
        self._by_type: dict[str, Backend] = {"cpu": self.cpu, "cuda": GpuBackend()}
        self._in_use: dict[torch.device, DeviceInfo] = {CPU: self.cpu.describe(CPU)}
        self._seen: set[torch.device] = set()

    def use(self, device: torch.device) -> bool:
        """Add a device; True the first time, for a device that nodes can run on."""
        if device in self._seen or device.type not in self._by_type:
            return False
        self._seen.add(device)  # first, so that a device that cannot be described is not queried again
        if device not in self._in_use:
            self._in_use = {**self._in_use, device: self._by_type[device.type].describe(device)}
        return True

    def in_use(self, device_type: str) -> bool:
        return any(device.type == device_type for device in self._in_use)

    def models(self) -> list[str]:
        """`DeviceInfo.key` of the devices in use."""
        return list(dict.fromkeys(info.key for info in self._in_use.values()))

    def info(self, device: torch.device) -> DeviceInfo | None:
        return self._in_use.get(device)

    def place(self, device: torch.device) -> Place | None:
        """None for a device that is not in use."""
        info = self._in_use.get(device)
        return None if info is None else Place(device, info.key, self._by_type[device.type].threads())

    def problem(self, device: torch.device) -> tuple[str, str] | None:
        """Why nothing can be tuned for a device."""
        backend = self._by_type.get(device.type)
        if backend is None:
            return "no_backend", f"expected a CPU or a GPU of CUDA or ROCm, found {device}"
        return backend.problem

    def load(self, record: KernelRecord, device: torch.device) -> Entry:
        """Make a stored kernel, or a strategy with all of its kernels, launchable in this process."""
        backend = self._by_type[device.type]
        is_ours = device.type != "cpu" or is_for_this_cpu(record.key.target)
        if not is_ours and has_machine_code(record.binary):
            raise CompilerError(f"expected a kernel for {cpu_device().isa}, found one for {record.key.target}")
        if not is_bundle(record.binary):
            return backend.load(record.key.digest, record.name, record.binary, device)

        def load_one(digest: str, name: str, binary: bytes) -> Entry:
            return backend.load(digest, name, binary, device)

        return unpack(record.binary, load_one)
