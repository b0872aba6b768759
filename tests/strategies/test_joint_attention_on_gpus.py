"""Attention in training by the kernels that GPUs have, where there is none: their calls reach stand-ins on the CPU,
which take no more than the real ones do and keep what these keep; their shapes are those that torch gives for a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from autofuse.runtime.session import Session
from autofuse.strategies.enumeration import strategies_of
from autofuse.strategies.sdpa_kernels import KERNELS, Kernels, Operands
from autofuse.strategies.sdpa_training_match import SDPA_TRAINING
from tests.strategies.test_joint_attention import (
    FORMS,
    Captured,
    causal,
    check,
    mark,
    masked,
    padding,
    plain,
    qkv,
    session,
)

__all__ = ["session"]
T = torch.Tensor
SPOILED = 12345.0  # where the real kernel's results hold nothing of use
calls: list[str] = []


def hidden(query: T, key: T, bias: T | None, is_causal: bool, scale: float) -> T:
    """Scores in float64; the operands are such as CUTLASS takes."""
    assert all(t.stride(-1) == 1 for t in (query, key)) and query.dtype is not torch.float64
    scores = query.double() @ key.mT.double() * scale
    if bias is not None:
        assert not is_causal and bias.dtype is query.dtype and bias.shape == scores.shape
        assert bias.stride(-1) == 1 and all(s % 16 == 0 for s in bias.stride()[:-1])
        scores = scores + bias.double()
    return scores.masked_fill(causal(scores.shape[-1])[0, 0], -math.inf) if is_causal else scores


def efficient(
    query: T, key: T, value: T, attn_bias: T | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[T, T, T, T]:  # fmt: skip
    assert compute_log_sumexp and not dropout_p and scale is not None
    calls.append("forward")
    scores = hidden(query, key, attn_bias, is_causal, scale)
    rows = query.shape[-2]
    sums = torch.full((*query.shape[:-2], -(-rows // 32) * 32), math.inf)
    sums[..., :rows] = scores.logsumexp(-1)
    out = (scores.softmax(-1) @ value.double()).to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    nothing = torch.empty((), dtype=torch.int64)
    return out, sums, nothing, nothing


def efficient_backward(
    grad_out: T, query: T, key: T, value: T, attn_bias: T | None, out: T, logsumexp: T, philox_seed: T,
    philox_offset: T, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False, *,
    scale: float | None = None,
) -> tuple[T, T, T, T]:  # fmt: skip
    assert not dropout_p and scale is not None and list(grad_input_mask) == [True, True, True, False]
    assert logsumexp.shape[-1] % 32 == 0 and logsumexp.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    calls.append("backward")
    scores = hidden(query, key, attn_bias, is_causal, scale)
    weights = (scores - logsumexp[..., : query.shape[-2], None].double()).exp()
    wide = grad_out.double()
    inner = weights * (wide @ value.mT.double() - (wide * out.double()).sum(-1, keepdim=True)) * scale
    found = (inner @ key.double(), inner.mT @ query.double(), weights.mT @ wide)
    dq, dk, dv = (t.to(query.dtype) for t in found)
    return dq, dk, dv, torch.full((1,), SPOILED)


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """What a GPU's attention calls, on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_efficient_attention", efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward, "CPU")
    takes_float32 = replace(KERNELS["cuda"], takes=lambda operands: operands.query.dtype is torch.float32)
    monkeypatch.setitem(KERNELS, "cpu", takes_float32)
    calls.clear()
    yield KERNELS["cuda"]
    library._destroy()


@pytest.mark.parametrize("name", FORMS)
def test_both_passes_run_as_torchs_own(session: Session, gpu_kernels: Kernels, name: str) -> None:
    function, make = FORMS[name]
    captured = Captured(session, function)
    for size in (7, 33, 50):
        torch.manual_seed(size)
        check(captured, function, mark(make(size), size))
    wholes = captured.wholes
    assert wholes["forward"] == wholes["backward"] and wholes["forward"][0] >= 2, captured.reasons
    assert calls.count("forward") == calls.count("backward") >= 2


def test_a_square_mask_that_is_not_causal_is_taken(session: Session, gpu_kernels: Kernels) -> None:
    captured = Captured(session, masked)
    mask = causal(9).clone()
    mask[..., 0, 4] = False
    for _ in range(3):
        check(captured, masked, [*qkv(2, 3, 9, 16), mask])
    assert captured.wholes == {"forward": [2], "backward": [2]}


def test_nan_infinities_and_rows_without_keys_are_eagers(session: Session, gpu_kernels: Kernels) -> None:
    captured = Captured(session, masked)
    check(captured, masked, [*qkv(2, 3, 9, 16), padding(5, 9)])
    before = captured.wholes
    for place, value in ((0, math.nan), (1, math.inf), (2, -math.inf)):
        inputs = [*qkv(2, 3, 9, 16), padding(5, 9)]
        with torch.no_grad():
            inputs[place][0, 1, 2, 3] = value
        check(captured, masked, inputs)
    check(captured, masked, [*qkv(2, 3, 9, 16), padding(0, 9)])
    assert captured.wholes == before
    gradient = torch.ones(2, 3, 9, 16)
    gradient[0, 0, 1, 1] = math.nan
    for _ in range(9):  # it declined, and is asked again later
        check(captured, masked, [*qkv(2, 3, 9, 16), padding(5, 9)], gradient)
    assert captured.wholes["forward"] == captured.wholes["backward"] > before["forward"]


def test_kernels_that_add_up_in_any_order_are_not_taken_where_the_script_forbids_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda wanted: True)
    x = torch.randn(1, 1, 8, 16)
    operands = Operands(x, x, x, None, False, 1.0)
    takes = KERNELS["cuda"].takes
    assert takes is not None and takes(operands)
    torch.use_deterministic_algorithms(True)
    try:
        assert not takes(operands)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1, 16, 37, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "heads"])
def test_the_real_calls_have_the_shapes_that_are_kept(size: int, dtype: torch.dtype, mask: str) -> None:
    q, k, v = (torch.empty(2, 3, n, 24, dtype=dtype, device="meta") for n in (size, 40, 40))
    shapes = {"padding": (2, 1, 1, 40), "heads": (1, 3, size, 40)}
    bias = torch.empty(shapes[mask], dtype=dtype, device="meta") if mask in shapes else None
    operands = Operands(q, k, v, bias, mask == "causal", 0.2)
    out, sums = KERNELS["cuda"].forward(operands)
    assert out.shape == q.shape and sums.dtype is torch.float32
    assert sums.shape == (2, 3, KERNELS["cuda"].rows(size))
    found = KERNELS["cuda"].backward(torch.empty_like(out), operands, out, sums)
    assert [t.shape for t in found] == [q.shape, k.shape, v.shape]


def test_both_passes_on_a_gpu_may_run_as_torchs_own(session: Session) -> None:
    check(Captured(session, plain), plain, qkv(2, 3, 40, 16))
    (form,) = (slot.node.form for router in session.context.routers for slot in router.program.slots if slot.half)

    def way_names(device: str) -> set[str]:
        """Of the same form elsewhere: autograd cannot trace for a GPU where there is none."""
        inputs = tuple(replace(i, spec=replace(i.spec, device=device)) for i in form.inputs)
        operations = tuple(
            replace(op, outputs=tuple(replace(spec, device=device) for spec in op.outputs)) for op in form.operations
        )
        return {strategy.name for strategy in strategies_of(replace(form, inputs=inputs, operations=operations))}

    assert SDPA_TRAINING in way_names("cuda") and SDPA_TRAINING not in way_names("xpu")
