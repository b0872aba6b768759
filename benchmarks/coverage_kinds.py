"""Which of PyTorch's operators `coverage.py` looks at, and of which kind each is.

In: an entry of torch's own table (`op_db`) and its name. Out: a kind, or None for one that is left out. Torch's classes
of entries tell unary, binary and reduction operators; the rest is listed here, by the beginnings of names.
"""

from __future__ import annotations

from typing import Any

# What no fused kernel is meant for: linear algebra and matmuls (groups have them), FFT, complex and sparse tensors,
# random numbers, sorting, histograms, creation alone, and functions without an output tensor.
_NAMES = (
    "mm mv bmm dot vdot inner addmm addmv addbmm baddbmm addr matmul tensordot einsum lu lu_unpack lu_solve qr svd "
    "svd_lowrank pca_lowrank geqrf ormqr pinverse triangular_solve logdet matrix_exp __rmatmul__ cdist cov corrcoef "
    "stft istft complex polar view_as_complex cdouble cfloat chalf real imag conj conj_physical resolve_conj "
    "resolve_neg sort msort argsort kthvalue mode median nanmedian quantile nanquantile histogram histogramdd histc "
    "bincount unique unique_consecutive nonzero nonzero_static argwhere item equal allclose broadcast_shapes "
    "to_sparse hash_tensor cartesian_prod combinations block_diag segment_reduce _segment_reduce grid_sampler_2d "
    "grid_sampler_3d arange linspace logspace tril_indices triu_indices eye full ones zeros scalar_tensor resize_ "
    "resize_as_ norm.nuc "
)
_LEFT_OUT = frozenset(_NAMES.split())
_LEFT_OUT_FAMILIES = (
    "linalg", "fft.", "sparse", "jiterator", "torch.ops", "ops.", "cholesky", "empty", "new_", "rand", "masked.",
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal.", "uniform", "multinomial", "signal.",
    "special.chebyshev", "special.shifted", "special.hermite", "special.laguerre", "special.legendre", "torch_nn",
    "nn.functional.conv", "nn.functional.linear", "nn.functional.bilinear", "nn.functional.multi_head",
    "nn.functional.scaled_dot", "nn.functional.dropout", "nn.functional.alpha_dropout", "nn.functional.feature_alpha",
    "nn.functional.fractional", "nn.functional.rrelu", "nn.functional.gaussian_nll", "nn.functional.ctc_loss",
    "nn.functional.embedding_bag", "nn.functional.pdist", "nn.functional.grid_sample",
)  # fmt: skip

# By the beginning of the name; the first that fits.
_KINDS: tuple[tuple[str, str], ...] = (
    ("indexing", "gather index_ take scatter masked_scatter masked_select put __getitem__ nn.functional.embedding"),
    ("indexing", "nn.functional.one_hot bucketize searchsorted isin _unsafe_masked_index select_scatter slice_scatter"),
    ("indexing", "diagonal_scatter as_strided_scatter nn.functional.interpolate nn.functional.upsample _upsample"),
    ("indexing", "nn.functional.max_unpool"),
    ("norm", "nn.functional.layer_norm nn.functional.batch_norm nn.functional.instance_norm nn.functional.group_norm"),
    ("norm", "nn.functional.rms_norm nn.functional.local_response nn.functional.normalize native_group_norm softmax"),
    ("norm", "native_layer_norm native_batch_norm _native_batch_norm _batch_norm renorm log_softmax _softmax"),
    ("norm", "nn.functional.softmin"),
    ("loss", "nn.functional.cross_entropy nn.functional.binary_cross nn.functional.kl_div nn.functional.cosine_sim"),
    ("loss", "nn.functional.pairwise"),
    ("reduction", "max.reduction min.reduction std var aminmax logsumexp norm dist trace cumsum cumprod cummax cummin"),
    ("reduction", "logcumsumexp cumulative_trapezoid trapezoid trapz topk sum_to_size nn.functional.avg_pool"),
    ("reduction", "nn.functional.max_pool nn.functional.adaptive max_pool2d"),
    ("shape", "nn.functional.pad nn.functional.pixel nn.functional.unfold nn.functional.channel_shuffle"),
    ("pointwise", "where lerp addcmul addcdiv clamp masked_fill clone to contiguous nn.functional. zero_ logaddexp2"),
    ("pointwise", "tril triu cross gradient diff native_dropout_backward"),
)


def kind_of(op: Any, name: str) -> str | None:
    """The kind of an entry of ``op_db``; None for one that is left out."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, ShapeFuncInfo, UnaryUfuncInfo

    if {name, name.split(".")[0]} & _LEFT_OUT or name.startswith(_LEFT_OUT_FAMILIES):
        return None
    if isinstance(op, UnaryUfuncInfo | BinaryUfuncInfo):
        return "pointwise"
    if isinstance(op, ReductionOpInfo):
        return "reduction"
    if isinstance(op, ShapeFuncInfo):
        return "shape"
    if name.startswith("nn.functional.") and "loss" in name:
        return "loss"
    return next((kind for kind, words in _KINDS if name.startswith(tuple(words.split()))), "shape")
