"""Poolings and their gradients: rows of the table of cases.

In: nothing. Out: rows of a name, a function, example inputs and values of the symbols. Strides round sizes, so most
images have fixed ones.
"""

# ruff: noqa: E501
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.tracing import example as _t

aten = torch.ops.aten

POOLS: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("pool_max", lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [1, 1], [1, 1]), (_t(2, 3, 9, 10),), ((2, 3, 9, 10), (1, 2, 2, 3), (2, 5, 33, 37))),
    ("pool_max_then", lambda x, y: aten.max_pool2d_with_indices.default(x, [3, 1], [1, 1], [1, 0])[0].relu() * 2 + y, (_t(2, 3, 9, 10), _t(3, 1, 1)), ((2, 3, 9, 10), (1, 2, 2, 5), (2, 5, 34, 67))),
    ("pool_max_stride", lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1]), (_t(2, 3, 9, 10),), ((2, 3, 9, 10), (1, 2, 2, 3), (2, 5, 34, 67))),
    ("pool_max_dilated", lambda x: aten.max_pool2d_with_indices.default(x, [3, 2], [2, 3], [0, 0], [2, 1]), (_t(2, 3, 16, 16),), ((2, 3), (1, 1), (3, 33))),
    ("pool_max_images_last", lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1])[0] + 1, (_t(2, 8, 16, 16).contiguous(memory_format=torch.channels_last),), ()),
    ("pool_max_ceil", lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1], [1, 1], True), (_t(2, 3, 16, 16),), ((2, 3), (1, 1), (3, 33))),
    ("pool_max_half", lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2]), (_t(3, 16, 16).bfloat16(),), ()),
    ("pool_avg", lambda x: aten.avg_pool2d.default(x, [3, 3], [1, 1], [1, 1]) * 2, (_t(2, 3, 9, 10),), ((2, 3, 9, 10), (1, 2, 2, 3), (2, 5, 33, 37))),
    ("pool_avg_bare_border", lambda x: aten.avg_pool2d.default(x, [3, 3], [2, 2], [1, 1], False, False) * 2, (_t(2, 3, 9, 10),), ((2, 3, 9, 10), (1, 2, 2, 3), (2, 5, 34, 67))),
    ("pool_avg_ceil", lambda x: aten.avg_pool2d.default(x, [3, 2], [2, 3], [1, 0], True) * 2, (_t(2, 3, 16, 16),), ((2, 3), (1, 1), (3, 5))),
    ("pool_avg_adaptive", lambda x: aten._adaptive_avg_pool2d.default(x, [8, 4]) * 2, (_t(2, 3, 16, 8),), ((2, 3), (1, 1), (3, 5))),
    ("pool_avg_adaptive_backward", lambda g, x: aten._adaptive_avg_pool2d_backward.default(g, x) * 2, (_t(2, 3, 8, 8), _t(2, 3, 16, 8)), ((2, 3), (1, 1), (3, 5))),
    ("pool_avg_backward", lambda g, x: aten.avg_pool2d_backward.default(g, x, [2, 2], [2, 2], [0, 0], False, True, None) * 2, (_t(2, 3, 8, 8), _t(2, 3, 16, 16)), ((2, 3), (1, 1), (3, 5))),
    ("pool_avg_backward_border", lambda g, x: aten.avg_pool2d_backward.default(g, x, [3, 3], [2, 1], [1, 1], False, False, None) * 2, (_t(2, 3, 8, 16), _t(2, 3, 16, 16)), ((2, 3), (1, 1), (3, 5))),
    ("pool_avg_backward_ceil", lambda g, x: aten.avg_pool2d_backward.default(g, x, [2, 3], [3, 2], [0, 1], True, True, None) * 2, (_t(2, 3, 6, 9), _t(2, 3, 16, 16)), ((2, 3), (1, 1))),
    ("pool_avg_divided", lambda x: aten.avg_pool2d.default(x, [2, 3], [2, 1], [0, 0], False, True, 5), (_t(3, 16, 16).half(),), ()),
)  # fmt: skip


def _places(chosen: torch.Tensor, strides: Sequence[int], image: Sequence[int]) -> torch.Tensor:
    """A place in the image for each window: the window's first, or the one behind it along each dim."""
    found = None
    for dim, (stride, size) in enumerate(zip(strides, image, strict=True), chosen.dim() - len(image)):
        shape = [1] * chosen.dim()
        shape[dim] = chosen.shape[dim]
        own = torch.arange(chosen.shape[dim]).view(shape) * stride + (chosen > 0)
        found = own if found is None else found * size + own
    return found


def _added(mean: torch.Tensor, largest: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return mean + largest, places


POOLS_BY_AXES: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    (
        "pool_max_3d",
        lambda x: aten.max_pool3d_with_indices.default(x, [2, 2, 3], [1, 2, 2], [0, 1, 1]),
        (_t(2, 3, 8, 8, 8),),
        ((2, 3), (1, 1)),
    ),
    (
        "pool_avg_3d",
        lambda x: aten.avg_pool3d.default(x, [2, 3, 2], [2, 2, 1], [1, 0, 0], False, False) * 2,
        (_t(2, 3, 8, 8, 8),),
        ((2, 3), (1, 1)),
    ),
    (
        "pool_adaptive_uneven",
        lambda x: _added(
            aten._adaptive_avg_pool2d.default(x, [3, 8]) * 2, *aten.adaptive_max_pool2d.default(x, [3, 8])
        ),
        (_t(2, 3, 8, 16),),
        ((2, 3), (1, 1), (3, 5)),
    ),
    (
        "pool_adaptive_uneven_3d",
        lambda x: _added(
            aten._adaptive_avg_pool3d.default(x, [3, 4, 16]) * 2, *aten.adaptive_max_pool3d.default(x, [3, 4, 16])
        ),
        (_t(2, 3, 8, 8, 8),),
        ((2, 3), (1, 1)),
    ),
    (
        "pool_adaptive_uneven_backward",
        lambda g, x: aten._adaptive_avg_pool2d_backward.default(g, x) * 2,
        (_t(2, 3, 6, 16), _t(2, 3, 8, 8)),
        ((2, 3), (1, 1), (3, 5)),
    ),
    (
        "pool_adaptive_backward_3d",
        lambda g, s, x: (
            aten._adaptive_avg_pool3d_backward.default(g, x)
            + aten.adaptive_max_pool3d_backward.default(g, x, _places(s, (2, 2, 2), (16, 16, 16)))
        ),
        (_t(2, 3, 8, 8, 8), _t(2, 3, 8, 8, 8), _t(2, 3, 16, 16, 16)),
        ((2, 3), (1, 1)),
    ),
    (
        "pool_backward_3d",
        lambda g, s, x: (
            aten.avg_pool3d_backward.default(g, x, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None)
            + aten.max_pool3d_with_indices_backward.default(
                g, x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, _places(s, (2, 2, 2), (16, 16, 16))
            )
        ),
        (_t(2, 3, 8, 8, 8), _t(2, 3, 8, 8, 8), _t(2, 3, 16, 16, 16)),
        ((2, 3), (1, 1)),
    ),
    (
        "pool_avg_backward_made",
        lambda g, y, x: aten.avg_pool2d_backward.default(
            aten.threshold_backward.default(g * 2, y, 0), x, [3, 2], [2, 2], [1, 0], False, False, None
        ),
        (_t(2, 3, 8, 8), _t(2, 3, 8, 8), _t(2, 3, 16, 16)),
        ((2, 3), (1, 1), (3, 5)),
    ),
    (
        "pool_max_backward",
        lambda g, s, x: (
            aten.max_pool2d_with_indices_backward.default(
                g * 2, x, [3, 3], [2, 2], [1, 1], [1, 1], False, _places(s, (2, 2), (16, 16))
            )
            + aten.adaptive_max_pool2d_backward.default(g, x, _places(s, (2, 2), (16, 16)))
        ),
        (_t(2, 3, 8, 8), _t(2, 3, 8, 8), _t(2, 3, 16, 16)),
        ((2, 3), (1, 1), (3, 5)),
    ),
)
