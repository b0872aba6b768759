"""Backends of the tuner: how the kernels of a type of device are searched, printed and built.

In: a node, the template that prints it, a configuration, sizes. Out: a `Recipe`: the key under which a binary is known,
and a function that makes it. Which worker runs the binary is the backend's business too (`worker_module`).
Guarantee: torch-free; a recipe is made without compiling anything, so what the store has is never built again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autofuse.codegen.c.build import Tend, Toolchain
from autofuse.codegen.c.printer import CSource
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.knobs import Knob, Rank, Sizes, contracts, printed
from autofuse.codegen.lowering.lower import lowered
from autofuse.codegen.templates import LOOP
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.key import compile_key as triton_key
from autofuse.codegen.triton.key import kernel_record
from autofuse.codegen.triton.ranking import Ranking, rates_of
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource, natural_assumptions
from autofuse.codegen.triton.targets import limits_of, prune_reason, target_of
from autofuse.errors import CompilerError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import CompileKey, Config, KernelRecord
from autofuse.tuner.worker_process import CandidateProblem


@dataclass(frozen=True)
class Recipe:
    """How to make a binary, and its key."""

    key: CompileKey
    make: Callable[[], KernelRecord]  # raises CompilerError and CandidateProblem


class Backend(Protocol):
    """The kernels of one type of device."""

    generic: str  # the variant with sizes as arguments
    specialised: str  # the variant with sizes built in
    worker_module: str
    worker_arguments: tuple[str, ...]

    def knobs(self, form: NodeForm, printer: str, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
        """The knobs of a template's kernels that are timed on ``values``, in a bucket that ends at ``high``."""

    def rank(self, form: NodeForm, printer: str, values: Sizes) -> Rank | None:
        """What a model expects a template's kernels to cost on ``values``; None where there is no model of them."""

    def recipe(
        self,
        form: NodeForm,
        printer: str,
        config: Config,
        constants: Sizes,
        sizes: Sequence[Sizes],
        is_final: bool,
    ) -> Recipe:
        """The recipe of a binary for ``sizes``; with ``is_final`` for all sizes of the bucket and any alignment."""


class CBackend:
    """C kernels, built by the system's compiler."""

    generic, specialised = "c_generic", "c_specialised"
    worker_module = "autofuse.daemon.workers.cpu"
    worker_arguments: tuple[str, ...] = ()

    def __init__(self, toolchain: Toolchain, timeout_seconds: float = 60.0, tend: Tend | None = None) -> None:
        self._generator = FusionKernelGenerator(toolchain, timeout=timeout_seconds, tend=tend)

    def knobs(self, form: NodeForm, printer: str, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
        return self._generator.knobs(form, values, high, printer)

    def rank(self, form: NodeForm, printer: str, values: Sizes) -> Rank | None:
        return None

    def recipe(
        self,
        form: NodeForm,
        printer: str,
        config: Config,
        constants: Sizes,
        sizes: Sequence[Sizes],
        is_final: bool,
    ) -> Recipe:
        return self.recipe_of(self._generator.source(form, printed(config), constants, printer), config)

    def recipe_of(self, source: CSource, config: Config) -> Recipe:
        """The recipe of a source that has been printed."""
        return Recipe(self._generator.key(source, config), lambda: self._generator.compile(source, config))


Compile = Callable[[TritonSource, str, Sequence[Assumptions], bool], Artifact]  # as `TritonCompiler.compile`


class _TritonText:
    """What compiled and interpreted Triton have in common."""

    generic, specialised = "triton_generic", "triton_specialised"
    _generator = TritonKernelGenerator()

    def knobs(self, form: NodeForm, printer: str, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
        return self._generator.knobs(form, values, high, printer)

    def rank(self, form: NodeForm, printer: str, values: Sizes) -> Rank | None:
        return None

    def _source(self, form: NodeForm, printer: str, config: Config, constants: Sizes) -> TritonSource:
        source = self._generator.source(form, printed(config), constants, printer)
        return replace(source, contracts=contracts(config))


class TritonBackend(_TritonText):
    """Triton for one model of GPU. A kernel that spills or asks for more than the device has is never timed."""

    worker_module = "autofuse.daemon.workers.gpu"

    def __init__(self, device_key: str, compiler: Compile) -> None:
        """``device_key``: `DeviceInfo.key` of the model. Raises CompilerError for an architecture that is not known."""
        self.worker_arguments: tuple[str, ...] = (device_key,)
        self._target = target_of(isa_of(device_key))
        self._limits = limits_of(self._target)
        self._rates = rates_of(self._target, multiprocessors_of(device_key))
        self._compile = compiler

    def rank(self, form: NodeForm, printer: str, values: Sizes) -> Rank | None:
        """Of loops; products and attention have no model, and neither have GPUs that are not known."""
        if printer != LOOP or self._rates is None:
            return None
        return Ranking(lowered(form), values, self._rates)

    def recipe(
        self,
        form: NodeForm,
        printer: str,
        config: Config,
        constants: Sizes,
        sizes: Sequence[Sizes],
        is_final: bool,
    ) -> Recipe:
        source = self._source(form, printer, config, constants)
        return self.recipe_of(source, _assumptions(source, sizes, is_final), is_final)

    def recipe_of(self, source: TritonSource, assumptions: Sequence[Assumptions], is_final: bool = False) -> Recipe:
        """The recipe of a source that has been printed. What a final binary does is read from its code: that takes as
        long as compiling it, so it is not done for each candidate."""
        key = triton_key(source, self._target, assumptions)

        def make() -> KernelRecord:
            artifact = self._compile(source, self._target, assumptions, is_final)
            reason = prune_reason(artifact, self._limits)
            if reason is not None:
                raise CandidateProblem("pruned", reason)
            return kernel_record(artifact)

        return Recipe(key, make)


def _assumptions(source: TritonSource, sizes: Iterable[Sizes], is_final: bool) -> tuple[Assumptions, ...]:
    found = [natural_assumptions(source.symbols, values) for values in sizes]
    if is_final:  # for unseen sizes of the bucket, and for slices of larger tensors
        found += [Assumptions(is_aligned=True), NOTHING_ASSUMED]
    return tuple(dict.fromkeys(found))


class InterpreterBackend(_TritonText):
    """The same Triton text in Triton's interpreter, on CPU tensors: without a GPU, it tests all but the times."""

    worker_module = "autofuse.daemon.workers.interpreter"
    worker_arguments: tuple[str, ...] = ()

    def recipe(
        self,
        form: NodeForm,
        printer: str,
        config: Config,
        constants: Sizes,
        sizes: Sequence[Sizes],
        is_final: bool,
    ) -> Recipe:
        return self.recipe_of(self._source(form, printer, config, constants), ())

    def recipe_of(self, source: TritonSource, assumptions: Sequence[Assumptions]) -> Recipe:
        """The recipe of a source that has been printed; the interpreter needs no assumptions."""
        data = json.dumps(source.to_json(), sort_keys=True).encode()
        key = CompileKey(hashlib.sha256(data).hexdigest(), "triton interpreter", "", "interpreter")
        return Recipe(key, lambda: KernelRecord(key, source.name, source.text, data))


def isa_of(device_key: str) -> str:
    """The architecture in a `DeviceInfo.key`, such as ``cuda:NVIDIA H200:132:sm_90:140GiB``."""
    found = next((part for part in reversed(device_key.split(":")) if part.startswith(("sm_", "gfx"))), None)
    if found is None:
        raise CompilerError(f"expected a key with the architecture of a GPU, such as sm_90, found {device_key}")
    return found


def multiprocessors_of(device_key: str) -> int:
    """How many a GPU has, as the key of its model says before the architecture; 0 where it does not."""
    before = device_key.rpartition(f":{isa_of(device_key)}")[0].rpartition(":")[2]
    return int(before) if before.isdigit() else 0
