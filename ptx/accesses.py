"""Accesses of a launch's threads to the same byte, compared pair by pair: which are in no order, and may differ?

In: accesses in the order of one schedule, of a launch in which every schedule has the same ones. Out: `Findings`.
Guarantee: where no race is noted, each pair of accesses of two threads, one of them a write, is ordered by barriers, or
writes one value, or reads what the reader itself has just written as that value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ptx.machine import WARP

Array = Any
ANY_TIME = -1  # between two barriers of a warp
READ = 0  # the value of an access that writes none
_MOST_RACES = 5


@dataclass
class Findings:
    """Of all schedules of a launch."""

    races: list[str] = field(default_factory=list)  # the first ones
    one_value: int = 0  # bytes that several threads write without order, all with one value


class Access(NamedTuple):
    """Of one thread to one byte: a column of a log."""

    place: int
    thread: int  # of the launch
    interval: int  # between two barriers of the block
    of_warp: int  # between two barriers of the warp by itself, or `ANY_TIME`
    value: int  # the number of what is written, or `READ`


_PLACE, _THREAD, _INTERVAL, _OF_WARP, _VALUE = range(len(Access._fields))  # rows of a log


def written_places(log: Array) -> Array:
    places: Array = log[_PLACE][log[_VALUE] != READ]
    return places


def compare(space: str, log: Array, threads: int, found: Findings) -> None:
    """Note the races of one memory, whose accesses are the columns of ``log``, in the order of one schedule."""
    if not log.shape[1]:
        return
    block = log[_THREAD] // threads
    # Between two barriers of a block; places of shared memory belong to one block. Blocks are ordered by nothing.
    stretch = log[_INTERVAL] if space == "shared" else np.zeros_like(block)
    order = np.lexsort((np.arange(log.shape[1]), stretch, log[_PLACE]))
    sorted_log = log[:, order]
    begins = np.flatnonzero(np.any(np.diff(np.stack([sorted_log[_PLACE], stretch[order]]), axis=1), axis=0)) + 1
    begins = np.concatenate([[0], begins])
    writes = np.logical_or.reduceat(sorted_log[_VALUE] != READ, begins)
    several = np.maximum.reduceat(sorted_log[_THREAD], begins) != np.minimum.reduceat(sorted_log[_THREAD], begins)
    ends = np.concatenate([begins[1:], [log.shape[1]]])
    for n in np.flatnonzero(writes & several):
        accesses = [Access(*column) for column in sorted_log[:, begins[n] : ends[n]].T.tolist()]
        found_problem, is_twice = problem(accesses, threads)
        found.one_value += is_twice
        if found_problem and len(found.races) < _MOST_RACES:
            found.races.append(f"{space} memory, byte {accesses[0].place}: {found_problem}")


def problem(accesses: Sequence[Access], threads: int) -> tuple[str, bool]:
    """Of the accesses to one byte: a pair without order that may differ, and whether threads write one value to it."""
    is_twice = False
    for (n, first), (m, second) in itertools.combinations(enumerate(accesses), 2):
        if READ == first.value == second.value or _ordered(first, second, threads):
            continue
        if first.value != READ != second.value:
            if first.value != second.value:
                return f"threads {first.thread} and {second.thread} write what may differ", False
            is_twice = True
            continue
        at, read, write = (m, second, first) if second.value == READ else (n, first, second)
        if not _has_written_before(accesses[:at], read, write.value):
            return f"thread {read.thread} reads what thread {write.thread} writes", False
    return "", is_twice


def _ordered(a: Access, b: Access, threads: int) -> bool:
    if a.thread == b.thread:
        return True
    if a.thread // threads != b.thread // threads:
        return False
    if a.interval != b.interval:
        return True
    if a.thread // WARP != b.thread // WARP or ANY_TIME in (a.of_warp, b.of_warp):
        return False
    return a.of_warp != b.of_warp


def _has_written_before(accesses: Sequence[Access], read: Access, value: int) -> bool:
    """Has a reader itself written this value, between the same barriers? Then it reads no other."""
    own = [access for access in accesses if access.value != READ and access[1:4] == read[1:4]]
    return bool(own) and own[-1].value == value
