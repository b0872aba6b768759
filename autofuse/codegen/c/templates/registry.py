"""The templates of CPUs, in the order in which a node is offered to them."""

from __future__ import annotations

from autofuse.codegen.c.printer import CSource
from autofuse.codegen.c.templates import attention, convolution, convolution_backward, convolution_rows, loop, matmul
from autofuse.codegen.templates import Table, table

C_TEMPLATES: Table[CSource] = table(
    matmul.TEMPLATE,
    attention.TEMPLATE,
    convolution.TEMPLATE,
    convolution_rows.TEMPLATE,
    convolution_backward.TEMPLATE,
    loop.TEMPLATE,
)
