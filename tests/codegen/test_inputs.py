"""Made-up inputs: the same for equal arguments, and no two rows of a large tensor alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autofuse.codegen.inputs import PERIOD, make_inputs
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape
from tests.tracing import trace

aten = torch.ops.aten


def _form(rows: int, columns: int) -> NodeForm:
    spec = TensorSpec(SymbolicShape((rows, columns)), "float32", SymbolicShape((columns, 1)))
    op = Operation("v0", "aten.relu.default", (ValueRef("i0"),), (), (spec,))
    return NodeForm((NodeInput("i0", spec),), (op,), (ValueRef("v0"),))


def test_equal_arguments_give_equal_values_and_seeds_differ() -> None:
    form = _form(300, 1000)
    (first,), (again,), (other,) = make_inputs(form, (), 1), make_inputs(form, (), 1), make_inputs(form, (), 2)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_rows_of_a_large_tensor_differ() -> None:
    for columns in (256, 1000, 1024):
        (x,) = make_inputs(_form(300, columns), ())
        assert x.numel() > PERIOD
        assert len({tuple(row[:8].tolist()) for row in x}) == 300
        assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1.0) < 0.02


def test_kinds_reach_all_of_a_large_tensor() -> None:
    form = _form(300, 1000)
    (large,), (special,) = make_inputs(form, (), 0, "large"), make_inputs(form, (), 0, "special")
    assert float(large.abs().max()) > 1e3
    for half in special.view(-1).chunk(2):
        assert (
            bool(half.isnan().any()) and bool(half.isinf().any()) and 0.9 < float(half.isfinite().float().mean()) < 1.0
        )


def _largest_2d(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1], [1, 1], True)


def _back_2d(g: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return aten.max_pool2d_with_indices_backward.default(g * 2, x, [3, 3], [2, 2], [1, 1], [1, 1], True, places)


def _largest_3d(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.max_pool3d_with_indices.default(x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)


def _back_3d(g: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return aten.max_pool3d_with_indices_backward.default(
        g * 2, x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, places.view(places.shape)
    )


def _even_2d(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.adaptive_max_pool2d.default(x, [3, 4])


def _back_even_2d(g: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return aten.adaptive_max_pool2d_backward.default(g * 2, x, places)


@pytest.mark.parametrize(
    ("forward", "backward", "sizes"),
    [(_largest_2d, _back_2d, (9, 12)), (_largest_3d, _back_3d, (6, 4, 8)), (_even_2d, _back_even_2d, (9, 12))],
)
def test_places_of_maxima_are_ones_that_a_pooling_makes(
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    backward: Callable[..., torch.Tensor],
    sizes: tuple[int, ...],
) -> None:
    """aten's gradient writes wherever they say: others overwrote the memory of the worker that checked a kernel."""
    x = torch.randn(11, 5, *sizes)
    values, places = forward(x)
    form = trace(backward, (torch.randn_like(values), x, places), static=(5, *sizes, *values.shape[2:]))
    for kind in ("normal", "zeros", "special"):
        made = {item.name: tensor for item, tensor in zip(form.inputs, make_inputs(form, (7,), 0, kind), strict=True)}
        (drawn,) = (tensor for tensor in made.values() if tensor.dtype == torch.int64)
        assert drawn.shape == (7, *places.shape[1:]) and drawn.min() >= 0 and drawn.max() < x[0, 0].numel()
        # Each place is in its window: a pooling of an image that is largest there finds it again.
        image = torch.zeros(7, 5, x[0, 0].numel()).scatter(2, drawn.flatten(2), 1.0).view(7, 5, *sizes)
        assert bool((forward(image)[0] == 1.0).all())
