"""The functions that stand in for torch's: when the kernel runs, once for each group, and when torch's own does."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autofuse.codegen.c.build import compile_source, find_toolchain, flags_for
from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.triton.source import TritonSource
from autofuse.daemon.workers.interpreter import Interpreted
from autofuse.ir.operation import NodeForm
from autofuse.ir.strict import strictly
from autofuse.optim.c_printer import print_step
from autofuse.optim.form import StepForm
from autofuse.optim.triton_printer import print_triton_step
from autofuse.runtime.kernels.device_backends import Place
from autofuse.runtime.optimizers import hook as optim_hook
from autofuse.runtime.optimizers import router
from autofuse.runtime.optimizers.hook import OptimizerHook


class Calls:
    """A session in which the kernel, or a variant of torch's own, has won every race."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.kernels = 0
        self.fails = False
        self.used: list[torch.device] = []
        self.said: list[str] = []
        self.events: list[str] = []
        self.store_thread = SimpleNamespace(post_event=lambda event: self.events.append(event.message), usable=True)
        self.mode, self.threads, self.capture_seconds = "background", 2, 0.0
        self.versions = "torch 2.13 codegen 1"
        self.is_loaded = True
        candidate = SimpleNamespace(variant=variant)
        decision = SimpleNamespace(candidate=candidate, compile_key="key" if variant.endswith("_multi") else None)
        self.catalogue = SimpleNamespace(
            backends=SimpleNamespace(place=lambda _: "cpu"),
            table=SimpleNamespace(find=lambda *_: decision),
            shelf=SimpleNamespace(entry=lambda *_: self._entry()),
        )
        self.hook = OptimizerHook(self, self, lambda requests: None)  # type: ignore[arg-type]
        self.hook.router = self.router = router.OptimizerRouter(self, self, lambda requests: None)

    def _entry(self) -> Any:
        form = next(g.form for g in self.router.groups.values() if g.call is None)
        if self.variant == "triton_multi":
            return Counted(self, print_triton_step(form, ()))
        source, toolchain = print_step(form, ()), find_toolchain()
        kernel = load_kernel(compile_source(source.text, toolchain, flags_for(toolchain)), source.name)

        def run(*addresses: int) -> Any:
            self.kernels += 1
            return kernel.entry(*addresses)

        return run

    def use_device(self, device: torch.device) -> None:
        self.used.append(device)

    def say_once(self, code: str, text: str) -> None:
        self.said.append(text)

    def report_fallback(self, code: str, text: str, error: Exception) -> None:
        self.said.append(f"{text}: {error}")


class Counted(Interpreted):
    """A Triton kernel in the interpreter."""

    def __init__(self, calls: Calls, source: TritonSource) -> None:
        super().__init__(source)
        self._calls = calls

    def on_tensors(self, values: Mapping[str, int], *tensors: Tensor) -> None:
        self._calls.kernels += 1
        if self._calls.fails:
            raise RuntimeError("expected the driver to take launch 0, found CUDA_ERROR_OTHER (999)")
        super().on_tensors(values, *tensors)


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    made = Calls(getattr(request, "param", "c_multi"))
    made.hook.install()
    yield made
    made.hook.uninstall()


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
    calls.hook.uninstall()
    trained(name, plain, **options)
    for found, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return ours


KERNELS = pytest.mark.parametrize("calls", ["c_multi", "triton_multi"], indirect=True)


@KERNELS
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


@pytest.mark.parametrize("calls", ["triton_multi"], indirect=True)
def test_a_launch_that_fails_is_torchs_step_and_one_line(calls: Calls) -> None:
    calls.fails = True
    both(calls, "Adam", lambda: parameters(5, 700))
    assert calls.kernels == 1 and len(calls.said) == 1 and "CUDA_ERROR_OTHER" in calls.said[0]


@KERNELS
def test_versions_move_as_torch_moves_them(calls: Calls) -> None:
    def versions() -> list[bool]:
        params = parameters(5, 700)
        optimizer = trained("Adam", params)
        seen = [*params, *(t for p in params for t in optimizer.state[p].values())]
        before = [t._version for t in seen]
        optimizer.step()
        return [t._version > v for t, v in zip(seen, before, strict=True)]

    assert versions() == [True] * 8 and calls.kernels == 5


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


@pytest.mark.parametrize("calls", ["c_multi", "fused"], indirect=True)
def test_ranks_on_other_processors_offer_other_winners(calls: Calls) -> None:
    """Torch's own variants are compiled for several processors; a kernel's name holds its own."""
    made = [
        SimpleNamespace(key=SimpleNamespace(device=device), **vars(calls.catalogue.table.find())) for device in "ab"
    ]
    assert (router._name(made[0]) == router._name(made[1])) == (calls.variant == "c_multi")  # type: ignore[arg-type]


@KERNELS
def test_ranks_that_cannot_agree_step_as_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each steps a replica of its own: one that changes to a kernel earlier than another would drift away from it."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    trained("Adam", parameters(5, 7))
    assert calls.kernels == 0
    assert calls.events == [
        "optimizers' steps stay torch's own: OMPI_COMM_WORLD_SIZE tells of 2 ranks, and without a process group of "
        "torch.distributed they cannot agree on a step at which to change"
    ]
    calls.versions = strictly(calls.versions)
    trained("Adam", parameters(5, 7))
    assert calls.kernels == 4, "a strict run's kernels are torch's to the bit"


def test_a_dropped_model_is_freed(calls: Calls) -> None:
    params = parameters(9, 11)
    optimizer = trained("AdamW", params)
    held = [weakref.ref(t) for p in params for t in (p, *optimizer.state[p].values())]
    assert calls.kernels == 4 and len(held) == 8
    del params, optimizer
    gc.collect()
    assert [ref() for ref in held] == [None] * 8


@KERNELS
def test_new_gradients_states_and_rates_are_seen(calls: Calls) -> None:
    def run() -> list[Tensor]:
        params = parameters(8, 3)
        optimizer = trained("AdamW", params, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        other = torch.optim.AdamW(params, lr=0.1)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step(lambda: torch.zeros(()))
        scheduler.step()
        optimizer.step()
        other.step()
        return [*params, *(t for p in params for t in other.state[p].values())]

    ours = run()
    assert calls.kernels == 7
    calls.hook.uninstall()
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
    assert calls.kernels == 8 and len({id(g.call) for g in calls.router.groups.values()}) == 2


def test_groups_of_tensors_that_are_gone_are_not_kept(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MOST_GROUPS", 3)
    models = [parameters(2) for _ in range(5)]
    for params in models:
        trained("SGD", params, steps=2)
    assert len(calls.router.groups) == 3
    assert [(use.calls, use.fused_calls) for use in calls.router.uses()] == [(10, 10)]


# ---- other devices: tensors of "meta", which have a device and no memory, stand for those of a GPU ----------------

META = torch.device("meta")


@pytest.fixture
def on_gpu(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """``calls`` with a GPU; whether a graph is recorded there."""
    recording = [False]
    monkeypatch.setattr(router, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(router, "is_capturing", lambda: recording[0])
    place = Place(META, "cuda:GPU:1:sm_90:1GiB", 0)
    calls.catalogue.backends = SimpleNamespace(place=lambda device: place if device == META else None)
    calls.tunable = calls.catalogue.backends.place  # type: ignore[attr-defined]
    calls.catalogue.table = SimpleNamespace(find=lambda *_: None)
    calls.versions = "torch 2.13"  # type: ignore[attr-defined]
    calls.store_thread = SimpleNamespace(post_event=lambda event: calls.events.append(event.message), run_id=1)
    return recording


def meta_parameters(*sizes: int) -> list[Tensor]:
    return [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]


@pytest.mark.parametrize("asked", ["", "foreach"])
def test_a_groups_request_names_its_device(calls: Calls, on_gpu: list[bool], asked: str) -> None:
    trained("Adam", meta_parameters(4, 900), **({asked: True} if asked else {}))
    assert calls.used == [META] and not calls.said
    (request,) = calls.router.requests()
    assert (request.key.device, request.key.threads) == ("cuda:GPU:1:sm_90:1GiB", 0)
    step = StepForm.from_json(request.node["optimizer"])
    assert (step.device, step.counters, step.asked) == ("meta", "host", asked)
    assert {item.spec.device for item in NodeForm.from_json(dict(request.node)).inputs} == {"meta"}
    assert calls.router.requests() == []  # asked once


def test_where_the_counters_are_is_part_of_a_step(calls: Calls, on_gpu: list[bool]) -> None:
    """Torch's ``fused`` has them on the device."""
    arguments = {"params": meta_parameters(3), "fused": True, "state_steps": [torch.zeros((), device="meta")]}
    group = calls.router.group_of("adam", arguments)
    assert group is not None and (group.form.counters, group.form.asked) == ("device", "fused")


def test_parameters_on_several_devices_are_torchs_own(calls: Calls, on_gpu: list[bool]) -> None:
    params = [*meta_parameters(4), *parameters(3)]
    trained("SGD", params, lr=0.1, foreach=False)
    assert calls.router.requests() == [] and not calls.said
    assert len(calls.events) == 1 and "expected all parameters on meta" in calls.events[0]


def test_a_recorded_graph_has_torchs_own_step(calls: Calls, on_gpu: list[bool]) -> None:
    looked: list[Any] = []
    calls.catalogue.table = SimpleNamespace(find=lambda *found: looked.append(found))
    on_gpu[0] = True
    params = meta_parameters(4)
    trained("SGD", params, lr=0.1)
    assert not looked
    on_gpu[0] = False
    trained("SGD", params, lr=0.1)
    assert looked


def test_a_script_pays_for_the_router_once_it_has_spent_much_more(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.is_loaded = False
    calls.hook.router = None
    first = trained("SGD", parameters(8), 3)
    assert (
        calls.hook.router is None and 0.0 < calls.hook.spent_seconds < optim_hook.IMPORT_SECONDS and not calls.kernels
    )
    monkeypatch.setattr(optim_hook, "IMPORT_SECONDS", calls.hook.spent_seconds / optim_hook.RENT)
    second = trained("SGD", parameters(8), 3)
    assert calls.hook.router is not None and calls.capture_seconds > 0.0
    assert torch.equal(first.param_groups[0]["params"][0], second.param_groups[0]["params"][0])


@pytest.mark.parametrize("cause", ["loaded", "wait", "ranks"])
def test_the_router_comes_at_once_where_it_must_or_costs_no_more(
    calls: Calls, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks count steps from the first one on: where each counted from another, they changed at different ones."""
    calls.hook.router = None
    monkeypatch.setattr(optim_hook, "group_size", lambda: 2 if cause == "ranks" else 1)
    calls.is_loaded, calls.mode = cause == "loaded", "wait" if cause == "wait" else "background"
    calls.store_thread.usable = False  # as in a forked child
    trained("SGD", parameters(8), 1)
    assert calls.hook.router is None
    calls.store_thread.usable = True
    trained("SGD", parameters(8), 1)
    assert calls.hook.router is not None


def test_a_router_that_cannot_be_brought_is_said_once(calls: Calls) -> None:
    calls.hook.router, calls.catalogue = None, None  # type: ignore[assignment]
    trained("SGD", parameters(8), 3)
    assert calls.hook.router is None and len(calls.said) == 1 and "stay torch's own" in calls.said[0]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((1, 2, 3, 4), {"c": 5}),
        ((1, 2), {"b": 3, "c": 4}),
        ((1, 2), {"c": 4, "d": 5}),
        ((1,), {"c": 4, "d": 5}),
        ((1, 2), {"c": 4}),
        ((), {"c": 4, "b": 2, "a": 1}),
        ((1, 2, 3), {"c": 4}),
    ],
)
def test_arguments_are_named_as_a_signature_names_them(args, kwargs) -> None:
    def function(a, b, e=7, *, c, f=8):
        pass

    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        expected: dict[str, Any] | None = dict(bound.arguments)
    except TypeError:
        expected = None
    assert optim_hook._binder(function)(args, kwargs) == expected
