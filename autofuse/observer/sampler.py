"""Decides which steps are watched, so that watching stays within its budget and stops when it is done.

In: calls of roots, and the cost of watching them. Out: ``Sampler.wants(root)`` before a call, and the running cost. A
step lasts from one call of a root to the next call of the same root, backward and optimizer included. Guarantee: over a
run the cost stays within ``max_overhead_percent`` of the wall time plus a small advance (``burst_seconds``); once every
root is decided, nothing is sampled. Torch-free; the clock is a parameter, so that tests need no waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autofuse.observer.config import ObserverConfig

_MAX_BACKOFF = 64


@dataclass
class _RootPlan:
    calls: int = 0
    sampled: int = 0
    next_call: int = 0  # running number of the call that is sampled next
    unremarkable: int = 0  # sampled steps in a row that told nothing new
    stretch: int = 1  # how many times longer than configured the interval is
    last_cost: float = 0.0  # seconds that the last sampled step cost
    decided: bool = False


class Sampler:
    """When to sample. One object per run; its answers are per root."""

    def __init__(self, config: ObserverConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self._config = config
        self._clock = clock
        self._roots: dict[str, _RootPlan] = {}
        self._started: float | None = None
        self._last_cost = 0.0  # of any root: what a new one is expected to cost
        self._open = 0  # roots that are not decided
        self.cost_seconds = 0.0
        self.throttled = 0  # samples that were due and left out because of their cost

    @property
    def is_idle(self) -> bool:
        """Nothing will be sampled until a new root shows up."""
        return self._open == 0 or not self._config.enabled

    def wants(self, root: str) -> bool:
        """Count a call of a root; is the step that begins with it to be sampled?"""
        plan = self.count(root)
        if plan is None:
            return False
        call = plan.calls - 1
        if plan.decided or call < plan.next_call or not self._config.enabled:
            return False
        if not self.affords(plan.last_cost or self._last_cost):
            self.throttled += 1
            # Look again a little later, not at every call: the budget grows with time.
            plan.next_call = call + max(1, self._config.sample_every // 8)
            return False
        return True

    def count(self, root: str, calls: int = 1) -> _RootPlan | None:
        """Count calls of a root that begin no step; None for roots beyond ``max_owners``."""
        plan = self._roots.get(root)
        if plan is None:
            if len(self._roots) >= self._config.max_owners:
                return None
            plan = self._add(root)
        plan.calls += calls
        return plan

    def affords(self, seconds: float) -> bool:
        """Would this additional cost stay within the budget?"""
        share = self._config.max_overhead_percent / 100.0
        if share == 0.0:
            return False
        return self.cost_seconds + seconds <= share * self.run_seconds + self._config.burst_seconds

    def spend(self, seconds: float) -> None:
        """Account for time that observing took."""
        self.cost_seconds += seconds

    def finish_step(self, root: str, cost_seconds: float, learnt: bool) -> None:
        """A sampled step of this root is over; ``learnt``: it held ops or shapes that were new."""
        plan = self._roots[root]
        plan.last_cost = self._last_cost = cost_seconds
        self._seen(plan, learnt)

    def credit(self, root: str, learnt: bool) -> None:
        """A root that took part in another root's step was sampled as well, at no further cost."""
        plan = self._roots.get(root)
        if plan is not None:
            self._seen(plan, learnt)

    def _seen(self, plan: _RootPlan, learnt: bool) -> None:
        plan.sampled += 1
        plan.unremarkable = 0 if learnt else plan.unremarkable + 1
        if learnt:
            plan.stretch = 1
        elif plan.unremarkable >= self._config.settled_after:
            plan.stretch = min(_MAX_BACKOFF, plan.stretch * 2)
            plan.unremarkable = 0
        interval = 1 if plan.sampled < self._config.first_steps else self._config.sample_every * plan.stretch
        plan.next_call = plan.calls + interval - 1

    def decide(self, root: str) -> None:
        """The fate of this root is known (captured, or eager for good): watch it no more."""
        plan = self._roots.get(root) or self._add(root)
        if not plan.decided:
            plan.decided = True
            self._open -= 1

    def reopen(self, root: str) -> None:
        """Watch this root again, as if it were new."""
        plan = self._roots.get(root)
        if plan is not None and plan.decided:
            plan.decided = False
            plan.sampled, plan.stretch, plan.unremarkable, plan.next_call = 0, 1, 0, plan.calls
            self._open += 1

    def knows(self, root: str) -> bool:
        """Was this root called or decided before? Beyond ``max_owners`` all roots count as known."""
        return root in self._roots or len(self._roots) >= self._config.max_owners

    def sampled_steps(self, root: str) -> int:
        plan = self._roots.get(root)
        return plan.sampled if plan else 0

    @property
    def run_seconds(self) -> float:
        """Wall time since the first call of a root."""
        return 0.0 if self._started is None else self._clock() - self._started

    def _add(self, root: str) -> _RootPlan:
        if self._started is None:
            self._started = self._clock()
        self._open += 1
        plan = self._roots[root] = _RootPlan(next_call=self._config.skip_steps)
        return plan
