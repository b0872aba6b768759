"""What the dispatch mode records, and that results and the modes of others are untouched."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from autofuse.observer.mode import ObserverMode, attach, detach
from autofuse.observer.profile import StepProfile, aggregate
from tests.observer.harness import MLP, Blocks


@contextmanager
def recorded(max_events: int = 40_000) -> Iterator[ObserverMode]:
    mode = ObserverMode(max_events)
    assert attach(mode)
    mode.recording = True
    try:
        yield mode
    finally:
        mode.recording = False
        assert detach(mode)
        assert torch._C._len_torch_dispatch_stack() == 0
    assert mode.fault is None, mode.fault


def profile_of(mode: ObserverMode) -> StepProfile:
    profile = aggregate(mode.events, lambda identity, name: name)
    assert profile.not_understood == 0
    return profile


def names(mode: ObserverMode) -> list[str]:
    return [str(event[0]) for event in mode.events]


def test_records_op_shapes_dtypes_strides_device_time() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3, dtype=torch.float64).t()
    with recorded() as mode:
        torch.mm(a, a.t())
        b + 1
    (_, mm), (_, add) = [(e[0], e) for e in mode.events if str(e[0]) in ("aten.mm.default", "aten.add.Tensor")]
    _op, start, stop, sequence, inputs, description, output = mm
    assert description == (((4, 3), torch.float32, (3, 1)), ((3, 4), torch.float32, (1, 3)), (4, 4), a.device)
    assert 0 < stop - start < 1e9
    assert sequence == -1
    assert len(inputs) == 2
    assert isinstance(output, int)
    assert add[5][0] == ((3, 4), torch.float64, (1, 3))


def test_producers_are_edges() -> None:
    a = torch.randn(4, 4)
    with recorded() as mode:
        c = torch.mm(a, a).relu()
        torch.add(c, a).mul_(2)
    edges = {str(key[0]): [str(p) for p in totals.producers] for key, totals in profile_of(mode).ops.items()}
    assert edges["aten.mm.default"] == ["None", "None"]
    assert edges["aten.relu.default"] == ["aten.mm.default"]
    assert edges["aten.add.Tensor"] == ["aten.relu.default", "None"]
    assert edges["aten.mul_.Tensor"] == ["aten.add.Tensor"]


def test_backward_is_recorded_with_the_numbers_of_its_nodes() -> None:
    x = torch.randn(4, requires_grad=True)
    with recorded() as mode:
        x.sin().exp().sum().backward()
    backward = [event for event in mode.events if event[3] != -1]
    assert mode.saw_backward
    assert {"aten.cos.default", "aten.mul.Tensor"} <= {str(e[0]) for e in backward}
    assert any(event[3] >= 0 for event in backward)


def test_backward_on_another_thread_is_recorded() -> None:
    """Autograd's threads take over the modes of the thread that called backward; a thread of the user does not."""
    x = torch.randn(4, requires_grad=True)
    with recorded() as mode:
        out = x.sin().sum()
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()
        before = len(mode.events)
        torch.autograd.grad(x.cos().sum(), x)
    assert x.grad is not None
    assert len(mode.events) > before


def test_double_backward() -> None:
    def run() -> torch.Tensor:
        x = torch.arange(4.0, requires_grad=True)
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = run()
    with recorded() as mode:
        assert torch.equal(run(), expected)
    assert mode.saw_backward


def test_custom_autograd_functions() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 2

    x = torch.ones(3, requires_grad=True)
    with recorded() as mode:
        Twice.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert any(str(event[0]) == "aten.mul.Tensor" and event[3] >= 0 for event in mode.events)


def test_no_tensor_is_kept_alive() -> None:
    with recorded() as mode:
        x = torch.randn(100, requires_grad=True)
        y = (x * 2).exp()
        references = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        assert mode.events


def test_memory_of_intermediates_is_freed_at_once() -> None:
    freed: list[int] = []
    with recorded():
        y = torch.ones(10)
        weakref.finalize(y, freed.append, 1)
        y = y + 1
        assert freed == [1]


def test_exceptions_of_the_user_pass() -> None:
    with recorded() as mode:
        with pytest.raises(RuntimeError, match="shape"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.ones(2) + 1
    assert "aten.add.Tensor" in names(mode)


class Tagged(torch.Tensor):
    """A subclass with a dispatch of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Tagged:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [a.inner if isinstance(a, Tagged) else a for a in args]
        return cls(func(*plain, **(kwargs or {})))


ODD: dict[str, Callable[[], Any]] = {
    "sparse coo": lambda: (torch.eye(3).to_sparse() @ torch.ones(3, 2), torch.eye(3).to_sparse() * 2),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr() @ torch.ones(3, 2),
    "subclass": lambda: Tagged(torch.ones(3)) + Tagged(torch.ones(3)),
    "wrapper without storage": lambda: Tagged(torch.ones(3)).mul(2),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged) * 2,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]) * 2,
    "mkldnn": lambda: torch.ones(4, 4).to_mkldnn().to_dense() if torch.backends.mkldnn.is_available() else None,
    "meta": lambda: torch.empty(3, 3, device="meta") @ torch.empty(3, 3, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize(),
    "complex": lambda: torch.fft.fft(torch.ones(8)),
    "zero size": lambda: torch.empty(0, 3).sum(0),
    "scalar": lambda: torch.tensor(3.0).item(),
    "lists": lambda: torch.cat([torch.ones(2)] * 20) + torch.stack([torch.ones(40)]).sum(0),
    "foreach": lambda: torch._foreach_add([torch.ones(2)] * 30, 1.0),
    "out": lambda: torch.add(torch.ones(2), 1, out=torch.empty(2)),
    "inference": lambda: inference(),
    "generator": lambda: torch.rand(3, generator=torch.Generator().manual_seed(1)),
    "views": lambda: torch.arange(12).view(3, 4).t().unfold(0, 2, 1).as_strided((2, 2), (1, 1)),
    "index_put": lambda: torch.ones(4).index_put((torch.tensor([0, 1]),), torch.tensor([5.0, 6.0])),
    "unbind": lambda: [t.sum() for t in torch.ones(3, 2).unbind()],
    "sort": lambda: torch.sort(torch.tensor([3.0, 1.0])),
    "vmap": lambda: torch.func.vmap(lambda a: a.sin().sum())(torch.ones(3, 4)),
    "jvp": lambda: torch.func.jvp(torch.sin, (torch.ones(3),), (torch.ones(3),)),
    "higher order": lambda: torch.cond(torch.tensor(True), lambda x: x.sin(), lambda x: x.cos(), (torch.ones(3),)),
    "repr": lambda: repr(torch.ones(3, requires_grad=True)),
    "deepcopy": lambda: __import__("copy").deepcopy(MLP()),
    "numpy": lambda: torch.from_numpy(torch.ones(3).numpy()) + 1,
}


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return MLP()(torch.ones(2, 8)).sum()


def plain(value: Any) -> Any:
    if isinstance(value, Tagged):
        return value.inner
    if isinstance(value, torch.Tensor):
        return value.to_dense() if value.layout in (torch.sparse_coo, torch.sparse_csr) else value
    return value


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_odd_tensors_and_ops_give_what_they_gave(name: str) -> None:
    torch.manual_seed(0)
    expected = ODD[name]()
    torch.manual_seed(0)
    with recorded() as mode:
        found = ODD[name]()
    profile_of(mode)
    if isinstance(expected, (torch.Tensor, tuple, list)) and name not in ("jagged", "nested", "meta", "quantised"):
        pairs = zip(expected, found, strict=True) if not isinstance(expected, torch.Tensor) else [(expected, found)]
        for a, b in pairs:
            assert torch.equal(plain(a), plain(b))
    else:
        assert type(found) is type(expected)


def training_step(seed: int = 0, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8), MLP())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(5, 3, 8, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [loss.detach(), torch.get_rng_state(), *[p.detach() for p in model.parameters()]]


def test_training_is_bit_identical() -> None:
    expected = training_step()
    with recorded():
        found = training_step()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("make", [lambda: nn.LSTM(8, 8, 2, dropout=0.2), lambda: nn.GRU(8, 8), lambda: nn.RNN(8, 8)])
def test_recurrent_modules_are_bit_identical(make: Callable[[], nn.Module]) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model = make()
        model(torch.randn(5, 2, 8))[0].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = run()
    with recorded():
        assert torch.equal(run(), expected)


def test_gradient_accumulation_keeps_the_gradient_tensors() -> None:
    model = MLP()
    model(torch.ones(2, 8)).sum().backward()
    before = [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()]
    with recorded():
        model(torch.ones(2, 8)).sum().backward()
    assert [(id(p.grad), p.grad.data_ptr()) for p in model.parameters()] == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model, x = MLP(), torch.ones(2, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        return x.grad

    expected = run()
    with recorded():
        assert torch.equal(run(), expected)


def test_selective_checkpointing() -> None:
    """Its own dispatch mode comes and goes in forward and in backward."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        keep = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model, x = MLP().eval(), torch.ones(2, 8, requires_grad=True)
        context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        checkpoint(model, x, use_reentrant=False, context_fn=context).sum().backward()
        return x.grad

    expected = run()
    with recorded():
        assert torch.equal(run(), expected)


def test_autocast() -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)
        model, x = MLP().eval(), torch.ones(2, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        out.sum().backward()
        return x.grad

    expected = run()
    with recorded() as mode:
        assert torch.equal(run(), expected)
    assert any(spec and spec[1] == torch.bfloat16 for event in mode.events for spec in event[5][:-2])


def test_tensor_hooks_and_saved_tensor_hooks() -> None:
    def run() -> list[torch.Tensor]:
        x = torch.ones(4, requires_grad=True)
        seen: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            y = x.exp()
        y.register_hook(lambda g: g * 3)
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        y.sum().backward()
        return [x.grad, *seen]

    expected = run()
    with recorded():
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_come_and_go() -> None:
    ours, theirs = ObserverMode(), Count()
    with theirs:
        assert attach(ours)  # below theirs, although it was there first
        ours.recording = True
        torch.ones(2)
        assert (theirs.ops, len(ours.events)) == (1, 1)
    assert ours in _get_current_dispatch_mode_stack()  # their exit popped their own mode
    with theirs:
        torch.ones(2)
        assert detach(ours)
        torch.ones(2)
    assert theirs.ops == 3
    assert len(ours.events) == 2
    assert torch._C._len_torch_dispatch_stack() == 0


def test_function_modes_and_default_device() -> None:
    with recorded() as mode:
        with CountFunctions() as functions:
            torch.ones(2) + 1
        torch.set_default_device("cpu")
        try:
            torch.ones(2)
        finally:
            torch.set_default_device(None)
    assert functions.calls >= 2
    assert len(mode.events) == 3


def test_modes_that_torch_pops_and_pushes_back() -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    with recorded() as mode:
        with _disable_current_modes():
            torch.ones(2)
        torch.ones(2)
    assert len(mode.events) == 1


def test_fake_tensors_pass_unrecorded() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with recorded() as mode:
        fake = FakeTensorMode(shape_env=ShapeEnv())
        x = fake.from_tensor(torch.ones(4, 3))
        before = len(mode.events)
        with fake:
            torch.mm(x, x.t())
        assert len(mode.events) == before
        assert not attach_under(fake)


def attach_under(fake: Any) -> bool:
    with fake:
        other = ObserverMode()
        if attach(other):
            detach(other)
            return True
        return False


def test_profiler_of_the_user() -> None:
    with recorded(), torch.profiler.profile() as profile:
        MLP()(torch.ones(2, 8)).sum().backward()
    assert any(event.key == "aten::addmm" for event in profile.key_averages())


def test_event_limit_ends_the_recording() -> None:
    with recorded(max_events=5) as mode:
        for _ in range(20):
            torch.ones(2)
        assert len(mode.events) <= 6
        assert not mode.recording
        assert mode.passed > 10


def test_a_fault_of_ours_switches_off() -> None:
    class Broken(list[Any]):
        def append(self, event: Any) -> None:
            raise LookupError("ours")

    mode = ObserverMode()
    mode.events = Broken()
    attach(mode)
    mode.recording = True
    try:
        assert torch.equal(torch.cat([torch.ones(1), torch.ones(1)]), torch.ones(2))
    finally:
        detach(mode)
    assert mode.fault is not None
    assert "LookupError" in mode.fault
    assert not mode.recording


def test_modules_are_recorded_with_blocks() -> None:
    with recorded() as mode:
        Blocks()(torch.ones(2, 8))["out"].sum().backward()
    assert profile_of(mode).op_calls > 20
