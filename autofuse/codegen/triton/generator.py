"""The Triton side of the code generator as one object: a node in, Triton kernels out.

In: a `NodeForm` (or an object that has one as ``form``), and concrete input shapes for the specialised form.
Out: `TritonKernel`: source that a person can read, how it is launched, and on demand binaries for a target.
Guarantee: no GPU, no torch and no Triton is needed to generate; equal nodes, sizes and configurations give equal text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofuse.codegen.knobs import default_config
from autofuse.codegen.templates import SourceGenerator
from autofuse.codegen.triton.artifact import Artifact
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource
from autofuse.codegen.triton.templates.registry import TRITON_TEMPLATES
from autofuse.ir.operation import NodeForm, bind_shapes, form_of
from autofuse.ir.records import Config

USUAL_SIZE = 1024  # of every symbol, where the sizes to start from are not known


@dataclass(frozen=True)
class TritonKernel:
    """Generated Triton kernels, and what they were made from."""

    source: TritonSource
    config: Config
    form: NodeForm
    constants: tuple[tuple[str, int], ...] = ()  # symbols a specialised kernel has built in

    @property
    def text(self) -> str:
        """The Python module."""
        return self.source.text

    def compile(self, target: str, assumptions: Sequence[Assumptions] = (NOTHING_ASSUMED,)) -> Artifact:
        """Binaries for a target such as ``cuda:90`` or ``hip:gfx942``, in this process, which imports Triton.

        Raises CompilerError where Triton is missing or refuses the source.
        """
        from autofuse.codegen.triton.compile import compile_source
        from autofuse.codegen.triton.key import find_triton

        find_triton()
        return compile_source(self.source, target, assumptions)


class TritonKernelGenerator(SourceGenerator[TritonSource]):
    """Generates Triton kernels for fusion nodes."""

    templates = TRITON_TEMPLATES

    def generate_fused_kernel(
        self, node: Any, concrete_shapes: Sequence[Sequence[int]], config: Config | None = None
    ) -> TritonKernel:
        """A kernel with the sizes of these input shapes built in.

        Raises ShapeError where the shapes do not fit the node, LoweringError where it has no loop form.
        """
        values = bind_shapes(form_of(node), concrete_shapes)
        return self._generate(form_of(node), config, values, values)

    def generate_generic_kernel(self, node: Any, config: Config | None = None) -> TritonKernel:
        """A kernel whose sizes are arguments. Raises LoweringError.

        Where the configuration holds whole rows in registers, rows are at most as long as its block (see
        `TritonSource.limits`).
        """
        form = form_of(node)
        return self._generate(form, config, {}, dict.fromkeys(form.symbols, USUAL_SIZE))

    def _generate(
        self, form: NodeForm, config: Config | None, constants: Mapping[str, int], sizes: Mapping[str, int]
    ) -> TritonKernel:
        chosen = config or default_config(self.knobs(form, sizes, sizes))
        source = self.source(form, chosen, constants)
        return TritonKernel(source, chosen, form, tuple(sorted(constants.items())))
