"""How eager's dropout on CUDA assigns random numbers: the stream, and the place in it, of each element.

In: elements, bytes of each, the device's multiprocessors. Out: `RandomState`, the numbers that a kernel needs besides a
position, and eager's advance of the generator. A thread of eager's kernel owns the Philox stream of its number and
takes ``draws`` numbers from it a round; in each round it serves ``vec`` neighbouring elements, without vectors one
element at a time, a whole grid apart. Valid for contiguous tensors on CUDA; ROCm's generator differs. Source:
ATen/native/cuda/Dropout.cu, torch 2.11 to 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

DROPOUT = "autofuse.philox_dropout.default"  # the operator whose kernels draw by themselves
BLOCK = 256  # threads of a block of eager's kernel
DRAWS = 4  # random numbers that a thread takes at a time
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class RandomState:
    """The state of the generator, and how eager shares out its numbers: what one call of a kernel needs."""

    seed: int
    offset: int  # numbers that every stream has given already, a multiple of 4
    threads: int  # of eager's grid
    vec: int  # neighbouring elements that a thread serves at a time
    draws: int  # random numbers that a thread takes from its stream for these elements


def eager_threads(numel: int, multiprocessors: int, threads_of_each: int) -> int:
    """Threads of eager's grid. ``threads_of_each``: the most threads that a multiprocessor holds."""
    return BLOCK * min(multiprocessors * (threads_of_each // BLOCK), -(-numel // BLOCK))


def eager_vec(numel: int, itemsize: int, alignment: int) -> int:
    """Elements that eager loads at a time from an address that is a multiple of ``alignment`` bytes."""
    vec = _VECTOR_BYTES // itemsize
    while vec > 1 and (numel % vec or alignment % (vec * itemsize)):
        vec //= 2
    return vec


def random_state(
    numel: int, itemsize: int, threads: int, seed: int, offset: int, alignment: int = _VECTOR_BYTES
) -> RandomState:
    """What a kernel needs to draw as eager would in this state of the generator."""
    vec = eager_vec(numel, itemsize, alignment)
    return RandomState(seed, offset, threads, vec, 1 if vec == 1 else max(vec, DRAWS))


def offset_advance(numel: int, threads: int) -> int:
    """By how much eager advances the generator's offset: 0 without elements, and the same for every vector width."""
    return ((numel - 1) // (threads * DRAWS) + 1) * DRAWS if numel else 0
