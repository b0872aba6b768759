"""Made-up inputs: the same for equal arguments, and no two rows of a large tensor alike."""

from __future__ import annotations

import torch

from autofuse.codegen.inputs import PERIOD, make_inputs
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape


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
