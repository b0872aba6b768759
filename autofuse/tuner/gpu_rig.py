"""The bench's side of a GPU: kernels launched as the router launches them, timed by events.

In: a model of GPU and the memory that may be used there. Out: a `DeviceRunner`.
Guarantee: the first visible device of that very model, or RuntimeError; torch's allocator keeps within the memory; an
error that leaves the context unusable is fatal, so that the next request finds a new process with a new context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.triton.artifact import Artifact
from autofuse.errors import CompilerError
from autofuse.gpu import launcher
from autofuse.gpu.devices import device_count, gpu_device, supports_bf16
from autofuse.gpu.modules import load_artifact
from autofuse.ir.operation import NodeForm
from autofuse.tuner.gpu_sampler import GpuSampler, device_calls
from autofuse.tuner.timing import Sampler
from autofuse.tuner.verify import GuardedAllocator
from autofuse.wrapper.node_call import make_launcher, make_unfused

# Words of CUDA and HIP for errors after which a context answers every call with the same error.
FATAL = (
    "illegal memory access", "illegal address", "illegal instruction", "misaligned address", "invalid program counter",
    "launch failure", "launch failed", "launch timed out", "hardware stack error", "device-side assert",
    "uncorrectable", "CUDA_ERROR_ILLEGAL", "CUDA_ERROR_MISALIGNED", "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_HARDWARE", "CUDA_ERROR_ASSERT", "hipErrorIllegal",
    "hipErrorLaunchFailure", "hipErrorLaunchTimeOut",
)  # fmt: skip


class GpuRunner:
    """Runs Triton kernels on one GPU."""

    def __init__(self, device_key: str, memory_bytes: int) -> None:
        index = find_device(device_key)
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), index)
        self.has_bf16 = supports_bf16(index)
        self._sampling = device_calls(self.device)
        _install_launcher()

    def load(self, digest: str, name: str, binary: bytes) -> Any:
        artifact = Artifact.unpack(binary)
        uses_bf16 = any(a.type == "*bf16" for item in artifact.source.passes for a in item.arguments)
        if uses_bf16 and not self.has_bf16:
            raise ValueError(f"expected a device with bfloat16 (compute capability 8.0), found {self.device}")
        return load_artifact(artifact, self.device.index, digest)

    def unfused(self, form: NodeForm, values: Sequence[int]) -> Callable[..., Any]:
        return make_unfused(form, values, self.device)

    def launcher(
        self, form: NodeForm, loaded: Any, values: Sequence[int], threads: int, allocate: GuardedAllocator | None
    ) -> Callable[..., Any]:
        return make_launcher(form, loaded, values, 0, allocate)

    def usable_threads(self, threads: int) -> int:
        return 0

    def sampler(self, is_shared: bool) -> Sampler:
        return GpuSampler(self._sampling)

    def is_fatal(self, error: Exception) -> bool:
        return is_fatal(error, self._sampling.synchronize)


def is_fatal(error: Exception, synchronize: Callable[[], object]) -> bool:
    """Whether an error has left the device's context unusable; ``synchronize`` waits for the device."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    if any(words in str(error) for words in FATAL):
        return True
    try:
        synchronize()
    except Exception:  # a broken context repeats its error at every call, whatever the words
        return True
    return False


def find_device(device_key: str) -> int:
    """The index of the first visible device of a model. Raises RuntimeError where there is none."""
    found = []
    for index in range(device_count()):
        key = gpu_device(index).key
        if key == device_key:
            return index
        found.append(key)
    raise RuntimeError(f"expected a device {device_key}, found {', '.join(found) or 'none'}")


def _install_launcher() -> None:
    """Install the launcher that scripts with a C compiler use, so that it is timed; without one both use ctypes."""
    try:
        launcher.install(launcher.compile_launcher(find_toolchain()).binary)
    except (CompilerError, OSError):
        return
