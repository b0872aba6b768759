"""Graphs called from C: the results, errors and side effects of the same graphs called from Python."""

from __future__ import annotations

import gc
import itertools
import random
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autofuse.codegen.c.build import find_toolchain
from autofuse.runtime.graphs import graph_runner, plans
from autofuse.runtime.graphs.graph_runner import GraphRunner
from autofuse.wrapper import native_library
from autofuse.wrapper.native_build import NativeBuilder
from autofuse.wrapper.native_library import Runner, compile_runner, load_runner
from tests.codegen.test_in_place import Captured

T = torch.Tensor
W, B = torch.randn(16, 16), torch.randn(16)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load_runner(compile_runner(find_toolchain()).binary)


@pytest.fixture(autouse=True)
def at_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans run in C from the first call on that has all kernels."""
    monkeypatch.setattr(plans, "NATIVE_AFTER", 1)
    native_library.install(runner)
    yield
    native_library.install(None)


@pytest.fixture
def store(tmp_path: Any) -> str:
    return str(tmp_path / "store.sqlite3")


def all_plans(captured: Captured) -> list[plans.Plan]:
    return [plan for router in captured.session.context.routers for plan in router.all_plans()]


def facts(values: Any) -> list[Any]:
    tensors = [v for v in (values if isinstance(values, tuple | list) else [values]) if isinstance(v, T)]
    return [(t.shape, t.stride(), t.dtype, t.requires_grad, t.is_inference(), t._is_view()) for t in tensors]


def both_ways(function: Callable[..., Any], store: str, *inputs: T) -> Captured:
    """The same bits and layouts from both, call after call."""
    captured = Captured(function, store)
    for _ in range(3):
        captured.call(*inputs)
    found, programs = captured.call(*inputs), [(plan, plan.native) for plan in all_plans(captured)]
    assert programs and all(native is not None for _, native in programs)
    for plan, _ in programs:
        plan.native = None
    expected = captured.call(*inputs)
    for plan, native in programs:
        plan.native = native
    assert facts(found) == facts(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return captured


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "product": lambda x: torch.relu(x @ W + B),
    "linear": lambda x: torch.tanh(F.linear(x, W, B)) + x,
    "heads": lambda x: F.softmax(x.view(4, 4, 2, 8).transpose(1, 2) @ x.view(4, 4, 2, 8).permute(0, 2, 3, 1), -1) * 2,
    "views leave": lambda x: (x.t(), (x * 2 + 1).view(4, 64), x[3], x.unsqueeze(1).expand(-1, 3, -1), x.detach()),
    "split": lambda x: [torch.relu(y) + 1 for y in F.linear(x, W, B).split(4, 1)],
    "an input and None": lambda x: (x, torch.exp(x).sum(0) * 2, None, 3),
    "half": lambda x: torch.relu(x.bfloat16() @ W.bfloat16() + 1),
    "integers": lambda x: torch.relu((x > 0).long() @ (W > 0).long() + 1),
    "operators of no kernel": lambda x: (torch.relu(x.sort(1)[0] + 1), x.cumsum(0).mm(W)),
    "quantised": lambda x: torch.relu(
        torch.quantize_per_tensor(x @ W, 0.1, 0, torch.qint8).view(8, -1).t().dequantize() @ W[:8] + 1
    ),
    "empty": lambda x: torch.relu(x[:0] @ W + 1).sum(1) * 2,
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, torch.no_grad) for name in FUNCTIONS)]
    + [(name, mode) for name in ("views leave", "heads") for mode in (torch.enable_grad, torch.inference_mode)],
)
def test_results_are_those_of_python(name: str, mode: Any, store: str) -> None:
    with mode():
        both_ways(FUNCTIONS[name], store, torch.randn(16, 16))


def test_gradients_are_those_of_python(store: str) -> None:
    weight, bias, norm = (torch.randn(n, requires_grad=True) for n in ((16, 16), (16,), (16,)))

    def function(x: T) -> T:
        y = F.layer_norm(F.linear(x, weight, bias) + x, (16,), norm)
        return (F.softmax(y @ y.t(), -1) @ y).tanh()

    captured = Captured(function, store)
    x = torch.randn(12, 16, requires_grad=True)
    leaves = (x, weight, bias, norm)
    found = []
    for number in range(6):
        if number == 5:
            for plan in all_plans(captured):
                assert plan.native is not None
                plan.native = None
        found.append(torch.autograd.grad(captured.call(x).sum(), leaves))
    for one in found[3:]:
        assert all(map(torch.equal, one, found[5]))


@pytest.mark.parametrize("changed", ["input", "parameter"])
def test_a_saved_view_has_the_version_of_what_it_views(changed: str, store: str) -> None:
    """Changed in place between forward and backward, it ends in autograd's error, as in eager."""
    weight, factor = (torch.randn(16, 16).requires_grad_() for _ in range(2))
    captured = Captured(lambda x: torch.tanh(F.linear(x, weight) @ factor.view(16, 16)), store)
    for _ in range(4):
        captured.call(torch.randn(4, 6, 16)).sum().backward()
    x = torch.randn(4, 6, 16)
    loss = captured.call(x).sum()
    assert all(plan.native is not None for plan in all_plans(captured))
    with torch.no_grad():
        (x if changed == "input" else factor).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_each_shape_has_a_program_of_its_own(store: str) -> None:
    function = lambda x: torch.softmax(x @ W, -1).view(x.shape[0] * 2, 8) + 1  # noqa: E731
    captured = Captured(function, store)
    for rows in (3, 5, 8, 3, 1, 5, 8, 3):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(captured.call(x), function(x))
    assert sum(plan.native is not None for plan in all_plans(captured)) >= 3


def test_an_index_out_of_bounds_raises_eagers_error(store: str) -> None:
    table = torch.randn(10, 16)
    function = lambda x, i: torch.relu(F.embedding(i, table) + x) @ W  # noqa: E731
    x, good, bad = torch.randn(4, 16), torch.tensor([1, 2, 3, 9]), torch.tensor([1, 2, 3, 10])
    captured = both_ways(function, store, x, good)
    with pytest.raises(IndexError) as eager:
        function(x, bad)
    for _ in range(3):
        with pytest.raises(IndexError) as ours:
            captured.call(x, bad)
        assert str(ours.value) == str(eager.value)
    torch.testing.assert_close(captured.call(x, good), function(x, good))


def test_values_die_and_errors_leave_nothing_behind(runner: Runner) -> None:
    alive: list[bool] = []
    first: list[Any] = []

    def look(y: T) -> T:
        alive.append(first[-1]() is not None)
        if len(alive) % 2 == 0:
            raise KeyError("on the way")
        return y

    builder = NativeBuilder(runner.dtypes)
    builder.take([True])
    builder.operator("aten.mm.default", torch.mm, [0, 0], 1, ())
    builder.drop(0)
    builder.call(look, [1], [2])
    builder.result([2, 1], True)
    run = runner.make(builder.program())
    before = torch.mm
    for number in range(4):
        x = torch.randn(4, 4)
        first.append(weakref.ref(x))
        args, expected = [x], x @ x
        del x
        if number % 2:
            with pytest.raises(KeyError, match="on the way"):
                run(args)
        else:
            found = run(args)
            assert type(found) is list and all(torch.equal(t, expected) for t in found)
            assert sys.getrefcount(found[0]) <= 4
        assert args == []
    assert alive == [False] * 4 and torch.mm is before


def test_nothing_is_kept(store: str) -> None:
    x = torch.randn(512, 16)
    captured = both_ways(lambda x: torch.relu(x @ W + B) @ W.t() + x.t().unsqueeze(0)[0].t(), store, x)

    def rest() -> tuple[int, int]:
        for _ in range(300):
            captured.call(x)
        gc.collect()
        return sys.getrefcount(x), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    rest()
    references, most = rest()
    after = rest()
    assert after[0] == references and after[1] - most < 300 * 32 / 4  # KiB: a result is 32


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_what_they_see_of_python(runner: Runner) -> None:
    builder = NativeBuilder(runner.dtypes)
    builder.take([True])
    builder.operator("aten.mm.default", torch.mm, [0, 0], 1, ())
    builder.result([1], False)
    run = runner.make(builder.program())
    x = torch.randn(4, 4)
    args = [x]
    with Seen():
        assert run(args) is None and args == [x]
    with torch.profiler.profile():
        assert run(args) is None and args == [x]

    class Mine(torch.Tensor):
        pass

    for other in (x.as_subclass(Mine), 3, None, "text"):
        args = [other]
        assert run(args) is None and args == [other]
    assert run([x, x]) is None
    assert torch.equal(run([x])[0], x @ x)


def test_threads_share_a_plan(store: str) -> None:
    function = lambda x: torch.softmax(x @ W + B, -1) @ W  # noqa: E731
    x = torch.randn(64, 16)
    captured = both_ways(function, store, x)
    inputs = [torch.randn(64, 16) for _ in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():
            expected = captured.call(inputs[number])
            for _ in range(100):
                if not torch.equal(captured.call(inputs[number]), expected):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- single steps -----------------------------------------------------------------------------------------------


def tensors(rng: random.Random) -> T:
    """Awkward layouts: dims of size 1 and 0, steps, expanded and transposed dims."""
    sizes = [rng.choice([0, 1, 1, 2, 3, 4]) if rng.random() < 0.9 else 6 for _ in range(rng.randrange(0, 5))]
    base = torch.randn([size * 2 + 1 for size in sizes])
    for dim, size in enumerate(sizes):
        base = base.narrow(dim, rng.randrange(2), size * 2)[(slice(None),) * dim + (slice(None, None, 2),)]
    if rng.random() < 0.5:
        base = base.contiguous()
    if base.dim() and rng.random() < 0.5:
        base = base.permute(rng.sample(range(base.dim()), base.dim()))
    if rng.random() < 0.2:
        base = base.expand(rng.choice([1, 2]), *base.shape)
    return base


def views_of(x: T, rng: random.Random) -> list[tuple[str, Callable[[T], T], tuple[Any, ...]]]:
    """Views with good arguments and bad ones."""
    dim = lambda: rng.randrange(-x.dim() - 1, x.dim() + 2)  # noqa: E731
    one, two, place = dim(), dim(), rng.randrange(-4, 5)
    order = [d - rng.choice([0, x.dim()]) for d in rng.sample(range(x.dim()), x.dim())]
    wider = [rng.choice([-1, size, 3]) for size in x.shape]
    wider = [rng.choice([1, 2]) for _ in range(rng.randrange(2))] + wider
    count = x.numel()
    shapes = [[a, b, c] for a, b, c in itertools.product((1, 2, 3, 4, 6, -1), repeat=3) if a * b * c in (count, -count)]
    shape = rng.choice([*shapes[:40], [count], [-1], [*x.shape, 1], [1, *x.shape], [5]])
    return [
        ("aten.view.default", lambda t: t.view(shape), (shape,)),
        ("aten.t.default", lambda t: t.t(), ()),
        ("aten.transpose.int", lambda t: t.transpose(one, two), (one, two)),
        ("aten.permute.default", lambda t: t.permute(order), (order,)),
        ("aten.permute.default", lambda t: t.permute([*order[:-1], one]), ([*order[:-1], one],)),
        ("aten.unsqueeze.default", lambda t: t.unsqueeze(one), (one,)),
        ("aten.select.int", lambda t: t.select(one, place), (one, place)),
        ("aten.expand.default", lambda t: t.expand(wider), (wider,)),
        ("aten.detach.default", lambda t: t.detach(), ()),
    ]


def outcome(function: Callable[[], Any]) -> tuple[Any, ...]:
    try:
        found = function()
    except Exception as error:
        return type(error), str(error)
    return found.shape, found.stride(), found.dtype, found.storage_offset(), found.data_ptr()


def test_views_are_torchs(runner: Runner) -> None:
    rng, left = random.Random(0), 0
    for _ in range(1500):
        x = tensors(rng)
        for target, function, numbers in views_of(x, rng):
            calls = 0

            def counted(t: T, function: Callable[[T], T] = function) -> T:
                nonlocal calls
                calls += 1
                return function(t)

            builder = NativeBuilder(runner.dtypes)
            builder.take([True])
            builder.operator(target, counted, [0], 1, numbers)
            builder.result([1], False)
            run = runner.make(builder.program())
            found = outcome(lambda run=run, x=x: run([x])[0])  # type: ignore[misc]
            expected = outcome(lambda function=function, x=x: function(x))  # type: ignore[misc]
            assert found == expected, (target, numbers, x.shape, x.stride())
            left += calls and expected[0] is not RuntimeError and expected[0] is not IndexError
    assert left < 1500 * 9 / 10  # empty tensors, and those without dims


def test_products_are_torchs(runner: Runner) -> None:
    rng = random.Random(1)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]
    for number in range(300):
        dtype, other = rng.choice(kinds), rng.choice(kinds) if number % 7 == 0 else None
        m, k, n, b = (rng.choice([0, 1, 2, 3, 5]) for _ in range(4))
        inner = k if number % 5 else k + 1
        pairs: dict[str, tuple[list[int], ...]] = {
            "mm": ([m, k], [inner, n]),
            "bmm": ([b, m, k], [b, inner, n]),
            "addmm": (rng.choice([[n], [m, n], [1, n], [1]]), [m, k], [inner, n]),
        }
        for name, shapes in pairs.items():
            given = [torch.randn(shape).mul(3).to(dtype) for shape in shapes]
            given[-1] = given[-1].to(other or dtype)
            if number % 3 == 0 and name != "addmm":
                given[0] = given[0].transpose(-1, -2).contiguous().transpose(-1, -2)
            if dtype is torch.complex64 and number % 2:
                given[-1] = given[-1].conj()
            function = getattr(torch, name)
            builder = NativeBuilder(runner.dtypes)
            builder.take([True] * len(given))
            builder.operator(f"aten.{name}.default", function, range(len(given)), 3, ())
            builder.result([3], False)
            run = runner.make(builder.program())
            found, expected = [], []
            for into, call in ((found, lambda *given, run=run: run([*given])[0]), (expected, function)):
                try:
                    into.append(call(*given))
                except RuntimeError as error:
                    into.append(str(error))
            if isinstance(expected[0], str):
                assert found == expected
            else:
                assert facts(found) == facts(expected)
                torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)


# ---- without a runner --------------------------------------------------------------------------------------------


def test_without_a_runner_graphs_stay_in_python(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native_library.install(None)
    function, x = FUNCTIONS["linear"], torch.randn(16, 16)
    captured, told = Captured(function, store), []
    for _ in range(4):
        torch.testing.assert_close(captured.call(x), function(x))
    assert all(plan.native is None for plan in all_plans(captured))
    context, kernels = captured.session.context, captured.session.kernels

    class Empty:
        get = put = staticmethod(lambda found: None)

    class Stored:
        kernels = Empty

    monkeypatch.setattr(graph_runner, "tell", lambda level, text: told.append(text()))
    monkeypatch.setattr(native_library, "FUNCTIONS", ("aoti_torch_no_such_name",))
    optimizers = captured.session.optimizers
    GraphRunner(context, kernels, optimizers).bring(Stored)  # type: ignore[arg-type]
    assert native_library.installed() is None and len(told) == 1 and "aoti_torch_no_such_name" in told[0]
    monkeypatch.undo()
    GraphRunner(context, kernels, optimizers).bring(Stored)  # type: ignore[arg-type]
    assert native_library.installed() is not None
    for _ in range(8):
        torch.testing.assert_close(captured.call(x), function(x))
    assert all(plan.native is not None for plan in all_plans(captured))


def test_a_function_outlives_its_runner() -> None:
    """CPython reads the record that a function was made of as long as the function lives."""
    runner = load_runner(compile_runner(find_toolchain()).binary)
    builder = NativeBuilder(runner.dtypes)
    builder.take([True])
    builder.operator("aten.mm.default", torch.mm, [0, 0], 1, ())
    builder.result([1], False)
    run = runner.make(builder.program())
    del runner
    gc.collect()
    others = [bytes([255]) * 32 for _ in range(10_000)]  # where the record would have been
    assert run.__name__ == "af_graph_runner" and run.__doc__ == "(inputs) -> results"
    x = torch.randn(4, 4)
    assert torch.equal(run([x])[0], x @ x) and len(others) == 10_000
