"""Products of matrices printed in C: any sizes, layouts, tiles; held against float64 relative to aten's own error."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autofuse.codegen.c.knobs import cpu_vector_bits
from autofuse.codegen.c.templates.matmul import TEMPLATE, TILES, c_matmul_knobs, plan_c_matmul, print_c_matmul
from autofuse.codegen.generator import CompiledKernel, FusionKernelGenerator
from autofuse.codegen.templates import refusal
from autofuse.errors import LoweringError
from autofuse.ir.operation import NodeForm, NodeInput, Operation, TensorSpec, ValueRef
from autofuse.ir.records import make_config
from autofuse.ir.shape import Dim, SymbolicShape, contiguous_strides, symbol
from tests.codegen.compare import Answers, problems, problems_of_draws

GENERATOR = FusionKernelGenerator()
M, N, K = symbol("s0"), symbol("s1"), symbol("s2")
ALL_TILES = TILES[cpu_vector_bits()[-1]]


def spec(dims: tuple[Dim, ...], is_turned: bool = False, dtype: str = "float32") -> TensorSpec:
    """Dense; ``is_turned``: as the last two dims of a dense tensor lie when they are swapped."""
    order = (*dims[:-2], dims[-1], dims[-2]) if is_turned else dims
    strides = list(contiguous_strides(order))
    if is_turned:
        strides[-2:] = strides[:-3:-1]
    return TensorSpec(SymbolicShape(dims), dtype, SymbolicShape(strides), "cpu")


def product(
    rows: Dim,
    cols: Dim,
    depth: Dim,
    turned: tuple[bool, bool] = (False, False),
    bias: bool = False,
    batch: Dim | None = None,
    dtype: str = "float32",
) -> NodeForm:
    lead = () if batch is None else (batch,)
    inputs = [
        NodeInput("i0", spec((*lead, rows, depth), turned[0], dtype)),
        NodeInput("i1", spec((*lead, depth, cols), turned[1], dtype)),
    ]
    refs: tuple[Any, ...] = (ValueRef("i0"), ValueRef("i1"))
    if bias:
        inputs.append(NodeInput("i2", spec((cols,), dtype=dtype)))
        refs = (ValueRef("i2"), *refs)
    target = "aten.addmm.default" if bias else "aten.mm.default" if batch is None else "aten.bmm.default"
    op = Operation("v0", target, refs, (), (spec((*lead, rows, cols), dtype=dtype),))
    symbols = [str(s) for s in (batch, rows, cols, depth) if not isinstance(s, int) and s is not None]
    return NodeForm(tuple(inputs), (op,), (ValueRef("v0"),), tuple(dict.fromkeys(symbols)))


def operands(form: NodeForm, sizes: dict[str, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for item in form.inputs:
        shape, strides = item.spec.shape.bind(sizes), item.spec.strides.bind(sizes)
        dense = torch.randn(shape, generator=generator)
        found.append(torch.empty_strided(shape, strides).copy_(dense))
    return found


def eager(inputs: list[torch.Tensor]) -> torch.Tensor:
    if len(inputs) == 3:
        return torch.addmm(inputs[2], inputs[0], inputs[1])
    return inputs[0] @ inputs[1]


@functools.cache
def compiled(form: NodeForm, knobs: tuple[tuple[str, Any], ...]) -> CompiledKernel:
    default = {knob.name: knob.default for knob in c_matmul_knobs(form)}
    return GENERATOR.generate_generic_kernel(form, make_config({**default, **dict(knobs)}))


def check(form: NodeForm, inputs: list[torch.Tensor], threads: int = 2, **knobs: Any) -> None:
    def draw(number: int) -> Answers:
        generator = torch.Generator().manual_seed(number)
        given = [torch.empty_like(t).normal_(generator=generator) for t in inputs] if number else inputs
        found = compiled(form, tuple(knobs.items()))(*given, threads=threads)
        return found, [eager(given)], [eager([t.double() for t in given])]

    wrong = problems_of_draws(draw)
    assert not wrong, (knobs, wrong, [t.shape for t in inputs])


LAYOUTS = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("tile", ALL_TILES)
@pytest.mark.parametrize("turned", LAYOUTS, ids=["nn", "nt", "tn", "tt"])
def test_every_tile_on_awkward_sizes(tile: str, turned: tuple[bool, bool]) -> None:
    form = product(M, N, K, turned, bias=True)
    for sizes in [(1, 1, 1), (7, 5, 3), (64, 64, 64), (33, 130, 17), (16, 97, 400), (129, 48, 193), (30, 15, 576)]:
        inputs = operands(form, dict(zip(("s0", "s1", "s2"), sizes, strict=True)))
        for panels in (False, True) if not turned[1] else (True,):  # columns far apart are always copied
            check(form, inputs, tile=tile, panels=panels)


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(0, 90), st.integers(0, 150), st.integers(0, 420)),
    turned=st.sampled_from(LAYOUTS),
    tile=st.sampled_from(ALL_TILES[:2]),
    panels=st.booleans(),
    bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_any_size(
    sizes: tuple[int, int, int], turned: tuple[bool, bool], tile: str, panels: bool, bias: bool, threads: int
) -> None:
    form = product(M, N, K, turned, bias)
    inputs = operands(form, dict(zip(("s0", "s1", "s2"), sizes, strict=True)), seed=sum(sizes))
    check(form, inputs, threads, tile=tile, panels=panels)


@pytest.mark.parametrize("turned", LAYOUTS, ids=["nn", "nt", "tn", "tt"])
def test_a_batch_of_matrices(turned: tuple[bool, bool]) -> None:
    form = product(M, N, 64, turned, batch=symbol("s3"))
    for sizes in [(1, 1, 1), (3, 20, 37), (8, 100, 100), (0, 4, 4)]:
        check(form, operands(form, dict(zip(("s3", "s0", "s1"), sizes, strict=True))))


def test_sizes_that_do_not_vary_are_built_in() -> None:
    form = product(M, 1024, 256, (False, True), bias=True)
    text = print_c_matmul(form, make_config({k.name: k.default for k in c_matmul_knobs(form)})).text
    assert "#define AF_N ((int64_t)(1024))" in text and "#define AF_M ((int64_t)(s0))" in text
    for rows in (1, 13, 400, 700):
        check(form, operands(form, {"s0": rows}))


def test_a_specialised_product_has_its_rows_built_in() -> None:
    form = product(M, 40, 30)
    inputs = operands(form, {"s0": 50})
    kernel = GENERATOR.generate_fused_kernel(form, [tuple(t.shape) for t in inputs])
    assert kernel.variant == "c_specialised" and "#define s0 INT64_C(50)" in kernel.source
    assert not problems(kernel(*inputs), [eager(inputs)], [eager([t.double() for t in inputs])])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38])
def test_nan_and_inf_stay_where_they_are(value: float) -> None:
    """Also beside columns that a panel fills up with zeros."""
    form = product(M, N, K, (False, True))
    inputs = operands(form, {"s0": 9, "s1": 21, "s2": 40})
    inputs[0][4, 7] = value
    inputs[1][39, 20] = value
    check(form, inputs)


def test_a_larger_tensors_corner_is_an_operand() -> None:
    """Rows further apart than they are long: what lies between them is not read."""
    rows = TensorSpec(SymbolicShape((M, 24)), "float32", SymbolicShape((100, 1)), "cpu")
    form = product(M, 40, 24)
    form = NodeForm((NodeInput("i0", rows), form.inputs[1]), form.operations, form.outputs, form.symbols)
    large = torch.full((31, 100), float("nan"))
    large[:, :24] = torch.randn(31, 24)
    check(form, [large[:, :24], torch.randn(24, 40)])


@pytest.mark.parametrize("sizes", [(5, 7, 0), (300, 130, 193), (64, 64, 385)])
def test_the_number_of_threads_changes_no_bit(sizes: tuple[int, int, int]) -> None:
    form = product(M, N, K, (False, True), bias=True)
    inputs = operands(form, dict(zip(("s0", "s1", "s2"), sizes, strict=True)))
    (one,), *others = (compiled(form, ())(*inputs, threads=threads) for threads in (1, 2, 3))
    assert all(torch.equal(one, found) for (found,) in others)


def test_a_batch_of_several_steps() -> None:
    """The outer of two steps that are alike is told by its place."""
    lead, rows, depth = (4, 3, 4), 8, 16
    strided = TensorSpec(SymbolicShape((*lead, rows, depth)), "float32", SymbolicShape((16, 1000, 16, 16, 1)), "cpu")
    copied = spec((*lead, rows, depth))
    joined = spec((48, rows, depth))
    form = NodeForm(
        (NodeInput("i0", strided), NodeInput("i1", spec((48, depth, 20)))),
        (
            Operation("v0", "aten.clone.default", (ValueRef("i0"),), (), (copied,)),
            Operation("v1", "aten.view.default", (ValueRef("v0"), (48, rows, depth)), (), (joined,)),
            Operation("v2", "aten.bmm.default", (ValueRef("v1"), ValueRef("i1")), (), (spec((48, rows, 20)),)),
        ),
        (ValueRef("v2"),),
        (),
    )
    left = torch.randn(4000).as_strided((*lead, rows, depth), (16, 1000, 16, 16, 1))
    right = torch.randn(48, depth, 20)
    (found,) = compiled(form, ())(left, right)
    assert torch.allclose(found, left.reshape(48, rows, depth) @ right, atol=1e-5)


def converted() -> NodeForm:
    form = product(M, N, K)
    half = NodeInput("i0", spec((M, K), dtype="bfloat16"))
    wide = Operation("v1", "aten._to_copy.default", (ValueRef("i0"),), (("dtype", "float32"),), (spec((M, K)),))
    made = Operation("v0", "aten.mm.default", (ValueRef("v1"), ValueRef("i1")), (), form.operations[0].outputs)
    return NodeForm((half, form.inputs[1]), (wide, made), form.outputs, form.symbols)


def two_products() -> NodeForm:
    form = product(M, M, M)
    second = Operation("v1", "aten.mm.default", (ValueRef("v0"), ValueRef("i1")), (), form.operations[0].outputs)
    return NodeForm(form.inputs, (*form.operations, second), (ValueRef("v1"),), form.symbols)


def scaled() -> NodeForm:
    form = product(M, N, K, bias=True)
    (op,) = form.operations
    op = Operation(op.name, op.target, op.args, (("alpha", 0.5),), op.outputs)
    return NodeForm(form.inputs, (op,), form.outputs, form.symbols)


def added_to_a_batch() -> NodeForm:
    form = product(M, N, K, batch=symbol("s3"))
    refs = (ValueRef("i2"), ValueRef("i0"), ValueRef("i1"))
    op = Operation("v0", "aten.baddbmm.default", refs, (), form.operations[0].outputs)
    inputs = (*form.inputs, NodeInput("i2", form.operations[0].outputs[0]))
    return NodeForm(inputs, (op,), form.outputs, form.symbols)


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (added_to_a_batch(), "bias"),
        (two_products(), "anchor"),
        (scaled(), "factor"),
        (product(M, N, K, dtype="bfloat16"), "dtype"),
        (product(M, N, K, dtype="float64"), "dtype"),
        (converted(), "dtype"),
    ],
    ids=["matrices", "two", "factor", "bf16", "f64", "converted"],
)
def test_what_is_refused_says_why(form: NodeForm, code: str) -> None:
    found = refusal(TEMPLATE, form)
    assert found is not None and found[0] == code and found[1].startswith("expected ")
    with pytest.raises(LoweringError):
        plan_c_matmul(form)
