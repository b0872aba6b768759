"""Losses that eager refuses: a target outside of the classes, or an input that is no probability, raises in eager, but
makes a kernel's loss NaN.

In: the callable of a node's kernel on a CPU. Out: a callable that repeats a call in eager where the loss is NaN,
because eager refuses the values or because scores are NaN. Guarantee: eager's errors are raised. The test takes 1 us
per call. On a GPU it would wait for the device, where eager's own kernels end the process, so there the loss stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autofuse.ir.composites import without_librarys
from autofuse.ir.operation import NodeForm

_REFUSE = ("aten.nll_loss_forward.default", "aten.binary_cross_entropy.default")


def refuses(form: NodeForm) -> tuple[int, ...]:
    """The numbers of the outputs that contain such a loss."""
    inside: set[str] = set()
    form = without_librarys(form)
    for op in form.operations:
        if op.target in _REFUSE or any(ref.name in inside for ref in op.inputs):
            inside.add(op.name)
    return tuple(number for number, ref in enumerate(form.outputs) if ref.name in inside)


def fall_back_to_eager(form: NodeForm, fused: Callable[..., Any], unfused: Callable[..., Any]) -> Callable[..., Any]:
    losses, is_one = refuses(form), len(form.outputs) == 1

    def call(*inputs: Any) -> Any:
        found = fused(*inputs)
        for number in losses:
            loss = found if is_one else found[number]
            value = (loss if loss.numel() == 1 else loss.sum()).item()
            if value != value:
                return unfused(*inputs)
        return found

    return call
