"""Eager's random numbers on CUDA for our kernels: taking the generator's state, and proving equality.

In: torch's generator of a device. Out: the `RandomState` of one call, with the generator where eager would leave it;
and whether a device samples as `codegen.philox` says, which is tested before any kernel may replace eager's. Guarantee:
a device that differs in one bit, a ROCm device (another generator) and one that cannot be tested keep eager's own
dropout; the test leaves the generator as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofuse.codegen.philox import DROPOUT, RandomState, eager_threads, offset_advance, random_state
from autofuse.codegen.triton.source import random_numbers
from autofuse.gpu.launch_record import LaunchRecord
from autofuse.gpu.launcher import Launch
from autofuse.ir.operation import NodeForm, ValueRef
from autofuse.ir.optable import OpKind, info
from autofuse.locks import make_lock

ALIGNED = 16  # bytes; what fresh tensors are aligned to at least
Generator = Any  # torch.Generator of a CUDA device, or what stands for it in tests


# ---- one call ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """A node's dropout, as eager would run it for these sizes."""

    numel: int
    itemsize: int  # bytes of an element
    threads: int  # of eager's grid
    pointer: int | None  # input that it reads in place, whose address decides eager's vectors; None: a fresh tensor


def draw_of(form: NodeForm, values: dict[str, int], device_index: int) -> Draw:
    """The facts about a node's one dropout."""
    op = next(op for op in form.operations if op.target == DROPOUT)
    shape = op.outputs[0].shape.bind(values)
    numel = functools.reduce(int.__mul__, shape, 1)
    itemsize = getattr(torch, op.outputs[0].dtype).itemsize
    return Draw(numel, itemsize, eager_threads(numel, *capacity(device_index)), _input_behind(form, op.args[0]))


def _input_behind(form: NodeForm, ref: ValueRef) -> int | None:
    """The input whose memory a value is, seen through views that keep its beginning."""
    by_name = {op.name: op for op in form.operations}
    while ref.name in by_name and info(by_name[ref.name].target).kind is OpKind.VIEW:
        ref = by_name[ref.name].args[0]
    names = [item.name for item in form.inputs]
    return names.index(ref.name) if ref.name in names else None


@functools.cache
def capacity(device_index: int) -> tuple[int, int]:
    """A device's multiprocessors, and the threads that each holds."""
    found = torch.cuda.get_device_properties(device_index)
    return int(found.multi_processor_count), int(found.max_threads_per_multi_processor)


def drawing_launch(record: LaunchRecord, launch: Launch, draw: Draw, generator: Callable[[], Generator]) -> Launch:
    """``launch`` with the numbers of this call in the record; a launch that fails leaves the generator unchanged."""
    lock = make_lock()  # the record is written and read under it

    def launch_with_state(address: int, stream: int, *pointers: int) -> None:
        source = generator()
        alignment = ALIGNED if draw.pointer is None else _alignment(pointers[draw.pointer])
        with lock:
            offset = int(source.get_offset())
            state = random_state(draw.numel, draw.itemsize, draw.threads, source.initial_seed(), offset, alignment)
            numbers = random_numbers(state)
            for word, field in record.draws:
                record.words[word] = numbers[field]
            source.set_offset(offset + offset_advance(draw.numel, draw.threads))
            try:
                launch(address, stream, *pointers)
            except BaseException:
                source.set_offset(offset)
                raise

    return launch_with_state


def _alignment(address: int) -> int:
    return min(ALIGNED, address & -address) if address else ALIGNED


# ---- the proof --------------------------------------------------------------------------------------------

KEEP = 0.75  # exact in every dtype
SAMPLED = 4096  # places that are compared, both ends among them
SEED = 0x1234_5678_9ABC_DEF
OFFSETS = (0, 4, 2**34 + 8)


def draws_as_expected(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether eager's dropout on this device gives each element the number that `codegen.philox` says."""
    if torch.version.hip or device.type != "cuda" or not hasattr(torch.Generator, "get_offset"):
        return False
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        sizes = proof_sizes(*capacity(device.index))
        return all(
            is_as_expected(generator, device, dtype, numel, shift, offset)
            for numel in sizes
            for shift, offset in zip((0, 1, 0), OFFSETS, strict=True)
        )
    finally:
        generator.set_state(before)


def proof_sizes(multiprocessors: int, threads_of_each: int) -> Sequence[int]:
    """Less than a block, odd ones, several rounds of a full grid, with and without vectors."""
    grid = multiprocessors * threads_of_each
    return 1, 7, 1000, 4099, 8 * grid, 9 * grid + 6, 2 * grid + 1


def is_as_expected(
    generator: Generator, device: torch.device, dtype: torch.dtype, numel: int, shift: int, offset: int
) -> bool:
    """Whether one dropout of eager's is as `codegen.philox` says.

    The tensor has ``numel`` elements and lies ``shift`` elements behind an aligned address; ``offset`` is the
    generator's.
    """
    threads = eager_threads(numel, *capacity(device.index))
    x = torch.ones(numel + shift, dtype=dtype, device=device)[shift:]
    generator.manual_seed(SEED)
    generator.set_offset(offset)
    _, mask = torch.native_dropout(x, 1.0 - KEEP, True)
    state = random_state(numel, dtype.itemsize, threads, SEED, offset, _alignment(x.data_ptr()))
    places = sampled_places(numel)
    expected = uniforms(places, state) < KEEP
    moved = int(generator.get_offset()) == offset + offset_advance(numel, threads)
    return moved and torch.equal(mask.view(-1)[places.to(device)].cpu(), expected)


def sampled_places(numel: int) -> torch.Tensor:
    """All places of a small tensor; of a large one its ends and an even sample, with odd steps."""
    if numel <= SAMPLED:
        return torch.arange(numel)
    step = numel // (SAMPLED // 2) | 1
    ends = torch.arange(SAMPLED // 4)
    return torch.cat([ends, torch.arange(0, numel, step), numel - 1 - ends])


def uniforms(places: torch.Tensor, state: RandomState) -> torch.Tensor:
    """The numbers of these places, float32 on the CPU: what kernels calculate, once more in torch's integers."""
    chunk = places // state.vec
    drawn = chunk // state.threads * state.draws + places % state.vec
    block = state.offset // 4 + drawn // 4
    counter = [block & _LOW, block >> 32, chunk % state.threads, torch.zeros_like(places)]
    bits = torch.stack(_philox(counter, state.seed & _LOW, state.seed >> 32 & _LOW))
    chosen = bits.gather(0, (drawn % 4).unsqueeze(0)).squeeze(0)
    return chosen.to(torch.float32) * 2.0**-32 + 2.0**-33


_LOW = 0xFFFFFFFF


def _philox(counter: list[torch.Tensor], low: int, high: int) -> list[torch.Tensor]:
    """Philox4x32-10 (Salmon et al. 2011) on int64 tensors that hold 32-bit numbers."""
    c0, c1, c2, c3 = counter
    for _ in range(10):
        (h0, l0), (h2, l2) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h2 ^ c1 ^ low, l2, h0 ^ c3 ^ high, l0
        low, high = low + 0x9E3779B9 & _LOW, high + 0xBB67AE85 & _LOW
    return [c0, c1, c2, c3]


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of a 64-bit product, which int64 alone would overflow."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & _LOW
