"""The kind and cost of each aten operator for fusion: the first of the rule tables.

In: the name of an overload. Out: its kind and its cost. An overload that is not listed is opaque: it
runs as eager runs it and no fusion reaches across it. The lowering table of the code generator covers
exactly the fusible kinds; a test holds the two tables together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OpKind(Enum):
    """How an operator moves through a loop nest."""

    POINTWISE = "elementwise"  # one output element from one element of each (broadcast) input
    CREATION = "creation"  # no tensor input: constants, arange
    VIEW = "view"  # same elements under another index, free inside a kernel
    PART = "part"  # a view of some of the elements
    MEMORY = "memory"  # elements put at other places: concatenation, padding, shifts
    POOLING = "pooling"  # one output element from the few elements of a window
    INDEXED = "indexed"  # one output element from that element of a table which index tensors name
    WRITE = "write"  # elements put, or added, to places of a tensor which index tensors name
    REDUCTION = "reduction"  # dims disappear or become 1
    NORMALISATION = "normalisation"  # reduction and pointwise together along the same dims
    LOSS = "loss"  # of classes, which reads one element a row by an index, or of elements; and its gradient
    COMPOSITE = "composite"  # calculated by what PyTorch decomposes it into (`ir.composites`)
    RANDOM = "random"  # draws from the generator; keeps its place in the order
    OPAQUE = "opaque"  # everything else


CONVOLUTION = "aten.convolution.default"
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
ATTENTION_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
# Numbers of two arguments: of the query, which key and value follow, and of the dropout, which is_causal follows.
TORCH_ATTENTIONS: dict[str, tuple[int, int]] = {ATTENTION_FORWARD: (0, 3), ATTENTION_BACKWARD: (1, 6)}


@dataclass(frozen=True)
class OpInfo:
    """Facts about an overload."""

    kind: OpKind
    flops: float = 1.0  # floating-point operations per element of the largest tensor, roughly


_M, _W = OpKind.MEMORY, OpKind.PART
_P, _V, _R, _N, _L, _C = (
    OpKind.POINTWISE,
    OpKind.VIEW,
    OpKind.REDUCTION,
    OpKind.NORMALISATION,
    OpKind.LOSS,
    OpKind.CREATION,
)

_GROUPS: tuple[tuple[OpKind, float, str], ...] = (
    (_P, 1, "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor mul.Scalar"),
    (_P, 4, "div.Tensor div.Scalar reciprocal.default sqrt.default rsqrt.default"),
    (_P, 1, "neg.default abs.default sign.default sgn.default floor.default ceil.default round.default trunc.default"),
    (_P, 1, "square.default maximum.default minimum.default clamp.default clamp.Tensor clamp_min.default"),
    (_P, 1, "clamp_max.default clamp_min.Tensor clamp_max.Tensor relu.default hardtanh.default leaky_relu.default"),
    (_P, 10, "exp.default exp2.default expm1.default log.default log2.default log10.default log1p.default"),
    (_P, 12, "sin.default cos.default tan.default tanh.default sinh.default cosh.default asin.default acos.default"),
    (_P, 12, "atan.default erf.default erfc.default sigmoid.default silu.default mish.default softplus.default"),
    (_P, 12, "elu.default gelu.default hardswish.default hardsigmoid.default log_sigmoid_forward.default"),
    (_P, 20, "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar atan2.default fmod.Scalar remainder.Scalar"),
    (_P, 12, "xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other special_entr.default special_xlog1py.default"),
    (_P, 12, "special_xlog1py.self_scalar special_xlog1py.other_scalar logit.default logit_backward.default"),
    (_P, 12, "asinh.default acosh.default atanh.default hypot.default nextafter.default sinc.default ldexp.Tensor"),
    (_P, 24, "fmod.Tensor remainder.Tensor remainder.Scalar_Tensor div.Tensor_mode div.Scalar_mode"),
    (_P, 24, "floor_divide.default floor_divide.Scalar logaddexp.default logaddexp2.default lgamma.default"),
    (_P, 2, "copysign.Tensor copysign.Scalar frac.default fmax.default fmin.default nan_to_num.default"),
    (_P, 1, "isposinf.default isneginf.default signbit.default heaviside.default angle.default deg2rad.default"),
    (_P, 1, "rad2deg.default bitwise_or.Scalar bitwise_xor.Scalar"),
    (_P, 4, "round.decimals threshold.default"),
    (_P, 4, "_prelu_kernel.default _prelu_kernel_backward.default"),
    (_P, 12, "celu.default"),
    (_P, 60, "digamma.default polygamma.default mvlgamma.default erfinv.default special_erfcx.default"),
    (_P, 60, "special_log_ndtr.default special_ndtri.default"),
    (_P, 600, "special_zeta.default special_zeta.other_scalar special_zeta.self_scalar"),
    (_P, 20, "frexp.Tensor"),
    (_P, 80, "i0.default special_i0e.default special_i1.default special_i1e.default special_airy_ai.default"),
    (_P, 80, "special_bessel_j0.default special_bessel_j1.default special_bessel_y0.default"),
    (_P, 80, "special_bessel_y1.default special_spherical_bessel_j0.default special_modified_bessel_i0.default"),
    (_P, 80, "special_modified_bessel_i1.default special_modified_bessel_k0.default"),
    (_P, 80, "special_modified_bessel_k1.default special_scaled_modified_bessel_k0.default"),
    (_P, 80, "special_scaled_modified_bessel_k1.default"),
    (_P, 1, "where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor"),
    (_P, 1, "eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor"),
    (_P, 1, "gt.Scalar gt.Tensor ge.Scalar ge.Tensor isnan.default isinf.default"),
    (_P, 1, "logical_and.default logical_or.default logical_xor.default logical_not.default"),
    (_P, 1, "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_not.default bitwise_and.Scalar"),
    (_P, 0, "_to_copy.default clone.default copy.default"),
    (_P, 2, "addcmul.default addcdiv.default lerp.Scalar lerp.Tensor"),
    (_P, 1, "tril.default triu.default"),
    (_P, 1, "threshold_backward.default hardtanh_backward.default leaky_relu_backward.default"),
    (_P, 15, "gelu_backward.default silu_backward.default tanh_backward.default sigmoid_backward.default"),
    (_P, 15, "elu_backward.default softplus_backward.default mish_backward.default hardswish_backward.default"),
    (_P, 4, "hardsigmoid_backward.default log_sigmoid_backward.default native_dropout_backward.default"),
    (_C, 0, "full.default zeros.default ones.default scalar_tensor.default arange.default arange.start"),
    (_C, 0, "arange.start_step full_like.default zeros_like.default ones_like.default"),
    (_V, 0, "view.default _unsafe_view.default reshape.default unsqueeze.default squeeze.dim squeeze.dims"),
    (_V, 0, "detach.default expand.default permute.default transpose.int t.default alias.default"),
    (_W, 0, "slice.Tensor select.int split.Tensor split_with_sizes.default unbind.int"),
    (_M, 0, "cat.default stack.default constant_pad_nd.default slice_backward.default slice_scatter.default"),
    (_M, 0, "select_backward.default select_scatter.default flip.default roll.default repeat.default"),
    (_P, 0, "lift_fresh_copy.default"),
    (_C, 0, "new_full.default new_zeros.default new_ones.default zero.default fill.Scalar"),
    (_C, 1, "eye.default eye.m linspace.default"),
    (_C, 0, "empty_like.default"),
    (_P, 0, "fill.Tensor"),
    (_V, 0, "squeeze.default"),
    (_W, 0, "diagonal.default unfold.default unsafe_split.Tensor unsafe_split_with_sizes.default"),
    (_M, 0, "alias_copy.default detach_copy.default expand_copy.default view_copy.default permute_copy.default"),
    (_M, 0, "t_copy.default transpose_copy.int squeeze_copy.default squeeze_copy.dim squeeze_copy.dims"),
    (_M, 0, "unsqueeze_copy.default slice_copy.Tensor select_copy.int unbind_copy.int split_copy.Tensor"),
    (_M, 0, "split_with_sizes_copy.default narrow_copy.default diagonal_copy.default unfold_copy.default"),
    (_M, 0, "rot90.default pixel_shuffle.default pixel_unshuffle.default"),
    (_M, 0, "channel_shuffle.default native_channel_shuffle.default"),
    (_M, 0, "diag_embed.default diagonal_scatter.default diagonal_backward.default"),
    (_M, 2, "unfold_backward.default"),
    (OpKind.POOLING, 20, "_adaptive_avg_pool2d.default avg_pool2d_backward.default"),
    (OpKind.POOLING, 20, "_adaptive_avg_pool2d_backward.default"),
    (_M, 12, "glu.default glu_backward.default"),
    (_M, 1, "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default"),
    (_M, 1, "replication_pad1d.default replication_pad2d.default replication_pad3d.default"),
    (_M, 4, "reflection_pad1d_backward.default reflection_pad2d_backward.default reflection_pad3d_backward.default"),
    (_M, 4, "replication_pad1d_backward.default replication_pad2d_backward.default"),
    (_M, 4, "replication_pad3d_backward.default"),
    (OpKind.INDEXED, 2, "embedding.default index_select.default gather.default take.default"),
    (OpKind.INDEXED, 2, "index.Tensor _unsafe_index.Tensor"),
    (OpKind.INDEXED, 20, "bucketize.Tensor searchsorted.Tensor"),
    (OpKind.INDEXED, 4, "_unsafe_masked_index.default"),
    (OpKind.WRITE, 4, "embedding_dense_backward.default index_add.default scatter_add.default scatter.src"),
    (OpKind.WRITE, 4, "scatter.value scatter_reduce.two index_copy.default index_fill.int_Scalar"),
    (OpKind.WRITE, 4, "index_fill.int_Tensor index_reduce.default index_put.default _unsafe_index_put.default"),
    (OpKind.WRITE, 4, "put.default _unsafe_masked_index_put_accumulate.default"),
    (OpKind.WRITE, 4, "max_unpool2d.default max_unpool3d.default"),
    (OpKind.POOLING, 20, "max_pool2d_with_indices.default avg_pool2d.default"),
    (_W, 0, "as_strided.default"),
    (_M, 2, "as_strided_copy.default as_strided_scatter.default _chunk_cat.default"),
    (OpKind.POOLING, 8, "im2col.default"),
    (_M, 20, "col2im.default"),
    (OpKind.POOLING, 20, "max_pool3d_with_indices.default avg_pool3d.default _adaptive_avg_pool3d.default"),
    (OpKind.POOLING, 20, "adaptive_max_pool2d.default adaptive_max_pool3d.default avg_pool3d_backward.default"),
    (OpKind.POOLING, 20, "_adaptive_avg_pool3d_backward.default max_pool2d_with_indices_backward.default"),
    (OpKind.POOLING, 20, "max_pool3d_with_indices_backward.default adaptive_max_pool2d_backward.default"),
    (OpKind.POOLING, 20, "adaptive_max_pool3d_backward.default"),
    (_R, 4, "cumsum.default cumprod.default cummax.default cummin.default"),
    (_R, 24, "logcumsumexp.default"),
    (_R, 1, "sum.dim_IntList sum.default mean.dim mean.default amax.default amin.default prod.dim_int"),
    (_R, 1, "any.dim all.dim any.default all.default"),
    (_R, 1, "any.dims all.dims max.default min.default aminmax.default prod.default nansum.default"),
    (_R, 3, "argmax.default argmin.default max.dim min.dim"),
    (_R, 1, "count_nonzero.default count_nonzero.dim_IntList"),
    (_R, 4, "std_mean.correction norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype"),
    (_R, 4, "var.correction var_mean.correction std.correction logsumexp.default linalg_vector_norm.default"),
    (_N, 15, "_softmax.default _log_softmax.default _safe_softmax.default"),
    (_N, 4, "_softmax_backward_data.default _log_softmax_backward_data.default"),
    (_N, 8, "native_layer_norm.default native_layer_norm_backward.default"),
    (_N, 8, "_fused_rms_norm.default _fused_rms_norm_backward.default"),
    (_N, 8, "_native_batch_norm_legit_no_training.default native_batch_norm_backward.default"),
    (_N, 8, "_native_batch_norm_legit.no_stats native_group_norm.default"),
    (_N, 8, "_native_batch_norm_legit_functional.default"),
    (_N, 8, "native_group_norm_backward.default"),
    (_L, 2, "nll_loss_forward.default nll_loss_backward.default mse_loss.default mse_loss_backward.default"),
    (_L, 3, "huber_loss.default huber_loss_backward.default"),
    (_L, 6, "smooth_l1_loss.default smooth_l1_loss_backward.default"),
    (_L, 25, "binary_cross_entropy_with_logits.default"),
    (_L, 25, "binary_cross_entropy.default soft_margin_loss.default soft_margin_loss_backward.default"),
    (_L, 6, "binary_cross_entropy_backward.default"),
    (OpKind.COMPOSITE, 6, "linalg_cross.default renorm.default dist.default trace.default addr.default"),
    (OpKind.COMPOSITE, 2, "isin.Tensor_Tensor rrelu_with_noise_backward.default block_diag.default"),
    (OpKind.COMPOSITE, 2, "mv.default addmv.default dot.default vdot.default"),
    (OpKind.COMPOSITE, 4, "nll_loss2d_forward.default _weight_norm_interface.default"),
)

OPS: dict[str, OpInfo] = {
    f"aten.{name}": OpInfo(kind, flops) for kind, flops, names in _GROUPS for name in names.split()
}
# Dropout. On a CPU capture splits `native_dropout` in two of ours: the mask, drawn in eager's order and from eager's
# stream, and the scaling, calculated as eager does. On a GPU eager has one kernel for both, and so has one of ours.
OPS["autofuse.bernoulli_mask.default"] = OpInfo(OpKind.RANDOM, 2)  # x or its sizes, keep -> bool mask
OPS["autofuse.dropout_scale.default"] = OpInfo(OpKind.POINTWISE, 2)  # x, mask, scale -> x * mask * scale
OPS["autofuse.philox_dropout.default"] = OpInfo(OpKind.POINTWISE, 60)  # x, p, train -> result, mask: eager's numbers
OPS["aten.native_dropout.default"] = OpInfo(OpKind.RANDOM, 60)  # what capture leaves as it is, on a GPU

FUSIBLE = frozenset({_P, _V, _R, _N, _L, _C, _M, _W, OpKind.POOLING, OpKind.INDEXED, OpKind.WRITE, OpKind.COMPOSITE})
MOVES = frozenset(("_to_copy", "clone", "copy", "lift_fresh_copy", "full_like", "zeros_like", "ones_like"))
VIEWS = frozenset({_V, _W})  # what aten makes for nothing

_OPAQUE = OpInfo(OpKind.OPAQUE)
# What a library has said the unfused form of (`library_operators`). Its operators bear this name only with a body.
_LIBRARYS = OpInfo(OpKind.COMPOSITE, 8)


def info(target: str) -> OpInfo:
    """The facts about an overload; opaque where it is not listed."""
    return OPS.get(target) or (_LIBRARYS if is_librarys(target) else _OPAQUE)


def is_librarys(target: str) -> bool:
    """Whether an operator is a library's, not torch's or ours."""
    return target.startswith("library.")


def is_move(target: str) -> bool:
    """Whether an operator only puts elements elsewhere, converted or not: such need share no loops in a kernel."""
    return info(target).kind is OpKind.MEMORY or target.split(".")[1] in MOVES


def stands_beside(target: str) -> bool:
    """Whether an operation is element-wise work, which may share a kernel with independent work in other loops."""
    return info(target).kind in (OpKind.POINTWISE, OpKind.CREATION, OpKind.MEMORY)
