"""Scans in generated kernels: the way they go, what is refused, aten's order and its choice among equal elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.loops import Scan
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from tests.tracing import trace


@pytest.mark.parametrize(
    ("function", "is_reversed"),
    [
        (lambda x: torch.cumsum(x, -1) * 2, False),
        (lambda x: torch.cumsum(x.flip(-1), -1).flip(-1) * 2, True),
        (lambda x: torch.cumsum(x, -1).flip(-1).flip(-1) * 2, False),
    ],
)
def test_a_flip_turns_a_scan(function: Callable[..., object], is_reversed: bool) -> None:
    kernel = lower(trace(function, [torch.randn(5, 7)]))
    assert [v.attr for v in kernel.values if v.op == "scan"] == [Scan("sum", is_reversed)]
    assert kernel.needs_whole_rows and not kernel.has_row_reduce


@pytest.mark.parametrize(
    ("function", "code"),
    [
        (lambda x: torch.cumsum(x, -1)[:, 1:] * 2, "scan"),
        (lambda x: torch.roll(torch.cumsum(x, -1), 1, -1) * 2, "scan"),
        (lambda x: torch.cumsum(x, -1) + torch.cumsum(x.flip(-1), -1).flip(-1), "scan"),
        (lambda x: torch.cumsum(torch.cumsum(x, 0), 1), "reductions"),
    ],
)
def test_what_is_refused(function: Callable[..., object], code: str) -> None:
    with pytest.raises(LoweringError) as error:
        lower(trace(function, [torch.randn(5, 7)]))
    assert error.value.code == code


@pytest.mark.parametrize("dim", [0, 1])
def test_equal_elements_and_nan(dim: int) -> None:
    """The last of equal elements has the place, and the last NaN; zeros keep their signs, bit for bit."""
    x = torch.tensor(
        [[0.0, -0.0, 1.0, 1.0, math.nan, 2.0, math.nan, -math.inf], [-math.inf, -math.inf, 3, 3, 3, 1, 1, 4]]
    )

    def ends(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*torch.cummax(x, dim), *torch.cummin(x, dim))

    form = trace(ends, [x], dynamic=False)
    found = FusionKernelGenerator(find_toolchain()).generate_generic_kernel(form, None)(x)
    for own, aten in zip(found, ends(x), strict=True):
        assert torch.equal(torch.signbit(own.nan_to_num(7.0)), torch.signbit(aten.nan_to_num(7.0)))
        assert torch.equal(own.nan_to_num(7.0), aten.nan_to_num(7.0))


def test_sums_have_the_bits_of_atens() -> None:
    """Elements are added one by one in double, by one thread or by several, along either dim."""
    x = torch.randn(40, 1000) * 10 ** torch.linspace(-3, 3, 1000)
    for dim in (0, 1):
        form = trace(functools.partial(torch.cumsum, dim=dim), [x], dynamic=False)
        kernel = FusionKernelGenerator(find_toolchain()).generate_generic_kernel(form, None)
        for threads in (1, 3):
            assert torch.equal(kernel(x, threads=threads)[0], torch.cumsum(x, dim))
