"""Templates: the kinds of kernels that a target can print, each as one record, and the generator's queries.

In: a target's table (`c.templates.registry`, `triton.templates.registry`) and a `NodeForm`. Out: the template of a node
or the reason why it has none, its knobs, its source. Guarantee: the first template of a table that takes a node prints
it. The last template is the loop nest, which takes every node that can be lowered; if no template takes a node, its
reason is given. A new template is a file with a ``TEMPLATE``, its place in the table of its target, and a name in
`STORED_NAMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from autofuse.codegen.knobs import Knob, Sizes
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config

# Names that strategies ask for, on both targets. They are stored; what a store may name is one of them.
LOOP, MATMUL, ATTENTION, CONVOLUTION = "loop", "matmul", "attention", "convolution"
CONVOLUTION_ROWS, CONVOLUTION_BACKWARD = "convolution_rows", "convolution_backward"
STORED_NAMES = (LOOP, MATMUL, ATTENTION, CONVOLUTION, CONVOLUTION_ROWS, CONVOLUTION_BACKWARD)

Source = TypeVar("Source")


@dataclass(frozen=True)
class Template(Generic[Source]):
    """One kind of kernel of one target."""

    name: str
    plan: Callable[[NodeForm], Any]  # a node's plan; raises LoweringError with a reason for a node of another kind
    # From a node, the sizes that it is timed on (None: not known), and the upper ends of their bucket.
    knobs: Callable[[NodeForm, Any, Any], tuple[Knob, ...]]
    render: Callable[[NodeForm, Config, Sizes], Source]  # the symbols in Sizes are built in
    # Additions and multiplications of a node at these values of its symbols; None: no choice depends on them.
    flops: Callable[[NodeForm, Sequence[int]], int] | None = None


Table = Mapping[str, Template[Source]]  # by name, in the order in which they are asked


def table(*templates: Template[Source]) -> Table[Source]:
    """Templates by their names."""
    return {template.name: template for template in templates}


def refusal(template: Template[Any], form: NodeForm) -> tuple[str, str] | None:
    """Why a node is not of a template's kind, as a code and in words; None where it is."""
    try:
        template.plan(form)
    except LoweringError as error:
        return error.code, str(error)
    return None


def template_of(templates: Table[Source], form: NodeForm) -> Template[Source]:
    """The first template that takes a node, else the last one."""
    *others, last = templates.values()
    return next((template for template in others if refusal(template, form) is None), last)


class SourceGenerator(Generic[Source]):
    """What the generators of both targets have in common: all that needs no compiler.

    ``name``: a template's; None for the template that the table gives (`template_of`). `knobs` and `source` raise
    LoweringError for a node that the template cannot print.
    """

    templates: ClassVar[Mapping[str, Template[Any]]]

    def knobs(self, form: NodeForm, values: Sizes | None, high: Sizes, name: str | None = None) -> tuple[Knob, ...]:
        """The knobs of kernels that are timed on ``values`` (None: not known), in a bucket that ends at ``high``."""
        return self._template(form, name).knobs(form, values, high)

    def source(self, form: NodeForm, config: Config, constants: Sizes, name: str | None = None) -> Source:
        """The text of a kernel, with the values of ``constants`` built in."""
        found: Source = self._template(form, name).render(form, config, constants)
        return found

    def can_generate_specialized(self, shapes: Sequence[Sequence[Any]]) -> bool:
        """Whether shapes are concrete, so that their sizes can be built in."""
        return all(isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 for shape in shapes for dim in shape)

    def _template(self, form: NodeForm, name: str | None) -> Template[Any]:
        return template_of(self.templates, form) if name is None else self.templates[name]
