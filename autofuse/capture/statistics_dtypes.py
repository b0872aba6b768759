"""The dtypes that batch norm's statistics have on a CPU, where torch's tracing says others.

In: a graph that AOTAutograd has traced. Out: the same graph, in which 16-bit batch norms have the dtypes that aten's
kernels return: of float32 parameters, as under autocast, statistics are float32, and traced as 16 bits (torch 2.13).
Guarantee: these are asked of the kernels themselves, on a tensor of two elements, once for each combination.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_NORMS = frozenset(
    [
        _aten._native_batch_norm_legit_functional.default,
        _aten._native_batch_norm_legit.no_stats,
    ]
)
_HALVES = (torch.bfloat16, torch.float16)


def correct_statistics(graph: fx.Graph) -> None:
    """Give each batch norm of 16-bit elements the dtypes of its results."""
    for node in graph.nodes:
        if node.target not in _NORMS:
            continue
        image = node.args[0].meta["val"]
        if image.device.type != "cpu" or image.dtype not in _HALVES:
            continue
        found = _results(node.target, tuple(map(_dtype, node.args)), image.dim())
        traced = node.meta["val"]
        node.meta["val"] = tuple(
            value if value.dtype == dtype else value.to(dtype) for value, dtype in zip(traced, found, strict=True)
        )
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = node.meta["val"][user.args[1]]


def _dtype(argument: Any) -> Any:
    return argument.meta["val"].dtype if isinstance(argument, fx.Node) else argument


@functools.cache
def _results(target: Any, arguments: tuple[Any, ...], rank: int) -> tuple[torch.dtype, ...]:
    """The dtypes of the kernel's results; ``arguments``: dtypes in place of tensors."""
    sizes = [(2,) + (1,) * (rank - 1)] + [(1,)] * len(arguments)
    with _disable_current_modes(), torch.no_grad():
        real = [
            torch.ones(size, dtype=argument) if isinstance(argument, torch.dtype) else argument
            for size, argument in zip(sizes, arguments, strict=False)
        ]
        return tuple(result.dtype for result in target(*real))
