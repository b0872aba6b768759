"""What each captured graph looks like before and after fusion, kept for the report.

In: a router with its graph and nodes, when they are planned. Out: one event a graph, when the run ends and its calls
are known. Guarantee: never raises; a graph that cannot be measured is left out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.metrics import has_kernel
from autofuse.fusion.node import FusionNode
from autofuse.ir.records import GRAPH_METRICS, Event
from autofuse.runtime.router import GraphRouter
from autofuse.ways.planned import planned_kernels

log = logging.getLogger(__name__)


class GraphLog:
    """The graphs of a session, in the order in which they were captured."""

    def __init__(self) -> None:
        self._graphs: list[tuple[GraphRouter, dict[str, Any]]] = []

    def add(
        self,
        router: GraphRouter,
        graph: FusionGraph,
        nodes: Sequence[FusionNode],
        wholes: Sequence[Collection[str]] = (),
    ) -> dict[str, Any] | None:
        """Measure a graph as it is and as it is planned; ``wholes``: names that a vendor's kernel each may take in.

        What was measured, for `adopt`; None where that failed.
        """
        try:
            kernels = {op.name for op in graph.operations if has_kernel(op)}
            taken = [kernels.intersection(names) for names in wholes]
            before, after = graph.metrics(), graph.metrics(planned_kernels(nodes, taken))
        except Exception as error:
            log.debug("a %s graph has no metrics: %s", router.phase, error)
            return None
        # Captured anew for other sizes, a graph has the same operators: reports add such graphs up.
        operators = " ".join(op.target for op in graph.operations if has_kernel(op))
        data = {
            "phase": router.phase,
            "times": router.times,  # calls in a step
            "operators": hashlib.sha256(operators.encode()).hexdigest()[:16],
            # Not a line of ours: a torch container has no other.
            "source": next((op.source for op in graph.operations if op.source and op.source[0] != "<"), ""),
            "before": before.to_json(),
            "after": after.to_json(),
        }
        self._graphs.append((router, data))
        return data

    def adopt(self, router: GraphRouter, data: dict[str, Any] | None) -> None:
        """A graph that an earlier run has measured."""
        if data is not None:
            self._graphs.append((router, data))

    def post(self, post_event: Callable[[Event], None]) -> None:
        """One event a graph, with its calls so far."""
        for router, data in self._graphs:
            message = f"{data['phase']}: {data['before']['nodes']} nodes, {data['after']['nodes']} after fusion"
            post_event(Event(GRAPH_METRICS, message, data | {"calls": router.calls()}))
