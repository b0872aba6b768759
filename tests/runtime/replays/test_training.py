"""Training on replayed graphs, beside twins that are launched one by one."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.replays.bench import UNTIL_KEPT, inputs, one_by_one, same, weights


def forward_graph(x, w, b):
    """As AOTAutograd makes it: results, then what is saved, inputs and views of them among it."""
    hidden = torch.ops.aten.addmm(b, x, w)
    active = torch.sigmoid(hidden) * 2.0
    out = (active @ w).tanh()
    return out, x, w, w.t(), active, active.t(), out


def backward_graph(x, w, turned, active, active_t, out, grad):
    g = grad * (1.0 - out * out)
    g_active = g @ turned
    g_hidden = (g_active * active * (1.0 - active * 0.5)).exp() - 1.0  # any function will do
    return g_hidden @ turned, active_t @ g + x.t() @ g_hidden, g_hidden.sum(0)


class Training:
    """A forward and a backward graph below autograd."""

    def __init__(self, forward, backward):
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *args):
                out, *saved = forward([*args])
                ctx.save_for_backward(*[t.detach() if t._is_view() else t for t in saved])
                return out

            @staticmethod
            def backward(ctx, grad):
                return tuple(backward([*ctx.saved_tensors, grad.contiguous()]))

        self.call = Function.apply


class Twins:
    """One model twice: replayed, and launched one by one on equal parameters."""

    def __init__(self, bench):
        self.bench = bench
        x, (w, b) = inputs(0), weights()
        examples = [x, w, b], [x, w, w, x, x.t(), x, x]
        self.models = []
        for is_replayed in (True, False):
            params = [torch.nn.Parameter(p.detach().clone()) for p in (w, b)]
            passes = [
                bench.router(f, *its, phase=phase) if is_replayed else (lambda args, plain=plain: plain(*args))
                for f, its, phase in zip(
                    (forward_graph, backward_graph), examples, ("forward", "backward"), strict=True
                )
                for plain in [None if is_replayed else one_by_one(bench, f, *its)]
            ]
            self.models.append((Training(*passes), params))

    def step(self, use, calls=1):
        """``use(call, params)`` for both; everything that it returns, and all parameters and gradients, must agree."""
        for _ in range(calls):
            found = [use(lambda x, t=training, p=params: t.call(x, *p), params) for training, params in self.models]
            same(*found)
            (mine, its) = [params for _, params in self.models]
            same(mine, its)
            assert [p.grad is None for p in mine] == [p.grad is None for p in its]
            same([p.grad for p in mine if p.grad is not None], [p.grad for p in its if p.grad is not None])

    @property
    def replays(self):
        return self.bench.player.replays


def usual(optimizer=None):
    seeds = iter(range(10**6))

    def use(call, params):
        x = inputs(next(seeds) // 2).requires_grad_()
        out = call(x)
        loss = out.square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer(params)
        return [out.detach(), loss.detach(), x.grad]

    return use


def sgd(params):
    with torch.no_grad():
        torch._foreach_add_(params, [p.grad for p in params], alpha=-0.01)
    for p in params:
        p.grad = None


@pytest.fixture
def twins(bench):
    found = Twins(bench)
    found.step(usual(sgd), UNTIL_KEPT)
    if bench.failures:
        raise bench.failures[0][2]
    assert bench.codes == ["replayed"] * 2, bench.refusals
    before = found.replays
    found.step(usual(sgd), 5)
    assert found.replays == before + 10
    return found


def test_training_with_gradients_that_add_up(twins):
    before = twins.replays

    def keep(params):
        pass

    twins.step(usual(keep), 6)
    assert twins.replays == before + 12


def test_two_forwards_before_their_backwards(twins):
    """In both orders, with results of the first still in use."""
    seeds = iter(range(10**6))
    for order in ((0, 1, 2), (2, 0, 1)):

        def use(call, params, order=order):
            base = next(seeds) // 2 * 3
            xs = [inputs(base + k).requires_grad_() for k in range(3)]
            outs = [call(x) for x in xs]
            for k in order:
                (outs[k] * outs[0].detach()).sum().backward()
            sgd(params)
            return [*(o.detach() for o in outs), *(x.grad for x in xs)]

        before = twins.replays
        twins.step(use, 4)
        assert twins.replays == before + 4 * 6


def test_a_graph_kept_for_a_second_backward(twins):
    seeds = iter(range(10**6))

    def use(call, params):
        x = inputs(next(seeds) // 2).requires_grad_()
        out = call(x)
        out.sum().backward(retain_graph=True)
        call(x.detach() * 2)  # another forward between
        out.square().sum().backward()
        sgd(params)
        return [out.detach(), x.grad]

    twins.step(use, 6)


def test_a_saved_tensor_that_the_script_writes_to_is_refused_as_in_eager(twins):
    def use(call, params):
        x = inputs(1).requires_grad_()
        out = call(x)
        with torch.no_grad():
            out.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return [x.detach()]

    def weights_too(call, params):
        x = inputs(1).requires_grad_()
        out = call(x)
        with torch.no_grad():
            params[0].add_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return [x.detach()]

    twins.step(use, 2)
    twins.step(weights_too, 2)
    twins.step(usual(sgd), 4)


def test_an_optimizer_that_exchanges_the_parameters_memory(twins):
    def exchange(params):
        for p in params:
            p.data = p.data - 0.01 * p.grad
            p.grad = None

    twins.step(usual(exchange), 2 * UNTIL_KEPT)
    before = twins.replays
    twins.step(usual(exchange), 4)
    assert twins.replays == before + 8  # they are copied in by now


def test_generators_that_hold_a_call_open(twins):
    """A forward pass and its backward with others between, in turns."""
    seeds = iter(range(10**6))

    def episode(call, seed, results):
        x = inputs(seed).requires_grad_()
        out = call(x)
        yield
        out.square().sum().backward()
        results += [out.detach(), x.grad]
        yield

    def use(call, params):
        base, results = next(seeds) // 2 * 5, []
        runs = [episode(call, base + k, results) for k in range(5)]
        for _ in range(2):
            for run in runs:
                next(run)
        sgd(params)
        return results

    before = twins.replays
    twins.step(use, 5)
    assert twins.replays == before + 50
