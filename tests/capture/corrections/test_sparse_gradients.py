"""Operators that were asked for sparse gradients give sparse ones: their graphs stay in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.guarded_call import plain_call

ROWS, WIDTH = 20, 8


class Table(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.table, self.out = make(), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(x)).relu()


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.gather(self.weight, 0, x[:, :1].expand(-1, WIDTH), sparse_grad=True)


class ByArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.embedding(self.weight, x, -1, False, True) + F.embedding(x, self.weight, sparse=True)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: Table(lambda: nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=0)),
    "renormalised": lambda: Table(lambda: nn.Embedding(ROWS, WIDTH, sparse=True, max_norm=1.0)),
    "bag": lambda: Table(lambda: nn.EmbeddingBag(ROWS, WIDTH, sparse=True)),
    "gather": lambda: Table(Gathered),
    "arguments": lambda: Table(ByArguments),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_sparse_and_nothing_is_warned_of(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = MODULES[name]()
    captured = copy.deepcopy(eager)
    graphs: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, phase: str, times: int) -> object:
        graphs.append(phase)
        return boxed(graph.forward)

    call = torch.compile(captured, backend=lambda g, inputs: plain_call(compile_with(g, inputs, compile_graph)))
    for _ in range(3):
        x = torch.randint(ROWS, (6, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for run in (call, eager):
                run(x).sum().backward()
    ours, theirs = next(captured.table.parameters()).grad, next(eager.table.parameters()).grad
    assert ours is not None and theirs is not None and not graphs
    assert ours.layout == theirs.layout == torch.sparse_coo
    assert torch.equal(ours.to_dense(), theirs.to_dense())
