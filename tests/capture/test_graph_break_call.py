"""Functions that call ``backward()`` inside run past Dynamo, piece by piece; other breaks are Dynamo's."""

from functools import partial

import pytest
import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from autofuse.capture.backend import as_it_is, boxed, compile_with, has_no_work
from autofuse.capture.dynamo import compile_root

TRACED = []


def backend(graph, inputs):
    TRACED.append(graph)
    if has_no_work(graph):
        return as_it_is(graph)
    return compile_with(graph, inputs, lambda aten, phase, times: boxed(aten.forward))


def step(x, weight):
    loss = torch.sigmoid(x * weight).square().mean()
    loss.backward()
    return loss.detach()


def step_and_more(x, weight):
    loss = torch.sigmoid(x * weight).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return torch.tanh(x).sum() * 2


def looked_at(values):
    return values.sum().item()


def step_that_looks(x, weight):
    loss = (x * weight).sum()
    loss.backward()
    return looked_at(x)


def found(function, *inputs):
    torch._dynamo.reset()
    root = compile_root(function.__name__, backend)
    for _ in range(2):
        root.trace(function, *inputs)
    return root.direct, root.direct.find(function, inputs, {})


def inputs_of(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape), torch.randn(shape[-1], requires_grad=True)


def outcome(call, x, weight):
    weight.grad = None
    return call(x, weight), weight.grad


@pytest.mark.parametrize("function", [step, step_and_more])
def test_a_step_runs_past_dynamo_with_eagers_results(function):
    inputs = inputs_of(4, 8)
    _, direct = found(function, *inputs)
    before, callbacks = len(TRACED), []
    handle = inputs[1].register_hook(lambda gradient: callbacks.append(get_eval_frame_callback()))
    for _ in range(3):
        assert direct.fits(function, inputs, {})
        ours, wanted = outcome(partial(direct.run, function), *inputs), outcome(function, *inputs)
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other)
    handle.remove()
    assert len(TRACED) == before and set(callbacks) == {None}, "Dynamo's frame evaluation is off in the backward pass"


def test_so_does_a_step_whose_sizes_vary():
    torch._dynamo.reset()
    root = compile_root("step", backend)
    for rows in (4, 5, 6, 6):
        root.trace(step, *inputs_of(rows, 8))
    before = len(TRACED)
    for rows in (5, 7, 4):
        inputs = inputs_of(rows, 8)
        direct = root.direct.find(step, inputs, {})
        assert direct is not None and direct.fits(step, inputs, {})
        ours, wanted = outcome(partial(direct.run, step), *inputs), outcome(step, *inputs)
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert len(TRACED) == before


def test_other_calls_go_dynamos_way():
    inputs = inputs_of(4, 8)
    calls, direct = found(step, *inputs)
    assert not direct.fits(step, inputs_of(3, 5, 8), {}), "of another rank"
    assert not direct.fits(step, (inputs[0],), {"weight": inputs[1]}) and not direct.fits(step_and_more, inputs, {})
    assert not direct.fits(step, (inputs[0].double(), inputs[1]), {})
    assert calls.find(step, inputs_of(3, 5, 8), {}) is None
    assert found(step_that_looks, *inputs)[1] is None, "what else stands at a break may have compiled parts"
    torch._dynamo.reset()
    assert direct.manager.cache_entry is None and not direct.fits(step, inputs, {})


def test_a_graph_that_only_detaches_is_not_captured():
    for_good = []

    def collect(graph, inputs):
        for_good.append(has_no_work(graph))
        return as_it_is(graph)

    torch._dynamo.reset()
    torch.compile(step, backend=collect)(*inputs_of(4, 8))
    assert for_good == [False, True]
