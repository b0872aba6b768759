"""How the nodes of a session were used, summed over the graphs and layers that share them.

In: the plans of a session. Out: `NodeUse` records; the time share is of all timed steps of the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autofuse.ir.records import Bucket, NodeUse, ObservedShape
from autofuse.runtime.backstage import breathe
from autofuse.runtime.router import NodeState

if TYPE_CHECKING:
    from autofuse.runtime.session import Session

MAX_SHAPES = 64  # exact shapes kept for a node and bucket


@dataclass
class _Sum:
    node: NodeState
    bucket: Bucket
    calls: int = 0
    fused_calls: int = 0
    total_us: float = 0.0  # calls times the median of sampled calls
    sampled: int = 0  # calls in plans with samples
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)


def node_uses(session: Session) -> list[NodeUse]:
    """One record for each node and bucket, with the counters so far."""
    sums: dict[tuple[str, Bucket], _Sum] = {}
    run_us = max(session.roots.step_us_total, 1e-9)
    for router in list(session.routers):
        for plan in router.all_plans():
            breathe()
            for index, node in enumerate(plan.nodes):
                total = sums.setdefault((node.fusion_id, node.bucket), _Sum(node, node.bucket))
                calls = plan.calls_of(node)
                if node.slot.is_group:
                    # Until a way of it runs, its nodes are counted, each by itself.
                    calls = plan.fused_calls(node)
                total.calls += calls
                total.fused_calls += plan.fused_calls(node)
                total.shapes[node.values] += calls
                live = plan.live_us(index)
                if live:
                    total.total_us += live * calls
                    total.sampled += calls
    return [_record(session, total, run_us) for total in sums.values()]


def _record(session: Session, total: _Sum, run_us: float) -> NodeUse:
    node = total.node.slot.node
    # Of shapes that come once none is sampled: they take what the sampled ones of their bucket take.
    live_us = total.total_us / total.sampled if total.sampled else 0.0
    return NodeUse(
        fusion_id=total.node.fusion_id,
        node=node.to_json(),
        label=node.label,
        operations=node.operation_names,
        bucket=total.bucket,
        calls=total.calls,
        fused_calls=total.fused_calls,
        live_us=live_us,
        time_share=min(1.0, live_us * total.calls / run_us) if session.roots.step_us_total else 0.0,
        shapes=tuple(ObservedShape(values, calls) for values, calls in total.shapes.most_common(MAX_SHAPES)),
        source=session.planner.sources.get(total.node.fusion_id, ""),
    )
