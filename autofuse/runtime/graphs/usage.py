"""How the nodes of a session were used, summed over the graphs and layers that share them.

In: plans in use and evicted ones. Out: counters of nodes, `NodeUse` records; time shares refer to all timed steps of
the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from autofuse.ir.records import Bucket, NodeUse, ObservedShape
from autofuse.runtime.store_thread import yield_gil

if TYPE_CHECKING:
    from autofuse.runtime.graphs.plans import NodeState, Plan

MAX_SHAPES = 64  # exact shapes kept for a node and bucket


@dataclass
class NodeSum:
    """Counters of one node in one bucket."""

    node: NodeState  # the first of them
    calls: int = 0
    fused_calls: int = 0
    total_us: float = 0.0  # calls times the median of sampled calls
    sampled: int = 0  # calls in plans with samples
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)


class Usage:
    """Counters of plans and their nodes."""

    def __init__(self) -> None:
        self.calls = 0
        self.calls_by_bucket: Counter[Bucket] = Counter()
        self.nodes: dict[tuple[str, Bucket], NodeSum] = {}

    def add(self, plan: Plan) -> None:
        self.calls += plan.count
        self.calls_by_bucket[plan.bucket] += plan.count
        for index, node in enumerate(plan.nodes):
            total = self._sum_of(node)
            calls = fused = plan.fused_calls(node)
            if not node.slot.is_group:  # until a strategy of the group runs, its nodes are counted one by one
                calls = plan.calls_of(node)
            total.calls += calls
            total.fused_calls += fused
            total.shapes[node.values] += plan.calls_of(node)  # of a group too, though its nodes ran one by one
            live = plan.live_us(index)
            if live:
                total.total_us += live * calls
                total.sampled += calls

    def merge(self, other: Usage) -> None:
        self.calls += other.calls
        self.calls_by_bucket.update(other.calls_by_bucket)
        for found in list(other.nodes.values()):
            total = self._sum_of(found.node)
            total.calls += found.calls
            total.fused_calls += found.fused_calls
            total.total_us += found.total_us
            total.sampled += found.sampled
            total.shapes.update(found.shapes)

    def forget_rare_shapes(self) -> None:
        """Keep only as many shapes as may be written."""
        for total in self.nodes.values():
            if len(total.shapes) > 4 * MAX_SHAPES:
                total.shapes = Counter(dict(total.shapes.most_common(2 * MAX_SHAPES)))

    def _sum_of(self, node: NodeState) -> NodeSum:
        key = (node.fusion_id, node.bucket)
        if key not in self.nodes:
            self.nodes[key] = NodeSum(node)
        return self.nodes[key]


class Counted(Protocol):
    """A routed graph."""

    def add_usage(self, usage: Usage, yield_gil: Callable[[], None]) -> None: ...


def usage_of(routers: Iterable[Counted], in_haste: bool = False) -> Usage:
    """Usage of all routed graphs so far; without pauses for the GIL where no thread computes meanwhile."""
    usage = Usage()
    for router in list(routers):
        router.add_usage(usage, (lambda: None) if in_haste else yield_gil)
    return usage


def node_uses(sums: Iterable[NodeSum], sources: Mapping[str, str], step_us: float) -> list[NodeUse]:
    """One record for each node and bucket, with the counters so far; ``step_us``: of all timed steps."""
    return [_record(total, sources, step_us) for total in sums]


def _record(total: NodeSum, sources: Mapping[str, str], step_us: float) -> NodeUse:
    node = total.node.slot.node
    # Shapes that come once are not sampled: we take the times of sampled ones in their bucket.
    live_us = total.total_us / total.sampled if total.sampled else 0.0
    return NodeUse(
        fusion_id=total.node.fusion_id,
        node=node.to_json(),
        label=node.label,
        operations=node.operation_names,
        bucket=total.node.bucket,
        calls=total.calls,
        fused_calls=total.fused_calls,
        live_us=live_us,
        time_share=min(1.0, live_us * total.calls / step_us) if step_us else 0.0,
        shapes=tuple(ObservedShape(values, calls) for values, calls in total.shapes.most_common(MAX_SHAPES)),
        source=sources.get(total.node.fusion_id, ""),
    )
