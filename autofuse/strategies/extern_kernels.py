"""Calls of the libraries' fused kernels: oneDNN, cuBLASLt, cuDNN, torch's attention.

In: the arguments that a rewrite wrote. Out: one tensor or several. A row of the table makes the callable; where folded
weights are cached, it makes a new one for each place of use. Guarantee: folded weights are never stale. On a CPU the
parameters are compared, byte by byte, with the folded ones at each call (a version counter would miss writes through
``.data``). On a GPU, where a comparison would wait for the device, the weights are folded at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autofuse.strategies.channels_last import ATEN
from autofuse.strategies.joined_matmuls import SUM
from autofuse.strategies.sdpa_calls import Rule, both_passes, sdpa
from autofuse.strategies.sdpa_training_match import TRAINING

# oneDNN's version of these gives a number where the matmul is NaN (torch 2.13); eager gives NaN.
_LOSES_NAN: dict[str, Callable[..., Tensor]] = {"relu": F.relu_, "hardtanh": F.hardtanh_}
MAX_PACKED = 4  # packed weights kept for a convolution, each for one size of its input
LARGEST_SUM = 1e37  # far below values whose sums of float32 or bfloat16 products overflow


def largest(tensor: Tensor | None) -> float:
    """The largest absolute value; infinite where one is NaN, 0 for an empty tensor."""
    if tensor is None or not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)
    found = max(-float(low), float(high))
    return found if found == found else math.inf


def _is_bounded(x: Tensor, gain: float, *added: Tensor | None) -> bool:
    """Whether no sum can be NaN or infinite: one pass over the input, cheap beside the matmul."""
    return largest(x) * gain + sum(largest(t) for t in added) < LARGEST_SUM


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    attr: str,
    algorithm: str,
    scalars: Sequence[float],
) -> Tensor:
    """oneDNN's matmul with an epilogue of one operation; ``weight`` is [K, N] as for addmm, oneDNN takes [N, K]."""
    op = torch.ops.mkldnn._linear_pointwise
    if other is None:
        if attr in _LOSES_NAN and not _is_bounded(x, largest(weight) * weight.shape[0], bias):
            return _LOSES_NAN[attr](op(x, weight.t(), bias, "none", [], "none"), *scalars)
        result: Tensor = op(x, weight.t(), bias, attr, scalars, algorithm)
        return result
    summed: Tensor = op.binary(x, other, weight.t(), bias, attr)
    return summed


def _addmm_activation(bias: Tensor, x: Tensor, weight: Tensor, use_gelu: bool) -> Tensor:
    return torch._addmm_activation(bias, x, weight, use_gelu=use_gelu)


class _FoldedOnce(NamedTuple):
    """Folded parameters and the result. Replaced as a whole, because two threads may run the same node."""

    sources: list[Tensor | None]
    weight: Tensor
    offset: Tensor | None
    packed: dict[Any, Tensor]  # by the input sizes for which it was packed


class Folded:
    """Weights and bias of a convolution for its kernel: with an inference batch norm folded in, and packed.

    One object serves all sizes at a place of use. Each size has its own layout, and the first few are cached; for other
    sizes oneDNN reorders the weights at each call, as in eager.
    """

    def __init__(self) -> None:
        self._once: _FoldedOnce | None = None

    def __call__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        norm: Sequence[Any],
        pack: Callable[[Tensor], Tensor],
        sizes: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for an input of these ``sizes``, for which ``pack`` packs a weight.

        ``norm``: scale, shift, running mean, running variance and epsilon of a batch norm; or empty.
        """
        sources = [weight, bias, *norm[:4]]
        if weight.device.type != "cpu":
            return fold(weight, bias, *norm) if norm else (weight, bias)
        once = self._once
        if once is None or not _all_equal(once.sources, sources):
            # Never the parameter itself: writes to it must not reach the cached copy.
            copies = [None if t is None else t.detach().clone() for t in sources]
            folded, offset = fold(weight, bias, *norm) if norm else (copies[0], copies[1])
            assert folded is not None
            self._once = once = _FoldedOnce(copies, folded, offset, {})
        key = tuple(sizes)
        packed = once.packed.get(key)
        if packed is None:
            if len(once.packed) >= MAX_PACKED:
                return once.weight, once.offset
            packed = once.packed[key] = pack(once.weight)
        return packed, once.offset


def _unpacked(weight: Tensor) -> Tensor:
    return weight.detach()


class Convolution(NamedTuple):
    """The options of a convolution, which follow its tensors in a call of ``vendor.convolution``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    attr: str  # the activation
    algorithm: str  # of the activation
    scalars: Sequence[float]  # of the activation
    packed: bool  # weights are cached in oneDNN's own layout

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Padding, stride, dilation and groups, in oneDNN's order."""
        return self.padding, self.stride, self.dilation, self.groups


def _packed(conv: Convolution, sizes: Sequence[int]) -> Callable[..., Tensor]:
    """Weights in oneDNN's own layout for inputs of these sizes, which it would otherwise make at each call.

    For 2-D convolutions; made without the sizes, the layout was up to 1.6 times slower (torch 2.13, AVX-512).
    """

    def pack(weight: Tensor) -> Tensor:
        made: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(weight.detach().to_mkldnn(), *conv.sizes, list(sizes))
        return made

    return pack


def fold(
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``norm(conv(x, weight, bias))`` as one convolution's weight and bias, computed in float64."""
    factor = (var.double() + eps).rsqrt()
    if scale is not None:
        factor = factor * scale.double()
    folded = weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))
    base = -mean.double() if bias is None else bias.double() - mean.double()
    offset = base * factor
    if shift is not None:
        offset = offset + shift.double()
    return folded.to(weight.dtype), offset.to(weight.dtype)


def _all_equal(kept: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> bool:
    for k, n in zip(kept, now, strict=True):
        if (k is None) != (n is None):
            return False
        if k is not None and n is not None and not (k.dtype == n.dtype and torch.equal(k, n)):
            return False
    return True


def _convolution() -> Callable[..., Tensor]:
    folded = Folded()

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, norm: Sequence[Any], other: Tensor | None, *how: Any
    ) -> Tensor:
        conv = Convolution(*how)
        if norm or conv.packed:
            sizes = x.shape if conv.packed else ()
            pack = _packed(conv, sizes) if conv.packed else _unpacked
            weight, bias = folded(weight, bias, norm, pack, sizes)
        return (_by_onednn if x.device.type == "cpu" else _by_cudnn)(x, weight, bias, other, conv)

    return run


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Convolution) -> Tensor:
    # In place on a result that is still in the caches: cheaper than a test for possible NaN.
    after = _LOSES_NAN.get(conv.attr)
    here = "none" if after is not None else conv.attr
    op = torch.ops.mkldnn._convolution_pointwise
    if other is None:
        numbers = () if after is not None else conv.scalars
        made: Tensor = op(x, weight, bias, *conv.sizes, here, numbers, conv.algorithm)
    else:
        unary = None if here == "none" else here
        made = op.binary(x, other, weight, bias, *conv.sizes, "add", 1.0, unary, [], None)
    return made if after is None else after(made, *conv.scalars)


def _by_cudnn(x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor | None, conv: Convolution) -> Tensor:
    stride, padding, dilation, groups = conv[:4]
    if conv.attr == "relu" and other is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
    if conv.attr == "relu":
        return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, stride, padding, dilation, groups)
    out = torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return out if other is None else out.add_(other)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, lead: Sequence[int], scale: float, *rest: Any) -> Tensor:
    """``rest``: bias, what is masked, whether the result has heads last, and the fill of masked scores, else -inf."""
    bias, masked, heads_last, fill = rest if len(rest) == 4 else (*rest, -math.inf)
    return sdpa(query, key, value, bias, masked, Rule(tuple(lead), scale, fill), heads_last)


def _both_passes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, lead: Sequence[int], scale: float, *rest: Any
) -> tuple[Tensor, ...]:
    """``rest``: bias, what is masked, and the fill of masked scores."""
    bias, masked, fill = rest
    return both_passes(gradient, query, key, value, bias, masked, Rule(tuple(lead), scale, fill))


def _aten(target: str, *args: Any) -> Any:
    """An aten operation, whose results are copied to the promised strides if they differ (`as_promised`)."""
    _, name, overload = target.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)(*args)


def _sum_of_products(left: Sequence[Tensor], right: Sequence[Tensor], is_transposed: bool) -> Tensor:
    """The sum of ``left[i] @ right[i]``, [M, K_i] by [K_i, N], or its transpose."""
    if all(t.stride(0) == 1 for t in left):  # transposed: concatenated along the contiguous dim
        total = torch.cat([t.t() for t in left]).t() @ torch.cat(list(right))
    else:
        total = torch.cat(list(left), 1) @ torch.cat(list(right))
    return total.t() if is_transposed else total


VENDORS: dict[str, Callable[[], Callable[..., Any]]] = {
    "vendor.linear.default": lambda: _linear,
    "vendor.addmm_activation.default": lambda: _addmm_activation,
    "vendor.convolution.default": _convolution,
    "vendor.sdpa.default": lambda: _sdpa,
    ATEN: lambda: _aten,
    TRAINING: lambda: _both_passes,
    SUM: lambda: _sum_of_products,
}

# Callables of these keep data for their place of use.
KEEPING = frozenset({"vendor.convolution.default"})


def as_promised(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """The tensor with the sizes and strides that the graph was traced with; a copy where it has others.

    Strides of dims of size 1 are set too, because readers of the tensor may compare them.
    """
    if tensor.stride() == strides and tensor.shape == shape:
        return tensor
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def all_promised(results: Sequence[Any], layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[Any, ...]:
    """`as_promised` for an operation with several results; results other than tensors stay."""
    pairs = zip(results, layouts, strict=True)
    return tuple(as_promised(r, *layout) if isinstance(r, Tensor) else r for r, layout in pairs)
