"""The router: which callable each node of a graph runs, per shape signature.

In: a `Program`, and a `Catalogue` that answers what is decided and loaded. Out: a callable graph.
Guarantee: one dict look-up a call finds the plan of all nodes; plans change between calls by replacing
one tuple, without a lock on the path; anything unknown or failed runs eager's kernels. While the script records a CUDA
graph everything stands still: what is loaded is launched, a new plan runs eager's kernels and is settled later.
"""

from __future__ import annotations

import functools
import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autofuse.errors import DeviceError, ShapeError
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket
from autofuse.runtime.gpu import capturing
from autofuse.runtime.halves import forward_call
from autofuse.runtime.launch import Entry, NodeCall, make_checked, make_launcher, make_unfused, node_symbol_values
from autofuse.runtime.program import NodeSlot, Program
from autofuse.tuner.buckets import bucket_of
from autofuse.ways.training import SDPA_TRAINING

# Live times of this many sampled calls are kept for each node of a plan.
KEPT_SAMPLES = 32
# First calls of a node, each in another plan, whose inputs were checked; sizes and strides of all come from one graph.
TRUSTED_AFTER = 4


@dataclass(frozen=True)
class Choice:
    """What the catalogue says about a node in one shape."""

    known: bool  # a decision exists, for or against fusing
    entry: Entry | None = None  # the loaded kernel of the winner, None for eager
    tag: str = ""  # tells one kernel from another
    in_one: bool = False  # eager, and a group as a whole: its parts lost against eager's operations in their order


UNKNOWN = Choice(known=False)


class Timer(Protocol):
    """Measures one node of a GPU by events on its stream, call after call; none of it may synchronise."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def poll(self) -> Sequence[float]:
        """Seconds of the pairs that have finished since the last time."""


class Untimed:
    """A timer that measures nothing."""

    def __init__(self, device: torch.device) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def poll(self) -> Sequence[float]:
        return ()


class Catalogue(Protocol):
    """What the router asks of the session. All of it in memory; none of it may block, but `settle_plan`."""

    @property
    def threads(self) -> int: ...

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice: ...

    def node_failed(self, node: NodeState, problem: str) -> None: ...

    def settle_plan(self, plan: Plan) -> bool:
        """Called before a plan runs that may still change; True once it need not be asked again."""

    def new_plan(self, plan: Plan) -> None: ...

    def sample_due(self) -> bool: ...

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall: ...


@dataclass(eq=False)
class NodeState:
    """One node of one plan: its callables and counters."""

    slot: NodeSlot
    form: NodeForm
    fusion_id: str
    values: tuple[int, ...]  # of the node's own symbols
    tag: str = ""  # kernel in use, "" for eager
    in_one: bool = False  # of a group: runs as eager does, its members' kernels left alone
    broken: bool = False  # failed once in this plan: eager for good
    fused_before: int = 0  # calls on a fused kernel under earlier choices
    since: int = 0  # the plan's count when the present choice began
    covered: bool = False  # part of a group that runs as a whole: not called at all
    idle_before: int = 0  # calls of the plan that went to such a group instead
    covered_at: int = 0  # the plan's count when that began
    skipped_by: int | None = None  # the half of an attention that may run in its place

    @functools.cached_property
    def bucket(self) -> Bucket:
        """The bucket of its values."""
        return bucket_of(self.values)

    @functools.cached_property
    def unfused(self) -> NodeCall:
        """Eager's operations; made where they are needed, since most plans run kernels."""
        return make_unfused(self.form, self.values, self.slot.device)


class Plan:
    """All nodes of one graph resolved for one shape signature."""

    def __init__(self, router: GraphRouter, key: tuple[int, ...]) -> None:
        self.router = router
        self.key = key
        self.count = 0  # calls; the generated code counts
        self.seen = 0  # calls that the step statistics have taken note of
        self.fused_nodes = 0
        self.skipped = [0] * len(router.program.skips)  # calls in which half of an attention ran as a whole
        self.is_resolved = False  # the catalogue has been asked about its nodes
        program = router.program
        graph_values = dict(zip(program.symbols, key, strict=True))
        self.nodes: list[NodeState] = []
        for slot in program.slots:
            values = node_symbol_values(slot.symbols, graph_values)
            self.nodes.append(NodeState(slot, slot.node.form, slot.node.fusion_id, values))
        for number, members in enumerate(program.skips):
            for index in members:
                self.nodes[index].skipped_by = number
        # A group without a callable runs its nodes and products one by one. Empty until the first call.
        self.calls: tuple[NodeCall | None, ...] = ()
        self.open = set(range(len(self.nodes)))  # nodes that can run and for which the catalogue knows no decision
        self.is_asked = False  # all of these have been handed to the tuner
        # Calls of plans of one bucket are added up. A number that the graph takes beside sizes may be negative.
        self.bucket = bucket_of([max(value, 0) for value in key])
        # Seconds of sampled calls, of each node and of the graph, which is measured only where all of it is on a CPU.
        self._node_times = [deque[float](maxlen=KEPT_SAMPLES) for _ in self.nodes]
        self._graph_times = deque[float](maxlen=KEPT_SAMPLES)
        # Of the nodes of GPUs; the generated code starts and stops them.
        self.timers: dict[int, Timer] = {}

    @property
    def is_decided(self) -> bool:
        """Whether the catalogue knows a decision for every node that can run."""
        return not self.open

    def fused_calls(self, node: NodeState) -> int:
        """Calls of the node that ran a fused kernel so far."""
        if node.slot.half is not None:
            return self.skipped[node.slot.half_number]
        done = node.fused_before + (self.count - node.since if node.tag and not node.covered else 0)
        return min(done, self.calls_of(node))

    def calls_of(self, node: NodeState) -> int:
        """Calls of the plan in which the node was called by itself."""
        skipped = self.skipped[node.skipped_by] if node.skipped_by is not None else 0
        return self.count - skipped - node.idle_before - (self.count - node.covered_at if node.covered else 0)

    def start_sample(self) -> None:
        """Before a timed call: what earlier ones measured on GPUs has come in by now."""
        for index, node in enumerate(self.nodes):
            if node.slot.device.type != "cpu":
                if index not in self.timers:
                    self.timers[index] = self.router.make_timer(node.slot.device)
                self._node_times[index].extend(self.timers[index].poll())

    def add_sample(self, seconds: float, times: list[float]) -> None:
        """Wall times of a call: of the graph, and of the nodes that run on a CPU."""
        for index, node in enumerate(self.nodes):
            if node.slot.device.type == "cpu":
                self._node_times[index].append(times[index])
        if not self.router.on_gpu:
            self._graph_times.append(seconds)

    def live_us(self, index: int) -> float:
        """Median of the sampled calls of one node, 0.0 without samples."""
        return _median_us(self._node_times[index])

    def graph_us(self) -> float:
        return _median_us(self._graph_times)


def _median_us(seconds: deque[float]) -> float:
    found = list(seconds)
    return statistics.median(found) * 1e6 if found else 0.0


class GraphRouter:
    """One captured graph with its plans."""

    def __init__(
        self,
        program: Program,
        catalogue: Catalogue,
        phase: str,
        clock: Callable[[], float],
        make_timer: Callable[[torch.device], Timer] = Untimed,
        times: int = 1,
    ) -> None:
        """``make_timer(device)``: of a node that runs on a GPU, where the clock would tell the time to launch it;
        ``times``: calls for one call of what was captured."""
        self.program = program
        self.catalogue = catalogue
        self.phase = phase  # "forward", "backward" or "inference"
        self.times = times
        self.on_gpu = any(slot.device.type != "cpu" for slot in program.slots)
        self.plans: dict[tuple[int, ...], Plan] = {}  # settled: found without asking
        self.pending: dict[tuple[int, ...], Plan] = {}
        self.make_timer = make_timer
        self._clock = clock
        self._boxed_call = True  # AOTAutograd: args is a list that the callee empties
        self._lock = threading.Lock()  # guards creation and change, never a call
        # Groups first: the members of one that runs as a whole are not asked about.
        self._order = sorted(range(len(program.slots)), key=lambda index: not program.slots[index].is_group)
        self._places: dict[str, list[int]] = {}  # of each node and group, by its fusion_id
        for index, slot in enumerate(program.slots):
            self._places.setdefault(slot.node.fusion_id, []).append(index)
        self._groups = frozenset(slot.node.fusion_id for slot in program.slots if slot.is_group)
        self._checked: dict[int, int] = {}  # first calls of a node whose inputs were as promised, by its place

    def __call__(self, args: list[Any]) -> Any:
        if self.catalogue.sample_due() and not self._stands_still():
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

    def _stands_still(self) -> bool:
        """Whether the script records a CUDA graph, so that nothing may change or be measured."""
        return self.on_gpu and capturing.is_capturing()

    def _miss(self, key: tuple[int, ...]) -> Plan:
        plan = self.pending.get(key)
        if plan is None:
            with self._lock:
                plan = self.pending.get(key) or self.plans.get(key)
                if plan is None:
                    plan = Plan(self, key)
                    self.pending[key] = plan
                    self.catalogue.new_plan(plan)
        if self._stands_still():
            if not plan.calls:
                plan.calls = tuple(map(_plain, plan.nodes))
            return plan
        if not plan.is_resolved:
            plan.is_resolved = True
            self.refresh(plan)
        if self.catalogue.settle_plan(plan):
            with self._lock:
                self.plans[key] = plan
                self.pending.pop(key, None)
        return plan

    def concerned(self, fusion_ids: Collection[str] | None) -> Sequence[int]:
        """Nodes that new decisions on these may change, in the order in which they are to be asked; None: all.

        A group that begins or ends to run as a whole changes what its members do.
        """
        if fusion_ids is None or any(f in self._groups for f in fusion_ids):
            return self._order
        return [index for f in fusion_ids for index in self._places.get(f, ())]

    def refresh(self, plan: Plan, concerned: Sequence[int] | None = None) -> bool:
        """Resolve the plan's nodes, or those ``concerned``, anew; returns whether a callable changed."""
        with self._lock:
            calls: list[NodeCall | None] = list(plan.calls) or [None] * len(plan.nodes)
            changed = not plan.calls
            for index in self._order if concerned is None or changed else concerned:
                node = plan.nodes[index]
                plan.open.discard(index)
                if node.broken or node.covered:
                    continue
                choice = _usable(node, self.catalogue.choose(node.fusion_id, node.values, node.slot.device))
                if not choice.known:
                    plan.open.add(index)
                tag = choice.tag if choice.entry is not None else ""
                if not choice.known or (tag == node.tag and choice.in_one == node.in_one):
                    continue
                node.in_one = choice.in_one
                try:
                    calls[index] = self._callable(plan, index, node, choice)
                except (ShapeError, DeviceError) as error:
                    node.broken, node.in_one = True, False
                    self.catalogue.node_failed(node, str(error))
                    calls[index], tag = _plain(node), ""
                self._account(plan, node, tag)
                changed = True
            if changed:
                plan.calls = _filled(plan, calls)
            return changed

    def _callable(self, plan: Plan, index: int, node: NodeState, choice: Choice) -> NodeCall | None:
        if choice.entry is None:
            return node.unfused if choice.in_one else _plain(node)

        def failed(error: Exception, *inputs: Any) -> Any:
            settle(f"{type(error).__name__}: {error}")
            return node.unfused(*inputs)

        def settle(problem: str | None) -> None:
            if self._stands_still():
                return
            with self._lock:
                self._checked[index] = self._checked.get(index, 0) + (problem is None)
                calls = list(plan.calls)
                calls[index] = self.catalogue.wrap(node, fused) if problem is None else _plain(node)
                if problem is not None:
                    node.broken = True
                    self._account(plan, node, "")
                plan.calls = _filled(plan, calls)
            if problem is not None:
                self.catalogue.node_failed(node, problem)

        if node.slot.half is not None:
            sizes = {str(s): value for s, value in zip(node.slot.symbols, node.values, strict=True)}
            return forward_call(node.slot.half.pair, sizes, lambda error: settle(f"{type(error).__name__}: {error}"))
        reuse = self.program.reuse.get(index, ())
        fused = make_launcher(node.form, choice.entry, node.values, self.catalogue.threads, failed=failed, reuse=reuse)
        if self._checked.get(index, 0) >= TRUSTED_AFTER:
            return self.catalogue.wrap(node, fused)
        return make_checked(node.form, node.values, fused, node.unfused, settle, node.slot.device)

    @staticmethod
    def _account(plan: Plan, node: NodeState, tag: str) -> None:
        """Close the counter of the present choice and begin the next."""
        node.fused_before = plan.fused_calls(node)
        node.since = plan.count
        node.tag = tag
        for index in node.slot.members:
            _cover(plan, plan.nodes[index], bool(tag) or node.in_one)
        plan.fused_nodes = sum(1 for n in plan.nodes if n.tag and not n.covered)


def _usable(node: NodeState, choice: Choice) -> Choice:
    """Half of an attention runs only as torch's own: other programs for both passes are no programs for one."""
    way = getattr(choice.entry, "way", None)
    if node.slot.half is None or not choice.known or (way is not None and way.name == SDPA_TRAINING):
        return choice
    return Choice(known=True)


def _plain(node: NodeState) -> NodeCall | None:
    """What runs without a kernel: eager's operations; the parts of a group have callables of their own."""
    return None if node.slot.is_group else node.unfused


def _filled(plan: Plan, calls: Sequence[NodeCall | None]) -> tuple[NodeCall | None, ...]:
    """With eager's operations for nodes that nothing has been chosen for and that no group covers."""
    nodes = zip(plan.nodes, calls, strict=True)
    return tuple(_plain(node) if call is None and not node.covered else call for node, call in nodes)


def _cover(plan: Plan, member: NodeState, covered: bool) -> None:
    """A group begins or ends to run in place of a node."""
    if covered == member.covered:
        return
    if covered:
        member.fused_before, member.covered_at = plan.fused_calls(member), plan.count
    else:
        member.idle_before, member.since = plan.count - plan.calls_of(member), plan.count
    member.covered = covered


class _Recorder:
    """Stands in for the dict of plans in a timed call, to learn which plan ran."""

    def __init__(self, router: GraphRouter, used: list[Plan]) -> None:
        self._router = router
        self._used = used

    def get(self, key: tuple[int, ...]) -> Plan:
        plan = self._router.plans.get(key) or self._router._miss(key)
        plan.start_sample()
        self._used.append(plan)
        return plan
