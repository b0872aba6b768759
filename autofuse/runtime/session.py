"""The session of one script, which connects observer, captured graphs, store and daemon.

In: settings and the script's calls. Out: routed graphs, rows in the store. Guarantee: nothing here raises into the
script. This module builds all parts, and none of them refers to the session: they take the `RunContext` and their other
dependencies. Planner and catalogue are imported when the first graph is captured: sympy, the code generators and the
search for a compiler take 1.5 s, which a script without a graph never pays.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autofuse.codegen.version import versions
from autofuse.daemon.process_id import this_machine
from autofuse.debug import Level, set_level, tell
from autofuse.errors import AutofuseError
from autofuse.gpu.node_timer import NodeTimer
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Bucket, Decision, RunStart, RunTotals, StepSample
from autofuse.ir.strict import strictly
from autofuse.locks import make_lock, make_rlock
from autofuse.preserve_rng import untouched
from autofuse.runtime.graphs.debug_texts import fusion_text, timings_text
from autofuse.runtime.graphs.graph_runner import GraphRunner
from autofuse.runtime.graphs.plan_limit import PlanLimit
from autofuse.runtime.graphs.step_records import GraphCall, RecordedGraph, StepRecords
from autofuse.runtime.graphs.usage import Usage, node_uses, usage_of
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.optimizers.hook import OptimizerHook
from autofuse.runtime.rank_agreement import is_alone
from autofuse.runtime.roots.registry import RootRegistry
from autofuse.runtime.roots.services import USUAL_TOOLS, RootBackend, RootTools
from autofuse.runtime.run_context import RunContext
from autofuse.runtime.store_thread import BUSY_SECONDS, DutyCycle, StoreThread, yield_gil
from autofuse.runtime.tuning_client import TuningClient
from autofuse.settings.layers import Settings, load
from autofuse.stderr import say

if TYPE_CHECKING:
    from autofuse.db.client import StoreClient
    from autofuse.db.store import Store
    from autofuse.runtime.graphs.choice import Choice
    from autofuse.runtime.graphs.live_races import LiveRaces
    from autofuse.runtime.graphs.own_kernels import OwnKernels
    from autofuse.runtime.graphs.plan_cache import PlanCache
    from autofuse.runtime.graphs.planner import Planner
    from autofuse.runtime.graphs.plans import NodeState, Plan
    from autofuse.runtime.graphs.rng_kernels import RngKernels
    from autofuse.runtime.graphs.router import MakeReplay
    from autofuse.wrapper.node_call import NodeCall

PIECES_AT_END = 2  # rows of old runs' details deleted at once: more than a run adds, and quickly done

_current: Session | None = None
_lock = make_lock()


class Session:
    """One process that autofuse watches. `start_session` makes it, `finish` ends it."""

    def __init__(
        self,
        settings: Settings,
        command: str,
        root_backend: RootBackend,
        store: StoreClient | None = None,
        launched: float | None = None,
        tools: RootTools = USUAL_TOOLS,
    ) -> None:
        """``root_backend``: Dynamo's backend for modules that are captured. ``store``: of a process that keeps it;
        without one this process opens the store itself. ``launched``: when the script's process began, by
        ``perf_counter``; the present time where the script already runs. ``tools``: for its roots."""
        began = time.perf_counter()
        set_level(0 if settings.run.quiet else settings.run.debug)
        self._written_refusals = 0
        self._step_records = StepRecords()
        self._live_races: LiveRaces | None = None
        is_held_out = settings.capture.held_out_share > 0.0  # else each call is to run the same kernels
        self._has_live_races = settings.tuner.live_races and is_held_out and not settings.run.is_frozen
        self._finished = False
        self._pid = os.getpid()
        self._exit_code: int | None = None
        self._last_question: tuple[str, ...] | None = None
        self.last_answer: str | None = None  # to the question of `finish`; None where the store gave none
        self._knows_roots = False
        self._loading = make_rlock()
        self._planner: Planner | None = None
        self._draws: RngKernels | None = None
        self._replay: MakeReplay | None = None
        self._own_kernels: OwnKernels | None = None
        changed = settings.for_records()
        which = strictly(versions()) if settings.run.strict else versions()
        start = RunStart(command, cpu_device(), which, settings.run.tune, self._pid, changed, this_machine())
        self._written_calls: dict[tuple[str, Bucket], int] = {}
        self._pace = DutyCycle()
        store_thread = StoreThread(
            store.as_store if store is not None else _opener(settings.run.store),
            not (store.was_there if store is not None else os.path.exists(settings.run.store)),
            start,
            collect=self._collect,
            absorb=self._absorb,
            report=self._lose_store,
        )
        self.context = RunContext(settings, start, store_thread, began, began if launched is None else launched)
        self.kernels = DeviceKernels(self.context)
        self.tuning = TuningClient(
            self.context,
            self.kernels,
            optimizer_requests=lambda: self.optimizers.requests(),
            has_begun=lambda: bool(self.roots.groups or self.roots.graphs or self.context.routers),
        )
        self._plan_limit = PlanLimit(self.context.routers, before=self.tuning.note_leaving)
        self.roots = RootRegistry(self.context, self.kernels, self.tuning, root_backend, self._plan_cache, tools)
        self.optimizers = OptimizerHook(self.context, self.kernels, self.tuning.wait_for)
        self._graph_runner = GraphRunner(self.context, self.kernels, self.optimizers)

    def start(self) -> None:
        self.context.store_thread.start()
        settings = self.context.settings
        if settings.observe.enabled:
            self.roots.install()
        if settings.fusion.enabled and settings.fusion.enable_optimizer:
            self.optimizers.install()

    # ---- what a captured graph needs -------------------------------------------------------------

    @property
    def planner(self) -> Planner:
        """The planner, imported on first use: a run that reads the plans of earlier runs needs none."""
        return self._planner or self._bring_planner()

    @property
    def draws(self) -> RngKernels:
        """Which kernels may compute random numbers; imported on first use."""
        return self._draws or self._bring_draws()

    def _bring_planner(self) -> Planner:
        with self._loading, untouched():
            if self._planner is None:
                from autofuse.runtime.graphs.planner import Planner

                self._planner = Planner(self.context)
            return self._planner

    def _bring_draws(self) -> RngKernels:
        with self._loading, untouched():
            if self._draws is None:
                from autofuse.runtime.graphs.rng_kernels import RngKernels

                self._draws = RngKernels(self.context, self.kernels)
            return self._draws

    def prepare_own_kernels(self) -> None:
        """Before a graph with a library's operator is routed: the background thread, which may race it, imports
        nothing."""
        with self._loading, untouched():
            if self._own_kernels is None:
                from autofuse.runtime.graphs.own_kernels import OwnKernels

                self._own_kernels = OwnKernels(self.context)

    def _plan_cache(self) -> PlanCache:
        with untouched():
            from autofuse.runtime.graphs.plan_cache import PlanCache
        return PlanCache(self.context, self.kernels, self, self.make_timer, lambda: self.draws)

    def make_timer(self, device: torch.device) -> NodeTimer:
        """The timer for one node of a GPU."""
        return NodeTimer(self.roots.timer, device.index)

    @property
    def replay(self) -> MakeReplay | None:
        """Makes the CUDA graph of a plan; None where every plan is launched one by one. Imported on first use."""
        settings = self.context.settings
        if not settings.replay.enabled or settings.run.check:
            return None
        return self._replay or self._bring_replay()

    def _bring_replay(self) -> MakeReplay:
        with self._loading, untouched():
            if self._replay is None:
                from autofuse.gpu.graphs import graph_calls
                from autofuse.runtime.replays.plan_replay import PlanReplay
                from autofuse.runtime.replays.replays import Replays

                context, settings = self.context, self.context.settings
                note, report = context.refusals.append, context.report_fallback
                replays = Replays(settings.replay, settings.tuner.margin, graph_calls(), note, report, context.disturb)
                self._replay = partial(PlanReplay, replays, self.make_timer)
            return self._replay

    # ---- the catalogue, as the router sees it -------------------------------------------------------

    @property
    def threads(self) -> int:
        return self.kernels.threads

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        return self.kernels.choose(fusion_id, values, device)

    def node_failed(self, node: NodeState, problem: str) -> None:
        self.context.say_once("node_failed", f"{node.slot.node.label} runs eager in this run: {problem}")

    def new_plan(self, plan: Plan) -> None:
        """A new plan is no disturbance: where shapes vary without end, new plans are normal."""
        self._plan_limit.add(plan)

    def settle_plan(self, plan: Plan) -> bool:
        return self.tuning.settle(plan)

    def sample_due(self, graph: RecordedGraph) -> bool:
        return self._step_records.is_due(graph)

    def note_call(self, call: GraphCall) -> None:
        self._step_records.add(call)

    def note_timed(self, has_held: bool) -> None:
        self.context.timed_calls += 1
        self.context.held_calls += has_held

    def keeps_own(self, node: NodeState, fused: NodeCall, tag: str) -> bool:
        return self._own_kernels is not None and self._own_kernels.stay(node, fused, tag)

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall:
        if not self.context.settings.run.check:
            return fused
        with untouched():
            from autofuse.runtime.graphs.checking import check_against

        return check_against(node, fused, node.unfused, self.context.say_once)

    @property
    def live_races(self) -> LiveRaces | None:
        """Of kernels on the script's own calls; made for the first timed call, when a job's ranks are known."""
        if self._live_races is None and self._has_live_races:
            with untouched():
                from autofuse.runtime.graphs.live_races import LiveRaces

            self._has_live_races = is_alone()
            if self._has_live_races:
                margin, give_up = self.context.settings.tuner.margin, self.context.store_thread.post_decision
                self._live_races = LiveRaces(margin, self._decision_of, give_up)
        return self._live_races

    def _decision_of(self, node: NodeState) -> Decision | None:
        return self.kernels.decision(node.fusion_id, node.values, node.slot.device)

    def _speedup_of(self, node: NodeState) -> float:
        """Of the node's winner, in its race."""
        decision = self._decision_of(node)
        return decision.speedup if decision is not None else 1.0

    # ---- the background thread ------------------------------------------------------------------------

    def _lose_store(self, kind: str, message: str) -> None:
        """Drop the records that wait to be written: the store is lost."""
        self.context.steps = []
        self.context.say_once(kind, message)

    def _absorb(self, store: Store) -> bool:
        """Read new decisions and their kernels, then update the plans. On the background thread."""
        if not self._knows_roots:
            self._knows_roots = True
            self.roots.known.update(store.roots.known())
            self._read_snapshot(store)
            self.tuning.announce(store)
        found = self.kernels.catalogue.absorb(store) if self.kernels.is_loaded else None
        if found is None:
            return False
        self.tuning.news_at = time.perf_counter()
        self._step_records.note_news()
        self.refresh_plans(found.fusion_ids)
        return found.has_decisions

    def _read_snapshot(self, store: Store) -> None:
        problem = self.context.snapshot.read(store) if self.context.snapshot is not None else ""
        if problem:
            self.context.say_once("snapshot", problem)

    def refresh_plans(self, fusion_ids: Collection[str] | None = None) -> None:
        """Update plans for new decisions on these nodes, on all where None."""
        for router in list(self.context.routers):
            concerned = router.concerned(fusion_ids)
            for plan in router.all_plans() if concerned else ():
                if router.refresh(plan, concerned):
                    self.context.disturbances += 1
                yield_gil()

    def _collect(self, store: Store, run_id: int, final: bool) -> None:
        """Write the counters since the last call. On the background thread."""
        if not final:
            self.tuning.post_new_work()
            self._graph_runner.bring(store)
        context = self.context
        steps, context.steps = context.steps, []
        if steps:
            store.steps.add(run_id, [StepSample(*fields) for fields in steps])
        usage = None
        if final or self._pace.is_due():
            with self._pace.measured():
                usage = usage_of(self.context.routers, in_haste=final)
                self._collect_uses(store, run_id, usage, final)
        new = self.context.refusals[self._written_refusals :]
        if new:
            self._written_refusals += len(new)
            store.notes.add_refusals(run_id, new)
        for record in self.roots.changed_records(final):
            store.roots.put(run_id, record)
        if final:
            store.profiles.put_ops(run_id, self.roots.observer.profiles())
            store.profiles.put_dims(run_id, self.roots.observer.histograms())
            store.runs.finish(run_id, self.totals(usage))
            if self._last_question is not None:
                with contextlib.suppress(Exception):  # the run's results are written by now
                    self.last_answer = store.apply(self._last_question[0], run_id, *self._last_question[1:])
            self._forget_old_runs(store)

    def _forget_old_runs(self, store: Store) -> None:
        """Delete some old details of runs. Everything new is written by now: failures are left to the next run."""
        cache = self.context.settings.cache
        with contextlib.suppress(AutofuseError):
            store.history.prune(cache.history_days, cache.history_bytes, cache.history_runs, PIECES_AT_END)

    def _collect_uses(self, store: Store, run_id: int, usage: Usage, final: bool) -> None:
        uses = [
            *node_uses(usage.nodes.values(), self.context.notes.sources, self.context.step_us_total),
            *self.optimizers.uses(),
        ]
        if not final:  # shares of the run's time change all the time; they are written at its end
            uses = [use for use in uses if self._written_calls.get((use.fusion_id, use.bucket)) != use.calls]
        self._written_calls |= {(use.fusion_id, use.bucket): use.calls for use in uses}
        if uses:
            store.nodes.put_uses(run_id, uses)
        if not final:
            store.runs.update_totals(run_id, self.totals(usage))

    def totals(self, usage: Usage | None = None) -> RunTotals:
        """Totals so far; ``usage``: of the session, if it is known."""
        sums = (usage or usage_of(self.context.routers)).nodes.values()
        fused = sum(total.fused_calls for total in sums)
        return RunTotals(
            steps=self.roots.steps(),
            fused_calls=fused,
            unfused_calls=sum(total.calls for total in sums) - fused,
            observer_seconds=self.roots.observer.cost_seconds,
            run_seconds=time.perf_counter() - self.context.started,
            capture_seconds=self.context.capture_seconds + self.roots.lost_seconds(),
            paused_seconds=self.context.paused_seconds,
            held_out_calls=self.context.held_out_calls,
            exit_code=self._exit_code,
        )

    @property
    def is_stored(self) -> bool:
        """Whether this run's results are in the store."""
        return self.context.store_thread.usable and self.context.store_thread.run_id is not None

    # ---- the end ---------------------------------------------------------------------------------------

    def finish(self, exit_code: int | None, question: tuple[str, ...] | None = None) -> None:
        """Stop observing, write everything, hand over the remaining tuning work.

        ``question``: a function for `Store.apply` and what follows the run's number in its arguments; `last_answer` is
        what it returns once everything is written.
        Does nothing in a forked child, which may call this when it ends: the session is its parent's.
        """
        global _current
        if self._finished or self._pid != os.getpid():
            return
        self._finished = True
        self._exit_code = exit_code if exit_code is not None else 0
        self._last_question = question
        with untouched():
            self.roots.uninstall()
            self.optimizers.uninstall()
            for router in self.context.routers:
                tell(Level.TIMINGS, partial(timings_text, router.phase, router.program.symbols, router.all_plans()))
            if self._planner is not None:
                sums = self._planner.engine.optimizer.get_stats
                tell(Level.PLAN, lambda: fusion_text("in this process", sums()))
            notes, post = self.context.notes, self.context.store_thread.post_event
            notes.post(post)
            with contextlib.suppress(Exception):  # they are worth no more than a line of `autofuse trace`
                self._step_records.post(self._speedup_of, notes.source_of, post)
            if self._live_races is not None and (told := self._live_races.told()) is not None:
                post(told)
            self.tuning.hand_over()
            self.context.store_thread.stop()
            self.tuning.withdraw()
            self.tuning.leave_to_daemon()
            self.roots.end()
        with _lock:
            if _current is self:
                _current = None


def _opener(path: Path) -> Callable[[], Store]:
    """The function by which the background thread opens the store: the thread itself may import nothing."""
    with untouched():
        from autofuse.db.store import Store
    return partial(Store.open, path, timeout_seconds=BUSY_SECONDS)


def start_session(make: Callable[[], Session]) -> Session:
    """Begin to watch this process, unless it is watched already."""
    global _current
    with _lock:
        if _current is not None:
            return _current
        _current = session = make()
    session.start()
    return session


def running_session() -> Session | None:
    """The session of this process, if one goes on."""
    return _current


def current_session(root_backend: RootBackend) -> Session | None:
    """The session of this process; made from the environment where `autofuse run` did not, None if disabled."""
    if _current is not None:
        return _current
    with untouched():
        return _session_from_environment(root_backend)


def _session_from_environment(root_backend: RootBackend) -> Session | None:
    try:
        settings = load()
    except AutofuseError as error:
        say(str(error))
        return None
    if settings.run.disable:
        return None
    for line in settings.warnings:
        say(line)
    try:
        session = start_session(partial(Session, settings, shlex.join(sys.argv) or "python", root_backend))
    except Exception as error:
        say(
            f"the script runs without autofuse ({type(error).__name__}: {error}); 'autofuse doctor' looks for the cause"
        )
        return None
    atexit.register(session.finish, None)
    return session
