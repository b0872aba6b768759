"""What the lanes of a warp do together: shuffles, votes, reductions, and products of small matrices.

In: vectors of all lanes, in which each 32 belong to a warp. Out: the same. Source: NVIDIA, "Parallel Thread Execution
ISA", chapters 9.7.9 and 9.7.14, which say which element of a matrix each lane holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx.arithmetic import bf16_to_f32, halves
from ptx.memory import Fault
from ptx.text import Unsupported

Array = Any
WARP = 32


def shuffled(values: Array, mode: str, lane: Array, clamp: Array, mask: Array) -> tuple[Array, Array]:
    """The value of another lane of the warp, and whether that lane is within the segment; else a lane's own."""
    own = np.arange(len(values), dtype=np.int64) % WARP
    segment, bound = (clamp >> 8).astype(np.int64) & 31, clamp.astype(np.int64) & 31
    last = (own & segment) | (bound & ~segment & 31)
    first = own & segment
    by = lane.astype(np.int64) & 31
    if mode == "idx":
        wanted = first | (by & ~segment & 31)
        is_inside = wanted <= last
    else:
        wanted = {"up": own - by, "down": own + by, "bfly": own ^ by}[mode]
        is_inside = wanted >= last if mode == "up" else wanted <= last
    taken = np.where(is_inside, wanted, own) + np.arange(len(values)) // WARP * WARP
    if not mask[taken[mask]].all():
        raise Fault("expected a shuffle between lanes that take part, found one from a lane that does not")
    return values[taken], is_inside


def voted(chosen: Array, word: str, mask: Array) -> Array:
    """Of the lanes that take part: as bits ("ballot"), whether "all" or "any" have chosen."""
    rows, taking = (chosen & mask).reshape(-1, WARP), mask.reshape(-1, WARP)
    if word == "ballot":
        found = (rows.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
    elif word == "all":
        found = (rows | ~taking).all(1)
    elif word == "any":
        found = rows.any(1)
    else:
        raise Unsupported(f"vote.{word}")
    return np.repeat(found, WARP)


def reduced(values: Array, word: str, mask: Array) -> Array:
    """``redux``: of the lanes that take part."""
    rules = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
             "xor": np.bitwise_xor}  # fmt: skip
    found = values.copy()
    rows, taking = values.reshape(-1, WARP), mask.reshape(-1, WARP)
    for n in np.flatnonzero(taking.any(1)):
        found[n * WARP : (n + 1) * WARP] = rules[word].reduce(rows[n][taking[n]], dtype=values.dtype)
    return found


def matrix_part(rows: Array, number: int, is_turned: bool) -> tuple[Array, Array]:
    """``ldmatrix``: two neighbouring elements of matrix ``number`` for each lane; lane 8n + r holds row r of it."""
    matrix = rows.reshape(-1, WARP, 8)[:, 8 * number : 8 * number + 8]  # warp, row, column
    if is_turned:
        matrix = matrix.transpose(0, 2, 1)
    return matrix[:, :, 0::2].reshape(-1), matrix[:, :, 1::2].reshape(-1)


def set_matrix(rows: Array, number: int, pair: tuple[Array, Array], is_turned: bool) -> None:
    """``stmatrix``: the same backwards, into row r of matrix ``number`` at lane 8n + r of ``rows``."""
    row, column = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
    matrix = np.zeros((len(pair[0]) // WARP, 8, 8), rows.dtype)
    for k, half in enumerate(pair):
        matrix[:, row, column + k] = half.reshape(-1, WARP)
    rows.reshape(-1, WARP, 8)[:, 8 * number : 8 * number + 8] = matrix.transpose(0, 2, 1) if is_turned else matrix


def multiplied(shape: str, kind: str, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
    """``mma``: a matrix of 16 rows by one of 8 columns, added to a third; sums in float64, rounded once."""
    if (shape, kind) in (("m16n8k16", "bf16"), ("m16n8k16", "f16"), ("m16n8k8", "bf16"), ("m16n8k8", "f16")):
        left, right = _of_pairs(a, b, kind)
    elif shape in ("m16n8k8", "m16n8k4") and kind == "tf32":
        left, right = _of_words(a, b)
    else:
        raise Unsupported(f"mma {shape} {kind}")
    total = np.matmul(left, right)
    row, column = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
    found = []
    for n, part in enumerate(c):
        added = total[:, row + 8 * (n // 2), column + n % 2] + part.view(np.float32).reshape(-1, WARP)
        found.append(added.astype(np.float32).reshape(-1))
    return found


def _numbers(bits: Array, kind: str) -> Array:
    return (bf16_to_f32(bits) if kind == "bf16" else bits.view(np.float16)).astype(np.float64)


def _of_pairs(a: Sequence[Array], b: Sequence[Array], kind: str) -> tuple[Array, Array]:
    """16-bit operands: each register holds two neighbours."""
    depth = 4 * len(a)
    row, pair = np.arange(WARP) // 4, np.arange(WARP) % 4 * 2
    warps = len(a[0]) // WARP
    left, right = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    for n, register in enumerate(a):
        for k, half in enumerate(halves(register)):
            left[:, row + 8 * (n % 2), pair + k + 8 * (n // 2)] = _numbers(half, kind).reshape(-1, WARP)
    for n, register in enumerate(b):
        for k, half in enumerate(halves(register)):
            right[:, pair + k + 8 * n, row] = _numbers(half, kind).reshape(-1, WARP)
    return left, right


def _of_words(a: Sequence[Array], b: Sequence[Array]) -> tuple[Array, Array]:
    """TF32: hardware ignores the lower 13 bits of an operand."""
    depth = 2 * len(a)
    row, place = np.arange(WARP) // 4, np.arange(WARP) % 4
    warps = len(a[0]) // WARP
    left, right = np.zeros((warps, 16, depth)), np.zeros((warps, depth, 8))
    cut = [(x & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64).reshape(-1, WARP) for x in (*a, *b)]
    for n in range(len(a)):
        left[:, row + 8 * (n % 2), place + 4 * (n // 2)] = cut[n]
    for n in range(len(b)):
        right[:, place + 4 * n, row] = cut[len(a) + n]
    return left, right
