"""Where values of a generated function die: its text deletes each after its last use, as eager frees them.

In: what each step reads and writes. Out: for each step what is dead behind it.
Guarantee: the order is that of the step's reads and writes, each value once; what is to stay is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Value = TypeVar("Value")


def deaths(
    reads: Sequence[Sequence[Value]], may_die: Callable[[Value], bool], writes: Sequence[Sequence[Value]] = ()
) -> list[list[Value]]:
    """What each step reads for the last time, and of its ``writes`` what no step reads; ``may_die`` asks for each."""
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
