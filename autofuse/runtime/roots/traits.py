"""Traits of a root before anything is traced: its numbers of operations, modules, equal blocks, sizes; its device.

In: a module, or a function (whose inside is unknown), and the observer's records of its calls. Out: `RootTraits`, None
before a step was observed; the device.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch

from autofuse.gpu.devices import CPU
from autofuse.observer.capture_cost import RootTraits
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import Target
from autofuse.observer.signatures import tensors_by_path


def traits_of(module: Target, observer: Observer, key: str, min_blocks: int) -> RootTraits | None:
    operations = observer.ops_in_forward(key)
    if operations is None:
        return None
    modules, once = 0, 1.0
    if isinstance(module, torch.nn.Module):
        modules = sum(1 for _ in module.modules())
        once = _share_once(module, modules, min_blocks)
    backward = observer.ops_in_backward(key) if torch.is_grad_enabled() else 0
    return RootTraits(operations, backward, modules, observer.varying_sizes(key), once)


def device_of(module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device of a module's parameters, or of a function's tensors; the CPU where there are none."""
    if isinstance(module, torch.nn.Module):
        found: torch.Tensor | None = next(module.parameters(), None)
    else:
        found = next(iter(tensors_by_path(args, kwargs).values()), None)
    return CPU if found is None or found.device.type == "cpu" else found.device


def _share_once(module: torch.nn.Module, modules: int, min_blocks: int) -> float:
    """Share of the work that remains if consecutive equal blocks are captured once (`capture.passes`)."""
    if not min_blocks:
        return 1.0
    spared = 0.0
    inside: set[int] = set()  # of a row that was counted
    for parent in module.modules():
        if id(parent) in inside:
            continue
        for _, row in groupby(parent.children(), _kind):
            blocks = list(row)
            if len(blocks) >= min_blocks:
                parts = [id(part) for block in blocks for part in block.modules()]
                inside.update(parts)
                spared += len(parts) * (1.0 - 1.0 / len(blocks))
    return 1.0 - spared / modules


def _kind(module: torch.nn.Module) -> Any:
    return type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
