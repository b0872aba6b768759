"""Generated optimizer steps: every algorithm and flag against float64 and eager's own error."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.codegen.c.build import compile_source, find_toolchain, flags_for
from autofuse.optim.c_printer import print_step
from autofuse.optim.candidate import StepCandidate
from autofuse.optim.form import DTYPES, StepForm
from autofuse.optim.step_bench import check
from autofuse.optim.tune_step import CHECKED_ELEMENTS, LONGEST_CHECKED, checked_form
from autofuse.tuner.node_bench import CpuRunner
from autofuse.tuner.verify import Wrong

SIZES = (1, 7, 0, 64, 4097, 20011)
FLAGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "adam": (
        (), ("amsgrad",), ("maximize",), ("weight_decay",), ("decoupled_weight_decay", "weight_decay"),
        ("amsgrad", "maximize", "decoupled_weight_decay", "weight_decay"),
    ),
    "sgd": (
        (), ("momentum",), ("weight_decay",), ("momentum", "nesterov"), ("maximize", "weight_decay", "momentum"),
    ),
    "rmsprop": ((), ("momentum",), ("centered",), ("maximize", "weight_decay", "momentum", "centered")),
    "adagrad": ((), ("weight_decay",), ("maximize", "weight_decay")),
}  # fmt: skip
CASES = [(algorithm, flags) for algorithm, listed in FLAGS.items() for flags in listed]


def built(form: StepForm, **config: Any) -> StepCandidate:
    source = print_step(form, tuple(sorted(config.items())))
    toolchain = find_toolchain()
    binary = compile_source(source.text, toolchain, flags_for(toolchain))
    return StepCandidate("c_multi", binary, source.name)


# Torch 2.13: foreach adds the momentum to the gradients themselves. (Its fused AMSGrad may lose a NaN, too.)
WRONG_VENDORS = {("sgd", "foreach", ("momentum", "nesterov"))}


@pytest.mark.parametrize(("algorithm", "flags"), CASES, ids=[f"{a}-{'-'.join(f) or 'plain'}" for a, f in CASES])
def test_a_step_is_torchs_step(algorithm: str, flags: tuple[str, ...]) -> None:
    form = StepForm(algorithm, flags, "float32", SIZES)
    assert check(form, built(form), 2, CpuRunner()) < 4.0
    for vendor in form.rule.vendors:
        candidate = StepCandidate(vendor)
        if (algorithm, vendor, flags) in WRONG_VENDORS:
            with pytest.raises(Wrong):
                check(form, candidate, 2, CpuRunner())
        elif ("amsgrad" not in flags) or vendor != "fused":
            check(form, candidate, 2, CpuRunner())


@pytest.mark.parametrize(("algorithm", "dtype"), list(itertools.product(FLAGS, DTYPES)))
def test_a_step_in_any_dtype(algorithm: str, dtype: str) -> None:
    form = StepForm(algorithm, FLAGS[algorithm][-1], dtype, SIZES)
    assert check(form, built(form, chunk=4096), 2, CpuRunner()) < 16.0


@given(st.lists(st.integers(0, 3_000_000), min_size=1, max_size=40))
def test_a_check_is_of_few_elements_but_of_chunks_of_every_size(sizes: list[int]) -> None:
    form = StepForm("sgd", (), "float32", tuple(sizes))
    cut = checked_form(form).sizes
    assert len(cut) == len(sizes) and all(0 <= few <= many for few, many in zip(cut, sizes, strict=True))
    assert sum(cut) <= CHECKED_ELEMENTS + LONGEST_CHECKED
    assert max(cut) >= min(max(sizes), LONGEST_CHECKED)


def test_equal_steps_have_one_name_and_survive_the_store() -> None:
    form = StepForm("adam", ("decoupled_weight_decay", "weight_decay"), "float32", (3, 4))
    assert StepForm.from_json(form.to_json()) == form
    assert form.label.startswith("af_optimizer_adamw_") and form.operations == "adamw over 2 tensors"
    assert StepForm("adam", form.flags, "float32", (4, 3)).fusion_id != form.fusion_id
