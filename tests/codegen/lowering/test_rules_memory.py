"""Concatenation, windows, padding and shifts: what the planner makes of them, places at the edges, rotary embeddings.

The cases tagged ``memory`` in `tests/cases.py` go through C and Triton with the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autofuse import sessions
from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.knobs import default_config
from autofuse.codegen.loops import check
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.reference import run_unfused
from autofuse.errors import LoweringError
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm
from autofuse.ir.optable import VIEWS, info
from tests.cases import CASES
from tests.codegen.conftest import Verify
from tests.codegen.nodes import NodeBuilder
from tests.tracing import trace

# Of several chains that read other places of one tensor, or with creations of fewer elements than their loops.
SEVERAL = (
    "nests_of_parts",
    "copies_of_squeezed",
    "split_copy",
    "copies_of_views",
    "creation_like",
    "fill",
    "eye",
    "linspace",
)
MEMORY = [name for name, case in CASES.items() if "memory" in case.tags and name not in SEVERAL]
aten = torch.ops.aten


def _refusal(form: NodeForm) -> tuple[str, str] | None:
    try:
        lower(form)
    except LoweringError as error:
        return error.code, str(error)
    return None


def plan(form: NodeForm) -> tuple[list[FusionNode], FusionEngine]:
    engine = FusionEngine(lowerable=_refusal)
    graph = FusionGraph(form.operations, {item.name: item.spec for item in form.inputs}, form.outputs)
    return engine.fuse(graph), engine


# ---- kernels before and after ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEMORY)
def test_all_of_a_case_is_one_kernel(name: str) -> None:
    form = CASES[name].form()
    kernels = [op for op in form.operations if info(op.target).kind not in VIEWS]
    nodes, _ = plan(form)
    expected = {"stack_many": 10, "unbind": 8}.get(name, len(kernels))
    assert len(nodes) == 1 and len(nodes[0].kernels) == expected > 1
    assert nodes[0].validate_fusion() and check(lower(nodes[0].form)) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat((x, x), 0),
        lambda x: torch.nn.functional.pad(x, (1, 2)),
        lambda x: x.flip(0),
        lambda x: x.roll(1, 0),
        lambda x: x.repeat(2, 2),
    ],
)
def test_one_operation_alone_stays_as_it_is(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    nodes, engine = plan(trace(function, [torch.zeros(5, 7)]))
    assert nodes == [] and {refusal.code for refusal in engine.refusals} == {"single_op"}


def test_windows_of_an_input_stay_views() -> None:
    form = trace(lambda x: (x[:, 1:3] + 1) * x[:, 3:5], [torch.zeros(5, 7)])
    ((node,), _) = plan(form)
    assert node.operation_names == "add + mul" and len(node.inputs) == 2


def test_a_window_is_not_a_result() -> None:
    """aten gives a view: only a copy of it would have memory of its own."""
    form = trace(lambda x: x.exp()[1:], [torch.zeros(5, 7)])
    with pytest.raises(LoweringError, match="memory of its own"):
        lower(form)


@pytest.mark.parametrize(
    "function", [lambda x: x.softmax(-1).roll(1, -1) * 2, lambda x: (x - x.mean()).roll((1, 1), (0, 1))]
)
def test_a_reduction_is_not_rolled_along_its_own_loop(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each of the two parts of the roll would have reduced only the elements that are its own."""
    form = trace(function, [torch.zeros(5, 7)])
    with pytest.raises(LoweringError, match="whole rows"):
        lower(form)
    for node in plan(form)[0]:
        assert not ("roll" in node.operation_names and {"_softmax", "mean"} & set(node.operation_names.split(" + ")))


def test_a_reduction_is_rolled_along_other_loops(verify: Verify) -> None:
    form = trace(lambda x: x.softmax(-1).roll(1, 0) * 2, [torch.zeros(5, 7)])
    verify(form, [(5, 7), (1, 1), (33, 67)])


def test_a_part_that_is_also_needed_by_itself_has_a_kernel_of_its_own() -> None:
    form = trace(lambda a, b: (a.exp(), torch.cat((a.exp() * 2, b), 1) + 1), [torch.zeros(5, 7), torch.zeros(5, 4)])
    shared = trace(
        lambda a, b: (lambda e: (e, torch.cat((e, b), 1) + 1))(a.exp()), [torch.zeros(5, 7), torch.zeros(5, 4)]
    )
    assert "cat + add" in [node.operation_names for node in plan(shared)[0]]
    assert "part_leaves" in {refusal.code for refusal in plan(shared)[1].refusals}
    assert any("mul + cat + add" in node.operation_names for node in plan(form)[0])


# ---- the code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rotary_half", "rotary_pairs", "cat_equal", "stack_leading"])
def test_what_consists_of_equal_pieces_is_written_piece_by_piece(name: str) -> None:
    """Each element is calculated once: no place is tested."""
    kernel = lower(CASES[name].form())
    ops = {value.op for value in kernel.values}
    assert len(kernel.stores) == {"cat_equal": 3, "stack_leading": 3}.get(name, 2)
    assert not ops & {"where", "load_if", "index"}


@pytest.mark.parametrize("name", ["cat_columns", "pad_slice_roll_flip", "slice_backward"])
def test_other_pieces_are_read_under_a_test(name: str) -> None:
    kernel = lower(CASES[name].form())
    assert "load_if" in {value.op for value in kernel.values} and len(kernel.stores) == 1
    assert " ? " in print_c(kernel, default_config(knobs_for(kernel))).text


# ---- numerics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["rotary_half", "rotary_pairs", "cat_columns", "pad_slice_roll_flip", "slice_backward"]
)
def test_dtypes(name: str, dtype: str, verify: Verify) -> None:
    case = CASES[name]
    form = case.form(getattr(torch, dtype))
    sizes = {2: ((5, 7), (1, 1), (33, 67)), 3: ((3, 5, 7), (1, 2, 1))}[len(form.symbols)]
    verify(form, sizes)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(widths=st.lists(st.integers(0, 19), min_size=2, max_size=5), dim=st.integers(0, 1), data=st.data())
def test_concatenations_of_any_sizes(generator: FusionKernelGenerator, widths: list[int], dim: int, data: Any) -> None:
    """Every boundary, and windows of the result that begin and end anywhere."""
    total = sum(widths)
    start = data.draw(st.integers(0, max(total - 1, 0)))
    end = data.draw(st.integers(start, total))
    if end == start:
        return
    tensors = [torch.randn((width, 3) if dim == 0 else (3, width)) for width in widths]
    b = NodeBuilder()
    moved = [b.call("aten.add.Scalar", b.input(tensor), 1.0) for tensor in tensors]
    whole = b.call("aten.cat.default", moved, dim)
    part = b.call("aten.mul.Scalar", b.call("aten.slice.Tensor", whole, dim, start, end), 2.0)
    for form in (b.form(part), b.form(b.call("aten.neg.default", whole))):
        found = generator.generate_generic_kernel(form)(*tensors)
        assert torch.equal(found[0], run_unfused(form, tensors, {})[0])


def _part(width: int, data: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """A way to take a part of a tensor's columns, or to put it into a whole; and how many columns that makes."""
    kind = data.draw(st.sampled_from(["begin", "end", "nth", "gradient", "copies", "padded"]))
    if kind in ("begin", "end"):
        cut = data.draw(st.integers(1, width))
        return (lambda x: x[:, :cut], cut) if kind == "begin" else (lambda x: x[:, -cut:], cut)
    if kind == "nth":
        count = data.draw(st.sampled_from([n for n in (1, 2, 3, 5, 9) if width % n == 0]))
        which = data.draw(st.integers(0, count - 1))
        return lambda x: x.split(width // count, 1)[which], width // count
    if kind == "copies":
        count = data.draw(st.sampled_from([2, 3, 9]))
        return lambda x: torch.cat([x * float(k + 1) for k in range(count)], 1), width * count
    before, after = data.draw(st.sampled_from([0, 0, 3, 7, 40])), data.draw(st.sampled_from([0, 3, 40]))
    total = before + width + after
    if kind == "padded":
        return lambda x: torch.nn.functional.pad(x, (before, after)), total
    return lambda x: aten.slice_backward(x, [x.shape[0], total], 1, before, before + width, 1), total


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the second half, where a gradient begins": lambda x: aten.slice_backward(x.split(5, 1)[1], [6, 45], 1, 0, 5, 1),
    "the beginning of the second third": lambda x: torch.cat([x, x, x], 1).split(10, 1)[1][:, :3],
    "the second half first of nine": lambda x: torch.cat([x.split(5, 1)[1], *(x[:, :5] for _ in range(8))], 1),
}


@pytest.mark.parametrize("name", PARTS)
def test_digits_beside_a_part_have_the_strides_of_its_whole(generator: FusionKernelGenerator, name: str) -> None:
    x = torch.arange(1.0, 61.0).view(6, 10)
    form = trace(lambda x: PARTS[name](x * 2.0) + 1.0, [x], static=[10])
    assert _refusal(form) is None
    assert torch.equal(generator.generate_generic_kernel(form)(x)[0], PARTS[name](x * 2.0) + 1.0)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(width=st.sampled_from([4, 9, 10, 45]), count=st.integers(2, 4), data=st.data())
def test_parts_of_parts_and_of_wholes(generator: FusionKernelGenerator, width: int, count: int, data: Any) -> None:
    """A part that begins where its whole does is no less a part: strides beside it are the whole's."""
    steps, columns = [], width
    for _ in range(count):
        step, columns = _part(columns, data)
        steps.append(step)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        for step in steps:
            x = step(x)
        return x + 1.0

    x = torch.arange(1.0, 6 * width + 1).view(6, width)  # all different, and no rounding
    form = trace(function, [x], static=[width])
    if _refusal(form) is None:
        assert torch.equal(generator.generate_generic_kernel(form)(x)[0], function(x))


@pytest.mark.parametrize("name", ["cat_columns", "rotary_pairs", "pad_slice_roll_flip"])
def test_threads(name: str, verify: Verify) -> None:
    form = CASES[name].form()
    sizes = {2: ((701, 129),), 3: ((5, 101, 129),)}[len(form.symbols)]
    verify(form, sizes, ("normal",), threads=3)


def test_nothing_outside_of_an_operand_is_read(generator: FusionKernelGenerator) -> None:
    """Operands between NaNs: what is read beside them would show."""
    form = trace(lambda a, b: torch.cat((a, b), 0) * 0 + 1, [torch.zeros(3), torch.zeros(5)])
    kernel = generator.generate_generic_kernel(form)
    memory = torch.full((40,), float("nan"))
    a, b = memory[10:13], memory[20:25]
    a.zero_(), b.zero_()
    assert torch.equal(kernel(a, b)[0], torch.ones(8))


def test_strided_operands(verify: Verify) -> None:
    """Operands that are transposed, or have gaps."""
    example = [torch.zeros(7, 5).t(), torch.zeros(5, 22)[:, ::2]]
    form = trace(lambda a, b: torch.cat((a * 2, b), 1).flip(1) + 1, example, dynamic=False)
    assert [tuple(item.spec.strides) for item in form.inputs] == [(1, 5), (22, 2)]
    verify(form, [()])


# ---- rotary embeddings in captured graphs -----------------------------------------------------------------


class Rotary(torch.nn.Module):
    """Queries with a rotary embedding, in both forms."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64))

    def forward(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = q * self.scale
        first, second = q[..., :32], q[..., 32:]
        q = q * cos + torch.cat((-second, first), -1) * sin
        even, odd = q[..., 0::2], q[..., 1::2]
        c, s = cos[:, :32], sin[:, :32]
        return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    settings_of_run = {
        "STORE": str(tmp_path / "store.sqlite3"), "TUNE": "wait", "TUNER_TRIALS": "1", "TUNER_ROUNDS": "5",
        "TUNER_IDLE_EXIT_SECONDS": "2",
    }  # fmt: skip
    for name, value in settings_of_run.items():
        monkeypatch.setenv(f"AUTOFUSE_{name}", value)
    torch._dynamo.reset()
    found = sessions.current_session()
    yield found
    found.finish(0)


def test_rotary_with_gradients(session: Any) -> None:
    torch.manual_seed(0)
    eager, inputs = Rotary(), (torch.randn(2, 4, 128, 64), torch.randn(128, 64), torch.randn(128, 64))
    compiled, exact = torch.compile(copy.deepcopy(eager), backend="autofuse"), copy.deepcopy(eager).double()

    def run(model: torch.nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        q, cos, sin = (t.to(dtype, copy=True) for t in inputs)
        q.requires_grad_()
        model.zero_grad()
        result = model(q, cos, sin)
        result.square().sum().backward()
        scale = next(model.parameters())
        return [result.detach(), q.grad, scale.grad]  # type: ignore[list-item]

    for _ in range(4):  # capture, tune, route
        run(compiled, torch.float32)
    before = session.totals().fused_calls
    found = run(compiled, torch.float32)
    assert session.totals().fused_calls - before >= 2  # forward and backward
    ulp = torch.finfo(torch.float32).eps
    for ours, own, reference in zip(found, run(eager, torch.float32), run(exact, torch.float64), strict=True):
        error, allowed = ((t.double() - reference).abs().max() for t in (ours, own))
        assert error <= 2 * allowed + 4 * ulp * reference.abs().max()


def test_rotary_forward_is_at_most_two_kernels() -> None:
    """The scaling and both embeddings, of which eager makes 13 kernels."""
    example = (torch.zeros(2, 4, 16, 64), torch.zeros(16, 64), torch.zeros(16, 64), torch.zeros(64))
    model = Rotary()
    form = trace(
        lambda q, cos, sin, scale: torch.func.functional_call(model, {"scale": scale}, (q, cos, sin)),
        example,
        dynamic=False,
    )
    kernels = [op for op in form.operations if info(op.target).kind not in VIEWS]
    nodes, _ = plan(form)
    assert len(kernels) == 13 and len(nodes) <= 2
    assert sum(len(node.kernels) for node in nodes) == len(kernels)


# ---- casts to 16 bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_to_16_bits_are_torchs_bit_by_bit(
    generator: FusionKernelGenerator, dtype: torch.dtype, streams: bool
) -> None:
    """All exponents and signs, with mantissas at, below and above ties: zeros, denormals, overflow, Inf and NaN."""
    mantissas = [0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FEFFF, 0x7FF000, 0x7FFFFF]
    bits = torch.tensor([s << 31 | e << 23 | m for s in (0, 1) for e in range(256) for m in mantissas])
    x = bits.to(torch.int32).view(torch.float32)[:-1]  # an odd length
    form = trace(lambda x: x.to(dtype), [x])
    config = tuple(sorted({**dict(default_config(knobs_for(lower(form)))), "nontemporal": streams}.items()))
    (found,) = generator.generate_generic_kernel(form, config)(x)
    expected = x.to(dtype)
    assert torch.equal(found.isnan(), expected.isnan()) and expected.isnan().any()
    numbers = ~expected.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


# ---- copies of different sizes --------------------------------------------------------------------------

SIZES = [(64, 32), (1,), (7,), (0, 3), (3, 5, 2), (131,), (), (70000,)]


def _moves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b, c, *casts = tensors
    return a.t().contiguous(), b.clone(), torch.zeros_like(c), *(t.to(torch.bfloat16) for t in casts)


@pytest.mark.parametrize("static", [False, True])
def test_copies_of_several_sizes_are_one_kernel(generator: FusionKernelGenerator, static: bool) -> None:
    shapes = [shape for shape in SIZES if shape != (0, 3)]
    inputs = [torch.randn(shape) for shape in shapes]
    sizes = {n for shape in shapes for n in shape}
    form = trace(_moves, inputs, static=tuple(sizes) if static else ())
    before = [op for op in form.operations if info(op.target).kind not in VIEWS]
    ((node,), _) = plan(form)
    kernel = lower(node.form)
    assert len(before) == len(node.kernels) == len(shapes) and node.validate_fusion()
    assert len(kernel.rest) == len(shapes) - 1 and check(kernel) == []
    assert print_c(kernel, default_config(knobs_for(kernel))).text.count("#pragma omp parallel") == 1
    compiled = generator.generate_generic_kernel(form)
    for threads in (1, 2, 3):
        for found, expected in zip(compiled(*inputs, threads=threads), _moves(*inputs), strict=True):
            assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_copies_with_work_between_them_stay_apart() -> None:
    form = trace(lambda a, b: (a.clone(), b.matmul(b), b.half()), [torch.zeros(5, 7), torch.zeros(3, 3)])
    nodes, engine = plan(form)
    assert nodes == [] and {refusal.code for refusal in engine.refusals} == {"single_op"}


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b, c = x.split([2, 9, 3], 1)
    return a.exp() * 2, b.relu() + 1, c.t().tanh() * 3


@pytest.mark.parametrize("rows", [5, 4096])
def test_arithmetic_of_different_sizes_is_one_kernel_where_calls_cost_most(rows: int) -> None:
    form = trace(_parts, [torch.zeros(rows, 14)], dynamic=False)
    nodes, _ = plan(form)
    assert len(nodes) == (1 if rows == 5 else 3) and all(node.validate_fusion() for node in nodes)
    assert {len(lower(node.form).rest) for node in nodes} == ({2} if rows == 5 else {0})


def test_only_related_work_shares_a_kernel() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = x.exp() * 2, y.exp() * 2
        return a, a.msort(), b, b.msort()  # somebody else reads them: not the whole of a graph

    nodes, _ = plan(trace(function, [torch.zeros(5, 7), torch.zeros(3)], dynamic=False))
    assert [node.operation_names for node in nodes] == ["exp + mul", "exp + mul"]


def test_work_that_reads_each_other_stays_apart() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.exp() * 2
        return a, torch.cat((a.sum(0), x[0]), 0).sin() + 1

    for node in plan(trace(function, [torch.zeros(5, 7)], dynamic=False))[0]:
        assert node.validate_fusion() and not lower(node.form).rest


def test_parts_without_a_kernel_for_all_have_one_each() -> None:
    form = trace(_parts, [torch.zeros(5, 14)], dynamic=False)
    engine = FusionEngine(lowerable=lambda node: ("several_nests", "no") if len(node.outputs) > 1 else None)
    graph = FusionGraph(form.operations, {item.name: item.spec for item in form.inputs}, form.outputs)
    assert [node.operation_names for node in engine.fuse(graph)] == ["exp + mul", "relu + add", "tanh + mul"]
