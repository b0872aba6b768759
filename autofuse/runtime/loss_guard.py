"""Losses that eager refuses: a target outside of the classes raises there, and makes the loss of a kernel NaN.

In: the callable of a node's kernel on a CPU. Out: one that leaves a call to eager where the loss has come out as NaN,
for targets that eager refuses or for scores that are NaN. Guarantee: what eager raises is raised. A look takes 1 us a
call; on a GPU it would wait for the device, whose own kernels end the process there, so the loss stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autofuse.ir.operation import NodeForm

_REFUSE = ("aten.nll_loss_forward.default",)


def refuses(form: NodeForm) -> tuple[int, ...]:
    """Outputs that such a loss is in, by their numbers."""
    inside: set[str] = set()
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
