"""One table of fusion cases that feeds code generation, numerics and whatever else needs real nodes.

In: rows of a function and example inputs, here and in `cases_pools`. Out: for each a `NodeForm` (`tracing`), and the sizes
that it is checked with.
"""

# ruff: noqa: E501, SIM905
from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autofuse.ir.operation import NodeForm
from tests.cases_pools import POOLS, POOLS_BY_AXES
from tests.tracing import example as _t
from tests.tracing import trace

aten = torch.ops.aten
FORMS = "TEST_FORMS"  # a folder in which the processes of a session keep traced nodes for each other


@dataclass(frozen=True)
class Case:
    """A function, the inputs it is traced on, and the sizes it is checked with."""

    name: str
    function: Callable[..., Any]
    example: tuple[torch.Tensor, ...]  # sizes that differ become different symbols
    sizes: tuple[tuple[int, ...], ...] = ()  # values of the symbols, in order; the example's own always too
    dynamic: bool = True
    static: tuple[int, ...] = ()  # sizes that stay constants
    tags: frozenset[str] = field(default=frozenset())

    def form(self, dtype: torch.dtype | None = None, device: str = "cpu") -> NodeForm:
        """The node; with a dtype, its floating inputs are of that dtype. Traced once in a session: it is frozen.

        ``device``: "cuda" gives the node that a GPU has: some results are of another dtype or size there.
        """
        return _traced(self, dtype, device)


@functools.cache
def _traced(case: Case, dtype: torch.dtype | None, device: str) -> NodeForm:
    """Traced once in a session: all nodes take 13 s a dtype, and most tests want all of them."""
    if dtype is not None and all(t.dtype == dtype for t in case.example if t.is_floating_point()):
        return _traced(case, None, device)
    folder = os.environ.get(FORMS)
    file = Path(folder, f"{case.name} {dtype} {device}.json") if folder else None
    if file is not None and file.exists():
        return NodeForm.from_json(json.loads(file.read_text()))
    example = case.example
    if dtype is not None:
        kept = STATISTICS.get(case.name, ()) if device == "cuda" else ()
        example = tuple(
            t.to(dtype) if t.is_floating_point() and n not in kept else t for n, t in enumerate(case.example)
        )
    form = trace(case.function, example, case.dynamic, case.static, device)
    if file is not None:
        text = json.dumps(form.to_json())
        assert NodeForm.from_json(json.loads(text)) == form
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(text)
        own.rename(file)  # another process may write it too
    return form


# ---- the table ------------------------------------------------------------------------------------------

F = torch.nn.functional


_SIZES_2D = ((5, 7), (1, 1), (33, 67), (3, 0), (2, 1030))

_UNARY = (
    "neg abs sign sgn floor ceil round trunc square relu exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sinh "
    "cosh asin acos atan erf erfc sigmoid sqrt rsqrt reciprocal silu mish softplus elu gelu hardswish hardsigmoid "
    "hardtanh leaky_relu isnan isinf logical_not asinh acosh atanh lgamma frac sinc"
).split()


def _call_unary(op: str) -> Callable[..., Any]:
    return lambda x: getattr(aten, op).default(x)


def _unary_cases() -> list[Case]:
    return [
        Case(f"unary_{op}", _call_unary(op), (_t(5, 7),), _SIZES_2D, tags=frozenset({"pointwise"})) for op in _UNARY
    ]


_X, _Y, _ROW, _COL = _t(5, 7), _t(5, 7), _t(7), _t(5, 1)
_MASK = _t(5, 7, dtype=torch.bool)
_I = _t(5, 7, dtype=torch.int64)

_MODIFIED_BESSEL = (
    aten.special_modified_bessel_i0, aten.special_modified_bessel_i1, aten.special_modified_bessel_k0,
    aten.special_modified_bessel_k1, aten.special_scaled_modified_bessel_k0, aten.special_scaled_modified_bessel_k1,
)  # fmt: skip
_BESSEL = (
    aten.special_bessel_j0, aten.special_bessel_j1, aten.special_bessel_y0, aten.special_bessel_y1,
    aten.special_spherical_bessel_j0, aten.special_airy_ai,
)  # fmt: skip

_POINTWISE: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
    ("add_bias_gelu", lambda a, b, c: F.gelu(a + b) * c, (_X, _ROW, _Y)),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), (_X,)),
    ("sub_alpha", lambda a, b: aten.sub.Tensor(a, b, alpha=2.5), (_X, _COL)),
    ("add_scalar", lambda a: aten.add.Scalar(a, 1.5, 2), (_X,)),
    ("sub_scalar", lambda a: aten.sub.Scalar(a, 0.25), (_X,)),
    ("rsub", lambda a, b: aten.rsub.Scalar(a, 2.0) + aten.rsub.Tensor(a, b, alpha=3), (_X, _Y)),
    ("mul_scalar", lambda a: aten.mul.Scalar(a, 0.1), (_X,)),
    ("div_broadcast", lambda a, b: a / b, (_X, _COL)),
    ("div_int", lambda a: a / 3, (_I,)),
    ("div_scalar", lambda a: aten.div.Scalar(a, 3.0), (_X,)),
    ("maximum_minimum", lambda a, b, c: torch.minimum(torch.maximum(a, b), c), (_X, _ROW, _Y)),
    ("clamp", lambda a: a.clamp(-0.5, 0.75), (_X,)),
    ("clamp_min_max", lambda a: aten.clamp_max.default(aten.clamp_min.default(a, -1), 0.5), (_X,)),
    ("clamp_tensor", lambda a, b, c: aten.clamp.Tensor(a, b, c), (_X, _ROW, _Y)),
    ("clamp_tensor_bounds", lambda a, b, c: aten.clamp_max.Tensor(aten.clamp_min.Tensor(a, b), c), (_X, _ROW, _Y)),
    ("clamp_int", lambda a: a.clamp(-3, 4), (_I,)),
    ("hardtanh_6", lambda a: aten.hardtanh.default(a, 0.0, 6.0), (_X,)),
    ("leaky_relu_slope", lambda a: aten.leaky_relu.default(a, 0.2), (_X,)),
    ("softplus_beta", lambda a: aten.softplus.default(a, 2.0, 1.0), (_X,)),
    ("elu_scales", lambda a: aten.elu.default(a, 1.3, 1.05, 0.7), (_X,)),
    ("xlogy", lambda a, b: (aten.xlogy.Tensor(a, b), aten.xlogy.Scalar_Self(2.0, b), aten.xlogy.Scalar_Other(a, 0.5)), (_X, _Y)),
    ("xlog1py_entr", lambda a, b: (aten.special_xlog1py.default(a, b), aten.special_xlog1py.self_scalar(2.0, b), aten.special_xlog1py.other_scalar(a, 0.5), aten.special_entr.default(a)), (_X, _Y)),
    ("logit", lambda a: (aten.logit.default(a), aten.logit.default(a, 0.1)), (_X,)),
    ("logit_backward", lambda g, a: (aten.logit_backward.default(g, a), aten.logit_backward.default(g, a, 0.1)), (_X, _Y)),
    ("hypot_nextafter", lambda a, b: (aten.hypot.default(a, b), aten.nextafter.default(a.float(), b.float())), (_X, _ROW)),
    ("ldexp", lambda a, b: aten.ldexp.Tensor(a.float(), b.float()), (_X, _Y)),
    ("copysign", lambda a, b: (aten.copysign.Tensor(a, b), aten.copysign.Scalar(a, -0.0), aten.signbit.default(a)), (_X, _Y)),
    ("signbit_int", lambda a: (aten.signbit.default(a), aten.isposinf.default(a), aten.isneginf.default(a), aten.angle.default(a), aten.frac.default(a.double())), (_I,)),
    ("remainder_tensor", lambda a, b: (aten.fmod.Tensor(a, b), aten.remainder.Tensor(a, b), aten.remainder.Scalar_Tensor(2.5, b)), (_X, _Y)),
    ("rounded_quotients", lambda a, b: (aten.div.Tensor_mode(a, b, rounding_mode="trunc"), aten.div.Tensor_mode(a, b, rounding_mode="floor"), aten.div.Scalar_mode(a, 0.3, rounding_mode="floor"), aten.div.Tensor_mode(a, b, rounding_mode=None)), (_X, _Y)),
    ("floor_divide", lambda a, b: (aten.floor_divide.default(a, b), aten.floor_divide.Scalar(a, -0.3)), (_X, _COL)),
    ("logaddexp", lambda a, b: (aten.logaddexp.default(a, b), aten.logaddexp2.default(a, b)), (_X, _ROW)),
    ("fmax_fmin", lambda a, b: (aten.fmax.default(a, b), aten.fmin.default(a, b)), (_X, _Y)),
    ("fmax_int", lambda a, b: (aten.fmax.default(a, b), aten.fmin.default(a, b)), (_I, _I.clone())),
    ("nan_to_num", lambda a: (aten.nan_to_num.default(a), aten.nan_to_num.default(a, 0.5, 2.0, -3.0), aten.nan_to_num.default(a, neginf=1.0)), (_X,)),
    ("infinities", lambda a: (aten.isposinf.default(a), aten.isneginf.default(a), aten.angle.default(a)), (_X,)),
    ("heaviside", lambda a, b: aten.heaviside.default(a.round(), b), (_X, _ROW)),
    ("degrees", lambda a, i: (aten.deg2rad.default(a), aten.rad2deg.default(a), aten.deg2rad.default(i)), (_X, _I)),
    ("round_decimals", lambda a: (aten.round.decimals(a.float() * 100, decimals=1), aten.round.decimals(a.float() * 100, decimals=-1)), (_X,)),
    ("bitwise_scalars", lambda a: (aten.bitwise_or.Scalar(a, 5), aten.bitwise_xor.Scalar(a, 3)), (_I,)),
    ("threshold", lambda a: aten.threshold.default(a, 0.1, 7.0), (_X,)),
    ("gamma_functions", lambda a: (*(aten.polygamma.default(n, a * 2) for n in (0, 1)), aten.mvlgamma.default(a, 3)), (_X,)),
    ("digamma", lambda a: aten.digamma.default(a) * 2, (_X,)),
    ("polygamma", lambda a: (aten.polygamma.default(2, a * 2), aten.polygamma.default(3, a)), (_X,)),
    ("zeta", lambda a, b: aten.special_zeta.default(a.float().abs() * 3, b.float()), (_X, _ROW)),
    ("zeta_scalars", lambda a: aten.special_zeta.other_scalar(a.float() * 3, 2.5) + aten.special_zeta.self_scalar(3, a.float() * 3), (_X,)),
    ("error_functions", lambda a: (aten.erfinv.default(a), *(f.default(a.float()) for f in (aten.special_erfcx, aten.special_log_ndtr)), aten.special_ndtri.default(a.float() * 2)), (_X,)),
    ("frexp", lambda a: tuple(aten.frexp.Tensor(torch.where(a.abs() < 1e30, a, 0.5))), (_X,)),
    ("bessel_i", lambda a: tuple(f.default(a * 4) for f in (aten.i0, aten.special_i0e, aten.special_i1, aten.special_i1e)), (_X,)),
    ("bessel_k", lambda a: tuple(f.default(a.float() * 2) for f in _MODIFIED_BESSEL), (_X,)),
    ("bessel_j", lambda a: tuple(f.default(a.float() * 5) for f in _BESSEL), (_X,)),
    ("celu", lambda a: aten.celu.default(a, 1.3), (_X,)),
    ("prelu", lambda a, w: aten._prelu_kernel.default(a, w), (_X, _ROW)),
    ("prelu_backward", lambda g, a, w: tuple(aten._prelu_kernel_backward.default(g, a, w)), (_X, _Y, _ROW)),
    ("log_sigmoid", lambda a: tuple(aten.log_sigmoid_forward.default(a)), (_X,)),
    ("pow_scalars", lambda a: (a**2 + a**3 + a**-1 + a**-2, a**0.5, a**-0.5, a**1.7, a**0, a**1), (_X,)),
    ("pow_tensor", lambda a, b: aten.pow.Tensor_Tensor(a.abs(), b), (_X, _Y)),
    ("pow_base", lambda a: aten.pow.Scalar(1.7, a), (_X,)),
    ("pow_int", lambda a: a**3 + a**5, (_I,)),
    ("atan2", lambda a, b: torch.atan2(a, b), (_X, _Y)),
    ("fmod", lambda a: aten.fmod.Scalar(a, 0.7), (_X,)),
    ("remainder", lambda a: aten.remainder.Scalar(a, -0.7), (_X,)),
    ("remainder_int", lambda a: (aten.remainder.Scalar(a, 5), aten.fmod.Scalar(a, 5), aten.remainder.Scalar(a, -5)), (_I,)),
    ("where", lambda m, a, b: torch.where(m, a, b), (_MASK, _X, _ROW)),
    ("where_scalar", lambda m, a: (aten.where.ScalarOther(m, a, 0.5), aten.where.ScalarSelf(m, 2.0, a)), (_MASK, _X)),
    ("where_scalars", lambda m: aten.where.Scalar(m, 1.0, -1.0), (_MASK,)),
    ("masked_fill", lambda a, m: a.masked_fill(m, float("-inf")), (_X, _MASK)),
    ("masked_fill_tensor", lambda a, m, v: aten.masked_fill.Tensor(a, m, v), (_X, _MASK, _t())),
    ("compare", lambda a, b: (a == b, a != b, a < b, a <= b, a > b, a >= b), (_X, _ROW)),
    ("compare_scalar", lambda a: (a == 0.5, a != 0.5, a < 0.1, a <= 0.1, a > 0.1, a >= 0.1), (_X,)),
    ("compare_int_float", lambda a: (a > 2.5, a == 3), (_I,)),
    ("logical", lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b)), (_X, _MASK)),
    ("bitwise_int", lambda a, b: (a & b, a | b, a ^ b, ~a, aten.bitwise_and.Scalar(a, 6)), (_I, _I.clone())),
    ("bitwise_bool", lambda a, b: (a & b, a | b, a ^ b, ~a), (_MASK, _MASK.clone())),
    ("bool_arithmetic", lambda a, b: (a + b, a * b), (_MASK, _MASK.clone())),
    ("casts", lambda a: (a.double(), a.half(), a.bfloat16(), a.to(torch.int32), a.bool()), (_X,)),
    ("cast_round_trip", lambda a: a.bfloat16().float() + a.half().float(), (_X,)),
    ("int_to_float", lambda a: a.float() * 0.5 + 1, (_I,)),
    ("copy_broadcast", lambda a, b: aten.copy.default(a, b), (_X, _ROW)),
    ("clone_transposed", lambda a: a.t().clone(memory_format=torch.contiguous_format), (_X,)),
    ("addcmul", lambda a, b, c: aten.addcmul.default(a, b, c, value=0.3), (_X, _Y, _ROW)),
    ("addcdiv", lambda a, b, c: aten.addcdiv.default(a, b, c, value=-0.3), (_X, _Y, _ROW)),
    ("lerp", lambda a, b, c: (aten.lerp.Scalar(a, b, 0.3), aten.lerp.Scalar(a, b, 0.8), torch.lerp(a, b, c)), (_X, _Y, _ROW)),
    ("tril_triu", lambda a: (a.tril(), a.triu(1), a.tril(-2)), (_t(3, 5, 7),)),
    ("threshold_backward", lambda g, x: aten.threshold_backward.default(g, x, 0.1), (_X, _Y)),
    ("hardtanh_backward", lambda g, x: aten.hardtanh_backward.default(g, x, -0.5, 0.5), (_X, _Y)),
    ("leaky_relu_backward", lambda g, x: aten.leaky_relu_backward.default(g, x, 0.2, False), (_X, _Y)),
    ("gelu_backward", lambda g, x: aten.gelu_backward.default(g, x), (_X, _Y)),
    ("gelu_tanh_backward", lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"), (_X, _Y)),
    ("silu_backward", lambda g, x: aten.silu_backward.default(g, x), (_X, _Y)),
    ("tanh_backward", lambda g, x: aten.tanh_backward.default(g, x), (_X, _Y)),
    ("sigmoid_backward", lambda g, x: aten.sigmoid_backward.default(g, x), (_X, _Y)),
    ("elu_backward", lambda g, x: (aten.elu_backward.default(g, 1.2, 1.1, 0.9, False, x), aten.elu_backward.default(g, 1.2, 1.1, 0.9, True, x)), (_X, _Y)),
    ("softplus_backward", lambda g, x: aten.softplus_backward.default(g, x, 1.5, 2.0), (_X, _Y)),
    ("mish_backward", lambda g, x: aten.mish_backward.default(g, x), (_X, _Y)),
    ("hardswish_backward", lambda g, x: aten.hardswish_backward.default(g, (x * 4).round()), (_X, _Y)),
    ("hardsigmoid_backward", lambda g, x: aten.hardsigmoid_backward.default(g, (x * 4).round()), (_X, _Y)),
    ("log_sigmoid_backward", lambda g, x, b: aten.log_sigmoid_backward.default(g, x, b), (_X, _Y, _t(5, 7))),
    ("dropout_backward", lambda g, m: aten.native_dropout_backward.default(g, m, 1.25), (_X, _MASK)),
    ("dropout_scale", lambda x, m: torch.ops.autofuse_test.dropout_scale.default(x, m, 1.25), (_X, _MASK)),
    ("transposed_add", lambda a, b: a.t() + b, (_X, _t(7, 5))),
    ("square_plus_transpose", lambda a: a + a.t(), (_t(5, 5),)),
    ("expanded_view", lambda a, b: (a.unsqueeze(1).expand(5, 3, 7) * b).reshape(15, 7), (_X, _t(5, 3, 7))),
    ("heads", lambda x: x.view(x.shape[0], x.shape[1], 2, 3).permute(0, 2, 1, 3) * 2.0, (_t(5, 11, 6),)),
    ("merge_heads", lambda x: aten.clone(x.permute(0, 2, 1, 3), memory_format=torch.contiguous_format).view(x.shape[0], x.shape[2], 12), (_t(5, 2, 11, 6),)),
    ("causal_bias", lambda x: x + torch.where(torch.arange(x.shape[1]) <= torch.arange(x.shape[0]).unsqueeze(1), 0.0, float("-inf")), (_X,)),
    ("aranges", lambda x: (x + torch.arange(2, 9), x * torch.arange(0.0, 3.5, 0.5)), (_X,)),
    ("creation", lambda x: (x + torch.full([5, 7], 2.5), torch.zeros_like(x) + torch.ones_like(x) * 3, torch.full_like(x, 4), x * torch.ones([7]) + torch.zeros([7]), x + torch.scalar_tensor(2.0)), (_X,)),
    ("broadcast_columns", lambda x, b: torch.where(torch.isnan(b) | (b < 0), x, x * (b.abs() + 1).log()), (_X, _ROW)),
    ("broadcast_both_ways", lambda b, c: (b.abs() + 0.5) ** (c - 1), (_ROW, _COL)),
    ("broadcast_in_steps", lambda x, m, v: x - torch.tanh(m * (v + 1)), (_t(3, 5, 7), _t(5, 1), _ROW)),
    ("broadcast_permuted", lambda x, m: (x + (m.t() * 2).unsqueeze(0)).permute(2, 0, 1) * 0.5, (_t(3, 5, 7), _t(7, 5))),
    ("squeeze", lambda x, y: x.squeeze(1) + aten.squeeze.dims(y, [0, 2]), (_t(5, 1, 7), _t(1, 5, 1, 7))),
)  # fmt: skip

_R3 = _t(3, 5, 7)
_SIZES_3D = ((3, 5, 7), (1, 2, 1), (4, 3, 67), (2, 3, 2050), (0, 5, 7))

_REDUCTIONS: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
    ("softmax", lambda x: torch.softmax(x, -1), (_R3,)),
    ("softmax_middle", lambda x: torch.softmax(x, 1), (_R3,)),
    ("log_softmax", lambda x: torch.log_softmax(x, -1), (_R3,)),
    ("safe_softmax", lambda x, m: aten._safe_softmax.default(x.masked_fill(m, float("-inf")), -1), (_R3, _t(3, 5, 7, dtype=torch.bool))),
    ("softmax_backward", lambda g, y: aten._softmax_backward_data.default(g, y, -1, y.dtype), (_R3, _R3.clone())),
    ("log_softmax_backward", lambda g, y: aten._log_softmax_backward_data.default(g, y, -1, y.dtype), (_R3, _R3.clone())),
    ("attention_scores", lambda x, m: torch.ops.autofuse_test.dropout_scale.default(torch.softmax((x / 8.0).masked_fill(m, float("-inf")), -1), m, 1.1), (_R3, _t(5, 7, dtype=torch.bool))),
    ("amax_amin", lambda x: (x.amax(-1), x.amin(-1, keepdim=True)), (_R3,)),
    ("amax_int", lambda x: x.amax(-1), (_t(3, 5, 7, dtype=torch.int64),)),
    ("logsumexp", lambda x: aten.logsumexp.default(x, [-1]), (_R3,)),
    ("sum_last", lambda x: x.sum(-1), (_R3,)),
    ("sum_first", lambda x: x.sum(0), (_R3,)),
    ("sum_middle", lambda x: x.sum(1), (_R3,)),
    ("sum_leading", lambda x: x.sum((0, 1), keepdim=True), (_R3,)),
    ("sum_all", lambda x: x.sum(), (_R3,)),
    ("mean_last", lambda x: x.mean(-1, keepdim=True), (_R3,)),
    ("mean_all", lambda x: (x * 2).mean(), (_R3,)),
    ("sum_int", lambda x: (x.sum(-1), x.sum()), (_t(3, 5, 7, dtype=torch.int32),)),
    ("count_bool", lambda m: m.sum(), (_MASK,)),
    ("any_all", lambda m: (m.any(-1), m.all(-1)), (_MASK,)),
    ("any_all_whole", lambda m: (aten.any.default(m), aten.all.default(m)), (_MASK,)),
    ("any_of_no_dims", lambda x: (aten.any.dims(x, []), aten.all.dims(x, [])), (_t(5, 7, dtype=torch.uint8),)),
    ("reductions_of_one", lambda x: (aten.max.dim(x.sum(), 0)[0] + 1, aten.argmax.default(x.sum(), 0), aten.std_mean.correction(x.sum(), [0], correction=0)[1]), (_R3,)),
    ("any_float", lambda x: (x > 1).any(-1, keepdim=True), (_X,)),
    ("any_all_of_one", lambda x: (x[None].any(0), x[None].all(0, True)), (_t(5, 7, dtype=torch.uint8),)),
    ("bools_beside_a_row", lambda m, i: (m.max(), m * m, i * (m * m), torch.stack([m * m, m * m + m.max()], -1)), (_t(7, dtype=torch.bool), _t(7, dtype=torch.int64))),
    ("prod", lambda x: x.prod(-1), (_t(5, 7),)),
    ("variance", lambda x: (x.var(-1), x.std(-1, keepdim=True)), (_R3,)),
    ("var_mean", lambda x: torch.var_mean(x, -1, correction=0, keepdim=True), (_R3,)),
    ("var_all", lambda x: x.var(), (_R3,)),
    ("norms", lambda x: (aten.linalg_vector_norm.default(x, 2, [-1]), aten.linalg_vector_norm.default(x, 1, [-1], True), aten.linalg_vector_norm.default(x, 3.0, [-1])), (_R3,)),
    ("norm_all", lambda x: aten.linalg_vector_norm.default(x), (_R3,)),
    ("normalise", lambda x: x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6), (_R3,)),
    ("layer_norm", lambda x, w, b: tuple(aten.native_layer_norm.default(x, [x.shape[-1]], w, b, 1e-5)), (_R3, _t(7), _t(7))),
    ("add_layer_norm", lambda x, y, w, b: (x + y, *aten.native_layer_norm.default(x + y, [x.shape[-1]], w, b, 1e-5)), (_R3, _R3.clone(), _t(7), _t(7))),
    ("layer_norm_plain", lambda x: aten.native_layer_norm.default(x, [x.shape[1], x.shape[2]], None, None, 1e-5)[0], (_R3,)),
    ("layer_norm_backward", lambda g, x, m, r, w, b: tuple(aten.native_layer_norm_backward.default(g, x, [x.shape[-1]], m, r, w, b, [True, True, True])), (_R3, _R3.clone(), _t(3, 5, 1), _t(3, 5, 1), _t(7), _t(7))),
    ("layer_norm_backward_add", lambda g, h, x, m, r, w, b: (aten.native_layer_norm_backward.default(g + h, x, [x.shape[-1]], m, r, w, b, [True, False, False])[0] + h,), (_R3, _R3.clone(), _R3.clone(), _t(3, 5, 1), _t(3, 5, 1), _t(7), _t(7))),
    ("rms_norm_parts", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, (_R3, _t(7))),
    ("gradients_of_a_broadcast", lambda g, a, b: ((g * (b - 1)).sum(-1, keepdim=True), (g * torch.where(b == 0, 0.0, a.log())).sum((0, 1))), (_R3, _t(5, 1), _t(7))),
    ("broadcast_beside_rows", lambda x, b: torch.softmax(x * (b + 1), -1) + torch.sigmoid(b), (_R3, _t(7))),
    ("bias_gradient", lambda g, x: (aten.gelu_backward.default(g, x), aten.gelu_backward.default(g, x).sum((0, 1), keepdim=True).view(x.shape[-1])), (_R3, _R3.clone())),
)  # fmt: skip

_CLASS = _t(5, dtype=torch.int64)

# Reductions that refuse a tensor without elements, or whose dims are named in other ways.
_ENDS: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
    ("max_min_all", lambda x: (aten.max.default(x), aten.min.default(x)), (_R3,)),
    ("max_min_int", lambda x: (aten.max.default(x), aten.min.default(x)), (_t(3, 5, 7, dtype=torch.int64),)),
    ("max_min_bool", lambda m: (aten.max.default(m), aten.min.default(m)), (_MASK,)),
    ("aminmax_all", lambda x: tuple(aten.aminmax.default(x * 2)), (_R3,)),
    ("aminmax_rows", lambda x: (*aten.aminmax.default(x, dim=-1), *aten.aminmax.default(x, dim=2, keepdim=True)), (_R3,)),
    ("aminmax_columns", lambda x: tuple(aten.aminmax.default(x, dim=0)), (_X,)),
    ("argmax_rows", lambda x: (aten.argmax.default(x, -1), aten.argmin.default(x, -1, True)), (_R3,)),
    ("argmax_ties", lambda x: (aten.argmax.default(x.round(), -1), aten.argmin.default(x.round(), -1)), (_X,)),
    ("argmax_all", lambda x: aten.argmax.default(x.round()), (_R3,)),
    ("argmin_all_int", lambda x: aten.argmin.default(x), (_I,)),
    ("argmax_columns", lambda x: aten.argmax.default(x, 0), (_X,)),
    ("argmax_middle", lambda x: aten.argmax.default(x, 1) + 1, (_R3,)),
    ("max_dim", lambda x: (*aten.max.dim(x.round(), -1), *aten.min.dim(x.round(), -1, True)), (_R3,)),
    ("max_dim_columns", lambda x: tuple(aten.max.dim(x * 2, 0)), (_X,)),
    ("max_dim_bool", lambda m: tuple(aten.max.dim(m, 1)), (_MASK,)),
    ("min_dim_int", lambda x: tuple(aten.min.dim(x, -1)), (_I,)),
    ("prod_all", lambda x: aten.prod.default(x), (_X,)),
    ("prod_all_int", lambda x: (aten.prod.default(x), aten.prod.default(x, dtype=torch.float64)), (_I,)),
    ("nansum", lambda x: (aten.nansum.default(x), aten.nansum.default(x, [-1]), aten.nansum.default(x, [1], True, dtype=torch.float64)), (_X,)),
    ("nansum_int", lambda x: (aten.nansum.default(x), aten.nansum.default(x, [-1])), (_I,)),
    ("count_nonzero", lambda x: (aten.count_nonzero.default(x), aten.count_nonzero.default(x, -1), aten.count_nonzero.dim_IntList(x, [1])), (_X,)),
    ("count_nonzero_ints", lambda x, m: (aten.count_nonzero.dim_IntList(x, [0, 1]), aten.count_nonzero.default(m)), (_I, _MASK)),
    ("std_mean", lambda x: (*aten.std_mean.correction(x, [-1]), *aten.std_mean.correction(x, [-1], correction=0, keepdim=True)), (_R3,)),
    ("std_mean_all", lambda x: tuple(aten.std_mean.correction(x)), (_R3,)),
    ("norm_rows", lambda x: (aten.norm.ScalarOpt_dim(x, None, [-1]), aten.norm.ScalarOpt_dim(x, 1, [-1], True), aten.norm.ScalarOpt_dim_dtype(x, 3.0, [-1], False, dtype=torch.float64)), (_R3,)),
    ("norm_whole", lambda x: (aten.norm.Scalar(x), aten.norm.Scalar(x, 1), aten.norm.Scalar(x, float("inf")), aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float64)), (_R3,)),
    ("any_all_dims", lambda m: (aten.any.dims(m, [1]), aten.all.dims(m, [-1], True), aten.any.dims(m), aten.all.dims(m)), (_MASK,)),
    ("any_all_no_dims", lambda x: (aten.any.dims(x, []), aten.all.dims(x, [])), (_X,)),
    ("any_all_bytes", lambda x: (aten.any.dims(x, [-1]), aten.all.dims(x, [-1])), (_t(5, 7, dtype=torch.uint8),)),
)  # fmt: skip

# What follows a reduction that is complete only after all rows.
_FOLLOWED: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
    ("cumsum", lambda x, y: torch.relu(torch.cumsum(x * 2, -1)) + y, (_R3, _R3)),
    ("cumsum_backward", lambda x: torch.cumsum(x.flip(1), 1).flip(1) * 2, (_R3,)),
    ("cumsum_int", lambda m: (torch.cumsum(m, -1), torch.cumsum(m, -1).sum(-1)), (_MASK,)),
    ("cumprod", lambda x: torch.cumprod(x, 0) - 1, (_X,)),
    ("cumulative_ends", lambda x: (*torch.cummax(x, -1), torch.cummin(-x, -1)[1]), (_X,)),
    ("cummin", lambda x: torch.cummin(x, 0), (_X,)),
    ("logcumsumexp", lambda x: torch.logcumsumexp(x, -1) * 2, (_X,)),
    ("softmax_then_cumsum", lambda x: torch.cumsum(torch.softmax(x, -1), -1), (_R3,)),
    ("followed_by_its_row", lambda x: ((x - x.mean()) * x.amax(), x.std() * 2), (_R3,)),
    ("followed_sum", lambda x: torch.relu(x.sum()) * 2, (_R3,)),
    ("followed_mean", lambda x, w: (x.mean(), x.mean() * w + 0.5), (_R3, _t())),
    ("followed_losses", lambda x, y: (x * x).mean() + 0.1 * y.abs().mean(), (_X, _Y)),
    ("followed_loss", lambda x, y: aten.mse_loss.default(x, y) / 4 + aten.huber_loss.default(x, y), (_X, _Y)),
    ("led_gradient", lambda g, x: (torch.relu(g * 2) / 3).expand(x.shape[0], x.shape[1]) * x, (_t(), _X)),
    ("led_output", lambda g, x, w: (g * 2, torch.tanh(g * 2) * (x - x.sum(-1, keepdim=True)) + w), (_t(), _R3, _R3.clone())),
    ("led_and_followed", lambda g, x: (g * 2 + 1) * (x * (g * 2)).mean(), (_t(), _R3)),
    ("followed_extremes", lambda x: aten.max.default(x) - aten.min.default(x), (_R3,)),
    ("followed_count", lambda x: (aten.count_nonzero.default(x) + 1, (x > 0).any().logical_not()), (_R3,)),
    ("followed_columns", lambda x, w: torch.tanh(x.sum(0)) * w + 1, (_X, _ROW)),
    ("followed_leading", lambda x, w: (x * 2, x.sum((0, 1), keepdim=True).view(x.shape[-1]) + w), (_R3, _ROW)),
    ("followed_middle", lambda x, w: x.sum((0, 1)) * w * 0.5, (_R3, _ROW)),
    ("followed_variance", lambda x: (torch.relu(x.var()) * 2, x.std() + 1), (_R3,)),
    ("followed_columns_variance", lambda x, w: torch.rsqrt(x.var(0, correction=0) + 1e-5) * w, (_X, _ROW)),
    ("followed_rows_then_all", lambda x: torch.log_softmax(x, -1).mean() * -0.5, (_X,)),
    ("followed_norm_backward", lambda g, x, m, r, w, b, h: tuple(t * 0.5 + h for t in aten.native_layer_norm_backward.default(g, x, [x.shape[-1]], m, r, w, b, [True, True, True])[1:]), (_R3, _R3.clone(), _t(3, 5, 1), _t(3, 5, 1), _t(7), _t(7), _t(7))),
    ("followed_class_loss", lambda x, t: aten.nll_loss_forward.default(torch.log_softmax(x, 1), t, None, 1, -100)[0] * 0.25 + 1, (_X, _CLASS)),
)  # fmt: skip

_LOSSES: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
    ("cross_entropy", lambda x, t: tuple(aten.nll_loss_forward.default(torch.log_softmax(x, 1), t, None, 1, -100)), (_X, _CLASS)),
    ("cross_entropy_sum", lambda x, t: aten.nll_loss_forward.default(torch.log_softmax(x, 1), t, None, 2, -100)[0], (_X, _CLASS)),
    ("cross_entropy_none", lambda x, t: aten.nll_loss_forward.default(torch.log_softmax(x, 1), t, None, 0, 3)[0], (_X, _CLASS)),
    ("nll_weighted", lambda x, t, w: tuple(aten.nll_loss_forward.default(x, t, w, 1, -100)), (_X, _CLASS, _t(7))),
    ("nll_backward", lambda g, x, t, w: aten.nll_loss_backward.default(g, x, t, None, 1, -100, w), (_t(), _X, _CLASS, _t())),
    ("cross_entropy_backward", lambda g, y, t, w: aten._log_softmax_backward_data.default(aten.nll_loss_backward.default(g, y, t, None, 1, -100, w), y, 1, y.dtype), (_t(), _X, _CLASS, _t())),
    ("cross_entropy_backward_none", lambda g, y, t, w: aten._log_softmax_backward_data.default(aten.nll_loss_backward.default(g, y, t, None, 0, -100, w), y, 1, y.dtype), (_t(5), _X, _CLASS, _t())),
    ("mse", lambda x, y: (aten.mse_loss.default(x, y, 1),), (_X, _Y)),
    ("mse_none_sum", lambda x, y: (aten.mse_loss.default(x, y, 0), aten.mse_loss.default(x, y, 2)), (_X, _Y)),
    ("huber", lambda x, y: (aten.huber_loss.default(x, y, 1, 0.7), aten.huber_loss.default(x, y, 2), aten.huber_loss.default(x, y, 0, 0.5)), (_X, _Y)),
    ("huber_backward", lambda g, x, y: aten.huber_loss_backward.default(g, x, y, 1, 0.7), (_t(), _X, _Y)),
    ("huber_backward_none", lambda g, x, y: aten.huber_loss_backward.default(g, x, y, 0, 0.7), (_X.clone(), _X, _Y)),
    ("smooth_l1", lambda x, y: (aten.smooth_l1_loss.default(x, y, 1, 0.7), aten.smooth_l1_loss.default(x, y, 2), aten.smooth_l1_loss.default(x, y, 0, 0.0)), (_X, _Y)),
    ("smooth_l1_backward", lambda g, x, y: aten.smooth_l1_loss_backward.default(g, x, y, 1, 0.7), (_t(), _X, _Y)),
    ("smooth_l1_backward_none", lambda g, x, y: aten.smooth_l1_loss_backward.default(g, x, y, 0, 0.0), (_X.clone(), _X, _Y)),
    ("bce_logits", lambda x, y: (aten.binary_cross_entropy_with_logits.default(x, y), aten.binary_cross_entropy_with_logits.default(x, y, None, None, 0)), (_X, _Y)),
    ("bce_logits_weights", lambda x, y, w, p: (aten.binary_cross_entropy_with_logits.default(x, y, w, p, 2), aten.binary_cross_entropy_with_logits.default(x, y, None, p, 1)), (_X, _Y, _ROW, _COL)),
    ("bce", lambda x, y: (aten.binary_cross_entropy.default(x, y), aten.binary_cross_entropy.default(x, y, None, 0)), (_X, _Y)),
    ("bce_weight", lambda x, y, w: aten.binary_cross_entropy.default(x, y, w, 2), (_X, _Y, _ROW)),
    ("bce_followed", lambda x, y: aten.binary_cross_entropy.default(torch.sigmoid(x.clamp(-9, 9).masked_fill(x != x, 0)), y) * 0.5, (_X, _Y)),
    ("bce_backward", lambda g, x, y: aten.binary_cross_entropy_backward.default(g, x, y), (_t(), _X, _Y)),
    ("bce_backward_weight", lambda g, x, y, w: aten.binary_cross_entropy_backward.default(g, x, y, w, 0), (_X.clone(), _X, _Y, _ROW)),
    ("soft_margin", lambda x, y: (aten.soft_margin_loss.default(x, y), aten.soft_margin_loss.default(x, y, 0), aten.soft_margin_loss.default(x, y, 2)), (_X, _Y)),
    ("soft_margin_backward", lambda g, x, y: aten.soft_margin_loss_backward.default(g, x, y, 1), (_t(), _X, _Y)),
    ("soft_margin_backward_none", lambda g, x, y: aten.soft_margin_loss_backward.default(g, x, y, 0), (_X.clone(), _X, _Y)),
    ("mse_backward", lambda g, x, y: aten.mse_loss_backward.default(g, x, y, 1), (_t(), _X, _Y)),
)  # fmt: skip

_X4 = _t(3, 6, 5, 7)
_IMAGES: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]], ...] = (
    ("batch_norm_inference", lambda x, w, b, m, v: aten.relu(aten._native_batch_norm_legit_no_training.default(x, w, b, m, v, 0.1, 1e-5)[0]), (_X4, _t(6), _t(6), _t(6), _t(6))),
    ("batch_norm_training", lambda x, w, b: tuple(aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)), (_X4, _t(6), _t(6))),
    ("batch_norm_backward", lambda g, x, w, m, r: tuple(aten.native_batch_norm_backward.default(g, x, w, None, None, m, r, True, 1e-5, [True, True, True])), (_X4, _X4.clone(), _t(6), _t(6), _t(6))),
    ("batch_norm_add_relu", lambda x, y, w, b, m, v: aten.relu(aten._native_batch_norm_legit_functional.default(x, w, b, m, v, True, 0.1, 1e-5)[0] + y), (_X4, _X4.clone(), _t(6), _t(6), _t(6), _t(6))),
    ("relu_batch_norm_backward", lambda g, h, y, x, w, m, r: (aten.threshold_backward(g + h, y, 0), *aten.native_batch_norm_backward.default(aten.threshold_backward(g + h, y, 0), x, w, None, None, m, r, True, 1e-5, [True, True, True])), (_X4, _X4.clone(), _X4.clone(), _X4.clone(), _t(6), _t(6), _t(6))),
    ("group_norm_silu", lambda x, w, b: aten.silu(aten.native_group_norm.default(x, w, b, x.shape[0], 6, x.shape[2] * x.shape[3], 3, 1e-5)[0]), (_t(4, 6, 5, 7), _t(6), _t(6))),
    ("group_norm", lambda x, w, b: tuple(aten.native_group_norm.default(x, w, b, x.shape[0], 6, x.shape[2] * x.shape[3], 3, 1e-5)), (_t(4, 6, 5, 7), _t(6), _t(6))),
    ("channels_last_mean", lambda x: x.mean((2, 3)), (_X4.contiguous(memory_format=torch.channels_last),)),
)  # fmt: skip

_library = torch.library.Library("autofuse_test", "FRAGMENT")
_library.define("dropout_scale(Tensor x, Tensor mask, float scale) -> Tensor")
_library.impl("dropout_scale", lambda x, mask, scale: x.mul(mask).mul_(scale), "CompositeExplicitAutograd")


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


_X6, _X8, _H8 = _t(5, 6), _t(5, 8), _t(5, 8, dtype=torch.float16)

# Sizes of 6, 8 and 16 are constants, as the widths of heads are.
_MEMORY: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("rotary_half", lambda q, c, s: q * c + _rotate_half(q) * s, (_t(2, 3, 5, 16), _t(5, 16), _t(5, 16)), ()),
    ("rotary_half_calculated", lambda q, c: _rotate_half(q * 0.5 + 1) * c, (_t(3, 5, 16), _t(5, 16)), ()),
    ("rotary_half_slices", lambda q, c, s: q * c + torch.cat((-q[..., 8:], q[..., :8]), -1) * s, (_t(3, 5, 16), _t(5, 16), _t(5, 16)), ()),
    ("rotary_pairs", _rotate_pairs, (_t(3, 5, 16), _t(5, 8), _t(5, 8)), ()),
    ("rotary_pairs_backward", lambda g, c, s: aten.slice_backward.default(g[..., 0] * c, [g.shape[0], g.shape[1], 16], 2, 0, 2**63 - 1, 2) + aten.slice_backward.default(g[..., 1] * s, [g.shape[0], g.shape[1], 16], 2, 1, 2**63 - 1, 2), (_t(3, 5, 8, 2), _t(5, 8), _t(5, 8)), ((3, 5, 2), (1, 1, 2), (2, 67, 3))),
    ("rotary_half_backward", lambda g, s: aten.slice_backward.default(g[..., :8] * s, [g.shape[0], 16], 1, 8, 2**63 - 1, 1) - aten.slice_backward.default(g[..., 8:], [g.shape[0], 16], 1, 0, 8, 1), (_t(5, 16), _t(8)), ((5,), (1,), (67,))),
    ("cat_columns", lambda a, b: torch.cat((a + 1, b * 2), 1), (_t(5, 7), _t(5, 11)), ((5, 7, 11), (1, 1, 1), (3, 67, 1), (2, 0, 5), (2, 5, 0), (2, 1030, 3))),
    ("cat_rows", lambda a, b, c: torch.cat((a.exp(), b, -c), 0) * 2, (_t(5, 7), _t(3, 7), _t(4, 7)), ((5, 7, 3, 4), (1, 1, 1, 1), (0, 67, 2, 1), (3, 5, 0, 0))),
    ("cat_equal", lambda a, b: torch.cat((a + b, a - b, a * b), -1), (_X, _Y), ()),
    ("cat_same", lambda a: torch.cat((a, a), 0).relu() + 1, (_X,), ()),
    ("cat_units", lambda a, b: torch.cat((a.relu(), b.half().float(), b * 2), 1), (_t(5, 16), _X8), ()),
    ("cat_dtypes", lambda a, b, i: torch.cat((a * 2, b, i), 1), (_X8, _H8, _t(5, 6, dtype=torch.int64)), ()),
    ("cat_ints", lambda a, b: torch.cat((a + 1, b), 0) * 3, (_I, _t(4, 7, dtype=torch.int64)), ((5, 7, 4), (1, 1, 1), (3, 67, 2))),
    ("cat_bools", lambda a, b: torch.cat((a < 0, b), 0).logical_not(), (_X, _t(4, 7, dtype=torch.bool)), ((5, 7, 4), (1, 1, 1), (3, 67, 2))),
    ("cat_then_norm", lambda a, b: aten.native_layer_norm.default(torch.cat((a, b * 2), -1), [16], None, None, 1e-5)[0], (_X8, _X8.clone()), ()),
    ("cat_then_softmax", lambda a, b: torch.softmax(torch.cat((a, b * 2), -1), -1), (_t(5, 6), _t(5, 16)), ()),
    ("cat_then_sum", lambda a, b: torch.cat((a, b), 1).sum(0), (_X, _t(5, 11)), ((5, 7, 11), (1, 1, 1), (33, 67, 2))),
    ("cat_transposed", lambda a, b: torch.cat((a.t() + 1, b), 1), (_X, _t(7, 4)), ((5, 7, 4), (1, 1, 1), (33, 67, 2))),
    ("cat_of_cat", lambda a, b: torch.cat((torch.cat((a, b), 1).relu(), a), 1) + 1, (_X, _t(5, 11)), ((5, 7, 11), (1, 1, 1), (3, 67, 2))),
    ("stack_leading", lambda a, b: torch.stack((a + b, a - b, a * b), 0), (_X, _Y), ()),
    ("stack_middle", lambda a, b: torch.stack((a + b, a), 1) * 2, (_X, _Y), ()),
    ("stack_many", lambda a: torch.stack([a + k for k in range(9)], 1), (_X,), ()),
    ("pad_slice_roll_flip", lambda x: (F.pad(x.exp(), (1, 2, 0, 1), value=0.5)[:, 1:] * 2).roll(1, -1).flip(0), (_X,), ()),
    ("pad_symbols", lambda x, y: F.pad(x, (y.shape[0], 1)) * 2, (_X, _t(3)), ((5, 7, 3), (1, 1, 1), (3, 67, 2))),
    ("pad_negative", lambda x: aten.constant_pad_nd.default(x * 2, [-1, 2, -1, -1]), (_t(5, 7),), ((5, 7), (3, 2), (33, 67))),
    ("pad_ints", lambda x: F.pad(x + 1, (1, 1), value=7), (_I,), ()),
    ("pad_then_max", lambda x: F.pad(x, (1, 2), value=float("-inf")).amax(1), (_X,), ((5, 7), (1, 1), (33, 67))),
    ("roll_both", lambda x: (x + 1).roll((-1, 1), (0, 1)), (_X,), ((5, 7), (1, 1), (33, 67))),
    ("roll_static", lambda x: (x + 1).roll((-2, 11), (1, 1)), (_X6,), ()),
    ("flip_both", lambda x: x + (x * 2).flip(0, 1), (_X,), ()),
    ("repeat", lambda x: (x + 1).repeat(2, 1, 3) * 2, (_X,), ()),
    ("repeat_column", lambda x: (x + 1).repeat(1, 4), (_COL,), ()),
    ("slice_of_value", lambda x: (x.exp()[1:, 2:6:3] + 1, ), (_t(5, 16),), ((5,), (2,), (67,))),
    ("slice_negative", lambda x: x.exp()[:-1, -3:] + 1, (_t(5, 16),), ((5,), (2,), (67,))),
    ("slice_scatter", lambda x, y: aten.slice_scatter.default(x + 1, y * 2, 1, 2, 8) * 2, (_t(5, 16), _X6), ()),
    ("slice_scatter_step", lambda x, y: aten.slice_scatter.default(x + 1, y * 2, 1, 1, 16, 2) * 2, (_t(5, 16), _X8), ()),
    ("slice_backward", lambda g: aten.slice_backward.default(g * 2, [g.shape[0], g.shape[1] + 3], 1, 2, g.shape[1] + 2, 1) + 1, (_X,), ()),
    ("select_of_value", lambda x: (x.exp().select(1, 2) + x.exp().select(1, -1)) * 2, (_t(5, 6, 7),), ()),
    ("select_backward", lambda g: aten.select_backward.default(g * 2, [g.shape[0], 6, g.shape[1]], 1, 4) + 1, (_X,), ()),
    ("select_scatter", lambda x, y: aten.select_scatter.default(x * 2, y + 1, 1, -1), (_t(5, 6, 7), _X), ()),
    ("split_with_sizes", lambda x: torch.cat((x.exp().split([2, 6, 8], 1)[2], x.exp().split([2, 6, 8], 1)[1]), 1), (_t(5, 16),), ()),
    ("unbind", lambda x: sum(x.exp().unbind(0)) + 1, (_t(6, 5, 7),), ()),
    ("lift_fresh_copy", lambda x: aten.lift_fresh_copy.default(x) + 1, (_X,), ()),
    ("moves_of_sizes", lambda a, b, c, d: (aten.clone.default(a.t(), memory_format=torch.contiguous_format), aten._to_copy.default(b, dtype=torch.bfloat16), aten.full_like.default(c, 3), torch.cat((d, d), 1)), (_t(5, 7), _t(11), _t(3, 4, 9), _t(13, 17)), ((5, 7, 11, 3, 4, 9, 13, 17), (1, 1, 1, 1, 1, 1, 1, 1), (33, 67, 0, 2, 3, 0, 1, 5), (0, 3, 1030, 1, 31, 7, 2, 0), (101, 2, 0, 0, 1, 1, 0, 3))),
    ("moves_of_parts", lambda w, x, y, z: (aten.clone.default(w), F.pad(x, (1, 2), value=0.5), aten.clone.default(y[1:]), z.flip(0), x.repeat(2, 1)), (_t(), _t(5, 7), _t(11, 3), _t(13)), ((5, 7, 11, 3, 13), (1, 1, 2, 1, 1), (3, 67, 2, 5, 257), (0, 7, 1, 0, 0))),
)  # fmt: skip

_IMAGE = _t(2, 8, 5, 7)
_ODD = ((5, 7), (3, 2), (33, 67))  # no size of 1, which squeeze and the like would drop
_SHAPES: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("squeeze_all", lambda x: aten.squeeze.default(x.exp()) * 2, (_t(1, 5, 1, 7),), _ODD),
    ("diagonal_above", lambda x: aten.diagonal.default(x.exp(), 2, 2, 1) + 1, (_t(5, 6, 8),), ((5,), (1,), (67,))),
    ("diagonal_below", lambda x: aten.diagonal.default(x.exp(), -3, 0, 2).relu() + 1, (_t(8, 5, 6),), ((5,), (1,), (67,))),
    ("diagonal_copy", lambda x: aten.diagonal_copy.default(x.exp(), 1, -2, -1) + 1, (_t(5, 6, 8),), ((5,), (1,), (67,))),
    ("diagonal_of_symbols", lambda x: x.exp().diagonal() * 2, (_t(5, 5),), ((5,), (1,), (67,), (0,))),
    ("diag_embed", lambda x: aten.diag_embed.default(x.exp(), 1) * 2, (_X6,), ((5,), (1,), (67,))),
    ("diag_embed_below", lambda x: aten.diag_embed.default(x + 1, -2, 0, 2).relu(), (_X6,), ((5,), (1,), (67,))),
    ("diag_embed_symbols", lambda x: aten.diag_embed.default(x.exp()) + 1, (_X,), ()),
    ("diagonal_scatter", lambda x, y: aten.diagonal_scatter.default(x * 2, y.exp(), -1, 1, 2) + 1, (_t(5, 8, 6), _X6), ((5,), (1,), (67,))),
    ("diagonal_backward", lambda g: aten.diagonal_backward.default(g.exp(), [g.shape[0], 6, 8], 2, 1, 2) + 1, (_X6,), ((5,), (1,), (67,))),
    ("nests_of_parts", lambda x, y: (x[:, :6].exp() * 2, x[:, 6:].t() + 1, y.tanh() * y, *(part.sin() for part in aten.split_with_sizes_copy.default(x, [8, 2, 6], 1))), (_t(5, 16), _t(3, 7)), ((5, 3, 7), (1, 1, 1), (33, 2, 67), (2, 3, 1030))),
    ("unfold_windows", lambda x: x.exp().unfold(1, 3, 2) * 2, (_t(5, 16),), ()),
    ("unfold_rows", lambda x: aten.unfold.default(x.exp(), 0, 2, 2).relu(), (_t(8, 5),), ()),
    ("unfold_symbols", lambda x: x.exp().unfold(1, 6, 1) * 2, (_t(5, 11),), ((5, 11), (1, 6), (33, 67))),
    ("unfold_copy", lambda x: aten.unfold_copy.default(x.exp(), 1, 3, 1) * 2, (_t(5, 16),), ()),
    ("unfold_backward", lambda g: aten.unfold_backward.default(g.exp(), [g.shape[0], 16], 1, 2, 2) + 1, (_t(5, 8, 2),), ((5, 2), (1, 2), (67, 2))),
    ("unfold_backward_overlap", lambda g: aten.unfold_backward.default(g.exp(), [g.shape[0], 18], 1, 8, 2) + 1, (_t(5, 6, 8),), ()),
    ("unfold_backward_gaps", lambda g: aten.unfold_backward.default(g.exp(), [g.shape[0], 17], 1, 1, 3) * 2, (_t(5, 6, 1),), ()),
    ("unsafe_splits", lambda x: (aten.unsafe_split.Tensor(x + 1, 8, 1)[1] + 1) * aten.unsafe_split_with_sizes.default(x.relu(), [6, 8, 2], 1)[1], (_t(5, 16),), ()),
    ("copies_of_views", lambda x: (aten.alias_copy.default(x.exp()) + 1, aten.detach_copy.default(x) + 1, aten.view_copy.default(x.exp(), [x.shape[0] * x.shape[1]]) * 2, aten.permute_copy.default(x.exp(), [1, 0]) + 1, aten.t_copy.default(x) + 1, aten.transpose_copy.int(x, 0, 1) * 2), (_X,), ()),
    ("copies_of_squeezed", lambda x: (aten.squeeze_copy.default(x + 1), aten.squeeze_copy.dim(x + 2, 0), aten.squeeze_copy.dims(x + 3, [0, 2]), aten.unsqueeze_copy.default(x + 4, 0)), (_t(1, 5, 1, 7),), _ODD),
    ("expand_copy", lambda x: aten.expand_copy.default(x.exp(), [3, x.shape[0], 6]) * 2, (_COL,), ()),
    ("slice_copy", lambda x: aten.slice_copy.Tensor(x.exp(), 1, 2, 14, 3) + 1, (_t(5, 16),), ()),
    ("narrow_copy", lambda x: aten.narrow_copy.default(x.exp(), 1, -6, 4) + aten.narrow_copy.default(x + 1, 1, 8, 4), (_t(5, 16),), ()),
    ("copies_of_rows", lambda x: (aten.select_copy.int(x.exp(), 1, -1) + 1, aten.unbind_copy.int(x + 1, 1)[2] * 2), (_t(5, 6, 7),), ()),
    ("split_copy", lambda x: aten.split_copy.Tensor(x.exp(), 8, 1)[1] + aten.split_with_sizes_copy.default(x + 1, [2, 8, 6], 1)[1], (_t(5, 16),), ()),
    ("rot90", lambda x: (aten.rot90.default(x.exp(), 1, [0, 1]) + 1, aten.rot90.default(x + 1, 3, [0, 1])), (_X,), ()),
    ("rot90_twice", lambda x: aten.rot90.default(x.exp(), 2, [0, 2]) + 1, (_R3,), ()),
    ("pixel_shuffle", lambda x: aten.pixel_shuffle.default(x.exp(), 2) + 1, (_IMAGE,), ()),
    ("pixel_unshuffle", lambda x: aten.pixel_unshuffle.default(x.exp(), 2) + 1, (_t(5, 3, 6, 8),), ((5, 3), (1, 1), (3, 7))),
    ("channel_shuffle", lambda x: aten.channel_shuffle.default(x.exp(), 4) + 1, (_IMAGE,), ()),
    ("native_channel_shuffle", lambda x: aten.native_channel_shuffle.default(x.exp(), 2) + 1, (_t(3, 6, 5),), ()),
    ("creation_like", lambda x: (x + aten.new_full.default(x, [x.shape[1]], 2.5), x * aten.new_ones.default(x, [7, 1, 1]) + aten.new_zeros.default(x, [x.shape[0], 1])), (_X,), ()),
    ("fill_memory", lambda x: aten.fill.Scalar(torch.empty_like(x), 2.5) - x, (_X,), ()),
    ("fill", lambda x, y: (aten.fill.Scalar(x, 2.3) + y, aten.fill.Tensor(x, y.sum() * 0 + 3) * y, aten.zero.default(x) - y), (_X, _Y), ()),
    ("glu", lambda x: aten.glu.default(x + 1, 1) * 2, (_t(5, 16, 7),), ()),
    ("glu_backward", lambda g, x: aten.glu_backward.default(g + 1, x, 1) * 2, (_t(5, 8, 7), _t(5, 16, 7)), ()),
    ("reflection_pad", lambda x: aten.reflection_pad2d.default(x.exp(), [2, 1, 1, 3]) * 2, (_t(2, 3, 8, 6),), ((2, 3), (1, 1), (3, 5))),
    ("reflection_pad_row", lambda x: aten.reflection_pad1d.default(x.exp(), [3, 2]) * 2, (_X,), ((5, 7), (1, 4), (33, 67))),
    ("reflection_pad_volume", lambda x: aten.reflection_pad3d.default(x.exp(), [1, 0, 0, 2, 1, 1]) * 2, (_t(3, 6, 6, 8),), ()),
    ("replication_pad", lambda x: aten.replication_pad2d.default(x.exp(), [2, 1, -1, 3]) * 2, (_t(2, 3, 5, 7),), ((2, 3, 5, 7), (1, 2, 3, 2), (2, 4, 9, 33))),
    ("replication_pad_row", lambda x: aten.replication_pad1d.default(x.exp(), [9, 1]) * 2, (_X,), ((5, 7), (2, 2), (33, 67))),
    ("replication_pad_volume", lambda x: aten.replication_pad3d.default(x.exp(), [1, 0, 0, 2, 1, 1]) * 2, (_t(3, 6, 6, 8),), ()),
    ("reflection_pad_backward", lambda g, x: aten.reflection_pad2d_backward.default(g.exp(), x, [1, 2, 3, 0]) * 2, (_t(2, 3, 11, 9), _t(2, 3, 8, 6)), ((2, 3), (1, 1), (3, 5))),
    ("reflection_pad_row_backward", lambda g, x: aten.reflection_pad1d_backward.default(g.exp(), x, [3, 2]) * 2, (_t(5, 11), _X6), ((5,), (1,), (33,))),
    ("reflection_pad_volume_backward", lambda g, x: aten.reflection_pad3d_backward.default(g.exp(), x, [1, 0, 0, 2, 1, 1]) * 2, (_t(3, 8, 8, 9), _t(3, 6, 6, 8)), ((3,), (2,))),
    ("replication_pad_backward", lambda g, x: aten.replication_pad2d_backward.default(g.exp(), x, [1, 2, 1, 0]) * 2, (_t(2, 3, 9, 9), _t(2, 3, 8, 6)), ((2, 3), (1, 1), (3, 5))),
    ("replication_pad_row_backward", lambda g, x: aten.replication_pad1d_backward.default(g.exp(), x, [3, 2]) * 2, (_t(5, 11), _X6), ((5,), (1,), (33,))),
    ("replication_pad_volume_backward", lambda g, x: aten.replication_pad3d_backward.default(g.exp(), x, [1, 0, 0, 2, 1, 0]) * 2, (_t(3, 7, 8, 9), _t(3, 6, 6, 8)), ((3,), (2,))),
    ("as_strided", lambda x: aten.as_strided.default(x.exp(), [6, 3, 2], [2, 5, 33], 4) * 2 + aten.as_strided_copy.default(x, [6, 3, 2], [1, 0, 90]), (_t(16, 6),), ()),
    ("as_strided_scatter", lambda x, y: aten.as_strided_scatter.default(x.exp(), y + 1, [6, 8], [3, 30], 5) * 2, (_t(16, 16), _t(6, 8)), ()),
    ("im2col", lambda x: aten.im2col.default(x, [3, 2], [1, 2], [1, 1], [2, 1]) * 2 + 1, (_t(2, 3, 16, 8),), ((2, 3), (1, 1), (3, 5))),
    ("col2im", lambda g: aten.col2im.default(g.exp(), [6, 8], [2, 4], [1, 1], [1, 1], [2, 2]) * 2, (_t(5, 16, 16),), ()),
    ("chunk_cat", lambda x, y: aten._chunk_cat.default([x.exp(), y], 1, 4) * 2 + 1, (_t(5, 6, 8), _t(5, 16)), ()),
    ("eye", lambda x, y: (x + torch.eye(6, 8, dtype=x.dtype), x * y.unsqueeze(0) - torch.eye(8, dtype=y.dtype)[:6]), (_t(5, 6, 8), _t(6, 8)), ()),
    ("linspace", lambda x: x + torch.linspace(-1.0, 2.0, 16, dtype=x.dtype) * torch.linspace(0.3, 0.1, 1, dtype=x.dtype), (_t(5, 16),), ()),
)  # fmt: skip

_IDS, _IDS2 = _t(4, dtype=torch.int64), _t(3, 4, dtype=torch.int64)
_HALF = lambda n: ((torch.arange(2 * n) + 0.0) * 0.5).to(torch.int64)  # noqa: E731
_INDEXED: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("embedding", lambda w, i, p: F.embedding(i, w) * 2.0 + p, (_t(5, 7), _IDS2, _t(4, 7)), ((5, 7, 3, 4), (1, 1, 1, 1), (33, 67, 2, 5), (2, 1030, 3, 2))),
    ("embedding_norm", lambda w, i, p, g, b: aten.native_layer_norm.default(F.embedding(i, w) + p, [7], g, b, 1e-5)[0], (_t(5, 7), _IDS2, _t(4, 7), _t(7), _t(7)), ((5, 3, 4), (1, 1, 1), (33, 2, 9))),
    ("embedding_softmax", lambda w, i: torch.softmax(F.embedding(i, w) * 0.5, -1), (_t(5, 7), _IDS.int()), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("embedding_beside", lambda w, i, x: torch.cat((F.embedding(i, w), x), -1) * 2, (_t(5, 16), _IDS, _t(4, 8)), ((5, 4), (1, 1), (33, 67))),
    ("index_select", lambda x, i, y: (x.index_select(1, i) + y).relu(), (_t(3, 5, 7), _IDS, _t(3, 4, 7)), ((3, 5, 7, 4), (1, 1, 1, 1), (2, 33, 67, 5), (2, 3, 1030, 2))),
    ("index_select_last", lambda x, i: aten.index_select.default(x, -1, i).exp() + 1, (_t(5, 7), _IDS), ((5, 7, 4), (1, 1, 1), (33, 67, 130))),
    ("gather_last", lambda x, i: x.gather(-1, i) * 2 + 1, (_t(5, 7), _t(5, 4, dtype=torch.int64)), ((5, 7, 4), (1, 1, 1), (33, 67, 1030))),
    ("gather_first", lambda x, i: (x.gather(0, i) * 2, i + 1), (_t(9, 7), _t(4, 7, dtype=torch.int64)), ((9, 7, 4), (1, 1, 1), (33, 67, 5))),
    ("gather_smaller", lambda x, i: x.gather(1, i).relu() + 1, (_t(6, 8, 16), _t(3, 4, 8, dtype=torch.int64)), ((3, 4), (1, 1), (2, 67))),
    ("gather_sum", lambda x, i: (x.gather(1, i) * 2).sum(1), (_t(5, 7), _t(5, 4, dtype=torch.int64)), ((5, 7, 4), (1, 1, 1), (33, 67, 1030))),
    ("take", lambda x, i: torch.take(x, i) * 2 + 1, (_t(5, 7), _IDS2), ((5, 7, 3, 4), (1, 1, 1, 1), (33, 67, 2, 5))),
    ("gather_copied", lambda x, i: torch.gather(x, 1, i.clone().unsqueeze(1)) * 2, (_t(5, 7), _t(5, dtype=torch.int64)), ((5, 7), (1, 1), (33, 67))),
    ("gather_clamped", lambda x, i: torch.gather(x, 1, i.clamp(min=0).long().unsqueeze(1)) * 2, (_t(5, 7), _t(5, dtype=torch.int64)), ((5, 7), (1, 1), (33, 67))),
    ("take_along_dim", lambda x, i: torch.gather(x, 1, torch.remainder(i, 6)) * 2, (_t(5, 6), _t(5, 4, dtype=torch.int64)), ((5, 4), (1, 1), (33, 67))),
    ("index_rows", lambda x, i, y: x[i] * 2 + y, (_t(5, 7), _IDS, _t(7)), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("index_columns", lambda x, i: x[:, i] * 2 + 1, (_t(5, 7), _IDS), ((5, 7, 4), (1, 1, 1), (33, 67, 130))),
    ("index_pairs", lambda x, i, j: x[i, j].exp() + 1, (_t(5, 7), _IDS, _IDS.int()), ((5, 7, 4), (1, 1, 1), (33, 67, 130))),
    ("index_broadcast", lambda x, i, j: x[:, i, j] * 2 + 1, (_t(3, 5, 7), _t(4, 1, dtype=torch.int64), _t(6, dtype=torch.int64)), ((3, 5, 7, 4), (1, 1, 1, 1), (2, 33, 67, 9))),
    ("index_apart", lambda x, i, j: x[i, :, j].relu() + 1, (_t(3, 5, 7), _IDS, _IDS), ((3, 5, 7, 4), (1, 1, 1, 1), (2, 33, 67, 9))),
    ("index_of_one", lambda x, i: x[i, :] * 2 + 1, (_t(1, 7), _IDS), ((7, 4), (1, 1), (67, 9))),
    ("index_single", lambda x, i: aten.index.Tensor(x, [i]) * 2 + 1, (_t(5, 7), _t(dtype=torch.int64)), ((5, 7), (1, 1), (33, 67))),
    ("index_transposed", lambda x, i: x.t()[i] * 2 + 1, (_t(5, 7), _IDS), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("index_of_values", lambda x, i: aten.index.Tensor(x * 2, [i]) + 1, (_t(5, 7), _t(5, dtype=torch.int64)), ((5, 7), (1, 1), (33, 67))),
    ("index_reversed", lambda x: x[torch.arange(7, -1, -1)] * 2 + 1, (_t(8, 7),), ()),
    ("bucketize", lambda x, y, z: (torch.bucketize(x.exp(), y, right=True) + 1, torch.searchsorted(z, x) * 2, torch.searchsorted(z, x, side="right", out_int32=True)), (_t(5, 7), _t(16), _t(5, 6)), ((5, 7), (1, 1), (33, 67))),
    ("masked_index", lambda x, m, i: aten._unsafe_masked_index.default(x, m, [None, i], 0.5) * 2, (_t(5, 7), _t(5, 4, dtype=torch.bool), _IDS), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("upsample_nearest", lambda x: aten._unsafe_index.Tensor(x, [None, None, _HALF(6).unsqueeze(-1), _HALF(8)]) * 2 + 1, (_t(2, 3, 6, 8),), ()),
    ("upsample_kept_places", lambda x: (lambda h, w, p: (h, w, p, aten._unsafe_index.Tensor(x, [None, None, h.unsqueeze(-1), w]) * p + 1))(_HALF(6), _HALF(8), torch.arange(16) * 0.3), (_t(2, 3, 6, 8),), ()),
    ("relative_bias", lambda s, t, i: torch.softmax(s + t[i].view(4, 4, 2).permute(2, 0, 1), -1), (_t(3, 2, 4, 4), _t(9, 2), _t(16, dtype=torch.int64)), ((5, 7), (1, 1), (33, 67))),
)  # fmt: skip

# Writes by an index: on CPUs only. `16`, `8`: sizes that stay numbers.
_WRITES: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("embedding_backward", lambda g, i: (aten.embedding_dense_backward.default(g * 2, i, 16, -1, False), aten.embedding_dense_backward.default(g, i, 16, 3, False).relu() + 1), (_t(3, 4, 7), _IDS2), ((3, 4, 7), (1, 1, 1), (33, 2, 67), (9, 3, 1030))),
    ("index_add", lambda x, i, y: x.index_add(0, i, y.exp(), alpha=2).relu() + 1, (_t(5, 7), _IDS, _t(4, 7)), ((5, 7, 4), (1, 1, 1), (33, 67, 130), (2, 1030, 3))),
    ("index_add_middle", lambda x, i, y: x.index_add(1, i, y), (_t(3, 5, 7), _IDS.int(), _t(3, 4, 7)), ((3, 5, 7, 4), (1, 1, 1, 1), (2, 33, 67, 5), (2, 3, 1030, 2))),
    ("index_copies", lambda x, i, y, v: (x.index_copy(1, i, y * 2), x.index_fill(1, i, 2.5) + 1, x.index_fill(0, i, v).exp()), (_t(5, 7), _IDS, _t(5, 4), _t()), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("index_reduces", lambda x, i, y: (x.index_reduce(0, i, y * 2, "prod") + 1, x.index_reduce(0, i, y, "amax", include_self=False), x.index_reduce(0, i, y, "mean") * 2), (_t(5, 7), _IDS, _t(4, 7)), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("scatters", lambda x, i, y: (x.scatter(1, i, y * 2) + 1, x.scatter(1, i, 0.5), x.scatter_add(1, i, y).relu()), (_t(5, 7), _t(5, 4, dtype=torch.int64), _t(5, 4)), ((5, 7, 4), (1, 1, 1), (33, 67, 130))),
    ("scatter_add_smaller", lambda x, i, y: x.scatter_add(0, i, y.exp()) * 2, (_t(8, 16), _t(3, 4, dtype=torch.int64), _t(6, 8)), ((3, 4), (1, 1), (5, 7))),
    ("scatter_reduces", lambda x, i, y: (x.scatter_reduce(1, i, y * 2, "sum", include_self=False) + 1, x.scatter_reduce(1, i, y, "amin"), x.scatter_reduce(1, i, y, "mean", include_self=False) * 2), (_t(5, 7), _t(5, 4, dtype=torch.int64), _t(5, 4)), ((5, 7, 4), (1, 1, 1), (33, 67, 130))),
    ("index_put", lambda x, i, y: x.index_put((i,), y * 2, accumulate=True).relu() + 1, (_t(5, 7), _IDS, _t(4, 7)), ((5, 7, 4), (1, 1, 1), (33, 67, 130), (2, 1030, 3))),
    ("index_put_pairs", lambda x, i, j, y: (aten.index_put.default(x, [i, j], y, True), aten.index_put.default(x, [None, j], y[0]) + 1), (_t(5, 7), _t(4, 1, dtype=torch.int64), _t(6, dtype=torch.int64), _t(4, 6)), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("index_put_apart", lambda g, i: aten._unsafe_index_put.default(g.new_zeros(6, 16, 8), [i, None, i], g * 2, True), (_t(4, 16), _IDS), ()),
    ("put_masked", lambda x, m, i, y: aten._unsafe_masked_index_put_accumulate.default(x, m, [None, i], y * 2) + 1, (_t(5, 7), _t(5, 4, dtype=torch.bool), _IDS, _t(5, 4)), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("put", lambda x, i, y: (x.put(i, y * 2, accumulate=True) + 1, x.put(i, y)), (_t(5, 7), _IDS, _t(4)), ((5, 7, 4), (1, 1, 1), (33, 67, 9))),
    ("group_norm_backward", lambda g, x, m, r, w: tuple(aten.native_group_norm_backward.default(g * 2, x, m, r, w, x.shape[0], 6, x.shape[2], 3, [True, True, True])), (_t(4, 6, 5), _t(4, 6, 5), _t(4, 3), _t(4, 3), _t(6)), ((4, 5), (1, 1), (3, 67), (2, 1030))),
    ("max_unpool", lambda y, i: (aten.max_unpool2d.default(y.exp(), i, [16, 8]) * 2, aten.max_unpool3d.default(y, i, [2, 8, 16], [2, 2, 2], [0, 0, 0])), (_t(2, 3, 4, 4), _t(2, 3, 4, 4, dtype=torch.int64)), ()),
)  # fmt: skip

_CLASSES = torch.zeros(2, 4, 9, dtype=torch.int64)
_COMPOSITES: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], tuple[tuple[int, ...], ...]], ...] = (
    ("vector_product", lambda x, y: aten.linalg_cross(x * 2, y, dim=-1).relu() + 1, (_t(5, 3), _t(5, 3)), ((5,), (1,), (67,))),
    ("renorm_rows", lambda x: aten.renorm(x + 1, 2.0, 0, 1.5).relu() * 2, (_t(5, 7),), ((5, 7), (1, 1), (33, 67), (2, 1030))),
    ("distance", lambda x, y: aten.dist(x.relu(), y, 3.0) * 2, (_t(5, 7), _t(7)), ((5, 7), (1, 1), (33, 67), (2, 1030))),
    ("trace_of_square", lambda x: aten.trace(x).relu() * 2, (_t(5, 5),), ((5,), (1,), (67,))),
    ("is_among", lambda x, y: aten.isin(x.relu(), y).logical_not(), (_t(5, 8), _t(6)), ()),
    ("outer_product_beside_a_vector", lambda a, x, y: (aten.addr(a, x.relu(), y) + 1, x.relu()), (_t(5, 7), _t(5), _t(7)), ((5, 7), (1, 1), (33, 67))),
    ("outer_product_rrelu", lambda a, x, y, n: aten.rrelu_with_noise_backward(aten.addr(a, x, y, beta=0.5, alpha=2), a, n, 0.1, 0.3, True, False) + 1, (_t(5, 7), _t(5), _t(7), _t(5, 7)), ((5, 7), (1, 1), (33, 67))),
    ("matrix_vector", lambda a, x, y, z: (aten.addmv(a, x, y) + aten.mv(x, z)).relu(), (_t(5), _t(5, 7), _t(7), _t(7)), ((5, 7), (1, 1), (33, 67), (2, 1030))),
    ("dot_products", lambda x, y, z: (aten.dot(x.relu(), y) + aten.vdot(x, z)) * 2, (_t(7), _t(7), _t(7)), ((7,), (1,), (1030,))),
    ("image_loss", lambda x, y: aten.nll_loss2d_forward(x, y, None, 1, -100)[0] * 2, (_t(2, 5, 4, 9), _CLASSES), ((2, 5, 4, 3), (1, 1, 1, 1), (3, 7, 5, 9))),
    ("image_loss_weighted", lambda x, y, w: aten.nll_loss2d_forward(x, y, w, 2, 1)[0] * 2, (_t(2, 5, 4, 9), _CLASSES, _t(5)), ((2, 5, 4, 3), (1, 1, 1, 1), (3, 7, 5, 9))),
    ("weight_norm", lambda v, g: aten._weight_norm_interface(v, g, 0)[0] * 2, (_t(5, 7), _t(5, 1)), ((5, 7), (1, 2), (33, 67), (2, 1030))),
    ("block_diagonal", lambda x, y: aten.block_diag([x.relu(), y]) * 2 + 1, (_t(5, 7), _t(6, 8)), ((5, 7), (1, 1), (33, 67))),
)  # fmt: skip

# Where an infinite input meets a sum, aten's running formulas give NaN or Inf by the order of elements.
LOOSE_SPECIALS = frozenset(
    "var_mean layer_norm add_layer_norm layer_norm_backward layer_norm_backward_add batch_norm_backward "
    "relu_batch_norm_backward group_norm_silu group_norm_backward std_mean std_mean_all "
    "followed_norm_backward".split()
)

# Inputs that a norm has made, and which are float32 on a GPU where the others have 16 bits.
STATISTICS: dict[str, tuple[int, ...]] = {
    "layer_norm_backward": (2, 3), "layer_norm_backward_add": (3, 4), "followed_norm_backward": (2, 3),
    "batch_norm_backward": (3, 4), "relu_batch_norm_backward": (5, 6),
}  # fmt: skip

# Eager has no kernel of 16-bit floats for them on a CPU.
NO_HALVES = frozenset(("pool_avg_3d", "pool_backward_3d"))

_IMAGE_SIZES = ((3, 5, 7), (1, 2, 1), (4, 3, 67))
_FILLED_SIZES = {2: ((5, 7), (1, 1), (33, 67), (2, 1030)), 3: ((3, 5, 7), (1, 2, 1), (4, 3, 67), (2, 3, 1100))}
_LOSS_SIZES = ((5, 7), (1, 2), (33, 67), (3, 1030))


def _table() -> dict[str, Case]:
    cases = _unary_cases()
    cases += [Case(name, fn, example, static=(6,), tags=frozenset({"pointwise"})) for name, fn, example in _POINTWISE]
    cases += [Case(name, fn, example, tags=frozenset({"reduction"})) for name, fn, example in _REDUCTIONS]
    cases += [
        Case(name, fn, example, _FILLED_SIZES[max(t.dim() for t in example)], tags=frozenset({"reduction"}))
        for name, fn, example in (*_ENDS, *_FOLLOWED)
    ]
    cases += [Case(name, fn, example, _LOSS_SIZES, tags=frozenset({"loss"})) for name, fn, example in _LOSSES]
    cases += [
        Case(name, fn, example, _IMAGE_SIZES, static=(6,), tags=frozenset({"image"})) for name, fn, example in _IMAGES
    ]
    cases += [
        Case(name, fn, example, sizes, static=(6, 8, 16), tags=frozenset({"memory"}))
        for name, fn, example, sizes in (*_MEMORY, *_SHAPES)
    ]
    cases += [
        Case(name, fn, example, sizes, static=(8, 16), tags=frozenset({"pool"})) for name, fn, example, sizes in POOLS
    ]
    cases += [
        Case(name, fn, example, sizes, static=(6, 8, 16), tags=frozenset({"pool"}))
        for name, fn, example, sizes in POOLS_BY_AXES
    ]
    cases += [
        Case(name, fn, example, sizes, static=(6, 8, 16), tags=frozenset({"indexed"}))
        for name, fn, example, sizes in _INDEXED
    ]
    cases += [
        Case(name, fn, example, sizes, static=(6, 8, 16), tags=frozenset({"writes"}))
        for name, fn, example, sizes in _WRITES
    ]
    cases += [
        Case(name, fn, example, sizes, dynamic=name != "is_among", static=(3, 6, 8), tags=frozenset({"composite"}))
        for name, fn, example, sizes in _COMPOSITES
    ]
    return {case.name: case for case in cases}


CASES = _table()
ON_GPUS = [name for name, case in CASES.items() if "writes" not in case.tags]

# What the symbols are set to, by how many there are; a case adds its own through `sizes`.
SIZES_BY_SYMBOLS: dict[int, tuple[tuple[int, ...], ...]] = {
    0: ((),),
    1: ((5,), (1,), (67,)),
    2: ((5, 7), (1, 1), (33, 67), (3, 0), (2, 1030)),
    3: ((3, 5, 7), (1, 2, 1), (4, 3, 67), (2, 3, 1100), (0, 5, 7)),
    4: ((3, 6, 5, 7), (1, 2, 1, 3), (2, 4, 9, 33)),
}
