"""Composite operators: those that kernels calculate by what PyTorch decomposes them into.

In: operations whose kind is `OpKind.COMPOSITE`, with the decomposition that capture traced. Out: a form without them,
for the lowering. Guarantee: everything else sees the operator itself; eager runs its own kernel for it, also where a
node runs unfused and as the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autofuse.ir.operation import NodeForm, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import is_librarys

# Operators with a decomposition that is not used, and why. A test holds that each still is as described.
REFUSED: dict[str, str] = {
    "aten.grid_sampler_2d.default": "a pixel outside of the image counts as another one times 0, which may be NaN",
}


def accepts(op: Operation, specs: Sequence[TensorSpec]) -> bool:
    """Whether a decomposition refuses what eager refuses; ``specs``: of the tensors that the operator reads."""
    condition = _CONDITIONS.get(op.short_name)
    return condition is None or condition(op, specs)


def _image_loss(op: Operation, specs: Sequence[TensorSpec]) -> bool:
    """Eager wants a class of int64 for each pixel; the decomposition takes fewer."""
    scores, classes = specs[0].shape.dims, specs[1]
    return classes.dtype == "int64" and classes.shape.dims == (scores[0], *scores[2:])


def _weight_norm(op: Operation, specs: Sequence[TensorSpec]) -> bool:
    return specs[0].dtype == specs[1].dtype


def _matrix_vector(op: Operation, specs: Sequence[TensorSpec]) -> bool:
    """Eager leaves out a product that is multiplied by 0, also where it is NaN."""
    return bool(op.kwarg("alpha", 1) != 0)


_CONDITIONS: dict[str, Callable[[Operation, Sequence[TensorSpec]], bool]] = {
    "nll_loss2d_forward": _image_loss,
    "_weight_norm_interface": _weight_norm,
    "addmv": _matrix_vector,
}


def expanded(form: NodeForm, which: Callable[[Operation], bool] = lambda op: True) -> NodeForm:
    """The form with each composite operator, of those asked for, replaced by its decomposition; the form itself where
    it has none."""
    replaced = {op.name for op in form.operations if op.body is not None and which(op)}
    if not replaced:
        return form
    table: dict[ValueRef, ValueRef] = {}
    operations: list[Operation] = []
    for op in form.operations:
        own = op.reading(functools.partial(_looked_up, table))
        if own.body is None or op.name not in replaced:
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


def without_librarys(form: NodeForm) -> NodeForm:
    """The form in torch's operators alone: those of libraries replaced by what they compute."""
    return expanded(form, lambda op: is_librarys(op.target))


def has_librarys(form: NodeForm) -> bool:
    """Whether a library's operator is in it."""
    return any(is_librarys(op.target) for op in form.operations)


def _looked_up(table: Mapping[ValueRef, ValueRef], ref: ValueRef) -> ValueRef:
    return table.get(ref, ref)
