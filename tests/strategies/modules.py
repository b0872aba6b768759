"""Functions and modules whose graphs have groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

T = torch.Tensor


def linear(activation: Callable[[T], T]) -> Callable[..., T]:
    return lambda x, w, b: activation(F.linear(x, w, b))


class Block(nn.Module):
    """Convolution, batch norm, residual, activation."""

    def __init__(self, dims: int = 2, bias: bool = True, groups: int = 1, affine: bool = True, **how: Any) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1]
        self.conv = conv(8, 8, 3, bias=bias, groups=groups, padding=how.pop("padding", 1), **how)
        self.norm = norm(8, affine=affine)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: T) -> T:
        return torch.relu(self.norm(self.conv(x)))


def by_hand(q: T, k: T, v: T) -> T:
    return torch.softmax(q @ k.transpose(-2, -1) * (1.0 / math.sqrt(16)), -1) @ v


def heads(function: Callable[..., T]) -> Callable[..., T]:
    def split(q: T, k: T, v: T, *rest: T) -> T:
        q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in (q, k, v))
        return function(q, k, v, *rest).transpose(1, 2).contiguous().flatten(2)

    return split


def qkv(*shape: int) -> list[T]:
    return [torch.randn(shape) for _ in range(3)]
