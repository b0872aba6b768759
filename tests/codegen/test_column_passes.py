"""What the passes over a row keep for later ones."""

from __future__ import annotations

import pytest

from autofuse.codegen.column_passes import Plan, plan
from autofuse.codegen.loops import LoopKernel
from autofuse.codegen.lowering.lower import lower
from tests.cases import CASES


def ops(kernel: LoopKernel, numbers: tuple[int, ...]) -> list[str]:
    return [kernel.values[n].op for n in numbers]


def planned(name: str, **options: bool) -> tuple[LoopKernel, Plan]:
    kernel = lower(CASES[name].form())
    return kernel, plan(kernel, **options)


@pytest.mark.parametrize("name", ["safe_softmax", "attention_scores"])
def test_masked_scores_are_kept_in_place_of_scores_and_mask(name: str) -> None:
    kernel, found = planned(name, keep=True)
    assert ops(kernel, found.kept) == ["where", "exp"]
    largest, exponentials = found.phases[:2]
    assert ops(kernel, largest.widened) == ["load"]
    assert ops(kernel, exponentials.buffer_reads) == ["where"]
    assert "load" not in ops(kernel, exponentials.values)


def test_nothing_calculated_is_kept_where_all_is_calculated_again() -> None:
    _, found = planned("safe_softmax", keep=False)
    assert found.kept == () and found.buffered != ()


def test_one_widened_load_is_read_from_its_own_buffer() -> None:
    kernel, found = planned("softmax", keep=True)
    assert ops(kernel, found.kept) == ["exp"]
