"""Graphs said plainly: fewer nodes, fewer kept tensors, and gradients that stay eager's to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.graph_import import import_graph
from autofuse.codegen.in_place import why_not
from autofuse.fusion.analyzer import FusionCandidateAnalyzer
from autofuse.fusion.config import FusionConfig
from tests.capture.passes.test_recompute import captured, check, randn

T = torch.Tensor


def test_a_detached_alias_is_not_kept() -> None:
    graphs = check(lambda a: torch.sigmoid(a * 2).tanh(), randn(11, 7))
    assert not any("detach" in name for names in graphs.values() for name in names)


def test_views_are_seen_again_and_one_tensor_is_kept() -> None:
    weight = nn.Parameter(randn(7, 12))

    def function(x: T) -> T:
        a, b, c, d = (x @ weight).chunk(4, -1)
        return (a * b).tanh() @ (c * d).T

    graphs = check(function, randn(11, 7))
    assert graphs["backward"].count("aten.split.Tensor") == 1
    run, _ = captured(function)
    x = randn(5, 7).requires_grad_()
    kept: list[T] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        run(x)
    # x, the weight, their product with its four parts and what the last product reads; not each part by itself.
    assert sum(t.shape[-1] == 3 for t in kept) <= 2 and sum(t.shape == (5, 12) for t in kept) == 1


def test_transposes_of_transposes_go() -> None:
    layers = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
    graphs = check(lambda x: layers(x), randn(11, 7))
    assert graphs["backward"].count("aten.t.default") <= 2  # of the gradients that the weights' products read


def test_results_do_not_come_to_share_memory() -> None:
    def function(a: T, b: T) -> tuple[T, T]:
        return (a + b).t().t(), a[:] * 2

    run, _ = captured(function)
    a, b = randn(4, 3).requires_grad_(), randn(4, 3).requires_grad_()
    (run(a, b)[0].sum() + run(a, b)[1].sum()).backward()
    assert a.grad is not None and b.grad is not None and a.grad.data_ptr() != b.grad.data_ptr()


SHARING: dict[str, Callable[[T, T], T]] = {
    "a whole slice": lambda a, b: a[:] + b,
    "a whole slice, seen flat": lambda a, b: (a.view(-1)[:].view(4, 3) + b) * 1.0,
    "one gradient for both": lambda a, b: (a[:] + b[:]).t(),
    "a slice of a transpose": lambda a, b: a.t()[:].t() + b.view(12)[:].view(4, 3),
}


@pytest.mark.parametrize("what", SHARING)
@pytest.mark.parametrize("upstream", ["rows", "columns", "one number"])
def test_gradients_share_memory_and_lie_as_in_the_trace(what: str, upstream: str) -> None:
    function = SHARING[what]
    run, _ = captured(function)
    traced = torch.compile(lambda a, b: function(a, b), backend="aot_eager")
    found = []
    for call in (run, traced):
        a, b = torch.ones(4, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
        out = call(a, b)
        given = {
            "rows": torch.ones(out.shape),
            "columns": torch.ones(out.shape[::-1]).t(),
            "one number": torch.ones(()),
        }
        gradient = given[upstream].expand(out.shape)
        grads = torch.autograd.grad(out, (a, b), gradient)
        places = [t.untyped_storage().data_ptr() for t in (gradient, *grads)]
        found.append(([t.stride() for t in grads], [places.index(p) for p in places]))
    assert found[0][0] == found[1][0]
    # Sharing less is as good.
    assert all(ours in (n, theirs) for n, (ours, theirs) in enumerate(zip(found[0][1], found[1][1], strict=True)))


def test_a_row_whose_number_varies() -> None:
    def function(x: T, number: int) -> T:
        return x[0].sin() * x[1].cos() * x[number].exp()

    run, _ = captured(function)
    for number in (2, 1, 0, 2):
        found = []
        for call in (run, function):
            x = torch.linspace(-1, 1, 15).view(3, 5).requires_grad_()
            found.append(torch.autograd.grad(call(x, number).sum(), x)[0])
        assert torch.equal(*found)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Linear(5, 10)

    def forward(self, gates: T, order: tuple[int, ...] | None = None) -> T:
        h = gates.new_zeros(gates.shape[0], 5)
        for t in order or range(gates.shape[1]):
            a, b = (gates[:, t] + self.state(h)).chunk(2, -1)
            h = torch.sigmoid(a) * torch.tanh(b) + h
        return h


ROWS: dict[str, tuple[Callable[[Cell, T], T], int]] = {
    "each once": (lambda cell, x: cell(x), 1),
    "backwards": (lambda cell, x: cell(x, (3, 2, 1, 0)), 1),
    "another term": (lambda cell, x: cell(x) * x.exp().sum((1, 2)).unsqueeze(-1), 1),
    "one left out": (lambda cell, x: cell(x, (0, 1, 3)), 0),
    "one twice": (lambda cell, x: cell(x, (0, 1, 2, 3, 1)), 0),
    "two other terms": (lambda cell, x: cell(x) * x.exp().sum((1, 2)).unsqueeze(-1) + x.sin().sum(), 0),
}


@pytest.mark.parametrize("what", ROWS)
def test_gradients_of_all_rows_are_stacked(what: str) -> None:
    function, stacks = ROWS[what]
    torch.manual_seed(1)
    cell = Cell()
    graphs = check(lambda x: function(cell, x), randn(11, 4, 10))
    assert graphs["backward"].count("aten.stack.default") == stacks
    if stacks:
        assert "aten.select_backward.default" not in graphs["backward"]


def test_special_values_stay_in_their_rows() -> None:
    x = randn(8, 4, 10)
    x[0, 1, 2], x[1, 3, 4], x[2, 0, 0] = float("nan"), float("inf"), -0.0
    cell = Cell()
    run, _ = captured(lambda y: cell(y))
    found = []
    for call in (run, cell):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(call(leaf).sum(), leaf)[0])
    assert torch.equal(found[0].isnan(), found[1].isnan())
    assert torch.equal(found[0].nan_to_num(), found[1].nan_to_num())


def test_a_strict_run_keeps_the_signs_of_zeros() -> None:
    def pick(x: T) -> T:
        return x[0] * 2.0 + x[1] * 3.0 + x[2] * 4.0

    found = {}
    for is_strict in (False, True):
        run = torch.compile(
            pick,
            backend=lambda m, inputs, is_strict=is_strict: compile_with(
                m, inputs, lambda graph, phase, times: boxed(graph.forward), is_strict=is_strict
            ),
            fullgraph=True,
        )
        x = torch.ones(3, 4).requires_grad_()
        found[is_strict] = torch.autograd.grad(run(x), x, -torch.zeros(4))[0].signbit()
        torch._dynamo.reset()
    x = torch.ones(3, 4).requires_grad_()
    eager = torch.autograd.grad(pick(x), x, -torch.zeros(4))[0].signbit()
    assert not eager.any() and found[False].all() and torch.equal(found[True], eager)


VIEWS: dict[str, Callable[[T], T]] = {
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "whole slice": lambda x: x[:],
    "step": lambda x: x[::2],
    "column": lambda x: x[:, 1:],
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "flatten": lambda x: x.reshape(-1).view(x.shape),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape).sum(0),
    "halves": lambda x: torch.cat(x.chunk(2, -1), -1),
    "detach": lambda x: x + x.detach(),
    "row": lambda x: x[0].expand(x.shape),
}
VALUES: dict[str, Callable[[T], T]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": lambda x: (x * 0.1).exp(),
    "square": lambda x: x * x,
    "softmax": lambda x: F.softmax(x, -1),
    "product": lambda x: x @ x.t() @ x,
}


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([*VIEWS, *VALUES]), min_size=2, max_size=7))
def test_chains_of_views_and_values_are_eagers(names: list[str]) -> None:
    def function(x: T) -> T:
        for name in names:
            x = {**VIEWS, **VALUES}[name](x)
        return x * 1.0

    check(function, torch.linspace(-1, 1, 11 * 6).view(11, 6))


def test_a_cell_is_one_kernel_forward_and_one_backward() -> None:
    """The sum that is cut into gates, and the gradients of the gates that are put together, are part of them."""
    module, phases = Cell(), {}

    def compile_graph(graph: fx.GraphModule, phase: str, times: int) -> Callable[[list[object]], object]:
        imported = import_graph(graph)
        planned = imported.for_fusion()
        analyzer = FusionCandidateAnalyzer(FusionConfig(min_tensor_size=0), why_not)
        phases[phase] = [n.operation_names.split(" + ") for n in analyzer.find_fusible_operations(planned)]
        return boxed(graph.forward)

    x = randn(6, 4, 10).requires_grad_()
    torch._dynamo.reset_code_caches()
    run = torch.compile(module, backend=lambda m, inputs: compile_with(m, inputs, compile_graph), fullgraph=True)
    run(x).sum().backward()
    cells = [names for names in phases["forward"] if "tanh" in names]
    assert len(cells) == 4 and all(names[:2] == ["add", "sigmoid"] for names in cells)
    gradients = [names for names in phases["backward"] if "tanh_backward" in names]
    assert len(gradients) == 4 and all("cat" in names for names in gradients)


def test_views_of_views_look_at_once() -> None:
    def function(x: T) -> T:
        y = (x * 2).view(-1, 12).view(-1, 3, 4).expand(-1, 3, 4).view(-1, 4)
        return (y @ y.t()).view(-1).view(-1, 1) * 1.5

    graphs = check(function, randn(12, 12))
    assert graphs["forward"].count("aten.view.default") <= 2 and "aten.expand.default" not in graphs["forward"]


def test_views_that_only_a_step_between_allows_stay() -> None:
    check(lambda x: x.t().reshape(3, -1).view(-1).view(4, -1).sin(), randn(12, 12))
    check(lambda x: (x * 2)[:, :6].unflatten(1, (2, 3)).flatten(1).view(-1, 2, 3).cos(), randn(12, 12))


def test_graphs_without_gradients_are_simplified() -> None:
    def function(x: T) -> T:
        y = (x + 1).exp()
        return y.view(-1, 3) @ y.view(-1, 3).t().t().t().detach()

    run, graphs = captured(function)
    for size in (6, 9, 3):
        x = randn(size, 4)
        assert torch.equal(run(x), function(x))
    assert graphs["inference"].count("aten.view.default") == 1
    assert graphs["inference"].count("aten.t.default") == 1 and "aten.detach.default" not in graphs["inference"]


def test_results_stay_tensors_of_their_own() -> None:
    def function(x: T) -> tuple[T, T, T]:
        y = x * 2
        return y.detach(), y.expand(4, 3), y.view(4, 3)

    run, _ = captured(function)
    x = randn(4, 3)
    assert len({id(part) for part in run(x)}) == 3
    assert all(map(torch.equal, run(x), function(x)))
