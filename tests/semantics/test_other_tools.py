"""Modules that autofuse has been asked to run, or has captured by itself, in the hands of other tools."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import autofuse
from autofuse.runtime.session import Session
from autofuse.sessions import current_session
from autofuse.startup.script import Target, run_target
from tests.semantics import states

T = torch.Tensor
X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: T) -> T:
        return self.head(self.body(x))


DOORS: dict[str, Callable[[nn.Module], nn.Module]] = {"observed": lambda m: m, "asked": autofuse.optimize}


@pytest.fixture(params=DOORS)
def model(request: pytest.FixtureRequest, session: Session) -> nn.Module:
    model = DOORS[request.param](Net())
    for _ in range(3):
        model(X)
    assert session.roots.root_of(model).state == "captured"
    return model


def plain(model: nn.Module, x: T) -> T:
    return torch.tanh(x @ model.body[0].weight.T + model.body[0].bias) @ model.head.weight.T + model.head.bias


def test_replicas_and_copies_run_their_own_weights(model: Any) -> None:
    shared = model.__new__(type(model))
    shared.__dict__ = dict(model.__dict__)
    replica = model._replicate_for_data_parallel()
    for other in (shared, replica, copy.copy(model), copy.deepcopy(model)):
        other._parameters, other._modules = dict(other._parameters), dict(other._modules)
        other._modules["head"] = nn.Linear(8, 1)
        other.head = other._modules["head"]
        for _ in range(2):
            torch.testing.assert_close(other(X), plain(other, X))
            torch.testing.assert_close(model(X), plain(model, X))


@pytest.mark.filterwarnings("ignore")
def test_scripted_and_traced(model: nn.Module) -> None:
    scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(X), plain(model, X))
    torch.testing.assert_close(torch.jit.trace(model, (X,))(X), plain(model, X))
    torch.testing.assert_close(torch.jit.freeze(torch.jit.script(model.eval()))(X), plain(model, X))
    torch.testing.assert_close(torch.jit.script(model)(X), plain(model, X))


def test_exported_and_compiled(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (X,)).module()
    torch.testing.assert_close(exported(X), plain(model, X))
    torch.testing.assert_close(torch.compile(model, backend="eager")(X), plain(model, X))


def test_forward_mode_and_transforms(model: nn.Module) -> None:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))).tangent
        wanted = forward_ad.unpack_dual(plain(model, forward_ad.make_dual(X, torch.ones_like(X)))).tangent
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.func.vmap(model)(X), plain(model, X))
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}
    found = torch.func.functional_call(model, weights, (X,))
    with torch.no_grad():
        other = copy.deepcopy(model)
        other.load_state_dict(weights)
        torch.testing.assert_close(found, plain(other, X))


def test_a_script_is_read_without_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run_target(Target(str(script))).exit_code == 0
        gc.collect()
    assert not said


def test_a_kernel_stays_after_gradients_in_batches(tmp_path: Path) -> None:
    """It cannot take such tensors, and is not asked to."""
    with states.session_in("tuned", tmp_path, keeps=False):
        model, x, session = Net(), X.clone().requires_grad_(), current_session()
        kernels = []
        for is_batched in (False, True, False):
            result = model(x)
            weights = torch.eye(3)[..., None] if is_batched else torch.ones(3, 1)
            torch.autograd.grad(result, x, weights, is_grads_batched=is_batched)
            plans = [plan for router in session.context.routers for plan in router.all_plans()]
            kernels.append(sum(plan.fused_calls(node) for plan in plans for node in plan.nodes))
        assert kernels == [2, 3, 5], "forward and backward, forward alone, both"
        assert not session.context.said["node_failed"]


def test_gradients_in_batches(model: nn.Module) -> None:
    functional = torch.autograd.functional
    for vectorize in (False, True):
        found = functional.jacobian(model, X, vectorize=vectorize)
        torch.testing.assert_close(found, functional.jacobian(lambda x: plain(model, x), X))
    x = X.clone().requires_grad_()
    result = model(x)
    (found,) = torch.autograd.grad(result, x, torch.eye(3)[..., None], is_grads_batched=True)
    (wanted,) = torch.autograd.grad(plain(model, x), x, torch.eye(3)[..., None], is_grads_batched=True)
    torch.testing.assert_close(found, wanted)
