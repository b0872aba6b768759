"""What a script lets go is gone: weights, gradients, batches and results of a captured module."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import autofuse
from autofuse.runtime.session import Session
from autofuse.sessions import current_session
from tests.semantics import states

KINDS = ["training", "inference", "shapes", "optimize"]


def outliving(kind: str, session: Session) -> list[tuple[int, ...]]:
    """Shapes of what is there after a module has run and was dropped."""
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
    return [tuple(tensor.shape) for ref in watched if (tensor := ref()) is not None]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_a_module(kind: str, session: Session) -> None:
    assert not outliving(kind, session)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_a_module_whose_graphs_are_kept(kind: str, tmp_path: Path) -> None:
    """In the run that traces, and in the one that reads its traces."""
    reads = []
    for _ in range(2):
        with states.session_in("captured", tmp_path, keeps=True) as reached:
            session = current_session()
            assert session is not None and not outliving(kind, session)
        reads.append(reached.read)
    assert reads[0] == 0 < reads[1]
