"""Views cost nothing and never move an element: random chains of them against aten."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofuse.codegen.loops import check
from autofuse.codegen.lowering.index import Atom, join, regroup, resolve
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import LoweringError
from autofuse.ir.operation import ValueRef
from autofuse.ir.shape import SymbolicShape, symbol
from tests.codegen.conftest import Verify
from tests.codegen.nodes import NodeBuilder

KINDS = ("view", "permute", "expand", "squeeze", "unsqueeze", "add", "exp", "sum", "transpose")


@st.composite
def chains(draw: st.DrawFn) -> NodeBuilder:
    """A few views and pointwise operations on up to two inputs."""
    b = NodeBuilder()
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    x = torch.zeros(shape)
    if draw(st.booleans()):
        x = x.permute(*draw(st.permutations(range(x.ndim))))
    value = b.input(x)
    for _ in range(draw(st.integers(1, 5))):
        tensor = b.tensors[value]
        kind = draw(
            st.sampled_from(["view", "permute", "expand", "squeeze", "unsqueeze", "add", "exp", "sum", "transpose"])
        )
        if kind == "view" and tensor.is_contiguous():
            value = b.call("aten.view.default", value, draw(st.sampled_from(_factorings(tensor.numel()))))
        elif kind == "permute":
            value = b.call("aten.permute.default", value, list(draw(st.permutations(range(tensor.ndim)))))
        elif kind == "expand":
            sizes = [draw(st.sampled_from([1, 3])) if s == 1 else s for s in tensor.shape]
            value = b.call("aten.expand.default", value, [2, *sizes] if tensor.ndim < 4 else sizes)
        elif kind == "squeeze" and tensor.ndim:
            value = b.call("aten.squeeze.dim", value, draw(st.integers(0, tensor.ndim - 1)))
        elif kind == "unsqueeze" and tensor.ndim < 5:
            value = b.call("aten.unsqueeze.default", value, draw(st.integers(-tensor.ndim - 1, tensor.ndim)))
        elif kind == "transpose" and tensor.ndim >= 2:
            value = b.call("aten.transpose.int", value, 0, tensor.ndim - 1)
        elif kind == "add":
            keep = [s if draw(st.booleans()) else 1 for s in tensor.shape]
            value = b.call("aten.add.Tensor", value, b.input(torch.zeros(keep)))
        elif kind == "exp":
            value = b.call("aten.mul.Scalar", value, 2.0)
        elif kind == "sum" and tensor.ndim:
            value = b.call("aten.sum.dim_IntList", value, [draw(st.integers(0, tensor.ndim - 1))], draw(st.booleans()))
    b.last = b.call("aten.clone.default", value, memory_format="contiguous_format")  # type: ignore[attr-defined]
    return b


def _factorings(numel: int) -> list[list[int]]:
    found = [[numel], [1, numel]]
    found += [[d, numel // d] for d in range(2, numel) if numel % d == 0]
    found += [[a, b, numel // a // b] for a in (2, 3) for b in (2, 3, 4) if numel % (a * b) == 0]
    return found


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains())
def test_chains_lower_to_valid_kernels_or_say_why(b: NodeBuilder) -> None:
    """Cheap: no compilation."""
    try:
        kernel = lower(b.form(b.last))  # type: ignore[attr-defined]
    except LoweringError as error:
        assert error.code in ("reductions", "sink_reused", "view", "disjoint", "views", "reduction")
        return
    assert check(kernel) == []


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains())
def test_chains_compute_what_aten_computes(verify: Verify, b: NodeBuilder) -> None:
    try:
        form = b.form(b.last)  # type: ignore[attr-defined]
        lower(form)
    except LoweringError:
        return
    verify(form, [()], ("normal",))


def test_a_view_splits_an_atom_once_for_all() -> None:
    batch, time = symbol("s0"), symbol("s1")
    flat = Atom(batch * time)
    first = regroup(((flat,),), SymbolicShape((batch, time)))
    second = regroup(((flat,),), SymbolicShape((batch, time)))
    assert [resolve(w) for w in first] == [resolve(w) for w in second]
    assert [p.size for w in first for p in resolve(w)] == [batch, time]


def test_join_keeps_two_dims_of_one_tensor_apart() -> None:
    a, b = Atom(4), Atom(4)
    a.owners.add("x")
    b.owners.add("x")
    assert not join((a,), (b,))


def test_sizes_that_are_not_provably_equal_are_refused() -> None:
    with pytest.raises(LoweringError, match="provably equal"):
        join((Atom(symbol("s0")),), (Atom(symbol("s1")),))


@pytest.mark.parametrize("sizes", [(3, 4), (3, 2, 2), (12,), (1, 6, 1, 2)])
def test_views_of_a_permuted_tensor(sizes: tuple[int, ...], verify: Verify) -> None:
    b = NodeBuilder()
    x = b.input(torch.zeros(4, 3).t())
    copy = b.call("aten.clone.default", x, memory_format="contiguous_format")
    out = b.call("aten.exp.default", b.call("aten.view.default", copy, list(sizes)))
    assert math.prod(sizes) == 12
    verify(b.form(out), [()])


def test_one_tensor_under_two_indices(verify: Verify) -> None:
    b = NodeBuilder()
    x = b.input(torch.zeros(6, 6))
    y = b.call("aten.exp.default", x)
    out = b.call("aten.add.Tensor", y, b.call("aten.t.default", y))
    assert isinstance(out, ValueRef)
    verify(b.form(out), [()])
