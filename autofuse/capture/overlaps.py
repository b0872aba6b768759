"""Graphs that write to an input while another input lies in the same memory.

In: a compiled graph, what AOTAutograd has found out about it, and the inputs that it was traced with. Out: a callable
that runs Dynamo's graph in eager for calls whose inputs overlap. Guarantee: what a write does to the other inputs is
eager's. AOTAutograd reads all inputs before it writes to any, and where they overlapped when it traced, it makes all of
them from one tensor, in later calls too in which they lie apart (torch 2.13: other results, or memory beyond the end).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from autofuse.capture.second_gradients import COUNTERS, STATISTICS

Run = Callable[..., Any]


class Writes:
    """Inputs that a graph writes to, as they become known while it is compiled."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._tensors = [i for i, value in enumerate(inputs) if _has_storage(value)]
        self._traced = dict(zip(self._tensors, _storages(inputs, self._tensors), strict=True))
        self._inputs = len(inputs)
        self._written: list[int] = []

    def note(self, graph: fx.GraphModule) -> None:
        """AOTAutograd's graph, while it is compiled."""
        found = written_inputs(graph)
        # Where AOTAutograd has put inputs together, it counts others than the graph has.
        is_same = len(graph.graph.find_nodes(op="placeholder")) == self._inputs
        self._written = found if is_same or not found else list(self._tensors)

    @property
    def are_watched(self) -> bool:
        return bool(self._written)

    def around(self, compiled: Run, original: Callable[[], Run]) -> Run:
        """The graph as it is to be called; ``original()``: in eager."""
        if not self._written:
            return compiled
        eager = original()
        written = [i for i in self._tensors if i in self._written]
        others = [i for i in self._tensors if i not in self._written]

        def are_apart(storages: Sequence[int], others: Sequence[int]) -> bool:
            return len(set(storages)) == len(storages) and set(storages).isdisjoint(others)

        def call(*args: Any) -> Any:
            if are_apart(_storages(args, written), _storages(args, others)):
                return compiled(*args)
            return eager(*args)

        return call if are_apart(*([self._traced[i] for i in which] for which in (written, others))) else eager


def written_inputs(graph: fx.GraphModule) -> list[int]:
    """Inputs of AOTAutograd's forward graph, while that is compiled, that it writes to; without statistics."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return []
    values = graph.graph.find_nodes(op="placeholder")
    if sum(isinstance(value.meta.get("val"), torch.Tensor) for value in values) < 2:
        return []  # there is nothing to overlap with
    found = [i for i, info in enumerate(metadata.input_info) if info.mutates_data]
    return [i for i in found if len(metadata.input_info) != len(values) or not _is_statistic(values[i])]


def _is_statistic(value: fx.Node) -> bool:
    """What a norm reads only in order to write it, a counter of batches too: nothing else lies there."""
    readers = {user.target for user in value.users} - {torch.ops.aten.copy_.default}
    example = value.meta.get("val")
    is_counter = isinstance(example, torch.Tensor) and not example.is_floating_point() and readers <= COUNTERS
    return bool(readers) and (is_counter or readers <= STATISTICS)


def _storages(inputs: Sequence[Any], which: Sequence[int]) -> list[int]:
    return [inputs[i].untyped_storage()._cdata for i in which]


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
