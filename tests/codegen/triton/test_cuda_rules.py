"""Operators whose CUDA kernels differ from the CPU's: Triton kernels against aten's CUDA formulas, written out here.

Run in Triton's interpreter on NaN, Inf, both zeros and numbers at each operator's bounds, all with all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autofuse.codegen.call import allocate
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.lowering.rules import rules_of
from autofuse.codegen.lowering.rules_cuda import CUDA_RULES
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm
from tests.cases import CASES
from tests.tracing import trace

T = torch.Tensor
aten = torch.ops.aten
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 3.0, -3.0, 0.5, -0.5, 0.1, 0.25, 7.5, -7.5, 6.0, 1e-3)
SIXTH = 0.1666666716337204  # 1 / 6 in float32, also for float64


def _scalar(t: T, number: float) -> T:
    """A number that a kernel takes in the dtype of its tensors."""
    return torch.tensor(number, dtype=t.dtype).to(_opmath(t))


def _opmath(t: T) -> torch.dtype:
    return torch.float32 if t.dtype.itemsize == 2 else t.dtype


def _wide(*tensors: T) -> list[T]:
    return [t.to(_opmath(t)) for t in tensors]


def _logit_backward(eps: float) -> Callable[[T, T], T]:
    def formula(g: T, x: T) -> T:
        dy, v = _wide(g, x)
        low, high, beyond = (0.0, 1.0, math.nan) if eps < 0 else (eps, 1 - eps, 0.0)
        outside = (v < low) | (v > torch.tensor(high, dtype=v.dtype))
        return torch.where(outside, torch.full_like(v, beyond), dy / (v * (1 - v)))

    return formula


def _elu(x: T) -> T:
    (v,) = _wide(x)
    return torch.where(v > 0, v * 1.05, torch.expm1(v * 0.7) * (1.3 * 1.05))


def _elu_backward(is_result: bool) -> Callable[[T, T], T]:
    def formula(g: T, x: T) -> T:
        a, v = _wide(g, x)
        low = a * 0.9 * (v + 1.2 * 1.1) if is_result else a * 0.9 * (1.2 * 1.1) * torch.exp(v * 0.9)
        return torch.where(v <= 0, low, a * 1.1)

    return formula


def _hardtanh_backward(g: T, x: T) -> T:
    return torch.where((x <= 0.0) | (x >= 6.0), torch.zeros_like(g), g)


def _hardswish_backward(g: T, x: T) -> T:
    a, v = _wide(g, x)
    return torch.where(v <= -3, torch.zeros_like(a), torch.where(v < 3, a * (v / 3 + 0.5), a))


def _hardsigmoid(x: T) -> T:
    (v,) = _wide(x)
    return (v + 3).clamp(0, 6) * SIXTH


def _hardswish(x: T) -> T:
    (v,) = _wide(x)
    return v * (v + 3).clamp(0, 6) * SIXTH


def _log_sigmoid(x: T) -> T:
    (v,) = _wide(x)
    return torch.where(v < 0, v, torch.zeros_like(v)) - torch.log1p(torch.exp(-v.abs()))


def _log_sigmoid_backward(g: T, x: T) -> T:
    a, v = _wide(g, x)
    z = torch.exp(-v.abs())
    return a * torch.where(v < 0, 1 - z / (1 + z), z / (1 + z))


def _smooth_l1_backward(beta: float) -> Callable[[T, T, T], T]:
    def formula(g: T, x: T, y: T) -> T:
        edge = _scalar(g, beta)
        a, v, w = _wide(g, x, y)
        off = v - w
        return torch.where(off < -edge, -a, torch.where(off > edge, a, off * a / edge))

    return formula


def _divided(number: float, mode: str | None) -> Callable[[T], T]:
    def formula(x: T) -> T:
        (a,) = _wide(x)
        b = torch.tensor(number, dtype=a.dtype)
        if mode is None or (mode == "floor" and number == 0):
            return a * (1 / b)
        if mode == "trunc":
            return torch.trunc(a * (1 / b))
        rest = torch.fmod(a, b)
        quotient = (a - rest) * (1 / b) - ((rest != 0) & ((b < 0) != (rest < 0))).to(a.dtype)
        floor = torch.floor(quotient)
        floor = floor + (quotient - floor > 0.5).to(a.dtype)
        return torch.where(quotient != 0, floor, torch.copysign(torch.zeros_like(a), a * (1 / b)))

    return formula


def _threshold(x: T) -> T:
    return torch.where(x <= torch.tensor(0.1, dtype=x.dtype), torch.full_like(x, 7.0), x)


def _threshold_backward(g: T, x: T) -> T:
    return torch.where(x <= torch.tensor(0.1, dtype=x.dtype), torch.zeros_like(g), g)


def _addcmul(x: T, y: T, z: T) -> T:
    a, b, c = _wide(x, y, z)
    return a + 0.3 * (b * c)


def _addcdiv(x: T, y: T, z: T) -> T:
    a, b, c = _wide(x, y, z)
    return a - 0.3 * (b / c)


# The overload, the call, and the formula of aten's CUDA kernel.
Row = tuple[str, Callable[..., T], Callable[..., T]]
ROWS: dict[str, Row] = {
    "logit": ("logit_backward.default", lambda g, x: aten.logit_backward.default(g, x), _logit_backward(-1.0)),
    "logit_eps": (
        "logit_backward.default", lambda g, x: aten.logit_backward.default(g, x, 0.25), _logit_backward(0.25),
    ),
    "elu": ("elu.default", lambda x: aten.elu.default(x, 1.3, 1.05, 0.7), _elu),
    "elu_backward": (
        "elu_backward.default", lambda g, x: aten.elu_backward.default(g, 1.2, 1.1, 0.9, False, x),
        _elu_backward(False),
    ),
    "elu_backward_result": (
        "elu_backward.default", lambda g, x: aten.elu_backward.default(g, 1.2, 1.1, 0.9, True, x), _elu_backward(True),
    ),
    "celu": (
        "celu.default", lambda x: aten.celu.default(x, 1.3),
        lambda x: torch.where(x > 0, x, torch.expm1(x.to(_opmath(x)) * (1 / 1.3)) * 1.3),
    ),
    "hardtanh_backward": (
        "hardtanh_backward.default", lambda g, x: aten.hardtanh_backward.default(g, x, 0.0, 6.0), _hardtanh_backward,
    ),
    "hardswish_backward": (
        "hardswish_backward.default", lambda g, x: aten.hardswish_backward.default(g, x), _hardswish_backward,
    ),
    "hardsigmoid": ("hardsigmoid.default", lambda x: aten.hardsigmoid.default(x), _hardsigmoid),
    "hardswish": ("hardswish.default", lambda x: aten.hardswish.default(x), _hardswish),
    "log_sigmoid": (
        "log_sigmoid_forward.default", lambda x: aten.log_sigmoid_forward.default(x)[0], _log_sigmoid,
    ),
    "smooth_l1": (
        "smooth_l1_loss_backward.default", lambda g, x, y: aten.smooth_l1_loss_backward.default(g, x, y, 0, 0.0),
        _smooth_l1_backward(0.0),
    ),
    "smooth_l1_beta": (
        "smooth_l1_loss_backward.default", lambda g, x, y: aten.smooth_l1_loss_backward.default(g, x, y, 0, 0.5),
        _smooth_l1_backward(0.5),
    ),
    "div": ("div.Tensor", lambda x: aten.div.Tensor(x, 0.3), _divided(0.3, None)),
    "div_zero": ("div.Scalar", lambda x: aten.div.Scalar(x, 0.0), _divided(0.0, None)),
    "div_trunc": (
        "div.Tensor_mode", lambda x: aten.div.Tensor_mode(x, 0.3, rounding_mode="trunc"), _divided(0.3, "trunc"),
    ),
    "div_floor": (
        "div.Scalar_mode", lambda x: aten.div.Scalar_mode(x, -0.1, rounding_mode="floor"), _divided(-0.1, "floor"),
    ),
    "floor_divide": ("floor_divide.default", lambda x: aten.floor_divide.default(x, 0.3), _divided(0.3, "floor")),
    "floor_zero": ("floor_divide.Scalar", lambda x: aten.floor_divide.Scalar(x, 0.0), _divided(0.0, "floor")),
    "threshold": ("threshold.default", lambda x: aten.threshold.default(x, 0.1, 7.0), _threshold),
    "threshold_backward": (
        "threshold_backward.default", lambda g, x: aten.threshold_backward.default(g, x, 0.1), _threshold_backward,
    ),
    "addcmul": ("addcmul.default", lambda x, y, z: aten.addcmul.default(x, y, z, value=0.3), _addcmul),
    "addcdiv": ("addcdiv.default", lambda x, y, z: aten.addcdiv.default(x, y, z, value=-0.3), _addcdiv),
}  # fmt: skip
APART = {"angle.default", "log_sigmoid_backward.default"}  # below


def test_every_row_of_the_table_is_tested() -> None:
    assert {f"aten.{name}" for name, _, _ in ROWS.values()} | {f"aten.{name}" for name in APART} == set(CUDA_RULES)


def run(form: NodeForm, inputs: list[T]) -> list[T]:
    """The outputs of the node's Triton kernel, interpreted on a CPU."""
    kernel = lower(form)
    source = print_triton(kernel, default_config(triton_knobs(kernel, {}, {})))
    outputs = [allocate(form.spec(ref), {}, poison=True) for ref in form.outputs]
    load_interpreted(source)({}, [*inputs, *outputs])
    return outputs


def crossed(count: int, dtype: torch.dtype) -> list[T]:
    values = torch.tensor(SPECIAL, dtype=dtype)
    return [t.flatten().contiguous() for t in torch.meshgrid(*[values] * count, indexing="ij")]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ROWS)
def test_as_the_cuda_kernel(name: str, dtype: str) -> None:
    _, call, formula = ROWS[name]
    inputs = crossed(call.__code__.co_argcount, getattr(torch, dtype))
    form = trace(call, inputs, dynamic=False, device="cuda")
    assert {spec.device for op in form.operations for spec in op.outputs} == {"cuda"}
    (found,) = run(form, inputs)
    torch.testing.assert_close(found, formula(*inputs).to(found.dtype), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_sigmoids_second_result_is_empty(dtype: str) -> None:
    """Its gradient takes that result, and reads the input instead."""
    grad, x = crossed(2, getattr(torch, dtype))
    form = trace(lambda x: tuple(aten.log_sigmoid_forward.default(x)), [x], dynamic=False, device="cuda")
    found, empty = run(form, [x])
    torch.testing.assert_close(found, _log_sigmoid(x).to(x.dtype), equal_nan=True)
    assert empty.shape == (0,)
    form = trace(aten.log_sigmoid_backward.default, [grad, x, empty], dynamic=False, device="cuda")
    (slope,) = run(form, [grad, x, empty])
    torch.testing.assert_close(slope, _log_sigmoid_backward(grad, x).to(x.dtype), equal_nan=True)


def test_nothing_is_made_of_empty_results_alone() -> None:
    form = CASES["log_sigmoid"].form(device="cuda")
    with pytest.raises(LoweringError, match="elements"):
        lower(replace(form, outputs=form.outputs[1:]))


def test_an_angle_of_16_bits_is_refused_as_eager_refuses_it() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        lower(CASES["infinities"].form(dtype))
        with pytest.raises(LoweringError, match="angle"):
            lower(CASES["infinities"].form(dtype, "cuda"))
    lower(CASES["infinities"].form(device="cuda"))


def test_a_node_on_a_cpu_keeps_the_cpus_rules() -> None:
    for name in ("hardtanh_backward", "log_sigmoid_backward"):
        on_cpu, on_gpu = (rules_of(CASES[name].form(device=device)) for device in ("cpu", "cuda"))
        assert set(on_cpu) == set(on_gpu)
        assert {target for target in on_cpu if on_cpu[target] is not on_gpu[target]} == set(CUDA_RULES)


NORMS = ("layer_norm", "add_layer_norm", "layer_norm_backward", "batch_norm_training", "batch_norm_backward")


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_16_bit_norms_are_float32(name: str) -> None:
    """As CUDA kernels make them and expect them; a CPU's layer norm has them in 16 bits."""
    form = CASES[name].form(torch.bfloat16, "cuda")
    assert {spec.device for spec in [i.spec for i in form.inputs]} == {"cuda"}
    (op,) = (op for op in form.operations if "norm" in op.target)
    read = [form.spec(ref).dtype for ref in op.inputs]
    made = [spec.dtype for spec in op.outputs]
    if "backward" in name:
        assert read.count("float32") == 2 and set(made) == {"bfloat16"}
    else:
        assert set(read) == {"bfloat16"} and made == ["bfloat16", "float32", "float32"]
    loops = lower(form)
    outputs = [form.spec(ref).dtype for ref in form.outputs]
    assert [p.dtype for p in loops.params if p.is_output] == outputs


# ---- a norm and a log sigmoid, there and back ---------------------------------------------------------------


def forward(x: T, y: T, w: T, b: T) -> tuple[T, ...]:
    total = x + y
    normal, mean, rstd = aten.native_layer_norm.default(total, [16], w, b, 1e-5)
    return (*aten.log_sigmoid_forward.default(normal * 2), total, normal, mean, rstd)


def backward(g: T, normal: T, buffer: T, total: T, mean: T, rstd: T, w: T, b: T) -> tuple[T, ...]:
    slope = aten.log_sigmoid_backward.default(g, normal * 2, buffer) * 2
    return tuple(aten.native_layer_norm_backward.default(slope, total, [16], mean, rstd, w, b, [True, True, True]))


def test_float32_statistics_and_an_empty_result_beside_16_bits() -> None:
    torch.manual_seed(0)
    x, y, g = (torch.randn(12, 16).bfloat16() for _ in range(3))
    w, b = (torch.randn(16).bfloat16() for _ in range(2))
    found, empty, total, normal, mean, rstd = run(
        trace(forward, [x, y, w, b], dynamic=False, device="cuda"), [x, y, w, b]
    )
    exact = (x + y).double().requires_grad_()
    scale, shift = (t.double().requires_grad_() for t in (w, b))
    wanted = torch.nn.functional.logsigmoid(torch.nn.functional.layer_norm(exact, [16], scale, shift) * 2)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    for statistic, of_rows in ((mean, exact.mean(1, True)), (rstd, (exact.var(1, False, keepdim=True) + 1e-5).rsqrt())):
        assert statistic.dtype == torch.float32
        torch.testing.assert_close(statistic.double(), of_rows, rtol=2e-2, atol=5e-3)  # of the sum before its rounding
    inputs = [g, normal, empty, total, mean, rstd, w, b]
    slopes = run(trace(backward, inputs, dynamic=False, device="cuda"), inputs)
    for slope, right in zip(slopes, torch.autograd.grad(wanted, (exact, scale, shift), g.double()), strict=True):
        torch.testing.assert_close(slope.double(), right, rtol=5e-2, atol=5e-2)


def test_the_document_names_them() -> None:
    text = (Path(__file__).parents[3] / "docs" / "SEMANTICS.md").read_text()
    section = text.split("\n## What eager gives on a GPU\n")[1].split("\n## ")[0]
    names = {target.split(".")[1] for target in CUDA_RULES}
    assert {name for name in names if f"`{name}`" not in section} == set()
