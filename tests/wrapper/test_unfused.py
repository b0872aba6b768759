"""A node's operations called one by one, from generated Python."""

from __future__ import annotations

import pytest
import torch

from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.shape import SymbolicShape, contiguous_strides
from autofuse.wrapper.node_call import make_unfused


def spec(*dims: int) -> TensorSpec:
    return TensorSpec(SymbolicShape(dims), "float32", SymbolicShape(contiguous_strides(dims)), "cpu")


@pytest.mark.parametrize(
    ("target", "args", "shape"),
    [
        ("aten.split.Tensor", (6, 1), (2, 6)),
        ("aten.split_with_sizes.default", ((6,), 1), (2, 6)),
        ("aten.unsafe_split.Tensor", (6, 1), (2, 6)),
        ("aten.unbind.int", (0,), (1, 6)),
    ],
)
def test_a_list_of_one_part(target: str, args: tuple[object, ...], shape: tuple[int, int]) -> None:
    """As `torch.func.hessian` has them; AOTAutograd drops those that a script writes."""
    part = spec(6) if target == "aten.unbind.int" else spec(*shape)
    split = Operation("v0", target, (ValueRef("i0"), *args), (), (part,))
    form = NodeForm(
        (NodeInput("i0", spec(*shape)),),
        (split, Operation("v1", "aten.exp.default", (ValueRef("v0"),), (), (part,))),
        (ValueRef("v1"),),
        (),
    )
    x = torch.randn(shape)
    found = make_unfused(form, (), torch.device("cpu"))(x)
    torch.testing.assert_close(found, x.exp().reshape(part.shape.bind({})))
