"""Attention by hand and of torch, its strategies, and each strategy against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from autofuse.strategies.enumeration import strategies_of
from autofuse.wrapper.node_call import CallSite, make_launcher
from tests.strategies.harness import check, load, one_group, plan, strategy
from tests.strategies.modules import by_hand, heads, qkv

T = torch.Tensor


def masked(q: T, k: T, v: T, mask: T) -> T:
    scores = (q @ k.transpose(-2, -1)) / 4.0
    return torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ v


def biased(q: T, k: T, v: T, bias: T) -> T:
    return torch.softmax((q @ k.transpose(-2, -1)) * 0.25 + bias, dim=-1) @ v


ATTENTIONS: dict[str, tuple[Callable[..., T], list[T], list[tuple[int, int]]]] = {
    "four dims": (by_hand, qkv(2, 3, 10, 16), [(0, 2), (1, 2), (2, 2)]),
    "three dims": (by_hand, qkv(6, 10, 16), [(0, 1), (1, 1), (2, 1)]),
    "heads": (heads(by_hand), qkv(2, 10, 64), [(0, 1), (1, 1), (2, 1)]),
    "causal": (heads(masked), [*qkv(2, 10, 64), torch.ones(10, 10).tril()], []),
    "padding": (heads(masked), [*qkv(2, 10, 64), (torch.rand(2, 1, 1, 10) > 0.4).float()], []),
    "bias": (heads(biased), [*qkv(2, 10, 64), torch.randn(1, 4, 10, 10)], []),
    "cross": (by_hand, [torch.randn(2, 3, 7, 16), torch.randn(2, 3, 11, 16), torch.randn(2, 3, 11, 16)], []),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_by_hand_has_torchs_own_as_a_way(name: str) -> None:
    function, inputs, dynamic = ATTENTIONS[name]
    with torch.no_grad():
        (planned,) = plan(function, inputs, dynamic)
    group = one_group([planned])
    assert group.kind == "attention"
    fused = strategy(group, "sdpa")
    assert sum(op.target == "vendor.sdpa.default" for op in fused.form.operations) == 1
    assert not any(op.short_name in ("bmm", "_softmax") for op in fused.form.operations)
    symbols = group.node.form.symbols
    values = [(n,) * len(symbols) for n in (2, 5, 33)] if symbols else [()]
    for kind in strategies_of(group.node.form):
        check(group.node.form, kind, values)
        check(group.node.form, kind, values[-1:], ("special", "large", "zeros"))


def test_a_result_that_is_turned_twice_is_no_merging_of_heads() -> None:
    def turned(q: T, k: T, v: T) -> T:
        return by_hand(q, k, v).transpose(2, 3).transpose(1, 2).contiguous()  # as many rows as channels

    with torch.no_grad():
        (planned,) = plan(turned, qkv(2, 3, 16, 16))
    for group in planned.groups:
        for kind in strategies_of(group.node.form):
            check(group.node.form, kind, [()])


def test_a_row_without_any_key_gives_what_softmax_gives() -> None:
    inputs = [*qkv(1, 4, 64), torch.ones(4, 4).tril()]
    inputs[3][2] = 0.0
    with torch.no_grad():
        (planned,) = plan(heads(masked), inputs)
        group = one_group([planned])
        call = load(strategy(group, "sdpa")).make_call(CallSite(group.node.form, (), 2))
        views = {i.name: i.spec for i in group.node.form.inputs}
        expected = heads(masked)(*inputs)
    assert expected.isnan().any() and views
    check(group.node.form, strategy(group, "sdpa"), [()])  # random masks of 60 % leave some rows empty
    assert call is not None


def test_attention_of_training_is_left_alone_with_its_reason() -> None:
    q = [t.requires_grad_() for t in qkv(1, 2, 8, 16)]
    graphs = plan(by_hand, q)
    forward = next(p for p in graphs if p.phase == "forward")
    assert [g.kind for g in forward.groups] == []
    assert any("backward" in r.detail for r in forward.refusals if r.code == "attention")


def test_dropout_inside_attention_keeps_eagers_numbers() -> None:
    def function(q: T, k: T, v: T) -> T:
        return F.dropout(torch.softmax(q @ k.transpose(-2, -1), -1), 0.1, True) @ v

    with torch.no_grad():
        (planned,) = plan(function, qkv(1, 2, 8, 16))
    assert planned.groups == []
    assert any("random numbers" in r.detail for r in planned.refusals)


def test_dropouts_outside_of_training_stand_in_no_chains_way() -> None:
    """They are copies in the captured graph."""

    def attention(q: T, k: T, v: T) -> T:
        scores = q @ k.transpose(-2, -1) * 0.25
        return F.dropout(torch.softmax(scores, -1), 0.1, training=False) @ v

    def linear(x: T, w: T, b: T, r: T) -> T:
        return r + F.dropout(F.linear(x, w, b), 0.1, training=False)

    with torch.no_grad():
        first = one_group(plan(attention, qkv(2, 3, 10, 16)))
        second = one_group(plan(linear, [torch.randn(4, 6), torch.randn(5, 6), torch.randn(5), torch.randn(4, 5)]))
    for group, name in ((first, "sdpa"), (second, "onednn_linear")):
        check(group.node.form, strategy(group, name), [()])


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_torch_may_be_generated(causal: bool) -> None:
    def function(q: T, k: T, v: T) -> T:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = [torch.randn(3, 40, 2, 32).transpose(1, 2) for _ in range(3)]
    with torch.no_grad():
        group = one_group(plan(function, inputs, [(0, 0), (1, 0), (2, 0)]))
    generated = strategy(group, "generated_attention")
    assert group.kind == "attention" and [part.printer for part in generated.parts] == ["attention"]
    check(group.node.form, generated, [(1,), (2,), (7,)], ("normal", "special", "zeros"))


def test_attention_that_is_not_finite_is_eagers_to_the_bit() -> None:
    inputs = [torch.randn(2, 3, 20, 32) for _ in range(3)]
    with torch.no_grad():
        group = one_group(plan(F.scaled_dot_product_attention, inputs))
        for n, value in ((0, math.nan), (1, math.inf), (2, -math.inf)):
            odd = [t.clone() for t in inputs]
            odd[n][1, 2, 7, 5] = value
            generated = load(strategy(group, "generated_attention"))
            found = make_launcher(group.node.form, generated, (), 2)(*odd)
            (found, *_) = found if isinstance(found, tuple) else (found,)
            torch.testing.assert_close(found, F.scaled_dot_product_attention(*odd), rtol=0, atol=0, equal_nan=True)
