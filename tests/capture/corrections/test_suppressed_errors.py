"""What happens to a call whose trace fails: before its module has begun, and behind a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autofuse.capture import dynamo


class Halves(nn.Module):
    """Counts its calls in a buffer, and breaks the graph between two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = (x + 1).relu()
        torch._dynamo.graph_break()
        return y.tanh() * 2


def _refusing(operator: str, refused: list[str]) -> Callable[..., Any]:
    """A backend that fails on graphs with an operator."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if any(node.target == operator for node in graph.graph.nodes):
            refused.append(operator)
            raise RuntimeError(f"no {operator}")
        return graph.forward

    return backend


def _call(root: dynamo.CapturedRoot, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with dynamo.capture_settings(8), dynamo.suppressed_behind_breaks():
        found: torch.Tensor = root.trace(module, x)
    return found


def test_what_is_done_before_a_break_is_done_once() -> None:
    refused: list[str] = []
    module, x = Halves(), torch.linspace(-2.0, 2.0, 6)
    root = dynamo.compile_root("halves", _refusing("tanh", refused))
    for _ in range(3):
        assert torch.equal(_call(root, module, x), (x + 1).relu().tanh() * 2)
    assert module.calls == 3
    assert refused == ["tanh"], "the second half stays in eager"
    assert not torch._dynamo.config.suppress_errors


def test_a_failure_at_the_beginning_reaches_the_root() -> None:
    refused: list[str] = []
    module, x = Halves(), torch.ones(6)
    root = dynamo.compile_root("halves", _refusing("relu", refused))
    with pytest.raises(dynamo.CAPTURE_ERRORS, match="no relu"):
        _call(root, module, x)
    assert module.calls == 0 and not torch._dynamo.config.suppress_errors
