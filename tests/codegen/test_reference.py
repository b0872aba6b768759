"""The float64 reference keeps what the inputs are: strides, shared memory, integers."""

import torch

from autofuse.codegen.reference import widen


def test_widened_inputs_keep_strides_and_shared_memory():
    inputs = [
        torch.randn(3, 1).expand(3, 5),  # a gradient that `mean` spreads over its inputs
        torch.randn(()).expand(2, 4),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4)[:, ::2],
        torch.randn(0, 3),
        torch.arange(4),
    ]
    for before, after in zip(inputs, widen(inputs), strict=True):
        assert after.shape == before.shape and after.stride() == before.stride()
        assert after.dtype == (torch.float64 if before.is_floating_point() else before.dtype)
        assert torch.equal(after, before.to(after.dtype))
