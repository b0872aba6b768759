"""Kernels launched and bytes moved by one call of a contender, counted while it runs.

In: a call. Out: how many kernels it launched and how many bytes they read and wrote if nothing stays in a cache.
What goes through aten is seen by a dispatch mode: one kernel per operation that is no view and no allocation. What
compiled code launches by itself is not seen there: nodes of autofuse are counted at the plans of its routers, kernels
of Inductor in the code that it wrote (`inductor_counters`).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autofuse.runtime.graphs.plans import Plan
from autofuse.runtime.graphs.router import GraphRouter

# Allocations; what they return is written by another operation, or by nothing.
NO_KERNEL = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_"))


@dataclass
class Count:
    """Of one call."""

    kernels: int = 0
    nbytes: int = 0

    def add(self, kernels: int, tensors: Sequence[Any]) -> None:
        self.kernels += kernels
        self.nbytes += sum({id(t): tensor_bytes(t) for t in tensors if isinstance(t, torch.Tensor)}.values())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory behind a tensor; a broadcast reads each of its elements once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


class Counter(TorchDispatchMode):
    """Counts the operations of aten that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or compiled functions would fall back to eager

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_free(func):
            self.count.add(1, tree_leaves((args, kwargs, result)))
        return result


def is_free(func: Any) -> bool:
    """Views and allocations."""
    schema = func._schema
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return is_view or schema.name.split("::")[1] in NO_KERNEL


def count_call(call: Callable[[], object], routers: Sequence[GraphRouter] = ()) -> Count:
    """One call of a contender; ``routers`` are autofuse's own of its graphs."""
    counter = Counter()
    with _counted_nodes(routers, counter.count), counter:
        call()
    return counter.count


@contextlib.contextmanager
def _counted_nodes(routers: Sequence[GraphRouter], count: Count) -> Iterator[None]:
    """Fused nodes of all plans tell what they read and write."""
    before: list[tuple[Plan, tuple[Any, ...]]] = []
    for plan in [plan for router in routers for plan in router.all_plans()]:
        before.append((plan, plan.calls))
        # None: a group whose nodes run on their own
        plan.calls = tuple(call and _counted(call, count) for call in plan.calls)
    try:
        yield
    finally:
        for plan, calls in before:
            plan.calls = calls


def _counted(call: Callable[..., Any], count: Count) -> Callable[..., Any]:
    def counted(*inputs: Any) -> Any:
        kernels = count.kernels
        outputs = call(*inputs)
        if count.kernels == kernels:  # else aten ran its operations, which are counted already
            count.add(1, tree_leaves((inputs, outputs)))
        return outputs

    return counted


@contextlib.contextmanager
def inductor_counters() -> Iterator[Count]:
    """Kernels that Inductor's code launches, and bytes that all of that code moves, by its own account."""
    from torch._inductor import compile_fx, metrics
    from torch._inductor.graph import GraphLowering

    count = Count()
    log, save = compile_fx.inductor_metrics_log, GraphLowering.save_output_code
    level, metrics.num_bytes_accessed = log.level, 0

    def counting(code: str) -> None:
        count.kernels += len(re.findall(r"^\s+cpp_fused\w*\(", code, re.MULTILINE))
        if save is not None:
            save(code)

    GraphLowering.save_output_code = staticmethod(counting)  # type: ignore[method-assign,assignment]
    log.setLevel(logging.INFO)  # else it does not count bytes
    handlers, log.propagate = log.handlers[:], False
    log.handlers.clear()
    log.addHandler(logging.NullHandler())
    try:
        yield count
    finally:
        GraphLowering.save_output_code = save  # type: ignore[method-assign]
        log.setLevel(level)
        log.handlers[:] = handlers
        count.nbytes = int(metrics.num_bytes_accessed)
