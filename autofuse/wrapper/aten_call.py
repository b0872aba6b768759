"""Writes an aten operation in generated Python, in its cheapest spelling.

In: the name of an overload and the texts of its arguments. Out: an expression.
An OpOverload call costs twice as much as `torch.mm` and Tensor methods: 1 us of Python more on an AMD EPYC, 3 us on an
Intel Xeon (torch 2.13), so the operations that occur hundreds of times a step have a row here; the rest go through the
overload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autofuse.capture.passes.random_ops import bernoulli_mask, dropout_scale, philox_dropout
from autofuse.ir.optable import is_librarys
from autofuse.library_operators import called

Render = Callable[[Sequence[str], Mapping[str, str]], str | None]


def _method(name: str) -> Render:
    def render(args: Sequence[str], kwargs: Mapping[str, str]) -> str | None:
        return None if kwargs else f"{args[0]}.{name}({', '.join(args[1:])})"

    return render


def _function(name: str) -> Render:
    def render(args: Sequence[str], kwargs: Mapping[str, str]) -> str | None:
        return None if kwargs else f"torch.{name}({', '.join(args)})"

    return render


def _clone(args: Sequence[str], kwargs: Mapping[str, str]) -> str | None:
    return f"{args[0]}.clone({', '.join(f'{k}={v}' for k, v in kwargs.items())})" if len(args) == 1 else None


_FAST: dict[str, Render] = {
    "aten.mm.default": _function("mm"),
    "aten.bmm.default": _function("bmm"),
    "aten.addmm.default": _function("addmm"),
    # Not view: torch's fake tensors have other strides than some CPU kernels' results (dropout's, ELU's and hardtanh's
    # gradients of a transposed one, in torch 2.13), and a view that was traced behind these is a copy. As fast.
    "aten.view.default": _method("reshape"),
    "aten.t.default": _method("t"),
    "aten.transpose.int": _method("transpose"),
    "aten.permute.default": _method("permute"),
    "aten.expand.default": _method("expand"),
    "aten.unsqueeze.default": _method("unsqueeze"),
    "aten.detach.default": _method("detach"),
    "aten.select.int": _method("select"),
    "aten.split.Tensor": _function("_VF.split"),  # torch.split is Python around it
    "aten.unbind.int": _method("unbind"),
    "aten.clone.default": _clone,
    "aten.embedding.default": _function("embedding"),
    "aten.mul.Scalar": _method("mul"),
    "aten.neg.default": _method("neg"),
    "aten.relu.default": _method("relu"),
    "aten.tanh.default": _method("tanh"),
    "aten.sigmoid.default": _method("sigmoid"),
    "aten.exp.default": _method("exp"),
    "aten.add.Tensor": _function("add"),  # a number may come first, which has no such method
    "aten.sub.Tensor": _function("sub"),
    "aten.mul.Tensor": _function("mul"),
    "aten.div.Tensor": _function("div"),
}


def _native_group_norm(x: torch.Tensor, *others: Any) -> Any:
    """Eager makes the input dense first, which a trace leaves out where its fake tensor was: torch's fake tensors have
    other strides than the sum of two layouts of one image (torch 2.13)."""
    return torch.ops.aten.native_group_norm.default(x.contiguous(memory_format=_memory_format(x)), *others)


def _native_group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *others: Any) -> Any:
    form = _memory_format(x)
    dense = gradient.contiguous(memory_format=form), x.contiguous(memory_format=form)
    return torch.ops.aten.native_group_norm_backward.default(*dense, *others)


def _memory_format(x: torch.Tensor) -> torch.memory_format:
    """What eager's kernels take for a tensor's memory format (c10's ``suggest_memory_format``). Unlike
    ``torch._prims_common.suggest_memory_format``, it looks at the stride of a single image too."""
    shape, strides, least = x.shape, x.stride(), 0
    if x.is_contiguous() or x.device.type != "cpu" or x.dim() not in (4, 5) or strides[1] == 0:
        return torch.contiguous_format
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return torch.contiguous_format
        least = strides[dim] * max(shape[dim], 1)
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


_MENDED: dict[str, object] = {
    "aten.native_group_norm.default": _native_group_norm,
    "aten.native_group_norm_backward.default": _native_group_norm_backward,
}


def overload(target: str) -> object:
    """The callable behind ``namespace.name.overload``."""
    if target in _MENDED:
        return _MENDED[target]
    if target == "autofuse.bernoulli_mask.default":
        return bernoulli_mask
    if target == "autofuse.dropout_scale.default":
        return dropout_scale
    if target == "autofuse.philox_dropout.default":
        return philox_dropout
    if is_librarys(target):
        return called(target)
    namespace, name, variant = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant)


def render_call(
    target: str, args: Sequence[str], kwargs: Mapping[str, str], namespace: dict[str, object], function: object = None
) -> str:
    """Python text of the call; the objects that it needs are added to ``namespace``."""
    fast = _FAST.get(target)
    if fast is not None:
        text = fast(args, kwargs)
        if text is not None:
            namespace["torch"] = torch
            return text
    name = "op_" + target.replace(".", "_").replace(":", "_")
    if namespace.setdefault(name, function if function is not None else overload(target)) is None:
        raise LookupError(target)
    items = [*args, *(f"{k}={v}" for k, v in kwargs.items())]
    return f"{name}({', '.join(items)})"
