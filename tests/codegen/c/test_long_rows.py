"""Rows longer than caches: chunks that threads share, and passes merged into one. Errors, NaN, Inf, bits."""

from __future__ import annotations

import math

import pytest
import torch

from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.knobs import default_config
from autofuse.codegen.loops import check
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.one_pass import merge_passes
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config, make_config
from tests.cases import CASES, LOOSE_SPECIALS
from tests.codegen.conftest import Verify

MERGED = {
    "softmax": "exp", "logsumexp": "exp_finite", "safe_softmax": "exp", "attention_scores": "exp",
    "layer_norm": "squares", "variance": "squares", "var_all": "squares", "followed_rows_then_all": "exp",
    "cross_entropy": "exp", "embedding_softmax": "exp",
    "broadcast_beside_rows": "exp",
}  # fmt: skip
CHUNKED = ("amax_amin", "amax_int", "prod", "any_all", "norms", "argmax_ties", "argmax_all", "normalise", "sum_int")
LENGTHS = (0, 1, 8191, 8192, 8193, 20011)  # of a row: chunks are of 4096 columns at least


def config_of(form: NodeForm, **chosen: object) -> Config:
    return make_config({**dict(default_config(knobs_for(lower(form)))), **chosen})  # type: ignore[dict-item]


def sizes_of(form: NodeForm, length: int) -> tuple[int, ...]:
    return (*(1, 2, 1)[: len(form.symbols) - 1], length)


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("name", MERGED)
def test_merged_passes(name: str, chunks: bool, verify: Verify) -> None:
    form = CASES[name].form()
    merged = merge_passes(lower(form))
    assert [v.attr for v in merged.values if v.op == "row_merge"] == [MERGED[name]]
    assert check(merged) == []
    sizes = CASES[name].sizes or [sizes_of(form, n) for n in LENGTHS if n > 1]
    config = config_of(form, passes="one", row_chunks=chunks)
    verify(form, sizes, ("normal", "special", "large"), config, loose=name in LOOSE_SPECIALS, threads=3)


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks(name: str, verify: Verify) -> None:
    form = CASES[name].form()
    sizes = CASES[name].sizes or [sizes_of(form, n) for n in LENGTHS if n > 1]
    verify(
        form, sizes, ("normal", "special"), config_of(form, row_chunks=True), loose=name in LOOSE_SPECIALS, threads=3
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "attention_scores"])
def test_dtypes(name: str, dtype: str, verify: Verify) -> None:
    form = CASES[name].form(getattr(torch, dtype))
    sizes = [sizes_of(form, n) for n in (63, 20011)]
    verify(form, sizes, ("normal", "special"), config_of(form, passes="one", row_chunks=True), threads=3)


@pytest.mark.parametrize("name", ["softmax", "var_all", "norms", "argmax_all", "followed_rows_then_all", "layer_norm"])
def test_any_number_of_threads_gives_the_same_bits(name: str, generator: FusionKernelGenerator) -> None:
    form = CASES[name].form(torch.float64)
    mergeable = merge_passes(lower(form)) is not lower(form)
    for passes in ("several", "one")[: 1 + mergeable]:
        kernel = generator.generate_generic_kernel(form, config_of(form, passes=passes, row_chunks=True))
        for length in LENGTHS[0 if name == "var_all" else 1 :]:
            inputs = make_inputs(form, dict(zip(form.symbols, sizes_of(form, length), strict=True)), seed=3)
            first = kernel(*inputs, threads=1)
            for threads in range(2, 8):
                for a, b in zip(first, kernel(*inputs, threads=threads), strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def row_with(place: int, value: float, rest: float = math.nan) -> torch.Tensor:
    row = torch.randn(1, 2, 20011) if math.isnan(rest) else torch.full((1, 2, 20011), rest)
    row[..., place] = value
    return row


@pytest.mark.parametrize("chunks", [True, False])
def test_rows_of_infinities(chunks: bool, generator: FusionKernelGenerator) -> None:
    """Whatever block or chunk they stand in, also beside nothing but -inf, and beside NaN."""
    inf, rows = math.inf, []
    for place in (0, 1023, 1024, 9000, 20010):
        rows += [row_with(place, v) for v in (inf, -inf, math.nan)]
        rows += [row_with(place, v, -inf) for v in (0.0, inf, math.nan, -inf)]
        rows.append(row_with(place, inf, inf))
    for name, function in {
        "softmax": lambda x: torch.softmax(x, -1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, -1),
    }.items():
        form = CASES[name].form()
        kernel = generator.generate_generic_kernel(form, config_of(form, passes="one", row_chunks=chunks))
        for row in rows:
            mask = [torch.zeros(row.shape, dtype=torch.bool)] if name == "safe_softmax" else []
            found, wanted = kernel(row, *mask, threads=3)[0].flatten(), function(row).flatten()
            torch.testing.assert_close(found[: wanted.numel()], wanted, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("chunks", [True, False])
def test_a_variance_far_from_zero_keeps_its_digits(chunks: bool, generator: FusionKernelGenerator) -> None:
    form = CASES["var_all"].form()
    kernel = generator.generate_generic_kernel(form, config_of(form, passes="one", row_chunks=chunks))
    for middle, spread in ((1e4, 1e-2), (-1e6, 1.0), (0.1, 0.0)):
        x = middle + spread * torch.randn(1, 3, 30011) + (torch.arange(30011) > 15000) * spread
        found, exact, eager = (
            kernel(x, threads=3)[0],
            CASES["var_all"].function(x.double()),
            CASES["var_all"].function(x),
        )
        exact, eager = (t[0] if isinstance(t, tuple) else t for t in (exact, eager))
        assert not found.isnan().any()
        assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()


def test_only_long_rows_have_these_knobs() -> None:
    kernel = lower(CASES["softmax"].form())

    def names(*sizes: int) -> set[str]:
        return {k.name for k in knobs_for(kernel, dict(zip(kernel.symbols, sizes, strict=True)))}

    assert not {"row_chunks", "passes"} & (names(2, 3, 1024) | {k.name for k in knobs_for(kernel)})
    assert {"row_chunks", "passes"} <= names(1, 1, 1 << 20)
    assert "row_chunks" not in names(64, 64, 1 << 16)
