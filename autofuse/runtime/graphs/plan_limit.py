"""Limits the plans of a session: a run may see new shapes without end.

In: new plans. Out: the least used plans are evicted, and made again if their shapes come again. Guarantee: counters of
evicted plans are kept (`GraphRouter.past`); plans that have not run yet stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autofuse.gpu import capturing
from autofuse.locks import make_lock

if TYPE_CHECKING:
    from autofuse.runtime.graphs.plans import Plan
    from autofuse.runtime.graphs.router import GraphRouter

MAX_NODES = 1 << 15
LEAST_SIZE = 8  # least weight of a plan, in nodes: a plan is more than its nodes
KEPT_SHARE = 0.75  # share of the limit left by an eviction: it reads all plans, so it should make room for many


class PlanLimit:
    """Counts the nodes of all plans of a session."""

    def __init__(
        self,
        routers: Sequence[GraphRouter],
        most_nodes: int = MAX_NODES,
        before: Callable[[Sequence[Plan]], None] = lambda plans: None,
    ) -> None:
        """``before(plans)`` is called before these are evicted."""
        self._routers = routers
        self._most = most_nodes
        self._before = before
        self._nodes = 0
        self._lock = make_lock()

    def add(self, plan: Plan) -> None:
        """Count a new plan. Not to be called under a router's lock."""
        with self._lock:
            self._nodes += _size(plan)
            if self._nodes > self._most and not capturing.is_capturing():
                self._let_go()

    def _let_go(self) -> None:
        routers = list(self._routers)
        left = sum(_size(plan) for router in routers for plan in router.all_plans())
        plans = [(plan, router) for router in routers for plan in list(router.plans.values()) if plan.count]
        # The plans least used since the last eviction first, the oldest of these first.
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
