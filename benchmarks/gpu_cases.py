"""The memory-bound cases of the GPU benchmark: what is computed, on which sizes, and the least that must be moved.

``passes`` counts tensors of rows x columns that any implementation has to read or write: each input and output of
forward once, and for backward the gradients and what of forward it cannot do without. Vectors and masks of bools are
left out, so the share of the copy bandwidth that follows is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

Tensors = tuple[torch.Tensor, ...]
Make = Callable[[int, int, torch.dtype, torch.device], Tensors]


@dataclass(frozen=True)
class Size:
    name: str
    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of one tensor."""
        return self.rows * self.columns * int(self.dtype.itemsize)


@dataclass(frozen=True)
class SpeedCase:
    name: str
    function: Callable[..., torch.Tensor | Tensors]
    make: Make
    passes: int
    trains: bool = False  # forward and backward; else forward without gradients
    is_random: bool = False  # results differ from run to run


# Most telling first: a run that is short of time leaves out the last ones.
SIZES = (
    Size("64 MiB", 16384, 1024, torch.float32),
    Size("ragged", 16411, 1023, torch.float32),
    Size("64 MiB bf16", 32768, 1024, torch.bfloat16),
    Size("cache", 512, 1024, torch.float32),
    Size("256 MiB", 16384, 4096, torch.float32),
)
QUICK_SIZES = (Size("quick", 256, 512, torch.float32), Size("quick ragged", 129, 127, torch.float32))


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def tensors(full: int, vectors: int = 0) -> Make:
    """So many tensors of rows x columns, then so many of columns."""

    def make(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
        shapes = [(rows, columns)] * full + [(columns,)] * vectors
        return tuple(_random(*shape, dtype=dtype, device=device) for shape in shapes)

    return make


def _with_mask(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    mask = torch.arange(columns, device=device) >= columns - columns // 8
    return _random(rows, columns, dtype=dtype, device=device), mask


def _with_classes(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return _random(rows, columns, dtype=dtype, device=device), torch.randint(columns, (rows,), device=device)


def _transposed(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensors:
    return tuple(_random(*shape, dtype=dtype, device=device) for shape in ((columns, rows), (rows, columns)))


def _softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x * 0.125).masked_fill(mask, float("-inf")), -1)


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def _add_layer_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    h = x + y
    return h, _layer_norm(h, w, b)


def _dropout_layer_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
    h = y + F.dropout(x, 0.1, training=True)
    return h, _layer_norm(h, w, b)


def _rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * w


CASES = (
    SpeedCase("gelu_add_mul", lambda a, b, c: F.gelu(a + b) * c, tensors(3), 4),
    SpeedCase("softmax", _softmax, _with_mask, 2),
    SpeedCase("softmax_backward", _softmax, _with_mask, 5, True),
    SpeedCase("add_layer_norm", _add_layer_norm, tensors(2, 2), 4),
    SpeedCase("add_layer_norm_backward", _add_layer_norm, tensors(2, 2), 8, True),
    SpeedCase("cross_entropy_backward", F.cross_entropy, _with_classes, 3, True),
    SpeedCase("rms_norm", _rms_norm, tensors(1, 1), 2),
    SpeedCase("swiglu_backward", lambda a, b: F.silu(a) * b, tensors(2), 8, True),
    SpeedCase("bias_gelu", lambda x, b: F.gelu(x + b), tensors(1, 1), 2),
    SpeedCase("bias_gelu_backward", lambda x, b: F.gelu(x + b), tensors(1, 1), 5, True),
    SpeedCase("residual_dropout_layer_norm", _dropout_layer_norm, tensors(2, 2), 9, True, True),
    SpeedCase("column_sum", lambda g, x: torch.where(x > 0, g, 0.0).sum(0), tensors(2), 2),
    SpeedCase("swiglu", lambda a, b: F.silu(a) * b, tensors(2), 3),
    SpeedCase("rms_norm_backward", _rms_norm, tensors(1, 1), 5, True),
    SpeedCase("mean_square_error", lambda x, y: (x - y).square().mean(), tensors(2), 2),
    SpeedCase("transposed_add_gelu", lambda a, b: F.gelu(a.t() + b), _transposed, 3),
)
TRAPS = ("gelu_add_mul", "softmax", "add_layer_norm", "bias_gelu_backward")
SMALL_FIRST = Size("first", 24, 40, torch.float32)


def training(function: Callable[..., torch.Tensor | Tensors]) -> Callable[..., Tensors]:
    """Forward and backward of a function whose floating inputs are leaves; the gradients given are its outputs' own."""

    def run(*inputs: torch.Tensor) -> Tensors:
        found = function(*inputs)
        outputs = found if isinstance(found, tuple) else (found,)
        leaves = [t for t in inputs if t.requires_grad]
        given = [None if y.dim() == 0 else y.detach() for y in outputs]
        return (*outputs, *torch.autograd.grad(outputs, leaves, given))

    return run


def input_sets(case: SpeedCase, size: Size, device: torch.device, count: int) -> list[Tensors]:
    """Inputs of equal sizes in different memory."""
    found = []
    for _ in range(count):
        inputs = case.make(size.rows, size.columns, size.dtype, device)
        if case.trains:
            inputs = tuple(t.requires_grad_() if t.is_floating_point() else t for t in inputs)
        found.append(inputs)
    return found
