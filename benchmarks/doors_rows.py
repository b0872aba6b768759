"""Thirty functions as people write them: losses, activations, norms, pieces of attention, blocks, update rules.

Ten are called forward, ten call ``backward()`` themselves, of ten the backward pass follows outside. ``inputs(rows)``
makes the arguments; those that train are leaves with gradients. `SIZES` are the rows of the three sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

Tensors = tuple[torch.Tensor, ...]
SIZES = {"small": 64, "middle": 512, "large": 4096}
WIDTH = 512
KINDS = ("forward", "inside", "outside")


@dataclass(frozen=True)
class Row:
    """One function."""

    function: Callable[..., Any]
    kind: str  # of KINDS
    inputs: Callable[[int], Tensors]

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.function.__name__}"


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _leaf(*shape: int) -> torch.Tensor:
    return (torch.randn(shape) / math.sqrt(shape[-1])).requires_grad_()


# ---- forward ----------------------------------------------------------------------------------------------------


def bias_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def add_layer_norm(x, residual, weight, bias):
    return F.layer_norm(x + residual, (x.shape[-1],), weight, bias)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def swiglu(gate, up):
    return F.silu(gate) * up


def rotary(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def masked_softmax(scores, mask):
    return torch.softmax((scores * 0.125).masked_fill(mask, float("-inf")), -1)


def adam_update(value, gradient, first, second):
    first = first * 0.9 + gradient * 0.1
    second = second * 0.999 + gradient * gradient * 0.001
    return value - 1e-3 * first / (second.sqrt() + 1e-8), first, second


def clip_by_norm(gradient):
    norm = gradient.norm(dim=-1, keepdim=True)
    return gradient * (1.0 / (norm + 1e-6)).clamp(max=1.0)


def mlp(x, up, up_bias, down, down_bias):
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def conv_bn_relu(x, weight, mean, var, scale, shift):
    return torch.relu(F.batch_norm(F.conv2d(x, weight, padding=1), mean, var, scale, shift, False))


# ---- forward and backward inside ----------------------------------------------------------------------------------


def mse_step(x, weight, bias, target):
    loss = (x * weight + bias - target).square().mean()
    loss.backward()
    return loss.detach()


def bce_step(x, weight, target):
    loss = F.binary_cross_entropy_with_logits(x * weight, target)
    loss.backward()
    return loss.detach()


def focal_step(logits, target):
    p = torch.sigmoid(logits)
    right = p * target + (1 - p) * (1 - target)
    loss = ((1 - right) ** 2 * -torch.log(right + 1e-6)).mean()
    loss.backward()
    return loss.detach()


def classifier_step(x, up, up_bias, down, down_bias, classes):
    loss = F.cross_entropy(F.linear(torch.relu(F.linear(x, up, up_bias)), down, down_bias), classes)
    loss.backward()
    return loss.detach()


def layer_norm_step(x, weight, bias, target):
    loss = (F.layer_norm(x, (x.shape[-1],), weight, bias) - target).abs().mean()
    loss.backward()
    return loss.detach()


def attention_step(q, k, v):
    scores = torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1)
    loss = (scores @ v).square().mean()
    loss.backward()
    return loss.detach()


def charbonnier_step(x, target):
    loss = torch.sqrt((x - target).square() + 1e-6).mean()
    loss.backward()
    return loss.detach()


def distillation_step(student, teacher):
    loss = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")
    loss.backward()
    return loss.detach()


def contrastive_step(left, right, classes):
    scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T
    loss = F.cross_entropy(scores * 20.0, classes)
    loss.backward()
    return loss.detach()


def dice_step(logits, target):
    p = torch.sigmoid(logits)
    overlap = (p * target).sum(-1)
    loss = (1 - (2 * overlap + 1) / (p.sum(-1) + target.sum(-1) + 1)).mean()
    loss.backward()
    return loss.detach()


# ---- the backward pass outside --------------------------------------------------------------------------------------


def gelu_scale(x, weight, bias):
    return F.gelu(x * weight + bias)


def layer_norm_gelu(x, weight, bias):
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias))


def silu_gate(gate, up):
    return F.silu(gate) * up


def scaled_rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def cross_entropy(logits, classes):
    return F.cross_entropy(logits, classes)


def rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def mish(x):
    return x * torch.tanh(F.softplus(x))


def gated_residual(x, h, gate):
    return x + torch.sigmoid(gate) * torch.tanh(h)


def relu_mlp(x, up, up_bias, down, down_bias):
    return F.linear(torch.relu(F.linear(x, up, up_bias)).square(), down, down_bias)


def conv_bn_silu(x, weight, scale, shift):
    return F.silu(F.batch_norm(F.conv2d(x, weight, padding=1), None, None, scale, shift, True))


# ---- the table ------------------------------------------------------------------------------------------------------


def _table(rows: int) -> Tensors:
    angles = torch.arange(rows).unsqueeze(1) * torch.exp(torch.arange(32) * (-math.log(10000.0) / 32))
    table = torch.cat((angles, angles), -1)
    return table.cos(), table.sin()


def _scores(rows: int) -> Tensors:
    length = max(8, math.isqrt(rows * WIDTH // 8))
    return _randn(8, length, length), torch.triu(torch.ones(length, length, dtype=torch.bool), 1)


def _heads(rows: int, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make(8, max(8, rows // 4), 64)


def _blocks(rows: int, make: Callable[..., torch.Tensor], width: int = 128) -> Tensors:
    """Products: a quarter of the rows, or nothing but the product would be measured."""
    rows = max(8, rows // 4)
    scale = 0.1 if make is _randn else 1.0
    weights = (make(4 * width, width), make(4 * width), make(width, 4 * width), make(width))
    return make(rows, width), *(weight if scale == 1.0 else weight * scale for weight in weights)


def _image(rows: int) -> torch.Tensor:
    side = max(8, math.isqrt(rows * 4))
    return _randn(1 if rows < 1000 else 4, 32, side, side)


def _classes(rows: int, count: int) -> torch.Tensor:
    return torch.randint(count, (rows,))


ROWS = (
    Row(bias_gelu, "forward", lambda n: (_randn(n, WIDTH), _randn(WIDTH))),
    Row(add_layer_norm, "forward", lambda n: (_randn(n, WIDTH), _randn(n, WIDTH), _randn(WIDTH), _randn(WIDTH))),
    Row(rms_norm, "forward", lambda n: (_randn(n, WIDTH), _randn(WIDTH))),
    Row(swiglu, "forward", lambda n: (_randn(n, WIDTH), _randn(n, WIDTH))),
    Row(rotary, "forward", lambda n: (_randn(8, n, 64), *_table(n))),
    Row(masked_softmax, "forward", _scores),
    Row(adam_update, "forward", lambda n: (*(_randn(n, WIDTH) for _ in range(3)), _randn(n, WIDTH).abs())),
    Row(clip_by_norm, "forward", lambda n: (_randn(n, WIDTH),)),
    Row(mlp, "forward", lambda n: _blocks(n, _randn)),
    Row(
        conv_bn_relu, "forward",
        lambda n: (_image(n), _randn(32, 32, 3, 3) * 0.06, _randn(32) * 0.1, torch.ones(32), _randn(32), _randn(32)),
    ),
    Row(mse_step, "inside", lambda n: (_randn(n, WIDTH), _leaf(WIDTH), _leaf(WIDTH), _randn(n, WIDTH))),
    Row(bce_step, "inside", lambda n: (_randn(n, WIDTH), _leaf(n, WIDTH), torch.rand(n, WIDTH))),
    Row(focal_step, "inside", lambda n: (_leaf(n, WIDTH), torch.rand(n, WIDTH).round())),
    Row(classifier_step, "inside", lambda n: (*_blocks(n, _leaf), _classes(max(8, n // 4), 128))),
    Row(layer_norm_step, "inside", lambda n: (_leaf(n, WIDTH), _leaf(WIDTH), _leaf(WIDTH), _randn(n, WIDTH))),
    Row(attention_step, "inside", lambda n: tuple(_heads(min(n, 1024), _leaf) for _ in range(3))),
    Row(charbonnier_step, "inside", lambda n: (_leaf(n, WIDTH), _randn(n, WIDTH))),
    Row(distillation_step, "inside", lambda n: (_leaf(n, WIDTH), _randn(n, WIDTH))),
    Row(
        contrastive_step, "inside",
        lambda n: (*(_leaf(min(n, 1024), 128) for _ in range(2)), _classes(min(n, 1024), min(n, 1024))),
    ),
    Row(dice_step, "inside", lambda n: (_leaf(n, WIDTH), torch.rand(n, WIDTH).round())),
    Row(gelu_scale, "outside", lambda n: (_leaf(n, WIDTH), _leaf(WIDTH), _leaf(WIDTH))),
    Row(layer_norm_gelu, "outside", lambda n: (_leaf(n, WIDTH), _leaf(WIDTH), _leaf(WIDTH))),
    Row(silu_gate, "outside", lambda n: (_leaf(n, WIDTH), _leaf(n, WIDTH))),
    Row(scaled_rms_norm, "outside", lambda n: (_leaf(n, WIDTH), _leaf(WIDTH))),
    Row(cross_entropy, "outside", lambda n: (_leaf(n, WIDTH), _classes(n, WIDTH))),
    Row(rotate, "outside", lambda n: (_leaf(8, n, 64), *_table(n))),
    Row(mish, "outside", lambda n: (_leaf(n, WIDTH),)),
    Row(gated_residual, "outside", lambda n: (_leaf(n, WIDTH), _leaf(n, WIDTH), _leaf(n, WIDTH))),
    Row(relu_mlp, "outside", lambda n: _blocks(n, _leaf)),
    Row(conv_bn_silu, "outside", lambda n: (_image(n), _leaf(32, 32, 3, 3), _leaf(32), _leaf(32))),
)  # fmt: skip
