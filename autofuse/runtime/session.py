"""The session of one script: what ties observer, captured graphs, store and daemon together.

In: settings and the script's calls. Out: routed graphs, rows in the store.
Guarantee: nothing here raises into the script. Each kind of trouble is said once, in one line on stderr,
and stored as an event; the script goes on with eager's kernels. Planner and catalogue come when the first graph is
captured: they bring sympy, code generators and a look for a compiler, 1.5 s that a script without one never pays.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autofuse.capture.traced import Keeper, is_of_another_version, trace_prefix
from autofuse.codegen.version import versions
from autofuse.daemon.process_id import this_machine
from autofuse.debug import Level, set_level, tell
from autofuse.errors import AutofuseError
from autofuse.gpu.node_timer import NodeTimer
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Bucket, Event, Refusal, RunStart, RunTotals, StepSample
from autofuse.locks import make_lock, make_rlock
from autofuse.preserve_rng import untouched
from autofuse.private_files import PrivateFolder
from autofuse.runtime import root_registry
from autofuse.runtime.debug_texts import timings_text
from autofuse.runtime.graph_metrics_log import GraphMetricsLog
from autofuse.runtime.optim_hook import OptimizerHook
from autofuse.runtime.plan_limit import PlanLimit
from autofuse.runtime.store_thread import BUSY_SECONDS, DutyCycle, StoreThread, yield_gil
from autofuse.runtime.tuning_client import TuningClient
from autofuse.runtime.usage import Usage, node_uses, usage_of
from autofuse.settings.layers import Settings, load
from autofuse.stderr import say

if TYPE_CHECKING:
    from autofuse.db.client import StoreClient
    from autofuse.db.store import Store
    from autofuse.runtime.catalogue import Catalogue
    from autofuse.runtime.choice import Choice
    from autofuse.runtime.device_backends import Place
    from autofuse.runtime.planner import Planner
    from autofuse.runtime.plans import NodeState, Plan
    from autofuse.runtime.rng_kernels import RngKernels
    from autofuse.runtime.router import GraphRouter
    from autofuse.wrapper.node_call import NodeCall

log = logging.getLogger(__name__)

ABSORB_SECONDS = 2.0  # for decisions of a device that has just come into use
PIECES_AT_END = 2  # of old runs' details: more than a run leaves behind, and soon done
SAMPLE_EVERY = 31  # calls of graphs between timed ones; odd, so that forward and backward take turns

RootBackend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

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
    ) -> None:
        """``root_backend``: Dynamo's backend for modules that are captured. ``store``: of a process that keeps it;
        without one this process opens it itself. ``launched``: when the process of the script began, by
        ``perf_counter``; now where the script is under way."""
        set_level(0 if settings.run.quiet else settings.run.debug)
        self.settings = settings
        self.root_backend = root_backend
        self.command = command
        self.device = cpu_device()  # of the run: the machine's CPU; nodes have places of their own
        self.versions = versions()  # what a decision depends on besides the device
        self.mode = "off" if settings.run.frozen else settings.run.tune
        self.started = time.perf_counter()
        self.launched = launched if launched is not None else self.started
        self.disturbances = 0  # captures, pauses and swaps so far; a step that saw one is no sample
        self.capture_seconds = 0.0  # that are on no root's account
        self.noted_seconds = 0.0  # lost to captures of roots, as far as the cause is known at once
        self.planning_seconds = 0.0  # of those
        self.routers: list[GraphRouter] = []
        self.refusals: list[Refusal] = []
        self._written_refusals = 0
        self._marks: set[object] = set()  # who wants to know which plans run
        self.steps: list[tuple[str, str, bool, int, int, float, int]] = []  # of step samples, until they are written
        self._graph_calls = 0
        self._said: Counter[str] = Counter()
        self._finished = False
        self._pid = os.getpid()
        self._exit_code: int | None = None
        self._knows_roots = False
        self._unusable: set[torch.device] = set()
        self._loading = make_rlock()
        self._catalogue: Catalogue | None = None
        self._planner: Planner | None = None
        self._draws: RngKernels | None = None
        self.notes = GraphMetricsLog()
        changed = {name: str(value) for name, value in settings.changed().items()}
        start = RunStart(command, self.device, self.versions, settings.run.tune, self._pid, changed, this_machine())
        self._written_calls: dict[tuple[str, Bucket], int] = {}
        self._pace = DutyCycle()
        self.store_thread = StoreThread(
            store.as_store if store is not None else _opener(settings.run.store),
            not (store.was_there if store is not None else os.path.exists(settings.run.store)),
            start,
            collect=self._collect,
            absorb=self._absorb,
            report=self._lose_store,
        )
        self.tuning = TuningClient(self)
        self._plan_limit = PlanLimit(self.routers, before=self.tuning.note_leaving)
        self.roots = root_registry.RootRegistry(self)
        self.optimizers = OptimizerHook(self)

    def start(self) -> None:
        self.store_thread.start()
        if self.settings.observe.enabled:
            self.roots.install()
        if self.settings.fusion.enabled and self.settings.fusion.enable_optimizer:
            self.optimizers.install()

    # ---- what a captured graph needs -------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the catalogue is there."""
        return self._catalogue is not None

    @property
    def catalogue(self) -> Catalogue:
        """Devices in use, decisions and kernels; brought by the first who asks."""
        return self._catalogue or self._bring_catalogue()

    @property
    def planner(self) -> Planner:
        """Plans graphs; brought by the first who asks: a run that reads what earlier ones have planned needs none."""
        return self._planner or self._bring_planner()

    @property
    def draws(self) -> RngKernels:
        """Which kernels may draw random numbers; brought by the first who asks."""
        return self._draws or self._bring_draws()

    def _bring_catalogue(self) -> Catalogue:
        with self._loading, untouched():
            if self._catalogue is None:
                from autofuse.runtime.catalogue import Catalogue

                self._catalogue = Catalogue(
                    self.settings.run, self.device, self.versions, self.report_fallback, self.notes_folder
                )
            return self._catalogue

    def _bring_planner(self) -> Planner:
        with self._loading, untouched():
            if self._planner is None:
                from autofuse.runtime.planner import Planner

                self._planner = Planner(self)
            return self._planner

    def _bring_draws(self) -> RngKernels:
        with self._loading, untouched():
            if self._draws is None:
                from autofuse.runtime.rng_kernels import RngKernels

                self._draws = RngKernels(self)
            return self._draws

    # ---- telling the person -----------------------------------------------------------------------

    def say_once(self, kind: str, message: str) -> None:
        """One line on stderr for each kind of trouble, and an event in the store."""
        self._said[kind] += 1
        self.store_thread.post_event(Event(kind, message))
        if self._said[kind] == 1 and not self.settings.run.quiet:
            say(message)

    def _lose_store(self, kind: str, message: str) -> None:
        """What was kept to be written is let go: nobody will write it."""
        self.steps = []
        self.say_once(kind, message)

    def report_fallback(self, kind: str, what: str, error: BaseException) -> None:
        first_line = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        self.say_once(kind, f"{what} ({type(error).__name__}: {first_line})")
        tell(Level.PLAN, lambda: "".join(traceback.format_exception(error)).rstrip())

    # ---- graphs and devices --------------------------------------------------------------------------

    def add_router(self, router: GraphRouter) -> None:
        for whose in list(self._marks):
            router.note_plans(whose)
        self.routers.append(router)
        self.disturbances += 1

    @property
    def graphs_folder(self) -> Path | None:
        """Where traced graphs are kept, None where none are."""
        settings = self.settings
        if not settings.capture.keep_graphs or not self.store_thread.usable:
            return None
        return settings.run.store.with_name(settings.run.store.name + ".graphs")

    @property
    def notes_folder(self) -> PrivateFolder | None:
        """The same, for whatever else makes later runs start sooner."""
        folder = self.graphs_folder
        return PrivateFolder(folder) if folder is not None else None

    @property
    def keeper(self) -> Keeper | None:
        """Keeps traced graphs there."""
        folder = self.graphs_folder
        return Keeper(PrivateFolder(folder), self.say_once) if folder is not None else None

    def trace_bytes(self, root: str) -> int:
        """How large the largest trace is that an earlier run has left of a root, 0 where there is none.

        Whether it fits shows when it is read.
        """
        folder = self.graphs_folder
        names = PrivateFolder(folder).names() if folder is not None else []
        found = [name for name in names if name.startswith(trace_prefix(root))]
        if folder is not None and found:
            return max(_bytes_of(folder / name) for name in found)
        if any(is_of_another_version(name, root) for name in names):
            log.info("traces of an earlier run are of another autofuse, torch or Python, and are made anew")
        return 0

    def use_device(self, device: torch.device) -> None:
        """The script has tensors there: read what is decided for its model."""
        try:
            is_new = self.catalogue.backends.use(device)
        except Exception as error:
            self.report_fallback("device_unknown", f"{device} runs on eager's kernels", error)
            return
        if is_new:
            self.store_thread.absorb_again(ABSORB_SECONDS)

    def make_timer(self, device: torch.device) -> NodeTimer:
        """For one node of a GPU."""
        return NodeTimer(self.roots.timer, device.index)

    def tunable(self, device: torch.device) -> Place | None:
        """Where a node's decisions belong; None where nothing can be tuned for the device, which is said once."""
        problem = self.catalogue.backends.problem(device)
        if problem is None:
            return self.catalogue.backends.place(device)
        if device not in self._unusable:
            self._unusable.add(device)
            self.say_once(*problem)
        return None

    @property
    def threads(self) -> int:
        """Threads torch computes with now on the CPU."""
        return int(torch.get_num_threads())

    # ---- the catalogue, as the router sees it -------------------------------------------------------

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        return self.catalogue.choose(fusion_id, values, device)

    def node_failed(self, node: NodeState, problem: str) -> None:
        self.say_once("node_failed", f"{node.slot.node.label} runs eager in this run: {problem}")

    def new_plan(self, plan: Plan) -> None:
        """Not a disturbance: where shapes vary without end, new ones are what a run consists of."""
        self._plan_limit.add(plan)

    def settle_plan(self, plan: Plan) -> bool:
        return self.tuning.settle(plan)

    def sample_due(self) -> bool:
        self._graph_calls += 1
        return self._graph_calls % SAMPLE_EVERY == 0

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall:
        if not self.settings.run.check:
            return fused
        with untouched():
            from autofuse.runtime.checking import check_against

        return check_against(node, fused, node.unfused, self.say_once)

    # ---- the background thread ------------------------------------------------------------------------

    def _absorb(self, store: Store) -> bool:
        """Read new decisions and the kernels they name, then let the plans follow. On the background thread."""
        if not self._knows_roots:
            self._knows_roots = True
            self.roots.known.update(store.roots())
            self.tuning.announce(store)
        found = self._catalogue.absorb(store) if self._catalogue is not None else None
        if found is None:
            return False
        self.tuning.news_at = time.perf_counter()
        self.refresh_plans(found.fusion_ids)
        return found.has_decisions

    def mark_plans(self, whose: object) -> None:
        """A step of a root begins in which fused nodes are counted."""
        self._marks.add(whose)
        for router in list(self.routers):
            router.note_plans(whose)

    def fused_since_mark(self, whose: object) -> int:
        """Nodes on fused kernels, in all graphs that have run since then."""
        self._marks.discard(whose)
        return sum(router.fused_in_noted(whose) for router in list(self.routers))

    def refresh_plans(self, fusion_ids: Collection[str] | None = None) -> None:
        """Let plans follow what is decided anew on these nodes, on all where None."""
        for router in list(self.routers):
            concerned = router.concerned(fusion_ids)
            for plan in router.all_plans() if concerned else ():
                if router.refresh(plan, concerned):
                    self.disturbances += 1
                yield_gil()

    def _collect(self, store: Store, run_id: int, final: bool) -> None:
        """Write what was counted since the last time. On the background thread."""
        if not final:
            self.tuning.post_new_work()
        steps, self.steps = self.steps, []
        if steps:
            store.add_step_samples(run_id, [StepSample(*fields) for fields in steps])
        usage = None
        if final or self._pace.is_due():
            with self._pace.measured():
                usage = usage_of(self.routers, in_haste=final)
                self._collect_uses(store, run_id, usage, final)
        new = self.refusals[self._written_refusals :]
        if new:
            self._written_refusals += len(new)
            store.add_refusals(run_id, new)
        for record in self.roots.changed_records(final):
            store.put_root(run_id, record)
        if final:
            store.put_op_profiles(run_id, self.roots.observer.profiles())
            store.put_dim_histograms(run_id, self.roots.observer.histograms())
            store.finish_run(run_id, self.totals(usage))
            self._forget_old_runs(store)

    def _forget_old_runs(self, store: Store) -> None:
        """Some of what is too old or too much by now. All is written: whatever fails here is left to the next."""
        cache = self.settings.cache
        with contextlib.suppress(AutofuseError):
            store.prune(cache.history_days, cache.history_bytes, PIECES_AT_END)

    def _collect_uses(self, store: Store, run_id: int, usage: Usage, final: bool) -> None:
        uses = [*node_uses(usage.nodes.values(), self.notes.sources, self.roots.step_us_total), *self.optimizers.uses()]
        if not final:  # shares of the run's time change all the time; at its end they are written
            uses = [use for use in uses if self._written_calls.get((use.fusion_id, use.bucket)) != use.calls]
        self._written_calls |= {(use.fusion_id, use.bucket): use.calls for use in uses}
        if uses:
            store.put_node_uses(run_id, uses)
        if not final:
            store.update_totals(run_id, self.totals(usage))

    def totals(self, usage: Usage | None = None) -> RunTotals:
        """So far; ``usage``: of the session, if it is known."""
        sums = (usage or usage_of(self.routers)).nodes.values()
        fused = sum(total.fused_calls for total in sums)
        return RunTotals(
            steps=self.roots.steps(),
            fused_calls=fused,
            unfused_calls=sum(total.calls for total in sums) - fused,
            observer_seconds=self.roots.observer.cost_seconds,
            run_seconds=time.perf_counter() - self.started,
            capture_seconds=self.capture_seconds + self.roots.lost_seconds(),
            held_out_calls=self.roots.held_out_calls,
            exit_code=self._exit_code,
        )

    @property
    def is_stored(self) -> bool:
        """Whether this run's results are in the store."""
        return self.store_thread.usable and self.store_thread.run_id is not None

    # ---- the end ---------------------------------------------------------------------------------------

    def finish(self, exit_code: int | None) -> None:
        """Stop observing, write everything, hand over what is still to be tuned.

        Nothing in a forked child, which may come here when it ends: the session is its parent's.
        """
        global _current
        if self._finished or self._pid != os.getpid():
            return
        self._finished = True
        self._exit_code = exit_code if exit_code is not None else 0
        with untouched():
            self.roots.uninstall()
            self.optimizers.uninstall()
            for router in self.routers:
                tell(Level.TIMINGS, partial(timings_text, router.phase, router.program.symbols, router.all_plans()))
            self.notes.post(self.store_thread.post_event)
            self.tuning.hand_over()
            self.store_thread.stop()
            self.tuning.withdraw()
            self.tuning.leave_to_daemon()
        with _lock:
            if _current is self:
                _current = None


def _opener(path: Path) -> Callable[[], Store]:
    """How the background thread opens a store in this process: it may import nothing itself."""
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


def _bytes_of(path: Path) -> int:
    try:
        return max(path.stat().st_size, 1)
    except OSError:  # another process has tidied up
        return 0
