"""Values as the instructions that make them: two with one number are equal for every input.

In: an instruction's words and the numbers of its operands. Out: the number of its result. Guarantee: equal numbers mean
equal bits whatever the inputs hold; different numbers mean nothing. A negative number is a value that no input changes,
of which the bits are known. Operands of what is commutative come in one order, also where an operand is NaN: results of
the hardware's float16, bfloat16 and float32 instructions hold one NaN alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]  # one a lane
ROUNDINGS = {"rn", "rz", "rm", "rp"}  # without one the assembler may round a product and its sum once
_EITHER_WAY = ("add", "mul", "min", "max", "fma", "mad", "and", "or", "xor")  # in the first two operands
_WHOLES = {"part": "join", "byte": "bytes"}  # of a register, and of memory
_ORDERED = ("f64", "cc")  # but for these: float64 keeps the bits of a NaN, and a carry is a second result


class Terms:
    """The values of one launch."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], int] = {}
        self._keys: list[tuple[Any, ...]] = [()]  # by number; 0 is nobody's
        self._bits: dict[int, int] = {}  # of known values: bits -> number
        self._known: list[int] = [0]  # by the number without its sign

    def given(self, count: int) -> Numbers:
        """The numbers of so many values that come from outside: each may be any."""
        begin = len(self._keys)
        self._keys += [("given",)] * count
        return np.arange(begin, begin + count)

    def known(self, bits: npt.NDArray[Any]) -> Numbers:
        """The numbers of values that no input changes."""
        unique, inverse = np.unique(bits.astype(np.uint64), return_inverse=True)
        return np.array([self._known_as(int(value)) for value in unique], np.int64)[inverse]

    def _known_as(self, bits: int) -> int:
        if bits not in self._bits:
            self._bits[bits] = -len(self._known)
            self._known.append(bits)
        return self._bits[bits]

    def made(self, words: Sequence[str], *operands: Numbers) -> Numbers:
        """The numbers of what an instruction makes of its operands, lane by lane."""
        rows, inverse = np.unique(np.stack(operands, axis=1), axis=0, return_inverse=True)
        is_symmetric = words[0] in _EITHER_WAY and not any(word in _ORDERED for word in words)
        head = tuple(words)
        found = [self._one(head, (*sorted(row[:2]), *row[2:]) if is_symmetric else tuple(row)) for row in rows.tolist()]
        return np.array(found, np.int64)[inverse.reshape(-1)]

    def _one(self, words: tuple[str, ...], operands: tuple[int, ...]) -> int:
        simpler = self._part(words, operands[0]) if words[0] in _WHOLES else self._whole(words, operands)
        if simpler is not None:
            return simpler
        key = (words, operands)
        if key not in self._made:
            self._made[key] = len(self._keys)
            self._keys.append(key)
        return self._made[key]

    def _part(self, words: tuple[str, ...], number: int) -> int | None:
        """A part of a value that was put together from such parts."""
        name, place, count = words
        if number < 0 or self._keys[number][0] != (_WHOLES[name], count):
            return None
        return int(self._keys[number][1][int(place)])

    def _whole(self, words: tuple[str, ...], parts: tuple[int, ...]) -> int | None:
        """The value of which these are the parts, all and in order."""
        name = next((part for part, whole in _WHOLES.items() if whole == words[0]), None)
        if name is None or min(parts) < 0:
            return None
        keys = [self._keys[part] for part in parts]
        if [key[0] for key in keys] != [(name, str(n), words[1]) for n in range(len(parts))]:
            return None
        whole = {key[1] for key in keys}
        return int(whole.pop()[0]) if len(whole) == 1 else None

    def are_products(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Which of them an assembler may round once with a sum: products that name no rounding, also with a sign."""
        unique, inverse = np.unique(numbers, return_inverse=True)
        return np.array([self._is_product(number) for number in unique.tolist()], np.bool_)[inverse]

    def _is_product(self, number: int) -> bool:
        if number <= 0 or self._keys[number][0] == "given":
            return False
        words, operands = self._keys[number]
        if words[0] in ("neg", "abs"):
            return self._is_product(operands[0])
        return words[0] == "mul" and not ROUNDINGS & set(words)

    def together(self, words: Sequence[str], numbers: Sequence[int]) -> int:
        """The number of what is made of many values at once."""
        return self._one(tuple(words), tuple(numbers))
