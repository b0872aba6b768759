"""The functions that stand in for torch's: when the kernel runs, once for each group, and when torch's own does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autofuse.codegen.c.build import compile_source, find_toolchain, flags_for
from autofuse.codegen.c.load import load_kernel
from autofuse.optimizer.printer import print_step
from autofuse.optimizer.router import OptimizerRouter


class Calls:
    """A session in which the kernel, or a variant of torch's own, has won every race."""

    def __init__(self, variant: str) -> None:
        self.kernels = 0
        self.said: list[str] = []
        self.events: list[str] = []
        self.backstage = SimpleNamespace(post_event=lambda event: self.events.append(event.message))
        self.mode, self.threads = "background", 2
        self.backends = SimpleNamespace(place=lambda _: "cpu")
        candidate = SimpleNamespace(variant=variant)
        decision = SimpleNamespace(candidate=candidate, compile_key="key" if variant == "c_multi" else None)
        self.table = SimpleNamespace(find=lambda *_: decision)
        self.shelf = SimpleNamespace(entry=lambda *_: self._entry())
        self.router = OptimizerRouter(self)  # type: ignore[arg-type]

    def _entry(self) -> Callable[..., Any]:
        form = next(g.form for g in self.router._groups.values() if g.entry is None)
        source, toolchain = print_step(form, ()), find_toolchain()
        kernel = load_kernel(compile_source(source.text, toolchain, flags_for(toolchain)), source.name)

        def run(*addresses: int) -> Any:
            self.kernels += 1
            return kernel.entry(*addresses)

        return run

    def say_once(self, code: str, text: str) -> None:
        self.said.append(text)

    def report_fallback(self, code: str, text: str, error: Exception) -> None:
        self.said.append(f"{text}: {error}")


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    made = Calls(getattr(request, "param", "c_multi"))
    made.router.install()
    yield made
    made.router.uninstall()


def trained(name: str, params: list[Tensor], steps: int = 4, **options: Any) -> torch.optim.Optimizer:
    """An optimizer after some steps on gradients that follow from a seed."""
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(params, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        for param in dict.fromkeys(params):
            param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]


def both(calls: Calls, name: str, make: Callable[[], list[Tensor]], **options: Any) -> list[Tensor]:
    """Parameters after the same steps: under the router, compared with torch's own."""
    ours, plain = make(), make()
    trained(name, ours, **options)
    calls.router.uninstall()
    trained(name, plain, **options)
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return ours


@pytest.mark.parametrize(("name", "options", "first"), [
    ("AdamW", {}, 0), ("Adam", {"amsgrad": True}, 0), ("RMSprop", {"momentum": 0.5}, 0),
    ("Adagrad", {"lr_decay": 0.1}, 0), ("SGD", {"lr": 0.1}, 0),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, 1),
])  # fmt: skip
def test_one_kernel_a_group_and_step(calls: Calls, name: str, options: dict[str, Any], first: int) -> None:
    """SGD with momentum has no buffers before its first step, which stays torch's."""
    both(calls, name, lambda: parameters(1, 0, 13, 4099), **options)
    assert calls.kernels == 4 - first and not calls.said


@pytest.mark.parametrize("calls", ["foreach"], indirect=True)
def test_a_vendors_variant_is_called_with_its_switch(calls: Calls) -> None:
    both(calls, "AdamW", lambda: parameters(5, 7))
    assert calls.kernels == 0 and not calls.said
    assert [use.fused_calls for use in calls.router.uses()] == [4]


def test_a_parameter_listed_twice_is_torchs_own(calls: Calls) -> None:
    def make() -> list[Tensor]:
        params = parameters(50_000, 3)
        return [*params, params[0]]

    with pytest.warns(UserWarning, match="duplicate"):
        both(calls, "Adam", make, lr=0.1)
    assert calls.kernels == 0 and "share memory" in calls.events[0] and not calls.said


@pytest.mark.parametrize(("options", "said"), [
    ({"lr": torch.tensor(0.1), "foreach": False}, "no plain number"),
    ({"differentiable": True}, ""),
])  # fmt: skip
def test_what_is_unusual_is_torchs_own(calls: Calls, options: dict[str, Any], said: str) -> None:
    ours = parameters(6)
    if options.get("differentiable"):
        ours = [param.detach().clone().requires_grad_().clone() for param in ours]
        with torch.no_grad():
            trained("Adam", ours, steps=2, **options)
    else:
        trained("Adam", ours, steps=2, **options)
    assert calls.kernels == 0 and said in "".join(calls.events) and not calls.said


@pytest.mark.parametrize("change", ["expanded", "complex", "strided"])
def test_gradients_laid_out_otherwise_are_torchs_own(calls: Calls, change: str) -> None:
    dtype = torch.complex64 if change == "complex" else torch.float32
    param = nn.Parameter(torch.zeros(4, 5, dtype=dtype))
    optimizer = torch.optim.SGD([param], lr=1.0)
    grads = {"expanded": torch.ones(1).expand(4, 5), "complex": torch.ones(4, 5) + 0j, "strided": torch.ones(5, 4).t()}
    param.grad = grads[change]
    optimizer.step()
    assert calls.kernels == 0 and torch.equal(param, -torch.ones_like(param))


def test_a_dropped_model_is_freed(calls: Calls) -> None:
    params = parameters(9, 11)
    optimizer = trained("AdamW", params)
    held = [weakref.ref(t) for p in params for t in (p, *optimizer.state[p].values())]
    assert calls.kernels == 4 and len(held) == 8
    del params, optimizer
    gc.collect()
    assert [ref() for ref in held] == [None] * 8


def test_new_gradients_states_and_rates_are_seen(calls: Calls) -> None:
    def run() -> list[Tensor]:
        params = parameters(8, 3)
        optimizer = trained("AdamW", params, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        other = torch.optim.AdamW(params, lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step(lambda: torch.zeros(()))
        scheduler.step()
        optimizer.step()
        other.step()
        return [*params, *(t for p in params for t in other.state[p].values())]

    ours = run()
    assert calls.kernels == 7
    calls.router.uninstall()
    for found, expected in zip(ours, run(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_threads_have_tables_of_their_own(calls: Calls) -> None:
    params = parameters(4)
    both_live = threading.Barrier(2)  # the number of a thread that has ended goes to another

    def train() -> None:
        trained("SGD", params)
        both_live.wait(60)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls.kernels == 8 and len({id(g.table) for g in calls.router._groups.values()}) == 2
