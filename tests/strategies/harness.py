"""Captured functions and their groups; each way of a group built with real kernels and held against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autofuse.capture.backend import boxed, compile_with
from autofuse.capture.graph_import import import_graph
from autofuse.capture.passes.random_ops import split_dropout
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Refusal
from autofuse.strategies.enumeration import strategies_of
from autofuse.strategies.groups import Group, find_groups
from autofuse.strategies.strategy import Strategy
from autofuse.tuner.cases import CheckCase
from autofuse.tuner.verify import GuardedAllocator, Verifier
from autofuse.wrapper.node_call import make_launcher
from autofuse.wrapper.strategy_call import LoadedStrategy


class Planned:
    """What became of one captured graph."""

    def __init__(self, module: fx.GraphModule, phase: str, config: FusionConfig) -> None:
        split_dropout(module)
        imported = import_graph(module)
        self.phase = phase
        self.imported = imported
        self.graph = imported.for_fusion()
        self.nodes: list[FusionNode] = FusionEngine(config).fuse(self.graph)
        self.groups: list[Group]
        self.refusals: list[Refusal]
        self.groups, self.refusals = find_groups(self.graph, self.nodes, config)


def plan(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    dynamic: Sequence[tuple[int, int]] = (),
    config: FusionConfig | None = None,
) -> list[Planned]:
    """The graphs of a function; ``dynamic``: (number of an input, dim) that are symbols."""
    found: list[Planned] = []

    def compile_graph(module: fx.GraphModule, phase: str, times: int) -> Callable[[list[Any]], Any]:
        found.append(Planned(module, phase, config or FusionConfig()))
        module.recompile()
        return boxed(module.forward)

    def backend(module: fx.GraphModule, example: Sequence[torch.Tensor]) -> Callable[..., Any]:
        return compile_with(module, example, compile_graph)

    torch._dynamo.reset()
    for number, dim in dynamic:
        torch._dynamo.mark_dynamic(inputs[number], dim)
    out = torch.compile(function, backend=backend)(*inputs)
    total = out if isinstance(out, torch.Tensor) else sum(o.sum() for o in out)
    if total.requires_grad:
        total.sum().backward()
    return found


GENERATOR = FusionKernelGenerator()


@functools.cache
def _entry(form: NodeForm) -> Any:
    """Of a kernel that is compiled once, however many checks and ways run it."""
    return GENERATOR.generate_generic_kernel(form).load().entry


def load(strategy: Strategy) -> LoadedStrategy:
    """A way with its parts compiled at their default settings."""
    return LoadedStrategy(strategy, tuple(_entry(kernel.node.form) for kernel in strategy.kernels))


def check(
    form: NodeForm, strategy: Strategy, values: Sequence[Sequence[int]], kinds: Sequence[Any] = ("normal",)
) -> float:
    """The largest error over eager's own; raises `Wrong`."""
    loaded = load(strategy)

    def make_call(allocator: GuardedAllocator, sizes: Sequence[int]) -> Callable[..., Any]:
        return make_launcher(form, loaded, sizes, torch.get_num_threads(), allocator)

    cases = [CheckCase(tuple(v), kind) for v in values for kind in kinds]
    return Verifier(form).check(make_call, cases)


def one_group(planned: list[Planned]) -> Group:
    """The only group of some graphs."""
    (group,) = [g for p in planned for g in p.groups]
    return group


def strategy(group: Group, name: str) -> Strategy:
    """A strategy of a group by its name."""
    return next(w for w in strategies_of(group.node.form) if w.name == name)
