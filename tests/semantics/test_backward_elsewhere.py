"""Backward passes under other circumstances than the forward pass, and what AOTAutograd cannot: eager's results."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import convert_frame
from torch.utils.checkpoint import checkpoint

from autofuse.capture.corrections import anomaly
from autofuse.capture.corrections.double_backward import Replay
from autofuse.runtime.session import Session

T = torch.Tensor


def agree(session: Session, model: nn.Module, steps: Callable[[nn.Module], list[Any]]) -> None:
    """All that some steps leave behind, under autofuse and in plain eager."""
    plain = copy.deepcopy(model)
    found = steps(model)
    session.roots.uninstall()
    wanted = steps(plain)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) and type(one) is type(other)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))


def test_backward_under_autocast_of_a_forward_pass_without(session: Session) -> None:
    def steps(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        for _ in range(3):
            loss = model(torch.randn(8, 32)).square().mean()
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
        return [p.grad for p in model.parameters()]

    agree(session, net(), steps)
    assert any(root.state == "captured" for root in session.roots.groups.values())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def block(self, x: T) -> T:
        return torch.relu(self.norm(self.linear(x)))

    def forward(self, x: T) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


def test_a_checkpointed_norm_counts_twice_as_in_eager(session: Session) -> None:
    def steps(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
        return [*model.buffers(), *(p.grad for p in model.parameters())]

    torch.manual_seed(0)
    agree(session, Checkpointed(), steps)


class Named(T):
    """A subclass that only has a name."""


def test_a_subclass_without_a_dispatch_of_its_own(session: Session) -> None:
    def steps(model: nn.Module) -> list[Any]:
        x = torch.ones(3, 32)
        return [model(value).detach() for value in (x.as_subclass(Named), x, x.as_subclass(Named))]

    agree(session, net(), steps)


def test_anomaly_mode_of_a_compilation_in_another_thread_ends_with_it(session: Session) -> None:
    """AOTAutograd traces with the mode on: for the whole process, for a while."""
    begun, may_end = threading.Event(), threading.Event()

    def compile_something() -> None:
        with convert_frame.compile_lock, torch.autograd.detect_anomaly(check_nan=False):
            begun.set()
            may_end.wait(20)

    def steps(model: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        for step in range(3):
            loss = model(torch.randn(8, 32)).square().mean()
            if step == 2:
                other = threading.Thread(target=compile_something)
                other.start()
                begun.wait(20)
            loss.backward()
        may_end.set()
        other.join()
        return [p.grad for p in model.parameters()]

    replayed: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        before = Replay.gradients
        patch.setattr(Replay, "gradients", lambda *args: replayed.append(args) or before(*args))
        agree(session, net(), steps)
    assert not replayed
    assert not torch.is_anomaly_enabled()


def test_anomaly_mode_is_put_back_after_a_compilation_only(session: Session) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compile_something() -> None:
        with convert_frame.compile_lock, torch.autograd.detect_anomaly(check_nan=False):
            begun.set()
            may_end.wait(0.2)

    other = threading.Thread(target=compile_something)
    other.start()
    begun.wait(20)
    with anomaly.is_off():  # only once the other is done
        may_end.set()
        assert not torch.is_anomaly_enabled()
        other.join()
    assert not torch.is_anomaly_enabled()
