"""The user's own torch.compile stays compiled, with the same graphs, whatever we do around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from autofuse.observer.mode import ObserverMode, attach, detach
from tests.observer.harness import MLP, Blocks, watching

X = torch.randn(3, 8)


class Counted:
    """A backend that counts graphs and calls of graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def hooked() -> nn.Module:
    model = MLP()
    model.register_forward_hook(lambda module, args, out: out * 2)
    model.first.register_forward_pre_hook(lambda module, args: None)
    return model


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(), hooked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x).relu()


def compiled_module(model: nn.Module, backend: Counted) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


def compiled_in_place(model: nn.Module, backend: Counted) -> Callable[..., Any]:
    model.compile(backend=backend)
    return model


def compiled_function(model: nn.Module, backend: Counted) -> Callable[..., Any]:
    @torch.compile(backend=backend)
    def call(x: torch.Tensor) -> Any:
        return model(x + 1)

    return call


WAYS = [compiled_module, compiled_in_place, compiled_function]
MODELS = [MLP, Blocks, Breaks, hooked, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), MLP())]


def run_all(
    strategy: Callable[..., Any], make: Callable[[], nn.Module], call_before: bool
) -> tuple[int, int, int, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, backend = make(), Counted()
    if call_before:
        model(X)
    call = strategy(model, backend)
    for _ in range(4):
        out = call(X)
    return backend.graphs, backend.runs, sum(counters["graph_break"].values()), out


@pytest.mark.parametrize("call_before", [False, True])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("strategy", WAYS)
def test_same_graphs_and_runs(strategy: Callable[..., Any], make: Callable[[], nn.Module], call_before: bool) -> None:
    expected = run_all(strategy, make, call_before)
    with watching() as watch:
        found = run_all(strategy, make, call_before)
        model_calls = len(watch.calls)
    assert found[:3] == expected[:3]
    assert expected[0] > 0
    assert model_calls == (1 if call_before else 0)
    torch.testing.assert_close(found[3], expected[3], rtol=0, atol=0)


@pytest.mark.parametrize("make", MODELS)
def test_installing_and_sampling_triggers_no_recompile(make: Callable[[], nn.Module]) -> None:
    """Compiled before we come, used while we watch, and after we left."""
    model, backend, other = make(), Counted(), MLP()
    call = compiled_module(model, backend)
    call(X)
    call(X)
    graphs = backend.graphs
    with watching() as watch:
        for _ in range(3):
            other(X).sum().backward()  # a root: a sampled step is in progress from here on
            assert watch.observer.is_sampling
            call(X)
    call(X)
    # A module with hooks makes Dynamo inline the attribute that we replace: one more trace, once, is the price.
    assert backend.graphs <= graphs * (
        2 if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()) else 1
    )
    assert backend.runs >= 6


@pytest.mark.parametrize("make", MODELS)
def test_compiling_under_the_mode(make: Callable[[], nn.Module]) -> None:
    expected = run_all(compiled_module, make, False)
    mode = ObserverMode()
    assert attach(mode)
    mode.recording = True
    try:
        found = run_all(compiled_module, make, False)
    finally:
        detach(mode)
    assert found[:3] == expected[:3]
    assert mode.fault is None


def test_compiled_submodule_in_an_eager_root() -> None:
    class Outer(nn.Module):
        def __init__(self, backend: Counted) -> None:
            super().__init__()
            self.plain = MLP()
            self.fast = torch.compile(MLP(), backend=backend)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fast(self.plain(x))

    backend = Counted()
    model = Outer(backend)
    with watching() as watch:
        for _ in range(3):
            model(X).sum().backward()
    assert (backend.graphs, backend.runs) == (1, 3)
    assert watch.calls == ["Outer"] * 3


def test_no_frame_of_ours_is_compiled() -> None:
    """Graph breaks run modules eagerly inside the compiled region: our functions run there too."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        return graph.forward

    class Inner(nn.Module):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = nn.Sequential(Inner(), MLP(), Inner())
    from torch._dynamo.convert_frame import input_codes

    call = torch.compile(model, backend=backend)
    with watching():
        MLP()(X)
        for _ in range(2):
            call(X)
        seen = [code.co_filename for code in (reference() for reference in input_codes.seen) if code is not None]
    assert seen
    assert not any("autofuse" in name for name in seen)


def test_aot_backend_under_the_mode() -> None:
    """Fake, functional and proxy modes come and go below ours while AOTAutograd traces."""
    model = MLP()
    call = torch.compile(model, backend="aot_eager")
    eager = model.eval()(X)
    with watching() as watch:
        MLP()(X)
        out = call(X)
        out.sum().backward()
        assert watch.observer.is_sampling
    torch.testing.assert_close(out, eager)
    assert counters["frames"]["ok"] >= 1
