"""Kernels generated for other processors than this one, as far as it runs them: narrower vectors, fewer instructions.

A sample of each kind of kernel; `scripts/test tests/codegen --march x86-64-v3` runs all checks for one target.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.c.target import OTHERS, can_run, generated_for
from autofuse.codegen.c.templates.matmul import TILES
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.ir.shape import symbol
from tests.cases import CASES, LOOSE_SPECIALS
from tests.codegen.c.templates import test_attention as attentions
from tests.codegen.c.templates import test_convolution as convolutions
from tests.codegen.c.templates import test_matmul as products
from tests.codegen.conftest import Verify, make_verify
from tests.codegen.test_cases import sizes_of

SAMPLE = (
    "add_bias_gelu", "attention_scores", "batch_norm_training", "bias_gradient", "cat_columns", "cross_entropy",
    "heads", "layer_norm_backward", "mean_all", "pool_avg", "pool_max_stride", "rotary_pairs", "softmax",
    "softmax_middle", "transposed_add", "unary_erf", "unary_exp", "unary_tanh", "var_mean",
)  # fmt: skip


@pytest.fixture(scope="module", params=OTHERS)
def target(request: pytest.FixtureRequest) -> Iterator[Verify]:
    if not can_run(request.param):
        pytest.skip(f"this processor does not run code for {request.param}")
    caches = (attentions.compiled, convolutions.compiled, products.compiled)
    with pytest.MonkeyPatch.context() as patch, generated_for(request.param):
        for module in (convolutions, products):
            patch.setattr(module, "GENERATOR", FusionKernelGenerator())
        for cache in caches:
            cache.cache_clear()
        yield make_verify(FusionKernelGenerator())
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("name", SAMPLE)
def test_loops(name: str, target: Verify) -> None:
    form = CASES[name].form()
    target(form, sizes_of(CASES[name], len(form.symbols)), loose=name in LOOSE_SPECIALS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["casts", "layer_norm_backward"])
def test_loops_of_16_bits(name: str, dtype: torch.dtype, target: Verify) -> None:
    form = CASES[name].form(dtype)
    target(form, sizes_of(CASES[name], len(form.symbols)), loose=name in LOOSE_SPECIALS)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", attentions.MASKS)
def test_attention(mask: str, backward: bool, target: Verify) -> None:
    attentions.test_awkward_sizes_under_every_mask(mask, backward)


@pytest.mark.parametrize("turned", products.LAYOUTS, ids=["nn", "nt", "tn", "tt"])
def test_products(turned: tuple[bool, bool], target: Verify) -> None:
    form = products.product(products.M, products.N, products.K, turned, bias=True)
    for sizes in [(1, 1, 1), (7, 5, 3), (33, 130, 17), (129, 48, 193)]:
        inputs = products.operands(form, dict(zip(form.symbols, sizes, strict=True)))
        products.check(form, inputs, tile=TILES[cpu_vector_bits()[-1]][0])


def test_convolutions(target: Verify) -> None:
    form = convolutions.convolution(29, 37, bias=True)
    for sizes in [(1, 1, 1), (2, 5, 7), (3, 16, 11)]:
        convolutions.check(form, sizes)


def test_what_is_generated_follows_the_target() -> None:
    form = products.product(symbol("s0"), 64, 64)
    with generated_for("x86-64-v3"):
        narrow, flags = cpu_vector_bits(), find_toolchain().flags
        kernel = FusionKernelGenerator().generate_generic_kernel(form)
    assert narrow == (256,) and "-march=x86-64-v3" in flags and "-march=x86-64-v3" in kernel.key.flags
    assert dict(kernel.config)["tile"] in TILES[256] and kernel.key.target != find_toolchain().target
    assert "-march=native" in find_toolchain().flags or find_toolchain().march in OTHERS
