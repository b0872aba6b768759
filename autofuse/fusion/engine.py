"""`FusionEngine`: the planner's front door (seeds: fusion API, automatic operator fusion).

In: operations or a graph, a `FusionConfig`, custom patterns. Out: nodes, refusals, statistics.
Guarantee: plans by its config under the switches of its optimizer, which are read anew for each graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from autofuse.fusion.analyzer import closed_graph
from autofuse.fusion.benefit import FusionBenefit, estimate_benefit
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.detector import FusionDetector, FusionOpportunity, no_kernel
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.optimizer import FusionOptimizer
from autofuse.fusion.patterns import FusionPattern, add_pattern
from autofuse.fusion.stats import FusionStats
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.records import Refusal


class FusionEngine:
    """Plans fusions and counts them."""

    def __init__(
        self,
        config: FusionConfig | None = None,
        *,
        enable_fusion: bool = True,
        profile: bool = False,
        lowerable: Callable[[NodeForm], tuple[str, str] | None] | None = None,
        shared_patterns: Sequence[FusionPattern] = (),
        groups_follow: bool = False,
        optimizer: FusionOptimizer | None = None,
        check: bool = False,
    ) -> None:
        """``profile``: keep every node for later questions; ``lowerable``: asked before a node is accepted;
        ``shared_patterns``: patterns beside the engine's own, read anew for each graph; ``groups_follow``: the caller
        plans groups of products and convolutions next, and then calls `cover`; ``optimizer``: whose switches hold, one
        of its own if None; ``check``: ask of each node whether it is sound."""
        self.optimizer = optimizer or FusionOptimizer()
        self.nodes: list[FusionNode] = []
        self.refusals: list[Refusal] = []
        self.graph_stats = FusionStats()  # of the last graph
        self._config = config or FusionConfig()
        self._enable_fusion = enable_fusion
        self._profile = profile
        self._lowerable = lowerable
        self._own_patterns: list[FusionPattern] = []
        self._shared_patterns = shared_patterns
        self._groups_follow = groups_follow
        self._check = check
        self._for_groups: list[FusionOpportunity] = []  # of the last graph
        self._earlier = FusionStats()  # of the graphs before it

    @property
    def config(self) -> FusionConfig:
        """What holds for the next graph."""
        return self.optimizer.config_for(self._config)

    @property
    def enabled(self) -> bool:
        """Whether the next graph is fused at all."""
        return self._enable_fusion and self.config.enabled

    @property
    def patterns(self) -> list[FusionPattern]:
        """All patterns, those of larger priority first; a shared one gives way to one of our own of its name."""
        own = {pattern.name for pattern in self._own_patterns}
        both = [*self._own_patterns, *(p for p in self._shared_patterns if p.name not in own)]
        return sorted(both, key=lambda p: -p.priority)

    def register_pattern(self, pattern: FusionPattern, priority: int | None = None) -> None:
        """Try ``pattern`` before the rules. Raises FusionError for a second pattern of the same name."""
        add_pattern(self._own_patterns, pattern, priority)

    def fuse(
        self, operations: Sequence[Operation] | FusionGraph, apart: Sequence[Collection[str]] = ()
    ) -> list[FusionNode]:
        """The nodes of a graph, in program order; empty when fusion is off. No node holds operations of a set of
        ``apart`` beside others."""
        self._earlier, self.graph_stats = self._earlier + self.graph_stats, FusionStats()
        self._for_groups = []
        if not self.enabled:
            return []
        graph = operations if isinstance(operations, FusionGraph) else closed_graph(operations)
        detector = FusionDetector(
            self.config,
            self.patterns,
            lowerable=self._lowerable,
            groups_follow=self._groups_follow,
            check=self._check,
        )
        found = self.optimizer.detect_opportunities(graph, apart, detector)
        applied = self.optimizer.apply_fusions(graph, found, detector)
        self._for_groups = [opportunity for opportunity in found if opportunity.needs_group]
        self.refusals.extend(detector.refusals)
        self.graph_stats = applied.stats
        if self._profile:
            self.nodes.extend(applied.nodes)
        return list(applied.nodes)

    def cover(self, groups: Sequence[Collection[str]]) -> list[Refusal]:
        """Refuse the last graph's patterns whose operators are in none of these groups; returns the refusals."""
        asked, self._for_groups = self._for_groups, []
        patterns = {pattern.name: pattern for pattern in self.patterns}
        refused = []
        for opportunity in asked:
            if any(set(opportunity.operations) <= set(group) for group in groups):
                taken = FusionStats(patterns_used={opportunity.pattern: 1})
                self.graph_stats += taken
                self.optimizer.count(taken)
            else:
                why = "nothing here can run these operators as one"
                refused.append(no_kernel(patterns[opportunity.pattern], why))
        self.refusals.extend(refused)
        self.graph_stats = replace(self.graph_stats, failed=self.graph_stats.failed + len(refused))
        return refused

    def benefit(self, node: FusionNode, graph: FusionGraph | None = None) -> FusionBenefit:
        """The estimated benefit of a node at the graph's likely sizes."""
        return estimate_benefit(node, graph)

    def get_fusion_stats(self) -> dict[str, Any]:
        """Sums so far: ``num_fused``, ``efficiency`` (share of launches saved), ``applied``, ``failed``,
        ``memory_saved`` (bytes a call of every graph), ``mean_speedup`` (estimated), ``dynamic`` (nodes with sizes that
        are only known when they run), ``patterns_used``."""
        return (self._earlier + self.graph_stats).summary()
