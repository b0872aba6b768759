"""Calls of captured roots past Dynamo's wrappers: only whole graphs, and only where Dynamo's guards hold."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from autofuse.capture import dynamo
from autofuse.capture.guarded_call import has_subclasses
from autofuse.observer.device_timer import EventTimer, LateTimes
from autofuse.runtime.graphs.step_records import TIMED_FIRST
from autofuse.runtime.roots.graph_trial import MAX_EXACT
from autofuse.runtime.roots.steps import TimedStep
from autofuse.runtime.roots.tracing import TracedCalls
from autofuse.sessions import current_session, start_session
from autofuse.settings.layers import load
from tests.in_threads import call_in_threads
from tests.observer.test_device_timer import FakeGpu


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Captures every root at its first call and holds nothing out; nothing is tuned."""
    for name, value in {
        "STORE": str(tmp_path / "store.sqlite3"), "TUNE": "off", "QUIET": "1", "CAPTURE_AT_ONCE": "1",
        "CAPTURE_HELD_OUT_SHARE": "0", "CAPTURE_MIN_ROOT_US": "0", "CAPTURE_MIN_INFERENCE_ROOT_US": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    session = start_session(load(), "test")
    yield session
    session.finish(None)
    torch._dynamo.reset_code_caches()


class Flexible(nn.Module):
    """Reads attributes, a flag and a global, all of which Dynamo builds into the graph."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.inner = nn.Linear(8, 8)
        self.factor = 2.0

    def forward(self, x, flag=False):
        y = self.inner(x) * self.weight * self.factor + SHIFT
        return -y if flag else y


SHIFT = 1.0


def expected(model, *args, **kwargs):
    return current_session().roots.tracker.call_original(model, args, kwargs)


def shapes_of(session, model):
    return list(session.roots.root_of(model).trial.shapes.values())


def test_a_settled_call_goes_past_dynamo(session, monkeypatch):
    model, x = Flexible(), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(4):
            model(x)
        monkeypatch.setattr(TracedCalls, "trace", lambda *args: pytest.fail("Dynamo was asked"))
        before = sum(plan.count for router in session.context.routers for plan in router.all_plans())
        assert torch.equal(model(x), expected(model, x))
        assert sum(plan.count for router in session.context.routers for plan in router.all_plans()) == before + 1


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_call_goes_past_the_wrappers_of_torch_compile(session, has_gradients):
    """Each wrapper costs microseconds; what Dynamo compiled is looked at, for a wrapper changes no result."""
    model, x = Flexible(), torch.randn(4, 8)
    with torch.set_grad_enabled(has_gradients):
        for _ in range(4):
            model(x)
    (shape,) = session.roots.root_of(model).trial.shapes.values()
    names = shape.direct[0].run.__globals__
    (compiled,) = (names[name] for name in names if name.startswith("__compiled_fn"))
    assert compiled.__qualname__ == "plain_call.<locals>.<lambda>"


def add_hook(model):
    model.register_forward_hook(lambda module, args, out: out + 1)


CHANGES = {
    "attribute": lambda model: setattr(model, "factor", 3.0),
    "parameter": lambda model: model.weight.data.mul_(2),
    "module": lambda model: setattr(model, "inner", nn.Linear(8, 8, bias=False)),
    "hook": add_hook,
    "dtype": lambda model: model.double(),
    "nothing": lambda model: None,
}


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_calls_that_are_not_timed_see_what_changes(session, change, has_gradients):
    """Short steps of few shapes are timed a few times only; between those each call is checked all the same."""
    model, calls = Flexible(), 0
    root = session.roots.root_of(model)

    def check(number, *args, **kwargs):
        nonlocal calls
        for _ in range(number):
            found, wanted = model(*args, **kwargs), expected(model, *args, **kwargs)
            assert torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad
            calls += 1

    def x(*size):
        return torch.randn(size, dtype=model.weight.dtype)

    with torch.set_grad_enabled(has_gradients):
        check(TIMED_FIRST + 12, x(4, 8))  # those first calls are no samples
        assert root.untimed.is_on and len(session.context.steps) < calls - 4
        CHANGES[change](model)
        check(3, x(4, 8))
        with torch.set_grad_enabled(not has_gradients):
            check(2, x(4, 8))
        check(2, x(4, 8), flag=True)
        check(1, x(3, 4, 8))
        check(3, x(4, 8))
        check(20, x(7, 8))
        with torch.inference_mode():
            check(2, x(7, 8))
    assert root.all_calls == calls


def test_most_calls_on_a_gpu_record_no_event(session, monkeypatch):
    model, x, gpu = Flexible(), torch.randn(4, 8), FakeGpu()
    root = session.roots.root_of(model)

    def check(calls):
        """The number of events that so many calls record on the device."""
        before = gpu.recorded
        for _ in range(calls):
            assert torch.equal(model(x), expected(model, x))
            gpu.catch_up()
        return gpu.recorded - before

    with torch.no_grad():
        check(2)  # captures it
        timer = EventTimer(gpu.calls())  # from now on it counts as being on a GPU
        root._device.found, root._device._timer = torch.device("cuda", 0), timer
        root.trial.on_gpu, root.trial._timer, root.trial.late = True, timer, LateTimes(timer)
        assert check(TIMED_FIRST) >= 6, "calls of a shape that is not known yet are timed"
        assert check(100) < 50
        assert any(check(1) == 0 and root.untimed.left for _ in range(60))
        recorded = []
        with monkeypatch.context() as patched:
            patched.setattr(TracedCalls, "run_recorded", lambda self, m, *rest: recorded.append(m) or expected(m, x))
            patched.setattr("autofuse.gpu.capturing.is_capturing", lambda: True)
            patched.setattr(gpu, "capturing", True)
            assert check(3) == 0 and len(recorded) == 3, "nothing of ours is done while a CUDA graph is recorded"
        check(3)


def test_what_changes_under_a_call_is_seen(session, monkeypatch):
    model, x = Flexible(), torch.randn(4, 8)

    def check(*args, **kwargs):
        for _ in range(4):
            found, wanted = model(*args, **kwargs), expected(model, *args, **kwargs)
            assert torch.equal(found, wanted) and found.requires_grad == wanted.requires_grad

    def checks():
        check(x)
        check(x, flag=True)
        with torch.no_grad():
            check(x)
            check(x, True)
            check(torch.randn(5, 8, dtype=x.dtype))

    checks()
    model.factor = 3.0
    checks()
    monkeypatch.setitem(globals(), "SHIFT", 5.0)
    checks()
    model.inner = nn.Linear(8, 8, bias=False)
    checks()
    model.weight.requires_grad_(False)
    model.inner.requires_grad_(False)
    checks()
    model.weight.data = torch.randn(8)
    with torch.no_grad():
        model.inner.weight.mul_(2)
    checks()
    with torch.inference_mode():
        check(x)
    with torch.autocast("cpu", torch.bfloat16):
        checks()
    checks()
    x = x.double()
    model.double()
    checks()
    torch._dynamo.reset_code_caches()  # as `torch._dynamo.reset` of a script
    checks()
    model.eval()
    checks()
    handle = model.inner.register_forward_hook(lambda module, args, output: output * 2)
    checks()
    handle.remove()
    checks()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        checks()
    finally:
        torch.set_num_threads(threads)


def test_gradients_pass_through_a_direct_call(session):
    model, x = Flexible(), torch.randn(4, 8, requires_grad=True)
    twin = copy.deepcopy(model)
    for factor in (1.0, 1.0, 1.0, 2.0, 3.0):
        model.zero_grad()
        (model(x) * factor).sum().backward()
        (expected(twin, x) * factor).sum().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        twin.zero_grad()
    (shape,) = shapes_of(session, model)
    assert shape.direct


def test_two_modules_of_one_structure_keep_apart(session):
    first, second = Flexible(), Flexible()
    second.factor = 7.0
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(5):
            for model in (first, second):
                assert torch.equal(model(x), expected(model, x))
    assert session.roots.root_of(first) is session.roots.root_of(second)


class Breaks(nn.Module):
    """Two graphs with Python between them."""

    def forward(self, x):
        y = x * 2
        torch._dynamo.graph_break()
        return torch.relu(y)


class Aliases(nn.Module):
    """Returns its input, a view of it, and something new."""

    def forward(self, x):
        return x, x.view(-1), x + 1


class Writes(nn.Module):
    """Counts its calls in a buffer, writes its argument, and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x.mul_(2)
        return F.relu(self.norm(x)) + self.calls


def test_a_graph_break_needs_dynamo(session):
    model, x = Breaks(), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(x), torch.relu(x * 2))
    (shape,) = shapes_of(session, model)
    assert not shape.direct


def test_aliases_of_inputs_stay_aliases(session):
    model, x = Aliases(), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(4):
            same, view, fresh = model(x)
            assert same is x and view.data_ptr() == x.data_ptr() and view._base is x
            assert torch.equal(fresh, x + 1)


@pytest.mark.parametrize("gradients", [True, False])
def test_what_a_module_writes_is_written_once_a_call(session, gradients):
    model = Writes()
    twin = copy.deepcopy(model)
    with torch.set_grad_enabled(gradients):
        for _ in range(5):
            x = torch.randn(4, 8)
            theirs = x.clone()
            assert torch.equal(model(x), expected(twin, theirs)) and torch.equal(x, theirs)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert model.calls == 5


def test_results_in_inference_mode_are_inference_tensors(session):
    model, x = Flexible(), torch.randn(4, 8)
    for _ in range(4):
        with torch.no_grad():
            assert not model(x).is_inference()
        with torch.inference_mode():
            assert model(x).is_inference() == expected(model, x).is_inference()


def test_shapes_without_end_run_without_dynamo_once_a_graph_has_symbols(session, monkeypatch):
    model = Flexible()
    with torch.no_grad():
        for rows in (4, 5, 6, 7):
            model(torch.randn(rows, 8))
        monkeypatch.setattr(TracedCalls, "trace", lambda *args: pytest.fail("Dynamo was asked"))
        for rows in range(8, 80 + TIMED_FIRST):
            x = torch.randn(rows, 8)
            assert torch.equal(model(x), expected(model, x))
        model(torch.randn(9, 8))
    written = {fields[1] for fields in session.context.steps}
    assert any("-1" in text for text in written), "rare sizes are compared with others of about their size"
    assert len(written) <= MAX_EXACT + 1
    captured = [step for fields in session.context.steps[-60:] if not (step := TimedStep(*fields)).held_out]
    samples = [step for step in captured if step.step_us > 0.0]
    assert len(samples) > 40 and len(captured) - len(samples) <= 3, "a new shape is no disturbance; a few are timed"


def test_threads_call_one_root_with_sizes_without_end(session):
    model, wrong = Flexible(), []

    @torch.no_grad()
    def call(first, number=300):
        for rows in range(first, first + number):
            x = torch.randn(rows, 8)
            if not torch.equal(model(x), expected(model, x)):
                wrong.append(rows)

    call(4, 4)
    assert not call_in_threads(call, (8, 108, 208, 308)) and not wrong
    assert session.roots.root_of(model).state == "captured", session.roots.root_of(model).detail


def test_a_checkpointed_root_is_left_alone(session):
    model, x = Flexible(), torch.randn(4, 8, requires_grad=True)
    for _ in range(4):
        model(x).sum().backward()
    model.zero_grad()
    for _ in range(3):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_forward_mode_gradients_are_eagers(session):
    model, x = Flexible(), torch.randn(4, 8)
    for _ in range(4):
        model(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    wanted = (torch.ones_like(x) @ model.inner.weight.t()) * model.weight * model.factor
    torch.testing.assert_close(found, wanted)


def test_an_error_of_the_users_own_does_not_cost_the_capture(session, capsys):
    model = Flexible()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, 9))
    x = torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected(model, x))
    assert session.roots.root_of(model).state == "captured" and "could not be captured" not in capsys.readouterr().err


def test_torchs_own_fast_path_stays(session):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        for _ in range(4):
            found = model(x, src_key_padding_mask=padding)
            assert torch.equal(found, expected(model, x, src_key_padding_mask=padding))
            assert not found[1, 3:].any(), "padding is zeros there"


def test_a_sampled_step_may_end_inside_of_inference_mode(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))\n"
        "for length in (5, 17, 17, 1, 33, 17, 64):\n"
        "    x = torch.ones(2, length, 64)\n"
        "    model.train()\n"
        "    model(x.clone().requires_grad_()).sum().backward()\n"
        "    model.eval()\n"
        "    with torch.no_grad():\n"
        "        model(x)\n"
        "    with torch.inference_mode():\n"
        "        model(x)\n"
        "    torch.rand(3)\n"
        "print('end')\n"
    )
    command = [sys.executable, "-m", "autofuse", "run", "--store", str(tmp_path / "store"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "end\n" and "Error" not in done.stderr


class Wrapped(torch.Tensor):
    """A subclass around one tensor, which AOTAutograd unwraps: as many tensors as graph inputs."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [a.inner if isinstance(a, Wrapped) else a for a in args]
        return Wrapped(func(*plain, **(kwargs or {})))


class Doubles(nn.Module):
    def forward(self, x):
        return torch.relu(x * 2.0)


def test_tensors_of_a_subclass_stay_wrapped(session):
    is_traced = torch.__version__ >= (2, 12)  # AOTAutograd of torch 2.11 prints its metadata, fake tensors too: raises
    model, inner = Doubles(), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(4):
            found = model(Wrapped(inner))
            assert type(found) is Wrapped and torch.equal(found.inner, torch.relu(inner * 2.0))
    assert session.roots.root_of(model).state == ("captured" if is_traced else "eager")


def test_graphs_of_subclasses_keep_the_wrapper_that_takes_them_apart():
    graph, plain = torch.fx.symbolic_trace(Doubles()), torch.randn(4, 8)
    assert has_subclasses(graph, [plain, Wrapped(plain)]) and not has_subclasses(graph, [plain, 3])
    (result,) = next(iter(graph.graph.find_nodes(op="output"))).all_input_nodes
    result.meta["example_value"] = plain
    assert not has_subclasses(graph, [plain])
    result.meta["example_value"] = Wrapped(plain)
    assert has_subclasses(graph, [plain])


def test_a_call_while_another_thread_traces_is_eagers_and_the_next_one_is_traced(session, monkeypatch):
    """torch.fx marks its traces for all threads; here from after our own look until Dynamo's function has refused."""
    model, x, begun = Flexible(), torch.randn(4, 8), []
    begin = dynamo._unless_traced_elsewhere

    def begin_in_a_trace(function, args, kwargs):
        begun.append(args)
        with monkeypatch.context() as patch:
            patch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", len(begun) < 8)
            return begin(function, args, kwargs)

    monkeypatch.setattr(dynamo, "_unless_traced_elsewhere", begin_in_a_trace)
    for number in range(1, 12):
        assert torch.equal(model(x), expected(model, x))
        assert session.roots.root_of(model).state == "captured"
        (shape,) = shapes_of(session, model)
        assert bool(shape.direct) is (number >= 8)
    assert len(begun) == 8
