"""Operators that a script calls for a kernel of their own, where several simpler ones would give the same.

In: a form. Out: the names of those in it, for reports. Guarantee: all of them are reference and fallback wherever they
stand: in eager's half of a race, in a node that lost one, in a call that a kernel did not finish.

What each is raced against: the norms, the softmaxes, the losses and the activations against a rule of ours, with their
neighbours in one kernel; torch's attention against a generated one (`strategies/enumeration.py`); a library's against
what was registered for it (`library_operators`), in the script.
"""

from __future__ import annotations

from autofuse.ir.operation import NodeForm
from autofuse.ir.optable import TORCH_ATTENTIONS, OpKind, info, is_librarys

_ACTIVATIONS = frozenset(
    f"aten.{name}{end}.default"
    for name in ("gelu", "silu", "mish", "softplus", "elu", "hardswish", "hardsigmoid", "glu", "_prelu_kernel")
    for end in ("", "_backward")
)
_KINDS = (OpKind.NORMALISATION, OpKind.LOSS)


def is_fused(target: str) -> bool:
    """Whether an operator has an unfused form that it saves the script from."""
    return target in _ACTIVATIONS or target in TORCH_ATTENTIONS or is_librarys(target) or info(target).kind in _KINDS


def fused_operators(form: NodeForm) -> tuple[str, ...]:
    """Their short names, each once, in program order."""
    return tuple(dict.fromkeys(op.short_name for op in form.operations if is_fused(op.target)))
