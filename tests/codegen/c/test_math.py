"""The C functions that kernels inline, number by number against double."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autofuse.codegen.c.build import compile_source, find_toolchain, flags_for
from autofuse.codegen.c.math import INLINE_MATH
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.lowering.lower import lower
from autofuse.errors import CompilerError
from autofuse.ir.records import make_config
from tests.cases import CASES

Function = Callable[[torch.Tensor], torch.Tensor]
SMALLEST_NUMBER = 2.0**-149
SMALLEST_NORMAL = 1.1754944e-38


@pytest.fixture(scope="module", params=[256, 512])
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Function]:
    """Each function over a whole tensor, vectorised as in a kernel."""
    try:
        toolchain = find_toolchain()
    except CompilerError as error:
        pytest.skip(str(error))
    text = "#include <math.h>\n#include <stdint.h>\n#include <string.h>\n" + "".join(INLINE_MATH.values())
    for name in INLINE_MATH:
        text += f"""
__attribute__((visibility("default"))) void all_{name}(const float* x, float* y, int64_t n) {{
  #pragma omp simd
  for (int64_t k = 0; k < n; ++k) y[k] = {name}(x[k]);
}}"""
    flags = flags_for(toolchain, make_config({"vector_bits": request.param}))
    file = Path(tmp_path_factory.mktemp("math")) / "all.so"
    file.write_bytes(compile_source(text, toolchain, flags))
    library = ctypes.CDLL(str(file))

    def function(name: str) -> Function:
        call = getattr(library, f"all_{name}")

        def run(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            call(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(x.numel()))
            return y

        return run

    return {name: function(name) for name in INLINE_MATH}


def worst_ulp(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in units of the last place, of results that are normal numbers."""
    normal = (exact.abs() >= SMALLEST_NORMAL) & (exact.abs() <= torch.finfo(torch.float32).max)
    near = exact[normal].float()
    ulp = (torch.nextafter(near.abs(), torch.tensor(math.inf)) - near.abs()).double()
    return float(((found[normal].double() - exact[normal]).abs() / ulp).max())


def everywhere(low: float, high: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(100_001, generator=generator).clamp(low, high)
    return torch.cat([torch.linspace(low, high, 1_000_003), near, torch.linspace(-87.8, -86.8, 10_001).clamp(min=low)])


def test_exp(functions: dict[str, Function]) -> None:
    x = everywhere(-110.0, 88.72)
    found, exact = functions["af_exp_f32"](x), x.double().exp()
    assert worst_ulp(found, exact) < 1.1
    tiny = exact < SMALLEST_NORMAL
    assert tiny.any() and float((found[tiny].double() - exact[tiny]).abs().max()) < 1.5 * SMALLEST_NUMBER


def test_the_logarithm_of_a_sum_of_small_exponentials_is_finite(functions: dict[str, Function]) -> None:
    x = torch.linspace(-100.0, -88.0, 1000)
    found, eager = functions["af_exp_f32"](x).sum().log(), x.exp().sum().log()
    assert eager.isfinite() and torch.allclose(found, eager, rtol=1e-6)


def test_exp_of_what_is_never_positive(functions: dict[str, Function]) -> None:
    x = everywhere(-110.0, 0.0)
    found, exact = functions["af_exp_nonpositive_f32"](x), x.double().exp()
    assert worst_ulp(found, exact) < 1.1
    tiny = exact < SMALLEST_NORMAL
    assert tiny.any() and float((found[tiny].double() - exact[tiny]).abs().max()) < 0.71 * SMALLEST_NORMAL
    assert found.min() == 0.0 and found.max() == 1.0


@pytest.mark.parametrize("name", ["af_exp_f32", "af_exp_nonpositive_f32"])
def test_exp_at_the_ends(name: str, functions: dict[str, Function]) -> None:
    x = torch.tensor([0.0, -0.0, -math.inf, -1e30, -104.0, -3e38])
    assert functions[name](x).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    if name == "af_exp_f32":
        assert functions[name](torch.tensor([math.inf, 3e38, 88.72284, 89.0, 100.0])).tolist() == [math.inf] * 5


def test_erf(functions: dict[str, Function]) -> None:
    x = everywhere(-6.0, 6.0)
    found, exact = functions["af_erf_f32"](x), torch.erf(x.double())
    assert float((found.double() - exact).abs().max()) < 3.6e-7 and worst_ulp(found, exact) < 8.0
    assert functions["af_erf_f32"](torch.tensor([-math.inf, -4.0, 0.0, 4.0, 3e38])).tolist() == [
        -1.0,
        -1.0,
        0.0,
        1.0,
        1.0,
    ]


def test_normal_cdf(functions: dict[str, Function]) -> None:
    x = everywhere(-8.0, 8.0)
    found, exact = functions["af_normal_cdf_f32"](x), torch.special.ndtr(x.double())
    assert float((found.double() - exact).abs().max()) < 2.6e-7
    assert found.min() == 0.0 and found.max() == 1.0
    ends = torch.tensor(
        [-math.inf, -3e38, -1e19, -5.5, 0.0, 5.5, 1e19, 3e38, math.inf]
    )  # products of large ones overflow
    assert functions["af_normal_cdf_f32"](ends).tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["gelu", "gelu_backward"])
@pytest.mark.parametrize("math_knob", ["inline", "library"])
def test_gelu_takes_the_normal_cdf(name: str, math_knob: str) -> None:
    text = print_c(
        lower(CASES[f"unary_{name}" if name == "gelu" else name].form()), make_config({"math": math_knob})
    ).text
    assert ("af_normal_cdf_f32(x" in text) is (math_knob == "inline")
    assert ("af_exp_nonpositive_f32(x" in text) is (math_knob == "inline" and name == "gelu_backward")
    assert ("(erff(" in text) is (math_knob == "library")


@pytest.mark.parametrize("name", INLINE_MATH)
def test_nan_of_any_payload(name: str, functions: dict[str, Function]) -> None:
    """The bits of a NaN must not reach the exponent of a result."""
    bits = [0x7FC00000, 0x7FC00001, 0x7F800001, 0x7FFFFFFF, 0x7FC000FF, 0x7FC00100, 0x7FC001FF]
    nans = torch.tensor([*bits, *(b - (1 << 31) for b in bits)], dtype=torch.int32).view(torch.float32)
    found = functions[name](nans)
    if name == "af_normal_cdf_f32":
        assert found.isfinite().all()
        found = found * nans  # as in gelu
    assert found.isnan().all()


@pytest.mark.parametrize(
    ("name", "is_shorter"),
    [("softmax", True), ("log_softmax", True), ("unary_exp", False), ("log_softmax_backward", True)],
)
def test_a_softmax_takes_the_shorter_exp(name: str, is_shorter: bool) -> None:
    text = print_c(lower(CASES[name].form()), make_config({"math": "inline"})).text
    assert ("af_exp_nonpositive_f32(" in text) is is_shorter
    assert ("af_exp_f32(" in text) is not is_shorter


def test_a_streamed_softmax_asks_for_its_next_row() -> None:
    kernel = lower(CASES["softmax"].form())
    texts = [print_c(kernel, make_config({"nontemporal": streams})).text for streams in (False, True)]
    assert ["__builtin_prefetch(" in text for text in texts] == [False, True]
