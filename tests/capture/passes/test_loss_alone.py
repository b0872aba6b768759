"""Models that give out more than their loss: no zeros for the gradients of what the loss does not use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.corrections import double_backward
from autofuse.capture.guarded_call import plain_call
from autofuse.capture.traced import OF_THE_LOSS

T = torch.Tensor
WORDS, WIDTH = 50, 16


class Language(nn.Module):
    """As Hugging Face's models: the loss, the logits, and what was before them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.head, self.other = nn.Linear(WIDTH, WORDS, bias=False), nn.Linear(WIDTH, 3)

    def forward(self, x: T, y: T) -> tuple[T, ...]:
        h = self.norm(self.words(x)).tanh()
        logits = self.head(h)
        return F.cross_entropy(logits.view(-1, WORDS), y.view(-1)), logits, h, self.other(h)


class Differences(Language):
    """Outputs that are subtracted and scaled on the way to the loss."""

    def forward(self, x: T, y: T) -> tuple[T, ...]:
        h = self.norm(self.words(x))
        return (self.head(2.0 - h).sum(-1, keepdim=True) * h - h.tanh()).square().mean(), h, -h * 3.0


class Halves(Language):
    """One half of a tensor is in the loss, the other is given out: its gradient is more than a sum with zeros."""

    def forward(self, x: T, y: T) -> tuple[T, ...]:
        first, second = self.norm(self.words(x)).unbind(-1 if x.shape[1] == 16 else 0)[:2]
        return first.square().sum(), second


def compiled(model: nn.Module, dynamic: bool | None = None) -> tuple[Callable[..., Any], list[str]]:
    """The model past its first step: AOTAutograd compiles the backward graph of fixed sizes in the backward pass."""
    torch._dynamo.reset()
    phases: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, phase: str, times: int) -> Any:
        def run(*args: Any) -> Any:
            phases.append(phase)
            return graph.forward(*args)

        return boxed(run)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return plain_call(compile_with(graph, inputs, compile_graph))

    call = torch.compile(model, backend=backend, dynamic=dynamic)
    for size in ((3, 8), (4, 6)) if dynamic else ((3, 8),):
        gradients(model, call, loss, size)
    phases.clear()
    return call, phases


def gradients(
    model: nn.Module, call: Callable[..., Any], loss_of: Callable[..., T], size: tuple[int, int]
) -> list[Any]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    x, y = torch.randint(WORDS, size), torch.randint(WORDS, size)
    outputs = call(x, y)
    loss_of(outputs).backward()
    return [*(None if p.grad is None else p.grad.clone() for p in model.parameters()), *(o.detach() for o in outputs)]


def agree(found: list[Any], wanted: list[Any]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def loss(outputs: tuple[T, ...]) -> T:
    return outputs[0] * 2.0


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("kind", [Language, Differences])
def test_no_zeros_are_made(kind: type[Language], dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = kind()
    call, phases = compiled(model, dynamic)
    monkeypatch.setattr(double_backward, "filled", lambda *_: pytest.fail("zeros were made"))
    for size in ((3, 8), (5, 4)) if dynamic else ((3, 8), (3, 8)):
        agree(gradients(model, call, loss, size), gradients(model, model, loss, size))
    assert phases == ["forward", OF_THE_LOSS] * 2


LOSSES: dict[str, Callable[..., T]] = {
    "the loss and the logits": lambda o: o[0] + o[1].square().mean(),
    "the logits": lambda o: o[1].square().mean(),
    "all": lambda o: sum(t.square().mean() for t in o),
    "an output of its own": lambda o: o[-1].sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_losses_of_the_same_graph(name: str) -> None:
    torch.manual_seed(0)
    model = Language()
    call, phases = compiled(model)
    for loss_of in (loss, LOSSES[name], loss):
        agree(gradients(model, call, loss_of, (3, 8)), gradients(model, model, loss_of, (3, 8)))
    assert phases == ["forward", OF_THE_LOSS, "forward", "backward", "forward", OF_THE_LOSS]


def test_zeros_that_are_more_than_added() -> None:
    torch.manual_seed(0)
    model = Halves()
    call, phases = compiled(model)
    agree(gradients(model, call, loss, (3, 8)), gradients(model, model, loss, (3, 8)))
    assert phases == ["forward", "backward"]


def test_two_passes_and_second_gradients() -> None:
    torch.manual_seed(0)
    model = Language()
    call, phases = compiled(model)
    x, y = torch.randint(WORDS, (3, 8)), torch.randint(WORDS, (3, 8))
    for run in (call, model):
        found = run(x, y)[0]
        found.backward(retain_graph=True)
        found.backward()
        with pytest.raises(RuntimeError, match="second time"):
            found.backward()
    assert phases == ["forward", OF_THE_LOSS, OF_THE_LOSS]
    ours, theirs = (
        [torch.autograd.grad(run(x, y)[0], [*model.parameters()][:-2], create_graph=True)] for run in (call, model)
    )
    agree([*ours[0]], [*theirs[0]])


def test_what_is_given_out_is_the_scripts_own() -> None:
    """It may be written to once the loss is done with it, as in eager."""
    torch.manual_seed(0)
    model = Language()
    other = copy.deepcopy(model)
    call, _ = compiled(model)
    model.zero_grad()
    x, y = torch.randint(WORDS, (3, 8)), torch.randint(WORDS, (3, 8))
    for run in (call, other):
        outputs = run(x, y)
        outputs[0].backward()
        with torch.no_grad():
            outputs[1].mul_(2.0)
        assert outputs[1]._version == 1
    agree([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
