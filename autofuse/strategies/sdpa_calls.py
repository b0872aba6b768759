"""Calls of torch's own attention (SDPA), for the rewrites of hand-written attention.

In: query [N, T, D], key [N, D, S] (transposed, as for a matmul), value [N, S, D], where N is batch times heads, as one
dim or two; a scale, masks. Out: the result; in training also the tensor to save for backward, and from it the three
gradients. Guarantee: NaN and infinities are where eager's are. Where torch's kernel would lose them, or could overflow,
the matmuls run one by one.

The saved tensor replaces the probabilities among the saved tensors of a graph. `is_kept` tells the two apart: instead
of N*T*S probabilities it is one dim of bytes with the row logsumexps and the result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.strategies.sdpa_kernels import KERNELS, Kernels, Operands, kernels_for
from autofuse.strategies.sdpa_match import LEAST_FILL

LARGEST_SCORE = 1e37  # far below scores at which sums of float32 products overflow
# The backward pass recomputes the probabilities from the row logsumexps. Below this bound, rounding a logsumexp changes
# a probability by at most 4 units in the last place; eager's have no such error.
LARGEST_LOGARITHM = 16.0


@dataclass(frozen=True)
class Rule:
    """The parts of an attention other than its matmuls."""

    lead: tuple[int, ...]  # batches and heads, or both in one
    scale: float
    fill: float  # the value of masked scores


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    rule: Rule,
    heads_last: bool,
) -> Tensor:
    """Attention of [B, H, T, D]; the result is [B, T, H, D], or [B*H, T, D]."""
    scale, fill = rule.scale, rule.fill
    batches, heads = rule.lead if len(rule.lead) == 2 else (1, rule.lead[0])
    q, k, v = (t if t.dim() == 4 else t.unflatten(0, (batches, heads)) for t in (query, key.transpose(-1, -2), value))
    if len(rule.lead) == 1:
        bias, masked = (t.unsqueeze(0) if t is not None and t.dim() == 3 else t for t in (bias, masked))
    if q.device.type == "cpu" and not stays_finite(q, k, v, scale, bias):
        scores = q @ k.transpose(-1, -2) * scale
        scores = scores if bias is None else scores + bias
        scores = scores if masked is None else scores.masked_fill(masked, fill)
        out = torch.softmax(scores, -1) @ v
    elif q.device.type == "cpu" and is_causal(bias, masked):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    else:
        out = _torch_attention(q, k, v, scale, additive_mask(q.dtype, q.device, bias, masked, fill))
    return out.transpose(1, 2) if heads_last else out.reshape(-1, *out.shape[2:])


def _torch_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if mask is not None and (mask.device.type != "cpu" or has_empty_rows(mask)):
        empty = _is_empty(mask)
        out = out.masked_fill(empty, float("nan"))  # torch's attention gives 0 here, a softmax does not
    return out


# ---- masks -----------------------------------------------------------------------------------------


def additive_mask(
    dtype: torch.dtype, device: torch.device, bias: Tensor | None, masked: Tensor | None, fill: float
) -> Tensor | None:
    """The tensor to add to scores, for both kinds of mask. Adding a fill below all scores replaces them."""
    if masked is None:
        return bias
    mask = torch.zeros((), dtype=dtype, device=device).masked_fill(masked, fill)
    return mask if bias is None else mask + bias


def _is_empty(mask: Tensor) -> Tensor:
    return (mask == float("-inf")).all(-1, keepdim=True)


def has_empty_rows(mask: Tensor) -> bool:
    """Whether some row has no key left, for which a softmax gives NaN. Waits for a GPU."""
    return bool(_is_empty(mask).any())


def is_square(mask: Tensor | None) -> bool:
    """Whether a mask is the same for all heads and has a row for each key: then it is probably causal."""
    return mask is not None and mask.dim() >= 2 and mask.numel() == mask.shape[-1] ** 2 == mask.shape[-2] ** 2


def is_causal(bias: Tensor | None, masked: Tensor | None) -> bool:
    """Whether the mask hides from each query exactly the later keys. Waits for a GPU.

    The test costs a pass over the mask; a causal mask saves half of the scores of every head.
    """
    mask = bias if masked is None else masked
    if mask is None or not is_square(mask) or (bias is not None and masked is not None):
        return False
    size = mask.shape[-1]
    hidden = _behind(size, mask.device)
    if mask.dtype is torch.bool:
        return bool(torch.equal(mask.view(size, size), hidden))
    fill = float(mask.view(-1)[size - 1])
    wanted = torch.zeros((), dtype=mask.dtype, device=mask.device).masked_fill(hidden, fill)
    return fill <= LEAST_FILL and bool(torch.equal(mask.view(size, size), wanted))


@functools.lru_cache(maxsize=2)  # for the sizes of the last calls
def _behind(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)


def stays_finite(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> bool:
    """Whether no score can be NaN or infinite: torch's CPU kernel has an exponential that loses NaN (torch 2.13).

    A pass over q, k and v, which is cheap beside one over all scores. Waits for a GPU.
    """
    sides = [side for t in (q, k, v) for side in (torch.aminmax(t) if t.numel() else (t.new_zeros(()),) * 2)]
    largest = [mask.amax()] if mask is not None and mask.numel() else []
    found = _numbers([*sides, *largest])  # NaN in both bounds if a tensor holds one
    bound = abs(scale) * q.shape[-1] * max(-found[0], found[1]) * max(-found[2], found[3])
    return bound < LARGEST_SCORE and all(map(math.isfinite, found[4:6])) and all(m < LARGEST_SCORE for m in found[6:])


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    """The values of one-element tensors; waits for a GPU once."""
    if tensors[0].device.type == "cpu":
        return [float(t) for t in tensors]
    found: list[float] = torch.stack([t.float() for t in tensors]).tolist()
    return found


# ---- training --------------------------------------------------------------------------------------


def is_kept(tensor: Tensor) -> bool:
    """Whether a tensor in place of the probabilities is the one that `forward` saves."""
    return bool(tensor.dim() == 1)


def forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, masked: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor] | None:
    """The result and the tensor to save; None where the matmuls should run, and during CUDA graph capture.

    The matmuls should run where torch's kernel could lose NaN or digits, and, on a CPU, where a square mask is not
    causal: there the kernel computes all scores and is slower than the matmuls. For a single key the gradients of query
    and key are exactly 0, which torch's kernel only approximates.
    """
    if (
        (query.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        or not query.numel()
        or not value.numel()
        or value.shape[-2] == 1
        or not stays_finite(query, key, value, rule.scale, bias)
    ):
        return None
    operands = _operands(query, key, value, bias, masked, rule)
    kernels = kernels_for(operands)
    if kernels is None or not _is_worth_masking(operands.mask, kernels):
        return None
    out, sums = kernels.forward(operands)
    low, high = _numbers(torch.aminmax(sums[..., : query.shape[-2]]))
    if not -LARGEST_LOGARITHM <= low <= high <= LARGEST_LOGARITHM:  # nor where there is NaN
        return None
    return out.reshape(*query.shape[:-1], value.shape[-1]), _pack(sums, out)


def _is_worth_masking(mask: Tensor | None, kernels: Kernels) -> bool:
    return mask is None or not ((is_square(mask) and not kernels.takes_any_mask) or has_empty_rows(mask))


def by_products(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, masked: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """The result and the probabilities, as eager computes them."""
    probabilities = _probabilities(query, key, bias, masked, rule)
    return probabilities.flatten(0, -3) @ value, probabilities


def backward(
    kept: Tensor,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key (transposed like the key) and value, from the gradient of the result."""
    if is_kept(kept):
        if stays_finite(gradient, value, value, 1.0, None):
            operands = _operands(query, key, value, bias, masked, rule)
            kernels = KERNELS[query.device.type]
            sums, out = _unpack(kept, operands, kernels)
            found = kernels.backward(gradient.reshape(out.shape), operands, out, sums)
            # Contiguous, like matmuls' results; the key's is transposed.
            dq, dk, dv = (t.flatten(0, 1).contiguous() for t in found)
            return dq, dk.mT.contiguous(), dv
        return backward_by_products(None, gradient, query, key, value, bias, masked, rule)
    return backward_by_products(kept, gradient, query, key, value, bias, masked, rule)


def backward_by_products(
    probabilities: Tensor | None,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same gradients as eager computes them; missing probabilities are recomputed."""
    kept = _probabilities(query, key, bias, masked, rule) if probabilities is None else probabilities
    grads = (gradient @ value.mT).view(kept.shape)
    scores = torch._softmax_backward_data(grads, kept, -1, kept.dtype)
    if masked is not None:
        scores = scores.masked_fill(masked, 0.0)
    scores = (scores * rule.scale).flatten(0, -3)
    return scores @ key.mT, query.mT @ scores, kept.flatten(0, -3).mT @ gradient


def _probabilities(query: Tensor, key: Tensor, bias: Tensor | None, masked: Tensor | None, rule: Rule) -> Tensor:
    scores = (query @ key).unflatten(0, rule.lead) * rule.scale
    if bias is not None:
        scores = scores + bias
    if masked is not None:
        scores = scores.masked_fill(masked, rule.fill)
    return torch.softmax(scores, -1)


def _operands(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, masked: Tensor | None, rule: Rule
) -> Operands:
    """The operands for torch's kernel.

    Heads become batches where the mask allows it, so that the kernel's result, which has heads last, needs no copy.
    """
    lead: Sequence[int] = (query.shape[0], 1)
    causal = is_causal(bias, masked)
    mask = None if causal else additive_mask(query.dtype, query.device, bias, masked, rule.fill)
    if mask is not None:
        mask = mask.view(*[1] * (len(rule.lead) + 2 - mask.dim()), *mask.shape)
        if len(rule.lead) == 1:
            mask = mask.unsqueeze(1)
        elif mask.shape[:2] != (1, 1):
            lead = rule.lead
    q, k, v = (_with_rows(t).unflatten(0, lead) for t in (query, key.mT, value))
    return Operands(q, k, v, mask, causal, rule.scale)


def _with_rows(tensor: Tensor) -> Tensor:
    """Make the last dim contiguous; torch's kernel takes any other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _pack(sums: Tensor, out: Tensor) -> Tensor:
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in (sums, out)])


def _unpack(kept: Tensor, operands: Operands, kernels: Kernels) -> tuple[Tensor, Tensor]:
    query, value = operands.query, operands.value
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    shape = (*query.shape[:-2], kernels.rows(query.shape[-2]))
    at = math.prod(shape) * dtype.itemsize
    sums = kept[:at].view(dtype).view(shape)
    return sums, kept[at:].view(query.dtype).view(*query.shape[:-1], value.shape[-1])


def both_passes(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    masked: Tensor | None,
    rule: Rule,
) -> tuple[Tensor, ...]:
    """The result and the three gradients, for a race of both passes."""
    out, kept = forward(query, key, value, bias, masked, rule) or by_products(query, key, value, bias, masked, rule)
    return out, *backward(kept, gradient, query, key, value, bias, masked, rule)
