"""Loop nests in Triton, as a template: the result of `lowering`, printed by `triton.printer`.

In: a `NodeForm`. Out: its knobs and its Triton module, or LoweringError with a reason code.
"""

from __future__ import annotations

from autofuse.codegen.knobs import Knob, Sizes
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.lowering.lower import lowered
from autofuse.codegen.templates import LOOP, Template
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import TritonSource
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config


def _plan(form: NodeForm) -> LoopKernel:
    """The node's loops; raises LoweringError for stages, which no grid of programs runs one after another."""
    kernel = lowered(form)
    if kernel.stages:
        raise LoweringError("device_bounds", "expected loops of one nest, found writes by an index")
    return kernel


def _knobs(form: NodeForm, values: Sizes, high: Sizes) -> tuple[Knob, ...]:
    return triton_knobs(_plan(form), values, high)


def _render(form: NodeForm, config: Config, constants: Sizes) -> TritonSource:
    return print_triton(_plan(form), config, constants)


TEMPLATE = Template(LOOP, _plan, _knobs, _render)
