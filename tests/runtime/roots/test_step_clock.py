"""Forward and backward by the clock: which seconds belong to which root's step."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.runtime.roots.step_clock import Account, BackwardClock


class Slow(torch.autograd.Function):
    """An operation whose backward pass moves the clock."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: list[float], seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        ctx.clock[0] += ctx.seconds
        return gradient, None, None


class Script:
    """A script with roots, whose forward and backward passes take what they are said to take."""

    def __init__(self) -> None:
        self.clock = [0.0]
        self.context: Any = SimpleNamespace(
            noted_seconds=0.0, capture_seconds=0.0, planning_seconds=0.0, paused_seconds=0.0
        )
        self.backwards = BackwardClock(lambda: self.clock[0])

    def root(self) -> Account:
        return Account(self.context, self.backwards)

    def call(
        self, root: Account, x: torch.Tensor, forward: float, backward: float, captured: bool = False, wrap: Any = None
    ) -> Any:
        root.end(self.clock[0])
        root.begin(x.numel(), self.clock[0], captured)
        self.clock[0] += forward
        result = Slow.apply(x, self.clock, backward)
        root.returned(wrap(result) if wrap else result, self.clock[0])
        return result

    def wait(self, seconds: float) -> None:
        self.clock[0] += seconds


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    "wrap", [None, lambda y: {"loss": 1.0, "logits": [y]}, lambda y: (3, y)], ids=["", "dict", "tuple"]
)
def test_a_step_is_its_forward_and_its_backward(script: Script, x: torch.Tensor, wrap: Any) -> None:
    root = script.root()
    for _ in range(3):
        loss = script.call(root, x, 1.0, 2.0, wrap=wrap).sum()
        script.wait(5.0)  # the loss, or whatever the script does before
        loss.backward()
        script.wait(50.0)
    root.end(script.clock[0])
    assert root.ledger.eager_seconds == pytest.approx(9.0)
    assert root.ledger.times.typical(4) == pytest.approx((3.0, 58.0))


def test_a_backward_through_two_roots_is_shared(script: Script, x: torch.Tensor) -> None:
    first, second = script.root(), script.root()
    for _ in range(2):
        y = script.call(first, x, 1.0, 2.0)
        script.call(second, y, 3.0, 4.0).sum().backward()
    first.end(script.clock[0])
    second.end(script.clock[0])
    total = first.ledger.eager_seconds + second.ledger.eager_seconds
    assert total == pytest.approx(script.clock[0]), "no second counts twice"
    assert first.ledger.eager_seconds == pytest.approx(2 * (1.0 + 6.0 / 4))


def test_a_root_that_runs_several_times_before_one_backward(script: Script, x: torch.Tensor) -> None:
    cell = script.root()
    y = x
    for _ in range(5):
        y = script.call(cell, y, 1.0, 1.0)
    y.sum().backward()
    cell.end(script.clock[0])
    assert cell.ledger.eager_seconds == pytest.approx(script.clock[0] - 4.0), "steps that have ended get no more"


def test_a_backward_that_fails_is_forgotten(script: Script, x: torch.Tensor) -> None:
    root = script.root()
    y = script.call(root, x, 1.0, 1.0)
    y.register_hook(lambda gradient: gradient[:0].reshape(7))  # raises
    with pytest.raises(RuntimeError):
        y.sum().backward()
    for _ in range(2):
        script.wait(100.0)
        script.call(root, x, 1.0, 1.0).sum().backward()
    root.end(script.clock[0])
    assert root.ledger.eager_seconds <= 6.0


def test_backward_twice_and_gradients_of_gradients_count(script: Script, x: torch.Tensor) -> None:
    root = script.root()
    loss = script.call(root, x, 1.0, 1.0).pow(2).sum()
    loss.backward(retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.sum().backward()
    root.end(script.clock[0])
    assert 3.0 <= root.ledger.eager_seconds <= script.clock[0]


def test_without_gradients_the_call_is_all(script: Script) -> None:
    root = script.root()
    with torch.no_grad():
        script.call(root, torch.ones(3), 1.0, 9.0)
        script.wait(10.0)
    root.end(script.clock[0])
    assert root.ledger.eager_seconds == 1.0


def test_pauses_for_tuning_and_other_roots_captures_are_no_loss_of_this_one(script: Script, x: torch.Tensor) -> None:
    root, other = script.root(), script.root()
    for _ in range(9):
        script.call(root, x, 1.0, 1.0).sum().backward()
    script.call(root, x, 1.0, 1.0, captured=True).sum().backward()
    root.note("tracing", 0.5)
    script.wait(0.5)
    other.note("tracing", 40.0)
    script.wait(40.0)
    script.context.paused_seconds += 30.0
    script.wait(30.0)
    root.end(script.clock[0])
    assert root.ledger.lost_seconds <= 0.5


@pytest.mark.parametrize("place", ["in forward", "in backward", "between the passes"])
def test_a_pause_hides_no_capture(script: Script, x: torch.Tensor, place: str) -> None:
    def pause() -> None:
        script.context.paused_seconds += 30.0
        script.wait(30.0)

    root = script.root()
    for _ in range(9):
        script.call(root, x, 1.0, 1.0).sum().backward()
    root.end(script.clock[0])
    root.begin(x.numel(), script.clock[0], True)
    root.note("tracing", 5.0)
    script.wait(6.0)
    if place == "in forward":
        pause()
    result = Slow.apply(x, script.clock, 1.0)
    root.returned(result, script.clock[0])
    if place == "in backward":
        result.register_hook(lambda gradient: pause())
    result.sum().backward()
    if place == "between the passes":
        pause()
    root.end(script.clock[0])
    assert root.ledger.lost() == {**root.ledger.lost(), "tracing": 5.0, "slow steps": 0.0}


def test_outputs_keep_no_trace_of_it(x: torch.Tensor) -> None:
    model = nn.Linear(4, 2)
    y = model(x)
    before = sorted(dir(y)), y._backward_hooks, y.grad_fn.next_functions
    context: Any = SimpleNamespace(noted_seconds=0.0, capture_seconds=0.0, planning_seconds=0.0, paused_seconds=0.0)
    root = Account(context, BackwardClock())
    root.begin(4, time.perf_counter(), False)
    root.returned(y, time.perf_counter())
    assert (sorted(dir(y)), y._backward_hooks, y.grad_fn.next_functions) == before
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, model.weight.sum(0))
