"""Inputs that are written to, and others that lie in the same memory: as eager, whichever calls came first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.runtime.session import Session

T = torch.Tensor


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: T, b: T) -> T:
        a.mul_(2)
        return (b * self.scale).sum() + a.sum()


class Keeps(nn.Module):
    """Its state is written to, and given away."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(12))

    def forward(self, a: T, b: T) -> T:
        self.state.add_(a)
        return (b * 2).sum() + self.state.sum()


def overlapping(model: nn.Module) -> tuple[T, T]:
    if isinstance(model, Keeps):
        return torch.arange(12.0), model.state[2:]
    base = torch.arange(16.0)
    return base[:12], base[4:]


def apart(model: nn.Module) -> tuple[T, T]:
    return torch.arange(12.0), torch.arange(12.0) + 4


def beside(model: nn.Module) -> tuple[T, T]:
    base = torch.arange(24.0)
    return base[:12], base[12:]


def same(model: nn.Module) -> tuple[T, T]:
    a = torch.arange(12.0)
    return a, a


KINDS = [overlapping, apart, beside, same]


def run(model: nn.Module, order: Any) -> list[Any]:
    found: list[Any] = []
    for kind in order:
        for _ in range(3):
            a, b = kind(model)
            result = model(a, b)
            if result.requires_grad:
                result.backward()
            found += [
                result.detach(),
                a.clone(),
                b.clone(),
                *(p.grad.clone() for p in model.parameters() if p.grad is not None),
            ]
    return found


@pytest.mark.parametrize("make", [Writes, Keeps])
@pytest.mark.parametrize("order", list(itertools.permutations(KINDS, 3))[::3])
def test_any_order(make: Any, order: Any, session: Session) -> None:
    session.roots.uninstall()
    wanted = run(make(), order)
    session.roots.install()
    torch.testing.assert_close(run(make(), order), wanted)
    with torch.no_grad():
        found = run(make(), order)
        session.roots.uninstall()
        torch.testing.assert_close(found, run(make(), order))


class WritesOneRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a: T) -> T:
        a[0].add_(1)
        return (a * self.scale).sum()


SHARING = {
    "expanded": lambda: torch.zeros(1, 4).expand(3, 4),
    "windows": lambda: torch.zeros(8).unfold(0, 4, 2),
    "rows": lambda: torch.zeros(3, 4),
}


@pytest.mark.parametrize("kind", SHARING)
def test_an_input_whose_elements_share_memory(kind: str, session: Session) -> None:
    """AOTAutograd writes the whole input where the function writes one row, which torch refuses."""
    model = WritesOneRow()
    for _ in range(4):
        a, twin = SHARING[kind](), SHARING[kind]()
        result = model(a)
        session.roots.uninstall()
        expected = model(twin)
        session.roots.install()
        assert torch.equal(result, expected) and torch.equal(a, twin)
