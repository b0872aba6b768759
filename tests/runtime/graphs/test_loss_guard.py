"""What eager refuses raises eager's error where a kernel calculates the loss, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import run_unfused
from autofuse.errors import LoweringError
from autofuse.runtime.graphs.loss_guard import fall_back_to_eager, refuses
from tests.strategies.harness import GENERATOR
from tests.tracing import trace

aten = torch.ops.aten
X = torch.rand(5, 7)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("x", "y"), [(1.5, 0.5), (-0.1, 0.5), (0.5, 2.0), (float("nan"), 0.5)])
def test_what_is_no_probability_raises_as_in_eager(x: float, y: float, reduction: int) -> None:
    form = trace(lambda a, b: aten.binary_cross_entropy.default(a, b, None, reduction) * 2, (X, X.clone()))
    kernel = GENERATOR.generate_generic_kernel(form)
    symbols = dict(zip(form.symbols, X.shape, strict=True))

    def fused(*inputs: torch.Tensor) -> torch.Tensor:
        (found,) = kernel(*inputs)
        return found

    assert refuses(form) == (0,)
    guarded = fall_back_to_eager(form, fused, lambda *inputs: run_unfused(form, list(inputs), symbols))
    assert torch.isfinite(guarded(X, X.clone())).all()
    wrong = [X.clone(), X.clone()]
    wrong[0][2, 3], wrong[1][2, 3] = x, y
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        guarded(*wrong)


def _above(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return aten.binary_cross_entropy.default(a, b, None, 0) > 3


def _masked(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = aten.nll_loss_forward.default(scores, target, None, 0, -100)[0]
    return torch.where(target > 3, each, torch.zeros_like(each)).sum()


def _counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return aten.sum.dim_IntList(aten.binary_cross_entropy.default(a, b, None, 0), [1], dtype=torch.int64)


REFUSED = [(_above, X.clone()), (_counted, X.clone()), (_masked, torch.zeros(5, dtype=torch.int64))]


@pytest.mark.parametrize(("function", "second"), REFUSED)
def test_a_node_that_may_lose_the_nan_is_refused(function: Any, second: torch.Tensor) -> None:
    with pytest.raises(LoweringError, match="whose NaN is kept"):
        lower(trace(function, (X, second)))
