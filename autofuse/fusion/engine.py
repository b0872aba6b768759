"""`FusionEngine`: the planner's front door (seeds: fusion API, automatic operator fusion).

In: operations or a graph, a `FusionConfig`, custom patterns. Out: nodes, refusals, statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from autofuse.errors import FusionError
from autofuse.fusion.analyzer import FusionCandidateAnalyzer
from autofuse.fusion.benefit import FusionBenefit, estimate_benefit
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.patterns import FusionPattern, is_called
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.optable import FUSIBLE, OpKind, info
from autofuse.ir.records import Refusal

# Named for statistics; the rules themselves need no list of patterns.
BUILTIN_PATTERNS = (
    ("add_relu", ("add", "relu")),
    ("mul_relu", ("mul", "relu")),
    ("affine_relu", ("mul", "add", "relu")),
    ("bias_gelu", ("add", "gelu")),
    ("masked_softmax", ("masked_fill", "softmax")),
    ("softmax_dropout", ("softmax", "dropout")),
    ("residual_layer_norm", ("add", "layer_norm")),
    ("cross_entropy", ("log_softmax", "nll_loss")),
)


class FusionEngine:
    """Plans fusions and counts them."""

    def __init__(
        self,
        config: FusionConfig | None = None,
        *,
        enable_fusion: bool = True,
        profile: bool = False,
        lowerable: Callable[[NodeForm], tuple[str, str] | None] | None = None,
    ) -> None:
        """``profile``: keep every node for later questions; ``lowerable``: asked before a node is accepted."""
        self.config = config or FusionConfig()
        self.enabled = enable_fusion and self.config.enabled
        self.patterns: list[FusionPattern] = []
        self.nodes: list[FusionNode] = []
        self.refusals: list[Refusal] = []
        self._profile = profile
        self._lowerable = lowerable
        self._operations = 0
        self._kernels_saved = 0
        self._memory_saved = 0
        self._speedups: list[float] = []
        self._applied = 0
        self._used: Counter[str] = Counter()

    def register_pattern(self, pattern: FusionPattern, priority: int | None = None) -> None:
        """Try ``pattern`` before the rules. Raises FusionError for a second pattern of the same name."""
        if any(p.name == pattern.name for p in self.patterns):
            raise FusionError(f"expected a new pattern name, found {pattern.name!r} twice; rename one")
        if priority is not None:
            pattern = FusionPattern(pattern.name, pattern.ops, pattern.fusion_type, priority)
        self.patterns.append(pattern)
        self.patterns.sort(key=lambda p: -p.priority)

    def fuse(self, operations: Sequence[Operation] | FusionGraph) -> list[FusionNode]:
        """The nodes of a graph, in program order; empty when fusion is off."""
        if not self.enabled:
            return []
        analyzer = FusionCandidateAnalyzer(self.config, self._lowerable)
        graph = operations if isinstance(operations, FusionGraph) else None
        seeds = self._seeds(graph, analyzer) if graph is not None else []
        nodes = analyzer.find_fusible_operations(operations, seeds)
        listed = operations.operations if isinstance(operations, FusionGraph) else operations
        self._count(listed, nodes, analyzer)
        return nodes

    def _seeds(self, graph: FusionGraph, analyzer: FusionCandidateAnalyzer) -> list[list[str]]:
        enabled = self.config.enabled_patterns
        seeds: list[list[str]] = []
        used: set[str] = set()
        for pattern in self.patterns:
            if enabled is not None and pattern.name not in enabled:
                continue
            for chain in pattern.matches(graph):
                names = [op.name for op in chain]
                opaque = [op for op in chain if info(op.target).kind not in FUSIBLE or not self._allowed(op)]
                if opaque:
                    code = "pattern_has_no_kernel"
                    detail = f"pattern {pattern.name!r}: no variant generates {opaque[0].short_name} yet"
                    self.refusals.append(Refusal(code, False, " + ".join(pattern.ops), detail))
                elif not used.intersection(names):
                    seeds.append(names)
                    used.update(names)
                    self._used[pattern.name] += 1
        return seeds

    def _allowed(self, op: Operation) -> bool:
        return self.config.allows(info(op.target).kind)

    def _count(
        self, operations: Sequence[Operation], nodes: Sequence[FusionNode], analyzer: FusionCandidateAnalyzer
    ) -> None:
        self._operations += sum(1 for op in operations if info(op.target).kind is not OpKind.VIEW)
        self.refusals.extend(analyzer.refusals)
        self._applied += len(nodes)
        for node in nodes:
            benefit = estimate_benefit(node)
            self._kernels_saved += benefit.kernel_count_reduction
            self._memory_saved += benefit.memory_saved
            self._speedups.append(benefit.estimated_speedup)
            for name, chain in BUILTIN_PATTERNS:
                if _has_chain(node, chain):
                    self._used[name] += 1
        if self._profile:
            self.nodes.extend(nodes)

    def benefit(self, node: FusionNode, graph: FusionGraph | None = None) -> FusionBenefit:
        """The estimated benefit of a node at the graph's likely sizes."""
        return estimate_benefit(node, graph)

    def get_fusion_stats(self) -> dict[str, Any]:
        """Counts so far: ``num_fused``, ``efficiency`` (share of launches saved), ``applied``, ``failed``,
        ``memory_saved`` (bytes a call of every graph), ``mean_speedup`` (estimated), ``patterns_used``."""
        return {
            "num_fused": self._applied,
            "efficiency": self._kernels_saved / self._operations if self._operations else 0.0,
            "applied": self._applied,
            "failed": sum(1 for r in self.refusals if not r.accepted),
            "memory_saved": self._memory_saved,
            "mean_speedup": sum(self._speedups) / len(self._speedups) if self._speedups else 1.0,
            "patterns_used": dict(self._used),
        }


def _has_chain(node: FusionNode, chain: Sequence[str]) -> bool:
    kernels = node.kernels
    for start in range(len(kernels) - len(chain) + 1):
        if all(is_called(op, name) for op, name in zip(kernels[start:], chain, strict=False)):
            return True
    return False
