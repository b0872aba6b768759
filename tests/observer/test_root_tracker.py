"""Which module calls count as roots, and that nobody else notices."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autofuse.observer import module_calls
from autofuse.observer.root_tracker import RootTracker, classify, root_key
from tests.observer.harness import MLP, Blocks, watching

X = torch.randn(3, 8)


def test_outermost_modules_only() -> None:
    blocks, loss = Blocks(), nn.MSELoss()
    with watching() as watch:
        out = blocks(X, scale=2.0)["out"]
        loss(out, X)
    assert watch.calls == ["Blocks", "MSELoss"]


def test_modules_called_from_functions_and_odd_places() -> None:
    parts = {"a": [MLP(), MLP()], "b": (nn.ReLU(),)}

    def forward(x: torch.Tensor) -> torch.Tensor:
        for part in parts["a"]:
            x = part(x)
        return parts["b"][0](x)

    with watching() as watch:
        forward(X)
    assert watch.calls == ["MLP", "MLP", "ReLU"]


def test_torch_containers_are_roots() -> None:
    with watching() as watch:
        nn.Sequential(nn.Linear(8, 8), nn.ReLU())(X)
    assert watch.calls == ["Sequential"]


def test_uninstalled_leaves_nothing() -> None:
    tracker = RootTracker(lambda module, args, kwargs: pytest.fail("called"))
    tracker.install()
    tracker.install()
    tracker.uninstall()
    tracker.uninstall()
    assert nn.Module.__dict__["_compiled_call_impl"] is None
    MLP()(X)


def test_a_second_tracker_takes_over() -> None:
    seen: list[str] = []
    first = RootTracker(lambda module, args, kwargs: seen.append("first"))
    second = RootTracker(lambda module, args, kwargs: seen.append("second"))
    first.install()
    second.install()
    MLP()(X)
    first.uninstall()
    MLP()(X)
    second.uninstall()
    assert seen == ["second", "second"]
    assert not module_calls.is_installed()


def test_the_attribute_is_invisible() -> None:
    model = MLP()
    with watching():
        assert model._compiled_call_impl is None
        assert nn.Module._compiled_call_impl is None
        assert dict(inspect.getmembers(model))["_compiled_call_impl"] is None
        assert "_compiled_call_impl" not in vars(model)


def test_pickle_deepcopy_state_dict() -> None:
    model = MLP().eval()
    before = model(X)
    with watching():
        model(X)
        assert torch.equal(pickle.loads(pickle.dumps(model))(X), before)
        assert torch.equal(copy.deepcopy(model)(X), before)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)(X), before)
        assert list(model.state_dict()) == list(MLP().state_dict())


def test_exceptions_pass_and_leave_no_trace() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    with watching() as watch:
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                Fails()(X)
        with pytest.raises(RuntimeError):
            MLP()(torch.randn(3, 5))
        MLP()(X)
    assert watch.calls == ["Fails", "Fails", "MLP", "MLP"]


def test_hooks_run_once() -> None:
    model, seen = MLP(), []
    model.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_forward_hook(lambda *_: seen.append("post"))
    model.first.register_forward_hook(lambda *_: seen.append("inner"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    with watching():
        model(X.clone().requires_grad_()).sum().backward()
    assert seen == ["pre", "inner", "post", "backward"]


def test_own_call_methods_are_left_alone() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    with watching() as watch:
        Custom()(X)
    assert watch.calls == ["MLP"]


def test_wrappers_pass_the_call_on() -> None:
    class Counting(nn.DataParallel):
        pass

    with watching() as watch:
        nn.DataParallel(MLP())(X)
        Counting(MLP())(X)
    assert watch.calls == ["MLP", "MLP"]


def test_ddp_wraps_a_root() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(MLP())
        with watching() as watch:
            for _ in range(3):
                model(X).sum().backward()
        assert watch.calls == ["MLP"] * 3
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_made_modules_run_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [torch.fx.symbolic_trace(MLP()), torch.jit.script(MLP()), torch.jit.trace(MLP().eval(), X)]
    with watching() as watch:
        for module in made:
            module(X)
    assert watch.calls == []


def test_lazy_modules_become_roots_once_they_are_made() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    lazy = nn.LazyLinear(4)
    with watching() as watch:
        model(X)
        lazy(X)
        lazy(X)
    assert watch.calls == ["Sequential", "Linear"]


def test_tracing_is_not_intercepted() -> None:
    model = MLP().eval()
    with watching() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model, X, check_trace=False)  # its check runs the module as it is
        torch.jit.script(model)
        torch.fx.symbolic_trace(model)
        exported = torch.export.export(model, (X,), strict=False)
        torch.export.export(model, (X,), strict=True)
        from torch.fx.experimental.proxy_tensor import make_fx

        make_fx(model)(X)
        make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(X)
    assert watch.calls == []
    assert torch.allclose(exported.module()(X), model(X))


def test_fake_mode_is_not_intercepted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with watching() as watch, FakeTensorMode():
        assert nn.Linear(8, 4)(torch.empty(3, 8)).shape == (3, 4)
    assert watch.calls == []


def test_functorch_transforms_are_not_intercepted() -> None:
    model = MLP().eval()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    with watching() as watch:
        torch.func.grad(loss)(parameters, X)
        torch.func.vmap(lambda x: model(x))(X)
        torch.func.jvp(lambda x: model(x), (X,), (X,))
        assert watch.calls == []
        loss(parameters, X)
    assert watch.calls == ["MLP"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_backward_is_no_root(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model = Checkpointed()
    with watching() as watch:
        for _ in range(2):
            model(X.clone().requires_grad_()).sum().backward()
    assert watch.calls == ["Checkpointed"] * 2


def test_threads_have_roots_of_their_own() -> None:
    inside, finished = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert finished.wait(10)
            return x

    with watching() as watch:
        thread = threading.Thread(target=Slow(), args=(X,))
        thread.start()
        assert inside.wait(10)
        MLP()(X)
        finished.set()
        thread.join()
    assert watch.calls == ["Slow", "MLP"]


def test_other_dispatch_modes_see_the_plain_module() -> None:
    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Count.ops += 1
            return func(*args, **(kwargs or {}))

    with watching() as watch:
        with Count():
            MLP()(X)
        assert watch.calls == []
        assert Count.ops > 5


def test_generators_are_harmless() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x):  # type: ignore[no-untyped-def]
            for _ in range(2):
                yield self.inner(x)

    with watching() as watch:
        assert len(list(Lazy()(X))) == 2
    assert watch.calls[0] == "Lazy"


def test_released_modules_skip_the_handler() -> None:
    model = Blocks()
    with watching() as watch:
        model(X)
        watch.tracker.release(model)
        model(X)
        Blocks()(X)
    assert watch.calls == ["Blocks", "Blocks"]


def test_released_modules_are_counted_and_nothing_of_it_stays() -> None:
    model = Blocks().eval()
    with watching() as watch:
        quiet = watch.tracker.release(model)
        kinds = [model(X)["out"], copy.deepcopy(model)(X)["out"], pickle.loads(pickle.dumps(model))(X)["out"]]
        assert quiet.calls == 1 and watch.calls == ["Blocks", "Blocks"], "copies are modules of their own"
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        kinds += [compiled(X)["out"] for _ in range(3)]
        assert quiet.calls == 1
        model.compile(backend="eager", fullgraph=True)
        kinds.append(model(X)["out"])
        other = Blocks()
        watch.tracker.release(other)
    assert all(torch.equal(kind, model._call_impl(X)["out"]) for kind in kinds)
    assert "_compiled_call_impl" in model.__dict__, "the user's own stays"
    assert "_compiled_call_impl" not in other.__dict__


class Copied(nn.Linear):
    """Hands all of its ``__dict__`` to copies and pickles."""

    def __getstate__(self) -> dict[str, object]:
        return dict(self.__dict__)


@pytest.mark.parametrize("released", [False, True])
def test_copies_of_an_attached_module_run_themselves(released: bool) -> None:
    model = Copied(8, 8)
    with watching() as watch:
        model(X)
        if released:
            watch.tracker.release(model)
        assert "_compiled_call_impl" in model.__dict__
        shallow = Copied.__new__(Copied)
        shallow.__dict__ = {**model.__dict__, "_parameters": dict(Copied(8, 8)._parameters)}
        copies = [shallow, copy.copy(shallow), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        for twin in copies:
            assert twin(X).abs().sum() > 0
        assert not model(X).any()


def test_an_attached_module_is_scripted_traced_and_exported() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with watching():
        model(X)
        model[0](X)
        expected = model._call_impl(X)
        assert torch.equal(torch.jit.script(model)(X), expected)
        assert torch.equal(torch.jit.trace(model, X)(X), expected)
        assert torch.equal(torch.fx.symbolic_trace(model)(X), expected)
        assert torch.equal(torch.export.export(model, (X,)).module()(X), expected)
        state = dict(model.named_parameters())
        assert torch.equal(torch.func.functional_call(model, state, (X,)), expected)
        assert torch.equal(torch.vmap(model)(X), expected)


def test_a_released_module_does_not_live_longer() -> None:
    model = Blocks()
    with watching() as watch:
        watch.tracker.release(model)
        model(X)
        alive = weakref.ref(model)
        gc.disable()
        try:
            del model
            assert alive() is None, "no cycle holds it"
        finally:
            gc.enable()


def test_a_released_module_inside_another_root_is_watched_there() -> None:
    seen = []

    def watcher(module: nn.Module) -> None:
        seen.append(type(module).__name__)

    inner = MLP()
    outer = nn.Sequential(inner, nn.ReLU())
    with watching() as watch:
        quiet = watch.tracker.release(inner)
        module_calls.thread.answer = watcher
        try:
            outer(X)
        finally:
            module_calls.thread.answer = module_calls.OUTSIDE
    assert "MLP" in seen and len(seen) > 3, "and what is inside it"
    assert quiet.calls == 0


def test_forked_children_are_not_watched() -> None:
    import os

    model = MLP()
    with watching() as watch:
        model(X)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            plain = nn.Module.__dict__["_compiled_call_impl"] is None and torch._C._len_torch_dispatch_stack() == 0
            os.write(write, b"1" if plain else b"0")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"1"
        model(X)
    assert watch.calls == ["MLP", "MLP"]


def test_root_key_names_the_structure() -> None:
    first, second = MLP(), MLP()
    assert root_key(first) == root_key(second)
    assert root_key(first) != root_key(MLP(16))
    assert root_key(nn.Sequential(nn.ReLU())) != root_key(nn.Sequential(nn.Tanh()))
    with torch.no_grad():
        first.first.weight.zero_()
    assert root_key(first) == root_key(second)
    assert root_key(first).startswith("tests.observer.harness.MLP:")


def test_root_key_is_the_same_in_another_process() -> None:
    text = "from tests.observer.harness import MLP; from autofuse.observer.root_tracker import root_key; "
    text += "print(root_key(MLP()))"
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == root_key(MLP())


def test_root_key_of_modules_that_compare_equal() -> None:
    class Odd(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    assert root_key(Odd(2)) != root_key(Odd(3))


def test_classify() -> None:
    assert classify(MLP) == "root"
    assert classify(nn.Sequential) == "root"
    assert classify(nn.DataParallel) == "transparent"
    assert classify(torch.fx.GraphModule) == "opaque"
