"""Equal blocks that are captured once: found where they are, refused where they only look alike, results as eager's."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.passes.repeated_blocks import Pieces, find_repeats
from autofuse.pipeline import route_graph
from autofuse.report.metrics import GraphLine, Size, sum_graphs
from autofuse.sessions import make_session
from autofuse.settings.layers import load

WIDTH = 16


class Block(nn.Module):
    """Pre-norm attention and feed-forward, as language models have it."""

    def __init__(self, scale: float = 0.5, drop: float = 0.1, inplace: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.scale, self.inplace = nn.Dropout(drop), scale, inplace

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) * self.scale).masked_fill(mask, float("-inf"))
        x = x + self.drop(self.out(F.softmax(scores, -1) @ v))
        y = F.gelu(self.up(x))
        if self.inplace:
            y.mul_(0.5)
        return x + self.drop(self.down(y))


class Overwriting(Block):
    """Its dropout writes to what the product made; ``nn.Dropout`` says so by an argument without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1, inplace=True)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(blocks)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        x = self.first(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.last(self.norm(x)).flatten(0, 1), tokens.flatten())


class Captured:
    """A module through the capture, its aten graphs run as they are."""

    def __init__(self, module: nn.Module, min_blocks: int = 4) -> None:
        torch._dynamo.reset()
        self.graphs: Counter[str] = Counter()  # by phase
        self.times: set[int] = set()

        def compile_graph(graph: Any, phase: str, times: int) -> Any:
            self.graphs[phase] += 1
            self.times.add(times)
            return boxed(graph.forward)

        self.call = torch.compile(
            module, backend=lambda graph, inputs: compile_with(graph, inputs, compile_graph, min_blocks)
        )


def results(model: nn.Module, call: Any, size: tuple[int, int]) -> list[torch.Tensor]:
    """Loss, gradients and the generator's next numbers."""
    torch.manual_seed(sum(size))
    tokens = torch.randint(0, 11, size)
    torch._dynamo.maybe_mark_dynamic(tokens, 0)
    torch._dynamo.maybe_mark_dynamic(tokens, 1)
    model.zero_grad()
    loss = call(tokens)
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), torch.rand(3)]


def check(model: nn.Module, captured: Captured, sizes: Any = ((2, 5), (3, 7), (2, 9))) -> None:
    twin = copy.deepcopy(model)
    for size in sizes:
        for expected, found in zip(results(twin, twin, size), results(model, captured.call, size), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.parametrize("is_training", [True, False])
def test_equal_blocks_are_captured_once(is_training: bool) -> None:
    model = Stack([Block() for _ in range(6)]).train(is_training)
    captured = Captured(model)
    check(model, captured)
    # The embedding, the block, what lies after.
    assert captured.graphs == {"forward": 3, "backward": 3} and captured.times == {1, 6}
    with torch.no_grad():
        check(model, captured)
    assert captured.graphs["inference"] == 3


def test_as_many_as_asked_for() -> None:
    for blocks, min_blocks, graphs in ((3, 4, 1), (3, 3, 3), (4, 0, 1)):
        model = Stack([Block() for _ in range(blocks)])
        captured = Captured(model, min_blocks)
        check(model, captured, [(2, 5)])
        assert captured.graphs["forward"] == graphs


def test_one_block_called_again_and_again() -> None:
    model = Stack([Block()] * 5)
    captured = Captured(model)
    check(model, captured)
    assert captured.graphs["forward"] == 3


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(scale=0.1 * n) for n in range(1, 5)],
        [Block(drop=0.1 * n) for n in range(4)],
        [Block(inplace=True) for _ in range(4)],
        [Overwriting() for _ in range(4)],
    ],
    ids=["constants", "probabilities", "writes", "in place by position"],
)
def test_blocks_that_only_look_alike_are_captured_as_they_are(blocks: list[nn.Module]) -> None:
    model = Stack(blocks)
    captured = Captured(model)
    check(model, captured, [(2, 5)])
    assert captured.graphs["forward"] == 1


def test_second_gradients_pass_through_the_blocks() -> None:
    model = Stack([Block(drop=0.0) for _ in range(5)])
    twin = copy.deepcopy(model)
    captured = Captured(model)
    tokens = torch.randint(0, 11, (2, 5))

    def penalty(module: nn.Module, call: Any) -> list[torch.Tensor]:
        weights = [p for name, p in module.named_parameters() if name.endswith("qkv.weight")]
        grads = torch.autograd.grad(call(tokens), weights, create_graph=True)
        module.zero_grad()
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]
        return [p.grad for p in module.parameters() if p.grad is not None]

    for expected, found in zip(penalty(twin, twin), penalty(model, captured.call), strict=True):
        torch.testing.assert_close(found, expected)
    assert captured.graphs["forward"] == 3


class Forked(nn.Module):
    """Every layer hands on two values, of which the second comes to nothing, or to something without gradients."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.ends = ends
        self.one = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.other = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for one, other in zip(self.one, self.other, strict=True):
            x, y = one(x).tanh(), other(y).tanh()
        return {"nowhere": x, "detached": x + y.detach(), "both": x + y}[self.ends].square().mean()


@pytest.mark.parametrize("ends", ["nowhere", "detached", "both"])
def test_what_no_gradient_reaches_has_none(ends: str) -> None:
    model = Forked(ends)
    twin = copy.deepcopy(model)
    captured = Captured(model)
    x = torch.randn(3, WIDTH)
    captured.call(x).backward(), twin(x).backward()
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in twin.parameters()]
    assert (captured.graphs["forward"] > 1) is (ends == "both")


class Wired(nn.Module):
    """Layers that each read the values before them as ``wiring`` says: how far back, and what is done to it."""

    def __init__(self, wiring: list[tuple[int, int, str]]) -> None:
        super().__init__()
        self.wiring = wiring
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in wiring)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer, (one, other, how) in zip(self.layers, self.wiring, strict=True):
            y = layer(values[max(0, len(values) - one)])
            z = values[max(0, len(values) - other)]
            values.append({"add": y + z, "gate": torch.sigmoid(y) * z, "tail": y.tanh() + z[:, :1]}[how])
        return values[-1].square().mean()


LAYER = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from(["add", "gate", "tail"]))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(LAYER, min_size=1, max_size=2),
    st.integers(3, 6),
    st.lists(LAYER, max_size=2),
    st.lists(LAYER, max_size=2),
)
def test_whatever_the_wiring_results_are_eagers(
    block: list[Any], count: int, ahead: list[Any], after: list[Any]
) -> None:
    model = Wired([*ahead, *block * count, *after]).double()
    twin = copy.deepcopy(model)
    captured = Captured(model, 3)
    for batch in (3, 5):
        x = torch.randn(batch, WIDTH, dtype=torch.float64)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        found, expected = captured.call(x), twin(x)
        found.backward(), expected.backward()
        assert torch.equal(found, expected)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:  # of a value that several blocks read, summed in another order
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_a_block_begins_where_the_fewest_values_cross() -> None:
    found: list[Any] = []
    model = Stack([Block() for _ in range(4)])

    def look(graph: Any, inputs: Any) -> Any:
        found.append(find_repeats(graph.graph, 4))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=look)(torch.randint(0, 11, (2, 5)))
    (repeats,) = found
    # Behind the norm, where the last stretch of equal nodes could begin too, the sum and its norm would cross.
    assert repeats.count == 4 and len(repeats.outputs[0]) == 1
    assert repeats.outputs[0][0] in repeats.inputs[1]


def test_a_block_counts_as_often_as_a_step_calls_it() -> None:
    size = Size(10, 12, 4, 6, 100.0, 1000.0)
    lines = [
        GraphLine("forward", "a.py:1", 1, 20, size, size),
        GraphLine("forward", "a.py:2", 1, 240, size, size, times=12),
    ]
    total = sum_graphs(lines)
    assert total is not None and total.steps == 20
    assert total.before == Size(130, 156, 52, 78, 1300.0, 13000.0)
    assert sum_graphs([*lines, GraphLine("backward", "a.py:1", 1, 0, size, size)]) == total, "it has not run"


def test_blocks_are_captured_one_by_one_where_a_piece_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Pieces, compile_piece: Any) -> Any:
        raise RuntimeError("no such piece")

    monkeypatch.setattr(Pieces, "compile", fail)
    model = Stack([Block() for _ in range(4)])
    captured = Captured(model)
    check(model, captured, [(2, 5)])
    assert captured.graphs == {"forward": 1, "backward": 1}


class Head(nn.Module):
    """What follows the blocks of an encoder; its last product asks for sizes that a group has inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.decoder = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(F.gelu(self.dense(x)))
        return self.decoder(y.view(y.size(0) * y.size(1), WIDTH)).view(*y.shape[:2], 11)


def test_sizes_are_known_where_the_tensors_that_have_them_are_inside_a_group(tmp_path: Any) -> None:
    environment = {"AUTOFUSE_STORE": str(tmp_path / "s.sqlite3"), "AUTOFUSE_TUNE": "off", "AUTOFUSE_QUIET": "1"}
    session = make_session(load(environ=environment), "test")
    head = Head().eval()
    torch._dynamo.reset()
    call = torch.compile(
        head, backend=lambda g, i: compile_with(g, i, lambda a, phase, n: route_graph(a, phase, session, n))
    )
    with torch.no_grad():
        for size in ((2, 5), (3, 7)):
            x = torch.randn(*size, WIDTH)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch._dynamo.maybe_mark_dynamic(x, 1)
            assert torch.equal(call(x), head(x))
    (router,) = session.context.routers
    assert any(slot.is_group for slot in router.program.slots), "nothing is shown where nothing is grouped"
    assert "sym_size" not in router.program.source
