"""The memories of a launch, which refuse what hardware would not notice or would end the process for.

In: addresses, one a lane. Out: the values there, as unsigned integers. Guarantee: an access outside of what was
allocated, or that is not a multiple of its size, raises Fault. Accesses of two threads to the same byte that nothing
orders are counted: in shared memory those of two warps without a barrier between them, in global memory those of two
blocks. `duplicates` are such writes of equal values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Lanes = npt.NDArray[np.bool_]
UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
BASE = 1 << 36  # the first global address
GAP = 512  # bytes between allocations, which nobody may touch
POISON = 0xA7
_NOBODY, _SEVERAL = -1, -2


class Fault(Exception):
    """An access that hardware refuses, or that is undefined."""


@dataclass
class Conflicts:
    """Unordered accesses to the same byte."""

    races: list[str] = field(default_factory=list)  # the first ones, in words
    counts: Counter[str] = field(default_factory=Counter)  # "races", "duplicates": bytes

    def note(self, is_race: Array, what: str) -> None:
        found = int(np.count_nonzero(is_race))
        if found:
            self.counts["races"] += found
            if len(self.races) < 5:
                self.races.append(what)


class Tracked:
    """Bytes of which it is known who touched them last, and when."""

    def __init__(self, size: int, conflicts: Conflicts, label: str, data: npt.NDArray[np.uint8] | None = None) -> None:
        """``data``: memory to use in place of its own."""
        self.data = np.full(size, POISON, np.uint8) if data is None else data
        self.valid = np.zeros(size, np.bool_)
        self._conflicts, self._label = conflicts, label
        self._writer = np.full(size, _NOBODY, np.int32)
        self._written = np.full(size, -1, np.int32)
        self._reader = np.full(size, _NOBODY, np.int32)
        self._read = np.full(size, -1, np.int32)

    def load(self, at: npt.NDArray[np.int64], size: int, who: Array, when: Array, text: str) -> Array:
        self._check(at, size, text)
        for k in range(size):
            place = at + k
            same, writer = self._written[place] == when, self._writer[place]
            is_race = same & (writer != who) & (writer >= 0)
            self._conflicts.counts["duplicates"] += int(np.count_nonzero(same & (writer == _SEVERAL)))
            self._conflicts.note(is_race, f"{self._label}: read of what another wrote: {text}")
            fresh = self._read[place] != when
            other = ~fresh & (self._reader[place] != who) & (self._reader[place] != _NOBODY)
            self._reader[place] = np.where(other, _SEVERAL, who)
            _merge_readers(self._reader, place, who)
            self._read[place] = when
        return self.data.view(UNSIGNED[size])[at // size]

    def store(self, at: npt.NDArray[np.int64], size: int, values: Array, who: Array, when: Array, text: str) -> None:
        self._check(at, size, text)
        parts = np.ascontiguousarray(values.astype(UNSIGNED[size])).view(np.uint8).reshape(-1, size)
        for k in range(size):
            place = at + k
            same = (self._written[place] == when) & (self._writer[place] != _NOBODY)
            differs = self.data[place] != parts[:, k]
            again = same & (self._writer[place] != who)
            self._conflicts.note(again & differs, f"{self._label}: write over another's: {text}")
            self._conflicts.counts["duplicates"] += int(np.count_nonzero(again & ~differs))
            was_read = (self._read[place] == when) & (self._reader[place] != _NOBODY) & (self._reader[place] != who)
            self._conflicts.note(was_read & differs, f"{self._label}: write to what another read: {text}")
            self._within(place, parts[:, k], text)
            self.data[place] = parts[:, k]
            self._writer[place] = np.where(again & ~differs, _SEVERAL, who)
            self._written[place] = when

    def _within(self, place: npt.NDArray[np.int64], values: npt.NDArray[np.uint8], text: str) -> None:
        """Writes of one instruction to one byte: which of them stays is not defined."""
        order = np.argsort(place, kind="stable")
        sorted_place, sorted_values = place[order], values[order]
        same = sorted_place[1:] == sorted_place[:-1]
        if not same.any():
            return
        differs = sorted_values[1:] != sorted_values[:-1]
        self._conflicts.note(same & differs, f"{self._label}: two lanes write to one place: {text}")
        self._conflicts.counts["duplicates"] += int(np.count_nonzero(same & ~differs))

    def _check(self, at: npt.NDArray[np.int64], size: int, text: str) -> None:
        if not len(at):
            return
        if (at % size).any():
            raise Fault(f"expected multiples of {size} bytes, found address {int(at[at % size != 0][0]):#x}: {text}")
        inside = (at >= 0) & (at + size <= len(self.data))
        if not inside.all() or not (self.valid[at].all() and self.valid[at + size - 1].all()):
            bad = ~inside
            bad[inside] = ~(self.valid[at[inside]] & self.valid[at[inside] + size - 1])
            raise Fault(f"{self._label}: nothing was allocated at {int(at[bad][0]):#x}: {text}")


def _merge_readers(reader: npt.NDArray[np.int32], place: npt.NDArray[np.int64], who: Array) -> None:
    """Where two lanes of one instruction that belong to different threads' groups read one byte."""
    order = np.argsort(place, kind="stable")
    sorted_place, sorted_who = place[order], who[order]
    two = (sorted_place[1:] == sorted_place[:-1]) & (sorted_who[1:] != sorted_who[:-1])
    reader[sorted_place[1:][two]] = _SEVERAL


class Global:
    """Global memory: allocations with gaps between them."""

    def __init__(self, conflicts: Conflicts) -> None:
        self._conflicts = conflicts
        self._places: list[tuple[int, int]] = []  # begin and size of each
        self._end = GAP
        self.base = BASE
        self.launches = 0  # accesses of two launches are ordered
        self.tracked = Tracked(0, conflicts, "global memory")

    def reserve(self, size: int, shift: int = 0) -> int:
        """The address of ``size`` bytes: a multiple of 256, and ``shift`` more."""
        begin = -(-self._end // 256) * 256 + shift
        self._places.append((begin, size))
        self._end = begin + size + GAP
        return BASE + begin

    def hold(self, data: npt.NDArray[np.uint8]) -> None:
        """Use memory of others, in which nothing has been allocated."""
        self.tracked = Tracked(len(data), self._conflicts, "global memory", data)

    def allocate(self) -> None:
        """Make room for all that was reserved."""
        self.hold(np.full(-(-self._end // 256) * 256 + 256, POISON, np.uint8))
        for begin, size in self._places:
            self.tracked.valid[begin : begin + size] = True

    def write(self, address: int, data: bytes | npt.NDArray[np.uint8]) -> None:
        begin = address - self.base
        self.tracked.data[begin : begin + len(data)] = np.frombuffer(bytes(data), np.uint8)

    def read(self, address: int, size: int) -> npt.NDArray[np.uint8]:
        begin = address - self.base
        return self.tracked.data[begin : begin + size].copy()
