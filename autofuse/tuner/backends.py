"""Backends of the tuner: how the kernels of a type of device are searched, printed and built.

In: a loop kernel, a configuration, sizes. Out: a `Recipe`: the key under which a binary is known, and a function that
makes it. Which worker runs the binary is the backend's business too (`worker_module`).
Guarantee: torch-free; a recipe is made without compiling anything, so what the store has is never built again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autofuse.codegen.c.build import Tend, Toolchain, compile_key, compile_source, flags_for
from autofuse.codegen.c.knobs import default_config, knobs_for
from autofuse.codegen.c.printer import CSource, print_c
from autofuse.codegen.c.templates.attention import attention_knobs as c_attention_knobs
from autofuse.codegen.c.templates.attention import default_attention_config as default_c_attention_config
from autofuse.codegen.c.templates.attention import print_attention as print_c_attention
from autofuse.codegen.c.templates.convolution import convolution_knobs, default_convolution_config, print_convolution
from autofuse.codegen.c.templates.matmul import c_matmul_knobs, default_c_matmul_config, print_c_matmul
from autofuse.codegen.knobs import Knob
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.key import compile_key as triton_key
from autofuse.codegen.triton.key import kernel_record
from autofuse.codegen.triton.knobs import default_triton_config, triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource, natural_assumptions
from autofuse.codegen.triton.targets import limits_of, prune_reason, target_of
from autofuse.codegen.triton.templates.attention import print_attention
from autofuse.codegen.triton.templates.attention_knobs import attention_knobs, default_attention_config
from autofuse.codegen.triton.templates.matmul import print_matmul
from autofuse.codegen.triton.templates.matmul_knobs import default_matmul_config, matmul_knobs
from autofuse.errors import CompilerError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import CompileKey, Config, KernelRecord
from autofuse.strategies.strategy import ATTENTION, CONVOLUTION, MATMUL
from autofuse.tuner.worker_process import CandidateProblem

Sizes = Mapping[str, int]  # values of a node's symbols


@dataclass(frozen=True)
class Tiled:
    """A product or an attention with what follows it, to be printed as tiles instead of as a nest of loops."""

    form: NodeForm
    printer: str  # `strategies.strategy.MATMUL`, `ATTENTION` or `CONVOLUTION`


Printable = LoopKernel | Tiled


@dataclass(frozen=True)
class Recipe:
    """A binary that can be made."""

    key: CompileKey
    make: Callable[[], KernelRecord]  # raises CompilerError and CandidateProblem


class Backend(Protocol):
    """The kernels of one type of device."""

    generic: str  # variant with sizes as arguments
    specialised: str  # variant with sizes built in
    worker_module: str
    worker_arguments: tuple[str, ...]

    def knobs(self, loop: Printable, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
        """What may vary for kernels that are timed on ``values``, in a bucket that ends at ``high``."""

    def default(self, loop: Printable, values: Sizes, high: Sizes) -> Config: ...

    def recipe(
        self, loop: Printable, config: Config, constants: Sizes, sizes: Sequence[Sizes], is_final: bool
    ) -> Recipe:
        """A binary that is good for ``sizes``; for all sizes of the bucket and any alignment with ``is_final``."""


@dataclass(frozen=True)
class _CPrinter:
    knobs: Callable[[NodeForm], tuple[Knob, ...]]
    default: Callable[[NodeForm], Config]
    text: Callable[[NodeForm, Config, Sizes], CSource]


_C_PRINTERS = {
    MATMUL: _CPrinter(c_matmul_knobs, default_c_matmul_config, print_c_matmul),
    ATTENTION: _CPrinter(c_attention_knobs, default_c_attention_config, print_c_attention),
    CONVOLUTION: _CPrinter(convolution_knobs, default_convolution_config, print_convolution),
}


class CBackend:
    """C through the system's compiler."""

    generic, specialised = "c_generic", "c_specialised"
    worker_module = "autofuse.daemon.workers.cpu"
    worker_arguments: tuple[str, ...] = ()

    def __init__(self, toolchain: Toolchain, timeout_seconds: float = 60.0, tend: Tend | None = None) -> None:
        self._toolchain = toolchain
        self._timeout_seconds = timeout_seconds
        self._tend = tend

    def knobs(self, loop: Printable, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
        if isinstance(loop, Tiled):
            return _C_PRINTERS[loop.printer].knobs(loop.form)
        return knobs_for(loop, values)

    def default(self, loop: Printable, values: Sizes, high: Sizes) -> Config:
        if isinstance(loop, Tiled):
            return _C_PRINTERS[loop.printer].default(loop.form)
        return default_config(loop, values)

    def recipe(
        self, loop: Printable, config: Config, constants: Sizes, sizes: Sequence[Sizes], is_final: bool
    ) -> Recipe:
        if isinstance(loop, Tiled):
            source = _C_PRINTERS[loop.printer].text(loop.form, config, constants)
        else:
            source = print_c(loop, config, constants)
        key = compile_key(source.text, self._toolchain, flags_for(self._toolchain, config))
        return Recipe(key, lambda: self.compile(source, config))

    def compile(self, source: CSource, config: Config) -> KernelRecord:
        """A translation unit with the flags of a configuration. Raises CompilerError."""
        flags = flags_for(self._toolchain, config)
        binary = compile_source(source.text, self._toolchain, flags, self._timeout_seconds, self._tend)
        return KernelRecord(compile_key(source.text, self._toolchain, flags), source.name, source.text, binary)


Compile = Callable[[TritonSource, str, Sequence[Assumptions]], Artifact]


@dataclass(frozen=True)
class _TilePrinter:
    knobs: Callable[[NodeForm, Sizes, Sizes], tuple[Knob, ...]]
    default: Callable[[NodeForm, Sizes, Sizes], Config]
    text: Callable[[NodeForm, Config, Sizes], TritonSource]


_TILES = {
    MATMUL: _TilePrinter(matmul_knobs, default_matmul_config, print_matmul),
    ATTENTION: _TilePrinter(attention_knobs, default_attention_config, print_attention),
}


class _TritonText:
    """What compiled and interpreted Triton have in common."""

    generic, specialised = "triton_generic", "triton_specialised"

    def knobs(self, loop: Printable, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
        if isinstance(loop, Tiled):
            return _TILES[loop.printer].knobs(loop.form, values, high)
        return triton_knobs(loop, values, high)

    def default(self, loop: Printable, values: Sizes, high: Sizes) -> Config:
        if isinstance(loop, Tiled):
            return _TILES[loop.printer].default(loop.form, values, high)
        return default_triton_config(loop, values, high)

    @staticmethod
    def text(loop: Printable, config: Config, constants: Sizes) -> TritonSource:
        if isinstance(loop, Tiled):
            return _TILES[loop.printer].text(loop.form, config, constants)
        return print_triton(loop, config, constants)


class TritonBackend(_TritonText):
    """Triton for one model of GPU. A kernel that spills or asks for more than the device has is never timed."""

    worker_module = "autofuse.daemon.workers.gpu"

    def __init__(self, device_key: str, compiler: Compile) -> None:
        """``device_key``: `DeviceInfo.key` of the model. Raises CompilerError for an architecture that is not known."""
        self.worker_arguments: tuple[str, ...] = (device_key,)
        self._target = target_of(isa_of(device_key))
        self._limits = limits_of(self._target)
        self._compile = compiler

    def recipe(
        self, loop: Printable, config: Config, constants: Sizes, sizes: Sequence[Sizes], is_final: bool
    ) -> Recipe:
        source = self.text(loop, config, constants)
        return self.recipe_of(source, _assumptions(source, sizes, is_final))

    def recipe_of(self, source: TritonSource, assumptions: Sequence[Assumptions]) -> Recipe:
        """A text that is printed already."""
        key = triton_key(source, self._target, assumptions)

        def make() -> KernelRecord:
            artifact = self._compile(source, self._target, assumptions)
            reason = prune_reason(artifact, self._limits)
            if reason is not None:
                raise CandidateProblem("pruned", reason)
            return kernel_record(artifact)

        return Recipe(key, make)


def _assumptions(source: TritonSource, sizes: Iterable[Sizes], is_final: bool) -> tuple[Assumptions, ...]:
    found = [natural_assumptions(source.symbols, values) for values in sizes]
    if is_final:  # sizes of the bucket that nobody has seen yet, and slices of larger tensors
        found += [Assumptions(is_aligned=True), NOTHING_ASSUMED]
    return tuple(dict.fromkeys(found))


class InterpreterBackend(_TritonText):
    """The same Triton text in Triton's interpreter, on CPU tensors: all of the tuner but the clock, without a GPU."""

    worker_module = "autofuse.daemon.workers.interpreter"
    worker_arguments: tuple[str, ...] = ()

    def recipe(
        self, loop: Printable, config: Config, constants: Sizes, sizes: Sequence[Sizes], is_final: bool
    ) -> Recipe:
        return self.recipe_of(self.text(loop, config, constants), ())

    def recipe_of(self, source: TritonSource, assumptions: Sequence[Assumptions]) -> Recipe:
        """A text that is printed already, which makes no difference of what it may assume."""
        data = json.dumps(source.to_json(), sort_keys=True).encode()
        key = CompileKey(hashlib.sha256(data).hexdigest(), "triton interpreter", "", "interpreter")
        return Recipe(key, lambda: KernelRecord(key, source.name, source.text, data))


def isa_of(device_key: str) -> str:
    """The architecture in a `DeviceInfo.key`, such as ``cuda:NVIDIA H200:132:sm_90:140GiB``."""
    found = next((part for part in reversed(device_key.split(":")) if part.startswith(("sm_", "gfx"))), None)
    if found is None:
        raise CompilerError(f"expected a key with the architecture of a GPU, such as sm_90, found {device_key}")
    return found
