"""Compiled Triton kernels as functions of one device.

In: an `Artifact` and the index of a device. Out: `LoadedArtifact`, whose functions can be launched there. Guarantee: an
artifact is loaded once for each device, under a lock, and never while the calling thread captures a CUDA graph. Nothing
is unloaded, since a captured graph may replay a function at any time; `unload` is only for losing kernels of the tuner.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.source import Assumptions
from autofuse.errors import DeviceError
from autofuse.gpu import capturing
from autofuse.gpu.driver import Driver, torch_driver
from autofuse.locks import make_lock


@dataclass(frozen=True)
class Function:
    """A kernel of one device."""

    handle: int
    threads: int  # a program
    shared_bytes: int  # of a launch
    registers: int  # a thread, as the driver says
    local_bytes: int  # a thread


@dataclass(frozen=True, eq=False)
class LoadedArtifact:
    """All functions of an artifact on one device."""

    artifact: Artifact
    digest: str
    device_index: int
    driver: Driver
    context: int
    modules: tuple[int, ...]
    functions: dict[tuple[int, Assumptions], Function]  # by number of the pass and what they assume


_loaded: dict[tuple[Driver, str, int], LoadedArtifact] = {}
_lock = make_lock()


def load_artifact(
    artifact: Artifact, device_index: int, digest: str | None = None, driver: Driver | None = None
) -> LoadedArtifact:
    """Load every image. ``digest`` tells one artifact from another, its content where not given.

    Raises DeviceError where the driver refuses an image, and while the calling thread records a graph.
    """
    driver = driver or torch_driver()
    key = (driver, digest or hashlib.sha256(artifact.pack()).hexdigest(), device_index)
    found = _loaded.get(key)
    if found is not None:
        return found
    if capturing.is_capturing():
        raise DeviceError("expected to load a kernel between recordings of graphs, found one under way; call again")
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load(artifact, key[1], device_index, driver)
        return _loaded[key]


def _load(artifact: Artifact, digest: str, device_index: int, driver: Driver) -> LoadedArtifact:
    vendor = artifact.target.partition(":")[0]
    if vendor != driver.vendor.name:
        raise DeviceError(f"expected kernels for {driver.vendor.name}, found {artifact.target}")
    modules: list[int] = []
    functions: dict[tuple[int, Assumptions], Function] = {}
    with driver.on_device(device_index) as context:
        for image in artifact.images:
            module = driver.load(image.image)
            modules.append(module)
            handle = driver.function(module, image.function)
            driver.allow_shared(handle, image.shared_bytes)
            found = Function(handle, image.threads, image.shared_bytes, *driver.resources(handle))
            functions[image.number, image.assumptions] = found
    return LoadedArtifact(artifact, digest, device_index, driver, context, tuple(modules), functions)


def unload(loaded: LoadedArtifact) -> None:
    """Give the memory of an artifact back. The caller has synchronised and holds no launcher of it."""
    with _lock:
        _loaded.pop((loaded.driver, loaded.digest, loaded.device_index), None)
        with loaded.driver.on_device(loaded.device_index):
            for module in loaded.modules:
                loaded.driver.unload(module)
