"""Functions whose every fusible part runs on a kernel, without a store, a daemon or a race.

In: a function. Out: the function through capture, planner and router, each node on its generic C kernel. Guarantee:
what fails is noted, not hidden: `Kernels.problems`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autofuse.capture.backend import compile_with
from autofuse.capture.corrections.aliased_inputs import CheckpointWrites
from autofuse.capture.corrections.double_backward import LostOutputs
from autofuse.capture.graph_import import import_graph
from autofuse.capture.passes.joint_graph import OverlappingGradients, ViewGivenOut
from autofuse.capture.passes.random_ops import split_dropout
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.in_place import why_not
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import NodeForm
from autofuse.runtime.graphs.choice import Choice
from autofuse.runtime.graphs.plans import NodeState, Plan
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.strategies.groups import Group
from autofuse.wrapper.graph_call import Program
from autofuse.wrapper.graph_call_builder import build_program
from autofuse.wrapper.node_call import Entry, NodeCall

GENERATOR = FusionKernelGenerator()
REFUSED = (CheckpointWrites, LostOutputs, OverlappingGradients, ViewGivenOut)  # graphs, on purpose: they stay eager


@functools.lru_cache(4096)
def entry_of(form: NodeForm) -> Entry:
    """The loaded generic kernel of a node."""
    return GENERATOR.generate_generic_kernel(form).load().entry


class Kernels:
    """In the place of a session: every node is decided for its generic kernel."""

    threads = 1

    def __init__(self) -> None:
        self.nodes: dict[str, FusionNode] = {}
        self.problems: list[str] = []

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        try:
            return Choice(known=True, entry=entry_of(self.nodes[fusion_id].form), tag="generic")
        except Exception as error:
            self.problems.append(f"no kernel of {fusion_id}: {type(error).__name__}: {error}")
            return Choice(known=True)

    def groups_of(self, graph: FusionGraph, nodes: Sequence[FusionNode]) -> Sequence[Group]:
        """Products with the nodes around them that may run in another way; by default none."""
        return ()

    def node_failed(self, node: NodeState, problem: str) -> None:
        self.problems.append(f"{node.slot.node.label} failed: {problem}")

    def settle_plan(self, plan: Plan) -> bool:
        return True

    def new_plan(self, plan: Plan) -> None:
        pass

    live_races = None

    def sample_due(self, graph: object) -> bool:
        return False

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall:
        return fused

    def compile_graph(self, module: fx.GraphModule, phase: str, times: int) -> Callable[[list[Any]], Any]:
        """A captured graph with its nodes on kernels, as `compile_with` wants it."""
        split_dropout(module)
        imported = import_graph(module)
        graph = imported.for_fusion()
        nodes = FusionEngine(lowerable=why_not, check=True).fuse(graph)
        groups = self.groups_of(graph, nodes)
        self.nodes.update({node.fusion_id: node for node in [*nodes, *(group.node for group in groups)]})
        program = build_program(imported, nodes, groups)
        self.prepare(program, imported.hints)
        return GraphRouter(program, self, phase, perf_counter)

    def prepare(self, program: Program, hints: Mapping[str, int]) -> None:
        """Called before a graph runs; ``hints``: likely values of its symbols."""


def fused(function: Callable[..., Any], kernels: Kernels, dynamic: bool | None = None) -> Callable[..., Any]:
    """``function`` with all its nodes on kernels. Nodes are noted in ``kernels``."""

    def backend(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
        return compile_with(module, inputs, kernels.compile_graph)

    return torch.compile(function, backend=backend, dynamic=dynamic)


def fused_below_dynamo(
    function: Callable[..., Any], kernels: Kernels, inputs: Sequence[torch.Tensor], dynamic: bool
) -> tuple[Callable[..., Any], ShapeEnv]:
    """The same of a function of tensors without branches, in a third of the time; its guards are left to the caller."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    assert mode.shape_env is not None
    fakes = [mode.from_tensor(t, static_shapes=not dynamic) for t in inputs]
    module = fx.symbolic_trace(function)
    with mode:
        _Examples(module).run(*[t.detach() for t in fakes])
    with tracing(TracingContext(mode)):
        return compile_with(module, fakes, kernels.compile_graph), mode.shape_env


class _Examples(fx.Interpreter):
    """Gives each node an example value, as Dynamo does."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = found = super().run_node(n)
        return found
