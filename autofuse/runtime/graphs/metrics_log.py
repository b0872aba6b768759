"""Metrics of captured graphs for reports: before and after fusion, estimates and source lines of nodes.

In: a routed graph, and the findings of its planning in this run or an earlier one. Out: one event per graph, at the end
of the run, when the number of its calls is known. Guarantee: never raises; a graph that cannot be measured is left out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofuse.fusion.stats import FusionStats
from autofuse.ir.records import GRAPH_METRICS, Event
from autofuse.preserve_rng import untouched

if TYPE_CHECKING:
    from autofuse.fusion.graph import FusionGraph
    from autofuse.fusion.node import FusionNode
    from autofuse.runtime.graphs.router import GraphRouter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Described:
    """What reports need of a planned graph."""

    estimates: dict[str, float]  # fusion_id -> estimated speedup
    sources: dict[str, str]  # fusion_id -> first source line
    metrics: dict[str, Any] | None
    fusion: FusionStats  # what the planner counted


class GraphMetricsLog:
    """The graphs of a session, in the order in which they were captured."""

    def __init__(self) -> None:
        self.estimates: dict[str, float] = {}  # fusion_id -> estimated speedup
        self.sources: dict[str, str] = {}  # fusion_id -> first source line
        self._graphs: list[tuple[GraphRouter, dict[str, Any]]] = []

    def add(self, router: GraphRouter, described: Described) -> None:
        """Add a graph that is now routed."""
        self.estimates = described.estimates | self.estimates
        self.sources = described.sources | self.sources
        if described.metrics is not None:
            self._graphs.append((router, described.metrics | {"fusion": described.fusion.to_json()}))

    def source_of(self, fusion_id: str) -> str:
        """The first source line of a node; empty where it is not known."""
        return self.sources.get(fusion_id, "")

    def post(self, post_event: Callable[[Event], None]) -> None:
        """Post one event per graph, with its calls so far."""
        for router, data in self._graphs:
            message = f"{data['phase']}: {data['before']['nodes']} nodes, {data['after']['nodes']} after fusion"
            post_event(Event(GRAPH_METRICS, message, data | {"calls": router.calls()}))


def measure_graph(
    router: GraphRouter,
    graph: FusionGraph,
    nodes: Sequence[FusionNode],
    wholes: Sequence[Collection[str]] = (),
) -> dict[str, Any] | None:
    """Metrics of a graph, unfused and as planned; None on failure. ``wholes``: names that one kernel may take in."""
    with untouched():
        from autofuse.fusion.metrics import has_kernel, measure_graph
        from autofuse.strategies.kernel_count import planned_kernels

    try:
        kernels = {op.name for op in graph.operations if has_kernel(op)}
        taken = [kernels.intersection(names) for names in wholes]
        before, after = measure_graph(graph), measure_graph(graph, planned_kernels(nodes, taken))
    except Exception as error:
        log.debug("a %s graph has no metrics: %s", router.phase, error)
        return None
    # A graph that is captured again for other sizes has the same operators: reports add such graphs up.
    operators = " ".join(op.target for op in graph.operations if has_kernel(op))
    data = {
        "phase": router.phase,
        "times": router.times,  # calls in a step
        "operators": hashlib.sha256(operators.encode()).hexdigest()[:16],
        # Skip autofuse's own lines: a torch container has no other source line.
        "source": next((op.source for op in graph.operations if op.source and op.source[0] != "<"), ""),
        "before": before.to_json(),
        "after": after.to_json(),
    }
    return data
