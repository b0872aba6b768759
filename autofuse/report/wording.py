"""Reason codes, states and numbers in words for people.

In: the codes that stages leave in the store, whose words are in `ir.reasons`. Out: short texts. Guarantee: no function
here fails on odd input.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

from autofuse.ir.reasons import (
    DecisionReason,
    LoweringReason,
    NoticeKind,
    RefusalReason,
    RootReason,
    SettingReason,
    words_of,
)
from autofuse.ir.records import EAGER
from autofuse.ir.steps import REQUIRES_GRAD

DECISION_REASONS = words_of(DecisionReason)
ROOT_REASONS = words_of(RootReason)
REFUSALS = words_of(RefusalReason, LoweringReason)
SETTING_REASONS = words_of(SettingReason)
NOTICES = words_of(NoticeKind)

VARIANTS = {
    EAGER: "eager",
    "c_generic": "C, any size",
    "c_specialised": "C, fixed size",
    "triton_generic": "Triton, any size",
    "triton_specialised": "Triton, fixed size",
    "way": "strategy",
    # Of an optimizer's step, for all tensors of a group at a time.
    "c_multi": "C, all tensors",
    "triton_multi": "Triton, all tensors",
    "foreach": "torch's foreach",
    "fused": "torch's fused",
}

# Strategies, by their names in `autofuse/strategies`.
STRATEGIES = {
    "parts": "matmuls by aten, the rest in kernels",
    "one_kernel": "all of it in one kernel",
    "onednn_linear": "oneDNN's matmul with the epilogue inside",
    "onednn_conv": "oneDNN's convolution with the epilogue inside",
    "onednn_conv_packed": "the same with weights in oneDNN's layout",
    "cudnn_conv": "cuDNN's convolution with the epilogue inside",
    "cublas_epilogue": "cuBLASLt's matmul with the epilogue inside",
    "sdpa": "scaled_dot_product_attention",
    "joined_products": "a sum of matmuls as one matmul of concatenated operands",
    "sdpa_training": "scaled_dot_product_attention, forward and backward",
    "onednn_product": "oneDNN's matmul",
    "onednn_product_rows": "oneDNN's matmul of a contiguous copy",
    "bias_apart": "the bias added by the next kernel",
    "blocks": "blocks of rows that stay in the caches",
    "generated_product": "a generated matmul, the rest in kernels",
    "channels_last": "channels-last layout from one convolution to the next",
    "channels_last_generated": "the same with generated convolutions",
    "generated_convolution": "generated convolutions, the rest in kernels",
    "generated_convolution_rows": "generated convolutions of images row by row, the rest in kernels",
    "generated_gradients": "generated gradients of a convolution",
    "tiled": "a tiled matmul with the epilogue inside",
}
_CUT = re.compile(r"cut_(\d+)_(.+)")

STATUSES = {
    "ok": "ok",
    "wrong": "wrong result",
    "crash": "crashed",
    "timeout": "too slow to finish",
    "out_of_memory": "out of memory",
    "compile_error": "did not compile",
    "pruned": "given up early",
    "refused": "not applicable",
    "not_bit_equal": "not eager's to the bit",
}


def strategy(name: str) -> str:
    """``sdpa: scaled_dot_product_attention``; ``cut_3_exp: two kernels, cut before exp``; else the name alone."""
    cut = _CUT.fullmatch(name)
    meaning = f"two kernels, cut before {cut[2]}" if cut else STRATEGIES.get(name)
    return f"{name}: {meaning}" if meaning else name


def sentence(text: str) -> str:
    """The text with a capital first letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


# ---- numbers ------------------------------------------------------------------------------------------


def microseconds(value: float | None) -> str:
    """``31.2 µs``, ``4.50 ms``, ``1.20 s``; a dash for None."""
    if value is None:
        return "–"
    if value < 1_000:
        return f"{value:.1f} µs"
    if value < 1_000_000:
        return f"{value / 1e3:.2f} ms"
    return f"{value / 1e6:.2f} s"


def seconds(value: float | None) -> str:
    """``0.8 s``, ``2 min 05 s``, ``1 h 12 min``; a dash for None."""
    if value is None:
        return "–"
    if abs(value) < 59.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def causes(of: Iterable[tuple[str, float]]) -> str:
    """`` (imports 0.7 s, tracing 2.8 s)``: what a sum of seconds consists of; empty where nothing is known."""
    parts = [f"{cause} {seconds(value)}" for cause, value in of if value >= 0.05]
    return f" ({', '.join(parts)})" if parts else ""


def times(value: float | None) -> str:
    """``1.34x``; a dash for None."""
    return "–" if value is None else f"{value:.2f}x"


def interval(low: float | None, high: float | None) -> str:
    """``1.29 to 1.38``; empty where there is none."""
    return "" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def percent(share: float) -> str:
    """A share of 0 to 1 as ``12.3 %``."""
    return f"{100 * share:.1f} %"


def share_of_time(share: float) -> str:
    """``12.3 %``; a dash for what ran in no timed step."""
    return percent(share) if share > 0 else "–"


def amount(value: float) -> str:
    """A large number in three digits: ``812``, ``16.2 M``, ``1.05 T``."""
    for unit in ("", " k", " M", " G", " T"):
        if value < 999.5:
            digits = 0 if not unit or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f}{unit}"
        value /= 1000
    return f"{value:,.0f} P"


def nbytes(value: float) -> str:
    """Bytes as ``812 B``, ``16.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            digits = 0 if unit == "B" or value >= 99.95 else 1
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def moment(at: float) -> str:
    """UTC epoch seconds as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def plural(count: int, one: str, many: str = "") -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


# ---- names --------------------------------------------------------------------------------------------

_SIZES = re.compile(r"torch\.Size\(\[([\d, -]*)\]\)")
_FLAGS = re.compile(r"(True|False), (True|False)\)$")


def signature(text: str) -> str:
    """The shapes of a call's arguments, ``4×128 4×128``, followed by what differs from plain training.

    ``4×*`` stands for all sizes that the row does not tell apart.
    """
    shapes = [sizes.replace(" ", "").replace(",", "×").replace("-1", "*") or "scalar" for sizes in _SIZES.findall(text)]
    flags = _FLAGS.search(text)
    if not shapes:
        return text
    shown = " ".join(shapes[:4])
    shown += f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    shown += f" {REQUIRES_GRAD}" if REQUIRES_GRAD in text else ""
    if flags is None:
        return shown
    training, gradients = (flag == "True" for flag in flags.groups())
    return shown + ("" if training else " eval") + ("" if gradients else " no_grad")


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
