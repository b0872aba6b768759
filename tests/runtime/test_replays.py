"""Captured graphs replayed as CUDA graphs, without a GPU: whatever a script does, results are those of launches one by
one. `tests.gpu.fake_graphs` plays the recordings.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from time import perf_counter

import pytest
import torch

from autofuse.codegen.triton.source import Argument, Pass, TritonSource
from autofuse.gpu import capturing
from autofuse.gpu.modules import load_artifact
from autofuse.pipeline import route_graph
from autofuse.runtime import injector, replay_inputs
from autofuse.runtime.choice import UNKNOWN, Choice
from autofuse.runtime.plan_replay import PlanReplay
from autofuse.runtime.plans import Untimed
from autofuse.runtime.replays import Replays
from autofuse.runtime.router import GraphRouter
from autofuse.settings.groups import ReplaySettings
from autofuse.wrapper import node_call, replayable
from tests.gpu.fake_driver import artifact_of, fake_driver
from tests.gpu.fake_graphs import Player
from tests.runtime.test_gpu_graphs import GPU, planned, session_with, traced

__all__ = ["session_with"]
from tests.runtime.test_routed_graphs import Undecided

AFTER = 4
SLOW, FAST = 1e-4, 2e-5  # seconds


class Kernels(Undecided):
    """Every node of a GPU has a kernel."""

    def __init__(self, driver):
        super().__init__()
        self.driver, self.forms, self.version, self.known = driver, {}, 0, True

    def learn(self, program):
        for slot in program.slots:
            self.forms[slot.node.fusion_id] = slot.node.form

    def choose(self, fusion_id, values, device):
        if not self.known:
            return UNKNOWN
        form = self.forms[fusion_id]
        count = len(form.inputs) + len(form.outputs)
        arguments = tuple(Argument(f"p{i}", "param", "*fp32", i) for i in range(count))
        name = f"af_{fusion_id[:12]}_{self.version}"
        source = TritonSource(name, "", (Pass(name, arguments, (), ((128, 64),)),), (), (), 4, 1)
        return Choice(True, load_artifact(artifact_of(source), 0, driver=self.driver.driver), name)


class Times:
    """A timer that says what it was told."""

    def __init__(self, seconds):
        self.seconds, self.waiting, self.open = seconds, [], False

    def start(self):
        self.open = True

    def stop(self):
        assert self.open
        self.waiting.append(self.seconds)
        self.open = False

    def poll(self):
        found, self.waiting = self.waiting, []
        return found


class Bench:
    """Routers on a player."""

    def __init__(self, monkeypatch):
        self.driver = fake_driver()
        self.driver.forget()
        self.player = player = Player(self.driver)
        self.kernels = Kernels(self.driver)
        self.refusals, self.failures, self.disturbed = [], [], 0
        self.seconds = [SLOW, FAST]  # of launches one by one, of replays
        self._timers = 0
        real = node_call.make_device_launcher

        def make(form, loaded, values, allocate=None, failed=None, calls=None, launch=None):
            launcher = player.launcher(form, tuple(values))
            with monkeypatch.context() as patch:
                patch.setattr(node_call, "launch_of", launcher)
                return real(form, loaded, values, allocate, failed, player.torch_calls())

        monkeypatch.setattr(node_call, "make_device_launcher", make)
        monkeypatch.setattr(node_call, "is_capturing", player.is_capturing)
        monkeypatch.setattr(capturing, "is_capturing", player.is_capturing)
        monkeypatch.setattr(replay_inputs, "ALIGNMENT", 64)
        checked = injector.layout_problem
        monkeypatch.setattr(injector, "layout_problem", lambda *args: checked(*args[:-1], torch.device("cpu")))
        self.replays = self.session()

    def session(self, **settings):
        """Also replaces the present one."""
        self.replays = Replays(
            ReplaySettings(enabled=True, after=AFTER, **settings),
            0.03,
            self.player.calls(),
            self.refusals.append,
            lambda kind, what, error: self.failures.append((kind, what, error)),
            self.disturb,
        )
        return self.replays

    def disturb(self):
        self.disturbed += 1

    def timer(self, device):
        self._timers += 1
        return Times(self.seconds[1 - self._timers % 2])

    def router(self, function, *examples, phase="inference"):
        _, program = planned(function, *[GPU] * len(examples), shapes=[tuple(x.shape) for x in examples])
        self.kernels.learn(program)
        replay = partial(PlanReplay, self.replays, self.timer)
        return GraphRouter(program, self.kernels, phase, perf_counter, self.timer, 1, replay)

    @property
    def codes(self):
        return [refusal.code for refusal in self.refusals]


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def net(x, w, b):
    """Products with fused nodes between them."""
    hidden = (x @ w + b).relu() * 2.0
    out = (hidden @ w - x).tanh() + b
    return out, hidden.sum(-1) * 0.5 + 1.0


def inputs(seed, rows=8, width=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator)


def weights(width=16):
    return torch.nn.Parameter(inputs(100, width, width) / 4), torch.nn.Parameter(inputs(101, 1, width)[0].clone())


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)


UNTIL_KEPT = 60  # calls


def settle(router, make, expected, calls=UNTIL_KEPT):
    """Call until a replay is kept, or nothing more changes; each call is checked."""
    for seed in range(calls):
        args = make(seed)
        want = expected(*args)
        same(router([*args]), want)


@pytest.fixture
def settled(bench):
    """A router whose calls are replayed, its weights, and what it should give."""
    w, b = weights()
    router = bench.router(net, inputs(0), w, b)
    plain = one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    if bench.failures:
        raise bench.failures[0][2]
    assert bench.codes == ["replayed"], bench.refusals
    return router, w, b, plain


def one_by_one(bench, function, *examples):
    """The same graph on the same kernels, never replayed."""
    _, program = planned(function, *[GPU] * len(examples), shapes=[tuple(x.shape) for x in examples])
    bench.kernels.learn(program)
    router = GraphRouter(program, bench.kernels, "inference", perf_counter)
    return lambda *args: router([*args])


def replayed(bench, call):
    """Whether a call was, and its result."""
    before = bench.player.replays
    found = call()
    return bench.player.replays > before, found


# ---- the way to a replay ---------------------------------------------------------------------------------


def test_a_graph_is_recorded_compared_timed_and_then_replayed(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    player, seen = bench.player, []
    for seed in range(UNTIL_KEPT):
        args = [inputs(seed), w, b]
        want = plain(*args)
        before = player.replays
        same(router(args), want)
        assert args == []  # emptied, so that the caller keeps nothing alive
        seen.append(player.replays - before)
    first = seen.index(1)
    assert player.recordings == 1 and AFTER <= first <= 2 * AFTER
    assert seen[first + 1] == 1 and 0 in seen[first + 2 : first + 8] and 1 in seen[first + 2 : first + 8]
    assert seen[-20:] == [1] * 20 and bench.disturbed == 2
    assert bench.codes == ["replayed"] and "20.0 us as a CUDA graph, 100.0 us" in bench.refusals[0].detail
    launches = player.launches
    router([inputs(1), w, b])
    assert player.launches == launches and bench.driver.number("count") <= 1
    (plan,) = router.all_plans()
    assert plan.count == UNTIL_KEPT + 1 and plan.fused_calls(plan.nodes[0]) == plan.count


def test_a_replay_that_is_no_faster_is_given_up(bench):
    bench.seconds = [SLOW, SLOW]
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * UNTIL_KEPT)
    assert bench.codes == ["not_replayed"] and "no faster" in bench.refusals[0].detail
    (plan,) = router.all_plans()
    assert plan.native is None and not bench.replays.kept and not replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_small_gain_needs_a_second_race(bench):
    bench.seconds = [1.1 * FAST, FAST]
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * UNTIL_KEPT)
    assert bench.codes == ["replayed"]


def test_what_cannot_be_timed_is_not_kept(bench):
    w, b = weights()
    bench.timer = Untimed
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 4 * UNTIL_KEPT)
    assert bench.codes == ["not_replayed"] and "no call could be timed" in bench.refusals[0].detail


def test_a_recording_that_gives_something_else_is_never_used(bench, settled):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    bench.player.during = lambda: bench.player.work.pop()  # the last launch is lost
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.codes == ["replayed", "not_replayed"] and "other results" in bench.refusals[1].detail


# ---- inputs ----------------------------------------------------------------------------------------------


def test_an_input_freed_and_another_at_its_address(bench, settled):
    router, w, b, plain = settled
    for seed in range(20):
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit
        del x
        same(found, want)


def test_a_parameter_whose_memory_is_exchanged(bench, settled):
    """As ``.data =``, ``set_`` and a step that makes new parameters do it."""
    router, w, b, plain = settled
    held = []
    for seed in range(3 * UNTIL_KEPT):
        held.append(w.data)  # so that the old address stays taken
        if seed % 2:
            w.data = w.data * 0.99
        else:
            with torch.no_grad():
                w.set_((w.data * 0.99).untyped_storage(), 0, (16, 16), (16, 1))
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))
    assert bench.player.recordings == 2  # from then on it is copied in
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_parameter_written_to_in_place_is_read_where_it_is(bench, settled):
    router, w, b, plain = settled
    for seed in range(8):
        with torch.no_grad():
            torch._foreach_add_([w, b], 0.125)
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit
        same(found, want)
    assert bench.player.recordings == 1


def test_another_parameter_object_of_the_same_kind(bench, settled):
    """A second module on the same graph: all its addresses differ."""
    router, w, b, plain = settled
    other, its = torch.nn.Parameter(w.detach() + 1), torch.nn.Parameter(b.detach() - 1)
    for seed in range(2 * UNTIL_KEPT):
        mine = (w, b) if seed % 3 else (other, its)
        x = inputs(seed)
        same(router([x, *mine]), plain(x, *mine))


def test_inputs_that_are_views_and_share_memory(bench):
    w, b = weights()
    shapes = inputs(0), w, b
    router, plain = bench.router(net, *shapes), one_by_one(bench, net, *shapes)
    big = inputs(0, 64)

    def make(seed):
        with torch.no_grad():
            big.add_(0.5)
        begin = 8 * (seed % 7)
        return big[begin : begin + 8], big[begin : begin + 16].T.contiguous() if seed % 2 else w, b

    settle(router, make, plain, 2 * UNTIL_KEPT)

    def both(x, y):
        return ((x + y).relu() * 2.0) @ y.T, (x - y).exp().sum(-1)

    router, plain = bench.router(both, shapes[0], shapes[0]), one_by_one(bench, both, shapes[0], shapes[0])
    settle(router, lambda seed: (big[8:16], big[seed % 8 : seed % 8 + 8]), plain)
    before = bench.player.replays
    settle(router, lambda seed: (big[8:16], big[seed % 8 : seed % 8 + 8]), plain, 16)
    assert bench.player.replays == before + 16


def test_an_address_with_another_remainder_is_launched_one_by_one(bench, settled):
    """By which libraries choose their kernels."""
    router, w, b, plain = settled
    room = torch.randn(200)
    shifted = room[1:129].view(8, 16)
    assert shifted.data_ptr() % 64
    want = plain(shifted, w, b)
    hit, found = replayed(bench, lambda: router([shifted, w, b]))
    assert not hit
    same(found, want)
    assert replayed(bench, lambda: router([inputs(3), w, b]))[0]


def test_an_input_written_to_after_the_call(bench, settled):
    router, w, b, plain = settled
    x = inputs(1)
    want = plain(x, w, b)
    found = router([x, w, b])
    x.zero_()
    same(found, want)
    same(router([x, w, b]), plain(x, w, b))


def test_sizes_that_no_node_uses_are_looked_at(bench):
    """A plan's key holds the sizes of its nodes; a graph may have others."""
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    recording = bench.replays.kept[0]
    assert recording.inputs.moved([inputs(1), w, b]) is None
    assert recording.inputs.moved([inputs(1, 4), w, b]) == set()
    assert recording.inputs.moved([inputs(1, 16).T[:8], w, b]) == set()
    assert recording.inputs.moved([inputs(1).double(), w, b]) == set()


# ---- results ---------------------------------------------------------------------------------------------


def test_results_are_the_callers_own(bench, settled):
    router, w, b, plain = settled
    kept = []
    for seed in range(12):
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit and all(t._version == 0 and not t._is_view() and t.is_leaf for t in found)
        kept.append((found, want))
    addresses = {t.data_ptr() for found, _ in kept for t in found}
    assert len(addresses) == 24
    for found, want in kept:
        same(found, want)
    kept[0][0][0].zero_()  # written to
    x = inputs(50)
    same(router([x, w, b]), plain(x, w, b))


def test_results_that_are_inputs_or_views_of_them_or_of_each_other(bench):
    def function(x, w, b):
        hidden = (x @ w + b).relu() * 2.0
        other = (hidden @ w).exp()
        empty = x.narrow(0, 0, 0).exp()
        parts = w.t(), x.narrow(0, 2, 2), hidden, hidden.t(), hidden.narrow(0, 1, 2)
        return other, x, w, *parts, other, empty, (x * 2).t()

    w, b = weights()
    router, plain = bench.router(function, inputs(0), w, b), one_by_one(bench, function, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    x = inputs(3)
    hit, found = replayed(bench, lambda: router([x, w, b]))
    assert hit, (bench.refusals, bench.failures)
    same(found, plain(x, w, b))
    other, own, weight, turned, part, hidden, hidden_t, rows, again, nothing, _ = found
    assert own is x and weight is w and other is again and nothing.shape == (0, 16)
    assert turned.data_ptr() == w.data_ptr() and part.data_ptr() == x[2:4].data_ptr()
    assert hidden.untyped_storage().data_ptr() == hidden_t.untyped_storage().data_ptr()
    version = hidden_t._version
    hidden.add_(1)
    assert torch.equal(hidden_t, hidden.t()) and torch.equal(rows, hidden[1:3]) and hidden_t._version > version
    with torch.no_grad():
        before = turned._version
        w.add_(0)
    assert turned._version > before


def test_inference_tensors_and_calls_in_other_modes(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    frozen = w.detach(), b.detach()
    for seed in range(2 * UNTIL_KEPT):
        with modes[seed % 3]():
            x = inputs(seed)
            found = router([x, *frozen])
            same(found, plain(x, *frozen))
            assert all(t.is_inference() == (seed % 3 == 0) for t in found)
    assert bench.codes == ["replayed"]


def test_a_part_of_a_buffer_at_its_address(bench):
    """As where a graph takes any size, and no node of it has one."""
    w, b = weights()
    x = inputs(0)
    router, plain = bench.router(net, x, w, b), one_by_one(bench, net, x, w, b)
    settle(router, lambda seed: (x.mul_(0.9), w, b), plain)
    (recording,) = bench.replays.kept
    assert recording.inputs.moved([x, w, b]) is None
    assert recording.inputs.moved([x[:4], w, b]) == set() and x[:4].data_ptr() == x.data_ptr()
    assert recording.inputs.moved([x, w.data, b]) == set()


def test_what_we_ask_torch_for_may_be_gone(bench, settled, monkeypatch):
    """In another version of torch: one line, and everything is launched."""
    router, w, b, plain = settled

    def gone():
        raise AttributeError("numerics")

    object.__setattr__(bench.replays.kept[0].owner, "_calls", replace(bench.player.calls(), numerics=gone))
    for seed in range(4):
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))
    assert len(bench.failures) == 1
    bench.replays.calls = replace(bench.player.calls(), is_left_alone=gone)
    router, plain = bench.router(net, inputs(0, 4), w, b), one_by_one(bench, net, inputs(0, 4), w, b)
    settle(router, lambda seed: (inputs(seed, 4), w, b), plain, 20)
    assert len(bench.failures) == 2 and bench.player.recordings == 1


# ---- training --------------------------------------------------------------------------------------------


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


# ---- when nothing may happen -----------------------------------------------------------------------------


def test_inside_of_the_users_own_recording_everything_is_launched(bench, settled):
    router, w, b, _ = settled
    bench.player.capturing = True
    try:
        before, launches = bench.player.replays, bench.player.launches
        found = router([inputs(1), w, b])
        assert bench.player.replays == before and bench.player.launches > launches
        assert len(found) == 2
    finally:
        bench.player.capturing = False
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_nothing_is_recorded_while_the_user_records(bench):
    w, b = weights()
    router = bench.router(net, inputs(0), w, b)
    router([inputs(0), w, b])
    bench.player.capturing = True
    for seed in range(40):
        router([inputs(seed), w, b])
    assert not bench.player.recordings
    bench.player.capturing = False


def test_nothing_is_recorded_while_operators_are_watched(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    bench.player.left_alone = False
    settle(router, lambda seed: (inputs(seed), w, b), plain, 40)
    assert not bench.player.recordings
    bench.player.left_alone, bench.player.may_wait = True, False
    settle(router, lambda seed: (inputs(seed), w, b), plain, 40)
    assert not bench.player.recordings
    bench.player.may_wait = True
    settle(router, lambda seed: (inputs(seed), w, b), plain, UNTIL_KEPT)
    assert bench.player.recordings == 1
    bench.player.left_alone = False
    assert not replayed(bench, lambda: router([inputs(1), w, b]))[0]
    bench.player.left_alone = True
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_under_anomaly_detection_and_other_switches_calls_are_launched(bench, settled):
    router, w, b, plain = settled
    with torch.autograd.set_detect_anomaly(True):
        assert not replayed(bench, lambda: router([inputs(1), w, b]))[0]
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]
    bench.player.numerics = "fewer bits"
    x = inputs(1)
    hit, found = replayed(bench, lambda: router([x, w, b]))
    assert not hit
    same(found, plain(x, w, b))
    bench.player.numerics = "as usual"
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_two_streams(bench, settled):
    """Calls on another stream are launched one by one; a graph that moves there for good is recorded there."""
    router, w, b, plain = settled
    for seed in range(20):
        bench.player.current_stream = 0x5000 if seed % 2 else 0x6000
        x = inputs(seed)
        want = plain(x, w, b)
        hit, found = replayed(bench, lambda x=x: router([x, w, b]))
        assert hit == bool(seed % 2)
        same(found, want)
    bench.player.current_stream = 0x6000
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.player.recordings == 2 and len(bench.player.pools) == 2
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_another_device_is_current(bench, settled):
    router, w, b, _ = settled
    bench.player.device = 1
    assert bench.replays.kept[0].owner._enter([inputs(1), w, b]) is None
    bench.player.device = 0
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_call_inside_of_a_call(bench, settled):
    """From a hook, say: memory in use is not touched."""
    router, w, b, plain = settled
    pool = bench.replays.kept[0].pool
    with pool.lock:
        x = inputs(1)
        hit, found = replayed(bench, lambda: router([x, w, b]))
        assert not hit
        same(found, plain(x, w, b))
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_threads(bench, settled):
    """Several threads replay one graph, each with its own inputs, and nothing more is recorded."""
    router, w, b, plain = settled
    other, its_plain = bench.router(net, inputs(0, 4), w, b), one_by_one(bench, net, inputs(0, 4), w, b)
    settle(other, lambda seed: (inputs(seed, 4), w, b), its_plain, 2)
    wanted = {
        (seed, rows): (plain if rows == 8 else its_plain)(inputs(seed, rows), w, b)
        for seed in range(60)
        for rows in (8, 4)
    }
    recordings, wrong = bench.player.recordings, []

    def run(number):
        try:
            for seed in range(60):
                rows = 8 if (seed + number) % 2 else 4
                same((router if rows == 8 else other)([inputs(seed, rows), w, b]), wanted[seed, rows])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and bench.player.recordings == recordings
    assert "several threads" in bench.replays.why_not_now()


# ---- decisions, memory, failures ---------------------------------------------------------------------------


def test_a_decision_drops_the_graph(bench, settled):
    router, w, b, plain = settled
    bench.kernels.version = 1
    (plan,) = router.all_plans()
    old = plan.native
    thread = threading.Thread(target=router.refresh, args=(plan,))  # as the session's own does
    thread.start()
    thread.join()
    assert plan.native is not old and not bench.replays.kept and len(bench.replays._retired) == 1
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.player.recordings == 2 and len(bench.replays._retired) == 1  # the device is behind
    bench.player.has_finished = True
    router([inputs(1), w, b])
    assert bench.replays._retired == []
    assert replayed(bench, lambda: router([inputs(1), w, b]))[0]


def test_a_decision_in_the_middle_of_a_recording(bench):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)

    def decide():
        bench.kernels.version += 1
        thread = threading.Thread(target=lambda: router.refresh(next(iter(router.all_plans()))))
        thread.start()
        thread.join()
        bench.player.during = lambda: None

    bench.player.during = decide
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * UNTIL_KEPT)
    assert bench.player.recordings == 2 and len(bench.replays.kept) == 1 and bench.codes == ["replayed"]


def test_undecided_nodes_wait_longer(bench):
    bench.kernels.known = False
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 4 * AFTER)
    assert not bench.player.recordings
    settle(router, lambda seed: (inputs(seed), w, b), plain, 5 * AFTER)
    assert bench.player.recordings == 1


def test_only_so_many_are_kept_and_the_oldest_goes(bench):
    bench.session(max_graphs=2)
    w, b = weights()
    routers = {rows: bench.router(net, inputs(0, rows), w, b) for rows in (2, 4, 8)}
    plain = {rows: one_by_one(bench, net, inputs(0, rows), w, b) for rows in routers}
    bench.player.has_finished = True
    for rows in (2, 4, 8):
        settle(routers[rows], lambda seed, rows=rows: (inputs(seed, rows), w, b), plain[rows])
    assert [replayed(bench, lambda rows=rows: routers[rows]([inputs(1, rows), w, b]))[0] for rows in (2, 4, 8)] == [
        False, True, True,
    ]  # fmt: skip
    assert len(bench.replays.kept) == 2 and len(bench.replays._retired) <= 1
    for seed in range(UNTIL_KEPT):  # all in turns, in one pool of memory
        for rows in (2, 4, 8):
            x = inputs(seed, rows)
            same(routers[rows]([x, w, b]), plain[rows](x, w, b))
    assert len(bench.replays.kept) == 2


def test_memory_whose_graphs_are_all_gone_is_not_recorded_into(bench, settled):
    """Torch gives a pool up with the last graph in it."""
    router, w, b, plain = settled
    bench.player.has_finished = True
    for _ in range(2):
        (plan,) = router.all_plans()
        bench.kernels.version += 1
        router.refresh(plan)
        settle(router, lambda seed: (inputs(seed), w, b), plain)
        assert replayed(bench, lambda: router([inputs(1), w, b]))[0]
    assert bench.player.recordings == 3 and not bench.failures


def test_graphs_of_one_pool_use_each_others_memory_and_stay_right(bench):
    w, b = weights()
    routers = {rows: bench.router(net, inputs(0, rows), w, b) for rows in (8, 4, 2)}
    plain = {rows: one_by_one(bench, net, inputs(0, rows), w, b) for rows in routers}
    for rows in routers:
        settle(routers[rows], lambda seed, rows=rows: (inputs(seed, rows), w, b), plain[rows])
    assert bench.codes == ["replayed"] * 3 and len(bench.player.pools) == 1
    for seed in range(30):
        for rows in routers:
            x = inputs(seed, rows)
            want = plain[rows](x, w, b)
            hit, found = replayed(bench, lambda rows=rows, x=x: routers[rows]([x, w, b]))
            assert hit
            same(found, want)


def test_a_graph_that_takes_too_much_memory(bench, monkeypatch):
    monkeypatch.setattr(
        bench.replays, "settings", ReplaySettings.model_construct(after=AFTER, max_graphs=9, max_bytes=64)
    )
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert bench.codes == ["not_replayed"] and "no room" in bench.refusals[0].detail and not bench.replays.kept


@pytest.mark.parametrize("moment", ["begin", "body", "end"])
@pytest.mark.parametrize("error", [RuntimeError("capture was invalidated"), torch.OutOfMemoryError("no memory")])
def test_a_recording_that_raises_is_one_line_and_nothing_else(bench, moment, error):
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    bench.player.fails[moment] = error
    settle(router, lambda seed: (inputs(seed), w, b), plain)
    assert [(kind, type(e)) for kind, _, e in bench.failures] == [("replay_failed", type(error))]
    assert bench.codes == ["not_replayed"] and not bench.replays.kept and not bench.player.replays


def test_after_failures_of_two_graphs_nothing_is_recorded(bench):
    w, b = weights()
    bench.player.fails["end"] = RuntimeError("broken")
    for rows in (2, 4, 8):
        router, plain = bench.router(net, inputs(0, rows), w, b), one_by_one(bench, net, inputs(0, rows), w, b)
        settle(router, lambda seed, rows=rows: (inputs(seed, rows), w, b), plain, 30)
    assert bench.player.recordings == 2 and bench.replays.is_off


def test_a_replay_that_raises(bench, settled, monkeypatch):
    router, w, b, plain = settled
    graph = bench.replays.kept[0].graph
    monkeypatch.setattr(graph, "replay", lambda: (_ for _ in ()).throw(RuntimeError("lost")))
    for seed in range(5):
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))
    assert len(bench.failures) == 1 and not bench.replays.kept


def test_an_error_of_the_users_own_is_raised_once(bench, monkeypatch):
    """Launches one by one that raise, as without enough memory: nothing is said of graphs."""
    w, b = weights()
    router, plain = bench.router(net, inputs(0), w, b), one_by_one(bench, net, inputs(0), w, b)
    settle(router, lambda seed: (inputs(seed), w, b), plain, 2 * AFTER + 3)
    assert bench.player.recordings == 1
    empty, raised = bench.player.empty, 0
    for seed in range(16):

        def broken(*layout):
            raise torch.OutOfMemoryError("the user's")

        monkeypatch.setattr(bench.player, "empty", broken)
        try:
            router([inputs(seed), w, b])
        except Exception as error:
            assert "user's" in str(error)
            raised += 1
        monkeypatch.setattr(bench.player, "empty", empty)
        x = inputs(seed)
        same(router([x, w, b]), plain(x, w, b))


def test_evicted_plans_let_go_of_their_graphs(bench, settled):
    router, w, b, plain = settled
    router.let_go(list(router.plans.values()))
    assert not bench.replays.kept
    x = inputs(1)
    same(router([x, w, b]), plain(x, w, b))


# ---- which graphs ------------------------------------------------------------------------------------------


def of_two_devices(x):
    return (x + 1).relu() @ x.t(), (x * 2).to("cuda:1").exp()


def drawing(x):
    kept, mask = torch.ops.aten.native_dropout((x @ x.t()).relu() * 2, 0.5, True)
    return kept @ x, mask


def writing(x):
    torch.ops.aten.add_.Tensor(x, 1)
    return (x @ x.t()).relu() @ x, x.exp()


def looking(x):
    return torch.as_strided(x, (4, 4), (1, 4), 2) @ x.narrow(0, 0, 4).exp() @ x.t(), x.exp() @ x.t()


def tiny(x):
    return ((x + 1).relu() * 2,)


def attending(x):
    heads = x.reshape(1, 1, 8, 16)
    aten = torch.ops.aten
    return aten._scaled_dot_product_efficient_attention(heads, heads, heads, None, False, 0.0)[
        0
    ].exp() @ x.t(), x @ x.t()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (of_two_devices, "tensors on cuda:0, cuda:1"),
        (drawing, "draws random numbers by"),
        (writing, "writes to a tensor by add_"),
        (looking, "as_strided"),
        (tiny, "1 launches"),
        (attending, ""),
    ],
)
def test_which_graphs_are_never_recorded(function, says):
    with torch._dynamo.utils.preserve_rng_state():
        _, program = planned(function, GPU)
    assert (says in program.one_by_one) if says else not program.one_by_one, program.one_by_one
    assert ("af_plan.native" in program.source) == (not says)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (torch.ops.aten.nonzero.default, "waits for the device"),
        (torch.ops.aten._local_scalar_dense.default, "waits for the device"),
        (torch.ops.mkldnn._linear_pointwise.default, "not torch's own"),
        (time.sleep, "calls sleep"),
        (torch.ops.aten.mm.default, ""),
    ],
)
def test_which_operators_are_never_recorded(target, says):
    graph = torch.fx.Graph()
    problem = replayable._problem(graph.call_function(target, (graph.placeholder("x"),)))
    assert (says in problem) if says else not problem


def test_a_graph_of_a_cpu_is_as_before():
    _, program = planned(lambda x, y: (((x + y).relu() * 2) @ y.t() @ x,), "cpu", "cpu")
    assert program.one_by_one == "is on a CPU" and program.native


def test_a_session_replays_only_where_it_is_told_to(session_with):
    for settings, is_on in (({}, False), ({"AUTOFUSE_REPLAY_ENABLED": "1"}, True), ({"AUTOFUSE_CHECK": "1"}, False)):
        session = session_with(**settings)
        router = route_graph(traced(lambda x: (((x @ x.t()).relu() * 2) @ x,), GPU), "inference", session)
        assert isinstance(router, GraphRouter), session.context.said
        plan = router.plan_for(())
        assert isinstance(plan.native, PlanReplay) == is_on
        router.run_in_c()
        assert isinstance(plan.native, PlanReplay) == is_on
