"""The largest and the smallest number of a tensor are NaN wherever in it a NaN lies: in each row, lane and tile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autofuse.codegen.call import allocate
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import make_inputs, run_unfused
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.printer import print_triton
from autofuse.ir.operation import NodeForm
from tests.codegen.triton.test_cases import STRESS
from tests.tracing import trace

aten = torch.ops.aten
ROWS, COLS = 5, 7
EXTREMES: dict[str, Callable[..., torch.Tensor]] = {
    "max of a slice": lambda x: aten.amax.default(x[:, 1:], []),
    "min of a slice": lambda x: aten.min.default(x[:, 1:]),
    "max of a softmax": lambda x: aten.max.default(torch.softmax(x, -1)),
    "min of a sum": lambda x: aten.amin.default(x[:, None] + x[None], []),
    "of rows": lambda x: aten.amax.default(x * 2, [-1]),
    "of columns": lambda x: aten.amin.default(x * 2, [0]),
    "of a transposed one": lambda x: aten.max.default(x.t() * 2),
}


def check(form: NodeForm, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = dict(zip(form.symbols, (ROWS, COLS), strict=True))
    for place in range(ROWS * COLS):
        (x,) = make_inputs(form, values)
        x.view(-1)[place] = torch.nan
        (eager,) = run_unfused(form, [x], values)
        torch.testing.assert_close(run(x), eager, equal_nan=True, msg=lambda text, at=place: f"element {at}: {text}")


def form_of(name: str) -> NodeForm:
    return trace(EXTREMES[name], (torch.randn(ROWS, COLS),))


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("threads", [1, 2])
def test_in_c(generator: FusionKernelGenerator, name: str, threads: int) -> None:
    form = form_of(name)
    kernel = generator.generate_generic_kernel(form)
    check(form, lambda x: kernel(x, threads=threads)[0])


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("config", ["loops", "rows"])
def test_in_triton(name: str, config: str) -> None:
    form = form_of(name)
    entry = load_interpreted(print_triton(lower(form), STRESS[config]))
    values = dict(zip(form.symbols, (ROWS, COLS), strict=True))

    def run(x: torch.Tensor) -> torch.Tensor:
        out = allocate(form.spec(form.outputs[0]), values, poison=True)
        entry(values, [x, out])
        return out

    check(form, run)
