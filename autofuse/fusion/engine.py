"""`FusionEngine`: the planner's front door (seeds: fusion API, automatic operator fusion).

In: operations or a graph, a `FusionConfig`, custom patterns. Out: nodes, refusals, statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autofuse.fusion.analyzer import FusionCandidateAnalyzer
from autofuse.fusion.benefit import FusionBenefit, estimate_benefit
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.patterns import ANCHORS, FusionPattern, add_pattern, is_called
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.optable import OpKind, info
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
        shared_patterns: Sequence[FusionPattern] = (),
        groups_follow: bool = False,
    ) -> None:
        """``profile``: keep every node for later questions; ``lowerable``: asked before a node is accepted;
        ``shared_patterns``: patterns beside the engine's own, read anew for each graph; ``groups_follow``: the caller
        plans groups of products and convolutions next, and then calls `cover`."""
        self.config = config or FusionConfig()
        self.enabled = enable_fusion and self.config.enabled
        self.nodes: list[FusionNode] = []
        self.refusals: list[Refusal] = []
        self._profile = profile
        self._lowerable = lowerable
        self._own_patterns: list[FusionPattern] = []
        self._shared_patterns = shared_patterns
        self._groups_follow = groups_follow
        self._asked: list[tuple[FusionPattern, frozenset[str]]] = []  # chains that need a group
        self._operations = 0
        self._kernels_saved = 0
        self._memory_saved = 0
        self._speedups: list[float] = []
        self._applied = 0
        self._used: Counter[str] = Counter()

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
        if not self.enabled:
            return []
        analyzer = FusionCandidateAnalyzer(self.config, self._lowerable)
        graph = operations if isinstance(operations, FusionGraph) else None
        seeds = self._seeds(graph) if graph is not None else []
        nodes = analyzer.find_fusible_operations(operations, seeds, apart)
        listed = operations.operations if isinstance(operations, FusionGraph) else operations
        self._count(listed, nodes, analyzer)
        return nodes

    def cover(self, groups: Sequence[Collection[str]]) -> list[Refusal]:
        """Refuse the last graph's patterns whose operators none of these groups takes in; returns the refusals."""
        asked, self._asked = self._asked, []
        refused = []
        for pattern, names in asked:
            if any(names <= set(group) for group in groups):
                self._used[pattern.name] += 1
            else:
                refused.append(_no_kernel(pattern, "nothing here can run these operators as one"))
        self.refusals.extend(refused)
        return refused

    def _seeds(self, graph: FusionGraph) -> list[list[str]]:
        enabled = self.config.enabled_patterns
        seeds: list[list[str]] = []
        used: set[str] = set()
        self._asked = []
        for pattern in self.patterns:
            if enabled is not None and pattern.name not in enabled:
                continue
            for chain in pattern.matches(graph):
                names = frozenset(op.name for op in chain)
                if used & names:
                    continue
                problem = self._why_no_kernel(pattern, chain)
                if problem:
                    self.refusals.append(_no_kernel(pattern, problem))
                    continue
                used |= names
                seeds += [run for run in _runs(chain) if len(run) > 1]
                if any(op.short_name in ANCHORS for op in chain):
                    self._asked.append((pattern, names))
                else:
                    self._used[pattern.name] += 1
        return seeds

    def _why_no_kernel(self, pattern: FusionPattern, chain: Sequence[Operation]) -> str:
        """Why some operator of the chain cannot be fused at all; empty where each can."""
        for op in chain:
            if op.short_name in ANCHORS:
                is_conv = op.short_name == "convolution"
                switch = (
                    "enable_conv" if is_conv
                    else "enable_attention" if pattern.fusion_type == "attention" else "enable_matmul"
                )  # fmt: skip
                if not getattr(self.config, switch):
                    return f"{switch} is off, which {op.short_name} needs"
                if not self._groups_follow:
                    return f"{op.short_name} needs a group, and groups are planned in a session only"
            elif not self.config.allows(info(op.target).kind):
                return f"no variant generates {op.short_name}, or its kind is switched off"
        return ""

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


def _runs(chain: Sequence[Operation]) -> list[list[str]]:
    """The stretches of a chain between products and convolutions, which loops can compute."""
    runs: list[list[str]] = [[]]
    for op in chain:
        if op.short_name in ANCHORS:
            runs.append([])
        else:
            runs[-1].append(op.name)
    return runs


def _no_kernel(pattern: FusionPattern, why: str) -> Refusal:
    return Refusal("pattern_has_no_kernel", False, " + ".join(pattern.ops), f"pattern {pattern.name!r}: {why}")
