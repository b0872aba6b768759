"""A topological order that stays near a given one."""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeVar

Item = TypeVar("Item", bound=Hashable)


def ordered_near(before: Mapping[Item, Collection[Item]], place: Callable[[Item], Any]) -> list[Item]:
    """The items, each after those ``before`` it; of several that may come next, the one with the smallest ``place``.

    No two have the same place. Raises graphlib.CycleError.
    """
    sorter = graphlib.TopologicalSorter(before)
    sorter.prepare()
    at = {place(item): item for item in before}
    ready: list[Any] = []
    ordered: list[Item] = []
    while sorter.is_active():
        for item in sorter.get_ready():
            heapq.heappush(ready, place(item))
        ordered.append(at[heapq.heappop(ready)])
        sorter.done(ordered[-1])
    return ordered
