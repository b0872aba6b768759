"""Plans: the callables and counters of a graph's nodes in one shape.

In: a graph's slots, the values of its symbols. Out: the callables that the generated code unpacks, counts of calls and
times of sampled ones. Guarantee: counters never decrease, whatever a node is switched to.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autofuse.ir.buckets import bucket_of
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket
from autofuse.ir.shape import Dim
from autofuse.runtime.graphs.injector import INJECTOR
from autofuse.wrapper.graph_call import NodeSlot, Program
from autofuse.wrapper.native_call import native_call
from autofuse.wrapper.native_library import installed
from autofuse.wrapper.node_call import NodeCall, node_symbol_values

# Live times of this many sampled calls are kept for each node of a plan.
GRAPH = -1  # the number under which a plan keeps the times of all of it
KEPT_SAMPLES = 32
_numbers = itertools.count()


# A plan is written down for C at this call with the same callables: that takes as long as some hundred calls gain.
NATIVE_AFTER = 6


class _Waiting:
    """In place of a plan's call in C, until the plan has been called often enough."""

    def __init__(self, program: Program, plan: Plan) -> None:
        self._program = program
        self._plan = plan
        self._calls = plan.calls
        self._left = NATIVE_AFTER

    def __call__(self, args: list[Any]) -> Any:
        plan = self._plan
        self._left -= 1
        if self._left > 0:
            return None
        run = native_call(self._program, plan.key, self._calls) if plan.calls is self._calls else None
        if plan.native is self:
            plan.native = run
        return None if run is None else run(args)


class Timer(Protocol):
    """Measures one node of a GPU by events on its stream, call after call; none of it may synchronise."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def poll(self) -> Sequence[float]:
        """Seconds of the pairs of events that have finished since the last call."""


class Replay(Protocol):
    """The plan's call as a CUDA graph, see `runtime.replays.plan_replay`."""

    def __call__(self, args: list[Any]) -> Any:
        """The results; None where the call is to be launched one by one."""

    def close(self) -> None:
        """The plan has other callables, or is gone."""

    @property
    def is_chosen(self) -> bool:
        """Whether the CUDA graph has won."""


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


@dataclass(eq=False, slots=True)
class NodeState:
    """One node of one plan: its callables and counters."""

    slot: NodeSlot
    form: NodeForm
    fusion_id: str
    values: tuple[int, ...]  # of the node's own symbols
    alike: int  # the first slot of the graph with the same code
    shared: dict[tuple[int, tuple[int, ...]], NodeCall]  # eager's operations, by first slot and values
    fused: NodeCall | None = None  # the kernel's callable in use, which other nodes may share
    tag: str = ""  # kernel in use, "" for eager
    in_one: bool = False  # a group that runs eager's operations, without its members' kernels
    broken: bool = False  # failed once in this plan: eager for good
    lost: str = ""  # the kernel that was slower than the script's own; another one may still run
    fused_before: int = 0  # calls on a fused kernel under earlier choices
    since: int = 0  # the plan's count when the present choice began
    covered: bool = False  # part of a group that runs as a whole: not called at all
    idle_before: int = 0  # calls of the plan that went to such a group instead
    covered_at: int = 0  # the plan's count when that began
    skipped_by: int | None = None  # the half of an attention that may run in place of the group
    _bucket: Bucket | None = field(default=None, repr=False)

    @property
    def bucket(self) -> Bucket:
        """The bucket of its values."""
        if self._bucket is None:
            self._bucket = bucket_of(self.values)
        return self._bucket

    @property
    def unfused(self) -> NodeCall:
        """Eager's operations, made on first use: most plans run kernels."""
        key = (self.alike, self.values)
        call = self.shared.get(key)
        if call is None:
            call = self.shared[key] = INJECTOR.fallback_at(self.form, self.values, self.slot.device)
        return call


@dataclass(frozen=True, slots=True)
class PlanScope:
    """Data that all plans of one graph share."""

    program: Program
    symbols: Sequence[tuple[Dim, ...]]  # of its slots, each once
    alike: tuple[int, ...]  # for each slot, the first one that runs the same code
    on_gpu: bool
    make_timer: Callable[[torch.device], Timer]
    replay: Callable[[Plan], Replay] | None = None  # None: nothing is replayed
    # Eager's operations, by such a slot and values.
    unfused: dict[tuple[int, tuple[int, ...]], NodeCall] = field(default_factory=dict)


class Plan:
    """All nodes of one graph, resolved for one shape signature."""

    def __init__(self, scope: PlanScope, key: tuple[int, ...]) -> None:
        self._scope = scope
        self.key = key
        self.number = next(_numbers)  # of all plans, in the order they were made
        self.count = 0  # calls; the generated code counts
        self.count_before = 0  # calls at the last eviction
        self.fused_nodes = 0
        self.version = 0  # changes of its callables so far
        self.skipped = [0] * len(scope.program.skips)  # calls in which half of an attention ran as a whole
        self.is_resolved = False  # the catalogue has been queried about its nodes
        program = scope.program
        graph_values = dict(zip(program.symbols, key, strict=True))
        values = {symbols: node_symbol_values(symbols, graph_values) for symbols in scope.symbols}
        self.nodes = [
            NodeState(slot, slot.node.form, slot.node.fusion_id, values[slot.symbols], alike, scope.unfused)
            for slot, alike in zip(program.slots, scope.alike, strict=True)
        ]
        for number, members in enumerate(program.skips):
            for index in members:
                self.nodes[index].skipped_by = number
        # A group without a callable runs its nodes and matmuls one by one. Empty until the first call.
        self.calls: tuple[NodeCall | None, ...] = ()
        # The same in C, see `wrapper.native_call`, or as a CUDA graph.
        self.native: Callable[[list[Any]], Any] | None = None
        self._replay: Replay | None = None
        self.open: set[int] = set()  # nodes that can run and for which the catalogue knows no decision
        self.is_asked = False  # all of these have been handed to the tuner
        # Of the graph's symbols: until tuning is asked for, calls of all plans in it are added up. Decisions go by the
        # buckets of nodes. A number that the graph takes besides sizes may be negative.
        self.bucket = bucket_of([max(value, 0) for value in key])
        # Seconds of sampled calls, of each node and of the graph, which is measured only where all of it is on a CPU.
        # Most plans are never sampled: what each of them kept in malloc's heap would lie between the script's tensors.
        self._times: dict[int, deque[float]] = {}
        # Of the nodes of GPUs; the generated code starts and stops them.
        self.timers: dict[int, Timer] = {}

    def set_calls(self, calls: tuple[NodeCall | None, ...]) -> None:
        """Change the callables, from the next call on."""
        self.calls = calls
        self.version += 1
        scope = self._scope
        if scope.replay is not None:
            self.close()
            self.native = self._replay = scope.replay(self)
            return
        program = scope.program
        self.native = _Waiting(program, self) if program.native and installed() is not None else None

    def close(self) -> None:
        """Let go of its CUDA graph."""
        if self._replay is not None:
            self._replay.close()

    @property
    def as_it_runs(self) -> tuple[int, int, bool]:
        """See `root_steps.RanPlans`."""
        return self.number, self.version, self._replay is not None and self._replay.is_chosen

    @property
    def is_decided(self) -> bool:
        """Whether the catalogue knows a decision for every node that can run."""
        return self.is_resolved and not self.open

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
        """Before a timed call, collect the finished GPU measurements of earlier calls."""
        for index, node in enumerate(self.nodes):
            if node.slot.device.type != "cpu":
                if index not in self.timers:
                    self.timers[index] = self._scope.make_timer(node.slot.device)
                self._times_of(index).extend(self.timers[index].poll())

    def add_sample(self, seconds: float, times: list[float]) -> None:
        """Wall times of a call: of the graph, and of the nodes that run on a CPU."""
        for index, node in enumerate(self.nodes):
            if node.slot.device.type == "cpu":
                self._times_of(index).append(times[index])
        if not self._scope.on_gpu:
            self._times_of(GRAPH).append(seconds)

    def _times_of(self, index: int) -> deque[float]:
        if index not in self._times:
            self._times[index] = deque(maxlen=KEPT_SAMPLES)
        return self._times[index]

    def live_us(self, index: int) -> float:
        """Median of the sampled calls of one node, 0.0 without samples."""
        return _median_us(self._times.get(index, ()))

    def graph_us(self) -> float:
        return _median_us(self._times.get(GRAPH, ()))


def _median_us(seconds: Collection[float]) -> float:
    found = list(seconds)
    return statistics.median(found) * 1e6 if found else 0.0


def cover(plan: Plan, member: NodeState, covered: bool) -> None:
    """Note that a group begins or stops running in place of a node."""
    if covered == member.covered:
        return
    if covered:
        member.fused_before, member.covered_at = plan.fused_calls(member), plan.count
    else:
        member.idle_before, member.since = plan.count - plan.calls_of(member), plan.count
    member.covered = covered
