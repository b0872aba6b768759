"""Dropout that draws in the kernel: the numbers of eager's CUDA kernel, thread by thread, in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from autofuse.codegen.c.knobs import knobs_for
from autofuse.codegen.c.printer import print_c
from autofuse.codegen.call import allocate
from autofuse.codegen.knobs import default_config
from autofuse.codegen.loops import check
from autofuse.codegen.lowering.lower import lower
from autofuse.codegen.philox import RandomState, eager_threads, eager_vec, offset_advance, random_state
from autofuse.codegen.triton.interpret import load_interpreted
from autofuse.codegen.triton.knobs import triton_knobs
from autofuse.codegen.triton.printer import print_triton
from autofuse.codegen.triton.source import NOTHING_ASSUMED, Assumptions, TritonSource, resolve
from autofuse.errors import LoweringError, ShapeError
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.records import make_config
from autofuse.tuner.triton_compiler import TritonCompiler
from tests.codegen.nodes import NodeBuilder

DROPOUT = "autofuse.philox_dropout.default"

# ---- eager's kernel, written down a second time ---------------------------------------------------------------


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as in Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (second >> 32) ^ c1 ^ k0, second & 0xFFFFFFFF, (first >> 32) ^ c3 ^ k1, first & 0xFFFFFFFF,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def stream(seed: int, thread: int, offset: int) -> Iterator[list[np.float32]]:
    """curand_init(seed, thread, offset), then curand_uniform4 for ever."""
    for block in itertools.count(offset // 4):
        counter = (block & 0xFFFFFFFF, block >> 32, thread, 0)
        bits = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
        yield [np.float32(b) * np.float32(2.0**-32) + np.float32(2.0**-33) for b in bits]


def eager_uniforms(numel: int, state: RandomState) -> np.ndarray:
    """The loops of fused_dropout_kernel_vec, and of fused_dropout_kernel where nothing can be vectorised."""
    found = np.full(numel, np.nan, dtype=np.float32)
    for thread in range(state.threads):
        draws = stream(state.seed, thread, state.offset)
        if state.vec == 1:
            for start in range(thread, numel, state.threads * 4):
                for n, number in enumerate(next(draws)):
                    if start + state.threads * n < numel:
                        found[start + state.threads * n] = number
            continue
        for start in range(thread * state.vec, numel, state.threads * state.vec):
            numbers = [number for _ in range((state.vec + 3) // 4) for number in next(draws)]
            found[start : start + state.vec] = numbers[: state.vec]
    return found


@pytest.mark.parametrize(
    ("counter", "key", "expected"),  # kat_vectors of Random123
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_its_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert philox(counter, key) == expected


# ---- eager's launch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "itemsize", "alignment", "vec"),
    [
        (1024, 4, 16, 4), (1024, 2, 16, 8), (1024, 8, 16, 2), (1022, 4, 16, 2), (1023, 2, 16, 1), (1020, 2, 16, 4),
        (1024, 4, 8, 2), (1024, 2, 2, 1), (1024, 4, 4, 1),
    ],
)  # fmt: skip
def test_vectors(numel: int, itemsize: int, alignment: int, vec: int) -> None:
    assert eager_vec(numel, itemsize, alignment) == vec
    state = random_state(numel, itemsize, 256, 1, 0, alignment)
    assert (state.vec, state.draws) == (vec, {1: 1, 2: 4, 4: 4, 8: 8}[vec])


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 4 * 256, 4 * 256 + 1, 270336 * 4, 270336 * 4 + 1, 10**9])
def test_threads_and_offset(numel: int) -> None:
    threads = eager_threads(numel, 132, 2048)
    assert threads == min(132 * 2048, (numel + 255) // 256 * 256)
    advance = offset_advance(numel, threads)
    assert advance % 4 == 0 and advance * threads >= numel > (advance - 4) * threads
    assert offset_advance(0, 256) == 0


# ---- in the interpreter ---------------------------------------------------------------------------------------


def dropout(*sizes: int, dtype: torch.dtype = torch.float32, p: float = 0.3) -> NodeForm:
    b = NodeBuilder()
    v = b.call(DROPOUT, b.input(torch.zeros(sizes, dtype=dtype)), p, True)
    return b.form(v, ValueRef(v.name, 1))


def residual_norm(rows: int, columns: int) -> NodeForm:
    """layer_norm(x + dropout(y)) with all that its backward needs."""
    b = NodeBuilder()
    x, y = b.input(torch.zeros(rows, columns)), b.input(torch.zeros(rows, columns))
    v = b.call(DROPOUT, y, 0.1, True)
    total = b.call("aten.add.Tensor", x, v)
    out = b.call("aten.native_layer_norm.default", total, [columns], None, None, 1e-5)
    return b.form(total, ValueRef(v.name, 1), out, ValueRef(out.name, 1), ValueRef(out.name, 2))


def printed(form: NodeForm, **knobs: object) -> TritonSource:
    kernel = lower(form)
    assert check(kernel) == []
    return print_triton(kernel, make_config({**dict(default_config(triton_knobs(kernel, {}, {}))), **knobs}))  # type: ignore[dict-item]


def run(form: NodeForm, inputs: list[torch.Tensor], state: RandomState, **knobs: object) -> list[torch.Tensor]:
    outputs = [allocate(form.spec(ref), {}, poison=True) for ref in form.outputs]
    load_interpreted(printed(form, **knobs))({}, [*inputs, *outputs], state)
    return outputs


def expected_mask(form: NodeForm, numel: int, state: RandomState) -> torch.Tensor:
    p = next(op.args[1] for op in form.operations if op.target == DROPOUT)
    keep = np.float32(1.0 - p) if form.inputs[0].spec.dtype != "float64" else 1.0 - p
    return torch.from_numpy(eager_uniforms(numel, state) < keep)


STATES = [(0, 0), (42, 8), (2**64 - 1, 4 * (2**32 - 2)), (0x9E3779B97F4A7C15, 2**40)]
SIZES = [(1,), (7,), (6, 5), (4, 6), (16, 24), (3, 4, 20)]  # below and above a round; odd, even, multiples of 4 and 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_masks_are_those_of_eagers_threads(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    form = dropout(*sizes, dtype=dtype)
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(1)).to(dtype)
    for seed, offset in STATES:
        state = random_state(x.numel(), x.element_size(), 8, seed, offset)
        out, mask = run(form, [x], state)
        assert torch.equal(mask.flatten(), expected_mask(form, x.numel(), state))
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        keep = torch.tensor(1.0 - 0.3, dtype=wide).item()
        scaled = x.to(wide) * mask * torch.tensor(1.0 / keep, dtype=wide)
        assert torch.equal(out, scaled.to(dtype))


@pytest.mark.parametrize("vec", [1, 2, 4])
def test_an_unaligned_tensor_has_smaller_vectors(vec: int) -> None:
    form = dropout(16, 8)
    state = random_state(128, 4, 8, 3, 4, alignment=4 * vec)
    assert state.vec == vec
    _, mask = run(form, [torch.ones(16, 8)], state)
    assert torch.equal(mask.flatten(), expected_mask(form, 128, state))


@pytest.mark.parametrize(
    "knobs",
    [{}, {"BLOCK_COLS": 8, "BLOCK_ROWS": 2, "persistent": False}, {"index_bits": 64}, {"BLOCK_ROWS": 4}],
    ids=str,
)
def test_the_mask_does_not_depend_on_the_tiles(knobs: dict[str, object]) -> None:
    form = residual_norm(6, 20)
    x, y = (torch.randn(6, 20, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    state = random_state(120, 4, 8, 11, 16)
    total, mask, out, mean, _ = run(form, [x, y], state, **knobs)
    assert torch.equal(mask.flatten(), expected_mask(form, 120, state))
    keep = torch.tensor(0.9).item()
    wanted = x + y * mask * torch.tensor(1.0 / keep)
    assert torch.equal(total, wanted)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(wanted, (20,)))
    torch.testing.assert_close(mean, wanted.mean(1, keepdim=True))


def test_nan_and_infinity_are_dropped_as_eager_drops_them() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0] * 8)
    state = random_state(32, 4, 8, 5, 0)
    out, mask = run(dropout(32), [x], state)
    assert 0 < mask.sum() < 32
    assert torch.equal(out.isnan(), x.isnan() | (x.isinf() & ~mask))


# ---- compiled, packed, refused ----------------------------------------------------------------------------------


def test_it_compiles_for_every_target() -> None:
    source = printed(residual_norm(64, 512))
    with TritonCompiler(lambda key: None, lambda key, files: None) as compiler:
        for target in ("cuda:80", "cuda:90", "hip:gfx942"):
            images = compiler.compile(source, target, [NOTHING_ASSUMED, Assumptions(True)]).images
            assert len(images) == 2 and all(i.resources.spill_bytes == 0 for i in images)


def test_the_state_is_a_part_of_a_call() -> None:
    source = printed(dropout(16, 24))
    assert TritonSource.from_json(source.to_json()) == source
    arguments = [a.name for a in source.passes[0].arguments if a.kind == "random"]
    assert arguments == ["rng_seed", "rng_offset", "rng_threads", "rng_vec", "rng_draws"]
    call = resolve(source, {}, RandomState(2**64 - 1, 8, 256, 4, 4))
    assert call.launches[0].scalars == (-1, 8, 256, 4, 4)
    with pytest.raises(ShapeError, match="expected the state of a generator"):
        resolve(source, {})


def test_a_cpu_does_not_draw_in_the_kernel() -> None:
    kernel = lower(dropout(4, 6))
    with pytest.raises(LoweringError, match="expected a mask drawn beforehand on a CPU") as caught:
        print_c(kernel, default_config(knobs_for(kernel)))
    assert caught.value.code == "random"


def _two(b: NodeBuilder) -> ValueRef:
    return b.call(DROPOUT, b.call(DROPOUT, b.input(torch.zeros(4, 6)), 0.1, True), 0.1, True)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda b: b.call(DROPOUT, b.input(torch.zeros(4, 6)), 0.1, False), "a dropout that draws"),
        (lambda b: b.call(DROPOUT, b.input(torch.zeros(4, 6)), 1.0, True), "a dropout that draws"),
        (lambda b: b.call(DROPOUT, b.input(torch.zeros(4, 6).t()), 0.1, True), "a dropout of contiguous tensors"),
        (_two, "one random operation in a node"),
    ],
    ids=["inference", "nothing kept", "transposed", "two"],
)
def test_what_eager_draws_otherwise_is_refused(build: object, message: str) -> None:
    b = NodeBuilder()
    out = build(b)  # type: ignore[operator]
    with pytest.raises(LoweringError, match=message) as caught:
        lower(b.form(out))
    assert caught.value.code == "random"
