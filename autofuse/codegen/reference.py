"""Running a node op by op through aten: the unfused variant, and in float64 the reference.

In: a `NodeForm` and inputs. Out: its outputs.
Guarantee: the same overloads with the same arguments that eager ran; `to_float64` changes dtypes and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autofuse.codegen.call import torch_dtype
from autofuse.codegen.dtypes import DTYPES, is_float
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.philox import DROPOUT
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef, map_arg
from autofuse.ir.optable import OpKind, info, is_librarys
from autofuse.ir.shape import evaluate
from autofuse.library_operators import called

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")

__all__ = ["make_inputs", "run_unfused", "to_float64"]


def run_unfused(
    form: NodeForm,
    inputs: Sequence[torch.Tensor],
    symbol_values: Mapping[str, int] | Sequence[int],
    masks: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a node's operations one by one through aten, on the device of its inputs, and return its outputs.

    The inputs are not changed. ``masks``: the masks of the node's dropouts, in order. An empty list is filled with the
    masks that are drawn. The masks of a filled list are used in place of drawn ones, because another dtype would draw
    others.
    """
    given = list(masks) if masks else None
    device = inputs[0].device if inputs else torch.device(form.spec(form.outputs[0]).device)
    if not isinstance(symbol_values, Mapping):
        symbol_values = dict(zip(form.symbols, symbol_values, strict=True))
    values: dict[ValueRef, Any] = {ValueRef(item.name): t for item, t in zip(form.inputs, inputs, strict=True)}
    with torch.no_grad():
        for op in form.operations:
            if op.target == DROPOUT and given:
                mask = given.pop(0)
                p = float(op.args[1])
                found: Any = (_dropout_scale(values[op.args[0]], mask, 0.0 if p == 1 else 1.0 / (1.0 - p)), mask)
            else:
                found = run_operation(op, values, symbol_values, device)
                if _is_too_narrow(op, found):
                    found = _widened(op, values, symbol_values, device)
                if op.target == DROPOUT and masks is not None:
                    masks.append(found[1])
            for n, result in enumerate(found if isinstance(found, tuple | list) else (found,)):
                values[ValueRef(op.name, n)] = result
    return tuple(values[ref] for ref in form.outputs)


def _is_too_narrow(op: Operation, found: Any) -> bool:
    """Whether aten gave float32 for float64: in the wide form, for integers alone, which it makes its default dtype."""
    return isinstance(found, torch.Tensor) and found.dtype is torch.float32 and op.outputs[0].dtype == "float64"


def _widened(
    op: Operation, values: Mapping[ValueRef, Any], symbols: Mapping[str, int], device: torch.device
) -> torch.Tensor:
    """The operation on the integers as float64, which holds them exactly up to 2^53."""
    integers = {ref: values[ref] for ref in op.inputs if values[ref].dtype not in (torch.bool, *_FLOATS)}
    wide = {**values, **{ref: tensor.double() for ref, tensor in integers.items()}}
    found = run_operation(op, wide, symbols, device)
    assert isinstance(found, torch.Tensor)
    return found.double()


def run_operation(
    op: Operation, values: Mapping[ValueRef, Any], symbols: Mapping[str, int], device: torch.device
) -> Any:
    """What one operation gives: a tensor or several; ``values`` has those that it reads."""

    def concrete(arg: Any) -> Any:
        mapped = map_arg(arg, lambda ref: values[ref], lambda dim: evaluate(dim, symbols))
        return _restore(mapped, has_dtypes=not is_librarys(op.target))

    args = [concrete(a) for a in op.args]
    kwargs = {name: concrete(a) for name, a in op.kwargs}
    if info(op.target).kind is OpKind.CREATION and not op.inputs:
        kwargs["device"] = device  # import drops the device argument: a node runs on one device
    special = _OURS.get(op.target)
    return special(*args, **kwargs) if special else overload(op.target)(*args, **kwargs)


def _dropout_scale(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return x.mul(mask).mul_(scale)


_OURS = {
    "autofuse.dropout_scale.default": _dropout_scale,
    DROPOUT: torch.native_dropout,
    "aten.view.default": torch.reshape,  # an operation's result may have other strides than its fake tensor had
}


def overload(target: str) -> Any:
    """The OpOverload of a name such as ``aten.add.Tensor``."""
    return called(target) if is_librarys(target) else _torchs(target)


@functools.cache
def _torchs(target: str) -> Any:
    namespace, name, kind = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


def _restore(arg: Any, has_dtypes: bool) -> Any:
    """Turn strings back into dtypes and memory formats, and tuples into lists, which aten takes.

    ``has_dtypes``: a library's operators are called with none, their strings are strings.
    """
    if isinstance(arg, str) and has_dtypes:
        if arg in DTYPES:
            return torch_dtype(arg)
        return getattr(torch, arg) if arg in _MEMORY_FORMATS else arg
    if isinstance(arg, tuple):
        return [_restore(a, has_dtypes) for a in arg]
    return arg


# ---- the float64 reference ----------------------------------------------------------------------------


def to_float64(form: NodeForm) -> NodeForm:
    """The same operations on float64: every floating dtype of inputs, outputs and arguments is replaced."""

    def wide(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype="float64") if is_float(spec.dtype) else spec

    def operation(op: Operation) -> Operation:
        return replace(
            op,
            args=tuple(_wide_arg(a) for a in op.args),
            kwargs=tuple((k, _wide_arg(a)) for k, a in op.kwargs),
            outputs=tuple(wide(o) for o in op.outputs),
        )

    return NodeForm(
        inputs=tuple(NodeInput(item.name, wide(item.spec)) for item in form.inputs),
        operations=tuple(_with_dtype(_drop_half_to_float(operation(op))) for op in form.operations),
        outputs=form.outputs,
        symbols=form.symbols,
    )


def _wide_arg(arg: Any) -> Any:
    if isinstance(arg, str) and arg in DTYPES and is_float(arg):
        return "float64"
    if isinstance(arg, tuple):
        return tuple(_wide_arg(a) for a in arg)
    return arg


def _drop_half_to_float(op: Operation) -> Operation:
    """``_softmax(x, dim, half_to_float=True)`` takes only half inputs; in float64 there is nothing to convert."""
    if op.short_name in ("_softmax", "_log_softmax") and op.arg(2):
        return replace(op, args=(*op.args[:2], False))
    return op


def _with_dtype(op: Operation) -> Operation:
    """A ``linspace`` that names no dtype would be made in torch's default one, and its steps rounded to it."""
    if op.short_name == "linspace" and "dtype" not in dict(op.kwargs):
        return replace(op, kwargs=(*op.kwargs, ("dtype", op.outputs[0].dtype)))
    return op


def widen(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs for the float64 reference: floating-point tensors become float64 and keep their strides, others stay."""
    wide = []
    for t in tensors:
        if t.is_floating_point():
            copy = torch.empty_strided(t.shape, t.stride(), dtype=torch.float64, device=t.device)
            target, source = copy, t
            for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
                if size > 1 and stride == 0:  # elements that share memory are written once
                    target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
            target.copy_(source)
            wide.append(copy)
        else:
            wide.append(t)
    return wide
