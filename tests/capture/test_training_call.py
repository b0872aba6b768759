"""Calls of training graphs past AOTAutograd's wrappers: as eager, and past them indeed."""

import sys

import pytest
import torch
from torch import nn

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.guarded_call import plain_call


def captured(function, dynamic=None):
    """Compiled for Dynamo as a root's direct call has it."""
    torch._dynamo.reset()

    def backend(graph, inputs):
        return plain_call(compile_with(graph, inputs, lambda aten, phase, times: boxed(aten.forward)))

    return torch.compile(function, backend=backend, dynamic=dynamic)


def function(x, weight, bias):
    y = torch.sigmoid(x * weight + bias) * x
    return y, (y.detach() > 0).sum(), x.t().contiguous()


def outcome(call, make_gradient=torch.ones_like):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8), torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    y, count, turned = call(x, weight, bias)
    y.backward(make_gradient(y))
    return y, count, turned, weight.grad, bias.grad, torch.tensor([y.requires_grad, count.requires_grad])


def names_run(action):
    """Names and files of all Python functions that run in it."""
    found = set()

    def note(frame, event, argument):
        if event == "call":
            found.add((frame.f_code.co_name, frame.f_code.co_filename))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("make", [torch.ones_like, lambda y: torch.ones(()).expand_as(y)], ids=["dense", "of a sum"])
def test_nothing_of_aotautograd_runs_but_its_function(make):
    call = captured(function)
    outcome(call)
    ran = names_run(lambda: outcome(call, make))
    its = {name for name, file in ran if "runtime_wrappers" in file or "subclass_codegen" in file}
    # Torch 2.11 has the two passes in its function, which ours replace, and two wrappers of the graph itself.
    assert its == ({"forward", "backward"} if torch.__version__ >= (2, 12) else {"wrapper", "inner_fn"})
    for found, wanted in zip(outcome(call, make), outcome(function, make), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_that_lie_in_another_way(dynamic):
    """Expanded and transposed: AOTAutograd brings them into the order that was traced. A parameter is a tensor."""
    call = captured(function, dynamic)
    for make in (
        torch.ones_like,
        lambda y: torch.ones(()).expand_as(y),
        lambda y: torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).t(),
        lambda y: nn.Parameter(torch.full_like(y, 2.0)),
    ):
        for found, wanted in zip(outcome(call, make), outcome(function, make), strict=True):
            torch.testing.assert_close(found, wanted)


def test_an_input_twice_one_that_is_written_to_and_what_was_saved():
    def doubled(x, y):
        return x * y + torch.sin(x)

    call = captured(doubled)
    for _ in range(2):
        x = torch.randn(8, requires_grad=True)
        call(x, x).sum().backward()
        torch.testing.assert_close(x.grad, 2 * x.detach() + torch.cos(x.detach()))

    norm, eager = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    call = captured(norm)
    for _ in range(3):
        x = torch.randn(4, 8)
        torch.testing.assert_close(call(x), eager(x))
        call(x).sum().backward(), eager(x).sum().backward()
    for found, wanted in zip(norm.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted)

    call = captured(lambda a, b: a * b)
    a, b = torch.randn(8, requires_grad=True), torch.randn(8)
    result = call(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
