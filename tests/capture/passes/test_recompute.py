"""Element-wise values that backward computes again: which ones, and that gradients stay eager's to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autofuse.capture.backend import boxed, compile_with

Graphs = dict[str, list[str]]


def captured(function: Callable[..., Any]) -> tuple[Callable[..., Any], Graphs]:
    """The function on its captured graphs, run with eager's kernels, and what each graph calls."""
    graphs: Graphs = {}

    def compile_graph(graph: fx.GraphModule, phase: str, times: int) -> Callable[[list[Any]], Any]:
        graphs[phase] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return boxed(graph.forward)

    def backend(module: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return compile_with(module, inputs, compile_graph)

    torch._dynamo.reset_code_caches()
    return torch.compile(function, backend=backend, fullgraph=True), graphs


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> Graphs:
    """Results and gradients equal eager's, for two sizes; where torch's own trace rounds otherwise, they equal that."""

    def results(call: Callable[..., Any], size: int) -> list[torch.Tensor]:
        leaves = [t[:size].detach().clone().requires_grad_() for t in inputs]
        torch.manual_seed(0)
        out = call(*leaves)
        parts = out if isinstance(out, tuple) else (out,)
        return [*parts, *torch.autograd.grad([p.sin().sum() for p in parts], leaves, allow_unused=True)]

    run, graphs = captured(function)
    sizes = (8, 11)
    found = [results(run, size) for size in sizes]
    wanted = [results(function, size) for size in sizes]
    if not all(map(torch.equal, itertools.chain(*found), itertools.chain(*wanted))):
        traced = torch.compile(lambda *args: function(*args), backend="aot_eager", fullgraph=True)
        for ours, theirs, eagers in zip(found, [results(traced, size) for size in sizes], wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(ours, eagers, equal_nan=True)
    return graphs


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def test_a_gate_is_computed_again() -> None:
    graphs = check(lambda a, b: F.silu(a) * b, randn(11, 7), randn(11, 7))
    assert graphs["backward"].count("aten.silu.default") == 1 and graphs["forward"].count("aten.silu.default") == 1


def test_a_gate_that_is_a_part_is_computed_again() -> None:
    def swiglu(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    graphs = check(swiglu, randn(11, 14))
    assert graphs["backward"].count("aten.silu.default") == 1
    run, _ = captured(swiglu)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        run(randn(5, 14).requires_grad_())
    assert len({t.untyped_storage().data_ptr() for t in kept}) == 1, "the input alone"


def test_a_normalised_value_is_computed_again() -> None:
    def rms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * y

    graphs = check(rms, randn(11, 7), randn(11, 7))
    assert "aten.rsqrt.default" not in graphs["backward"], "what is small is kept"
    assert graphs["backward"].count("aten.mul.Tensor") > graphs["forward"].count("aten.mul.Tensor")


def charbonnier(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sqrt((a - b).square() + 1e-6).mean()


def focal(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(logits)
    right = p * target + (1 - p) * (1 - target)
    return ((1 - right) ** 2 * -torch.log(right + 1e-6)).mean()


def gates(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    left, right = (a * b).chunk(2, -1)
    return torch.sigmoid(left) * torch.tanh(right)


# What backward computes again, though it is several operations away from what backward has: operations, tensors saved.
REACHED: dict[str, tuple[Callable[..., Any], tuple[str, ...], int]] = {
    "read by a sum": (charbonnier, ("aten.sqrt.default",), 1),
    "two of one origin": (focal, ("aten.rsub.Scalar", "aten.log.default"), 2),
    "another of a chain": (lambda a, b: F.mish(a * 2) * b, ("aten.mish.default",), 2),
    "by hand": (lambda a, b: a * torch.tanh(a.abs().sqrt()) * b, ("aten.tanh.default", "aten.sqrt.default"), 2),
    "parts of one value": (gates, ("aten.sigmoid.default", "aten.tanh.default"), 2),
}


@pytest.mark.parametrize("what", REACHED)
def test_what_is_a_few_operations_away_is_computed_again(what: str) -> None:
    function, operations, saved = REACHED[what]
    graphs = check(function, randn(11, 14), randn(11, 14))
    assert all(name in graphs["backward"] for name in operations), graphs["backward"]
    run, _ = captured(function)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        run(randn(5, 14).requires_grad_(), randn(5, 14).requires_grad_())
    assert len({t.untyped_storage().data_ptr() for t in kept if t.numel() == 70}) == saved


def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate = F.silu(a)
    return gate, gate * b


def far(a: torch.Tensor) -> torch.Tensor:
    """Its gradient needs none of its values."""
    for k in range(8):
        a = a * 2 if k % 2 else a + 1
    return a


KEPT: dict[str, tuple[Callable[..., Any], str]] = {
    "what the user gets": (both, "aten.silu.default"),
    "what a product reads": (lambda a, b: (F.silu(a) @ b.T) * a.sum(), "aten.silu.default"),
    "random numbers": (lambda a, b: F.dropout(a, 0.5) * b * a, "aten.native_dropout.default"),
    "what only it would need": (lambda a, b: (a + b).exp() * b, "aten.exp.default"),
    "what is far away": (lambda a, b: far(a.sin()).exp() * b, "aten.exp.default"),
    "what is dear": (lambda a, b: torch.digamma(a) * b * a, "aten.digamma.default"),
    "what is dear together": (lambda a, b: a * torch.tanh(F.softplus(a)) * b, "aten.softplus.default"),
    "what is small": (lambda a, b: a[:1, :1].abs().sqrt() * a * b, "aten.sqrt.default"),
    "parts of what is not there": (lambda a, b: gates((a + b)[:, :6], a.new_ones(())) * 2, "aten.split.Tensor"),
}


@pytest.mark.parametrize("what", KEPT)
def test_what_is_kept(what: str) -> None:
    function, operation = KEPT[what]
    graphs = check(function, randn(11, 7), randn(11, 7))
    assert operation in graphs["forward"] and operation not in graphs["backward"]


def test_an_input_that_is_overwritten() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        out = F.silu(state + a) * b * torch.sigmoid(state)
        state.mul_(2)
        return out

    run, _ = captured(function)
    found = []
    for call in (run, function):
        a, b = (torch.linspace(-2, 2, 12, requires_grad=True) for _ in range(2))
        state = torch.linspace(0, 1, 12)
        for _ in range(3):
            found.append(torch.autograd.grad(call(a, b, state).sum(), (a, b)))
        found.append((state,))
    half = len(found) // 2
    for ours, theirs in zip(found[:half], found[half:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_a_checkpoint_decides_itself() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = checkpoint(lambda x, y: F.silu(x) * y, a, b, use_reentrant=False)
        return kept * a

    graphs = check(function, randn(11, 7), randn(11, 7))
    assert graphs["backward"].count("aten.silu.default") == 1, "once, for the checkpoint"
