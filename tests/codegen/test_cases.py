"""Every case of the table, generic and specialised, in several dtypes, against eager and float64."""

from __future__ import annotations

import pytest
import torch

from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.knobs import default_config
from autofuse.codegen.loops import check
from autofuse.codegen.lowering.lower import lower
from autofuse.ir.records import make_config
from tests.cases import CASES, LOOSE_SPECIALS, SIZES_BY_SYMBOLS, Case
from tests.codegen.conftest import Verify

# Kernels of one dtype say little about those of another only where code differs: a sample of each shape of loop.
OTHER_DTYPES = (
    "add_bias_gelu", "add_layer_norm", "amax_amin", "attention_scores", "batch_norm_training", "bias_gradient", "casts",
    "compare_scalar", "cross_entropy", "gelu_backward", "group_norm", "layer_norm_backward", "log_softmax",
    "masked_fill", "mean_all", "mse", "rms_norm_parts", "softmax", "softmax_backward", "sum_leading",
    "transposed_add", "unary_erf", "unary_exp", "unary_tanh", "variance",
)  # fmt: skip


def sizes_of(case: Case, symbols: int) -> tuple[tuple[int, ...], ...]:
    return case.sizes or SIZES_BY_SYMBOLS[symbols]


@pytest.mark.parametrize("name", CASES)
def test_generic(name: str, verify: Verify) -> None:
    case = CASES[name]
    form = case.form()
    assert check(lower(form)) == []
    verify(form, sizes_of(case, len(form.symbols)), ("normal", "special", "large"), loose=name in LOOSE_SPECIALS)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_dtypes(name: str, dtype: str, verify: Verify) -> None:
    case = CASES[name]
    form = case.form(getattr(torch, dtype))
    verify(form, sizes_of(case, len(form.symbols)), loose=name in LOOSE_SPECIALS)


SPECIALISED = (
    "add_bias_gelu", "attention_scores", "layer_norm_backward", "cross_entropy", "bias_gradient",
    "batch_norm_training",
)  # fmt: skip


@pytest.mark.parametrize("name", SPECIALISED)
def test_specialised(name: str, verify: Verify) -> None:
    case = CASES[name]
    form = case.form()
    verify(form, sizes_of(case, len(form.symbols))[-3:], ("normal",), specialise=True, loose=name in LOOSE_SPECIALS)


@pytest.mark.parametrize("name", SPECIALISED)
def test_every_choice_of_every_knob(name: str, verify: Verify) -> None:
    """One knob at a time away from the default."""
    case = CASES[name]
    form = case.form()
    knobs = knobs_for(lower(form))
    default = {k.name: k.default for k in knobs}
    for knob in knobs:
        for choice in knob.choices:
            if choice != knob.default:
                config = make_config({**default, knob.name: choice})
                sizes = sizes_of(case, len(form.symbols))
                verify(form, sizes, ("normal",), config=config, loose=name in LOOSE_SPECIALS)


STREAMED = {
    "add_bias_gelu": ((3, 1031), (65, 513), (1, 5000), (0, 700)),
    "casts": ((3, 1031),),
    "batch_norm_inference": ((2, 3, 1031),),
    "softmax": ((2, 3, 1031), (1, 2, 512)),
    "add_layer_norm": ((2, 3, 1031), (1, 65, 517)),
    "layer_norm_backward": ((2, 3, 1031),),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", STREAMED)
def test_outputs_written_past_the_caches(name: str, dtype: str, verify: Verify) -> None:
    """In tiles, from rows that begin anywhere in a cache line; a header of intrinsics would take 0.5 s to compile."""
    case = CASES[name]
    form = case.form(getattr(torch, dtype))
    kernel = lower(form)
    config = make_config({**dict(default_config(knobs_for(kernel))), "nontemporal": True})
    text = print_c(kernel, config).text
    assert "af_stream(" in text and "#include <immintrin" not in text
    sizes = [values[: len(form.symbols)] for values in STREAMED[name]]
    verify(form, sizes, ("normal", "special"), config=config, loose=name in LOOSE_SPECIALS, threads=2)


@pytest.mark.parametrize(("name", "rows", "expected"), [
    ("add_scalar", 64, None), ("add_scalar", 64 * 1024, True), ("add_bias_gelu", 64 * 1024, False)
])  # fmt: skip
def test_only_large_outputs_may_be_streamed(name: str, rows: int, expected: bool | None) -> None:
    """From the start where no arithmetic bounds the kernel, else as a choice of the search."""
    kernel = lower(CASES[name].form())
    sizes = dict(zip(kernel.symbols, (rows, 1024), strict=True))
    assert dict(default_config(knobs_for(kernel, sizes))).get("nontemporal") is expected
    assert ("nontemporal" in {knob.name for knob in knobs_for(kernel, sizes)}) is (expected is not None)


@pytest.mark.parametrize("name", ["bias_gradient", "mean_all", "layer_norm_backward", "sum_all", "add_bias_gelu"])
def test_threads(name: str, verify: Verify) -> None:
    """Large enough to be shared among threads, by rows and by columns."""
    case = CASES[name]
    form = case.form()
    sizes = {2: ((1, 70_001), (700, 129)), 3: ((1, 1, 70_001), (7, 101, 129))}[len(form.symbols)]
    verify(form, sizes, ("normal",), threads=3)


WHOLE = ("sum_all", "mean_all", "var_all", "norm_all", "mse", "huber", "any_all_whole", "count_bool", "followed_losses")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", WHOLE)
def test_results_of_whole_tensors_have_the_same_bits_for_any_number_of_threads(
    name: str, dtype: torch.dtype, generator: FusionKernelGenerator
) -> None:
    """Totals are made in float64: rounding to float32 hides most of what another order changes."""
    form = CASES[name].form(dtype)
    kernel = generator.generate_generic_kernel(form)
    for values in [(1, 1), (63, 520), (64, 512), (65, 513), (1, 70_001), (3, 40_000), (8193, 5), (0, 7)]:
        sizes = values if len(form.symbols) == 2 else (1, *values)
        for kind in ("normal", "special"):
            inputs = make_inputs(form, sizes, seed=3, kind=kind)  # type: ignore[arg-type]
            first = kernel(*inputs, threads=1)
            for threads in (2, 3, 7):
                for a, b in zip(first, kernel(*inputs, threads=threads), strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_at_the_edges_of_shares(name: str, verify: Verify) -> None:
    form = CASES[name].form()
    for values in [(1, 1), (63, 521), (64, 512), (65, 513), (1, 70_001), (2, 4097 * 8)]:
        sizes = values if len(form.symbols) == 2 else (1, *values)
        verify(form, [sizes], ("normal", "special"), loose=name in (*LOOSE_SPECIALS, "var_all"), threads=3)
