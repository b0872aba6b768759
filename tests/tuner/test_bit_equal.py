"""What strict runs accept is eager's to the bit, in the checks and on inputs that nobody has checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from autofuse.codegen.c.load import load_kernel
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.inputs import make_inputs
from autofuse.codegen.knobs import CONTRACT, default_config, printed
from autofuse.codegen.reference import run_unfused
from autofuse.ir.buckets import bucket_of
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, ObservedShape, make_config
from autofuse.tuner.bit_equal import FIRST_DRAW, BitCheck, count_differing
from autofuse.tuner.cases import STRICT_ELEMENTS_16, CheckCase, full_cases, strict_cases, strict_elements
from autofuse.tuner.verify import GuardedAllocator, MakeCall
from autofuse.wrapper.node_call import make_launcher, make_unfused
from tests.cases import CASES
from tests.tuner.nodes import chain_form

FORM = chain_form(width=48)
STATIC = next(case.form() for case in CASES.values() if not case.dynamic)
GENERATOR = FusionKernelGenerator()


def changed(form: NodeForm, change: Callable[[torch.Tensor], Any]) -> MakeCall:
    """Eager's own operations, and a change to the result."""

    def make_call(allocate: GuardedAllocator, values: Sequence[int]) -> Callable[..., torch.Tensor]:
        unfused = make_unfused(form, values)

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = unfused(*inputs)
            change(result)
            return result

        return call

    return make_call


def of_kernel(form: NodeForm, contract: bool, threads: int = 1) -> MakeCall:
    """The generated C kernel, with or without products and sums that are rounded once."""
    knobs = default_config(GENERATOR.knobs(form, None, {}))
    config = make_config({**dict(knobs), CONTRACT.name: contract})
    entry = GENERATOR.compile(GENERATOR.source(form, printed(config), {}), config)
    loaded = load_kernel(entry.binary, entry.name).entry
    return lambda allocate, values: make_launcher(form, loaded, values, threads, allocate)


def test_nan_is_nan_and_zeros_have_signs() -> None:
    quiet, other = torch.tensor([float("nan")]), torch.tensor([0x7FC00123], dtype=torch.int32).view(torch.float32)
    assert other.isnan() and count_differing(other, quiet) == 0
    assert count_differing(torch.tensor([-0.0]), torch.tensor([0.0])) == 1
    assert count_differing(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])) == 1
    assert count_differing(torch.tensor([1, 2]), torch.tensor([1, 3])) == 1
    assert count_differing(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)) == 0
    assert count_differing(torch.ones(2), torch.ones(2, dtype=torch.float64)) == 2
    assert count_differing(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])) == 1


def test_eager_agrees_with_itself_on_all_kinds_of_values() -> None:
    cases = [CheckCase((n,), kind, n % 2 == 0) for n in (1, 8, 33) for kind in ("normal", "large", "zeros", "special")]
    assert BitCheck(FORM).difference(changed(FORM, lambda result: None), cases, 1 << 12) == ""


def test_a_difference_is_told_with_its_place() -> None:
    last = changed(FORM, lambda result: result[-1, -1].nextafter_(torch.tensor(9e9)))
    said = BitCheck(FORM).difference(last, [CheckCase((7,), "normal")])
    assert said == "output 0 has other bits in 1 of 336 elements (sizes [7], normal values)"


def test_more_draws_find_what_the_cases_do_not_show() -> None:
    seen: list[int] = []

    def rarely(result: torch.Tensor) -> None:
        seen.append(result.numel())
        if len(seen) == 6:
            result[0, 0] += 1

    check, cases = BitCheck(FORM), [CheckCase((16,), "normal"), CheckCase((5,), "normal")]
    assert check.difference(changed(FORM, rarely), cases) == ""
    seen.clear()
    assert "normal values" in check.difference(changed(FORM, rarely), cases, 1 << 14)
    seen.clear()
    assert check.difference(changed(FORM, rarely), cases, 1) == "", "few elements were asked for"


def test_strict_cases_are_all_others_and_sizes_that_nobody_chose() -> None:
    bucket, shapes = bucket_of((700,)), (ObservedShape((700,), 9), ObservedShape((613,), 4))
    cases = strict_cases(FORM, bucket, shapes, (700,))
    assert {*full_cases(FORM, bucket, shapes, (700,))} <= {*cases} and all(bucket.contains(c.values) for c in cases)
    assert len({c.values for c in cases}) > 8 and len(cases) == len({*cases})
    assert strict_cases(FORM, bucket, shapes, (700,)) == cases, "the same in every process"
    assert all(c.values == () for c in strict_cases(STATIC, Bucket(()), (), ()))


def test_16_bits_need_more_elements() -> None:
    assert strict_elements(FORM) < strict_elements(chain_form_of("bfloat16")) == STRICT_ELEMENTS_16


def chain_form_of(dtype: str) -> NodeForm:
    return NodeForm.from_json(json.loads(json.dumps(FORM.to_json()).replace("float32", dtype)))


@pytest.mark.parametrize("contract", CONTRACT.choices)
def test_a_chain_is_eagers_where_nothing_is_contracted(contract: bool) -> None:
    cases = strict_cases(FORM, bucket_of((33,)), (), (33,))
    said = BitCheck(FORM).difference(of_kernel(FORM, contract), cases)
    if not contract:
        assert said == ""
    elif "-march" in " ".join(GENERATOR.toolchain.flags) and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert "other bits" in said, "a product and a sum are one instruction here"


FEW = (
    "softmax", "layer_norm", "gelu", "residual", "sum", "silu_mul", "dropout_scale", "amax", "mean", "where", "relu",
    "add_relu", "clamp", "sigmoid", "log_softmax", "rms_norm", "max", "cumsum", "embedding", "cat", "batch_norm",
)  # fmt: skip
# Not of gather: its sizes depend on each other.
ROWS = [name for n, name in enumerate(CASES) if name in FEW or (n % 12 == 0 and "gather" not in name)]


@pytest.mark.parametrize("name", ROWS)
def test_what_is_accepted_is_eagers_on_fresh_inputs_too(name: str) -> None:
    form = CASES[name].form()
    bucket = bucket_of([5] * len(form.symbols))
    timed = tuple(high for _, high in bucket.ranges)
    make_call = of_kernel(form, False)
    if BitCheck(form).difference(make_call, strict_cases(form, bucket, (), timed), strict_elements(form), 1.0):
        return
    for draw in range(5 * FIRST_DRAW, 5 * FIRST_DRAW + 6):
        inputs = make_inputs(form, timed, draw, "normal")
        wanted = run_unfused(form, inputs, timed)
        result = make_call(GuardedAllocator(), timed)(*inputs)
        results = result if isinstance(result, tuple) else (result,)
        assert [count_differing(f, w) for f, w in zip(results, wanted, strict=True)] == [0] * len(wanted)
