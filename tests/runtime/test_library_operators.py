"""Libraries' operators as what was registered for them: fused with their neighbours, or as the script calls them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autofuse import library_operators, register_unfused
from autofuse.capture import check_unfused
from autofuse.capture.graph_import import import_graph
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.reference import run_unfused, to_float64
from autofuse.db.rows import KernelSource
from autofuse.errors import FusionError
from autofuse.ir.composites import has_librarys, without_librarys
from autofuse.ir.operation import NodeForm
from autofuse.ir.optable import OpKind, info
from autofuse.ir.records import Event, Refusal
from autofuse.runtime import own_kernels
from autofuse.runtime import router as router_module
from autofuse.runtime.choice import Choice
from autofuse.runtime.debug_texts import routes_text
from autofuse.strategies.enumeration import cut_strategies
from autofuse.wrapper.aten_call import overload
from autofuse.wrapper.node_call import NodeCall, make_unfused
from autofuse.wrapper.repro import repro
from tests.runtime.test_routed_graphs import Undecided, routed

CALLS: list[str] = []
_ops = torch.library.Library("autofuse_lib", "FRAGMENT")


def _scaled(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def _scaled_back(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    r, h = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps), g * w
    return r * h - x * r.pow(3) * (h * x).mean(-1, keepdim=True), (g * x * r).sum(tuple(range(x.dim() - 1)))


@torch.library.custom_op("autofuse_lib::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    CALLS.append("scaled")
    return _scaled(x, w, eps)


@torch.library.custom_op("autofuse_lib::scaled_back", mutates_args=())
def scaled_back(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("scaled_back")
    return _scaled_back(g, x, w, eps)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _gradients(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return (*scaled_back(g, *ctx.saved_tensors, ctx.eps), None)


scaled.register_fake(lambda x, w, eps=1e-6: torch.empty_like(x))
scaled_back.register_fake(lambda g, x, w, eps: (torch.empty_like(x), torch.empty_like(w)))
scaled.register_autograd(_gradients, setup_context=_keep)
scaled.register_vmap(lambda info, dims, x, w, eps=1e-6: (scaled(x, w, eps), 0))


def an_operator(name: str, function: Callable[..., Any], fake: Callable[..., Any] = torch.empty_like) -> Any:
    """One of ``x`` alone; repeated definitions are one."""
    if not hasattr(torch.ops.autofuse_lib, name):
        _ops.define(f"{name}(Tensor x) -> Tensor")
        _ops.impl(name, function, "CPU")
        torch.library.register_fake(f"autofuse_lib::{name}", fake, lib=_ops)
    return getattr(torch.ops.autofuse_lib, name).default


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library_operators, "_by_name", {})
    monkeypatch.setattr(library_operators, "_by_operator", {})
    torch._dynamo.reset()
    CALLS.clear()
    yield


class Fused(Undecided):
    """Every node has a kernel in C; operators of a library are kept where ``keeps`` says so."""

    keeps, tag = False, "c"

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        forms = {s.node.fusion_id: s.node.form for r in self.routers for s in r.program.slots}
        return Choice(known=True, entry=forms.get(fusion_id), tag=self.tag)

    def keeps_own(self, node: Any, fused: NodeCall, tag: str) -> bool:
        return self.keeps

    @property
    def forms(self) -> list[NodeForm]:
        return [slot.node.form for router in self.routers for slot in router.program.slots]


@pytest.fixture
def catalogue(generator: FusionKernelGenerator, monkeypatch: pytest.MonkeyPatch) -> Fused:
    def launcher(form: NodeForm, entry: Any, values: Sequence[int], threads: int, **options: Any) -> NodeCall:
        kernel = generator.generate_generic_kernel(form)

        def call(*inputs: torch.Tensor) -> Any:
            outputs = kernel(*inputs)
            return tuple(outputs) if len(outputs) > 1 else outputs[0]

        return call

    monkeypatch.setattr(router_module, "make_launcher", launcher)
    return Fused()


@pytest.fixture(scope="module")
def generator() -> FusionKernelGenerator:
    return FusionKernelGenerator()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.w = nn.Linear(24, 40), nn.Parameter(torch.rand(40) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(scaled(self.up(x), self.w)) * 2 + 1


def compare(model: nn.Module, fast: Callable[..., Any], x: torch.Tensor) -> None:
    """One training step and one call without gradients of both."""
    results = []
    for call in (model, fast):
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        with torch.no_grad():
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters()), call(x)])  # type: ignore[union-attr]
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_training_and_inference_in_kernels(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    register_unfused("autofuse_lib::scaled_back", _scaled_back)
    model = Net()
    fast = routed(model, catalogue)
    fast(torch.randn(6, 24)).sum().backward()
    made = {op.short_name for form in catalogue.forms for op in form.operations}
    assert {"autofuse_lib__scaled", "autofuse_lib__scaled_back", "relu", "threshold_backward"} <= made
    compare(model, fast, torch.randn(7, 24))
    CALLS.clear()
    for rows in (1, 5, 7, 9):
        fast(torch.randn(rows, 24)).sum().backward()
    assert "scaled" not in CALLS[6:] and not catalogue.failed  # six: the check of a graph for all sizes


def test_a_script_keeps_its_own_kernel_where_that_is_faster(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    catalogue.keeps = True
    model, x = Net(), torch.randn(6, 24)
    fast = routed(model, catalogue)
    with torch.no_grad():
        expected = model(x)
        CALLS.clear()
        found = fast(x)
        assert CALLS.count("scaled") == 6, "five in the check, one in the call"
        assert torch.equal(found, expected) and any(map(has_librarys, catalogue.forms))


def test_without_a_registration_nothing_changes() -> None:
    model, x, catalogue = Net(), torch.randn(6, 24), Undecided()
    assert torch.equal(routed(model, catalogue)(x), model(x))
    assert not any(has_librarys(s.node.form) for r in catalogue.routers for s in r.program.slots)


def test_the_backward_alone_stays_the_operators(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    model = Net()
    compare(model, routed(model, catalogue), torch.randn(6, 24))
    assert "scaled_back" in CALLS


def traced(call: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    return torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="fake")(*inputs)


# ---- refusals -------------------------------------------------------------------------------------------------------


def refusals(operator: Any, x: torch.Tensor) -> list[Refusal]:
    """Those of a graph with one operator, whose results stay eager's to the bit."""
    found: list[Refusal] = []

    def backend(module: Any, inputs: Any) -> Any:
        def compiled(graph: Any, examples: Any) -> Any:
            imported = import_graph(graph)
            found.extend(imported.refusals)
            assert not any(op.target.startswith("library.") for op in imported.operations)
            return graph

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=compiled)(module, inputs)

    state, expected = torch.get_rng_state(), operator(x)
    torch.set_rng_state(state)
    result = torch.compile(lambda x: operator(x), backend=backend)(x)
    assert torch.equal(result, expected) and result.stride() == expected.stride()
    return found


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such luck")


TWOS = torch.ones(5) * 2
WRONG = {
    "differs": (lambda x: x * 2.0001, "operator is .* away from the function"),
    "nan": (lambda x: torch.where(x.isnan(), 0.0, x * 2), "NaN or Inf in .* other places"),
    "raises": (_raises, "the function raised ValueError: no such luck"),
    "draws": (lambda x: x * 2 + 0 * torch.rand_like(x), r"draws random numbers \(rand_like\)"),
    "writes": (lambda x: x.mul_(2), r"writes to a tensor \(copy_\)"),
    "shape": (lambda x: (x * 2)[:3], r"returns float32\[3, 5\], the operator float32\[6, 5\]"),
    "dtype": (lambda x: (x * 2).double(), r"returns float64\[6, 5\], the operator float32\[6, 5\]"),
    "two": (lambda x: (x * 2, x), "returns 2 tensors, the operator 1"),
    "product": (lambda x: (x.t().contiguous() @ x)[:1] * 0 + x * 2, "uses mm, which no kernel of loops"),
    "tensor": (lambda x: x * TWOS, "tensors beside its 1 arguments|raised"),
    "sizes": (lambda x: x * 2 if x.sum() > 0 else x + x, "the function raised"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_refused_with_its_evidence(name: str) -> None:
    function, words = WRONG[name]
    operator = an_operator("twice", lambda x: x * 2)
    register_unfused(operator, function)
    (refusal,) = refusals(operator, torch.randn(6, 5))
    assert (refusal.code, refusal.operations, refusal.accepted) == ("unfused_form", "autofuse_lib::twice", False)
    assert re.search(words, refusal.detail), refusal.detail


def _with_temporaries(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.clamp_(min=0)
    return y.add_(1)


def _in_32_bits(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


RIGHT = {
    "writes_to_its_own": (lambda x: (x * 2).clamp(min=0) + 1, _with_temporaries),
    "composite": (_in_32_bits, lambda x: torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)),
    "in_32_bits": (_in_32_bits, _in_32_bits),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_taken(name: str, dtype: torch.dtype) -> None:
    function, unfused = RIGHT[name]
    operator = an_operator(f"right_{name}", function)
    register_unfused(operator, unfused)
    for shape, mode in (((6, 5), "symbolic"), ((0, 5), "fake"), ((6, 5, 1), "fake")):
        x = torch.randn(shape, dtype=dtype)
        imported = import_graph(torch.fx.experimental.proxy_tensor.make_fx(operator, tracing_mode=mode)(x))
        assert [op.target for op in imported.operations] == [f"library.autofuse_lib__right_{name}.default"]


def test_an_operator_that_takes_a_dtype_stays() -> None:
    _ops.define("cast(Tensor x, ScalarType dtype) -> Tensor")
    _ops.impl("cast", lambda x, dtype: (x * 2).to(dtype), "CPU")
    torch.library.register_fake("autofuse_lib::cast", lambda x, dtype: torch.empty_like(x, dtype=dtype), lib=_ops)
    operator = torch.ops.autofuse_lib.cast.default
    register_unfused(operator, lambda x, dtype: (x * 2).to(dtype))
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda x: operator(x, torch.bfloat16), tracing_mode="fake")
    (refusal,) = import_graph(traced(torch.randn(6, 5))).refusals
    assert "called with torch.bfloat16" in refusal.detail


def _writes(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


ODD_OPERATORS = {
    "draws": (lambda x: x * 2 + 0 * torch.rand_like(x), torch.empty_like, "the operator draws random numbers"),
    "keeps": (lambda x: x.view(x.shape), torch.empty_like, "returns a part of an argument"),
    "raises_on_zero": (
        lambda x: x * 2 if bool(x.isfinite().all()) else _raises(x),
        torch.empty_like,
        "operator raised ValueError on random numbers: no such luck",
    ),
    "lies": (
        lambda x: (x * 2).t().contiguous().t(),
        torch.empty_like,
        r"gives strides \[1, 6\], its fake implementation \[5, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_OPERATORS)
def test_an_odd_operator_stays(name: str) -> None:
    function, fake, words = ODD_OPERATORS[name]
    operator = an_operator(name, function, fake)
    register_unfused(operator, (lambda x: x + 0) if name == "keeps" else (lambda x: x * 2))
    graph = torch.fx.experimental.proxy_tensor.make_fx(operator, tracing_mode="fake")(torch.randn(6, 5))
    before = torch.get_rng_state()
    (refusal,) = import_graph(graph).refusals
    assert re.search(words, refusal.detail), refusal.detail
    assert torch.equal(before, torch.get_rng_state())


def test_an_operator_that_writes_to_its_argument_unsaid_stays() -> None:
    operator = an_operator("writes", _writes)
    register_unfused(operator, lambda x: (x + 1) * 2)
    graph = torch.fx.experimental.proxy_tensor.make_fx(operator, tracing_mode="fake")(torch.randn(6, 5))
    (refusal,) = import_graph(graph).refusals
    assert refusal.detail == "the operator writes to its arguments"


def test_integers_that_index_nothing_are_not_made_up() -> None:
    _ops.define("picked(Tensor table, Tensor at) -> Tensor")
    _ops.impl("picked", lambda table, at: table[at], "CPU")
    torch.library.register_fake("autofuse_lib::picked", lambda table, at: table[at], lib=_ops)
    operator, inputs = torch.ops.autofuse_lib.picked.default, (torch.randn(9, 5), torch.tensor([3, 8, 0]))
    graph = torch.fx.experimental.proxy_tensor.make_fx(operator, tracing_mode="fake")(*inputs)
    register_unfused(operator, lambda table, at: torch.nn.functional.embedding(at, table))
    imported = import_graph(graph)
    assert [op.target for op in imported.operations] == ["library.autofuse_lib__picked.default"]
    assert not imported.refusals
    library_operators._by_name.clear()
    register_unfused(operator, lambda table, at: (at[:, None] == torch.arange(9)).float()[..., None].mul(table).sum(1))
    (refusal,) = import_graph(graph).refusals
    assert "random integers might be out of bounds" in refusal.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_wrong_numbers_are_found_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64, dtype=dtype)
    wide = torch.float32 if dtype is not torch.float32 else torch.float64

    def norm(x: torch.Tensor, eps: float = 1e-6, scale: float = 1.0) -> torch.Tensor:
        y = x.to(wide)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)

    cases = {
        "times": (lambda x: x * 2, lambda x: x * 2.04),
        "norm": (norm, lambda x: norm(x, scale=1.03)),
        "eps": (norm, lambda x: norm(x, eps=1e-5)),
        "no_eps": (norm, lambda x: norm(x, eps=0.0)),
        "of_another_scale": (
            lambda x: torch.cat([x[:1] * 1e3, x[1:]]),
            lambda x: torch.cat([x[:1] * 1e3, x[1:] * 0.9]),
        ),
        "never_finite": (lambda x: (x - 6e4).sqrt(), lambda x: (x - 6e4).log()),
        "zero": (lambda x: (x - 6e4).relu(), lambda x: (x - 6e4).relu() * 7),
    }
    for name, (function, unfused) in cases.items():
        operator = an_operator(f"{name}_{str(dtype)[6:]}", function)
        register_unfused(operator, unfused)
        (refusal,) = import_graph(traced(operator, x)).refusals
        assert re.search("away from|NaN or Inf|shows nothing", refusal.detail), (name, refusal.detail)
        library_operators._by_name.clear()
        register_unfused(operator, function)
        assert bool(import_graph(traced(operator, x)).refusals) is (name in ("never_finite", "zero")), name


def test_no_operator_gets_an_index_out_of_bounds(catalogue: Fused) -> None:
    seen: list[int] = []

    def pick(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        seen.extend((int(at.min()), int(at.max())))
        return table[at.clamp(-9, 8)]

    _ops.define("pick(Tensor table, Tensor at) -> Tensor")
    _ops.impl("pick", pick, "CPU")
    torch.library.register_fake("autofuse_lib::pick", lambda table, at: table[at], lib=_ops)
    operator = torch.ops.autofuse_lib.pick.default
    register_unfused(operator, lambda table, at: table[at])
    table, at = torch.randn(9, 4), torch.zeros(8192, dtype=torch.long)
    assert not import_graph(traced(operator, table, at)).refusals
    assert min(seen) >= 0 and max(seen) < 9

    seen.clear()
    x = torch.rand(64)
    for call in (
        lambda x: torch.relu(operator(table, (x * 9).long())) * 2,  # an index that the node computes
        lambda x: torch.relu(operator(table, x.view(8, 8))) * x.sum(),
    ):
        routed(call, catalogue)(x)
        form = next(form for form in catalogue.forms if has_librarys(form))
        races, events = races_of(catalogue)
        races.stay(state_of(catalogue, form), make_unfused(without_librarys(form), ()), "c")
        assert ("random indices might be out of bounds" in events[0].message) is x.is_floating_point()
        assert min(seen) >= 0 and max(seen) < 9
        x, catalogue.routers = torch.randint(0, 9, (64,)), []


def test_a_refused_function_leaves_no_guards() -> None:
    back = with_a_word("guarded_back", "Tensor g", lambda x, g: g * 2)
    forward = with_a_word("guarded", "int n=0", lambda x, n=0: x * 2)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return back(ctx.saved_tensors[0], g)

    register_unfused(forward, lambda x, n: x * 2 if x.shape[0] == 6 else x + x)
    register_unfused(back, lambda x, g: g * 2 if x.shape[0] == 6 else g + g)
    catalogue = Undecided()
    fast = routed(lambda x: (torch.relu(Function.apply(x.sin() * 1.5)).cos() * 2).sum(), catalogue)
    for rows in (6, 10, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)  # which raises where the size is found to be one
        fast(x).backward()
        y = x.detach().clone().requires_grad_()
        (torch.relu(y.sin() * 3).cos() * 2).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert len(catalogue.routers) == 2 and all(r.program.symbols for r in catalogue.routers)
    assert not any(has_librarys(s.node.form) for r in catalogue.routers for s in r.program.slots)


def test_what_an_operator_draws_is_put_back_beside_other_threads() -> None:
    calls: list[int] = []

    def draws(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2 + 0 * torch.rand_like(x)

    operator = an_operator("draws_beside", draws)
    register_unfused(operator, lambda x: x * 2)
    done = threading.Event()
    other = threading.Thread(target=done.wait, name="of the script")
    other.start()
    try:
        for shape in ((6, 5), (7, 5)):
            before = torch.get_rng_state()
            (refusal,) = import_graph(traced(operator, torch.zeros(shape))).refusals
            assert torch.equal(before, torch.get_rng_state()) and refusal.detail == "the operator draws random numbers"
    finally:
        done.set()
        other.join()
    assert len(calls) == 2


def test_a_check_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def seen(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x * 2

    operator = an_operator("seen", seen)
    register_unfused(operator, lambda x: x * 2)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        graph = torch.fx.experimental.proxy_tensor.make_fx(operator)(torch.empty(2048, 4096))
    (refusal,) = import_graph(graph).refusals
    assert "64 MiB are too large to be checked" in refusal.detail and not shapes
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    assert not import_graph(make_fx(operator, tracing_mode="symbolic")(torch.empty(4096, 512))).refusals
    rows, columns = shapes[-1]
    assert len(shapes) == 5 and 8 <= rows * columns <= 1 << 19
    monkeypatch.setattr(check_unfused, "SECONDS", -1.0)
    (refusal,) = import_graph(traced(operator, torch.empty(3, 3))).refusals
    assert "takes longer" in refusal.detail


def test_what_the_schema_refuses() -> None:
    for name, schema, words in (
        ("w1", "w1(Tensor(a!) x) -> Tensor", "writes to its arguments"),
        ("w2", "w2(Tensor(a) x) -> Tensor(a)", "returns a part of an argument"),
        ("w3", "w3(Tensor x) -> Tensor[]", "something other than tensors"),
    ):
        _ops.define(schema)
        with pytest.raises(FusionError, match=words):
            register_unfused(f"autofuse_lib::{name}", lambda x: x)
    _ops.define("w4(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    with pytest.raises(FusionError, match="draws random numbers"):
        register_unfused("autofuse_lib::w4", lambda x: x)
    with pytest.raises(FusionError, match="not a library's"):
        register_unfused(torch.ops.aten.relu.default, lambda x: x)
    with pytest.raises(TypeError, match="import its library first"):
        register_unfused("autofuse_lib::absent", lambda x: x)
    with pytest.raises(TypeError, match="expected a function"):
        register_unfused(scaled, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected an operator made"):
        register_unfused(torch.relu, lambda x: x)
    with pytest.raises(TypeError, match="expected one overload"):
        register_unfused(torch.ops.aten.add, lambda x: x)


def test_an_operator_that_is_registered_twice() -> None:
    register_unfused(scaled, _scaled)
    register_unfused("autofuse_lib::scaled", _scaled)  # a module that is loaded again
    with pytest.raises(FusionError, match=r"one function for autofuse_lib::scaled, found a second: .*_scaled_back"):
        register_unfused(torch.ops.autofuse_lib.scaled, _scaled_back)


def test_functions_of_one_name_are_compared() -> None:
    operator = an_operator("named", lambda x: x * 2)
    for function in (lambda x: x * 2, lambda x: x * 2, torch.add, torch.add):
        library_operators._by_name.clear()
        register_unfused(operator, function)
        register_unfused(operator, function)
    library_operators._by_name.clear()
    register_unfused(operator, lambda x: x * 2)
    register_unfused(operator, lambda x: x * 2)  # the same, on another line
    with pytest.raises(FusionError, match=r"found a second: .*lambda"):
        register_unfused(operator, lambda x: x * 3)

    def times(by: float) -> Callable[..., Any]:
        return lambda x: x * by

    for make in (times, lambda by: partial(torch.mul, other=by)):
        library_operators._by_name.clear()
        register_unfused(operator, make(2.0))
        register_unfused(operator, make(2.0))
        with pytest.raises(FusionError, match="found a second"):
            register_unfused(operator, make(3.0))


def test_operators_whose_names_in_nodes_are_one() -> None:
    found = []
    for namespace, name in (("autofuse_a__b", "c"), ("autofuse_a", "b__c")):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"{name}(Tensor x) -> Tensor")
        found.append((library, f"{namespace}::{name}"))
    register_unfused(found[0][1], _scaled)
    with pytest.raises(FusionError, match="names in nodes differ, found autofuse_a::b__c after autofuse_a__b::c"):
        register_unfused(found[1][1], _scaled)


# ---- how an operator may be called ----------------------------------------------------------------------------------


def test_under_autocast_and_with_sizes_that_change(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    w = torch.rand(40) + 0.5

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(scaled(x, w)) * 2

    fast = routed(call, catalogue)
    for rows in (6, 7, 33):
        x = torch.randn(rows, 40)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            torch.testing.assert_close(fast(x), call(x))
    assert len(catalogue.routers) == 1 and any(map(has_librarys, catalogue.forms))


def test_under_vmap(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    x, w = torch.randn(3, 6, 40), torch.rand(40) + 0.5

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: scaled(row, w))(x) * 2 + 1

    torch.testing.assert_close(routed(call, catalogue)(x), call(x))


def test_arguments_by_name_and_by_default(catalogue: Fused) -> None:
    seen: list[tuple[Any, ...]] = []

    def function(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append((type(eps), eps))
        return _scaled(x, w, eps)

    register_unfused(scaled, function)
    x, w = torch.randn(6, 40), torch.rand(40)
    for call in (lambda x: scaled(x, w) + 1, lambda x: scaled(w=w, x=x, eps=0.5) + 1):
        torch.testing.assert_close(routed(call, catalogue)(x), call(x))
    assert seen[0] == (float, 1e-6) and (float, 0.5) in seen


def with_a_word(name: str, argument: str, function: Callable[..., Any]) -> Any:
    """An operator of ``x`` and one more argument, which does as ``function`` says."""
    if not hasattr(torch.ops.autofuse_lib, name):
        _ops.define(f"{name}(Tensor x, {argument}) -> Tensor")
        _ops.impl(name, function, "CPU")
        torch.library.register_fake(f"autofuse_lib::{name}", lambda x, *a, **k: torch.empty_like(x), lib=_ops)
    return getattr(torch.ops.autofuse_lib, name).default


@pytest.mark.parametrize("name", ["layout", "device", "pin_memory"])
def test_arguments_by_the_names_of_places_count(catalogue: Fused, name: str) -> None:
    operator = with_a_word(f"of_{name}", f"*, int {name}=0", lambda x, **k: x * 2 + k.get(name, 0))
    register_unfused(operator, lambda x, **k: x * 2 + k[name])
    x = torch.randn(6, 5)
    for given in (0, 1):
        call = partial(lambda x, given: torch.relu(operator(x, **{name: given})) * 2, given=given)
        assert torch.equal(routed(call, catalogue)(x), call(x))
        assert sum(map(has_librarys, catalogue.forms)) == given + 1
    graph = traced(lambda x: operator(x, **{name: 1}), x)
    library_operators._by_name.clear()
    register_unfused(operator, lambda x, **k: x * 2)
    assert import_graph(graph).refusals, "the function forgets it"


def test_words_among_the_arguments_stay_words(catalogue: Fused) -> None:
    def in_words(x: torch.Tensor, names: str, *, dtype: str = "sum") -> torch.Tensor:
        return {"float32 int4": x * 2, "float16 sum": x * 3}[f"{names} {dtype}"]

    operator = with_a_word("in_words", "str names, *, str dtype='sum'", in_words)
    register_unfused(operator, in_words)
    x = torch.randn(6, 5)
    for call in (
        lambda x: torch.relu(operator(x, "float32", dtype="int4")) * 2,
        lambda x: torch.relu(operator(x, "float16")) * 2,
    ):
        assert torch.equal(routed(call, catalogue)(x), call(x))
        catalogue.keeps = not catalogue.keeps
    assert sum(map(has_librarys, catalogue.forms)) == 2


def test_words_that_no_store_reads_back_are_refused() -> None:
    operator = with_a_word("padded", "str mode", lambda x, mode: x * 2)
    register_unfused(operator, lambda x, mode: x * 2)
    (refusal,) = import_graph(traced(lambda x: operator(x, "zero-pad"), torch.randn(6, 5))).refusals
    assert "the call cannot be stored" in refusal.detail and "zero-pad" in refusal.detail
    assert not import_graph(traced(lambda x: operator(x, "zeros"), torch.randn(6, 5))).refusals


def test_an_operator_that_is_defined_anew(catalogue: Fused) -> None:
    catalogue.keeps = True
    x = torch.randn(6, 5)
    for number in (1, 2):
        anew = _defined(f"anew {number}")
        register_unfused(anew, _twice)
        torch._dynamo.reset()
        fast = routed(lambda x, op=anew: torch.relu(op(x)) * 3, catalogue)
        for _ in range(2):
            CALLS.clear()
            assert torch.equal(fast(x), torch.relu(x * 2) * 3)
        assert [f"anew {number}"] == CALLS
        call: Any = make_unfused(next(form for form in catalogue.forms if has_librarys(form)), ())
        assert call.__globals__["op_library_autofuse_lib__anew_default"] is anew._opoverload


def _defined(name: str) -> Any:
    @torch.library.custom_op("autofuse_lib::anew", mutates_args=())
    def anew(x: torch.Tensor) -> torch.Tensor:
        CALLS.append(name)
        return x * 2

    anew.register_fake(torch.empty_like)
    return anew


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# ---- where the operator does not exist ------------------------------------------------------------------------------


def node(catalogue: Fused) -> NodeForm:
    register_unfused(scaled, _scaled)
    w = torch.rand(40)
    routed(lambda x: torch.relu(scaled(x, w)) * 2, catalogue)(torch.randn(6, 40))
    return next(form for form in catalogue.forms if has_librarys(form))


def test_a_worker_runs_what_the_operator_computes(catalogue: Fused) -> None:
    form = node(catalogue)
    stored = NodeForm.from_json(form.to_json())
    assert stored == form
    library_operators._by_name.clear()
    library_operators._by_operator.clear()
    plain = without_librarys(stored)
    inputs = [torch.randn(item.spec.shape.bind({})) for item in plain.inputs]
    (found,), (exact,) = (
        run_unfused(plain, inputs, {}),
        run_unfused(to_float64(plain), [t.double() for t in inputs], {}),
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(FusionError, match="to be registered in this process"):
        overload("library.autofuse_lib__scaled.default")
    assert cut_strategies(stored) == []


def test_the_file_of_a_node_has_what_the_operator_computes(catalogue: Fused, generator: FusionKernelGenerator) -> None:
    form = node(catalogue)
    made = generator.generate_generic_kernel(form)
    text = repro(form, KernelSource(made.key, made.name, made.source, 0, {}), {}, 1, "repro.py")
    assert "rsqrt" in text and "autofuse_lib" not in text.replace(made.source, "")


def test_no_operator_of_a_library_without_what_it_computes(catalogue: Fused) -> None:
    data = node(catalogue).to_json()
    assert info("library.a__b.default").kind is OpKind.COMPOSITE
    for op in data["operations"]:
        op.pop("body", None)
    from autofuse.fusion.node import space_of

    op = next(op for op in NodeForm.from_json(data).operations if op.target.startswith("library."))
    assert space_of(op, NodeForm.from_json(data).spec) is None


# ---- the race in the script -----------------------------------------------------------------------------------------


def races_of(catalogue: Fused) -> tuple[own_kernels.OwnKernels, list[Event]]:
    events: list[Event] = []
    context: Any = SimpleNamespace(
        settings=SimpleNamespace(tuner=SimpleNamespace(margin=0.03)),
        store_thread=SimpleNamespace(post_event=events.append),
    )
    return own_kernels.OwnKernels(context), events


def state_of(catalogue: Fused, form: NodeForm) -> Any:
    return next(n for r in catalogue.routers for plan in r.all_plans() for n in plan.nodes if n.form == form)


def test_a_race_that_raises_leaves_the_operator(catalogue: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    form = node(catalogue)
    races, events = races_of(catalogue)
    state, calls = state_of(catalogue, form), []

    def raises(*inputs: torch.Tensor) -> Any:
        calls.append(inputs)
        raise RuntimeError("no memory")

    assert races.stay(state, raises, "c") and races.stay(state, raises, "c")
    assert len(calls) == 1 and "RuntimeError: no memory" in events[0].message
    monkeypatch.setattr(own_kernels, "MOST_BYTES", 100)
    races, events = races_of(catalogue)
    assert races.stay(state, raises, "c") and len(calls) == 1 and "too large to be raced" in events[0].message


def test_a_long_call_is_raced_once(catalogue: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    form = node(catalogue)
    races, events = races_of(catalogue)
    state = state_of(catalogue, form)
    monkeypatch.setattr(own_kernels, "SECONDS", 0.0)
    CALLS.clear()
    races.stay(state, make_unfused(without_librarys(form), ()), "c")
    assert len(CALLS) == 2 and len(events) == 1


def test_a_better_kernel_may_still_run(catalogue: Fused) -> None:
    register_unfused(scaled, _scaled)
    catalogue.keeps = True
    w, x = torch.rand(40), torch.randn(6, 40)
    fast = routed(lambda x: torch.relu(scaled(x, w)) * 2, catalogue)
    fast(x)
    (router,) = catalogue.routers
    (plan,) = router.all_plans()
    assert "with the script's own kernel" in routes_text("forward", (), plan) and not router.refresh(plan)
    catalogue.keeps = False
    assert not router.refresh(plan), "the same kernel is not raced again"
    catalogue.tag = "another"
    assert router.refresh(plan) and "kernel another" in routes_text("forward", (), plan)
    CALLS.clear()
    torch.testing.assert_close(fast(x), torch.relu(_scaled(x, w, 1e-6)) * 2)
    catalogue.tag = "c"
    assert router.refresh(plan) and "with the script's own kernel" in routes_text("forward", (), plan)
    assert torch.equal(fast(x), torch.relu(scaled(x, w)) * 2) and not catalogue.failed


def test_whatever_is_raised_for_a_kernel_its_node_runs(catalogue: Fused, monkeypatch: pytest.MonkeyPatch) -> None:
    register_unfused(scaled, _scaled)

    def raises(*args: Any) -> bool:
        raise ZeroDivisionError("of a host")

    monkeypatch.setattr(catalogue, "keeps_own", raises)
    w, x = torch.rand(40), torch.randn(6, 40)
    fast = routed(lambda x: torch.relu(scaled(x, w)) * 2, catalogue)
    for _ in range(2):
        assert torch.equal(fast(x), torch.relu(scaled(x, w)) * 2)
    assert catalogue.failed


@pytest.mark.parametrize(("ours", "stays"), [(0.5, False), (0.99, True), (1.2, True)])
def test_the_faster_of_the_two_runs(
    catalogue: Fused, monkeypatch: pytest.MonkeyPatch, ours: float, stays: bool
) -> None:
    form = node(catalogue)
    state = state_of(catalogue, form)
    fused = make_unfused(without_librarys(form), ())
    monkeypatch.setattr(own_kernels, "_seconds", lambda call, *rest: ours if call is fused else 1.0)
    races, events = races_of(catalogue)
    before = torch.get_rng_state()
    assert races.stay(state, fused, "c") is stays and races.stay(state, fused, "c") is stays
    assert torch.equal(before, torch.get_rng_state()) and len(events) == 1
    assert ("the script's own kernel stays" in events[0].message) is stays
    assert "autofuse_lib::scaled" in events[0].message and events[0].kind == "own_kernel"
