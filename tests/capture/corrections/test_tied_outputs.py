"""Gradients with respect to an output that another output was computed from: hooks, retain_grad, autograd.grad."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.guarded_call import plain_call
from autofuse.capture.traced import OF_THE_LOSS
from tests.capture.passes.test_loss_alone import WIDTH, WORDS, Language, agree, compiled

T = torch.Tensor


class Chain(Language):
    """Each output is computed from the one before it; a dropout, a path around them, and one that nothing follows."""

    def forward(self, x: T, y: T) -> tuple[T, ...]:
        first = F.dropout(self.norm(self.words(x)), 0.2, True)
        second = first.tanh() * first
        logits = self.head(second + first)
        loss = F.cross_entropy(logits.view(-1, WORDS), y.view(-1)) + self.other(first).square().mean()
        return loss, first, second, logits, self.other(second)


def inputs() -> tuple[T, T]:
    torch.manual_seed(1)
    return torch.randint(WORDS, (3, 8)), torch.randint(WORDS, (3, 8))


def results(model: nn.Module, call: Callable[..., Any], use: Callable[..., list[Any]]) -> list[Any]:
    """What a use of the outputs finds, the gradients of all parameters, and the state of the generator behind it."""
    model.zero_grad(set_to_none=True)
    x, y = inputs()
    found = use(model, call(x, y))
    return [*found, *(p.grad for p in model.parameters()), torch.rand(3)]


def kept(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    for output in outputs:
        output.retain_grad()
    outputs[0].backward()
    return [output.grad for output in outputs]


def hooked(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    found: list[Any] = []
    for output in outputs[1:-1]:
        output.register_hook(lambda gradient: found.append(gradient.clone()))
    outputs[0].backward()
    return sorted(found, key=lambda gradient: gradient.shape)


def changed(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    outputs[1].register_hook(lambda gradient: gradient * 0.5)
    outputs[-2].register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    outputs[0].backward()
    return []


def asked(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    found = [torch.autograd.grad(outputs[0], output, retain_graph=True)[0] for output in outputs[1:-1]]
    found += torch.autograd.grad(outputs[0], [outputs[1], *list(model.parameters())[:3]], retain_graph=True)
    return [*found, torch.autograd.grad(outputs[3].square().sum(), outputs[2])[0]]


def only_these(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    weight = next(model.parameters())
    outputs[0].backward(inputs=[weight, outputs[1]])
    return [outputs[1].grad]


def twice(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    """Somebody asks in the first pass, nobody in the second."""
    handle = outputs[1].register_hook(lambda gradient: gradient * 3.0)
    outputs[0].backward(retain_graph=True)
    handle.remove()
    outputs[0].backward()
    with pytest.raises(RuntimeError, match="second time"):
        outputs[0].backward()
    return []


def with_another(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    outputs[1].retain_grad()
    (outputs[0] + outputs[1].square().mean() + outputs[-1].sum()).backward()
    return [outputs[1].grad]


def parameters_alone(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
    return list(torch.autograd.grad(outputs[0], list(model.parameters()), allow_unused=True))


USES = [kept, hooked, changed, asked, only_these, twice, with_another, parameters_alone]


class Viewed(Language):
    """A view of an output is given out too, and the loss is computed from both; an output twice."""

    def forward(self, x: T, y: T) -> tuple[T, ...]:
        first = self.norm(self.words(x))
        view = first.transpose(0, 1)
        second = first.tanh()
        loss = self.head(view).square().mean() + second.mean() + first.square().mean()
        return loss, first, second, self.other(second), second, view


VIEWED = [kept, hooked, changed, twice, with_another, parameters_alone]


@pytest.mark.parametrize("use", VIEWED, ids=lambda use: use.__name__)
def test_an_output_that_is_a_view_is_not_cut_off(use: Callable[..., list[Any]]) -> None:
    """It is not tied, so that the gradient through it is not one of a tie."""
    torch.manual_seed(0)
    model = Viewed()
    call, _ = compiled(model)

    def used(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
        return use(model, outputs[:4])

    agree(results(model, call, used), results(model, model, used))


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("kind", [Language, Chain])
def test_what_is_asked_of_outputs_is_as_in_eager(kind: type[Language], use: Callable[..., list[Any]]) -> None:
    torch.manual_seed(0)
    model = kind()
    call, _ = compiled(model)
    agree(results(model, call, use), results(model, model, use))
    agree(results(model, call, lambda m, o: [o[0].backward()]), results(model, model, lambda m, o: [o[0].backward()]))


class Written(Language):
    """An output that is written to after another one was computed from it."""

    def forward(self, x: T, y: T) -> tuple[T, ...]:
        first = self.norm(self.words(x))
        total = first.sum(-1)
        second = first.add_(1.0)
        return total.square().mean() + second.square().mean(), total, first


def test_a_run_that_cannot_be_cut_leaves_the_parameters_gradients_right() -> None:
    torch.manual_seed(0)
    model = Written()
    call, _ = compiled(model)

    def used(model: nn.Module, outputs: tuple[T, ...]) -> list[Any]:
        outputs[1].register_hook(lambda gradient: None)
        outputs[0].backward()
        return []

    agree(results(model, call, used), results(model, model, used))


def test_where_nobody_asks_the_compiled_graphs_run() -> None:
    torch.manual_seed(0)
    model = Chain()
    call, phases = compiled(model)
    outputs = call(*inputs())
    outputs[0].backward()
    loss = call(*inputs())[0]
    assert torch.autograd.grad(loss, model.head.weight)[0].shape == model.head.weight.shape
    assert phases == ["forward", OF_THE_LOSS] * 2, "the other outputs were gone"


def test_an_output_is_no_view_and_may_be_written_to() -> None:
    torch.manual_seed(0)
    model = Chain()
    call, _ = compiled(model)
    outputs = call(*inputs())
    outputs[0].backward()
    with torch.no_grad():
        for output in outputs:
            output.mul_(2.0)
    assert not any(output._is_view() for output in outputs) and outputs[1].shape == (3, 8, WIDTH)


class Images(nn.Module):
    """Feature maps beside the logits, as Grad-CAM wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(True)
        )
        self.out = nn.Linear(4, 5)

    def forward(self, x: T) -> tuple[T, T]:
        maps = self.features(x)
        return self.out(maps.mean((2, 3))), maps


@pytest.mark.parametrize("is_half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
def test_feature_maps_of_a_network_whose_norms_are_written_to(is_training: bool, is_half: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Images().train(is_training)
    captured = copy.deepcopy(eager)
    call = torch.compile(
        captured, backend=lambda g, i: plain_call(compile_with(g, i, lambda graph, *_: boxed(graph.forward)))
    )
    seen: list[list[T]] = [[], []]
    for step in range(4):
        x = torch.randn(2 + step % 2, 3, 12, 12)
        for found, run in zip(seen, (call, eager), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                logits, maps = run(x)
            if step % 2:
                maps.register_hook(lambda gradient, found=found: found.append(gradient.clone()))
            else:
                maps.retain_grad()
            logits[:, 3].float().sum().backward()
            found += [] if step % 2 else [maps.grad]
    for model, found in zip((captured, eager), seen, strict=True):
        found += [*(p.grad for p in model.parameters() if p.grad is not None), *(b.float() for b in model.buffers())]
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if is_half else 1e-5, atol=1e-3 if is_half else 1e-6)
