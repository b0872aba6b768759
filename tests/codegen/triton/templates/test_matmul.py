"""Tiled matmuls in Triton with what follows them: in the interpreter against float64, and compiled for all targets."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from autofuse.codegen.knobs import default_config
from autofuse.codegen.philox import DROPOUT, random_state
from autofuse.codegen.templates import refusal
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.source import NOTHING_ASSUMED, TritonSource, natural_assumptions, resolve
from autofuse.codegen.triton.targets import limits_of, prune_reason
from autofuse.codegen.triton.templates.matmul import TEMPLATE, print_matmul
from autofuse.codegen.triton.templates.matmul_knobs import matmul_knobs
from autofuse.errors import ShapeError
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.records import make_config
from autofuse.tuner.triton_compiler import TritonCompiler
from tests.codegen.nodes import NodeBuilder
from tests.codegen.triton.test_cases import run
from tests.tracing import trace

aten = torch.ops.aten
F = torch.nn.functional
TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
DTYPES = ("float32", "bfloat16", "float16", "float64")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "num_warps": 4, "num_stages": 2}


def t(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def linear(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As AOTAutograd has it: rows in one dim, the weight transposed."""
    rows = x.view(x.shape[0] * x.shape[1], x.shape[2])
    return aten.addmm(bias, rows, weight.t()).view(*x.shape[:2], weight.shape[0])


def gelu_and_input(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = linear(b, x, w)
    return F.gelu(made), made


def relu_and_mask(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = aten.mm(x, w)
    return aten.relu(made), made <= 0


def bias_beside(b: torch.Tensor, c: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Outputs that rows, columns or both do not reach."""
    return aten.mm(x, w) + b * c, b * 2, c.neg()


def heads_copied(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Heads are put side by side before the product."""
    heads = q.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    count = q.shape[0] * q.shape[2]
    return aten.bmm(heads.view(count, *heads.shape[2:]), k.view(count, *k.shape[2:])).mul(0.5)


@dataclass(frozen=True, eq=False)
class MatmulCase:
    function: Callable[..., object]
    example: tuple[torch.Tensor, ...]  # sizes that differ become different symbols
    sizes: tuple[tuple[int, ...], ...]  # values of the symbols in order of appearance

    @functools.cache  # noqa: B019 (a case lives as long as the module)
    def form(self, dtype: str = "float32") -> NodeForm:
        real = getattr(torch, dtype)
        return trace(self.function, [e.to(real) if e.is_floating_point() else e for e in self.example])


# Symbols in order: of mm(x [s0, s1], w [s1, s2]) rows, depth, columns.
PLANE = ((17, 19, 37), (1, 1, 1), (33, 1, 2), (2, 70, 16), (5, 0, 3), (48, 16, 16))
_X, _W, _R, _B = t(5, 7), t(7, 11), t(5, 11), t(11)
_MASK = t(5, 11, dtype=torch.bool)
_L, _V = t(3, 5, 7), t(11, 7)
_Q, _K, _S = t(6, 5, 7), t(6, 7, 11), t(6, 5, 11)

CASES: dict[str, MatmulCase] = {
    "plain": MatmulCase(lambda x, w: aten.mm(x, w), (_X, _W), PLANE),
    "relu_and_mask": MatmulCase(relu_and_mask, (_X, _W), PLANE),
    "silu_gate": MatmulCase(lambda x, w, g: F.silu(g) * aten.mm(x, w), (_X, _W, _R), PLANE),
    "bias_residual": MatmulCase(lambda b, x, w, r: torch.tanh(aten.addmm(b, x, w)) + r, (_B, _X, _W, _R), ()),
    "square_residual": MatmulCase(lambda x, w: x + torch.sigmoid(aten.mm(x, w)), (_X, t(7, 7)), ((17, 19), (3, 1))),
    "dropout": MatmulCase(
        lambda x, w, m, r: torch.ops.autofuse_test.dropout_scale.default(aten.mm(x, w), m, 1.25) + r,
        (_X, _W, _MASK, _R), PLANE,
    ),
    "factors": MatmulCase(
        lambda b, x, w: F.leaky_relu(aten.addmm(b, x, w, beta=0.5, alpha=-2.0)), (_B, _X, _W), ()
    ),
    "alpha": MatmulCase(lambda b, x, w: aten.addmm(b, x, w, beta=0, alpha=3).neg(), (_R, _X, _W), ()),
    "casts": MatmulCase(lambda x, w: aten.mm(x, w).float().exp().half(), (_X, _W), PLANE),
    "bias_beside": MatmulCase(bias_beside, (_B, t(), _X, _W), ()),
    "gelu_and_input": MatmulCase(gelu_and_input, (_B, _L, _V), ((3, 7, 5, 37), (1, 16, 17, 16), (2, 1, 1, 0))),
    "linear_swish": MatmulCase(lambda b, x, w: F.hardswish(linear(b, x, w)), (_B, _L, _V), ()),
    "weight_gradient": MatmulCase(lambda g, x: aten.mm(g.t(), x) * 0.1, (t(5, 11), t(5, 7)), PLANE),
    "input_gradient": MatmulCase(
        lambda g, w, y: aten.threshold_backward(aten.mm(g, w), y, 0), (t(5, 11), _V, t(5, 7)), PLANE
    ),
    "gelu_gradient": MatmulCase(
        lambda g, w, y: aten.gelu_backward(aten.mm(g, w), y, approximate="tanh"), (t(5, 11), _V, t(5, 7)), PLANE
    ),
    "one_row": MatmulCase(lambda b, x, w: F.relu(aten.addmm(b, x, w)), (_B, t(1, 7), _W), ()),
    "one_column": MatmulCase(lambda x, w, r: aten.mm(x, w).mul(r).tanh(), (_X, t(7, 1), t(5, 1)), ((17, 19), (1, 40))),
    "one_element": MatmulCase(lambda x, w: aten.mm(x, w) + 1, (t(1, 7), t(7, 1)), ((19,), (1,), (0,))),
    "batched": MatmulCase(lambda q, k: aten.bmm(q, k), (_Q, _K), ((3, 17, 7, 18), (1, 1, 1, 1), (2, 3, 0, 5))),
    "scores": MatmulCase(
        lambda q, k, m: aten.bmm(q, k).view(2, 3, q.shape[1], k.shape[2]).mul(0.125) + m,
        (t(6, 5, 7), t(6, 7, 11), t(2, 1, 1, 11)), ((17, 19, 37), (1, 1, 1)),
    ),
    "scale_of_batch": MatmulCase(lambda q, k, s: aten.bmm(q, k) * s, (_Q, _K, t(6, 1, 1)), ()),
    "transposed_batch": MatmulCase(
        lambda q, k, m: aten.bmm(q.transpose(1, 2), k.transpose(1, 2)).masked_fill(m, -1e4),
        (t(6, 7, 5), t(6, 11, 7), t(6, 5, 11, dtype=torch.bool)), (),
    ),
    "baddbmm": MatmulCase(lambda c, q, k: aten.baddbmm(c, q, k, beta=1, alpha=0.25).relu(), (_S, _Q, _K), ()),
    "copied": MatmulCase(heads_copied, (t(2, 5, 3, 7), t(2, 3, 7, 11)), ((2, 17, 3, 7, 18), (1, 1, 2, 1, 1))),
    "parts": MatmulCase(
        lambda x, w: aten.mm(x[:, 2:], w[2:]).relu(), (t(5, 9), t(9, 11)), ((17, 19, 37), (1, 3, 1))
    ),
    "concatenated": MatmulCase(lambda x, w, r: torch.cat([aten.mm(x, w), r], 1), (_X, _W, _R), ((17, 19, 37),)),
    "stacked": MatmulCase(lambda x, w, r: torch.stack([aten.mm(x, w).tanh(), r]), (_X, _W, _R), ()),
    "expanded": MatmulCase(lambda q, k: aten.bmm(q.expand(4, -1, -1), k).abs(), (t(1, 5, 7), t(4, 7, 11)), ()),
}  # fmt: skip


def sizes_of(case: MatmulCase, form: NodeForm) -> Iterator[dict[str, int]]:
    """The case's, or each of three sizes for each symbol in turn."""
    batched = max(e.ndim for e in case.example) > 2
    first, last = ((3, 17, 7, 18), (2, 16, 1, 33)) if batched else ((17, 5, 19), (32, 18, 2))
    usual = [numbers[: len(form.symbols)] for numbers in (first, (1, 1, 1, 1), last)]
    for sizes in case.sizes or usual:
        yield dict(zip(form.symbols, sizes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_small_tiles(name: str) -> None:
    """Several tiles each way, with and without the sizes built in, and values that are not finite."""
    form = CASES[name].form()
    source = print_matmul(form, make_config(SMALL))
    for number, values in enumerate(sizes_of(CASES[name], form)):
        run(source, form, values, "special" if number == 0 else "normal", False)
        if number < 2:
            run(print_matmul(form, make_config({**SMALL, "index_bits": 64}), values), form, values, "normal", False)


@pytest.mark.parametrize("name", CASES)
def test_default(name: str) -> None:
    """In bfloat16 and in one of the others."""
    other = ("float16", "float64")[zlib.crc32(name.encode()) % 2]
    for dtype in ("bfloat16", other):
        form = CASES[name].form(dtype)
        values = next(sizes_of(CASES[name], form))
        run(print_matmul(form, default_config(matmul_knobs(form, values, values))), form, values, "normal", False)


def test_every_choice_of_every_knob() -> None:
    """One knob at a time away from the default."""
    form = CASES["gelu_and_input"].form()
    values = next(sizes_of(CASES["gelu_and_input"], form))
    knobs = matmul_knobs(form, values, dict.fromkeys(values, 60), allow_tf32=True)
    default = {knob.name: knob.default for knob in knobs}
    assert default["input_precision"] == "tf32"
    for knob in knobs:
        for choice in knob.choices:
            if choice != knob.default:
                run(print_matmul(form, make_config({**default, knob.name: choice})), form, values, "normal", False)


def test_tiles_follow_the_sizes() -> None:
    """Small results get small tiles; tf32 is not tried unless it is asked for."""
    form = CASES["relu_and_mask"].form()
    large, small = dict.fromkeys(form.symbols, 4096), dict.fromkeys(form.symbols, 100)
    wide = CASES["relu_and_mask"].form("bfloat16")

    def first(node: NodeForm, values: dict[str, int]) -> tuple[int, int]:
        found = dict(default_config(matmul_knobs(node, values, values)))
        return int(found["BLOCK_M"]), int(found["BLOCK_N"])

    assert first(wide, large) == (128, 64) and first(form, large) == (64, 64)
    assert first(wide, small) == (32, 32) and first(form, dict.fromkeys(form.symbols, 3)) == (16, 16)
    precisions = [k.choices for k in matmul_knobs(form, large, large) if k.name == "input_precision"]
    assert precisions == [("ieee",)]
    assert max(matmul_knobs(form, small, small)[0].choices) == 128


def test_same_text_same_launches() -> None:
    form = CASES["scores"].form()
    values = next(sizes_of(CASES["scores"], form))
    config = default_config(matmul_knobs(form, values, values))
    source = print_matmul(form, config)
    assert print_matmul(NodeForm.from_json(form.to_json()), config).passes == source.passes
    assert TritonSource.from_json(source.to_json()) == source
    (launch,) = resolve(print_matmul(form, make_config(SMALL)), values).launches
    rows, cols = form.spec(form.outputs[0]).shape.bind(values)[-2:]
    assert launch.grid == 6 * -(-rows // 16) * -(-cols // 16) > 6


def test_positions_beyond_32_bits() -> None:
    """An operand of 2^31 elements and more gets 64-bit positions, though the result is small."""
    form = CASES["plain"].form()
    large = dict(zip(form.symbols, (64, 2**26, 64), strict=True))
    config = dict(default_config(matmul_knobs(form, large, large)))
    assert config["index_bits"] == 64
    narrow = print_matmul(form, make_config({**config, "index_bits": 32}))
    with pytest.raises(ShapeError, match="at most"):
        resolve(narrow, large)
    assert resolve(print_matmul(form, make_config(config)), large).launches


def test_dropout_draws_the_numbers_of_each_place() -> None:
    """The mask is that of a kernel without a product, whatever the tiles; values differ by the product's rounding."""
    b = NodeBuilder()
    x, w = torch.randn(37, 19), torch.randn(19, 40)
    made = b.call("aten.mm.default", b.input(x), b.input(w))
    dropped = b.call(DROPOUT, made, 0.3, True)
    form = b.form(dropped, ValueRef(dropped.name, 1))
    kernel = TritonKernelGenerator().generate_generic_kernel(form)
    after = NodeBuilder()
    alone = after.call(DROPOUT, after.input(x @ w), 0.3, True)
    plain = TritonKernelGenerator().generate_generic_kernel(after.form(alone, ValueRef(alone.name, 1)))
    state = random_state(37 * 40, 4, 8, 77, 8)
    found, wanted = ([torch.zeros(37, 40), torch.zeros(37, 40, dtype=torch.bool)] for _ in range(2))
    load_interpreted(kernel.source)({}, [x, w, *found], state)
    load_interpreted(plain.source)({}, [x @ w, *wanted], state)
    assert torch.equal(found[1], wanted[1]) and 0.6 < wanted[1].float().mean() < 0.8
    torch.testing.assert_close(found[0], wanted[0])


REFUSED: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...], str]] = {
    "integers": (lambda x, w: aten.mm(x, w), (_X.long(), _W.long()), "dtype"),
    "no product": (lambda x: x + 1, (_X,), "anchor"),
    "two products": (lambda x, w: aten.mm(aten.mm(x, w), w.t()), (_X, _W), "anchor"),
    "a calculated operand": (lambda x, w: aten.mm(x.relu(), w), (_X, _W), "operand"),
    "a reduction": (lambda x, w: aten.mm(x, w).sum(1), (_X, _W), "reduction"),
    "a row's softmax": (lambda x, w: aten.mm(x, w).softmax(1), (_X, _W), "reduction"),
    "another place": (lambda x, w: aten.mm(x, w) + aten.mm(x, w).t(), (_X, t(7, 5)), "anchor"),
    "its own transpose": (lambda x, w: (lambda y: y + y.t())(aten.mm(x, w)), (_X, t(7, 5)), "index"),
    "a part of it": (lambda x, w: aten.mm(x, w)[:, 1:].relu(), (_X, _W), "index"),
    "a piece of something longer": (lambda x, w, r: torch.cat([aten.mm(x, w), r]), (_X, _W, t(13, 11)), "index"),
    "no use of it": (lambda x, w: (aten.mm(x, w), x + 1)[1], (_X, _W), "unused"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    function, example, code = REFUSED[name]
    found = refusal(TEMPLATE, trace(function, example))
    assert found is not None and found[0] == code and found[1].startswith("expected ")


def test_what_is_not_refused() -> None:
    assert [name for name, case in CASES.items() if refusal(TEMPLATE, case.form())] == []


# ---- compiled ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonCompiler]:
    with TritonCompiler(lambda key: None, lambda key, files: None) as opened:
        yield opened


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["gelu_and_input", "dropout"])
def test_the_default_fits_every_target(compiler: TritonCompiler, name: str, target: str) -> None:
    """Large sizes, so large tiles: nothing spills or asks for too much, and loads run ahead in shared memory."""
    dtype = DTYPES[zlib.crc32(f"{name} {target}".encode()) % len(DTYPES)]
    form = CASES[name].form(dtype)
    values = dict.fromkeys(form.symbols, 1024)
    source = print_matmul(form, default_config(matmul_knobs(form, values, values)))
    natural = natural_assumptions(source.symbols, values)
    artifact = compiler.compile(source, target, [natural, NOTHING_ASSUMED])
    assert prune_reason(artifact, limits_of(target)) is None
    assert all(image.shared_bytes > 0 and image.resources.spill_bytes == 0 for image in artifact.images)


def test_more_shared_memory_than_there_is_is_pruned(compiler: TritonCompiler) -> None:
    form = CASES["plain"].form("bfloat16")
    large = {**SMALL, "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4}
    source = print_matmul(form, make_config(large))
    natural = natural_assumptions(source.symbols, dict.fromkeys(form.symbols, 1024))
    reason = prune_reason(compiler.compile(source, "cuda:80", [natural]), limits_of("cuda:80"))
    assert reason is not None and "shared memory" in reason
