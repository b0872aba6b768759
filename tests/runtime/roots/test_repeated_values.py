"""Which graphs of a rank may differ from those of other ranks in the last bit: those whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autofuse.runtime.roots.repeated_values import graph_updates_state


@pytest.fixture(autouse=True)
def forgotten_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


NET = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
KEPT = [parameter.detach().clone() for parameter in NET.parameters()]
X = torch.ones(8, 4)


def adam() -> Callable[[], Any]:
    optimizer = torch.optim.Adam(NET.parameters())
    for parameter in NET.parameters():
        parameter.grad = torch.ones_like(parameter)
    return lambda: optimizer.step()


def clip() -> Callable[[], Any]:
    adam()
    return lambda: nn.utils.clip_grad_norm_(NET.parameters(), 1.0)


@torch.no_grad()
def average() -> None:
    for kept, parameter in zip(KEPT, NET.parameters(), strict=True):
        kept.mul_(0.9).add_(parameter, alpha=0.1)


@torch.no_grad()
def descend() -> None:
    for parameter, kept in zip(NET.parameters(), KEPT, strict=True):
        parameter -= 0.1 * kept


@torch.no_grad()
def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """A step of Muon's, which is a function of a gradient."""
    return 1.5 * update - 0.5 * update @ (update.T @ update)


@torch.no_grad()
def evaluate() -> torch.Tensor:
    return NET(X)


@pytest.mark.parametrize(
    ("make", "is_update"),
    [
        (adam, True),
        (clip, True),
        (lambda: average, True),
        (lambda: descend, True),
        (lambda: lambda: orthogonal(KEPT[0]), True),
        (lambda: lambda: NET(X), False),  # writes running means, and gradients flow
        (lambda: lambda: F.mse_loss(NET[0](X), X), False),
        (lambda: evaluate, False),
    ],
    ids=["adam", "clip", "average", "descend", "orthogonal", "train", "loss", "evaluate"],
)
def test_updates_are_told_from_passes(make: Callable[[], Callable[[], Any]], is_update: bool) -> None:
    NET.train(make().__name__ != "evaluate")
    found: list[bool] = []

    def note(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(graph_updates_state(module.graph, inputs))
        return module.forward

    torch.compile(make(), backend=note)()
    assert set(found) == {is_update}
