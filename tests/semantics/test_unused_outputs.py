"""Outputs that the loss does not use: what is only behind them has no gradient, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from autofuse.runtime.session import Session

T = torch.Tensor


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: T) -> tuple[T, T, T]:
        h = self.trunk(x).tanh()
        b = self.b(h)
        return self.a(h), b[:, :2], b[:, 2:]


def gradients(model: nn.Module) -> dict[str, T | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def losses(outputs: tuple[T, T, T]) -> list[T]:
    """Behind one head, the other, half of it, both, and the trunk of neither."""
    a, b, c = outputs
    return [a.square().sum(), b.sum() + c.sum(), c.square().mean(), (a * b.sum()).sum()]


def train(model: nn.Module, x: T) -> list[Any]:
    """All that steps with each loss leave behind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found: list[Any] = []
    for step in range(8):
        optimizer.zero_grad()
        losses(model(x))[step % 4].backward()
        found.append(gradients(model))
        optimizer.step()
    return [*found, [p.detach().clone() for p in model.parameters()]]


def is_captured(session: Session) -> bool:
    return any(root.state == "captured" and root.trial.shapes for root in session.roots.groups.values())


def test_what_no_loss_used_has_no_gradient_and_does_not_move(session: Session) -> None:
    model, x = TwoHeads(), torch.randn(3, 8)
    session.roots.uninstall()
    wanted = train(copy.deepcopy(model), x)
    session.roots.install()
    found = train(model, x)
    assert is_captured(session)
    assert [{n: g is None for n, g in step.items()} for step in found[:-1]] == [
        {n: g is None for n, g in step.items()} for step in wanted[:-1]
    ]
    torch.testing.assert_close(found, wanted)


def test_gradients_asked_for_one_by_one(session: Session) -> None:
    model, x = TwoHeads(), torch.randn(3, 8, requires_grad=True)
    for _ in range(2):
        a, _, _ = model(x)
        with pytest.raises(RuntimeError, match="to not have been used"):
            torch.autograd.grad(a.sum(), [model.b.weight])
        found = torch.autograd.grad(model(x)[0].sum(), [model.a.bias, model.b.weight], allow_unused=True)
        assert found[0] is not None and found[1] is None
    assert is_captured(session)


def test_second_gradients_of_one_of_two_outputs(session: Session) -> None:
    model = TwoHeads()
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        model.zero_grad()
        (gradient,) = torch.autograd.grad(model(x)[1].square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        assert {n for n, g in gradients(model).items() if g is None} == {"a.weight", "a.bias"}
    assert is_captured(session)


def test_hooks_are_not_called_for_what_no_loss_used(session: Session) -> None:
    model, x = TwoHeads(), torch.randn(3, 8)
    seen: list[str] = []
    for step in range(3):
        if step == 1:
            model.b.weight.register_hook(lambda g: seen.append("b") or 2 * g)
            model.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"a {p.grad.shape}"))
        a, b, _ = model(x)
        (a if step < 2 else b).sum().backward()
    assert is_captured(session)
    assert seen == ["a torch.Size([4, 8])", "b"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("finds_unused", [False, True])
def test_distributed_training_misses_what_no_loss_used(finds_unused: bool, session: Session) -> None:
    """Data-parallel training waits for all gradients, or looks for those that will not come."""

    def steps(model: nn.Module) -> list[Any]:
        parallel, found = nn.parallel.DistributedDataParallel(model, find_unused_parameters=finds_unused), []
        for step in range(3):
            parallel.zero_grad()
            try:
                losses(parallel(x))[step % 2].backward()
            except RuntimeError as error:
                return [*found, str(error)]
            found.append(gradients(model))
        return found

    model, x = TwoHeads(), torch.randn(3, 8)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        session.roots.uninstall()
        wanted = steps(copy.deepcopy(model))
        session.roots.install()
        found = steps(model)
    finally:
        torch.distributed.destroy_process_group()
    assert is_captured(session)
    if finds_unused:
        assert [{n: g is None for n, g in step.items()} for step in found] == [
            {n: g is None for n, g in step.items()} for step in wanted
        ]
        torch.testing.assert_close(found, wanted)
    else:
        assert len(found) == len(wanted) == 2 and found[1] == wanted[1]
        assert "Expected to have finished reduction in the prior iteration" in found[1]


def test_zeros_meet_no_infinity(session: Session) -> None:
    """The derivatives of the second and third output are infinite here."""

    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: T) -> tuple[T, T, T]:
            y = x * self.scale
            return y, y.square().sum(-1).sqrt(), y.pow(0.5)

    model = Norms()
    for _ in range(2):
        x = torch.zeros(2, 3, requires_grad=True)
        model(x)[0].sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(2, 3))
    assert is_captured(session)


# Where the derivative, and often the value, is infinite or not a number.
INFINITE: dict[str, tuple[Callable[[T], T], float]] = {
    "acos": (torch.acos, 1.0),
    "cosh": (torch.cosh, 100.0),
    "digamma": (torch.digamma, 0.0),
    "entr": (torch.special.entr, 0.0),
    "erfcx": (torch.special.erfcx, -100.0),
    "erfinv": (torch.erfinv, 1.0),
    "exp": (torch.exp, 100.0),
    "exp2": (torch.exp2, 200.0),
    "expm1": (torch.expm1, 100.0),
    "fmod": (lambda y: torch.fmod(y.detach() + 2, y), 0.0),
    "i0": (torch.i0, 100.0),
    "i1": (torch.special.i1, 100.0),
    "lgamma": (torch.lgamma, 0.0),
    "logit": (torch.logit, 0.0),
    "power": (lambda y: y.pow(0.5), 0.0),
    "power_of_2": (lambda y: 2.0**y, 200.0),
    "polygamma": (lambda y: torch.polygamma(1, y), 0.0),
    "product_with_sinh": (lambda y: y * y.sinh(), 100.0),
    "reciprocal_power": (lambda y: y.pow(-1.0), 0.0),
    "remainder": (lambda y: torch.remainder(y.detach() + 2, y), 0.0),
    "sinh": (torch.sinh, 100.0),
    "xlogy": (lambda y: torch.xlogy(y.detach(), y), 0.0),
}


@pytest.mark.parametrize("name", INFINITE)
def test_zeros_meet_no_infinity_of_a_derivative(name: str, session: Session) -> None:
    function, place = INFINITE[name]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: T) -> tuple[T, T]:
            y = x * self.scale
            return y, function(y)

    model = Two()
    for _ in range(2):
        x = torch.full((2, 3), place, requires_grad=True)
        model(x)[0].sum().backward()
        assert x.grad is not None and x.grad.eq(1.0).all()
    assert is_captured(session)


FINITE: dict[str, Callable[[T], T]] = {
    "square": lambda y: y.pow(2),
    "cube": lambda y: y.pow(3).mul(0.5),
    "erf": torch.erf,
    "gelu": torch.nn.functional.gelu,
}


class Counts(nn.Module):
    """Writes to what it reads, so it cannot be run a second time for the outputs that a loss uses alone."""

    def __init__(self, function: Callable[[T], T]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: T) -> tuple[T, T]:
        self.calls.add_(1.0)
        y = x * self.scale * self.calls
        return y, self.function(y)


def check_counts(model: Counts, place: float) -> None:
    """Three steps whose loss uses the first output only: the gradient is the number of the step, as in eager."""
    for step in range(3):
        x = torch.full((2, 3), place, requires_grad=True)
        model(x)[0].sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2, 3), step + 1.0))
    assert model.calls == 3


@pytest.mark.parametrize("name", FINITE)
def test_derivatives_that_are_finite_are_no_reason_to_run_twice(name: str, session: Session) -> None:
    check_counts(Counts(FINITE[name]), 1.0)
    assert is_captured(session)


def test_what_writes_to_what_it_reads_runs_again_from_a_copy_where_zeros_could_meet_infinity(session: Session) -> None:
    check_counts(Counts(lambda y: y.square().sum(-1).sqrt()), 0.0)
    assert is_captured(session)


def test_tensors_of_a_subclass_stay_in_eager_where_a_loss_may_leave_out_outputs(session: Session) -> None:
    """AOTAutograd's graph is of what is inside of them: five inputs here, of which Dynamo's has three."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: T, y: T) -> tuple[T, T]:
            return x * 2.0, y * self.scale

    model = Scaled()
    for _ in range(3):
        x, y = (TwoTensor(torch.zeros(2, 3), torch.ones(2, 3)).requires_grad_() for _ in range(2))
        model(x, y)[0].sum().backward()
        assert x.grad.a.eq(2.0).all() and y.grad is None and model.scale.grad is None
    root = session.roots.root_of(model)
    assert root.reason == "capture_failed" and "a subclass" in root.detail
