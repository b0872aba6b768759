"""Gradients of convolutions printed in C: any window, stride, layout, tile; held against float64 relative to aten's."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.codegen.c.templates.convolution_backward import (
    CONVOLUTION_BACKWARD,
    TEMPLATE,
    plan_convolution_backward,
)
from autofuse.codegen.generator import CompiledKernel, FusionKernelGenerator
from autofuse.codegen.templates import refusal
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import make_config
from autofuse.ir.shape import SymbolicShape, as_dim, symbol
from autofuse.wrapper.node_call import make_launcher
from tests.codegen.c.templates.test_convolution import BATCH, HEIGHT, TILES_OF_ALL, WIDTH, changed, respecced, spec
from tests.codegen.compare import Answers, problems_of_draws

GENERATOR = FusionKernelGenerator()
ALL = (0, 1, 2)


@functools.cache
def gradients(
    channels: int,
    cols: int,
    window: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    asked: tuple[int, ...] = ALL,
    is_last: tuple[bool, bool, bool, bool, bool] = (False,) * 5,
) -> NodeForm:
    """``is_last``: of the gradient, the images, the weight, and the results of the last two."""
    sizes = [
        as_dim((size + 2 * p - d * (k - 1) - 1) // s + 1)
        for size, k, s, p, d in zip((HEIGHT, WIDTH), window, stride, padding, dilation, strict=True)
    ]
    of_gradient, of_images, of_weight = (
        (BATCH, cols, *sizes),
        (BATCH, channels, HEIGHT, WIDTH),
        (cols, channels, *window),
    )
    inputs = (
        NodeInput("i0", spec(of_gradient, is_last[0])),
        NodeInput("i1", spec(of_images, is_last[1])),
        NodeInput("i2", spec(of_weight, is_last[2])),
    )
    mask = tuple(n in asked for n in ALL)
    args = (*(ValueRef(item.name) for item in inputs), (cols,), stride, padding, dilation, False, (0, 0), 1, mask)
    bias = TensorSpec(SymbolicShape((cols,)), "float32", SymbolicShape((1,)), "cpu")
    outputs = (spec(of_images, is_last[3]), spec(of_weight, is_last[4]), bias)
    op = Operation("v0", CONVOLUTION_BACKWARD, args, (), outputs)
    return NodeForm(inputs, (op,), tuple(ValueRef("v0", n) for n in asked), ("s0", "s1", "s2"))


def operands(form: NodeForm, sizes: tuple[int, int, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = dict(zip(form.symbols, sizes, strict=True))
    return [
        torch.empty_strided(shape := item.spec.shape.bind(named), item.spec.strides.bind(named)).copy_(
            torch.randn(shape, generator=generator)
        )
        for item in form.inputs
    ]


def eager(form: NodeForm, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.ops.aten.convolution_backward(*inputs, *form.operations[0].args[3:])
    return [found[ref.index] for ref in form.outputs]


@functools.cache
def compiled(form: NodeForm, tile: str | None) -> CompiledKernel:
    return GENERATOR.generate_generic_kernel(form, make_config({"tile": tile}) if tile else None)


def check(form: NodeForm, sizes: tuple[int, int, int], tile: str | None = None, threads: int = 2) -> None:
    def draw(number: int) -> Answers:
        inputs = operands(form, sizes, number)
        found = compiled(form, tile)(*inputs, threads=threads)
        return found, eager(form, inputs), eager(form, [t.double() for t in inputs])

    wrong = problems_of_draws(draw)
    assert not wrong, (tile, wrong, sizes)


@pytest.mark.parametrize("tile", TILES_OF_ALL)
def test_every_tile_on_awkward_sizes(tile: str) -> None:
    for channels, cols in [(1, 1), (3, 16), (29, 37), (70, 8)]:
        for sizes in [(1, 1, 1), (2, 5, 7), (9, 16, 11)]:
            check(gradients(channels, cols), sizes, tile)


@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (1, 2), (0, 1), (2, 0)])
def test_those_that_are_asked_for(asked: tuple[int, ...]) -> None:
    for sizes in [(3, 8, 9), (0, 4, 4)]:
        check(gradients(20, 36, asked=asked), sizes)


@settings(max_examples=60)
@given(data=st.data())
def test_any_window_and_layout(data: st.DataObject) -> None:
    def pairs(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    window, dilation = pairs(1, 5), pairs(1, 2)
    least = [d * (k - 1) + 1 for k, d in zip(window, dilation, strict=True)]
    form = gradients(
        data.draw(st.sampled_from([1, 5, 24])), data.draw(st.sampled_from([3, 20, 33])), window, pairs(1, 3),
        pairs(0, 3), dilation, is_last=data.draw(st.tuples(*[st.booleans()] * 5)),
    )  # fmt: skip
    sizes = tuple(n + data.draw(st.integers(0, 12)) for n in least)
    check(form, (data.draw(st.integers(0, 3)), *sizes), threads=data.draw(st.integers(1, 3)))


def test_more_images_than_there_is_memory_for_copies_at_once() -> None:
    check(gradients(33, 20, (1, 2), padding=(0, 1)), (40, 50, 41))


def test_windows_of_one_element() -> None:
    even, apart = gradients(40, 24, (1, 1), padding=(0, 0)), gradients(40, 24, (1, 1), (2, 2), (0, 0))
    assert plan_convolution_backward(even).window.is_point and not plan_convolution_backward(apart).window.is_point
    for form in (even, apart):
        check(form, (3, 13, 9))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(2, 9, 8), (1, 1, 1)])
def test_odd_numbers_are_eagers(value: float, place: int, sizes: tuple[int, int, int]) -> None:
    """In images they reach what they are multiplied with; beside padding in the others, eager answers."""
    form = gradients(12, 20)
    inputs = operands(form, sizes)
    inputs[place].view(-1)[5] = value
    call = make_launcher(form, compiled(form, None).load().entry, sizes, 2)
    for found, theirs in zip(call(*inputs), eager(form, inputs), strict=True):
        assert torch.equal(found.isfinite(), theirs.isfinite()) and torch.equal(found.isnan(), theirs.isnan())
        assert found.stride() == theirs.stride()


@pytest.mark.parametrize("sizes", [(1, 5, 5), (7, 20, 33)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2)])
def test_the_number_of_threads_changes_no_bit(sizes: tuple[int, int, int], stride: tuple[int, int]) -> None:
    form = gradients(50, 70, stride=stride)
    inputs = operands(form, sizes)
    one, *others = (compiled(form, None)(*inputs, threads=threads) for threads in (1, 2, 3))
    assert all(torch.equal(a, b) for found in others for a, b in zip(one, found, strict=True))


def test_specialised() -> None:
    form = gradients(6, 10)
    inputs = operands(form, (2, 7, 9))
    kernel = GENERATOR.generate_fused_kernel(form, [tuple(t.shape) for t in inputs])
    assert kernel.variant == "c_specialised" and "#define s1 INT64_C(7)" in kernel.source
    for found, theirs in zip(kernel(*inputs), eager(form, [t.double() for t in inputs]), strict=True):
        torch.testing.assert_close(found.double(), theirs, rtol=1e-4, atol=1e-4)


PLAIN = gradients(8, 12)
REFUSED: dict[str, tuple[NodeForm, str]] = {
    "groups": (changed(PLAIN, 9, 4), "kind"),
    "transposed": (changed(PLAIN, 7, True), "kind"),
    "stride by a symbol": (changed(PLAIN, 4, (BATCH, 1)), "stride"),
    "half": (respecced(PLAIN, 0, replace(PLAIN.inputs[0].spec, dtype="float16")), "dtype"),
    "channels that vary": (respecced(PLAIN, 2, spec((12, symbol("s3"), 3, 3), False)), "size"),
    "huge windows": (respecced(PLAIN, 2, spec((12, 8, 100, 100), False)), "window"),
    "images with gaps": (
        respecced(PLAIN, 1, replace(PLAIN.inputs[1].spec, strides=SymbolicShape((5000, 200, 10, 1)))), "layout",
    ),
    "nothing asked for": (replace(PLAIN, outputs=()), "anchor"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    form, code = REFUSED[name]
    found: Any = refusal(TEMPLATE, form)
    assert found is not None and found[0] == code, found
