"""Composite operators: what a decomposition must keep, and which ones are refused for what they do not keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autofuse.capture.decompose import decompositions
from autofuse.errors import FusionError
from autofuse.fusion.node import space_of
from autofuse.ir.composites import REFUSED, expanded
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.optable import OPS, OpKind, info
from tests.cases import CASES
from tests.tracing import trace

aten = torch.ops.aten


def special(*sizes: int) -> torch.Tensor:
    """Normal numbers with NaN, Inf and zeros of both signs among them."""
    values, chosen = torch.randn(sizes), torch.rand(sizes)
    for number, value in enumerate((float("nan"), float("inf"), -float("inf"), -0.0, 0.0)):
        values = torch.where((chosen * 20).int() == number, torch.tensor(value), values)
    return values


def classes(*sizes: int) -> torch.Tensor:
    return torch.randint(0, 5, sizes)


class Sample(NamedTuple):
    call: Callable[..., Any]
    inputs: Callable[[], list[torch.Tensor]]


SAMPLES: dict[str, list[Sample]] = {
    "aten.linalg_cross.default": [Sample(aten.linalg_cross.default, lambda: [special(70, 3), special(70, 3)])],
    "aten.renorm.default": [
        Sample(lambda x: aten.renorm(x, 2.0, 0, 1.5), lambda: [special(70, 5)]),
        Sample(lambda x: aten.renorm(x, float("inf"), 1, 1.5), lambda: [special(9, 50)]),
    ],
    "aten.dist.default": [
        Sample(lambda x, y: aten.dist(x, y, 2.0), lambda: [torch.randn(7, 5), torch.randn(7, 5)]),
        Sample(lambda x, y: aten.dist(x, y, 0.0), lambda: [special(7, 5), special(7, 5)]),
        Sample(lambda x, y: aten.dist(x, y, -float("inf")), lambda: [special(7, 5), torch.randn(5)]),
        Sample(lambda x, y: aten.dist(x, y, 2.0), lambda: [torch.randn(0, 5), torch.randn(0, 5)]),
    ],
    "aten.trace.default": [
        Sample(lambda x: aten.trace(x), lambda: [torch.randn(7, 9)]),
        Sample(lambda x: aten.trace(x), lambda: [classes(9, 7).int()]),
    ],
    "aten.addr.default": [
        Sample(lambda a, x, y: aten.addr(a, x, y, beta=2, alpha=3), lambda: [special(7, 5), special(7), special(5)]),
        Sample(lambda a, x, y: aten.addr(a, x, y, beta=0), lambda: [special(7, 5), special(7), special(5)]),
    ],
    "aten.isin.Tensor_Tensor": [
        Sample(lambda x, y: aten.isin(x, y), lambda: [special(7, 5), special(6)]),
        Sample(lambda x, y: aten.isin(x, y), lambda: [classes(7, 5), classes(2)]),
    ],
    "aten.rrelu_with_noise_backward.default": [
        Sample(
            lambda g, x, n: aten.rrelu_with_noise_backward(g, x, n, 0.1, 0.3, True, False),
            lambda: [special(70, 5), special(70, 5), special(70, 5)],
        ),
        Sample(
            lambda g, x, n: aten.rrelu_with_noise_backward(g, x, n, 0.1, 0.3, False, False),
            lambda: [special(70, 5), special(70, 5), special(70, 5)],
        ),
    ],
    "aten.block_diag.default": [Sample(lambda x, y: aten.block_diag([x, y]), lambda: [special(7, 5), special(3, 2)])],
    "aten.mv.default": [Sample(lambda x, y: aten.mv(x, y), lambda: [special(70, 5), special(5)])],
    "aten.addmv.default": [
        Sample(lambda a, x, y: aten.addmv(a, x, y), lambda: [special(70), special(70, 5), torch.randn(5)]),
        Sample(lambda a, x, y: aten.addmv(a, x, y, beta=0), lambda: [special(70), special(70, 5), torch.randn(5)]),
    ],
    "aten.dot.default": [Sample(lambda x, y: aten.dot(x, y), lambda: [torch.randn(70), torch.randn(70)])],
    "aten.vdot.default": [Sample(lambda x, y: aten.vdot(x, y), lambda: [torch.randn(70), torch.randn(70)])],
    "aten.nll_loss2d_forward.default": [
        Sample(
            lambda x, y: aten.nll_loss2d_forward(x, y, None, 1, -100),
            lambda: [special(3, 5, 4, 6), classes(3, 4, 6)],
        ),
        Sample(
            lambda x, y, w: aten.nll_loss2d_forward(x, y, w, 1, 3),
            lambda: [torch.randn(3, 5, 4, 6), classes(3, 4, 6), torch.rand(5)],
        ),
        Sample(
            lambda x, y: aten.nll_loss2d_forward(x, y, None, 1, 3),
            lambda: [torch.randn(3, 5, 4, 6), torch.full((3, 4, 6), 3)],
        ),
    ],
    "aten._weight_norm_interface.default": [
        Sample(lambda v, g: aten._weight_norm_interface(v, g, 0), lambda: [special(7, 5), special(7, 1)]),
        Sample(lambda v, g: aten._weight_norm_interface(v, g, 1), lambda: [torch.randn(7, 5), special(1, 5)]),
    ],
    "aten.grid_sampler_2d.default": [
        Sample(
            lambda x, g: aten.grid_sampler_2d(x, g, 0, 0, False),
            lambda: [special(2, 3, 7, 5), torch.randn(2, 9, 4, 2)],
        )
    ],
}  # fmt: skip


def differences(sample: Sample, seed: int) -> list[str]:
    """What a decomposition changes of what eager gives: bits of integers, the places of NaN and Inf."""
    torch.manual_seed(seed)
    inputs = sample.inputs()
    before = torch.get_rng_state()
    eager = sample.call(*inputs)
    found = make_fx(sample.call, decomposition_table=decompositions())(*inputs)(*inputs)
    wrong = [] if torch.equal(before, torch.get_rng_state()) else ["random numbers"]
    for a, b in zip(*((v if isinstance(v, tuple | list) else (v,)) for v in (eager, found)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not a.is_floating_point():
            wrong += [] if torch.equal(a, b) else ["integers"]
        elif not (torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf() * a.sign(), b.isinf() * b.sign())):
            wrong.append("NaN or Inf")
    return wrong


@pytest.mark.parametrize("target", [target for target, facts in OPS.items() if facts.kind is OpKind.COMPOSITE])
def test_a_decomposition_keeps_integers_nan_and_random_numbers(target: str) -> None:
    for sample in SAMPLES[target]:
        for seed in range(4):
            assert differences(sample, seed) == []


@pytest.mark.parametrize("target", REFUSED)
def test_a_refused_decomposition_still_does_not(target: str) -> None:
    assert info(target).kind is not OpKind.COMPOSITE
    assert any(differences(sample, seed) for sample in SAMPLES[target] for seed in range(4))


def composite(name: str) -> tuple[NodeForm, Operation]:
    form = CASES[name].form()
    return form, next(op for op in form.operations if op.body is not None)


def test_a_form_keeps_its_decompositions() -> None:
    form, op = composite("image_loss")
    assert NodeForm.from_json(form.to_json()) == form
    without = [item for item in expanded(form).operations if item.body is not None]
    assert without == [] and len(expanded(form).operations) > len(form.operations)
    assert expanded(expanded(form)) is not form and expanded(expanded(form)) == expanded(form)
    assert op.body is not None and set(op.body.to_json()["symbols"]) == set()


def test_a_decomposition_within_another_is_refused() -> None:
    form, _ = composite("renorm_rows")
    data = form.to_json()
    (stored,) = (item for item in data["operations"] if "body" in item)
    stored["body"]["operations"][0]["body"] = dict(stored["body"])
    with pytest.raises(FusionError, match="expected a decomposition into operators without one"):
        NodeForm.from_json(data)


def test_no_decomposition_that_adds_a_guard() -> None:
    """With sizes that may change, `isin` asks which of its algorithms is faster for them."""
    form = trace(lambda x, y: aten.isin(x, y), [torch.zeros(5, 7), torch.zeros(6)])
    assert [(op.target, op.body) for op in form.operations] == [("aten.isin.Tensor_Tensor", None)]
    assert space_of(form.operations[0], form.spec) is None


def test_no_decomposition_that_takes_what_eager_refuses() -> None:
    scores, rows = torch.zeros(2, 5, 4, 6), torch.zeros(5, 7)
    for function, inputs in (
        (lambda x, y: aten.nll_loss2d_forward(x, y, None, 1, -100), [scores, classes(2, 3, 6)]),
        (lambda x, y: aten.nll_loss2d_forward(x, y, None, 1, -100), [scores, classes(2, 4, 6).int()]),
        (lambda v, g: aten._weight_norm_interface(v, g, 0), [rows.bfloat16(), rows[:, :1]]),
        (lambda x, y: aten.addmv(y[:5], x, y, alpha=0), [rows, rows[0]]),
    ):
        form = trace(function, inputs, dynamic=False)
        assert [op.body for op in form.operations if info(op.target).kind is OpKind.COMPOSITE] == [None]
