"""What has no loop form is refused with a code; what cannot be compiled says so."""

from __future__ import annotations

import pytest
import torch

from autofuse.codegen.c.build import compile_source, find_toolchain
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import CompilerError, LoweringError, ShapeError
from autofuse.ir.operation import bind_shapes
from tests.cases import CASES
from tests.codegen.conftest import Verify
from tests.codegen.nodes import NodeBuilder


def _two_reductions(b: NodeBuilder) -> object:
    x = b.input(torch.zeros(5, 7))
    rows = b.call("aten._softmax.default", x, 1, False)
    return b.call("aten._softmax.default", rows, 0, False)


def _column_sum_used_in_rows(b: NodeBuilder) -> object:
    x = b.input(torch.zeros(5, 7))
    rows = b.call("aten._softmax.default", x, 1, False)
    return b.call("aten.sub.Tensor", rows, b.call("aten.sum.dim_IntList", rows, [0], True))


def _unrelated_sizes(b: NodeBuilder) -> object:
    x, y = b.input(torch.zeros(5, 7)), b.input(torch.zeros(3))
    return (b.call("aten.sum.default", x), b.call("aten.sum.default", y))


def _division_by_a_tensor_of_integers(b: NodeBuilder) -> object:
    x = b.input(torch.ones(5, dtype=torch.int64))
    return b.call("aten.remainder.Scalar", x, 0) if False else b.call("aten.pow.Tensor_Tensor", x, x)


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (_two_reductions, "reductions"),
        (_column_sum_used_in_rows, "reductions"),
        (_unrelated_sizes, "disjoint"),
        (_division_by_a_tensor_of_integers, "pow"),
    ],
)
def test_refused_with_a_code(build: object, code: str) -> None:
    b = NodeBuilder()
    found = build(b)  # type: ignore[operator]
    outputs = found if isinstance(found, tuple) else (found,)
    with pytest.raises(LoweringError) as caught:
        lower(b.form(*outputs))
    assert caught.value.code == code


def test_an_operator_without_a_rule() -> None:
    b = NodeBuilder()
    out = b.call("aten.msort.default", b.input(torch.zeros(5)))
    with pytest.raises(LoweringError) as caught:
        lower(b.form(out))
    assert caught.value.code == "no_rule"


def test_no_compiler() -> None:
    with pytest.raises(CompilerError, match="expected a C compiler, found none of no-such-cc"):
        find_toolchain("no-such-cc")


def test_the_compilers_first_errors_are_shown(generator: FusionKernelGenerator) -> None:
    with pytest.raises(CompilerError, match="undeclared"):
        compile_source("int f(void) { return x; }", generator.toolchain, generator.toolchain.flags)


def test_shapes_that_do_not_fit() -> None:
    form = CASES["add_bias_gelu"].form()
    assert bind_shapes(form, [(5, 7), (7,), (5, 7)]) == {"s0": 5, "s1": 7}
    with pytest.raises(ShapeError):
        bind_shapes(form, [(5, 7), (8,), (5, 7)])
    with pytest.raises(ShapeError, match="expected 3 shapes"):
        bind_shapes(form, [(5, 7)])


def test_can_generate_specialized(generator: FusionKernelGenerator) -> None:
    assert generator.can_generate_specialized([(4, 5), ()])
    assert not generator.can_generate_specialized([(4, "s0")])


def test_targets_out_of_range_never_read_out_of_bounds(generator: FusionKernelGenerator) -> None:
    kernel = generator.generate_generic_kernel(CASES["cross_entropy"].form())
    scores = torch.randn(4, 7)
    loss, _ = kernel(scores, torch.tensor([1, 2, 2**40, -7]))
    assert loss.isnan()


def test_a_value_that_is_read_along_two_dims_has_two_loops(verify: Verify) -> None:
    """It had one, which wrote only the diagonal."""
    b = NodeBuilder()
    x, y = b.input(torch.zeros(5, 5)), b.input(torch.zeros(5))
    row, col = b.call("aten.unsqueeze.default", y, 0), b.call("aten.unsqueeze.default", y, 1)
    table = b.call("aten.add.Tensor", row, col)
    verify(b.form(table, b.call("aten.mul.Tensor", table, x), b.call("aten.addcmul.default", x, row, col)), [()])


def test_a_sum_of_rows_along_both_dims_is_refused() -> None:
    b = NodeBuilder()
    x = b.input(torch.zeros(5, 5))
    total = b.call("aten.sum.dim_IntList", x, [1])
    table = b.call(
        "aten.add.Tensor", b.call("aten.unsqueeze.default", total, 0), b.call("aten.unsqueeze.default", total, 1)
    )
    with pytest.raises(LoweringError, match="loop"):
        lower(b.form(b.call("aten.mul.Tensor", table, x)))
