"""Bounded statistics of shapes: the sizes of each dim, exact shapes, the dims that vary.

In: signatures of calls (of a root or of an op) with the shapes of their tensor arguments. Out: ``DimHistogram``
records, exact-shape counts, and the dims that vary.
Guarantee: memory is bounded by the limits whatever the script does; every call is counted, in a kept entry or in a
tail; a dim that had two sizes is found in whatever order they came, even if both fell out of the counts.
Torch-free: a shape is any tuple of ints.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autofuse.ir.records import DimHistogram

K = TypeVar("K", bound=Hashable)

Shape = tuple[int, ...]
Leaf = tuple[str, Shape]  # (argument path, shape)

_MAX_PATHS = 256  # (argument path, rank) pairs with statistics, per owner


class HeavyHitters(Generic[K]):
    """Counts the most frequent keys of a stream in bounded memory (space-saving, Metwally et al. 2005).

    A new key takes over the counter of the rarest one and remembers that counter's value as its possible error. So a
    key that makes up more than 1/capacity of the stream is always kept, ``count - error`` is a lower bound of its true
    count, and lower bounds and ``tail`` add up to the length of the stream.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[K, int] = {}
        self._errors: dict[K, int] = {}
        # (count when filed, running number, key): the rarest key is found here. Entries are filed once and brought up
        # to date when they come to the top, so a hit costs no more than its dictionary.
        self._queue: list[tuple[int, int, K]] = []
        self._filed = 0
        self.total = 0

    def add(self, key: K, weight: int = 1) -> K | None:
        """Count a key; returns the key that had to go, if one had to."""
        self.total += weight
        counts = self._counts
        if key in counts:
            counts[key] += weight
            return None
        gone, floor = None, 0
        if len(counts) >= self._capacity:
            gone = self._take_rarest()
            floor = counts.pop(gone)
            del self._errors[gone]
        counts[key] = floor + weight
        self._errors[key] = floor
        self._file(floor + weight, key)
        return gone

    def _file(self, count: int, key: K) -> None:
        self._filed += 1
        heapq.heappush(self._queue, (count, self._filed, key))

    def _take_rarest(self) -> K:
        while True:
            count, _, key = heapq.heappop(self._queue)
            now = self._counts[key]
            if now == count:
                return key
            self._file(now, key)

    def __contains__(self, key: K) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def is_full(self) -> bool:
        return len(self._counts) >= self._capacity

    def counts(self) -> list[tuple[K, int]]:
        """(key, calls surely seen), most frequent first."""
        sure = [(key, count - self._errors[key]) for key, count in self._counts.items()]
        return sorted(sure, key=lambda entry: -entry[1])

    @property
    def tail(self) -> int:
        """Calls that no kept key can claim for sure."""
        return sum(self._errors.values())


@dataclass
class _Dim:
    first: int
    varies: bool
    sizes: HeavyHitters[int]


class ShapeStatistics:
    """The shapes of the calls of one owner (a root or an op)."""

    def __init__(self, owner: str, max_shapes: int, max_sizes: int) -> None:
        self.owner = owner
        self._max_sizes = max_sizes
        self._shapes: HeavyHitters[tuple[Leaf, ...]] = HeavyHitters(max_shapes)
        # Calls with another rank are other code paths: their dims are not compared.
        self._dims: dict[tuple[str, int], list[_Dim]] = {}
        self.untracked_arguments = 0  # leaves beyond the limit on paths

    def add(self, leaves: Iterable[Leaf], calls: int = 1) -> None:
        """Count ``calls`` calls with these tensor arguments."""
        leaves = tuple(leaves)
        self._shapes.add(leaves, calls)
        for path, shape in leaves:
            dims = self._dims.get((path, len(shape)))
            if dims is None:
                if len(self._dims) >= _MAX_PATHS:
                    self.untracked_arguments += calls
                    continue
                dims = [_Dim(size, False, HeavyHitters(self._max_sizes)) for size in shape]
                self._dims[path, len(shape)] = dims
            for dim, size in zip(dims, shape, strict=True):
                dim.sizes.add(size, calls)
                if size != dim.first:
                    dim.varies = True

    @property
    def calls(self) -> int:
        return self._shapes.total

    def shapes(self) -> list[tuple[tuple[Leaf, ...], int]]:
        """Exact shapes of all arguments of a call with their counts, most frequent first."""
        return self._shapes.counts()

    @property
    def tail_calls(self) -> int:
        """Calls whose exact shapes were not kept."""
        return self._shapes.tail

    def dynamic_dims(self) -> tuple[tuple[str, int], ...]:
        """(argument path, dim) of every dim that had more than one size, sorted."""
        found = {
            (path, index) for (path, _), dims in self._dims.items() for index, dim in enumerate(dims) if dim.varies
        }
        return tuple(sorted(found))

    def histograms(self) -> list[DimHistogram]:
        """One record per dim and argument; arguments that came with several ranks give the counts of each rank."""
        return [
            DimHistogram(
                owner=self.owner,
                argument=path,
                dim=index,
                counts=tuple(dim.sizes.counts()),
                tail_calls=dim.sizes.tail,
            )
            for (path, _), dims in self._dims.items()
            for index, dim in enumerate(dims)
        ]


class PendingCalls(Generic[K]):
    """Counts calls by signature at dictionary speed and hands them to the statistics in batches."""

    def __init__(self, statistics: ShapeStatistics, capacity: int) -> None:
        self._statistics = statistics
        self._capacity = capacity
        self._counts: dict[K, int] = {}
        self._leaves: dict[K, Sequence[Leaf]] = {}
        self._last: K | None = None

    def hit(self, signature: K) -> bool:
        """Count a call whose signature is known; False where it is not."""
        counts = self._counts
        if signature in counts:
            counts[signature] += 1
            self._last = signature
            return True
        return False

    def learn(self, signature: K, leaves: Sequence[Leaf]) -> None:
        """Count the first call with a signature."""
        if len(self._counts) >= self._capacity:
            self.flush()
            self._counts.clear()
            self._leaves.clear()
        self._statistics.add(leaves)  # at once, so that a new size of a dim is never late
        self._counts[signature] = 0
        self._leaves[signature] = leaves
        self._last = signature

    def repeat(self, calls: int) -> None:
        """Count calls at which nobody has looked, as such as the last one that was."""
        if self._last is not None and self._last in self._counts:
            self._counts[self._last] += calls

    def flush(self) -> ShapeStatistics:
        """The statistics with all calls so far in them."""
        for signature, calls in self._counts.items():
            if calls:
                self._statistics.add(self._leaves[signature], calls)
                self._counts[signature] = 0
        return self._statistics
