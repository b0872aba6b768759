"""Liveness of a generated function's values: its text deletes each after its last use, as eager frees them.

In: the reads and writes of each step. Out: for each step, the values that are dead after it. Guarantee: dead values are
in the order of the step's reads and writes, each once; values that must stay are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def deaths(
    reads: Sequence[Sequence[Value]], may_die: Callable[[Value], bool], writes: Sequence[Sequence[Value]] = ()
) -> list[list[Value]]:
    """For each step, its last reads, and those of its ``writes`` that no step reads; ``may_die`` filters both."""
    last = {value: index for index, values in enumerate(reads) for value in values}
    found = [
        [value for value in dict.fromkeys(values) if last[value] == index and may_die(value)]
        for index, values in enumerate(reads)
    ]
    for index, values in enumerate(writes):
        found[index] += [value for value in values if value not in last and may_die(value)]
    return found


def deleted(names: Sequence[str], indent: str) -> list[str]:
    """The line that deletes them, if there are any."""
    return [f"{indent}del {', '.join(names)}"] if names else []
