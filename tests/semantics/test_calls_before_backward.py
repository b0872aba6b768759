"""Several calls of one module before one backward pass, as of discriminators: gradients and statistics are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autofuse.runtime.session import Session

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "without statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


def steps(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        results = [model(torch.randn(5, 3, 6, 6)) for _ in range(3)]
        (results[0].square().mean() - results[1].mean() * results[2].sum()).backward()
        seen += [r.detach().clone() for r in results]
    return seen + [p.grad.clone() for p in model.parameters() if p.grad is not None] + [*model.buffers()]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("norm", NORMS)
def test_calls_before_one_backward_pass(norm: str, training: bool, session: Session) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), NORMS[norm](), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 3))
    model.train(training)
    plain = copy.deepcopy(model)
    seen = steps(model)
    root = session.roots.root_of(model)
    assert root.state == "captured", root.detail
    session.finish(None)
    for one, other in zip(seen, steps(plain), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("held", ["first", "second"])
def test_one_of_the_calls_runs_in_eager(held: str, session: Session) -> None:
    """As a held-out one does. What eager's norm writes is not seen by autograd, so ours must not be either."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 3))
    x = torch.randn(5, 3, 6, 6)
    model(x).sum().backward()
    versions = [buffer._version for buffer in (model[1].running_mean, model[1].running_var)]
    one, other = (model.forward, model) if held == "first" else (model, model.forward)
    results = [one(x), other(x)]
    assert versions == [buffer._version for buffer in (model[1].running_mean, model[1].running_var)]
    (results[0].sum() * results[1].sum()).backward()
