"""A module of which Dynamo makes no graph is left to eager, and the report can say what breaks its graphs."""

from __future__ import annotations

import torch
from torch import nn

from autofuse.runtime.session import Session


class Blocks(nn.Module):
    """A graph break in a loop: Dynamo skips all of the forward, and of what it calls only other forwards are traced."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            self.seen.append(x.abs().max().item())
        return torch.tanh(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.relu(self.linear(self.norm(x)))
        return y


class Sequence(nn.Sequential):
    """Its forward is torch's own, which Dynamo does not trace by itself."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU())


def test_a_module_without_a_graph_goes_on_in_eager_with_the_reason(session: Session) -> None:
    torch.manual_seed(0)
    check(Blocks(Sequence), session)
    larger = Blocks(Sequence)
    larger.other = nn.Linear(2, 2)  # another root, with the same breaks
    check(larger, session)


def check(model: Blocks, session: Session) -> None:
    root = session.roots.root_of(model)
    for rows in (4, 5, 6, 5):
        x, before = torch.randn(rows, 8), session.context.graph_calls()
        found = model(x)
        assert session.context.graph_calls() == before
        assert torch.equal(found, model.forward(x))
    assert (root.state, root.reason) == ("eager", "no_graph")
    assert "item()" in root.detail and "loop" in root.detail
    assert len(model.seen) == 2 * 4 * 3
    record = root.record()
    assert record.capture_seconds > 0.0 and dict(record.capture_causes)["tracing"] > 0.0


def test_graphs_of_modules_inside_are_enough(session: Session) -> None:
    torch.manual_seed(0)
    model, twin = Blocks(Block), Blocks(Block)
    twin.load_state_dict(model.state_dict())
    for rows in (4, 5, 6, 5):
        x = torch.randn(rows, 8)
        ours, theirs = model(x), twin.forward(x)
        assert torch.equal(ours, theirs)
    assert session.roots.root_of(model).state == "captured"
    assert session.context.graph_calls() >= 3 * 3
