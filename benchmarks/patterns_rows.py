"""The rows of the table of patterns: what is computed, on which sizes, and what bounds it.

A row is a function of its inputs and parameters. ``cache`` sizes (2 MiB a tensor) keep a row within the last-level
cache, ``memory`` sizes are far larger than any cache, ``ragged`` ones change from call to call and have no common
divisor. `Row.sizes` gives, for each, the sizes that calls take in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

Tensors = tuple[torch.Tensor, ...]
Sizes = tuple[tuple[int, ...], ...]

SHAPES = ("cache", "memory", "ragged")
LENGTHS = (611, 1021, 347, 1543, 83, 1277, 202, 907)  # what ragged calls take in turn


@dataclass(frozen=True)
class Row:
    """One pattern; ``trains`` rows run forward and backward, the others forward without gradients."""

    name: str
    function: Callable[..., torch.Tensor]  # of the inputs, then the parameters
    inputs: Callable[..., Tensors]  # of a size
    parameters: Callable[[], Tensors]
    sizes: dict[str, Sizes]
    bound: str = "memory"  # "memory", or "matmul" and "convolution", which bound the row whatever is fused
    trains: bool = False
    seed_figure: float | None = None  # what the project's seeds ask for, over eager
    unavoidable: Callable[..., torch.Tensor] | None = None  # what stays, whatever is fused; tells how far a row can get
    is_random: bool = False  # results differ from run to run unless the generator is set


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _full(count: int, columns: int) -> Callable[..., Tensors]:
    """So many tensors of rows x columns."""
    return lambda rows: tuple(_randn(rows, columns) for _ in range(count))


def _vectors(*columns: int) -> Callable[[], Tensors]:
    return lambda: tuple(_randn(n) for n in columns)


def _no_parameters() -> Tensors:
    return ()


def _rows(cache: int, memory: int, scale: int = 1) -> dict[str, Sizes]:
    ragged = tuple((length * scale,) for length in LENGTHS)
    return {"cache": ((cache,),), "memory": ((memory,),), "ragged": ragged}


# ---- the functions ------------------------------------------------------------------------------------------


def add_relu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a + b)


def mul_relu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(a * b)


def affine_relu(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * scale + shift)


def matmul_bias_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight + bias)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias))


def layer_norm_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight, bias))


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax((scores * 0.125).masked_fill(mask, float("-inf")), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As language models write it: halves, rotated and joined again."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def residual_dropout_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return F.layer_norm(residual + F.dropout(x, 0.1, training=True), (x.shape[-1],), weight, bias)


def cross_entropy(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, classes)


def _conv_bn_relu(x: torch.Tensor, parameters: Sequence[torch.Tensor], training: bool) -> torch.Tensor:
    weight, scale, shift, mean, var = parameters
    y = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
    return torch.relu(F.batch_norm(y, mean, var, scale, shift, training))


def conv_bn_relu_eval(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    return _conv_bn_relu(x, parameters, False)


def conv_bn_relu_train(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    return _conv_bn_relu(x, parameters, True)


# ---- inputs ---------------------------------------------------------------------------------------------------


def _scores(batch: int, length: int) -> Tensors:
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
    return _randn(batch, 8, length, length), mask


def _tokens(batch: int, length: int) -> Tensors:
    """Queries of 8 heads of 64, and the tables of angles."""
    angles = torch.arange(length).unsqueeze(1) * torch.exp(torch.arange(32) * (-math.log(10000.0) / 32))
    table = torch.cat((angles, angles), -1)
    return _randn(batch, 8, length, 64), table.cos(), table.sin()


def _classes(columns: int) -> Callable[..., Tensors]:
    return lambda rows: (_randn(rows, columns), torch.randint(columns, (rows,)))


def _weights(inputs: int, outputs: int, linear: bool) -> Callable[[], Tensors]:
    shape = (outputs, inputs) if linear else (inputs, outputs)
    return lambda: (_randn(*shape) / math.sqrt(inputs), _randn(outputs))


def _images(channels: int) -> Callable[..., Tensors]:
    return lambda batch, height, width: (_randn(batch, channels, height, width),)


def _conv(channels: int) -> Callable[[], Tensors]:
    """Weights, then batch norm's scale, shift and running statistics."""
    return lambda: (
        _randn(channels, channels, 3, 3) / math.sqrt(9 * channels),
        *(torch.ones(channels), torch.zeros(channels)),
        *(torch.zeros(channels), torch.ones(channels)),
    )


_SQUARES = {
    "cache": ((2, 160),),
    "memory": ((16, 512),),
    "ragged": tuple((4, n) for n in (97, 131, 61, 257, 83, 199, 149, 313)),
}
_SEQUENCES = {
    "cache": ((4, 256),),
    "memory": ((16, 2048),),
    "ragged": tuple((3, length) for length in LENGTHS),
}
_PICTURES = {
    "cache": ((2, 32, 32),),
    "memory": ((16, 56, 56),),
    "ragged": tuple(
        (2, h, w) for h, w in ((41, 47), (31, 29), (61, 53), (37, 67), (23, 43), (59, 41), (17, 71), (47, 37))
    ),
}

ROWS: tuple[Row, ...] = (
    Row("add+relu", add_relu, _full(2, 1024), _no_parameters, _rows(512, 16384), seed_figure=1.5),
    Row("mul+relu", mul_relu, _full(2, 1024), _no_parameters, _rows(512, 16384), seed_figure=1.5),
    Row("affine+relu", affine_relu, _full(1, 1024), _vectors(1024, 1024), _rows(512, 16384), seed_figure=1.4),
    Row(
        "matmul+bias+relu", matmul_bias_relu, _full(1, 64), _weights(64, 1024, False), _rows(512, 16384),
        bound="matmul", seed_figure=2.0, unavoidable=lambda x, weight, bias: x @ weight,
    ),
    Row("linear+gelu", linear_gelu, _full(1, 256), _weights(256, 1024, True), _rows(512, 8192), bound="matmul"),
    Row("conv+bn+relu eval", conv_bn_relu_eval, _images(64), _conv(64), _PICTURES, bound="convolution"),
    Row("conv+bn+relu train", conv_bn_relu_train, _images(64), _conv(64), _PICTURES, bound="convolution", trains=True),
    Row("layer_norm+gelu", layer_norm_gelu, _full(1, 1024), _vectors(1024, 1024), _rows(512, 16384)),
    Row("layer_norm+gelu train", layer_norm_gelu, _full(1, 1024), _vectors(1024, 1024), _rows(512, 8192), trains=True),
    Row("softmax+scale+mask", masked_softmax, _scores, _no_parameters, _SQUARES),
    Row("rms_norm", rms_norm, _full(1, 1024), _vectors(1024), _rows(512, 16384)),
    Row("swiglu", swiglu, _full(2, 1024), _no_parameters, _rows(512, 16384)),
    Row("swiglu train", swiglu, _full(2, 1024), _no_parameters, _rows(512, 8192), trains=True),
    Row("rotary", rotary, _tokens, _no_parameters, _SEQUENCES),
    Row(
        "residual+dropout+layer_norm train", residual_dropout_layer_norm, _full(2, 1024), _vectors(1024, 1024),
        _rows(512, 8192), trains=True, is_random=True,
    ),
    Row("cross_entropy train", cross_entropy, _classes(8191), _no_parameters, _rows(64, 2048), trains=True),
)  # fmt: skip

ADAMW = "adamw"  # a row of its own kind: a step of an optimizer over 100 parameters
ADAMW_SIZES: dict[str, tuple[int, ...]] = {
    "cache": (1024,) * 100,
    "memory": (128 * 1024,) * 100,
    "ragged": tuple(LENGTHS[i % 8] * (1, 7, 64)[i % 3] for i in range(100)),
}


def with_gradients(tensors: Sequence[torch.Tensor]) -> Tensors:
    return tuple(t.requires_grad_() if t.is_floating_point() else t for t in tensors)
