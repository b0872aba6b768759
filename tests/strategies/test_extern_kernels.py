"""Activations inside of oneDNN's kernels: eager's mathematics, numbers beside the tensor, NaN and infinity."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autofuse.ir.operation import Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape
from autofuse.strategies.extern_kernels import VENDORS
from autofuse.strategies.rewrites import activation

Unary = tuple[str, str, tuple[float, ...]]
ROWS: list[tuple[str, tuple[object, ...], Callable[[torch.Tensor], torch.Tensor]]] = [
    ("relu", (), torch.relu),
    ("silu", (), F.silu),
    ("tanh", (), torch.tanh),
    ("sigmoid", (), torch.sigmoid),
    ("hardswish", (), F.hardswish),
    ("gelu", (), F.gelu),
    ("leaky_relu", (), F.leaky_relu),
    ("leaky_relu", (0.3,), lambda t: F.leaky_relu(t, 0.3)),
    ("hardtanh", (), F.hardtanh),
    ("hardtanh", (0.0, 6.0), F.relu6),
]


def _activation(name: str, numbers: tuple[object, ...]) -> Unary | None:
    spec = TensorSpec(SymbolicShape((4, 4)), "float32", SymbolicShape((4, 1)))
    return activation(Operation("v0", f"aten.{name}.default", (ValueRef("i0"), *numbers), (), (spec,)))


def _same(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """As near to float64 as eager is; NaN and infinity where eager has them."""
    assert torch.equal(found.isnan(), eager.isnan()) and torch.equal(found.isinf(), eager.isinf())
    finite = eager.isfinite()
    off, own = ((t.double() - exact)[finite].abs().max().item() for t in (found, eager))
    assert off <= 2 * own + 1e-5 * exact[finite].abs().max().item()


SPECIAL = (None, math.nan, math.inf, 1e38)  # the last makes sums that overflow


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize(("name", "numbers", "function"), ROWS, ids=[f"{n}{a}" for n, a, _ in ROWS])
def test_products_and_convolutions(
    name: str, numbers: tuple[object, ...], function: Callable[[torch.Tensor], torch.Tensor], special: float | None
) -> None:
    if name in ("gelu", "silu", "hardswish") and special is not None and not math.isnan(special):
        special = None  # eager's own of an infinite or huge element is NaN or infinite on some machines
    unary = _activation(name, numbers)
    assert unary is not None
    attr, algorithm, scalars = unary
    x, w, b = torch.randn(7, 33) * 2, torch.randn(33, 40), torch.randn(40)
    image, kernel = torch.randn(2, 8, 9, 7), torch.randn(16, 8, 3, 3) / 4
    norm = [torch.rand(16) + 0.5, torch.randn(16), torch.randn(16), torch.rand(16) + 0.5]
    if special is not None:
        x[3, 5] = image[1, 2, 3, 4] = special
    _same(
        VENDORS["vendor.linear.default"]()(x, w, b, None, attr, algorithm, scalars),
        function(x @ w + b),
        function(x.double() @ w.double() + b.double()),
    )
    for norms, packed in (([], False), ([], True), (norm, False), (norm, True)):
        run = VENDORS["vendor.convolution.default"]()

        def eager(dtype: torch.dtype, norms: list[torch.Tensor] = norms) -> torch.Tensor:
            y = F.conv2d(image.to(dtype), kernel.to(dtype), None, 1, 1)
            scale, shift, mean, var = (t.to(dtype) for t in norms or norm)
            return function(F.batch_norm(y, mean, var, scale, shift, False, 0.1, 1e-5) if norms else y)

        args = ([*norms, 1e-5] if norms else [], None, [1, 1], [1, 1], [1, 1], 1, attr, algorithm, scalars, packed)
        if special in (None, math.nan) or not norms:  # a folded norm of an infinite sum is another infinite sum
            _same(run(image, kernel, None, *args), eager(torch.float32), eager(torch.float64))


def test_a_sum_under_an_activation_keeps_nan() -> None:
    run, x, other = VENDORS["vendor.convolution.default"](), torch.randn(1, 4, 5, 5), torch.randn(1, 6, 5, 5)
    other[0, 1, 2, 3] = math.nan
    weight = torch.randn(6, 4, 1, 1)
    found = run(x, weight, None, [], other, [1, 1], [0, 0], [1, 1], 1, "relu", "none", (), False)
    assert torch.allclose(found, torch.relu(F.conv2d(x, weight) + other), atol=1e-5, equal_nan=True)


def test_numbers_that_are_no_numbers_are_left_alone() -> None:
    assert _activation("hardtanh", (0.0, ValueRef("i1"))) is None
    assert _activation("relu", (1.0,)) is None
    assert _activation("hardtanh", (0.0,)) == ("hardtanh", "none", (0.0, 1.0))
