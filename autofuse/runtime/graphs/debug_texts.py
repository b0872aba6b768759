"""The texts of plans and graphs for ``run.debug`` (`autofuse.debug` has the levels).

In: plans, routers, planned nodes and refusals. Out: blocks of lines, one for a graph in one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autofuse.ir.reasons import LoweringReason, RefusalReason, in_words, words_of
from autofuse.ir.records import Refusal

if TYPE_CHECKING:
    from autofuse.fusion.node import FusionNode
    from autofuse.runtime.graphs.plans import NodeState, Plan


def routes_text(phase: str, symbols: Sequence[str], plan: Plan) -> str:
    """``forward graph with s0=8: fused 1 of 2``, and the kernel of each node."""
    head = f"{_graph(phase, symbols, plan)}: fused {plan.fused_nodes} of {len(plan.nodes)}"
    return "\n".join(
        [head, *(f"  {node.slot.node.label}: {_route(index, node, plan)}" for index, node in _nodes(plan))]
    )


def timings_text(phase: str, symbols: Sequence[str], plans: Iterable[Plan]) -> str:
    """Medians of a graph's sampled calls, for each shape that it ran in."""
    lines = []
    for plan in plans:
        whole = f", {plan.graph_us():.1f} us each" if plan.graph_us() else ""
        if plan.count:
            lines.append(f"{_graph(phase, symbols, plan)}: {plan.count} calls{whole}")
        lines += [
            f"  {node.slot.node.label}: {plan.live_us(index):.1f} us, {_route(index, node, plan)}"
            for index, node in _nodes(plan)
            if plan.count and plan.live_us(index)
        ]
    return "\n".join(lines)


def plan_text(phase: str, nodes: Sequence[FusionNode], refusals: Sequence[Refusal], sums: Mapping[str, Any]) -> str:
    """The nodes of a graph, then the operations that were not fused, with the reasons, and ``sums`` of all graphs.

    ``sums``: as `FusionEngine.get_fusion_stats` gives them.
    """
    words = words_of(RefusalReason, LoweringReason)
    lines = [f"{phase} graph, nodes: {len(nodes)}", *(f"  {node.label}: {node.operation_names}" for node in nodes)]
    refused = [refusal for refusal in refusals if not refusal.accepted]
    lines += [f"  not fused: {r.operations}: {in_words(r.code, words)}: {r.detail}" for r in refused]
    return "\n".join([*lines, f"  {fusion_text('in this run so far', sums)}"])


def fusion_text(where: str, sums: Mapping[str, Any]) -> str:
    """``fused in this run so far: kernels 12, launches saved 30.0 %, estimated speedup of each 1.50x``."""
    share, speedup = 100 * sums["efficiency"], sums["mean_speedup"]
    kernels = sums["num_fused"]
    return f"fused {where}: kernels {kernels}, launches saved {share:.1f} %, estimated speedup of each {speedup:.2f}x"


def _graph(phase: str, symbols: Sequence[str], plan: Plan) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in zip(symbols, plan.key, strict=True))
    return f"{phase} graph with {sizes}" if sizes else f"{phase} graph"


def _nodes(plan: Plan) -> Iterable[tuple[int, NodeState]]:
    """All nodes except those that a group runs."""
    return ((index, node) for index, node in enumerate(plan.nodes) if not node.covered)


def _route(index: int, node: NodeState, plan: Plan) -> str:
    if node.broken:
        return "eager, its kernel failed"
    if node.tag:
        return f"kernel {node.tag[:12]}"
    if node.lost:
        return "eager, with the script's own kernel, which no kernel has beaten"
    return "eager, not decided yet" if index in plan.open else "eager"
