"""The templates of GPUs, in the order in which a node is offered to them."""

from __future__ import annotations

from autofuse.codegen.templates import Table, table
from autofuse.codegen.triton.source import TritonSource
from autofuse.codegen.triton.templates import attention, loop, matmul

TRITON_TEMPLATES: Table[TritonSource] = table(matmul.TEMPLATE, attention.TEMPLATE, loop.TEMPLATE)
