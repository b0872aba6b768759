"""The kernels with products of matrices inside, as a table: which there are, and which one a node is.

In: a `NodeForm`. Out: `Template`, whose functions are asked in this order: refusal, knobs or default, text.
Guarantee: a node is at most one of them; one that is none has a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autofuse.codegen.knobs import Knob
from autofuse.codegen.matmul_operands import ANCHORS
from autofuse.codegen.triton.source import TritonSource
from autofuse.codegen.triton.templates.attention import print_attention
from autofuse.codegen.triton.templates.attention_knobs import attention_knobs, default_attention_config
from autofuse.codegen.triton.templates.attention_plan import attention_refusal
from autofuse.codegen.triton.templates.matmul import print_matmul
from autofuse.codegen.triton.templates.matmul_knobs import default_matmul_config, matmul_knobs
from autofuse.codegen.triton.templates.matmul_plan import matmul_refusal
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config


@dataclass(frozen=True)
class Template:
    """One kind of kernel."""

    name: str
    refusal: Callable[[NodeForm], tuple[str, str] | None]  # code and reason; None where the node is of this kind
    knobs: Callable[..., tuple[Knob, ...]]  # (form, values, high, allow_tf32=False)
    default: Callable[..., Config]  # of the same arguments
    print: Callable[..., TritonSource]  # (form, config, constants=None)


TILED = (
    Template("matmul", matmul_refusal, matmul_knobs, default_matmul_config, print_matmul),
    Template("attention", attention_refusal, attention_knobs, default_attention_config, print_attention),
)


def tiled_kernel(form: NodeForm) -> Template | tuple[str, str]:
    """The kind of kernel that a node is, or why it is none, as a code and in words."""
    products = sum(op.target in ANCHORS for op in form.operations)
    kind = TILED[0] if products < 2 else TILED[1]
    return kind.refusal(form) or kind
