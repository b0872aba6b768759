"""Triton kernels of every case of the table, in Triton's interpreter, against eager and float64."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

import autofuse
from autofuse.codegen.call import allocate
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import make_inputs, run_unfused, to_float64, widen
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import TritonSource, resolve
from autofuse.errors import ShapeError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Config, make_config
from autofuse.ir.shape import evaluate, product
from tests.cases import CASES, LOOSE_SPECIALS, NO_HALVES, ON_GPUS, SIZES_BY_SYMBOLS
from tests.codegen.compare import problems
from tests.tracing import trace

DTYPES = ("float32", "float64", "bfloat16", "float16")

# Small tiles, so that small tensors take every way through a kernel: several tiles, loops over columns, shares of rows.
MOST_POINTS = 800  # the interpreter takes half a millisecond a program, and more
STRESS: dict[str, Config] = {
    "loops": make_config(
        {
            "BLOCK_COLS": 8, "BLOCK_ROWS": 2, "persistent": False, "PROGRAMS": 3, "num_stages": 2, "index_bits": 64,
            "math": "fast", "eviction": "first", "TILE": 16,
        }
    ),
    "rows": make_config({"BLOCK_COLS": 64, "BLOCK_ROWS": 4, "persistent": True, "PROGRAMS": 5, "TILE": 64}),
    "alone": make_config({"BLOCK_COLS": 16, "BLOCK_ROWS": 2, "persistent": False, "PROGRAMS": 1, "TILE": 8}),
}  # fmt: skip


def sizes_of(name: str, form: NodeForm) -> list[dict[str, int]]:
    sizes = CASES[name].sizes or SIZES_BY_SYMBOLS[len(form.symbols)]
    return [dict(zip(form.symbols, values, strict=True)) for values in sizes]


def run(source: TritonSource, form: NodeForm, values: Mapping[str, int], kind: str, loose: bool) -> None:
    inputs = make_inputs(form, values, seed=1, kind=kind)  # type: ignore[arg-type]
    outputs = [allocate(form.spec(ref), values, poison=True) for ref in form.outputs]
    if all(t.numel() == 0 for t in outputs):
        return
    load_interpreted(source)(values, [*inputs, *outputs])
    eager = run_unfused(form, inputs, values)
    exact = run_unfused(to_float64(form), widen(inputs), values)
    wrong = problems(outputs, eager, exact, loose)
    assert not wrong, f"sizes {dict(values)}, {kind} values: {'; '.join(wrong)}\n{source.text}"


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in ON_GPUS for d in DTYPES if n not in NO_HALVES or not d.endswith("float16")]
)
def test_default(name: str, dtype: str) -> None:
    """In float32 at all sizes; of the other dtypes, each takes the sizes that its neighbours in the list leave out."""
    form = CASES[name].form(getattr(torch, dtype))
    kernel = lower(form)
    place = DTYPES.index(dtype)
    sizes = sizes_of(name, form)
    for values in sizes if place == 0 else sizes[place - 1 :: len(DTYPES) - 1] or sizes[:1]:
        source = print_triton(kernel, default_config(triton_knobs(kernel, values, values)))
        for kind in ("normal", "special") if dtype == "float32" else ("normal",):
            run(source, form, values, kind, name in LOOSE_SPECIALS)


@pytest.mark.parametrize("config", STRESS)
@pytest.mark.parametrize("name", ON_GPUS)
def test_small_tiles(name: str, config: str) -> None:
    form = CASES[name].form()
    kernel = lower(form)
    has_run = False
    sizes = sizes_of(name, form)
    points = [max(evaluate(product(nest.dims), values) for nest in (kernel, *kernel.rest)) for values in sizes]
    for number, values in enumerate(sizes, list(STRESS).index(config)):
        if points[sizes.index(values)] > max(MOST_POINTS, min(points)):
            continue
        # Sizes built in, as arguments, or both.
        for constants in ((None, values), (None,), (values,))[number % 3]:
            source = print_triton(kernel, STRESS[config], constants)
            try:
                run(source, form, values, "normal", name in LOOSE_SPECIALS)
                has_run = True
            except ShapeError as error:  # a row longer than its tile
                assert "of at most 64" in str(error)
    assert has_run


SEARCHED = ("add_bias_gelu", "attention_scores", "layer_norm_backward", "cross_entropy", "bias_gradient", "mean_all")


@pytest.mark.parametrize("name", SEARCHED)
def test_every_choice_of_every_knob(name: str) -> None:
    """One knob at a time away from the default."""
    form = CASES[name].form()
    kernel = lower(form)
    values = sizes_of(name, form)[0]
    knobs = triton_knobs(kernel, values, dict.fromkeys(values, 1500))
    default = {k.name: k.default for k in knobs}
    for knob in knobs:
        for choice in knob.choices:
            run(print_triton(kernel, make_config({**default, knob.name: choice})), form, values, "normal", False)


# ---- long rows beside column sums ---------------------------------------------------------------------------


@pytest.mark.parametrize("programs", [1, 4])
def test_column_sums_of_rows_that_no_tile_holds(programs: int) -> None:
    """20000 columns: the sums grow in scratch memory, of one program or of several with several tiles each."""
    form = CASES["layer_norm_backward"].form()
    kernel = lower(form)
    values = {"s0": 131, "s1": 3, "s2": 20_000}
    config = dict(default_config(triton_knobs(kernel, values, values)))
    assert config["persistent"] is False and config["PROGRAMS"] == 256 and config["BLOCK_ROWS"] == 4
    source = print_triton(kernel, make_config({**config, "BLOCK_COLS": 2048, "PROGRAMS": programs}))
    call = resolve(source, values)
    assert [elements for _, elements in call.scratch] == [programs * 20_000] * 2 and len(call.launches) == 2
    run(source, form, {**values, "s0": 11}, "normal", False)


def test_a_column_sum_of_what_is_the_same_in_all_rows() -> None:
    """Each row adds it, in tiles with rows to spare and in full ones; no rows at all add nothing."""
    form = trace(
        lambda x, w: (torch.softmax(x, 1), w.expand(x.shape).sum(0), x.amax(0)), [torch.zeros(5, 7), torch.zeros(7)]
    )
    kernel = lower(form)
    config = make_config({"BLOCK_COLS": 16, "BLOCK_ROWS": 4, "persistent": False, "PROGRAMS": 3})
    for rows in (1, 5, 8, 24):
        for constants in ({}, {"s0": rows, "s1": 40}):
            run(print_triton(kernel, config, constants), form, {"s0": rows, "s1": 40}, "normal", False)


def test_no_rows_have_sums_of_zero() -> None:
    form = CASES["layer_norm_backward"].form()
    config = make_config({"BLOCK_COLS": 16, "BLOCK_ROWS": 4, "persistent": False, "PROGRAMS": 3})
    run(print_triton(lower(form), config), form, {"s0": 0, "s1": 5, "s2": 40}, "normal", False)


def test_partial_sums_of_very_long_rows_stay_within_bounds() -> None:
    kernel = lower(CASES["layer_norm_backward"].form())
    for columns, most in ((20_000, 1024), (200_000, 256), (2_000_000, 1)):
        values = {"s0": 1000, "s1": 1, "s2": columns}
        (programs,) = (k for k in triton_knobs(kernel, values, values) if k.name == "PROGRAMS")
        assert programs.choices[-1] == most and programs.default == min(most, 256)
    source = print_triton(
        kernel, make_config({**dict(default_config(triton_knobs(kernel, values, values))), "PROGRAMS": 1024})
    )
    with pytest.raises(ShapeError, match="at most"):
        resolve(source, {"s0": 2, "s1": 1, "s2": 3_000_000})


def test_constants_at_places_that_no_loop_changes() -> None:
    """All elements of a short tensor are stored one by one, beside a number."""

    def function(x: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat((torch.tanh(x), torch.zeros(2))), number.exp()

    form = trace(function, [torch.zeros(3), torch.zeros(())], dynamic=False)
    kernel = lower(form)
    run(print_triton(kernel, default_config(triton_knobs(kernel, {}, {}))), form, {}, "normal", False)


def test_same_text_same_launches() -> None:
    name = "layer_norm_backward"
    form = CASES[name].form()
    kernel = lower(form)
    values = sizes_of(name, form)[0]
    config = default_config(triton_knobs(kernel, values, values))
    source = print_triton(kernel, config)
    assert print_triton(lower(form), config) == source
    assert TritonSource.from_json(source.to_json()) == source


def test_positions_beyond_32_bits() -> None:
    """2^31 elements and more get 64-bit positions; a kernel with 32 bits refuses them instead of wrapping."""
    kernel = lower(CASES["add_bias_gelu"].form())
    large = dict.fromkeys(kernel.symbols, 60_000)
    config = dict(default_config(triton_knobs(kernel, large, large)))
    assert config["index_bits"] == 64
    assert ".to(tl.int64)" in print_triton(kernel, make_config(config)).text
    narrow = print_triton(kernel, make_config({**config, "index_bits": 32}))
    with pytest.raises(ShapeError, match="at most"):
        resolve(narrow, large)


def test_the_public_generator() -> None:
    generator = autofuse.TritonKernelGenerator()
    form = CASES["softmax"].form()
    generic = generator.generate_generic_kernel(form)
    assert "@triton.jit" in generic.text and generic.source.symbols == ("s0", "s1", "s2")
    assert generator.can_generate_specialized([(4, 5, 6)]) and not generator.can_generate_specialized([("s0", 5)])
    special = generator.generate_fused_kernel(form, [(4, 5, 6)])
    assert special.source.symbols == () and special.constants == (("s0", 4), ("s1", 5), ("s2", 6))
    run(special.source, form, {"s0": 4, "s1": 5, "s2": 6}, "normal", False)
    with pytest.raises(ShapeError):
        generator.generate_fused_kernel(form, [(4, 5)])
