"""The window of a convolution: which pixels of an image each pixel of the result is made from.

In: a `convolution` or a `convolution_backward`. Out: its `Window`. Guarantee: what the templates of convolutions have
no code for is refused with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autofuse.errors import LoweringError
from autofuse.ir.operation import Operation, TensorSpec
from autofuse.ir.shape import Dim, contiguous_strides

Pair = tuple[int, int]  # in both directions: of rows, of columns


@dataclass(frozen=True)
class Window:
    """Its size and how it moves."""

    size: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def taps(self) -> int:
        return math.prod(self.size)

    @property
    def is_point(self) -> bool:
        """Whether each pixel of the result is made from the pixel of the image in the same place."""
        return self.taps == 1 and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def moves(self) -> str:
        """How it moves, in words."""
        return f"stride {self.stride}, padding {self.padding}, dilation {self.dilation}"

    @property
    def dims(self) -> dict[str, Dim]:
        """Its numbers, for `size_macros`."""
        pairs = {"WINDOW": self.size, "STRIDE": self.stride, "PADDING": self.padding, "DILATION": self.dilation}
        return {f"{key}_{axis}": pair[n] for key, pair in pairs.items() for n, axis in enumerate("YX")}


def window_of(op: Operation, weight: TensorSpec, specs: Collection[TensorSpec], first: int) -> Window:
    """The window of a 2-D convolution of float32 without groups.

    ``specs``: those of its tensors; ``first``: the place of the stride among the operation's arguments, which padding,
    dilation, whether it is transposed, the padding of results and the groups follow. Raises LoweringError for another
    convolution, and for a weight whose sizes vary.
    """
    dtypes = {spec.dtype for spec in specs}
    if dtypes != {"float32"}:
        raise LoweringError("dtype", f"expected float32, found {', '.join(sorted(dtypes))}")
    stride, padding, dilation, is_transposed, _, groups = op.args[first : first + 6]
    dims = weight.shape.dims
    if len(dims) != 4 or is_transposed or groups != 1:
        raise LoweringError("kind", "expected images, and neither groups nor a transposed convolution")
    if not all(isinstance(size, int) and size > 0 for size in dims):
        raise LoweringError("size", f"expected a weight of known size, found {weight.shape}")
    size = int(dims[2]), int(dims[3])
    return Window(size, pair_of("stride", stride), pair_of("padding", padding), pair_of("dilation", dilation))


def pair_of(name: str, found: object) -> Pair:
    if not isinstance(found, tuple) or not all(isinstance(n, int) for n in found) or len(found) not in (1, 2):
        raise LoweringError(name, f"expected numbers as {name}, found {found}")
    return int(found[0]), int(found[-1])


def last_strides(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Strides of images, [N, C, H, W], whose channels lie side by side."""
    batch, height, width, channels = contiguous_strides((dims[0], dims[2], dims[3], dims[1]))
    return batch, channels, height, width
