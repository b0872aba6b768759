"""Loops over columns whose passes are merged, in Triton's interpreter: errors, infinities, ends of tiles."""

from __future__ import annotations

import math

import pytest
import torch

from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.ir.records import make_config
from tests.cases import CASES
from tests.codegen.triton.test_cases import run
from tests.tracing import trace

NAMES = ("softmax", "logsumexp", "safe_softmax", "layer_norm", "var_mean", "cross_entropy", "followed_rows_then_all")
CONFIG = make_config({"BLOCK_COLS": 8, "BLOCK_ROWS": 2, "PROGRAMS": 3, "persistent": False, "passes": "one"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_against_eager(name: str, dtype: torch.dtype) -> None:
    form = CASES[name].form(dtype)
    source = print_triton(lower(form), CONFIG)
    several = print_triton(lower(form), make_config({**dict(CONFIG), "passes": "several"}))
    assert source.text.count("tl.range(0, ncols") < several.text.count("tl.range(0, ncols")
    for length in (1, 8, 19):
        sizes = dict(zip(form.symbols, (*(1, 3, 1)[: len(form.symbols) - 1], length), strict=True))
        for kind in ("normal", "special", "large"):
            run(source, form, sizes, kind, loose=False)


@pytest.mark.parametrize("name", ["softmax", "logsumexp"])
def test_rows_of_infinities(name: str) -> None:
    form, inf = CASES[name].form(), math.inf
    kernel = load_interpreted(print_triton(lower(form), CONFIG))
    x = torch.randn(1, 8, 19)
    x[0, 1:4] = -inf
    x[0, 2, 9], x[0, 3, 18] = 1.0, inf
    x[0, 4, 3], x[0, 5, 17], x[0, 6, ::8] = inf, math.nan, inf
    wanted = CASES[name].function(x)
    found = torch.full_like(wanted, 5.0)
    kernel(dict(zip(form.symbols, x.shape, strict=True)), [x, found])
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_squares_over_no_columns_are_0() -> None:
    form = trace(lambda x: (x - x.mean(-1, keepdim=True)).square().sum(-1) + 1.0, (torch.randn(4, 19),))
    kernel = load_interpreted(print_triton(lower(form), CONFIG))
    found = torch.full((4,), 5.0)
    kernel({form.symbols[0]: 4, form.symbols[1]: 0}, [torch.empty(4, 0), found])
    assert found.tolist() == [1.0] * 4


def test_only_long_rows_are_tried_so() -> None:
    kernel = lower(CASES["softmax"].form())
    for columns, usual in ((4096, None), (32768, "several"), (1 << 18, "one")):
        sizes = dict(zip(kernel.symbols, (1, 64, columns), strict=True))
        assert dict(default_config(triton_knobs(kernel, sizes, sizes))).get("passes") == usual
