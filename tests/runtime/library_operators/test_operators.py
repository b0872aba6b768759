"""Libraries' operators as what was registered for them: fused with their neighbours, or as the script calls them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autofuse import library_operators, register_unfused
from autofuse.capture.graph_import import import_graph
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.reference import run_unfused, to_float64
from autofuse.db.rows import KernelSource
from autofuse.errors import FusionError
from autofuse.ir.composites import has_librarys, without_librarys
from autofuse.ir.operation import NodeForm
from autofuse.ir.optable import OpKind, info
from autofuse.strategies.enumeration import cut_strategies
from autofuse.wrapper.aten_call import overload
from autofuse.wrapper.node_call import make_unfused
from autofuse.wrapper.repro import repro
from tests.runtime.graphs.test_routed_graphs import Undecided, routed
from tests.runtime.library_operators.shared import (
    CALLS,
    Fused,
    Net,
    _scaled,
    _scaled_back,
    compare,
    node,
    scaled,
    traced,
    with_a_word,
)


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
