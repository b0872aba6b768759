"""Copies, casts, fills, concatenations and pads of different sizes in one Triton kernel: one launch for all of them.

What they make is eager's, bit by bit. The cases ``moves_of_*`` of the table go through the tests of all cases too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofuse.codegen.call import allocate
from autofuse.codegen.knobs import default_config
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import make_inputs, run_unfused
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import TritonSource, resolve
from autofuse.errors import LoweringError, ShapeError
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.optable import VIEWS, info
from autofuse.ir.records import make_config
from tests.cases import CASES
from tests.codegen.nodes import NodeBuilder
from tests.tracing import trace

aten = torch.ops.aten
Sizes = Mapping[str, int]


def on_gpu(form: NodeForm) -> NodeForm:
    return NodeForm.from_json(json.loads(json.dumps(form.to_json()).replace('"cpu"', '"cuda"')))


def plan(form: NodeForm, devices: Mapping[ValueRef, str] | None = None) -> tuple[list[FusionNode], FusionEngine]:
    def refusal(node: NodeForm) -> tuple[str, str] | None:
        try:
            lower(node)
        except LoweringError as error:
            return error.code, str(error)
        return None

    engine = FusionEngine(lowerable=refusal)
    inputs = {item.name: item.spec for item in form.inputs}
    return engine.fuse(FusionGraph(form.operations, inputs, form.outputs, devices=devices)), engine


def printed(form: NodeForm, values: Sizes, **knobs: Any) -> TritonSource:
    kernel = lower(form)
    return print_triton(kernel, make_config({**dict(default_config(triton_knobs(kernel, values, values))), **knobs}))


def check_equal(source: TritonSource, form: NodeForm, values: Sizes) -> None:
    """All outputs are eager's bit by bit, and nothing beside them is written."""
    inputs = make_inputs(form, values, seed=1, kind="normal")
    outputs = [allocate(form.spec(ref), values, poison=True) for ref in form.outputs]
    load_interpreted(source)(values, [*inputs, *outputs])
    for found, expected in zip(outputs, run_unfused(form, inputs, values), strict=True):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.equal(found, expected), f"sizes {dict(values)}\n{source.text}"


# ---- kernels before and after ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["moves_of_sizes", "moves_of_parts"])
def test_one_launch_for_all(name: str) -> None:
    form = on_gpu(CASES[name].form())
    before = [op for op in form.operations if info(op.target).kind not in VIEWS]
    ((node,), _) = plan(form)
    kernel = lower(node.form)
    assert len(before) == len(node.kernels) > 3 and node.validate_fusion() and len(kernel.rest) >= 3
    for sizes in CASES[name].sizes:
        values = dict(zip(form.symbols, sizes, strict=True))
        source = printed(node.form, values)
        assert [launch.number for launch in resolve(source, values).launches] == [0]
        assert TritonSource.from_json(json.loads(json.dumps(source.to_json()))) == source


def test_the_grid_is_the_sum_of_all_tiles_and_nothing_of_what_is_empty() -> None:
    form = trace(lambda a, b: (a.half(), aten.clone.default(b.t(), memory_format=torch.contiguous_format)),
                 [torch.zeros(11), torch.zeros(5, 7)])  # fmt: skip
    values = {"s0": 5000, "s1": 100, "s2": 70}
    source = printed(form, values, TILE=256)

    def grid(*sizes: int) -> int:
        return resolve(source, dict(zip(form.symbols, sizes, strict=True))).launches[0].grid

    # a tile of the copy is 256 elements in a row, one of the transposed copy 16 x 16
    assert grid(5000, 100, 70) == 20 + 7 * 5 and grid(257, 1, 1) == 2 + 1
    assert grid(0, 17, 16) == 2 and grid(1, 0, 16) == 1 and grid(0, 0, 0) == 1


def test_each_nest_has_the_tile_that_suits_it() -> None:
    """Few columns, many rows: no element of the tile is idle because another nest is wide."""
    form = trace(lambda a, b: (torch.cat((a, a), 1), b.half()), [torch.zeros(5, 7), torch.zeros(11)])
    source = printed(form, {"s0": 4096, "s1": 4, "s2": 100_000})
    assert "BLOCK_ROWS=256, BLOCK_COLS=4)" in source.text and "BLOCK_COLS=1024)" in source.text
    assert resolve(source, {"s0": 4096, "s1": 4, "s2": 100_000}).launches[0].grid == 16 + 98


# ---- what they make ---------------------------------------------------------------------------------------


def test_one_kernel_for_shapes_that_change_between_calls() -> None:
    """The tiles are those of the first shapes; any others are right with them."""
    form = CASES["moves_of_sizes"].form()
    source = printed(form, dict(zip(form.symbols, (64, 32, 9, 2, 3, 4, 50, 3), strict=True)))
    for sizes in (*CASES["moves_of_sizes"].sizes, (64, 32, 9, 2, 3, 4, 50, 3), (1, 2053, 4099, 13, 1, 97, 3, 331)):
        check_equal(source, form, dict(zip(form.symbols, sizes, strict=True)))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_dtypes(dtype: str) -> None:
    to = getattr(torch, dtype)
    example = [torch.zeros(5, 7), torch.zeros(11, dtype=to), torch.zeros(3, 4, dtype=to), torch.zeros(13, 2, dtype=to)]
    form = trace(
        lambda a, b, c, d: (
            aten._to_copy.default(a, dtype=to), b.flip(0), aten._to_copy.default(c, dtype=torch.float16),
            F.pad(d, (1, 2), value=1), aten.full_like.default(b, 1),
        ),
        example,
    )  # fmt: skip
    for sizes in ((5, 7, 11, 3, 4, 13, 2), (67, 33, 1, 1, 101, 0, 1)):
        values = dict(zip(form.symbols, sizes, strict=True))
        check_equal(printed(form, values, TILE=64), form, values)


def test_strides() -> None:
    """Operands that are transposed, have gaps, are spread over memory of their own, or begin inside of a tensor."""
    tensors = [
        torch.randn(7, 5).t(), torch.randn(5, 22)[:, ::2], torch.randn(3, 1).expand(3, 9),
        torch.randn(4, 6, 8)[1:, :, 3],        torch.randn(2, 3, 4, 5).permute(3, 0, 2, 1),
    ]  # fmt: skip
    b = NodeBuilder()
    form_of_copies = [b.call("aten.clone.default", b.input(t), memory_format="contiguous_format") for t in tensors]
    form = b.form(*form_of_copies)
    assert len(lower(form).rest) == 4
    for tile in (8, 64, 1024):
        outputs = [allocate(form.spec(ref), {}, poison=True) for ref in form.outputs]
        load_interpreted(printed(form, {}, TILE=tile))({}, [*tensors, *outputs])
        assert all(torch.equal(found, t) and found.is_contiguous() for found, t in zip(outputs, tensors, strict=True))


def test_nothing_outside_of_an_operand_is_read_or_written() -> None:
    """Operands between NaNs, outputs between marks."""
    form = trace(lambda a, b: (F.pad(a, (2, 3)), torch.cat((b, b), 0)), [torch.zeros(5), torch.zeros(3, 7)])
    values = {"s0": 5, "s1": 3, "s2": 7}
    memory = torch.full((200,), float("nan"))
    a, b = memory[10:15].zero_(), memory[40:61].zero_().view(3, 7)
    written = torch.full((200,), -1.0)
    outputs = [written[20:30], written[60:102].view(6, 7)]
    load_interpreted(printed(form, values, TILE=16))(values, [a, b, *outputs])
    assert not written[20:30].any() and not written[60:102].any()
    assert (torch.cat((written[:20], written[30:60], written[102:])) == -1).all()


@pytest.mark.parametrize("name", ["moves_of_sizes", "moves_of_parts"])
def test_every_choice_of_every_knob(name: str) -> None:
    form = CASES[name].form()
    values = dict(zip(form.symbols, CASES[name].sizes[-2], strict=True))
    high = dict.fromkeys(values, 3000)
    knobs = triton_knobs(lower(form), values, high)
    assert {"TILE", "WIDTH_0", "WIDTH_3", "num_warps", "eviction", "index_bits"} <= {k.name for k in knobs}
    for knob in knobs:
        for choice in knob.choices:
            check_equal(printed(form, values, **{knob.name: choice}), form, values)


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "copy": lambda x: aten.clone.default(x, memory_format=torch.contiguous_format),
    "transpose": lambda x: aten.clone.default(x.transpose(0, -1), memory_format=torch.contiguous_format),
    "half": lambda x: aten._to_copy.default(x, dtype=torch.float16),
    "int": lambda x: aten._to_copy.default(x, dtype=torch.int32),
    "fill": lambda x: aten.full_like.default(x, 2),
    "cat": lambda x: torch.cat((x, x), -1),
    "stack": lambda x: torch.stack((x, x), 0),
    "pad": lambda x: F.pad(x, (1, 2), value=1),
    "flip": lambda x: x.flip(0),
    "repeat": lambda x: x.repeat(3, *[1] * (x.dim() - 1)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)  # sizes that differ become symbols of their own


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(sorted(MOVES)), st.integers(1, 3), st.sampled_from(DTYPES)), min_size=2, max_size=5
    ),
    tile=st.sampled_from((8, 64, 1024)),
    data=st.data(),
)
def test_any_moves_of_any_sizes(chosen: Sequence[tuple[str, int, torch.dtype]], tile: int, data: Any) -> None:
    left = iter(PRIMES)
    inputs = [torch.zeros([next(left) for _ in range(rank)], dtype=dtype) for _, rank, dtype in chosen]
    form = trace(lambda *xs: tuple(MOVES[name](x) for (name, _, _), x in zip(chosen, xs, strict=True)), inputs)
    kernel = lower(form)
    assert len(kernel.rest) == len(chosen) - 1
    config = default_config(triton_knobs(kernel, dict.fromkeys(form.symbols, 9), dict.fromkeys(form.symbols, 9)))
    source = print_triton(kernel, make_config({**dict(config), "TILE": tile}))
    for _ in range(2):
        sizes = data.draw(st.lists(st.integers(0, 17), min_size=len(form.symbols), max_size=len(form.symbols)))
        check_equal(source, form, dict(zip(form.symbols, sizes, strict=True)))


# ---- limits and refusals ------------------------------------------------------------------------------------


def test_one_large_nest_gives_all_64_bit_positions() -> None:
    form = trace(lambda a, b: (a.half(), b.half()), [torch.zeros(5, 7), torch.zeros(11)])
    for large in ({"s0": 60_000, "s1": 60_000, "s2": 3}, {"s0": 3, "s1": 3, "s2": 3_000_000_000}):
        source = printed(form, large)
        assert ".to(tl.int64)" in source.text and resolve(source, large).launches[0].grid > 1_000_000
        with pytest.raises(ShapeError, match="at most"):
            resolve(printed(form, large, index_bits=32), large)


def test_copies_that_read_each_other_stay_apart() -> None:
    """A program cannot wait for what another one writes."""
    form = trace(lambda a, b: (lambda c: (c, F.pad(c, (1, 2)), b.half()))(a.half()), [torch.zeros(5), torch.zeros(3)])
    with pytest.raises(LoweringError) as caught:
        lower(form)
    assert caught.value.code == "disjoint"
    nodes, engine = plan(on_gpu(form))
    assert [node.operation_names for node in nodes] == ["constant_pad_nd + to_copy"]  # without what is padded
    assert "part_leaves" in {refusal.code for refusal in engine.refusals}


def test_copies_on_several_devices_stay_apart() -> None:
    """A launch reaches one device; the specs of two GPUs are the same."""
    form = on_gpu(trace(lambda a, b: (a.half(), b.half()), [torch.zeros(5, 7), torch.zeros(3)]))
    names = [ref.name for ref in (*form.operations[0].inputs, *form.operations[1].inputs)]
    own = [[ValueRef(names[k]), ValueRef(form.operations[k].name)] for k in (0, 1)]
    for devices, nodes in ((("cuda:0", "cuda:0"), 1), (("cuda:0", "cuda:1"), 0), (("cuda:0", "cpu"), 0)):
        where = {ref: device for refs, device in zip(own, devices, strict=True) for ref in refs}
        found, engine = plan(form, where)
        assert len(found) == nodes
        assert ("mixed_devices" in {refusal.code for refusal in engine.refusals}) == (nodes == 0)
