"""One trace of a convolution serves all batch sizes: its kernel is selected without a guard on the sizes.

In: calls of `torch._C._select_conv_backend`, which selects a convolution's kernel, while a root is traced. Out: the
same answer. The trace uses the answer only for the layout of the result; the graph calls ``aten.convolution``, which
selects again at every call. The selection compares the batch with 16 (oneDNN for 1x1 filters in one thread), so a trace
with 16 images could not be used for 8. Guarantee: guards are left out only where the layout is the same whatever the
answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_DENSE = (torch.contiguous_format, torch.preserve_format)


@contextlib.contextmanager
def without_batch_guards() -> Iterator[None]:
    """While a root is traced."""
    ask = getattr(torch._C, "_select_conv_backend", None)
    if ask is None:  # another torch: guards stay
        yield
        return

    def select(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shape_env = input.fake_mode.shape_env if isinstance(input, FakeTensor) else None
        if shape_env is None or not _is_layout_settled(input, weight):
            return ask(input, weight, *args, **kwargs)
        with shape_env.suppress_guards():
            return ask(input, weight, *args, **kwargs)

    torch._C._select_conv_backend = select
    try:
        yield
    finally:
        torch._C._select_conv_backend = ask


def _is_layout_settled(input: FakeTensor, weight: torch.Tensor) -> bool:
    """Whether all kernels give one layout: on a CPU, contiguous where image and filter are contiguous."""
    if input.fake_device.type != "cpu" or input.is_mkldnn:
        return False
    return all(torch._prims_common.suggest_memory_format(t) in _DENSE for t in (input, weight))
