"""The dtypes that the statistics of norms have on a CPU, where torch's tracing says others.

In: a graph that AOTAutograd has traced. Out: the same graph, in which norms of 16-bit tensors have the dtypes that
aten's kernels return: with float32 parameters, as under autocast, statistics are float32, and traced as 16 bits; the
gradient of a group norm has 16 bits, and is traced as float32 and cast (torch 2.13). Guarantee: these are asked of the
kernels themselves, on a few elements, once for each combination.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
_Made = Callable[[int], torch.Tensor | None]  # the operator's argument at a place: a vector of two elements


def _batch_norm(made: _Made) -> Any:
    return _aten._native_batch_norm_legit_functional.default(_image(made), *map(made, range(1, 5)), True, 0.1, 1e-5)


def _batch_norm_without(made: _Made) -> Any:
    return _aten._native_batch_norm_legit.no_stats(_image(made), made(1), made(2), True, 0.1, 1e-5)


def _layer_norm(made: _Made) -> Any:
    return _aten.native_layer_norm.default(_image(made), [2], made(2), made(3), 1e-5)


def _group_norm(made: _Made) -> Any:
    return _aten.native_group_norm.default(_image(made), made(1), made(2), 2, 2, 1, 1, 1e-5)


def _group_norm_backward(made: _Made) -> Any:
    mean, deviation = (_image(made, place)[:, :1] for place in (2, 3))
    sizes = (2, 2, 1, 1)
    return _aten.native_group_norm_backward.default(
        _image(made), _image(made, 1), mean, deviation, made(4), *sizes, [True] * 3
    )


def _image(made: _Made, place: int = 0) -> torch.Tensor:
    x = made(place)
    assert x is not None
    return x.expand(2, 2).contiguous()


_CALLS: dict[Any, Callable[[_Made], Any]] = {
    _aten._native_batch_norm_legit_functional.default: _batch_norm,
    _aten._native_batch_norm_legit.no_stats: _batch_norm_without,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}


def correct_statistics(graph: fx.Graph) -> None:
    """Give each norm of 16-bit elements, and gradient of one, the dtypes of its results."""
    for node in graph.nodes:
        if node.target not in _CALLS:
            continue
        image = node.args[0].meta["val"]
        if image.device.type != "cpu" or image.dtype not in _HALVES:
            continue
        found = _results(node.target, tuple(map(_dtype, node.args)))
        node.meta["val"] = tuple(
            value if value is None or value.dtype == dtype else value.to(dtype)
            for value, dtype in zip(node.meta["val"], found, strict=True)
        )
        for user in node.users:
            if user.target is operator.getitem:
                _pass_on(user, node.meta["val"][user.args[1]])


def _pass_on(node: fx.Node, value: Any) -> None:
    """A value's dtype to itself and to what backward sees of it."""
    node.meta["val"] = value
    for user in node.users:
        if user.target is _aten.detach.default:
            _pass_on(user, value)


def _dtype(argument: Any) -> torch.dtype | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


@functools.cache
def _results(target: Any, dtypes: tuple[torch.dtype | None, ...]) -> tuple[torch.dtype, ...]:
    """The dtypes of the kernel's results; ``dtypes``: of its arguments, None for those that are no tensors."""

    def made(place: int) -> torch.Tensor | None:
        dtype = dtypes[place] if place < len(dtypes) else None
        return None if dtype is None else torch.ones(2, dtype=dtype)

    with _disable_current_modes(), torch.no_grad():
        return tuple(result.dtype for result in _CALLS[target](made))
