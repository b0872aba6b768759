"""Loop nests in C, as a template: the result of `lowering`, printed by `c.printer`.

In: a `NodeForm`. Out: its knobs and its C text, or LoweringError with a reason code.
"""

from __future__ import annotations

from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.c.printer import CSource, print_c
from autofuse.codegen.knobs import Knob, Sizes
from autofuse.codegen.lowering.lower import lowered
from autofuse.codegen.templates import LOOP, Template
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config


def _knobs(form: NodeForm, values: Sizes | None, high: Sizes) -> tuple[Knob, ...]:
    return knobs_for(lowered(form), values)


def _render(form: NodeForm, config: Config, constants: Sizes) -> CSource:
    return print_c(lowered(form), config, constants)


TEMPLATE = Template(LOOP, lowered, _knobs, _render)
