"""Attention in training on the device: torch's own kernels, as autofuse calls them, against float64.

Out: one row a mask and dtype: whether the kernels ran as a whole, and how far off the result and the three gradients
are in units of eager's own error. The rule is the tuner's (``tuner/verify.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autofuse.strategies.sdpa_calls import Rule, backward, backward_by_products, by_products, forward
from autofuse.tuner.verify import Wrong, answer, output_error

T = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((2, 3, 64, 64), (2, 3, 77, 77), (1, 2, 33, 130))  # batches, heads, queries, keys
WIDTH = 64


def _padding(batches: int, heads: int, queries: int, keys: int, device: torch.device) -> T:
    lengths = torch.arange(1, batches + 1, device=device).view(-1, 1, 1, 1) * keys // batches
    return torch.arange(keys, device=device).view(1, 1, 1, -1) >= lengths


def _causal(batches: int, heads: int, queries: int, keys: int, device: torch.device) -> T:
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).triu(1)


MASKS: dict[str, Callable[..., T | None]] = {"none": lambda *_: None, "causal": _causal, "padding": _padding}


def rows(device: torch.device) -> Iterator[dict[str, Any]]:
    for name, make in MASKS.items():
        for dtype in DTYPES:
            row: dict[str, Any] = {"case": f"attention in training, {name}", "dtype": str(dtype).removeprefix("torch.")}
            try:
                found = [_check(size, make(*size, device), dtype, device) for size in SIZES]
            except Wrong as wrong:
                yield row | {"outcome": "wrong", "detail": str(wrong)}
                continue
            except Exception as error:
                yield row | {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"}
                continue
            if None in found:
                yield row | {"outcome": "refused", "detail": f"left to products for sizes {found.count(None)} times"}
            else:
                yield row | {"outcome": "right", "error_over_eager": round(max(e for e in found if e is not None), 3)}


def _check(size: tuple[int, int, int, int], mask: T | None, dtype: torch.dtype, device: torch.device) -> float | None:
    """The largest error over eager's; None where torch's kernels were not used."""
    batches, heads, queries, keys = size
    rule = Rule((batches, heads), 1 / math.sqrt(WIDTH), -math.inf)
    shapes = [(queries, WIDTH), (WIDTH, keys), (keys, WIDTH), (queries, WIDTH)]
    query, key, value, gradient = (torch.randn(batches * heads, *shape, device=device).to(dtype) for shape in shapes)
    made = forward(query, key, value, None, mask, rule)
    if made is None:
        return None
    found = made[0], *backward(made[1], gradient, query, key, value, None, mask, rule)
    eager, exact = (
        _products(*(t.to(d) for t in (gradient, query, key, value)), mask, rule) for d in (dtype, torch.float64)
    )
    triples = zip(found, eager, exact, strict=True)
    return max(output_error(i, ours, answer(theirs, wide), False) for i, (ours, theirs, wide) in enumerate(triples))


def _products(gradient: T, query: T, key: T, value: T, mask: T | None, rule: Rule) -> tuple[T, ...]:
    out, probabilities = by_products(query, key, value, None, mask, rule)
    return out, *backward_by_products(probabilities, gradient, query, key, value, None, mask, rule)
