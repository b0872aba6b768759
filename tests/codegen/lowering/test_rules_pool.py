"""Pooling in generated kernels: what wins a window, what is refused, and that a pooling is worth a kernel alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from tests.strategies.harness import plan
from tests.tracing import trace

aten = torch.ops.aten
max_pool = aten.max_pool2d_with_indices.default


@settings(max_examples=12, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    st.integers(5, 9),
    st.integers(5, 9),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_equal_elements_nan_and_nothing(window, rows, cols, ceils, chance) -> None:  # type: ignore[no-untyped-def]
    """Few different values, so that windows hold equal ones; the places are aten's too, bit for bit."""
    stride, length, images = window
    padding = chance.randint(0, length // 2)
    values = [chance.choice([0.0, -0.0, 1.0, math.nan, -math.inf, -math.inf]) for _ in range(images * rows * cols)]
    x = torch.tensor(values).reshape(1, images, rows, cols)

    def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return max_pool(x, [length, length], [stride, stride], [padding, padding], [1, 1], ceils)  # type: ignore[no-any-return]

    form = trace(pooled, [x], dynamic=False)
    found, wanted = _generator().generate_generic_kernel(form, None)(x), pooled(x)
    assert torch.equal(found[0].nan_to_num(nan=7.0), wanted[0].nan_to_num(nan=7.0))
    assert torch.equal(found[1], wanted[1])


def _generator() -> FusionKernelGenerator:
    from autofuse.codegen.c.build import find_toolchain

    return FusionKernelGenerator(find_toolchain())


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (lambda x: max_pool(x * 2, [3, 3]), "pooled_value"),
        (lambda x: max_pool(x, [7, 7]), "pooling"),
        (lambda x: max_pool(x, [3, 3], [1, 1], [1, 1], [2, 2]), "pooling"),
        (lambda x: aten.avg_pool2d.default(x * 2, [3, 3]), "pooled_value"),
        (lambda x: aten._adaptive_avg_pool2d.default(x, [7, 1]), "pooling"),
        (lambda x: max_pool(x.to(torch.int64), [3, 3]), "pooling"),
    ],
)
def test_what_is_refused(function: Callable[..., object], code: str) -> None:
    with pytest.raises(LoweringError) as error:
        lower(trace(function, [torch.randn(2, 3, 12, 12)]))
    assert error.value.code == code


def test_a_pooling_is_a_kernel_of_its_own_and_takes_what_follows() -> None:
    """Sizes of the result are rounded quotients of the image's."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(F.max_pool2d(F.relu(x) * 2.0, 3, 2, 1).sigmoid() + 1.0, 3, 1, 1)

    with torch.no_grad():
        (planned,) = plan(function, [torch.randn(4, 8, 33, 31)], [(0, 0), (0, 2), (0, 3)])
    names = [[op.short_name for op in node.kernels] for node in planned.nodes]
    assert names == [["relu", "mul"], ["max_pool2d_with_indices", "sigmoid", "add"], ["avg_pool2d"]]


@pytest.mark.parametrize(("length", "stride", "padding"), [(3, 3, 1), (4, 3, 0), (5, 5, 2), (5, 6, 1), (4, 7, 2)])
def test_sizes_whose_quotient_floating_point_numbers_miss(length: int, stride: int, padding: int) -> None:
    """A third of 34 less a third of 1 is 11, but less than that in floating-point numbers: a result too small."""

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, length, stride, padding) + 1

    kernel = _generator().generate_generic_kernel(trace(pooled, [torch.randn(1, 2, 33, 40)]), None)
    for size in range(33, 120):
        x = torch.randn(1, 2, size, 40)
        (found,) = kernel(x)
        torch.testing.assert_close(found, pooled(x))
