"""torch's own attention kernels for training, forward and backward apart: one pair for each kind of device.

In: query, key and value of [B, H, T, D], S keys for T queries, a mask to add or none. Out: the result, and the row
logsumexps (natural logarithms), from which the backward kernel recomputes the probabilities. Guarantee: `kernels_for`
gives None where no kernel takes these operands, or the script has forbidden those that do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autofuse.strategies.sdpa_training_match import DEVICES

_aten = torch.ops.aten
# The memory-efficient kernel pads the logsumexps of each head to a multiple of so many rows; that of ROCm pads none.
_EFFICIENT_ROWS = 1 if torch.version.hip else 32
_EFFICIENT_MASK = 16  # elements: all strides of a mask but the last must be multiples of this


@dataclass(frozen=True)
class Operands:
    """The operands of both passes of an attention."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H, S, D]
    value: Tensor  # [B, H, S, D]
    mask: Tensor | None  # added to the scores; broadcasts to [B, H, T, S]
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class Kernels:
    """A forward kernel and its backward kernel."""

    forward: Callable[[Operands], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Operands, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    rows: Callable[[int], int]  # T -> last dim of the logsumexps, [B, H, rows(T)]: those beyond T are padding
    takes_any_mask: bool  # whether a square mask that is not causal is cheap; else matmuls are faster
    takes: Callable[[Operands], bool] | None = None  # whether the kernels may run on these; None: on any


# ---- CPU -------------------------------------------------------------------------------------------


def _flash_forward(x: Operands) -> tuple[Tensor, Tensor]:
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
        x.query, x.key, x.value, is_causal=x.is_causal, attn_mask=x.mask, scale=x.scale
    )
    return out, sums


def _flash_backward(gradient: Tensor, x: Operands, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, x.query, x.key, x.value, out, sums, 0.0, x.is_causal, attn_mask=x.mask, scale=x.scale
    )
    return found


# ---- GPU -------------------------------------------------------------------------------------------


def _efficient_forward(x: Operands) -> tuple[Tensor, Tensor]:
    mask = _aligned(x)
    out, sums, _, _ = _aten._scaled_dot_product_efficient_attention(
        x.query, x.key, x.value, mask, True, 0.0, x.is_causal, scale=x.scale
    )
    return out, sums


def _efficient_backward(gradient: Tensor, x: Operands, out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=out.device)  # random generator state, for dropout
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        gradient, x.query, x.key, x.value, _aligned(x), out, sums, unused, unused,
        0.0, [True, True, True, False], x.is_causal, scale=x.scale,
    )  # fmt: skip
    return dq, dk, dv


def _aligned(x: Operands) -> Tensor | None:
    """The mask, if any, as the memory-efficient kernels read it: expanded to all heads, rows at aligned addresses."""
    if x.mask is None:
        return None
    keys = x.key.shape[-2]
    mask = x.mask.expand(*x.mask.shape[:-1], keys)
    if keys % _EFFICIENT_MASK or mask.stride(-1) != 1 or any(s % _EFFICIENT_MASK for s in mask.stride()[:-1]):
        aligned = mask.new_empty(*mask.shape[:-1], keys + -keys % _EFFICIENT_MASK)[..., :keys]
        mask = aligned.copy_(mask)
    return mask.expand(*x.query.shape[:-1], keys)


def _efficient_takes(x: Operands) -> bool:
    if torch.are_deterministic_algorithms_enabled():  # its backward kernel adds gradients in no fixed order
        return False
    wanted = torch.backends.cuda.SDPAParams(x.query, x.key, x.value, _aligned(x), 0.0, x.is_causal, False)
    return bool(torch.backends.cuda.can_use_efficient_attention(wanted))


_CPU = Kernels(_flash_forward, _flash_backward, lambda queries: queries, takes_any_mask=False)
_GPU = Kernels(
    _efficient_forward,
    _efficient_backward,
    lambda queries: -(-queries // _EFFICIENT_ROWS) * _EFFICIENT_ROWS,
    takes_any_mask=True,
    takes=_efficient_takes,
)
KERNELS = dict(zip(DEVICES, (_CPU, _GPU), strict=True))


def kernels_for(x: Operands) -> Kernels | None:
    """The kernels that take these operands; None where there are none."""
    found = KERNELS.get(x.query.device.type)
    return found if found is not None and (found.takes is None or found.takes(x)) else None
