"""What the tests of the observer share: a session in ten lines, and small models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autofuse.observer.config import ObserverConfig
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import RootTracker, root_key

EVERY_STEP = ObserverConfig(
    first_steps=1000,
    skip_steps=0,
    sample_every=1,
    max_overhead_percent=100.0,
    burst_seconds=1000.0,
    settled_after=10**6,
)


class Watch:
    """Tracker and observer together, as a session uses them; ``calls`` lists the class names of roots called."""

    def __init__(self, config: ObserverConfig = EVERY_STEP) -> None:
        self.observer = Observer(config)
        self.calls: list[str] = []
        self.tracker = RootTracker(self._handle)

    def _handle(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = root_key(module)
        self.calls.append(type(module).__name__)
        self.observer.on_root_call(key, args, kwargs)
        self.observer.before_root_call(key, module)
        began = time.perf_counter()
        try:
            return self.tracker.call_original(module, args, kwargs)
        finally:
            self.observer.after_root_call(key, time.perf_counter() - began)


@contextmanager
def watching(config: ObserverConfig = EVERY_STEP) -> Iterator[Watch]:
    """Everything in the block is watched, each step sampled; nothing is left behind, and nothing of ours failed."""
    watch = Watch(config)
    watch.tracker.install()
    try:
        yield watch
    finally:
        watch.tracker.uninstall()
        watch.observer.stop()
    assert watch.observer.fault is None, watch.observer.fault
    assert nn.Module._compiled_call_impl is None
    assert torch._C._len_torch_dispatch_stack() == 0


class MLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.rest = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rest(self.first(x))


class Blocks(nn.Module):
    """Blocks kept in a dict of lists: modules that are not registered the usual way."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.registered = nn.ModuleList([MLP(width) for _ in range(2)])
        self.loose = {"list": [self.registered[0], self.registered[1]]}
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        for block in self.loose["list"]:
            x = block(x) * scale
        return {"out": self.norm(x)}
