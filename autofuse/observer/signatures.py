"""Names the tensor arguments of a call, and sums a call up in a key that is cheap to look up.

In: ``args`` and ``kwargs`` of a root call. Out: ``call_signature`` (a hashable key) and ``tensor_leaves`` ((argument
path, shape) pairs, such as ``("kwargs['mask']", (4, 128))``). Guarantee: nothing is raised, whatever the arguments are;
no tensor is kept, read or synchronised with, and no code of the script runs. The cost of a call is bounded: containers
are searched up to a total number of values, and lists that begin and end with numbers count as one value. Tensors
without plain sizes (nested, symbolic) are left out.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch

from autofuse.ir.steps import REQUIRES_GRAD
from autofuse.observer.statistics import Leaf

_MAX_VALUES = 64  # looked at inside of containers, in one call
_MAX_DEPTH = 5
_Tensor = torch.Tensor
_PLAIN = {torch.Tensor, torch.nn.Parameter}  # whose shapes are numbers, but for nested ones, which raise
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_SCALARS = {type(None), int, float, bool, str, complex, bytes, torch.dtype, torch.device}


def call_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that is equal for calls with equal tensor shapes in equal places. About 1 us for a plain call."""
    try:
        return _signature(args, kwargs, _shape)
    except Exception:  # of a nested tensor, or a container that changes meanwhile
        try:
            return _signature(args, kwargs, _shape_or_type)
        except Exception:
            return ()


def training_signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """`call_signature`, and which arguments need gradients: calls that differ in that have different graphs."""
    key = call_signature(args, kwargs)
    values = (*args, *kwargs.values()) if kwargs else args
    needed = [index for index, value in enumerate(values) if type(value) in _PLAIN and value.requires_grad]
    return (key, REQUIRES_GRAD, *needed) if needed else key


def _signature(args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: Any) -> tuple[Any, ...]:
    key: list[Any] = []
    left = None
    for value in args:
        kind = type(value)
        if kind in _PLAIN:
            key.append(shape(value))
        elif kind in _SCALARS:
            key.append(None)
        else:
            left = left or [_MAX_VALUES]
            key.append(_nested_signature(value, shape, left, 0))
    for name, value in kwargs.items():
        key.append(name)
        kind = type(value)
        if kind in _PLAIN:
            key.append(shape(value))
        elif kind in _SCALARS:
            key.append(None)
        else:
            left = left or [_MAX_VALUES]
            key.append(_nested_signature(value, shape, left, 0))
    return tuple(key)


def _shape(tensor: torch.Tensor) -> torch.Size:
    return tensor.shape


def _shape_or_type(tensor: torch.Tensor) -> Any:
    """The type where there are no plain sizes. A subclass is not told that it is looked at."""
    try:
        with torch._C.DisableTorchFunction():
            shape = tensor.shape
        return shape if all(type(size) is int for size in shape) else type(tensor)
    except Exception:
        return type(tensor)


def without_sizes(signature: Any) -> Any:
    """The signature with -1 for each size: calls that differ in sizes only have equal ones."""
    if isinstance(signature, torch.Size):
        return torch.Size([-1] * len(signature))
    if isinstance(signature, tuple):
        return tuple(without_sizes(item) for item in signature)
    return signature


def has_plain_sizes(signature: Any) -> bool:
    """Whether all tensors have: a nested one stands for itself by its type."""
    if isinstance(signature, tuple) and not isinstance(signature, torch.Size):
        return all(map(has_plain_sizes, signature))
    return not isinstance(signature, type)


def count_elements(signature: Any) -> int:
    """Elements of all tensors together, at least 1: how much work a call is, where nothing better is known."""
    return max(1, _elements(signature))


def _elements(signature: Any) -> int:
    if isinstance(signature, torch.Size):
        return int(signature.numel())
    return sum(_elements(item) for item in signature) if isinstance(signature, tuple) else 0


def _nested_signature(value: Any, shape: Any, left: list[int], depth: int) -> Any:
    if isinstance(value, _Tensor):
        if type(value) in _PLAIN:
            return shape(value)
        # A subclass without a dispatch of its own: AOTAutograd takes it for a plain tensor, and torch then refuses it.
        return type(value) if type(value).__torch_dispatch__ is _NO_DISPATCH else _shape_or_type(value)
    if _is_leaf(value) or depth > _MAX_DEPTH:
        return None
    found: list[Any] = []
    for step, child in _children(value):
        left[0] -= 1
        if left[0] < 0:
            break
        kind = type(child)
        if kind in _PLAIN:
            below = shape(child)
        else:
            below = None if kind in _SCALARS else _nested_signature(child, shape, left, depth + 1)
        found.append((step if type(step) is str else None, below))
    return tuple(found) or None


def tensor_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """(argument path, shape) of every tensor among the arguments, in order."""
    tensors = tensors_by_path(args, kwargs)
    with torch._C.DisableTorchFunction():
        return [(path, tuple(tensor.shape)) for path, tensor in tensors.items()]


def tensors_by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments under their paths; inside of containers as many as a signature sees.

    Symbolic sizes (jagged tensors, tracing) must not be pinned down by looking at them: such tensors are left out.
    """
    found: dict[str, torch.Tensor] = {}
    left = [_MAX_VALUES]
    try:
        for index, value in enumerate(args):
            _collect(f"args[{index}]", value, found, left, 0)
        for name, value in kwargs.items():
            _collect(f"kwargs[{name!r}]", value, found, left, 0)
    except Exception:  # of a container that changes meanwhile
        return found
    return found


def _collect(path: str, value: Any, found: dict[str, torch.Tensor], left: list[int], depth: int) -> None:
    if isinstance(value, _Tensor):
        if isinstance(_shape_or_type(value), torch.Size):
            found[path] = value
        return
    if _is_leaf(value) or depth > _MAX_DEPTH:
        return
    for step, child in _children(value):
        left[0] -= 1
        if left[0] < 0:
            return
        if type(child) not in _SCALARS:
            _collect(path + _as_text(value, step), child, found, left, depth + 1)


def _as_text(container: Any, step: Any) -> str:
    is_field = isinstance(container, tuple) or not isinstance(container, dict | UserDict | list)
    return f".{step}" if is_field and isinstance(step, str) else f"[{step!r}]"


def _is_leaf(value: Any, depth: int = 0) -> bool:
    """Whether nothing is to be found in it: numbers, and lists of numbers or of such lists, by both of their ends."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is list or kind is tuple:
        return not value or depth > _MAX_DEPTH or (_is_leaf(value[0], depth + 1) and _is_leaf(value[-1], depth + 1))
    return False


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    """(key, field or index, child) of a container; nothing for a leaf."""
    kind = type(value)
    if kind is dict:
        return dict.items(value)
    if kind is list or kind is tuple:
        return enumerate(value)
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, dict):  # not any Mapping: reading a lazy one could do work, as methods of the script's own
        return dict.items(value)
    if isinstance(value, tuple):
        names = getattr(type(value), "_fields", None)
        return zip(names, value, strict=False) if names is not None else enumerate(tuple.__iter__(value))
    if isinstance(value, list):
        return enumerate(list.__iter__(value))
    if hasattr(type(value), "__dataclass_fields__"):
        return _fields(value)
    return ()


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    present = getattr(value, "__dict__", {})
    for field in fields(value):
        yield field.name, present.get(field.name) if field.name in present else getattr(value, field.name, None)
