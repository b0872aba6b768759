"""`FusionDetector`: what of a graph may be fused, and the nodes that come of it (seeds: fusion API, automatic fusion).

In: a graph, a `FusionConfig`, custom patterns. Out: `FusionOpportunity`s, the largest gain first; from them nodes,
statistics, and a `Refusal` for each fusion made or not made.
Guarantee: no operation is in two opportunities for kernels; a pattern that nothing here can compute is refused with its
reason. The order of opportunities does not change the nodes, which come in program order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from autofuse.errors import FusionError
from autofuse.fusion.analyzer import FusionCandidateAnalyzer, build_node
from autofuse.fusion.cluster import Seed
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.patterns import ANCHORS, BUILTIN_PATTERNS, FusionPattern, is_called
from autofuse.fusion.stats import FusionStats
from autofuse.ir.operation import NodeForm, Operation
from autofuse.ir.optable import OpKind, info
from autofuse.ir.records import Refusal


@dataclass(frozen=True)
class FusionOpportunity:
    """Operations of a graph that may run as one, and what that is expected to gain."""

    pattern: str  # the name of a pattern, a custom one before a built-in one; else the kind of loops ("reduction")
    operations: tuple[str, ...]  # their names in the graph, in program order, views left out
    estimated_speedup: float  # time apart / time as one, by a roofline of the processor (`fusion.benefit`)
    memory_saved: int  # bytes a call that no longer go through memory, at the graph's likely sizes
    needs_group: bool = False  # with matmuls or convolutions: a group takes them in, not a loop nest


@dataclass(frozen=True)
class AppliedFusions:
    """What became of opportunities."""

    nodes: tuple[FusionNode, ...]  # in program order
    stats: FusionStats


@dataclass(frozen=True)
class _Chain:
    """A custom pattern's operations in a graph."""

    pattern: FusionPattern
    operations: tuple[Operation, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(op.name for op in self.operations)

    @property
    def needs_group(self) -> bool:
        return any(op.short_name in ANCHORS for op in self.operations)

    def runs(self) -> Iterator[Seed]:
        """The stretches between matmuls and convolutions, which loops can compute."""
        run: list[str] = []
        for op in (*self.operations, None):
            if op is not None and op.short_name not in ANCHORS:
                run.append(op.name)
                continue
            if len(run) > 1:
                yield Seed(self.pattern.name, tuple(run))
            run = []


class FusionDetector:
    """Finds opportunities in graphs, one graph after the other."""

    def __init__(
        self,
        config: FusionConfig | None = None,
        patterns: Sequence[FusionPattern] = (),
        *,
        lowerable: Callable[[NodeForm], tuple[str, str] | None] | None = None,
        groups_follow: bool = False,
        check: bool = False,
    ) -> None:
        """``patterns``: custom ones, in the order in which they go; ``lowerable``: the last word on a node, a code and
        a message where no kernel can be generated; ``groups_follow``: products and convolutions are planned afterwards;
        ``check``: no node is accepted that is not sound."""
        self.config = config or FusionConfig()
        self.patterns = patterns
        self._analyzer = FusionCandidateAnalyzer(self.config, lowerable, check=check)
        self._groups_follow = groups_follow
        self._apart: Sequence[Collection[str]] = ()  # as asked for the last graph
        self._matched: Counter[str] = Counter()  # patterns that loops compute, in the last graph

    @property
    def refusals(self) -> list[Refusal]:
        """What was said of the last graph: fusions made and not made, with their reasons."""
        return self._analyzer.refusals

    def detect(self, graph: FusionGraph, apart: Sequence[Collection[str]] = ()) -> list[FusionOpportunity]:
        """The opportunities of a graph, the largest estimated speedup first; empty where fusion is off.

        No opportunity holds operations of a set of ``apart`` beside others.
        """
        self._analyzer.refusals = []
        self._matched = Counter()
        self._apart = apart
        if not self.config.enabled:
            return []
        chains = self._chains(graph)
        found = [self._of_group(graph, chain) for chain in chains if chain.needs_group]
        self._matched.update(chain.pattern.name for chain in chains if not chain.needs_group)
        seeds = [run for chain in chains for run in chain.runs()]
        for cluster in self._analyzer.grow(graph, seeds, apart):
            node, benefit = self._analyzer.judge(graph, cluster.operations)
            if benefit is not None:
                names = tuple(op.name for op in cluster.operations)
                pattern = cluster.pattern or next(iter(_builtin_patterns(node)), node.kind)
                found.append(FusionOpportunity(pattern, names, benefit.estimated_speedup, benefit.memory_saved))
        return sorted(found, key=lambda o: (-o.estimated_speedup, -o.memory_saved))

    def apply(self, graph: FusionGraph, opportunities: Sequence[FusionOpportunity]) -> AppliedFusions:
        """The nodes of opportunities of this graph; what no kernel can be generated for is split.

        Those that need a group are left to whoever plans groups. Raises FusionError for operations that the graph does
        not have, and for one that is in two opportunities.
        """
        candidates = [o.operations for o in opportunities if not o.needs_group]
        times = Counter(name for names in candidates for name in names)
        wrong = [name for name, count in times.items() if count > 1 or name not in graph.by_name]
        if wrong:
            raise FusionError(f"expected operations of the graph, each in one opportunity, found {', '.join(wrong)}")
        nodes = self._analyzer.nodes_of(graph, [[graph.by_name[name] for name in names] for names in candidates])
        nodes = self._analyzer.in_calls(graph, nodes, self._apart)
        return AppliedFusions(tuple(nodes), self._stats(graph, nodes))

    def _chains(self, graph: FusionGraph) -> list[_Chain]:
        """What custom patterns name, as far as kernels and groups can compute it."""
        enabled = self.config.enabled_patterns
        found: list[_Chain] = []
        used: set[str] = set()
        for pattern in self.patterns:
            if enabled is not None and pattern.name not in enabled:
                continue
            for operations in pattern.matches(graph):
                chain = _Chain(pattern, operations)
                if used & chain.names:
                    continue
                problem = self._why_no_kernel(chain)
                if problem:
                    self.refusals.append(no_kernel(pattern, problem))
                    continue
                used |= chain.names
                found.append(chain)
        return found

    def _why_no_kernel(self, chain: _Chain) -> str:
        """Why some operator of the chain cannot be fused at all; empty where each can."""
        for op in chain.operations:
            if op.short_name in ANCHORS:
                is_conv = op.short_name == "convolution"
                switch = (
                    "enable_conv" if is_conv
                    else "enable_attention" if chain.pattern.fusion_type == "attention" else "enable_matmul"
                )  # fmt: skip
                if not getattr(self.config, switch):
                    return f"{switch} is off, which {op.short_name} needs"
                if not self._groups_follow:
                    return f"{op.short_name} needs a group, and groups are planned in a session only"
            elif not self.config.allows(info(op.target).kind):
                return f"no variant generates {op.short_name}, or its kind is switched off"
        return ""

    def _of_group(self, graph: FusionGraph, chain: _Chain) -> FusionOpportunity:
        node = build_node(graph, chain.operations)
        benefit = self._analyzer.analyze_benefit(node, graph)
        names = tuple(sorted(chain.names, key=graph.position.__getitem__))
        return FusionOpportunity(chain.pattern.name, names, benefit.estimated_speedup, benefit.memory_saved, True)

    def _stats(self, graph: FusionGraph, nodes: Sequence[FusionNode]) -> FusionStats:
        used = Counter(self._matched)
        stats = FusionStats(
            operations=sum(1 for op in graph.operations if info(op.target).kind is not OpKind.VIEW),
            failed=sum(1 for refusal in self.refusals if not refusal.accepted),
        )
        for node in nodes:
            used.update(_builtin_patterns(node))
            benefit = self._analyzer.judge(graph, node.kernels)[1]
            assert benefit is not None  # it was accepted
            stats += FusionStats(
                applied=1,
                kernels_saved=benefit.kernel_count_reduction,
                memory_saved=benefit.memory_saved,
                speedups=benefit.estimated_speedup,
                dynamic=self._analyzer.requires_runtime_shape_check(node),
            )
        return stats + FusionStats(patterns_used=used)


def no_kernel(pattern: FusionPattern, why: str) -> Refusal:
    """A pattern that was found and cannot be fused."""
    return Refusal("pattern_has_no_kernel", False, " + ".join(pattern.ops), f"pattern {pattern.name!r}: {why}")


def _builtin_patterns(node: FusionNode) -> list[str]:
    """Names of the built-in patterns that a node holds."""
    kernels = node.kernels
    return [
        name
        for name, chain in BUILTIN_PATTERNS
        if any(
            all(is_called(op, called) for op, called in zip(kernels[start:], chain, strict=False))
            for start in range(len(kernels) - len(chain) + 1)
        )
    ]
