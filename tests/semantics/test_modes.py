"""A script's own modes and what it switches off see what python shows them, before and after a module is captured."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autofuse.runtime.session import Session

T = torch.Tensor


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Flops(FlopCounterMode):
    def __init__(self) -> None:
        super().__init__(display=False)

    @property
    def seen(self) -> int:
        return int(self.get_total_flops())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: T) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", [Functions, Operators, Flops])
def test_modes_see_what_they_see_in_python(mode: Any, request: pytest.FixtureRequest) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, x)
    with mode() as python:
        step(model, optimizer, x)
    session: Session = request.getfixturevalue("session")
    for _ in range(3):  # cold, captured, and once more after that
        with mode() as ours:
            step(model, optimizer, x)
        assert ours.seen == python.seen
        step(model, optimizer, x)
        assert session.roots.root_of(model).state == "captured"


def test_a_default_device_is_no_mode_that_sees(session: Session) -> None:
    model = nn.Linear(8, 8)
    with torch.device("cpu"):
        model(torch.ones(4, 8))
        model(torch.ones(4, 8))
    assert session.roots.root_of(model).state == "captured"
