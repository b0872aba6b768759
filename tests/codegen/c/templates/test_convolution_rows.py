"""Convolutions of row-by-row images printed in C; held against float64 relative to aten's own error."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.codegen.c.templates.convolution_rows import TEMPLATE
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.templates import refusal
from autofuse.ir.operation import NodeForm
from autofuse.wrapper.node_call import make_launcher
from tests.codegen.c.templates.test_convolution import (
    BATCH,
    HEIGHT,
    TILES_OF_ALL,
    WIDTH,
    changed,
    check,
    compiled,
    convolution,
    eager,
    operands,
    respecced,
    spec,
)
from tests.codegen.compare import problems

GENERATOR = FusionKernelGenerator()


@functools.cache
def rows(*args: Any, image_last: bool = False, result_last: bool = False, **kwargs: Any) -> NodeForm:
    """A convolution whose image, or result, or both lie row by row."""
    form = convolution(*args, **kwargs)
    (op,), image = form.operations, form.inputs[0]
    outputs = (spec(tuple(op.outputs[0].shape), result_last),)
    first = replace(image, spec=spec(tuple(image.spec.shape), image_last))
    return replace(form, inputs=(first, *form.inputs[1:]), operations=(replace(op, outputs=outputs),))


@pytest.mark.parametrize("tile", TILES_OF_ALL)
def test_every_tile_on_awkward_sizes(tile: str) -> None:
    for channels, cols in [(1, 1), (3, 16), (29, 37), (70, 8)]:
        for sizes in [(1, 1, 1), (2, 5, 7), (9, 16, 11)]:
            check(rows(channels, cols, bias=True), sizes, tile)


@settings(max_examples=60)
@given(data=st.data())
def test_any_window_and_layout(data: st.DataObject) -> None:
    def pairs(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    window, dilation = pairs(1, 5), pairs(1, 2)
    least = [d * (k - 1) + 1 for k, d in zip(window, dilation, strict=True)]
    image_last, result_last = data.draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    form = rows(
        data.draw(st.sampled_from([1, 5, 24, 300])), data.draw(st.sampled_from([3, 20, 33])), window, pairs(1, 3),
        pairs(0, 3), dilation, data.draw(st.booleans()), image_last=image_last, result_last=result_last,
    )  # fmt: skip
    sizes = tuple(n + data.draw(st.integers(0, 12)) for n in least)
    check(form, (data.draw(st.integers(0, 3)), *sizes), threads=data.draw(st.integers(1, 3)))


def test_more_images_than_there_is_memory_for_copies_at_once() -> None:
    check(rows(33, 20, (1, 2), padding=(0, 1), bias=True), (40, 50, 41))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_nan_and_inf_of_an_image_stay_where_they_are(value: float) -> None:
    form = rows(12, 20, bias=True)
    inputs = operands(form, (2, 9, 8))
    inputs[0][1, 3, 4, 7] = value
    found = compiled(form, None)(*inputs)
    assert not problems(found, [eager(form, inputs)], [eager(form, [t.double() for t in inputs])])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sizes", [(2, 9, 8), (1, 1, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1)])
def test_odd_weights_are_eagers(value: float, sizes: tuple[int, int, int], padding: tuple[int, int]) -> None:
    form = rows(12, 20, (1, 1), padding=padding)
    inputs = operands(form, sizes)
    inputs[1][19, 11, 0, 0] = value
    found = make_launcher(form, compiled(form, None).load().entry, sizes, 2)(*inputs)
    theirs = eager(form, inputs)
    assert torch.equal(found.isfinite(), theirs.isfinite()) and torch.equal(found.isnan(), theirs.isnan())
    assert found.stride() == theirs.stride()


@pytest.mark.parametrize("sizes", [(1, 5, 5), (7, 20, 33)])
def test_the_number_of_threads_changes_no_bit(sizes: tuple[int, int, int]) -> None:
    form = rows(50, 70, bias=True)
    inputs = operands(form, sizes)
    (one,), *others = (compiled(form, None)(*inputs, threads=threads) for threads in (1, 2, 3))
    assert all(torch.equal(one, found) for (found,) in others)


PLAIN = rows(8, 12, bias=True)
REFUSED: dict[str, tuple[NodeForm, str]] = {
    "groups": (changed(PLAIN, 8, 4), "kind"),
    "transposed": (changed(PLAIN, 6, True), "kind"),
    "stride by a symbol": (changed(PLAIN, 3, (BATCH, 1)), "stride"),
    "half": (respecced(PLAIN, 0, replace(PLAIN.inputs[0].spec, dtype="float16")), "dtype"),
    "all channels last": (convolution(8, 12), "layout"),
    "weight channels last": (respecced(PLAIN, 1, spec((12, 8, 3, 3), True)), "weight"),
    "channels that vary": (respecced(PLAIN, 1, spec((12, HEIGHT, 3, 3), False)), "size"),
    "huge windows": (respecced(PLAIN, 1, spec((12, 8, 100, 100), False)), "window"),
    "a part of larger images": (
        respecced(PLAIN, 0, replace(PLAIN.inputs[0].spec, strides=spec((BATCH, 9, HEIGHT, WIDTH), False).strides)),
        "layout",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    form, code = REFUSED[name]
    found: Any = refusal(TEMPLATE, form)
    assert found is not None and found[0] == code, found
