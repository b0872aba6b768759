"""Optimizers' steps inside of an autocast region, behind which eager goes on with casts of the weights before.

In: the parameters of such a step. Out: nothing; autocast has their casts, as after a forward pass in eager. Autocast
keeps a cast of a weight until its outermost region ends, also where the weight changes meanwhile: a loop of steps in
one region reads the same weights all along. A captured graph casts in each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def casts_are_kept() -> bool:
    """Whether a weight that is cast now keeps its cast."""
    return bool(torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled())


def keep_casts(params: Sequence[Any]) -> None:
    """Let autocast cast the weights as they are now; it goes by itself which it can keep. 20 us a weight."""
    with torch.enable_grad():  # a cast that is kept has gradients, or never will
        for param in params:
            if isinstance(param, torch.nn.Parameter) and param.dim() and param.dtype is torch.float32:
                torch.matmul(param, param.new_zeros(param.shape[-1], 0))
