"""How many plans a session keeps: a run may see new shapes without end.

In: plans as they are made. Out: those that were used least are let go, and made anew should their shapes come again.
Guarantee: counters of plans that are let go are kept (`GraphRouter.past`); plans that have not run yet stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autofuse.gpu import capturing
from autofuse.locks import make_lock

if TYPE_CHECKING:
    from autofuse.runtime.plans import Plan
    from autofuse.runtime.router import GraphRouter

MAX_NODES = 1 << 15
LEAST_SIZE = 8  # in nodes, of a plan with few: it is more than them
KEPT_SHARE = 0.75  # of the most nodes, when some are let go: looking at all plans pays for many new ones


class PlanLimit:
    """Counts the nodes of all plans of a session."""

    def __init__(
        self,
        routers: Sequence[GraphRouter],
        most_nodes: int = MAX_NODES,
        before: Callable[[Sequence[Plan]], None] = lambda plans: None,
    ) -> None:
        """``before(plans)`` is called before these are let go."""
        self._routers = routers
        self._most = most_nodes
        self._before = before
        self._nodes = 0
        self._lock = make_lock()

    def add(self, plan: Plan) -> None:
        """A plan was made. Not to be called under a router's lock."""
        with self._lock:
            self._nodes += _size(plan)
            if self._nodes > self._most and not capturing.is_capturing():
                self._let_go()

    def _let_go(self) -> None:
        routers = list(self._routers)
        left = sum(_size(plan) for router in routers for plan in router.all_plans())
        plans = [(plan, router) for router in routers for plan in list(router.plans.values()) if plan.count]
        # Those first that were used least since the last time, of these the oldest.
        plans.sort(key=lambda item: (item[0].count - item[0].count_before, item[0].number))
        number = 0
        while number < len(plans) and left > KEPT_SHARE * self._most:
            left -= _size(plans[number][0])
            number += 1
        self._before([plan for plan, _ in plans[:number]])
        gone: dict[GraphRouter, list[Plan]] = {}
        for plan, router in plans[:number]:
            gone.setdefault(router, []).append(plan)
        for router, its in gone.items():
            router.let_go(its)
        for plan, _ in plans[number:]:
            plan.count_before = plan.count
        self._nodes = left


def _size(plan: Plan) -> int:
    return max(LEAST_SIZE, len(plan.nodes))
