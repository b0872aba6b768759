"""Attention printed in C, both passes: held against float64 relative to the error of torch's own kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autofuse.codegen.c.templates.attention import (
    BLOCKS,
    TEMPLATE,
    attention_knobs,
)
from autofuse.codegen.generator import CompiledKernel, FusionKernelGenerator
from autofuse.codegen.knobs import default_config
from autofuse.codegen.templates import refusal
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.optable import ATTENTION_BACKWARD, ATTENTION_FORWARD
from autofuse.ir.records import make_config
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, contiguous_strides, symbol
from tests.codegen.compare import Answers, problems, problems_of_draws

B, T, S = symbol("s0"), symbol("s1"), symbol("s2")
HEADS = 3
MASKS: dict[str, tuple[Dim, ...] | None] = {
    "none": None,
    "scores": (T, S),
    "batch": (B, 1, T, S),
    "keys": (B, 1, 1, S),
    "all": (B, HEADS, T, S),
}
_aten = torch.ops.aten
CALLS: dict[str, Any] = {
    ATTENTION_FORWARD: _aten._scaled_dot_product_flash_attention_for_cpu,
    ATTENTION_BACKWARD: _aten._scaled_dot_product_flash_attention_for_cpu_backward,
}


def spec(dims: tuple[Dim, ...], heads_last: bool = False, dtype: str = "float32") -> TensorSpec:
    """Dense, or as torch's kernels write: [B, T, H, D] in memory, seen as [B, H, T, D]."""
    order = (dims[0], dims[2], dims[1], *dims[3:]) if heads_last else dims
    strides = list(contiguous_strides(order))
    if heads_last:
        strides[1], strides[2] = strides[2], strides[1]
    return TensorSpec(SymbolicShape(dims), dtype, SymbolicShape(strides), "cpu")


def attention(
    width: int = 64,
    mask: tuple[Dim, ...] | None = None,
    causal: bool = False,
    scale: float | None = None,
    backward: bool = False,
    heads_last: bool = True,
    dtype: str = "float32",
    dropout: float = 0.0,
    sizes: tuple[Dim, Dim] = (T, S),
) -> NodeForm:
    rows, keys = (B, HEADS, sizes[0], width), (B, HEADS, sizes[1], width)
    result, sums = spec(rows, heads_last, dtype), spec((B, HEADS, sizes[0]), True, dtype)
    specs = [spec(rows, heads_last, dtype), *[spec(keys, heads_last, dtype)] * 2]
    if backward:
        specs = [result, *specs, result, sums]
    refs = [ValueRef(f"i{n}") for n in range(len(specs))]
    kwargs: tuple[tuple[str, Any], ...] = (("scale", scale),)
    if mask is not None:
        specs.append(spec(mask, dtype=dtype))
        kwargs = (("attn_mask", ValueRef(f"i{len(specs) - 1}")), *kwargs)
    outputs = (spec(rows, True, dtype), *[spec(keys, True, dtype)] * 2) if backward else (result, sums)
    op = Operation(
        "v0", ATTENTION_BACKWARD if backward else ATTENTION_FORWARD, (*refs, dropout, causal), kwargs, outputs
    )
    inputs = tuple(NodeInput(f"i{n}", s) for n, s in enumerate(specs))
    used = ("s0", "s1", "s2")
    return NodeForm(inputs, (op,), tuple(ValueRef("v0", n) for n in range(len(outputs))), used)


def operands(form: NodeForm, sizes: dict[str, int], seed: int = 0) -> list[torch.Tensor]:
    """Of a backward pass result and sums are those that the forward pass gives."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for item in form.inputs:
        shape, strides = item.spec.shape.bind(sizes), item.spec.strides.bind(sizes)
        found.append(torch.empty_strided(shape, strides).copy_(torch.randn(shape, generator=generator)))
    (op,) = form.operations
    if op.target == ATTENTION_BACKWARD:
        out, sums = eager(form, found, ATTENTION_FORWARD)
        found[4], found[5] = found[4].copy_(out), found[5].copy_(sums)
    return found


def eager(form: NodeForm, inputs: list[torch.Tensor], target: str | None = None) -> tuple[torch.Tensor, ...]:
    (op,) = form.operations
    target = target or op.target
    count = 6 if op.target == ATTENTION_BACKWARD else 3
    mask = inputs[count] if len(inputs) > count else None
    given = inputs[:count]
    if count == 6 and target == ATTENTION_FORWARD:
        given = inputs[1:4]
    result: tuple[torch.Tensor, ...] = CALLS[target](
        *given, 0.0, op.args[-1], attn_mask=mask, scale=op.kwarg("scale", None)
    )
    return result


def exact(form: NodeForm, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """In float64 by products; the sums too."""
    (op,) = form.operations
    first = 1 if op.target == ATTENTION_BACKWARD else 0
    wide = [t.double() for t in inputs]
    q, k, v = (t.requires_grad_() for t in wide[first : first + 3])
    scale = op.kwarg("scale", None)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if len(inputs) > (6 if first else 3):
        scores = scores + wide[-1]
    if op.args[-1]:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    out = torch.softmax(scores, -1) @ v
    if first:
        return torch.autograd.grad(out, (q, k, v), wide[0])
    return out.detach(), scores.logsumexp(-1).detach()


def forward_of(form: NodeForm) -> NodeForm:
    """The forward pass whose backward pass this is."""
    (op,) = form.operations
    heads_last = form.inputs[1].spec.strides == spec(tuple(form.inputs[1].spec.shape), True).strides
    mask = tuple(form.inputs[6].spec.shape) if len(form.inputs) > 6 else None
    width = form.inputs[0].spec.shape[3]
    assert isinstance(width, int)
    return attention(width, mask, bool(op.args[-1]), op.kwarg("scale", None), False, heads_last)


@functools.cache
def compiled(form: NodeForm, rows: int) -> CompiledKernel:
    return FusionKernelGenerator().generate_generic_kernel(form, make_config({"rows": rows}))


def check(form: NodeForm, sizes: tuple[int, int, int], threads: int = 2, rows: int = BLOCKS[0], seed: int = 0) -> None:
    """Both passes from one source, as eager's are: where few keys count, rounding of scores is the same in both."""

    def draw(number: int) -> Answers:
        inputs = operands(form, dict(zip(("s0", "s1", "s2"), sizes, strict=True)), seed + 1000 * number)
        wanted = eager(form, inputs)
        if form.operations[0].target == ATTENTION_BACKWARD:
            for own, given in zip(
                compiled(forward_of(form), rows)(*inputs[1:4], *inputs[6:]), inputs[4:6], strict=True
            ):
                given.copy_(own)
        found = compiled(form, rows)(*inputs, threads=threads)
        assert [t.stride() for t in found] == [t.stride() for t in wanted] or min(sizes) == 1
        return found, wanted, exact(form, inputs)

    wrong = problems_of_draws(draw)
    assert not wrong, (sizes, wrong)


SIZES = [(1, 1, 2), (2, 1, 9), (3, 7, 5), (2, 48, 48), (1, 57, 57), (2, 97, 33), (1, 33, 130), (1, 200, 200)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", MASKS)
def test_awkward_sizes_under_every_mask(mask: str, backward: bool) -> None:
    form = attention(mask=MASKS[mask], backward=backward)
    for sizes in SIZES:
        check(form, sizes)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("width", [16, 32, 48, 64, 80, 128])
def test_causal_heads_of_every_width(width: int, backward: bool) -> None:
    form = attention(width, causal=True, backward=backward, scale=0.3)
    for sizes in SIZES[2:]:  # gradients of a row's only key are 0 but for rounding
        if sizes[1] >= sizes[2]:  # the others are eager's
            check(form, sizes)


FORMS = [
    attention(backward=backward, causal=causal, mask=mask, heads_last=heads_last)
    for backward, causal, mask, heads_last in [
        (False, True, None, True), (False, False, MASKS["batch"], False), (True, True, None, False),
        (True, False, MASKS["batch"], True),
    ]
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 150), st.integers(1, 150)),
    threads=st.integers(1, 3),
    rows=st.sampled_from(BLOCKS),
)
def test_any_sizes(form: NodeForm, sizes: tuple[int, int, int], threads: int, rows: int) -> None:
    op = form.operations[0]
    assume(op.target == ATTENTION_FORWARD or min(sizes[1:]) > 4)  # of one key, 0 but for rounding
    if op.args[-1] and sizes[1] < sizes[2]:
        with pytest.raises(FloatingPointError):
            compiled(form, rows)(*operands(form, dict(zip(("s0", "s1", "s2"), sizes, strict=True))), threads=threads)
    else:
        check(form, sizes, threads, rows, seed=sum(sizes))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_sums_over_many_keys_round_no_oftener_than_eagers(backward: bool) -> None:
    form, sizes = attention(backward=backward), {"s0": 1, "s1": 40, "s2": 5000}
    inputs = operands(form, sizes)
    inputs[3 if backward else 2] += 1.0  # values with a mean: errors add up
    if backward:
        for kept, made in zip(inputs[4:6], eager(form, inputs, ATTENTION_FORWARD), strict=True):
            kept.copy_(made)
    found = compiled(form, BLOCKS[0])(*inputs)
    assert not problems(list(found), list(eager(form, inputs)), list(exact(form, inputs)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_what_is_not_finite_is_left_to_eager(value: float, backward: bool) -> None:
    form = attention(backward=backward)
    for n in range(4 if backward else 3):
        inputs = operands(form, {"s0": 2, "s1": 20, "s2": 30})
        inputs[n][1, 2, 7, 5] = value
        with pytest.raises(FloatingPointError):
            compiled(form, BLOCKS[0])(*inputs)
    for sizes in [(0, 3, 4), (2, 0, 4), (2, 3, 0)]:
        with pytest.raises(FloatingPointError):
            compiled(attention(), BLOCKS[0])(*operands(attention(), dict(zip(("s0", "s1", "s2"), sizes, strict=True))))


def test_gradients_beyond_float32_are_left_to_eager() -> None:
    form = attention(16, backward=True, scale=1.0)
    inputs = operands(form, {"s0": 1, "s1": 64, "s2": 64})
    inputs[0] *= 1e37
    inputs[1] *= 20.0
    inputs[2] *= 0.05
    for kept, made in zip(inputs[4:6], eager(form, inputs, ATTENTION_FORWARD), strict=True):
        kept.copy_(made)
    assert not all(t.isfinite().all() for t in eager(form, inputs))
    with pytest.raises(FloatingPointError):
        compiled(form, BLOCKS[0])(*inputs)


def test_scores_that_a_mask_hides_are_no_reason() -> None:
    form = attention(mask=MASKS["scores"])
    inputs = operands(form, {"s0": 2, "s1": 20, "s2": 30})
    inputs[3].masked_fill_(torch.rand(20, 30) < 0.5, -math.inf)[:, 0] = 0.0
    found = compiled(form, BLOCKS[0])(*inputs)
    assert not problems(list(found), list(eager(form, inputs)), list(exact(form, inputs)))
    inputs[3][4] = -math.inf  # a row without keys, as padding makes them
    found = compiled(form, BLOCKS[0])(*inputs)
    for own, other in zip(found, eager(form, inputs), strict=True):
        assert torch.equal(own[:, :, 4], torch.zeros_like(own[:, :, 4])) and torch.equal(other[:, :, 4], own[:, :, 4])
        assert torch.allclose(own, other, atol=1e-5)
    backward = attention(mask=MASKS["scores"], backward=True)
    given = [*operands(backward, {"s0": 2, "s1": 20, "s2": 30})[:4], *found, inputs[3]]
    for own, other in zip(compiled(backward, BLOCKS[0])(*given), eager(backward, given), strict=True):
        assert torch.allclose(own, other, atol=1e-5)
    inputs[0][0, 0, 4] = math.nan
    with pytest.raises(FloatingPointError):
        compiled(form, BLOCKS[0])(*inputs)


def test_gradients_after_the_forward_pass_of_torch() -> None:
    for form in (f for f in FORMS if f.operations[0].target == ATTENTION_BACKWARD):
        inputs = operands(form, {"s0": 3, "s1": 61, "s2": 61})
        found = compiled(form, BLOCKS[0])(*inputs)
        assert not problems(list(found), list(eager(form, inputs)), list(exact(form, inputs)))


def test_the_number_of_threads_changes_no_bit() -> None:
    for form in FORMS:
        inputs = operands(form, {"s0": 2, "s1": 70, "s2": 70})
        first = compiled(form, BLOCKS[0])(*inputs, threads=1)
        for threads in (2, 3):
            again = compiled(form, BLOCKS[0])(*inputs, threads=threads)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (attention(width=60), "width"),
        (attention(dropout=0.1), "dropout"),
        (attention(dtype="float64"), "dtype"),
        (attention(mask=(as_dim(5), S)), "mask"),
        (attention(mask=(as_dim(1), T, S)), "mask"),
        (attention(causal=True, scale=-0.3), "scale"),
        (attention(causal=True, sizes=(as_dim(5), as_dim(9))), "causal"),
        (NodeForm(attention().inputs, attention().operations, (ValueRef("v0", 1),), attention().symbols), "outputs"),
    ],
    ids=["width", "dropout", "float64", "mask", "mask of 3 dims", "scale", "short causal rows", "outputs"],
)
def test_what_torch_has_to_do_is_refused_with_a_reason(form: NodeForm, code: str) -> None:
    found = refusal(TEMPLATE, form)
    assert found is not None and found[0] == code


def test_the_default_is_a_block_of_the_first_size() -> None:
    assert default_config(attention_knobs(attention())) == make_config({"rows": BLOCKS[0]})
