"""Plans captured graphs: nodes, halves of attentions, groups.

In: graphs of a session, its settings and patterns. Out: nodes and groups for `build_program`; refusals, estimates and
metrics for the report. Guarantee: operations that cannot be lowered are in no node; unreadable patterns are reported
once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from autofuse.capture.graph_import import ImportedGraph
from autofuse.capture.passes.joint_graph import backward_of
from autofuse.codegen.in_place import why_not
from autofuse.errors import AutofuseError
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import MATMULS, FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.optimizer import FusionOptimizer
from autofuse.fusion.pattern_file import read_patterns
from autofuse.fusion.patterns import registered_patterns
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Refusal
from autofuse.runtime.graphs.metrics_log import Described, measure_graph
from autofuse.runtime.graphs.router import GraphRouter
from autofuse.runtime.run_context import RunContext
from autofuse.strategies.find_joint_attention import attention_passes_of, find_joint_attention
from autofuse.strategies.groups import Group, find_groups
from autofuse.strategies.joint_attention import AttentionPass


class Planner:
    """All planning of one session."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._settings = context.settings
        self._lowered: dict[str, tuple[str, str] | None] = {}
        config = FusionConfig.of(self._settings.fusion)
        self.engine = FusionEngine(
            config,
            lowerable=self._lowerable,
            shared_patterns=registered_patterns(),
            groups_follow=True,
            optimizer=FusionOptimizer.shared(),
            check=self._settings.run.check,
        )
        self.load_patterns()

    def load_patterns(self) -> None:
        """Patterns of the configured file; `autofuse run` refuses a bad file, other entry points ignore it."""
        path = self._settings.fusion.patterns
        if path is None:
            return
        try:
            for pattern in read_patterns(path):
                self.engine.register_pattern(pattern)
        except AutofuseError as error:
            self._context.say_once("patterns_unusable", str(error))

    def plan_nodes(self, graph: FusionGraph, apart: Sequence[Collection[str]] = ()) -> list[FusionNode]:
        """Nodes of a graph; operations in ``apart`` share a node with no others."""
        before = len(self.engine.refusals)
        nodes = graph.optimize(self.engine, apart)
        self._refuse(self.engine.refusals[before:])
        return nodes

    def plan_joint_attention(self, imported: ImportedGraph, phase: str) -> list[AttentionPass]:
        """Attentions of training in a graph (`find_joint_attention`), found with the forward graph for both.

        None where each call is checked against eager: eager has no counterpart for a half. None in a strict run: no
        half is eager's to the bit, and planned apart from its neighbours it would keep them from being fused.
        """
        run = self._settings.run
        if not self.engine.enabled or not self.engine.config.enable_attention or run.check or run.strict:
            return []
        if phase == "backward":
            return attention_passes_of(imported.module)
        counterpart = backward_of(imported.module)
        if phase != "forward" or counterpart is None:
            return []
        found = find_joint_attention(imported, counterpart)
        self._refuse(found.refusals)
        return found.forward

    def plan_groups(
        self,
        graph: FusionGraph,
        nodes: Sequence[FusionNode],
        halves: Sequence[AttentionPass] = (),
    ) -> list[Group]:
        """Groups of a graph: matmuls and convolutions with the nodes around them (`find_groups`)."""
        if not self.engine.enabled:
            return []
        taken = [half.names for half in halves]
        config = self.engine.config
        refusals: list[Refusal] = []
        precision = torch.get_float32_matmul_precision()
        products = [op for op in graph.operations if op.short_name in MATMULS]
        if config.enable_matmul and products and precision != "highest":
            # Races compare with aten's matmuls in full precision, so they could not judge a loss of precision.
            config = FusionConfig.of(config, enable_matmul=False)
            detail = f"torch.set_float32_matmul_precision({precision!r}): products are left to torch"
            refusals = [Refusal("matmul_precision", False, op.short_name, detail) for op in products[:1]]
        groups, found = find_groups(graph, nodes, config, taken)
        self._refuse([*refusals, *found])
        self._refuse(self.engine.cover([*(group.operations for group in groups), *taken]))
        return groups

    def add_router(
        self, router: GraphRouter, graph: FusionGraph, nodes: Sequence[FusionNode], halves: Sequence[AttentionPass] = ()
    ) -> Described:
        """Record that a graph is planned and routed."""
        notes = self._context.notes
        estimates, sources = {}, {}
        for node in [*nodes, *(half.pair.node for half in halves)]:
            fusion_id = node.fusion_id
            if fusion_id not in notes.estimates:
                notes.estimates[fusion_id] = self.engine.benefit(node, graph).estimated_speedup
                notes.sources[fusion_id] = next((op.source for op in node.kernels if op.source), "")
            estimates[fusion_id], sources[fusion_id] = notes.estimates[fusion_id], notes.sources[fusion_id]
        metrics = measure_graph(router, graph, nodes, [half.names for half in halves])
        described = Described(estimates, sources, metrics, self.engine.graph_stats)
        self._context.add_router(router)
        notes.add(router, described)
        return described

    def _refuse(self, refusals: Sequence[Refusal]) -> None:
        self._context.refusals.extend(refusals)

    def _lowerable(self, form: NodeForm) -> tuple[str, str] | None:
        text = form.text()
        if text not in self._lowered:
            self._lowered[text] = why_not(form)
        return self._lowered[text]
