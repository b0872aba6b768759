"""The router: which callable each node of a graph runs, per shape signature.

In: a `Program`, and a `Catalogue` that answers what is decided and loaded. Out: a callable graph.
Guarantee: one dict look-up a call finds the plan of all nodes; plans change between calls by replacing
one tuple, without a lock on the path; anything unknown or failed runs eager's kernels.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autofuse.ir.operation import NodeForm
from autofuse.runtime.launch import NodeCall, make_checked, make_launcher, make_unfused, node_symbol_values
from autofuse.runtime.program import NodeSlot, Program

# Live times of this many sampled calls are kept for each node of a plan.
KEPT_SAMPLES = 32


@dataclass(frozen=True)
class Choice:
    """What the catalogue says about a node in one shape."""

    known: bool  # a decision exists, for or against fusing
    entry: Callable[..., None] | None = None  # the loaded kernel of the winner, None for eager
    tag: str = ""  # tells one kernel from another


UNKNOWN = Choice(known=False)


class Catalogue(Protocol):
    """What the router asks of the session. All of it in memory; none of it may block, but `settle_plan`."""

    @property
    def threads(self) -> int: ...

    def choose(self, fusion_id: str, values: Sequence[int]) -> Choice: ...

    def node_failed(self, node: NodeState, problem: str) -> None: ...

    def settle_plan(self, plan: Plan) -> bool:
        """Called before a plan runs that may still change; True once it need not be asked again."""

    def new_plan(self, plan: Plan) -> None: ...

    def sample_due(self) -> bool: ...

    def wrap(self, node: NodeState, fused: NodeCall, unfused: NodeCall) -> NodeCall: ...


@dataclass(eq=False)
class NodeState:
    """One node of one plan: its callables and counters."""

    slot: NodeSlot
    form: NodeForm
    fusion_id: str
    values: tuple[int, ...]  # of the node's own symbols
    unfused: NodeCall
    tag: str = ""  # kernel in use, "" for eager
    broken: bool = False  # failed once in this plan: eager for good
    fused_before: int = 0  # calls on a fused kernel under earlier choices
    since: int = 0  # the plan's count when the present choice began


class Plan:
    """All nodes of one graph resolved for one shape signature."""

    def __init__(self, router: GraphRouter, key: tuple[int, ...]) -> None:
        self.router = router
        self.key = key
        self.count = 0  # calls; the generated code counts
        self.seen = 0  # calls that the step statistics have taken note of
        self.fused_nodes = 0
        program = router.program
        graph_values = dict(zip(program.symbols, key, strict=True))
        self.nodes: list[NodeState] = []
        for slot in program.slots:
            values = node_symbol_values(slot.symbols, graph_values)
            form = slot.node.form
            self.nodes.append(NodeState(slot, form, slot.node.fusion_id, values, make_unfused(form, values)))
        self.calls: tuple[NodeCall, ...] = tuple(node.unfused for node in self.nodes)
        self.samples: list[tuple[float, list[float]]] = []  # (seconds of the graph, seconds of each node)

    def fused_calls(self, node: NodeState) -> int:
        """Calls of the node that ran a fused kernel so far."""
        return node.fused_before + (self.count - node.since if node.tag else 0)

    def add_sample(self, seconds: float, times: list[float]) -> None:
        if len(self.samples) >= KEPT_SAMPLES:
            self.samples.pop(0)
        self.samples.append((seconds, times))

    def live_us(self, index: int) -> float:
        """Median of the sampled calls of one node, 0.0 without samples."""
        times = [times[index] for _, times in self.samples]
        return statistics.median(times) * 1e6 if times else 0.0

    def graph_us(self) -> float:
        return statistics.median(s for s, _ in self.samples) * 1e6 if self.samples else 0.0


class GraphRouter:
    """One captured graph with its plans."""

    def __init__(self, program: Program, catalogue: Catalogue, phase: str, clock: Callable[[], float]) -> None:
        self.program = program
        self.catalogue = catalogue
        self.phase = phase  # "forward", "backward" or "inference"
        self.plans: dict[tuple[int, ...], Plan] = {}  # settled: found without asking
        self.pending: dict[tuple[int, ...], Plan] = {}
        self._clock = clock
        self._boxed_call = True  # AOTAutograd: args is a list that the callee empties
        self._lock = threading.Lock()  # guards creation and change, never a call

    def __call__(self, args: list[Any]) -> Any:
        if self.catalogue.sample_due():
            return self._timed(args)
        return self.program.call(self.plans, self._miss, args)

    def _timed(self, args: list[Any]) -> Any:
        times = [0.0] * len(self.program.slots)
        used: list[Plan] = []
        start = self._clock()
        result = self.program.timed_call(_Recorder(self, used), self._miss, args, times)
        used[-1].add_sample(self._clock() - start, times)
        return result

    def all_plans(self) -> Iterator[Plan]:
        yield from list(self.plans.values())
        yield from list(self.pending.values())

    def _miss(self, key: tuple[int, ...]) -> Plan:
        plan = self.pending.get(key)
        if plan is None:
            with self._lock:
                plan = self.pending.get(key) or self.plans.get(key)
                if plan is None:
                    plan = Plan(self, key)
                    self.pending[key] = plan
                    self.catalogue.new_plan(plan)
            self.refresh(plan)
        if self.catalogue.settle_plan(plan):
            with self._lock:
                self.plans[key] = plan
                self.pending.pop(key, None)
        return plan

    def refresh(self, plan: Plan) -> bool:
        """Resolve the plan's nodes anew; returns whether a callable changed."""
        with self._lock:
            calls = list(plan.calls)
            changed = False
            for index, node in enumerate(plan.nodes):
                if node.broken:
                    continue
                choice = self.catalogue.choose(node.fusion_id, node.values)
                tag = choice.tag if choice.entry is not None else ""
                if not choice.known or tag == node.tag:
                    continue
                calls[index] = self._callable(plan, index, node, choice)
                self._account(plan, node, tag)
                changed = True
            if changed:
                plan.calls = tuple(calls)
            return changed

    def _callable(self, plan: Plan, index: int, node: NodeState, choice: Choice) -> NodeCall:
        if choice.entry is None:
            return node.unfused

        def failed(error: Exception, *inputs: Any) -> Any:
            settle(f"{type(error).__name__}: {error}")
            return node.unfused(*inputs)

        def settle(problem: str | None) -> None:
            with self._lock:
                calls = list(plan.calls)
                calls[index] = self.catalogue.wrap(node, fused, node.unfused) if problem is None else node.unfused
                plan.calls = tuple(calls)
                if problem is not None:
                    node.broken = True
                    self._account(plan, node, "")
            if problem is not None:
                self.catalogue.node_failed(node, problem)

        fused = make_launcher(node.form, choice.entry, node.values, self.catalogue.threads, failed=failed)
        return make_checked(node.form, node.values, fused, node.unfused, settle)

    @staticmethod
    def _account(plan: Plan, node: NodeState, tag: str) -> None:
        """Close the counter of the present choice and begin the next."""
        node.fused_before = plan.fused_calls(node)
        node.since = plan.count
        node.tag = tag
        plan.fused_nodes = sum(1 for n in plan.nodes if n.tag)


class _Recorder:
    """Stands in for the dict of plans in a timed call, to learn which plan ran."""

    def __init__(self, router: GraphRouter, used: list[Plan]) -> None:
        self._router = router
        self._used = used

    def get(self, key: tuple[int, ...]) -> Plan:
        plan = self._router.plans.get(key) or self._router._miss(key)
        self._used.append(plan)
        return plan
