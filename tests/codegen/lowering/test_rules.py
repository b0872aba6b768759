"""The lowering table covers exactly the fusible operators; those that tracing never shows are checked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.lowering.rules import RULES
from autofuse.codegen.lowering.rules_random import RANDOM_RULES
from autofuse.codegen.reference import make_inputs, run_unfused
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import FUSIBLE, OPS, OpKind
from autofuse.ir.shape import SymbolicShape
from tests.cases import CASES
from tests.codegen.compare import problems
from tests.codegen.conftest import Verify
from tests.codegen.nodes import NodeBuilder
from tests.tracing import trace


def test_every_fusible_operator_has_a_rule() -> None:
    fusible = {target for target, info in OPS.items() if info.kind in FUSIBLE - {OpKind.COMPOSITE}}
    assert fusible - set(RULES) == set()
    assert set(RULES) - fusible == set()


X, MASK = torch.zeros(5, 7), torch.zeros(5, 7, dtype=torch.bool)

BY_HAND: dict[str, tuple[Any, ...]] = {
    "aten.square.default": (X,),
    "aten.where.ScalarSelf": (MASK, 2.0, X),
    "aten.where.ScalarOther": (MASK, X, 2.0),
    "aten.where.Scalar": (MASK, 2.0, 3.0),
    "aten.reshape.default": (X, [7, 5]),
    "aten._unsafe_view.default": (X, [35]),
    "aten.alias.default": (X,),
    "aten.detach.default": (X,),
    "aten.transpose.int": (X, 0, 1),
}


@pytest.mark.parametrize("target", BY_HAND)
def test_operators_that_tracing_replaces(target: str, verify: Verify) -> None:
    verify(form_by_hand(target), [()])


def form_by_hand(target: str) -> NodeForm:
    """An operator of `BY_HAND`, and an addition behind it."""
    b = NodeBuilder()
    args = [b.input(a) if isinstance(a, torch.Tensor) else a for a in BY_HAND[target]]
    result = b.call(target, *args)
    return b.form(b.call("aten.add.Scalar", result, 1.0))


def test_every_fusible_operator_is_tested() -> None:
    tested = {op.target for case in CASES.values() for op in case.form().operations}
    tested |= set(BY_HAND) | {"aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"}
    tested |= set(RANDOM_RULES)  # in test_philox.py
    assert {t for t, i in OPS.items() if i.kind in FUSIBLE} - tested == set()


def _spec(*sizes: int) -> TensorSpec:
    return TensorSpec(SymbolicShape(sizes), "float32", SymbolicShape(torch.empty(sizes).stride()))


def rms_form(backward: bool) -> NodeForm:
    x, r, w = _spec(6, 40), _spec(6, 1), _spec(40)
    i = [ValueRef(f"i{n}") for n in range(4)]
    if backward:
        op = Operation(
            "v0", "aten._fused_rms_norm_backward.default", (i[0], i[1], (40,), i[2], i[3], (True, True)), (), (x, w)
        )
        inputs = (x, x, r, w)
    else:
        op = Operation("v0", "aten._fused_rms_norm.default", (i[0], (40,), i[1], 1e-6), (), (x, r))
        inputs = (x, w)
    named = tuple(NodeInput(f"i{n}", s) for n, s in enumerate(inputs))
    return NodeForm(named, (op,), (ValueRef("v0"), ValueRef("v0", 1)))


def test_rms_norm(generator: Any) -> None:
    form = rms_form(backward=False)
    x, w = make_inputs(form, {})
    exact = [t.double() for t in (x, w)]
    rstd = torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6)
    reference = (exact[0] * rstd * exact[1], rstd)
    found = generator.generate_generic_kernel(form)(x, w)
    assert not problems(found, run_unfused(form, [x, w], {}), reference)


def test_rms_norm_backward(generator: Any) -> None:
    """aten has no CPU kernel for it: autograd through the parts is the reference."""
    form = rms_form(backward=True)
    g, x, _, w = make_inputs(form, {})
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    found = generator.generate_generic_kernel(form)(g, x, rstd, w)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        a, b = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
        y = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6) * b
        return torch.autograd.grad(y, (a, b), g.to(dtype))

    assert not problems(found, gradients(torch.float32), gradients(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_certain_probabilities_divide_by_what_eager_divides_by(dtype: torch.dtype, generator: Any) -> None:
    """The least divisor of binary cross-entropy's gradient, 1e-12, is 0 in float16."""
    x, y = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=dtype), torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=dtype)
    gradient = torch.ops.aten.binary_cross_entropy_backward.default
    form = trace(lambda g, x, y: gradient(g, x, y, None, 0), [torch.ones_like(x), x, y])
    (found,) = generator.generate_generic_kernel(form)(torch.ones_like(x), x, y)
    torch.testing.assert_close(found, gradient(torch.ones_like(x), x, y, None, 0), equal_nan=True)


INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_and_promote(dtype: str, verify: Verify) -> None:
    b = NodeBuilder()
    x, y = (b.input(torch.ones(9, 33, dtype=getattr(torch, dtype))) for _ in range(2))
    product = b.call("aten.mul.Tensor", b.call("aten.mul.Tensor", x, y), y)
    outputs = [
        product,
        b.call("aten.sub.Tensor", x, y),
        b.call("aten.div.Tensor", x, b.call("aten.add.Scalar", b.call("aten.mul.Tensor", y, y), 1)),
        b.call("aten.clamp.default", x, -3, 5),
        b.call("aten.gt.Scalar", x, 2.5),
        b.call("aten._to_copy.default", x, dtype="float32"),
        b.call("aten.abs.default", x),
        b.call("aten.sign.default", x),
    ]
    verify(b.form(*outputs), [()], ("normal",))


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.ldexp.Tensor", (X, torch.ones(5, 7, dtype=torch.int64))),
        ("aten.nextafter.default", (X.bfloat16(), X.bfloat16())),
        ("aten.round.decimals", (X.bfloat16(),)),
    ],
)
def test_what_eager_rounds_or_scales_in_its_own_way_is_refused(target: str, args: tuple[torch.Tensor, ...]) -> None:
    b = NodeBuilder()
    kwargs = {"decimals": 2} if target == "aten.round.decimals" else {}
    with pytest.raises(LoweringError):
        lower(b.form(b.call(target, *map(b.input, args), **kwargs)))
