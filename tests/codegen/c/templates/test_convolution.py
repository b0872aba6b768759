"""Convolutions printed in C: any window, stride, weight, tile; held against float64 relative to aten's own error."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.c.templates.convolution import (
    CONVOLUTION,
    NARROW,
    TEMPLATE,
    convolution_knobs,
    plan_convolution,
)
from autofuse.codegen.c.templates.matmul import TILES
from autofuse.codegen.generator import CompiledKernel, FusionKernelGenerator
from autofuse.codegen.templates import refusal
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import make_config
from autofuse.ir.shape import Dim, SymbolicShape, as_dim, contiguous_strides, symbol
from autofuse.wrapper.node_call import make_launcher
from tests.codegen.compare import Answers, problems, problems_of_draws

GENERATOR = FusionKernelGenerator()
BATCH, HEIGHT, WIDTH = symbol("s0"), symbol("s1"), symbol("s2")
BITS = cpu_vector_bits()[-1]
TILES_OF_ALL = tuple(dict.fromkeys((*NARROW[BITS], *TILES[BITS], *(("9x3x512",) if BITS == 512 else ()))))


def spec(dims: tuple[Dim, ...], is_last: bool) -> TensorSpec:
    strides = contiguous_strides(dims)
    if is_last:
        batch, height, width, channels = contiguous_strides((dims[0], dims[2], dims[3], dims[1]))
        strides = (batch, channels, height, width)
    return TensorSpec(SymbolicShape(dims), "float32", SymbolicShape(strides), "cpu")


@functools.cache
def convolution(
    channels: int,
    cols: int,
    window: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    bias: bool = False,
    weight_last: bool = False,
) -> NodeForm:
    sizes = [
        as_dim((size + 2 * p - d * (k - 1) - 1) // s + 1)
        for size, k, s, p, d in zip((HEIGHT, WIDTH), window, stride, padding, dilation, strict=True)
    ]
    inputs = [
        NodeInput("i0", spec((BATCH, channels, HEIGHT, WIDTH), True)),
        NodeInput("i1", spec((cols, channels, *window), weight_last)),
    ]
    if bias:
        inputs.append(NodeInput("i2", TensorSpec(SymbolicShape((cols,)), "float32", SymbolicShape((1,)), "cpu")))
    args = (
        ValueRef("i0"), ValueRef("i1"), ValueRef("i2") if bias else None,
        stride, padding, dilation, False, (0, 0), 1,
    )  # fmt: skip
    op = Operation("v0", CONVOLUTION, args, (), (spec((BATCH, cols, *sizes), True),))
    return NodeForm(tuple(inputs), (op,), (ValueRef("v0"),), ("s0", "s1", "s2"))


def operands(form: NodeForm, sizes: tuple[int, int, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = dict(zip(form.symbols, sizes, strict=True))
    return [
        torch.empty_strided(shape := item.spec.shape.bind(named), item.spec.strides.bind(named)).copy_(
            torch.randn(shape, generator=generator)
        )
        for item in form.inputs
    ]


def eager(form: NodeForm, inputs: list[torch.Tensor]) -> torch.Tensor:
    _, _, _, stride, padding, dilation = form.operations[0].args[:6]
    return F.conv2d(inputs[0], inputs[1], inputs[2] if len(inputs) == 3 else None, stride, padding, dilation)


@functools.cache
def compiled(form: NodeForm, tile: str | None) -> CompiledKernel:
    return GENERATOR.generate_generic_kernel(form, make_config({"tile": tile}) if tile else None)


def check(form: NodeForm, sizes: tuple[int, int, int], tile: str | None = None, threads: int = 2) -> None:
    def draw(number: int) -> Answers:
        inputs = operands(form, sizes, number)
        found = compiled(form, tile)(*inputs, threads=threads)
        return found, [eager(form, inputs)], [eager(form, [t.double() for t in inputs])]

    wrong = problems_of_draws(draw)
    assert not wrong, (tile, wrong, sizes)


@pytest.mark.parametrize("tile", TILES_OF_ALL)
@pytest.mark.parametrize("weight_last", [False, True])
def test_every_tile_on_awkward_sizes(tile: str, weight_last: bool) -> None:
    for channels, cols in [(1, 1), (3, 16), (29, 37), (48, 64), (70, 8)]:
        form = convolution(channels, cols, bias=True, weight_last=weight_last)
        for sizes in [(1, 1, 1), (2, 5, 7), (3, 16, 11)]:
            check(form, sizes, tile)


@settings(max_examples=60)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    def pairs(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    window, dilation = pairs(1, 5), pairs(1, 2)
    # A window fits into every image here, as torch asks.
    least = [d * (k - 1) + 1 for k, d in zip(window, dilation, strict=True)]
    form = convolution(
        data.draw(st.sampled_from([1, 5, 24])), data.draw(st.sampled_from([3, 20, 33])), window, pairs(1, 3),
        pairs(0, 3), dilation, data.draw(st.booleans()), data.draw(st.booleans()),
    )  # fmt: skip
    sizes = tuple(n + data.draw(st.integers(0, 12)) for n in least)
    check(form, (data.draw(st.integers(0, 3)), *sizes), threads=data.draw(st.integers(1, 3)))


def test_windows_of_one_element_read_pixel_by_pixel() -> None:
    even, apart = convolution(40, 24, (1, 1), padding=(0, 0)), convolution(40, 24, (1, 1), (2, 2), (0, 0))
    assert plan_convolution(even).is_even and not plan_convolution(apart).is_even
    for form in (even, apart):
        check(form, (3, 13, 9))


def test_a_part_of_larger_images() -> None:
    """What lies around it is not read, and images further apart than they are large are found."""
    form = convolution(6, 10)
    item = form.inputs[0]
    strided = replace(item.spec, strides=SymbolicShape((5000, 1, 200, 8)))
    form = replace(form, inputs=(NodeInput("i0", strided), form.inputs[1]))
    whole = torch.full((2, 25, 25, 8), float("nan"))
    image = whole[:, :7, :9, :6]
    image.copy_(torch.randn(image.shape))
    inputs = [image.permute(0, 3, 1, 2), torch.randn(10, 6, 3, 3)]
    found = compiled(form, None)(*inputs)
    assert not problems(found, [eager(form, inputs)], [eager(form, [t.double() for t in inputs])])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_nan_and_inf_of_an_image_stay_where_they_are(value: float) -> None:
    form = convolution(12, 20, bias=True)
    inputs = operands(form, (2, 9, 8))
    inputs[0][1, 3, 4, 7] = value
    found = compiled(form, None)(*inputs)
    assert not problems(found, [eager(form, inputs)], [eager(form, [t.double() for t in inputs])])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sizes", [(2, 9, 8), (1, 1, 1)])
def test_odd_weights_beside_padding_are_eagers(value: float, sizes: tuple[int, int, int]) -> None:
    """With its bits and the strides that are promised."""
    form = convolution(12, 20)
    inputs = operands(form, sizes)
    inputs[1][19, 11, 0, 2] = value
    call = make_launcher(form, compiled(form, None).load().entry, sizes, 2)
    found = call(*inputs)
    torch.testing.assert_close(found, eager(form, inputs), rtol=0, atol=0, equal_nan=True)
    named = dict(zip(form.symbols, sizes, strict=True))
    assert found.stride() == form.operations[0].outputs[0].strides.bind(named)


def test_odd_weights_without_padding_are_multiplied() -> None:
    form = convolution(12, 20, padding=(0, 0))
    inputs = operands(form, (2, 9, 8))
    inputs[1][19, 11, 0, 2] = float("inf")
    found = compiled(form, None)(*inputs)
    assert not problems(found, [eager(form, inputs)], [eager(form, [t.double() for t in inputs])])


@pytest.mark.parametrize("sizes", [(1, 5, 5), (4, 40, 33)])
def test_the_number_of_threads_changes_no_bit(sizes: tuple[int, int, int]) -> None:
    form = convolution(50, 70, bias=True)
    inputs = operands(form, sizes)
    (one,), *others = (compiled(form, None)(*inputs, threads=threads) for threads in (1, 2, 3))
    assert all(torch.equal(one, found) for (found,) in others)


def test_specialised() -> None:
    form = convolution(6, 10)
    inputs = operands(form, (2, 7, 9))
    kernel = GENERATOR.generate_fused_kernel(form, [tuple(t.shape) for t in inputs])
    assert kernel.variant == "c_specialised" and "#define s1 INT64_C(7)" in kernel.source
    assert not problems(kernel(*inputs), [eager(form, inputs)], [eager(form, [t.double() for t in inputs])])


def test_tiles_fit_the_number_of_channels() -> None:
    lanes = BITS // 32
    assert convolution_knobs(convolution(8, lanes))[0].choices == NARROW[BITS]
    assert convolution_knobs(convolution(8, 4 * lanes))[0].choices == TILES[BITS]


def changed(form: NodeForm, place: int, value: Any) -> NodeForm:
    (op,) = form.operations
    return replace(form, operations=(replace(op, args=(*op.args[:place], value, *op.args[place + 1 :])),))


def respecced(form: NodeForm, number: int, found: TensorSpec) -> NodeForm:
    inputs = [replace(item, spec=found) if n == number else item for n, item in enumerate(form.inputs)]
    return replace(form, inputs=tuple(inputs))


PLAIN = convolution(8, 12, bias=True)
REFUSED: dict[str, tuple[NodeForm, str]] = {
    "groups": (changed(PLAIN, 8, 4), "kind"),
    "transposed": (changed(PLAIN, 6, True), "kind"),
    "stride by a symbol": (changed(PLAIN, 3, (BATCH, 1)), "stride"),
    "images row by row": (respecced(PLAIN, 0, spec((BATCH, 8, HEIGHT, WIDTH), False)), "layout"),
    "half": (respecced(PLAIN, 0, replace(PLAIN.inputs[0].spec, dtype="float16")), "dtype"),
    "channels that vary": (respecced(PLAIN, 1, spec((12, symbol("s3"), 3, 3), False)), "size"),
    "huge windows": (respecced(PLAIN, 1, spec((12, 8, 30, 30), False)), "window"),
    "weight with gaps": (
        respecced(PLAIN, 1, replace(PLAIN.inputs[1].spec, strides=SymbolicShape((100, 9, 3, 1)))), "weight",
    ),
    "bias with gaps": (respecced(PLAIN, 2, replace(PLAIN.inputs[2].spec, strides=SymbolicShape((2,)))), "bias"),
    "result row by row": (
        replace(PLAIN, operations=(
            replace(PLAIN.operations[0], outputs=(spec((BATCH, 12, HEIGHT, WIDTH), False),)),
        )), "strides",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    form, code = REFUSED[name]
    found = refusal(TEMPLATE, form)
    assert found is not None and found[0] == code and "expected" in found[1]
    assert refusal(TEMPLATE, PLAIN) is None
