"""What a script lets go is gone: weights, gradients, batches and results of a captured module."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import autofuse
from autofuse.runtime.session import Session


@pytest.mark.parametrize("kind", ["training", "inference", "shapes", "optimize"])
def test_nothing_outlives_a_module(kind: str, session: Session) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    if kind == "optimize":
        model = autofuse.optimize(model)
    watched = []
    for step in range(4):
        x = torch.randn(3 + step * (kind == "shapes"), 8)
        with torch.set_grad_enabled(kind != "inference"):
            result = model(x)
        if result.requires_grad:
            result.square().sum().backward()
            watched += [weakref.ref(p.grad) for p in model.parameters()]
        watched += [weakref.ref(value) for value in (x, result)]
    root = session.roots.root_of(model)
    assert root.state == "captured" and root.trial.shapes
    watched += [weakref.ref(p) for p in model.parameters()]
    del model, x, result, root
    gc.collect()
    alive = [ref() for ref in watched if ref() is not None]
    assert not alive, [tuple(tensor.shape) for tensor in alive]
