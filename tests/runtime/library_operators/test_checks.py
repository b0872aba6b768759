"""Which functions are taken for what a library's operator computes, and which are refused with their evidence."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from autofuse import library_operators, register_unfused
from autofuse.capture import check_unfused
from autofuse.capture.graph_import import import_graph
from autofuse.errors import FusionError
from autofuse.ir.composites import has_librarys, without_librarys
from autofuse.ir.records import Refusal
from autofuse.wrapper.node_call import make_unfused
from tests.runtime.graphs.test_routed_graphs import Undecided, routed
from tests.runtime.library_operators.shared import (
    Fused,
    _ops,
    _scaled,
    _scaled_back,
    an_operator,
    races_of,
    scaled,
    state_of,
    traced,
    with_a_word,
)

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
