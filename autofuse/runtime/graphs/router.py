"""The router: which callable each node of a graph runs, per shape signature.

In: a `Program`, and a `RouterHost` that knows decisions and loaded kernels. Out: a callable graph. Guarantee: one dict
look-up per call finds the plan of all nodes. Plans change between calls by replacing one tuple, without a lock on the
call path. Unknown or failed nodes run eager's kernels. Nothing changes during CUDA graph capture: loaded kernels are
launched, and a new plan runs eager's kernels and is settled later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from autofuse.debug import Level, tell
from autofuse.errors import AutofuseError
from autofuse.gpu import capturing
from autofuse.ir.composites import has_librarys
from autofuse.locks import make_lock
from autofuse.runtime.graphs.choice import Choice, RouterHost
from autofuse.runtime.graphs.debug_texts import routes_text
from autofuse.runtime.graphs.injector import INJECTOR
from autofuse.runtime.graphs.live_races import HeldOutPlan
from autofuse.runtime.graphs.loss_guard import fall_back_to_eager, refuses
from autofuse.runtime.graphs.plans import NodeState, Plan, PlanScope, Replay, Timer, Untimed, cover
from autofuse.runtime.graphs.step_records import GraphCall, Stopwatch
from autofuse.runtime.graphs.usage import Usage
from autofuse.runtime.roots.steps import PlanLog
from autofuse.strategies.joint_attention import forward_call
from autofuse.strategies.sdpa_training_match import SDPA_TRAINING
from autofuse.wrapper.graph_call import Program
from autofuse.wrapper.node_call import Composed, NodeCall, is_out_of_bounds, make_launcher, repeat

# So many plans check the inputs of a node's first call; one graph gives sizes and strides for all plans.
TRUSTED_AFTER = 4


MakeReplay = Callable[[Program, str, Plan], Replay]


class SharedKey(NamedTuple):
    """The key by which nodes share a callable."""

    place: int  # the place of use
    values: tuple[int, ...]  # of the node's symbols
    tag: str  # of the kernel
    threads: int


class GraphRouter:
    """One captured graph with its plans."""

    def __init__(
        self,
        program: Program,
        host: RouterHost,
        phase: str,
        clock: Callable[[], float],
        make_timer: Callable[[torch.device], Timer] = Untimed,
        times: int = 1,
        replay: MakeReplay | None = None,
    ) -> None:
        """``make_timer(device)``: timer for a node on a GPU, where the host's clock only measures the launch;
        ``times``: calls of this graph in one call of the captured root. ``replay``: makes the CUDA graph of a plan."""
        self.program = program
        self.host = host
        self.phase = phase  # "forward", "backward" or "inference"
        self.times = times
        self.on_gpu = any(slot.device.type != "cpu" for slot in program.slots)
        self.plans: dict[tuple[int, ...], Plan] = {}  # settled plans: found without a query
        self.pending: dict[tuple[int, ...], Plan] = {}
        self.past = Usage()  # counters of evicted plans
        self.lookup: dict[tuple[int, ...], Plan] | _Noting = self.plans  # the dict in which calls find their plan
        self._logs: tuple[PlanLog, ...] = ()  # in which it is noted which plans run
        self._clock = clock
        self._boxed_call = True  # AOTAutograd: args is a list that the callee empties
        self._lock = make_lock()  # held to create and change plans, never in a call
        # Groups first: members of a group that runs as a whole are not queried.
        self._order = sorted(range(len(program.slots)), key=lambda index: not program.slots[index].is_group)
        self._places: dict[str, list[int]] = {}  # of each node and group, by its fusion_id
        for index, slot in enumerate(program.slots):
            self._places.setdefault(slot.node.fusion_id, []).append(index)
        self._groups = frozenset(slot.node.fusion_id for slot in program.slots if slot.is_group)
        symbols = list(dict.fromkeys(slot.symbols for slot in program.slots))
        replayed = partial(replay, program, phase) if replay is not None and not program.one_by_one else None
        self._scope = PlanScope(program, symbols, _alike(program), self.on_gpu, make_timer, replayed)
        # By code and sizes: equal layers share callables, and so do shapes that differ only in sizes that a node does
        # not use.
        self._fused: dict[SharedKey, NodeCall] = {}
        self._failed: set[SharedKey] = set()
        self._lost: set[SharedKey] = set()  # kernels that are slower than the script's own
        self._kept: dict[
            tuple[int, str], dict[str, Any]
        ] = {}  # data that entries keep for a place of use, by place and tag
        self._checked: dict[int, int] = {}  # checked first calls of a node without a problem, by its place

    def __call__(self, args: list[Any]) -> Any:
        if self.host.sample_due(self) and not self._stands_still():
            return self._timed(args)
        return self.program.call(self.lookup, self.plan_for, args)

    def _timed(self, args: list[Any]) -> Any:
        watch = Stopwatch()
        recorder = _Recorder(self, watch)
        start = self._clock()
        result = self.program.timed_call(recorder, self.plan_for, args, watch)
        ended = perf_counter()
        plan, times = recorder.plan, watch.times(len(self.program.slots))
        assert plan is not None
        seconds = self._clock() - start
        if not self.on_gpu:
            self.host.note_timed(bool(recorder.held))
        if not recorder.held:  # else it is no call as those that are not timed
            plan.add_sample(seconds, times)
            self.host.note_call(GraphCall.of(self, plan, watch, ended))
        if self.host.live_races is not None and not self.on_gpu:
            self.host.live_races.add(plan, recorder.held, times)
        return result

    def all_plans(self) -> Iterator[Plan]:
        yield from list(self.plans.values())
        yield from list(self.pending.values())

    def calls(self) -> int:
        """Calls of the graph so far."""
        return self.past.calls + sum(plan.count for plan in self.all_plans())

    def add_usage(self, usage: Usage, yield_gil: Callable[[], None] = lambda: None) -> None:
        """Count all plans, evicted ones too; ``yield_gil`` is called between them."""
        with self._lock:
            usage.merge(self.past)
            plans = list(self.all_plans())
        for plan in plans:
            yield_gil()
            usage.add(plan)

    def let_go(self, plans: Sequence[Plan]) -> None:
        """Evict plans, but keep their counters."""
        with self._lock:
            for plan in plans:
                plan.close()
                self.past.add(plan)
                self.plans.pop(plan.key, None)
                self.pending.pop(plan.key, None)
            self.past.forget_rare_shapes()
            self._scope.unfused.clear()  # remaining plans have their own
            self._fused.clear()

    def note_plans(self, log: PlanLog) -> None:
        """From now on, note which plans run, until `stop_noting` or until the log is full."""
        self._logs = (*self._logs, log)
        self.lookup = _Noting(self)

    def stop_noting(self, log: PlanLog) -> None:
        self._logs = tuple(other for other in self._logs if other is not log)
        if not self._logs:
            self.lookup = self.plans

    def _note(self, plan: Plan) -> None:
        for log in self._logs:
            if not log.add(plan):
                self.stop_noting(log)

    def _stands_still(self) -> bool:
        """Whether a CUDA graph capture is under way, so that nothing may change or be measured."""
        return self.on_gpu and capturing.is_capturing()

    def plan_for(self, key: tuple[int, ...]) -> Plan:
        """The plan for the values of the graph's symbols, which may still change; made where there is none."""
        plan = self.pending.get(key)
        if plan is None:
            is_new = False
            with self._lock:
                plan = self.pending.get(key) or self.plans.get(key)
                if plan is None:
                    plan = self.pending[key] = Plan(self._scope, key)
                    is_new = True
            if is_new:
                self.host.new_plan(plan)
        self._note(plan)
        if self._stands_still():
            if not plan.calls:
                plan.set_calls(tuple(map(_plain, plan.nodes)))
            return plan
        # Without callables where another thread has only begun to resolve it.
        if not plan.is_resolved or (plan.nodes and not plan.calls):
            plan.is_resolved = True
            self.refresh(plan)
        if self.host.settle_plan(plan):
            with self._lock:
                if self.pending.get(key) is plan:
                    self.plans[key] = self.pending.pop(key)
        return plan

    def run_in_c(self) -> None:
        """From now on, plans whose callables stay run in C, where the graph can."""
        if not self.program.native:
            return
        with self._lock:
            for plan in self.all_plans():
                plan.set_calls(plan.calls)

    def concerned(self, fusion_ids: Collection[str] | None) -> Sequence[int]:
        """Nodes that new decisions on these may change, in the order of querying; None: all.

        A group that begins or stops to run as a whole changes its members.
        """
        if fusion_ids is None or any(f in self._groups for f in fusion_ids):
            return self._order
        return [index for f in fusion_ids for index in self._places.get(f, ())]

    def refresh(self, plan: Plan, concerned: Sequence[int] | None = None) -> bool:
        """Resolve the plan's nodes, or those ``concerned``, again; returns whether a callable changed."""
        with self._lock:
            calls: list[NodeCall | None] = list(plan.calls) or [None] * len(plan.nodes)
            choices: dict[tuple[int, tuple[int, ...]], Choice] = {}
            changed = not plan.calls
            for index in self._order if concerned is None or changed else concerned:
                node = plan.nodes[index]
                plan.open.discard(index)
                if node.broken or node.covered:
                    continue
                key = (node.alike, node.values)
                if key not in choices:
                    choices[key] = self.host.choose(node.fusion_id, node.values, node.slot.device)
                choice = _usable(node, choices[key])
                if not choice.known:
                    plan.open.add(index)
                tag = choice.tag if choice.entry is not None else ""
                if tag and tag == node.lost:
                    tag, choice = "", Choice(known=True)
                if not choice.known or (tag == node.tag and choice.in_one == node.in_one):
                    continue
                node.in_one = choice.in_one
                try:
                    calls[index] = self._callable(plan, index, node, choice)
                    if node.broken or (tag and tag == node.lost):  # its kernel has failed in another plan, or has lost
                        node.in_one, tag = False, ""
                except Exception as error:  # whatever it is, eager is there; a plan has to be whole
                    node.broken, node.in_one = True, False
                    self.host.node_failed(node, _problem_of(error))
                    calls[index], tag = _plain(node), ""
                _account(plan, node, tag)
                changed = True
            if changed:
                _put(plan, calls)
        if changed:
            tell(Level.ROUTES, lambda: routes_text(self.phase, self.program.symbols, plan))
        return changed

    def _callable(self, plan: Plan, index: int, node: NodeState, choice: Choice) -> NodeCall | None:
        node.fused = None
        if choice.entry is None:
            return node.unfused if choice.in_one else _plain(node)

        def settle(problem: str | None) -> None:
            if self._stands_still():
                return
            with self._lock:
                if problem is None and node.slot.half is None and node.fused is not fused:
                    return  # given up meanwhile by a node that shares the kernel, or decided again
                self._checked[index] = self._checked.get(index, 0) + (problem is None)
                calls = list(plan.calls)
                calls[index] = self.host.wrap(node, fused) if problem is None else _given_up(plan, node)
                _put(plan, calls)
            if problem is not None:
                self.host.node_failed(node, problem)

        if node.slot.half is not None:
            sizes = {str(s): value for s, value in zip(node.slot.symbols, node.values, strict=True)}
            return forward_call(node.slot.half.pair, sizes, lambda error: settle(_text_of(error)))
        shared = self._shared(index, node, choice)
        if shared is None:
            node.broken = node.lost != choice.tag
            return _plain(node)
        node.fused = fused = shared
        if self._checked.get(index, 0) >= TRUSTED_AFTER:
            return self.host.wrap(node, fused)
        return INJECTOR.checked_call(node.form, node.values, fused, node.unfused, settle, node.slot.device)

    def _shared(self, index: int, node: NodeState, choice: Choice) -> NodeCall | None:
        """The callable of a kernel, shared by nodes with the same code and sizes unless it keeps data for a place.

        None for a failed kernel, and for one that is slower than the script's own.
        """
        assert choice.entry is not None
        place = index if isinstance(choice.entry, Composed) and choice.entry.keeps else node.alike
        key = SharedKey(place, node.values, choice.tag, self.host.threads)
        if key in self._lost:
            node.lost = choice.tag
        if key in self._failed or key in self._lost:
            return None
        if key in self._fused:
            return self._fused[key]
        unfused = node.unfused

        def failed(error: Exception, *inputs: Any) -> Any:
            # a script may recover from one with a smaller batch, from the other with other indices
            if not _is_out_of_memory(error) and not is_out_of_bounds(error):
                self._give_up(key, fused, _text_of(error))
            return repeat(unfused, *inputs)

        is_odd = node.slot.device.type == "cpu" and bool(refuses(node.form))
        fused = make_launcher(
            node.form,
            choice.entry,
            node.values,
            self.host.threads,
            failed=failed,
            reuse=() if is_odd else self.program.reuse.get(index, ()),  # its inputs may be needed again
            kept=self._kept.setdefault((place, choice.tag), {}),
        )
        if has_librarys(node.form):
            apart = make_launcher(node.form, choice.entry, node.values, self.host.threads)  # which keeps its inputs
            if self.host.keeps_own(node, apart, choice.tag):
                self._lost.add(key)
                node.lost = choice.tag
                return None
        if is_odd:
            fused = fall_back_to_eager(node.form, fused, unfused)
        self._fused[key] = fused
        return fused

    def _give_up(self, key: SharedKey, fused: NodeCall, problem: str) -> None:
        """Give up a failed kernel: all nodes that share its callable run eager from now on."""
        if self._stands_still():
            return
        with self._lock:
            self._failed.add(key)
            found = [(plan, i) for plan in self.all_plans() for i, node in enumerate(plan.nodes) if node.fused is fused]
            for plan, index in found:
                calls = list(plan.calls)
                calls[index] = _given_up(plan, plan.nodes[index])
                _put(plan, calls)
        if found:
            plan, index = found[0]
            self.host.node_failed(plan.nodes[index], problem)


def _alike(program: Program) -> tuple[int, ...]:
    """For each slot, the first slot with the same code: the same form, device and memory to write to."""
    first: dict[Any, int] = {}
    found = []
    for index, slot in enumerate(program.slots):
        key = (slot.node.fusion_id, slot.device, slot.is_group, slot.half is None, program.reuse.get(index, ()))
        found.append(first.setdefault(key, index))
    return tuple(found)


def _account(plan: Plan, node: NodeState, tag: str) -> None:
    """Close the counter of the present choice and begin that of the next."""
    node.fused_before = plan.fused_calls(node)
    node.since = plan.count
    node.tag = tag
    for index in node.slot.members:
        cover(plan, plan.nodes[index], bool(tag) or node.in_one)


def _given_up(plan: Plan, node: NodeState) -> NodeCall | None:
    """The callable of a node that stays in eager for good."""
    node.broken, node.fused = True, None
    _account(plan, node, "")
    return _plain(node)


def _put(plan: Plan, calls: Sequence[NodeCall | None]) -> None:
    """Change a callable of a plan, from its next call on."""
    plan.set_calls(_filled(plan, calls))
    plan.fused_nodes = sum(1 for node in plan.nodes if node.tag and not node.covered)


def _is_out_of_memory(error: Exception) -> bool:
    # Out of memory on a CPU is a plain RuntimeError (torch 2.13).
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _problem_of(error: Exception) -> str:
    return str(error) if isinstance(error, AutofuseError) else _text_of(error)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _usable(node: NodeState, choice: Choice) -> Choice:
    """A half of an attention may only run torch's own strategy: strategies for both passes cannot run one pass."""
    strategy = getattr(choice.entry, "strategy", None)
    if node.slot.half is None or not choice.known or (strategy is not None and strategy.name == SDPA_TRAINING):
        return choice
    return Choice(known=True)


def _plain(node: NodeState) -> NodeCall | None:
    """The callable without a kernel: eager's operations; parts of a group have callables of their own."""
    return None if node.slot.is_group else node.unfused


def _filled(plan: Plan, calls: Sequence[NodeCall | None]) -> tuple[NodeCall | None, ...]:
    """The callables, with eager's operations for nodes without a choice that no group covers."""
    nodes = zip(plan.nodes, calls, strict=True)
    return tuple(_plain(node) if call is None and not node.covered else call for node, call in nodes)


class _Recorder:
    """Replaces the dict of plans in a timed call, to record which plan ran, and which of its nodes were held out."""

    def __init__(self, router: GraphRouter, watch: Stopwatch) -> None:
        self.plan: Plan | None = None
        self.held: frozenset[int] = frozenset()
        self._router = router
        self._watch = watch

    def get(self, key: tuple[int, ...]) -> Plan | HeldOutPlan:
        router = self._router
        plan = self.plan = router.lookup.get(key) or router.plan_for(key)
        plan.start_sample()
        if router.host.live_races is not None and not router.on_gpu:
            self.held = router.host.live_races.held_out(plan)
        found = HeldOutPlan(plan, self.held) if self.held else plan
        self._watch.begin()
        return found


class _Noting:
    """Replaces the dict of plans while it is recorded which plans run."""

    def __init__(self, router: GraphRouter) -> None:
        self._router = router

    def get(self, key: tuple[int, ...]) -> Plan | None:
        plan = self._router.plans.get(key)
        if plan is not None:
            self._router._note(plan)
        return plan
