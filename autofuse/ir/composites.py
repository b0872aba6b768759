"""Composite operators: those that kernels calculate by what PyTorch decomposes them into.

In: operations whose kind is `OpKind.COMPOSITE`, with the decomposition that capture traced. Out: a form without them,
for the lowering. Guarantee: everything else sees the operator itself; eager runs its own kernel for it, also where a
node runs unfused and as the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from autofuse.ir.operation import NodeForm, Operation, ValueRef

# Operators with a decomposition that is not used, and why. A test holds that each still is as described.
REFUSED: dict[str, str] = {
    "aten.grid_sampler_2d.default": "a pixel outside of the image counts as another one times 0, which may be NaN",
}


def expanded(form: NodeForm) -> NodeForm:
    """The form with each composite operator replaced by its decomposition; the form itself where it has none."""
    if all(op.body is None for op in form.operations):
        return form
    table: dict[ValueRef, ValueRef] = {}
    operations: list[Operation] = []
    for op in form.operations:
        own = op.reading(functools.partial(_looked_up, table))
        if own.body is None:
            operations.append(own)
            continue
        names = {ValueRef(item.name): ref for item, ref in zip(own.body.inputs, own.inputs, strict=True)}
        for part in own.body.operations:
            made = f"{op.name}_{part.name}"
            names |= {ValueRef(part.name, n): ValueRef(made, n) for n in range(len(part.outputs))}
            operations.append(replace(part.reading(names.__getitem__), name=made, source=op.source))
        table |= {ValueRef(op.name, n): names[ref] for n, ref in enumerate(own.body.outputs)}
    outputs = tuple(table.get(ref, ref) for ref in form.outputs)
    return NodeForm(form.inputs, tuple(operations), outputs, form.symbols)


def _looked_up(table: Mapping[ValueRef, ValueRef], ref: ValueRef) -> ValueRef:
    return table.get(ref, ref)
