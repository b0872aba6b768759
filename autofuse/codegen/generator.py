"""The code generator as one object: a node in, a compiled kernel out.

In: a `NodeForm` (or an object that has one as ``form``), and concrete input shapes for the specialised form.
Out: `CompiledKernel` with source, binary and compile key; loaded into the process only when it is first called.
Guarantee: torch-free until a kernel is loaded; equal nodes, sizes and configurations give equal text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autofuse.codegen.c.build import Tend, Toolchain, compile_key, compile_source, find_toolchain, flags_for
from autofuse.codegen.c.printer import CSource
from autofuse.codegen.c.templates.registry import C_TEMPLATES
from autofuse.codegen.knobs import default_config
from autofuse.codegen.templates import SourceGenerator
from autofuse.ir.operation import NodeForm, bind_shapes, form_of
from autofuse.ir.records import CompileKey, Config, KernelRecord
from autofuse.preserve_rng import untouched

Variant = Literal["c_generic", "c_specialised"]


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel, and what it was made from."""

    name: str
    source: str
    binary: bytes
    key: CompileKey
    variant: Variant
    config: Config
    form: NodeForm
    symbols: tuple[str, ...]  # order of the values in the sizes array
    constants: tuple[tuple[str, int], ...] = ()  # symbols a specialised kernel has built in

    def load(self) -> Any:
        """The kernel loaded into this process (`load.LoadedKernel`)."""
        return _loader(self.key, self.name)(self.binary)

    def __call__(self, *inputs: Any, threads: int | None = None) -> tuple[Any, ...]:
        """Run on tensors; allocates outputs with the shapes and strides of the node's specs. For tests."""
        with untouched():
            from autofuse.codegen.call import call_kernel

        return call_kernel(self, inputs, threads)


@functools.lru_cache(maxsize=4096)
def _loader(key: CompileKey, name: str) -> Callable[[bytes], Any]:
    loaded: list[Any] = []

    def load(binary: bytes) -> Any:
        if not loaded:
            with untouched():
                from autofuse.codegen.c.load import load_kernel

            loaded.append(load_kernel(binary, name))
        return loaded[0]

    return load


class FusionKernelGenerator(SourceGenerator[CSource]):
    """Generates kernels for fusion nodes with the system compiler; the tuner's CPU kernels come from here too.

    Shapes are symbolic in the generic form and numbers of elements in the specialised one. Raises ShapeError for shapes
    that do not fit the node, LoweringError for a node that no template prints, CompilerError where the compiler is
    missing or refuses the source. Source: the templates of `codegen.c.templates`.
    """

    templates = C_TEMPLATES

    def __init__(
        self,
        toolchain: Toolchain | None = None,
        cc: str | None = None,
        timeout: float = 120.0,
        tend: Tend | None = None,
    ) -> None:
        """``cc``: the compiler, where no toolchain is given; ``timeout``: seconds; ``tend``: see `compile_source`."""
        self.toolchain = toolchain or find_toolchain(cc)
        self.timeout = timeout
        self._tend = tend

    def generate_fused_kernel(
        self, node: Any, concrete_shapes: Sequence[Sequence[int]], config: Config | None = None
    ) -> CompiledKernel:
        """A kernel with the sizes of these input shapes built in.

        Raises ShapeError where the shapes do not fit the node, LoweringError where no template prints it, and
        CompilerError as `compile_source` does.
        """
        form = form_of(node)
        return self._build(form, config, bind_shapes(form, concrete_shapes))

    def generate_generic_kernel(self, node: Any, config: Config | None = None) -> CompiledKernel:
        """A kernel for every size: each call passes the symbols' values. Raises LoweringError and CompilerError."""
        return self._build(form_of(node), config, {})

    def key(self, source: CSource, config: Config) -> CompileKey:
        """The key under which the binary of a source with this configuration is stored."""
        return compile_key(source.text, self.toolchain, flags_for(self.toolchain, config))

    def compile(self, source: CSource, config: Config) -> KernelRecord:
        """Compile a source with the flags of a configuration. Raises CompilerError."""
        flags = flags_for(self.toolchain, config)
        binary = compile_source(source.text, self.toolchain, flags, self.timeout, self._tend)
        return KernelRecord(self.key(source, config), source.name, source.text, binary)

    def _build(self, form: NodeForm, config: Config | None, constants: Mapping[str, int]) -> CompiledKernel:
        config = config or default_config(self.knobs(form, constants or None, constants))
        record = self.compile(self.source(form, config, constants), config)
        return CompiledKernel(
            name=record.name,
            source=record.source,
            binary=record.binary,
            key=record.key,
            variant="c_specialised" if constants else "c_generic",
            config=config,
            form=form,
            symbols=form.symbols,
            constants=tuple(sorted(constants.items())),
        )
