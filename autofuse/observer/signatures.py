"""Names the tensor arguments of a call, and sums a call up in a key that is cheap to look up.

In: ``args`` and ``kwargs`` of a root call. Out: ``call_signature`` (a hashable key) and ``tensor_leaves``
((argument path, shape) pairs, such as ``("kwargs['mask']", (4, 128))``).
Guarantee: no tensor is kept, read or synchronised with; unusual containers are looked into, unusual tensors left out.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from autofuse.observer.statistics import Leaf

_MAX_LEAVES = 64
_MAX_DEPTH = 5
_Tensor = torch.Tensor
_SCALARS = {type(None), int, float, bool, str, complex, bytes, torch.dtype, torch.device}


def call_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that is equal for calls with equal tensor shapes in equal places. About 1 us for a plain call."""
    key: list[Any] = []
    for value in args:
        if isinstance(value, _Tensor):
            key.append(value.shape)
        else:
            key.append(None if type(value) in _SCALARS else _nested_signature(value, 0))
    if kwargs:
        for name, value in kwargs.items():
            key.append(name)
            if isinstance(value, _Tensor):
                key.append(value.shape)
            else:
                key.append(None if type(value) in _SCALARS else _nested_signature(value, 0))
    return tuple(key)


def without_sizes(signature: Any) -> Any:
    """The signature with -1 for each size: calls that differ in sizes only have equal ones."""
    if isinstance(signature, torch.Size):
        return torch.Size([-1] * len(signature))
    if isinstance(signature, tuple):
        return tuple(without_sizes(item) for item in signature)
    return signature


def count_elements(signature: Any) -> int:
    """Elements of all tensors together, at least 1: how much work a call is, where nothing better is known."""
    return max(1, _elements(signature))


def _elements(signature: Any) -> int:
    if isinstance(signature, torch.Size):
        return int(signature.numel())
    return sum(_elements(item) for item in signature) if isinstance(signature, tuple) else 0


def _nested_signature(value: Any, depth: int) -> Any:
    if isinstance(value, _Tensor):
        return value.shape
    if type(value) in _SCALARS or depth > _MAX_DEPTH:
        return None
    children = _children(value)
    if not children:
        return None
    return tuple([(step, _nested_signature(child, depth + 1)) for step, child in children[:_MAX_LEAVES]])


def tensor_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """(argument path, shape) of every tensor among the arguments, in order.

    Symbolic sizes (jagged tensors, tracing) must not be pinned down by looking at them: such tensors are left out.
    """
    return [
        (path, tuple(tensor.shape))
        for path, tensor in tensors_by_path(args, kwargs).items()
        if all(type(size) is int for size in tensor.shape)
    ]


def tensors_by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments under their paths, at most 64 of them."""
    found: dict[str, torch.Tensor] = {}
    for index, value in enumerate(args):
        _collect(f"args[{index}]", value, found, 0)
    for name, value in kwargs.items():
        _collect(f"kwargs[{name!r}]", value, found, 0)
    return found


def _collect(path: str, value: Any, found: dict[str, torch.Tensor], depth: int) -> None:
    if len(found) >= _MAX_LEAVES or depth > _MAX_DEPTH or type(value) in _SCALARS:
        return
    if isinstance(value, _Tensor):
        found[path] = value
        return
    for step, child in _children(value)[:_MAX_LEAVES]:
        _collect(path + step, child, found, depth + 1)


def _children(value: Any) -> list[tuple[str, Any]]:
    """(path step, child) of a container; nothing for a leaf."""
    if isinstance(value, (dict, UserDict)):  # not any Mapping: reading a lazy one could do work
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in fields(value)]
    return []
