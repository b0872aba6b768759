"""Attention kernels in Triton: in the interpreter against eager and float64, and compiled for all targets."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autofuse.codegen.knobs import default_config
from autofuse.codegen.templates import LOOP, MATMUL, refusal, template_of
from autofuse.codegen.triton.generator import TritonKernelGenerator
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.source import NOTHING_ASSUMED, natural_assumptions, resolve
from autofuse.codegen.triton.targets import limits_of, prune_reason
from autofuse.codegen.triton.templates.attention import TEMPLATE, print_attention
from autofuse.codegen.triton.templates.attention_knobs import attention_knobs
from autofuse.codegen.triton.templates.registry import TRITON_TEMPLATES
from autofuse.errors import ShapeError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import make_config
from autofuse.tuner.triton_compiler import TritonCompiler
from tests.codegen.triton.test_cases import run
from tests.tracing import trace

aten = torch.ops.aten

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
SMALL = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
HEADS = (16, 20, 32, 64, 80, 96, 128)  # sizes that stay constants, as in a real capture


def t(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(sizes, dtype=dtype)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, T, D], k transposed already."""
    return aten.bmm(aten._softmax(aten.bmm(q, k), -1, False), v)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, T, D] as torch.matmul and softmax trace it."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    return torch.matmul(aten._softmax(scores, -1, False), v)


def masked(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.2
    return torch.matmul(aten._softmax(scores.masked_fill(m, float("-inf")), -1, False), v)


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The result with heads last, as a layer after it wants it."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.125 + bias
    mixed = torch.matmul(aten._softmax(scores, -1, False), v)
    return mixed.transpose(1, 2).contiguous().view(q.shape[0], q.shape[2], -1)


def from_projection(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Heads lie inside of rows: torch.matmul copies them side by side, the kernel reads them where they are."""
    q, k, v = (part.transpose(1, 2) for part in (x, y, z))
    return scaled(q, k, v).transpose(1, 2).contiguous()


def from_one_projection(qkv: Tensor) -> Tensor:
    """q, k and v are parts of the rows of one tensor."""
    batch, length, width = qkv.shape
    parts = aten.split.Tensor(qkv, width // 3, 2)
    q, k, v = (part.view(batch, length, 2, width // 6).transpose(1, 2) for part in parts)
    return scaled(q, k, v).transpose(1, 2).contiguous().view(batch, length, width // 3)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.tanh(aten.bmm(q, k) / 5.0) * 5.0
    return aten.bmm(aten._softmax(scores, 2, False), v).mul(0.5).relu()


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax in float32, whatever the rest is in."""
    weights = aten._softmax(aten.bmm(q, k).float(), -1, False)
    return aten.bmm(weights.to(v.dtype), v)


def unbatched(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    return aten.mm(aten._softmax(aten.addmm(b, q, k, alpha=0.3), 1, False), v)


@dataclass(frozen=True, eq=False)
class AttentionCase:
    function: Callable[..., Tensor]
    example: tuple[Tensor, ...]
    sizes: tuple[tuple[int, ...], ...]  # values of the symbols in order of appearance

    @functools.cache  # noqa: B019 (a case lives as long as the module)
    def form(self, dtype: str = "float32") -> NodeForm:
        real = getattr(torch, dtype)
        example = [e.to(real) if e.is_floating_point() else e for e in self.example]
        return trace(self.function, example, static=HEADS)


_THREE = (t(3, 5, 16), t(3, 16, 7), t(3, 7, 20))
_FOUR = (t(2, 3, 5, 32), t(2, 3, 7, 32), t(2, 3, 7, 32))
BATCHED = ((2, 17, 37), (1, 1, 1), (1, 33, 16), (1, 2, 0))
PAIRS = ((2, 2, 17, 35), (1, 2, 1, 5), (2, 1, 33, 1))

CASES: dict[str, AttentionCase] = {
    "plain": AttentionCase(plain, _THREE, BATCHED),
    "scaled": AttentionCase(scaled, _FOUR, PAIRS),
    "causal": AttentionCase(masked, (*_FOUR, t(5, 7, dtype=torch.bool)), PAIRS),
    "padding": AttentionCase(masked, (*_FOUR, t(2, 1, 1, 7, dtype=torch.bool)), PAIRS),
    "biased": AttentionCase(biased, (*_FOUR, t(3, 5, 7)), PAIRS),
    "from_projection": AttentionCase(
        from_projection, (t(2, 5, 3, 32), t(2, 7, 3, 32), t(2, 7, 3, 32)), ((2, 17, 3, 37), (1, 3, 2, 1))
    ),
    "from_one_projection": AttentionCase(from_one_projection, (t(3, 5, 96),), ((2, 19), (1, 1))),
    "capped": AttentionCase(capped, _THREE, BATCHED),
    "rounded": AttentionCase(rounded, _THREE, BATCHED),
    "unbatched": AttentionCase(unbatched, (t(5, 16), t(16, 7), t(7, 20), t(7)), ((17, 37), (1, 3))),
    "one_query": AttentionCase(scaled, (t(2, 3, 1, 32), t(2, 3, 7, 32), t(2, 3, 7, 32)), ((2, 3, 37), (1, 2, 1))),
    "wide": AttentionCase(plain, (t(3, 5, 128), t(3, 128, 7), t(3, 7, 128)), ((2, 17, 37),)),
}


def sizes_of(case: AttentionCase, form: NodeForm) -> Iterator[dict[str, int]]:
    for sizes in case.sizes:
        yield dict(zip(form.symbols, sizes, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_small_tiles(name: str) -> None:
    """Several steps over the keys, with and without the sizes built in, and values that are not finite."""
    form = CASES[name].form()
    source = print_attention(form, make_config(SMALL))
    for number, values in enumerate(sizes_of(CASES[name], form)):
        run(source, form, values, "special" if number == 0 else "normal", False)
        if number < 2:
            run(print_attention(form, make_config({**SMALL, "index_bits": 64}), values), form, values, "normal", False)


@pytest.mark.parametrize("name", CASES)
def test_default(name: str) -> None:
    """In 16 bits too, and with scores far apart, so that the largest one matters."""
    narrow = ("float16", "bfloat16")[zlib.crc32(name.encode()) % 2]
    for dtype, kind in ((narrow, "normal"), ("float32", "large")):
        form = CASES[name].form(dtype)
        values = next(sizes_of(CASES[name], form))
        run(print_attention(form, default_config(attention_knobs(form, values, values))), form, values, kind, False)


def test_every_choice_of_every_knob() -> None:
    """One knob at a time away from the default."""
    form = CASES["causal"].form()
    values = next(sizes_of(CASES["causal"], form))
    knobs = attention_knobs(form, values, dict.fromkeys(values, 60), allow_tf32=True)
    default = {knob.name: knob.default for knob in knobs}
    assert default["input_precision"] == "tf32"
    for knob in knobs:
        for choice in knob.choices:
            if choice != knob.default:
                run(print_attention(form, make_config({**default, knob.name: choice})), form, values, "normal", False)


def test_rows_without_keys_are_nan_and_no_keys_give_nothing() -> None:
    """As eager has it: a softmax of -inf alone is NaN, a product over no keys is 0."""
    form = CASES["causal"].form()
    values = dict(zip(form.symbols, (1, 2, 5, 0), strict=True))
    source = print_attention(form, make_config(SMALL))
    q, k, v = torch.randn(1, 2, 5, 32), torch.randn(1, 2, 18, 32), torch.randn(1, 2, 18, 32)
    mask = torch.arange(18) < torch.tensor([0, 18, 17, 5, 18])[:, None]
    entry, made = load_interpreted(source), torch.full((1, 2, 5, 32), 7.0)
    entry({**values, form.symbols[3]: 18}, [q, k, v, mask, made])
    assert made.isnan().all(-1).tolist() == [[[False, True, False, False, True]] * 2]
    assert torch.allclose(made[:, :, 2], v[:, :, 17])  # one key left
    entry(values, [q, k[:, :, :0], v[:, :, :0], mask[:, :0], made])
    assert (made == 0).all()


def test_one_program_for_some_rows_of_a_head() -> None:
    form = CASES["from_projection"].form()
    values = dict(zip(form.symbols, (2, 37, 3, 50), strict=True))
    source = print_attention(form, make_config(SMALL))
    (launch,) = resolve(source, values).launches
    assert launch.grid == 2 * 3 * 3
    assert "clone" in source.text and len(source.passes) == 1 and not source.scratch
    large = {**values, form.symbols[0]: 2**20, form.symbols[1]: 2**10}
    with pytest.raises(ShapeError, match="at most"):
        resolve(source, large)
    assert dict(default_config(attention_knobs(form, large, large)))["index_bits"] == 64


def kept_probabilities(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    weights = aten._softmax(aten.bmm(q, k), -1, False)
    return aten.bmm(weights, v), weights


def dropped(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    weights = aten._softmax(aten.bmm(q, k), -1, False)
    return aten.bmm(torch.ops.autofuse_test.dropout_scale.default(weights, m, 1.25), v)


REFUSED: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], str]] = {
    "probabilities that are needed": (kept_probabilities, _THREE, "probabilities"),
    "dropout between": (dropped, (*_THREE, t(3, 5, 7, dtype=torch.bool)), "between"),
    "float64": (plain, tuple(e.double() for e in _THREE), "dtype"),
    "a head of unknown size": (plain, (t(3, 5, 17), t(3, 17, 7), t(3, 7, 20)), "head"),
    "a large head": (plain, (t(3, 5, 16), t(3, 16, 7), t(3, 7, 256)), "head"),
    "a softmax over queries": (
        lambda q, k, v: aten.bmm(aten._softmax(aten.bmm(q, k), 1, False), v), _THREE, "softmax",
    ),
    "no softmax": (lambda q, k, v: aten.bmm(aten.bmm(q, k), v), _THREE, "anchor"),
    "scores from elsewhere": (lambda q, k, v: aten.bmm(q, k) + aten.bmm(q.relu(), k)[0] * v.sum(), _THREE, "anchor"),
    "a calculated query": (lambda q, k, v: plain(q * 2, k, v), _THREE, "operand"),
    "transposed probabilities": (
        lambda q, k, v: aten.bmm(aten._softmax(aten.bmm(q, k), -1, False).transpose(1, 2), v),
        (t(3, 5, 16), t(3, 16, 7), t(3, 5, 20)), "between",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    function, example, code = REFUSED[name]
    found = refusal(TEMPLATE, trace(function, example, static=(*HEADS, 256)))
    assert found is not None and found[0] == code and found[1].startswith("expected ")


def test_attention_is_no_matmul_and_no_matmul_is_attention() -> None:
    assert [name for name, case in CASES.items() if refusal(TEMPLATE, case.form())] == []
    refusals = [refusal(TRITON_TEMPLATES[MATMUL], case.form()) for case in CASES.values()]
    assert all(found is not None and found[0] == "anchor" for found in refusals)
    form = CASES["causal"].form()
    generated = TritonKernelGenerator().generate_generic_kernel(form)
    assert generated.text == print_attention(form, generated.config).text
    assert template_of(TRITON_TEMPLATES, form) is TEMPLATE
    assert template_of(TRITON_TEMPLATES, trace(kept_probabilities, _THREE, static=HEADS)).name == LOOP


# ---- compiled ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler() -> Iterator[TritonCompiler]:
    with TritonCompiler(lambda key: None, lambda key, files: None) as opened:
        yield opened


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["causal", "wide"])
def test_the_default_fits_every_target(compiler: TritonCompiler, name: str, target: str) -> None:
    """Large sizes: nothing spills or asks for too much, aligned or not."""
    dtype = ("bfloat16", "float16", "float32")[zlib.crc32(f"{name} {target}".encode()) % 3]
    form = CASES[name].form(dtype)
    lead = len(form.symbols) - 2
    values = dict(zip(form.symbols, [4] * lead + [1024] * 2, strict=True))
    source = print_attention(form, default_config(attention_knobs(form, values, values)))
    natural = natural_assumptions(source.symbols, values)
    artifact = compiler.compile(source, target, [natural, NOTHING_ASSUMED])
    assert prune_reason(artifact, limits_of(target)) is None
    assert all(image.shared_bytes > 0 and image.resources.spill_bytes == 0 for image in artifact.images)
