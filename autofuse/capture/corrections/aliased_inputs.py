"""Graphs that write to their inputs: what autograd sees of the writes, and inputs that share memory, also their own.

In: a compiled graph, AOTAutograd's metadata of it, and the inputs that it was traced with. Out: a callable that runs
Dynamo's graph in eager for calls whose inputs overlap. Guarantee: a write changes the other inputs as in eager.
AOTAutograd reads all inputs before it writes to any. Where inputs overlapped in the trace, it makes all of them from
one tensor, also in later calls whose inputs do not overlap (torch 2.13: other results, or memory beyond the end).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from autofuse.capture.corrections.double_backward import COUNTERS, STATISTICS
from autofuse.capture.corrections.shared_elements import shares_elements

Run = Callable[..., Any]
_OF_SEVERAL = re.compile("SyntheticBase|ViewBase")  # how AOTAutograd describes the one input that it makes from several
_set_versions = torch._C._autograd._unsafe_set_version_counter


class Writes:
    """Inputs that a graph writes to, as they become known while it is compiled."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._tensors = [i for i, value in enumerate(inputs) if _has_storage(value)]
        self._traced = dict(zip(self._tensors, _storages(inputs, self._tensors), strict=True))
        self._inputs = len(inputs)
        self._written: list[int] = []
        self._folded: list[int] = []  # may have elements that share memory with each other
        self._in_eager = False

    def note(self, graph: fx.GraphModule) -> None:
        """AOTAutograd's graph, while it is compiled."""
        layouts = _written_layouts(graph)
        self._in_eager |= any(shares_elements(tensor) for tensor in layouts.values())
        varying = [i for i, tensor in layouts.items() if not _is_constant(tensor)]
        found = written_inputs(graph)
        # Where AOTAutograd has merged inputs, its input numbers are not those of the graph.
        is_same = len(graph.graph.find_nodes(op="placeholder")) == self._inputs
        self._written, self._folded = (
            numbers if is_same or not numbers else list(self._tensors) for numbers in (found, varying)
        )

    @property
    def are_watched(self) -> bool:
        return self._in_eager or bool(self._written) or bool(self._folded)

    def around(self, compiled: Run, original: Callable[[], Run]) -> Run:
        """The callable for the graph; ``original()`` runs it in eager."""
        if self._in_eager:
            return original()
        if not self._written and not self._folded:
            return compiled
        eager = original()
        written = [i for i in self._tensors if i in self._written]
        others = [i for i in self._tensors if i not in self._written]

        def are_apart(storages: Sequence[int], others: Sequence[int]) -> bool:
            return len(set(storages)) == len(storages) and set(storages).isdisjoint(others)

        def call(*args: Any) -> Any:
            if any(shares_elements(args[i]) for i in self._folded):
                return eager(*args)
            if are_apart(_storages(args, written), _storages(args, others)):
                return compiled(*args)
            return eager(*args)

        return call if are_apart(*([self._traced[i] for i in which] for which in (written, others))) else eager


def written_inputs(graph: fx.GraphModule) -> list[int]:
    """Inputs that AOTAutograd's forward graph writes to, without statistics; called while that graph is compiled."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return []
    values = graph.graph.find_nodes(op="placeholder")
    are_merged = any(_OF_SEVERAL.search(repr(value.meta.get("desc"))) for value in values)
    if not are_merged and sum(isinstance(value.meta.get("val"), torch.Tensor) for value in values) < 2:
        return []  # there is nothing to overlap with
    found = [i for i, info in enumerate(metadata.input_info) if info.mutates_data]
    return [i for i in found if len(metadata.input_info) != len(values) or not _is_statistic(values[i])]


def _written_layouts(graph: fx.GraphModule) -> dict[int, torch.Tensor]:
    """The inputs that AOTAutograd's forward graph writes to, as the trace has them; none where it has merged inputs."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    values = graph.graph.find_nodes(op="placeholder")
    if metadata is None or len(metadata.input_info) != len(values):
        return {}
    written = {i: values[i].meta["val"] for i, info in enumerate(metadata.input_info) if info.mutates_data}
    return {i: tensor for i, tensor in written.items() if _has_storage(tensor)}


def _is_constant(tensor: torch.Tensor) -> bool:
    """Whether sizes and strides are numbers, which guards hold."""
    return all(isinstance(value, int) for value in (*tensor.shape, *tensor.stride()))


def written_statistics(graph: fx.GraphModule) -> tuple[int, ...]:
    """Inputs of AOTAutograd's forward graph that are running means and variances of norms."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    values = graph.graph.find_nodes(op="placeholder")
    if metadata is None or len(metadata.input_info) != len(values):
        return ()
    written = (i for i, info in enumerate(metadata.input_info) if info.mutates_data and _is_statistic(values[i]))
    return tuple(i for i in written if values[i].meta["val"].is_floating_point())


class CheckpointWrites(RuntimeError):
    """A checkpointed part writes to a buffer, which eager does twice: it runs that part again for backward."""


def refuse_checkpointed_writes(module: fx.GraphModule) -> None:
    """Raises CheckpointWrites; while AOTAutograd's forward graph of Dynamo's ``module`` is compiled."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or not any(info.mutates_data for info in metadata.input_info):
        return
    if any("checkpoint" in str(node.target) for node in module.graph.nodes if node.op == "call_function"):
        raise CheckpointWrites("expected checkpoints that write to no buffer, found one that does, as batch norms do")


def unseen(run: Run, statistics: Sequence[int]) -> Run:
    """The graph, with its writes to statistics hidden from autograd, as eager's norms hide theirs.

    Otherwise a captured call would make the backward pass of an earlier eager call of the norm fail. Discriminators are
    called twice before one backward pass.
    """
    if not statistics:
        return run

    def call(*args: Any) -> Any:
        tensors = tuple(args[i] for i in statistics)
        if any(tensor.is_inference() for tensor in tensors):
            return run(*args)
        versions = tuple(tensor._version for tensor in tensors)
        try:
            return run(*args)
        finally:
            _set_versions(tensors, versions)

    return call


def _is_statistic(value: fx.Node) -> bool:
    """Whether a norm reads the input only to update it (running statistics, counters of batches)."""
    readers = {user.target for user in value.users} - {torch.ops.aten.copy_.default}
    example = value.meta.get("val")
    is_counter = isinstance(example, torch.Tensor) and not example.is_floating_point() and readers <= COUNTERS
    return bool(readers) and (is_counter or readers <= STATISTICS)


def _storages(inputs: Sequence[Any], which: Sequence[int]) -> list[int]:
    return [inputs[i].untyped_storage()._cdata for i in which]


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
