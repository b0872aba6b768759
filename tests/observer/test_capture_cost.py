"""What a capture is expected to take: pure functions of what is known before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.capture.python_speed import slowness
from autofuse.ir.records import RootRecord
from autofuse.observer.capture_cost import RootTraits, learn_factor, model_seconds
from autofuse.observer.config import ObserverConfig
from autofuse.observer.observer import Observer
from autofuse.runtime.roots.traits import traits_of

USUAL = RootTraits(100, 150, 20, symbols=1)


def expected(traits: RootTraits = USUAL, per_op: float = 0.003, is_first: bool = False) -> float:
    return model_seconds(traits, per_op, is_first)


def test_what_makes_a_capture_longer() -> None:
    assert expected(is_first=True) > expected() + 0.2
    assert expected(RootTraits(200, 300, 20, 1)) > 1.5 * expected()
    assert expected(RootTraits(100, 0, 20, 1)) < expected()
    assert expected(RootTraits(100, 150, 20, 0)) < expected() < expected(RootTraits(100, 150, 20, 2))
    assert expected(RootTraits(100, 150, 20, 1, once=0.2)) < expected() < expected(RootTraits(100, 150, 90, 1))
    assert slowness() > 0.0 and slowness() == slowness(), "measured once"


def record(**values: Any) -> RootRecord:
    return RootRecord(**{"root": "r", "name": "R", "state": "captured", "reason": "paid_off", **values})


def test_machines_are_as_slow_as_their_captures_were() -> None:
    assert learn_factor([], 1.3) == 1.3
    assert learn_factor([record(state="eager", model_seconds=1.0, capture_seconds=9.0)], 1.3) == 1.3
    assert learn_factor([record(model_seconds=2.0)], 1.3) == 1.3, "of an older version"
    seen = [record(model_seconds=2.0, capture_seconds=seconds) for seconds in (3.0, 4.0, 90.0)]
    assert learn_factor(seen, 1.3) == 2.0
    kept = record(model_seconds=2.0, capture_seconds=0.4, kept_graphs=2)
    assert learn_factor([*seen, kept, kept, kept], 1.3) == 2.0, "nothing was traced there"
    assert learn_factor([record(model_seconds=2.0, capture_seconds=900.0)], 1.3) <= 4.0


class Blocks(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + y
        return x


@pytest.fixture
def observer() -> Iterator[Observer]:
    found = Observer(ObserverConfig(sample_every=1, max_overhead_percent=100.0))
    yield found
    found.stop()


def watch(observer: Observer, model: nn.Module, sizes: list[int]) -> None:
    for size in sizes:
        x, y = torch.randn(size, 4), torch.randn(size, 4)
        observer.on_root_call("root", (x, y), {})
        observer.before_root_call("root", model)
        result = model(x, y)
        observer.after_root_call("root", 1e-3)
        result.sum().backward()


def test_traits_are_known_before_the_capture(observer: Observer) -> None:
    model = Blocks(6)
    assert traits_of(model, observer, "root", 6) is None, "no step was observed"
    watch(observer, model, [3, 5, 5])
    found = traits_of(model, observer, "root", 6)
    assert found is not None
    assert found.forward_operations >= 18 and found.backward_operations > found.forward_operations / 2
    assert found.modules == 20 and found.symbols == 1, "both arguments vary alike"
    assert found.once == pytest.approx(1 - 18 * (5 / 6) / 20)
    few = traits_of(model, observer, "root", 7)
    assert few is not None and few.once == 1.0
    never = traits_of(model, observer, "root", 0)
    assert never is not None and never.once == 1.0
    with torch.no_grad():
        forward = traits_of(model, observer, "root", 6)
    assert forward is not None and forward.backward_operations == 0


def test_sizes_that_do_not_vary_are_no_symbols(observer: Observer) -> None:
    watch(observer, Blocks(2), [4, 4, 4])
    found = traits_of(Blocks(2), observer, "root", 6)
    assert found is not None and found.symbols == 0
