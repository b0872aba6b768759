"""Functions that come in through torch.compile and `optimize`: as eager whatever a call runs, judged and released."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autofuse
from autofuse import pipeline
from autofuse.gpu.devices import CPU
from autofuse.ir.records import RootRecord
from autofuse.runtime.roots.captured import CapturedCalls
from autofuse.runtime.roots.services import USUAL_TOOLS, RootTools
from autofuse.runtime.roots.tracing import TracedCalls
from autofuse.runtime.roots.user_graphs import Sizes, UserGraph
from autofuse.sessions import start_session
from autofuse.settings.layers import load


@pytest.fixture
def clock():
    """Seconds; a list of one number."""
    return [100.0]


@pytest.fixture
def session(tmp_path, monkeypatch, request):
    """Half of all calls are held out; nothing is tuned."""
    for name, value in {
        "STORE": str(tmp_path / "store.sqlite3"), "TUNE": "off", "QUIET": "1", "CAPTURE_HELD_OUT_SHARE": "0.5",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    torch._dynamo.reset()
    tools = USUAL_TOOLS
    if "clock" in request.fixturenames:
        now = request.getfixturevalue("clock")
        tools = RootTools(clock=lambda: now[0])
    session = start_session(load(), "test", tools=tools)
    yield session
    session.finish(None)
    torch._dynamo.reset()


# ---- verdicts -------------------------------------------------------------------------------------------------------


class Costing:
    """A callable that takes so long, by the clock, and counts its calls."""

    def __init__(self, clock, us):
        self.clock, self.us, self.calls = clock, us, 0

    def __call__(self, *args):
        self.calls += 1
        self.clock[0] += (self.us(*args) if callable(self.us) else self.us) * 1e-6
        return args


def watched(session, clock, captured_us, eager_us, inputs, has_gradients=False, key="graph test:0"):
    sizes = Sizes(inputs)
    graph = session.roots.graphs[key] = UserGraph(session.roots.services, key, "test", sizes.is_static)
    captured, original = Costing(clock, captured_us), Costing(clock, eager_us)
    return graph, captured, original, graph.around(captured, original, sizes, has_gradients, CPU)


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_graph_that_loses_is_released(session, clock, has_gradients):
    x = torch.empty(64)
    graph, captured, original, call = watched(session, clock, 40.0, 15.0, [x], has_gradients)
    for _ in range(400):
        call(x)
        clock[0] += 3e-6  # the rest of the script
    assert (graph.state, graph.reason) == ("eager", "slower_than_eager")
    before, asked = captured.calls, original.calls
    for _ in range(10_000):
        call(x)
    assert captured.calls == before and original.calls == asked + 10_000 and graph.calls == 10_400
    record = graph.record()
    assert record.state == "eager" and record.judged_elements >= 64 and record.calls == 10_400


def test_a_graph_that_gains_stays_and_is_measured(session, clock):
    x = torch.empty(64)
    graph, captured, original, call = watched(session, clock, 15.0, 40.0, [x])
    for _ in range(2000):
        call(x)
    assert graph.state == "captured" and graph.calls == 2000
    assert captured.calls + original.calls == 2000 and 20 < original.calls < 1100
    assert session.context.held_out_calls == original.calls


def test_sizes_are_judged_apart(session, clock):
    def sized(us):
        return lambda s, x: us + x.numel() * (1e-3 if us > 20 else 2e-3)

    sizes = [(n, torch.empty(n)) for n in (64, 1 << 20)]
    graph, captured, _, call = watched(session, clock, sized(40.0), sized(15.0), list(sizes[1]))
    for number in range(3000):
        call(*sizes[number % 2])
    small, large = (graph.trial.verdicts.is_lost(n) for n, _ in sizes)
    assert small and not large and graph.state == "captured"
    ran = captured.calls
    for _ in range(100):
        call(*sizes[0])
    assert captured.calls == ran, "small ones stay in eager"
    for _ in range(100):
        call(*sizes[1])
    assert captured.calls > ran + 30


def test_sizes_that_come_one_after_the_other_are_both_released(session, clock, monkeypatch):
    monkeypatch.setenv("AUTOFUSE_CAPTURE_HELD_OUT_SHARE", "0.02")
    session.context.settings = load()
    sizes = [(n, torch.empty(n)) for n in (64, 1 << 20)]
    graph, _, _, call = watched(session, clock, 40.0, 15.0, list(sizes[1]))
    for inputs in sizes:
        for _ in range(250):
            call(*inputs)
        assert graph.trial.verdicts.is_lost(inputs[0])


def test_a_released_graph_looks_at_a_new_magnitude(session, clock):
    graph, captured, _, call = watched(session, clock, 40.0, 15.0, [64, torch.empty(64)])
    for _ in range(600):
        call(64, torch.empty(64))
    assert graph.state == "eager"
    before = captured.calls
    for _ in range(200):
        call(1 << 20, torch.empty(1 << 20))
    assert captured.calls > before


@pytest.mark.parametrize("reason", ["slower_than_eager", "no_gain", "slower_untuned"])
def test_what_an_earlier_run_found_out(session, reason):
    x = torch.randn(64)
    torch.compile(lambda x: torch.relu(x) + 1, backend=pipeline.backend)(x)
    (key,) = session.roots.graphs
    session.roots.graphs.clear()
    session.roots.known[key] = RootRecord(key, "f", "eager", reason, judged_elements=200)
    torch._dynamo.reset()
    routers = len(session.context.routers)
    call = torch.compile(lambda x: torch.relu(x) + 1, backend=pipeline.backend)
    assert torch.equal(call(x), torch.relu(x) + 1)
    assert set(session.roots.graphs) == {key}, "the same graph in another process has the same name"
    assert (len(session.context.routers) == routers) == (reason != "slower_untuned"), "not even captured"


def test_a_function_that_loses_is_released(session, monkeypatch):
    """A root of `optimize`: its captured calls are made slow."""
    calls = []

    def function(x):
        calls.append(1)
        return x + 1

    with torch.no_grad():
        call = autofuse.optimize(function)
        root = session.roots.root_of_function(function)
        original = root.trial.compare
        root.trial.compare = lambda shape, held_out, us: original(shape, held_out, 10.0 if held_out else 40.0)
        x = torch.randn(8)
        for _ in range(600):
            assert torch.equal(call(x), x + 1)
        assert (root.state, root.reason) == ("eager", "slower_than_eager")
        before = len(calls)
        monkeypatch.setattr(TracedCalls, "run", lambda *args: pytest.fail("Dynamo was asked"))
        monkeypatch.setattr(CapturedCalls, "call", lambda *args: pytest.fail("captured code was asked for"))
        for _ in range(100):
            assert torch.equal(call(x), x + 1)
        assert len(calls) == before + 100 and root.all_calls == 700


def test_sizes_of_a_function_that_lost_skip_the_handler(session, monkeypatch):
    """With gradients too; calls of another size are seen at once, and what a step took that they end."""

    def function(x):
        return torch.relu(x) * 2

    call = autofuse.optimize(function)
    root = session.roots.root_of_function(function)
    root.trial.compare = lambda shape, held_out, us: None  # what they take here says nothing
    monkeypatch.setattr(TracedCalls, "may_trace", lambda *args: True)
    small, large = (torch.randn(n, requires_grad=True) for n in (16, 4096))
    for _ in range(12):
        call(small), call(large)
    root.trial.verdicts.lose_up_to(16)
    call(small)
    seen, calls = root.calls, root.all_calls
    for _ in range(310):
        assert torch.equal(call(small), function(small))
    assert root.calls == seen and root.all_calls == calls + 310 and root.state == "captured"
    ended = 0
    for _ in range(40):
        seen = root.calls
        call(large)
        opened = root.trial.opened
        is_open = opened is not None and opened.shape is not None
        call(small), call(small)
        assert root.calls == seen + 1 + is_open, "the first one ends the step of the large one"
        ended += is_open
    seen = root.calls
    assert ended and torch.equal(call(x=small), function(small)) and root.calls == seen + 1, "not positional: looked at"


def test_an_input_that_needs_gradients_pays_for_a_trace_of_its_own(session, monkeypatch):
    """Of the same shape: networks that train against each other are called both ways in each step."""

    def function(x):
        return torch.relu(x) * 2

    call = autofuse.optimize(function)
    root = session.roots.root_of_function(function)
    monkeypatch.setattr("autofuse.runtime.roots.tracing.may_trace_again", lambda *args: has_paid)
    has_paid, x, leaf = False, torch.randn(16), torch.randn(16, requires_grad=True)
    for _ in range(3):
        call(x)
    graphs = len(session.context.routers)
    assert graphs and root.state == "captured"
    for _ in range(3):
        assert torch.equal(call(leaf), function(leaf))
    assert len(session.context.routers) == graphs, "it runs in eager until then"
    has_paid = True
    for _ in range(3):
        result = call(leaf)
    result.sum().backward()
    assert torch.equal(result, function(leaf)) and torch.equal(leaf.grad, (leaf > 0) * 2.0)
    assert len(session.context.routers) > graphs


# ---- as eager -------------------------------------------------------------------------------------------------------


class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))


def draws(state, x):
    return F.dropout(x @ state.weight, 0.5) + torch.rand(8)


def writes(state, x):
    state.calls.add_(1)
    x.mul_(2)
    return state.norm(x @ state.weight) + state.calls


def aliases(state, x):
    return x, x.view(-1), x[1:], x @ state.weight


def backward_inside(state, x):
    loss = F.dropout(x @ state.weight, 0.2).square().mean()
    loss.backward()
    return loss.detach()


def update(state, x):
    loss = F.gelu(x @ state.weight).square().mean()
    loss.backward()
    with torch.no_grad():
        state.weight -= 0.1 * state.weight.grad
    state.weight.grad = None
    return loss.item()


def breaks(state, x):
    y = torch.relu(x @ state.weight)
    torch._dynamo.graph_break()
    return torch.sin(y) * 2


def second_gradient(state, x):
    y = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((y @ state.weight).tanh().sum(), y, create_graph=True)
    gradient.square().sum().backward()
    return gradient.detach()


def raises(state, x):
    if x.shape[0] == 3:
        raise KeyError("the user's own")
    return x @ state.weight


FUNCTIONS = [draws, writes, aliases, backward_inside, update, breaks, second_gradient, raises]
DOORS = {
    "compile": lambda function: torch.compile(function, backend=pipeline.backend),
    "optimize": autofuse.optimize,
    "partial": lambda function: functools.partial(autofuse.optimize(function)),
}


def outcome(call, state, x):
    """All that a caller can see."""
    try:
        found = call(state, x)
    except KeyError as error:
        return [str(error)]
    tensors = [t for t in (found if isinstance(found, tuple) else (found,)) if isinstance(t, torch.Tensor)]
    for t in tensors:
        if t.requires_grad and t is not x:
            t.square().sum().backward(retain_graph=True)
    kept = [state.weight, state.weight.grad, *state.buffers(), x]
    shared = [t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in tensors]
    flags = [(t.requires_grad, t.stride(), t._is_view()) for t in tensors]
    values = [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in (*tensors, *kept)]
    return [values, shared, flags, torch.get_rng_state(), found if isinstance(found, float) else None]


def same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(found, torch.Tensor) and found.is_floating_point():
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    elif isinstance(found, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(found, float):
        assert found == pytest.approx(wanted, rel=1e-5)
    elif isinstance(found, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_held_out_captured_and_released_calls_are_as_eager(session, function, door):
    torch.manual_seed(0)
    state = State()
    twin = copy.deepcopy(state)
    call = DOORS[door](function)
    for number in range(60):
        if number == 45:  # from now on released
            for one in session.roots.watched().values():
                one.trial.verdicts.lose_up_to(1 << 20)
        x = torch.randn(3 if number % 10 == 9 else 4, 8)
        if function is raises and number < 3:
            x = torch.randn(4, 8)
        ours, theirs = x.clone(), x.clone()
        state.weight.grad = twin.weight.grad = None
        torch.manual_seed(number)
        found = outcome(call, state, ours)
        torch.manual_seed(number)
        wanted = outcome(function, twin, theirs)
        same(found, wanted)
    # Dynamo itself leaves a function alone once it has seen it raise.
    assert session.context.held_out_calls > (0 if function is raises else 3)
    assert any(one.trial.verdicts.any_lost for one in session.roots.watched().values())


def test_a_checkpoint_gets_the_same_twice(session):
    """What a checkpoint saves in the forward pass it finds again in the backward pass, or torch raises."""
    weight = torch.randn(8, 8, requires_grad=True)
    call = torch.compile(lambda x: torch.tanh(x @ weight).exp() * 2, backend=pipeline.backend)
    x = torch.randn(4, 8, requires_grad=True)
    for number in range(60):
        loss = checkpoint(call, x, use_reentrant=False).sum()
        if number == 30:
            for graph in session.roots.graphs.values():
                graph.trial.verdicts.lose_up_to(1 << 20)
        loss.backward()
    for _ in range(20):
        call(x).sum().backward()
    assert x.grad is not None


def test_what_cannot_be_captured_stays_eager(session, monkeypatch, capsys):
    monkeypatch.setattr(pipeline, "root_backend", lambda *args: 1 / 0)
    call = torch.compile(lambda x: torch.relu(x) + 1, backend=pipeline.backend)
    x = torch.randn(8)
    for _ in range(3):
        assert torch.equal(call(x), torch.relu(x) + 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda h: h.unfold(0, 4, 1),
        lambda h: h.as_strided((2, 1, 1, 2), (1, 7, 7, 1)),
        lambda h: h.as_strided((3, 4), (2, 1), 1),
        lambda h: h.expand(3, 16),
        lambda h: h.view(4, 4).t()[1:],
        lambda h: h.view(4, 4)[:, ::2],
    ],
    ids=["windows", "one_dims", "rows", "expanded", "transposed", "gaps"],
)
def test_a_view_of_an_intermediate_has_eagers_gradient(session, view):
    """Whether its elements lie apart or not: each gradient arrives where eager adds it."""

    def function(x):
        return view(x * 2.0 + 1.0)

    call = torch.compile(function, backend=pipeline.backend)
    for _ in range(3):
        x = torch.randn(16, requires_grad=True)
        results = []
        for made in (call(x), function(x)):
            weights = torch.arange(made.numel()).view(made.shape) + 1.0
            results += torch.autograd.grad((made * weights).sum(), x)
        assert torch.equal(*results)


def test_a_function_keeps_its_name_and_is_transparent_to_traces(session):
    def named(x):
        """Says what it does."""
        return torch.relu(x) * 2

    call = autofuse.optimize(named)
    assert call.__name__ == "named" and call.__doc__ == named.__doc__ and call.__wrapped__ is named
    x = torch.randn(8)
    torch.testing.assert_close(torch.vmap(call)(x), named(x))
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x), (x > 0) * 2.0)
    outer = torch.compile(lambda x: call(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(outer(x), named(x) + 1)


def test_methods_and_objects_are_functions_too(session):
    class Scaler(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(3.0))

        def scaled(self, x):
            return torch.relu(x) * self.factor

    class Adder:
        def __call__(self, x):
            return torch.relu(x) + 1

    class Slots:  # no weak references
        __slots__ = ()

        def __call__(self, x):
            return torch.relu(x) - 1

    x, scaler = torch.randn(8), Scaler()
    for function in (scaler.scaled, Adder(), functools.partial(torch.add, x), torch.relu, Slots()):
        call = autofuse.optimize(function)
        for _ in range(12):
            torch.testing.assert_close(call(x), function(x))
    keys = [key for key in session.roots.groups if "Adder" in key or "scaled" in key]
    assert len(keys) == 2
