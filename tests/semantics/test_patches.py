"""What a script puts into all modules, or into a class, after a module has been captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

from autofuse.runtime.session import Session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def run(model: nn.Module, times: int = 3) -> torch.Tensor:
    x = torch.ones(4, 8)
    results = [model(x) for _ in range(times)]
    assert all(torch.equal(result, results[-1]) for result in results)
    return results[-1].detach()


def zeroed(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_of_all_modules(kind: str, session: Session) -> None:
    model, seen = Net(), []
    wanted = run(model)
    handle = getattr(all_modules, f"register_module_{kind}")(lambda module, *_: seen.append(type(module).__name__))
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
    handle.remove()
    assert sorted(seen) == ["Linear"] * 4 + ["Net"] * 2
    torch.testing.assert_close(run(model), wanted)
    assert len(seen) == 6 and session.roots.root_of(model).state == "captured"


def test_results_of_hooks_of_all_modules(session: Session) -> None:
    model = Net()
    wanted = run(model)
    handle = all_modules.register_module_forward_hook(zeroed)
    assert run(model).eq(0).all()
    handle.remove()
    torch.testing.assert_close(run(model), wanted)


@pytest.mark.parametrize("kind", [Net, nn.Linear])
def test_forward_of_a_class(kind: Any, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    run(model)
    monkeypatch.setattr(kind, "forward", lambda self, x: x[:, :1] * 0 + 7)
    assert run(model).eq(7).all()
    monkeypatch.undo()
    torch.testing.assert_close(run(model), model.forward(torch.ones(4, 8)).detach())


def test_forward_of_a_class_in_calls_that_are_not_timed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    with torch.no_grad():
        run(model, 400)
        assert session.roots.root_of(model).untimed.is_on
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x[:, :1] * 0 + 7)
        assert run(model).eq(7).all()


@pytest.mark.filterwarnings("ignore")
def test_anomaly_mode_names_the_operation(session: Session) -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 0).sqrt() * 0

    model = Root()
    for _ in range(3):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert session.roots.root_of(model).state == "captured"
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="SqrtBackward0"):
        model(torch.ones(2, requires_grad=True)).sum().backward()
