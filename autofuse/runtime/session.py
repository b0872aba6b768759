"""The session of one script: what ties observer, captured graphs, store and daemon together.

In: settings and the script's calls. Out: routed graphs, rows in the store.
Guarantee: nothing here raises into the script. Each kind of trouble is said once, in one line on stderr,
and stored as an event; the script goes on with eager's kernels.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from autofuse.capture.graph_import import ImportedGraph
from autofuse.capture.passes import backward_of
from autofuse.capture.random_ops import use_generator
from autofuse.codegen.c.bernoulli import make_bernoulli
from autofuse.codegen.c.build import Toolchain
from autofuse.codegen.generator import CODEGEN_VERSION
from autofuse.codegen.in_place import in_place
from autofuse.db.store import Store
from autofuse.errors import AutofuseError, CompilerError, LoweringError, StoreError
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.patterns import registered_patterns
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import Bucket, Event, RunStart, RunTotals, StepSample
from autofuse.optimizer.router import OptimizerRouter
from autofuse.pattern_file import read_patterns
from autofuse.runtime import roots
from autofuse.runtime.backends import CPU, Backends, Place
from autofuse.runtime.backstage import Backstage, Pace, breathe, load_missing
from autofuse.runtime.catalogue import DecisionTable, KernelShelf, choose
from autofuse.runtime.checking import check_against
from autofuse.runtime.gpu import launcher, philox
from autofuse.runtime.graph_log import GraphLog
from autofuse.runtime.halves import Half, find_halves, halves_of
from autofuse.runtime.launch import NodeCall
from autofuse.runtime.node_timer import NodeTimer
from autofuse.runtime.router import UNKNOWN, Choice, GraphRouter, NodeState, Plan
from autofuse.runtime.tuning import TuningClient
from autofuse.runtime.usage import node_uses
from autofuse.say import say
from autofuse.settings import Settings, load
from autofuse.ways.groups import Group, find_groups

ABSORB_SECONDS = 2.0  # for decisions of a device that has just come into use
SAMPLE_EVERY = 31  # calls of graphs between timed ones; odd, so that forward and backward take turns

_current: Session | None = None
_lock = threading.Lock()


class Session:
    """One process that autofuse watches. `start_session` makes it, `finish` ends it."""

    def __init__(self, settings: Settings, command: str) -> None:
        self.settings = settings
        self.command = command
        self.backends = Backends(settings.run.cc or None)
        device = self.backends.info(CPU)
        assert device is not None
        self.device = device  # of the run: the machine's CPU; nodes have places of their own
        minor = ".".join(torch.__version__.split(".")[:2])
        self.versions = f"torch {minor}, codegen {CODEGEN_VERSION}"  # what a decision depends on besides the device
        self.mode = "off" if settings.run.frozen else settings.run.tune
        self.started = time.perf_counter()
        self.disturbances = 0  # captures, pauses and swaps so far; a step that saw one is no sample
        self.capture_seconds = 0.0
        self.routers: list[GraphRouter] = []
        self.graphs = GraphLog()
        self.refusals: list[Any] = []
        self._written_refusals = 0
        self.estimates: dict[str, float] = {}  # fusion_id -> estimated speedup
        self.sources: dict[str, str] = {}  # fusion_id -> first source line
        self.steps: list[tuple[str, str, bool, int, int, float, int]] = []  # of step samples, until they are written
        self._graph_calls = 0
        self._said: Counter[str] = Counter()
        self._fuel = settings.run.fuel
        self._fuelled: dict[str, bool] = {}
        self._finished = False
        self._exit_code: int | None = None
        self._lowered: dict[str, tuple[str, str] | None] = {}
        self._absorbed: dict[str, int] = {}  # newest decision read, by model of device
        self._knows_roots = False
        self._launcher_ready = False
        self._generator_ready = False
        self._draws: dict[tuple[torch.device, torch.dtype], bool] = {}
        self.table = DecisionTable()
        self.shelf = KernelShelf(self.backends.load)
        config = FusionConfig.from_mapping(settings.as_dict()["fusion"])
        self.engine = FusionEngine(
            config, lowerable=self._lowerable, shared_patterns=registered_patterns(), groups_follow=True
        )
        changed = {name: str(value) for name, value in settings.changed().items()}
        start = RunStart(command, self.device, self.versions, settings.run.tune, os.getpid(), changed)
        self._written_calls: dict[tuple[str, Bucket], int] = {}
        self._pace = Pace()
        self.backstage = Backstage(
            settings.run.store, start, collect=self._collect, absorb=self._absorb, report=self.say_once
        )
        self.tuning = TuningClient(self)
        self.roots = roots.Roots(self)
        self.optimizers = OptimizerRouter(self)

    def start(self) -> None:
        self._load_patterns()
        self.backstage.start()
        if self.settings.observe.enabled:
            self.roots.install()
        if self.engine.enabled and self.settings.fusion.enable_optimizer:
            self.optimizers.install()

    # ---- telling the person -----------------------------------------------------------------------

    def say_once(self, kind: str, message: str) -> None:
        """One line on stderr for each kind of trouble, and an event in the store."""
        self._said[kind] += 1
        self.backstage.post_event(Event(kind, message))
        if self._said[kind] == 1 and not self.settings.run.quiet:
            say(message)

    def report_fallback(self, kind: str, what: str, error: BaseException) -> None:
        first_line = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        self.say_once(kind, f"{what} ({type(error).__name__}: {first_line})")
        if self.settings.run.debug >= 5:
            import traceback

            traceback.print_exception(error, file=sys.stderr)

    # ---- planning -----------------------------------------------------------------------------------

    def _load_patterns(self) -> None:
        """Patterns of the file that is set; `autofuse run` has refused a bad one, other ways in go on without."""
        path = self.settings.fusion.patterns
        if path is None:
            return
        try:
            for pattern in read_patterns(path):
                self.engine.register_pattern(pattern)
        except AutofuseError as error:
            self.say_once("patterns_unusable", str(error))

    def plan_nodes(self, graph: FusionGraph, apart: Sequence[Collection[str]] = ()) -> list[FusionNode]:
        """Nodes of a graph; those of ``apart`` hold nothing else."""
        before = len(self.engine.refusals)
        nodes = self.engine.fuse(graph, apart)
        self.refusals.extend(self.engine.refusals[before:])
        return nodes

    def plan_halves(self, imported: ImportedGraph, phase: str) -> list[Half]:
        """Attentions of training in a graph (`find_halves`): found with the forward graph, for its backward graph too.

        None where each call is checked against eager: half of one has no counterpart there.
        """
        if not self.engine.enabled or not self.engine.config.enable_attention or self.settings.run.check:
            return []
        if phase == "backward":
            return halves_of(imported.module)
        counterpart = backward_of(imported.module)
        if phase != "forward" or counterpart is None:
            return []
        found = find_halves(imported, counterpart)
        self.refusals.extend(found.refusals)
        return found.forward

    def plan_groups(
        self,
        graph: FusionGraph,
        nodes: Sequence[FusionNode],
        derived: Mapping[str, sympy.Expr],
        halves: Sequence[Half] = (),
    ) -> list[Group]:
        """Groups of a graph: products and convolutions with the nodes around them (`find_groups`)."""
        if not self.engine.enabled:
            return []
        taken = [half.names for half in halves]
        groups, refusals = find_groups(graph, nodes, self.engine.config, derived, taken)
        self.refusals.extend(refusals)
        self.refusals.extend(self.engine.cover([*(group.operations for group in groups), *taken]))
        return groups

    def _lowerable(self, form: NodeForm) -> tuple[str, str] | None:
        text = form.text()
        if text not in self._lowered:
            try:
                in_place(form)  # lowers it
                self._lowered[text] = None
            except LoweringError as error:
                self._lowered[text] = (error.code, str(error))
        return self._lowered[text]

    def add_router(
        self, router: GraphRouter, graph: FusionGraph, nodes: Sequence[FusionNode], halves: Sequence[Half] = ()
    ) -> None:
        for node in [*nodes, *(half.pair.node for half in halves)]:
            if node.fusion_id not in self.estimates:
                self.estimates[node.fusion_id] = self.engine.benefit(node, graph).estimated_speedup
                self.sources[node.fusion_id] = next((op.source for op in node.kernels if op.source), "")
        self.routers.append(router)
        self.graphs.add(router, graph, nodes, [half.names for half in halves])
        self.disturbances += 1
        if self.settings.run.debug >= 3:
            for node in nodes:
                say(f"{router.phase}: {node.label}: {node.operation_names}")

    @property
    def graphs_folder(self) -> Path | None:
        """Where traced graphs are kept, None where none are."""
        settings = self.settings
        if not settings.capture.keep_graphs or not self.backstage.usable:
            return None
        return settings.run.store.with_name(settings.run.store.name + ".graphs")

    # ---- devices ------------------------------------------------------------------------------------

    @property
    def toolchain(self) -> Toolchain | None:
        """The C compiler, None where there is none."""
        return self.backends.cpu.toolchain

    def use_device(self, device: torch.device) -> None:
        """The script has tensors there: read what is decided for its model, say once what it lacks."""
        try:
            is_new = self.backends.use(device)
        except Exception as error:
            self.report_fallback("device_unknown", f"{device} runs on eager's kernels", error)
            return
        if is_new:
            self.say_problem(device)
            self.backstage.absorb_again(ABSORB_SECONDS)

    def say_problem(self, device: torch.device) -> None:
        problem = self.backends.problem(device)
        if problem is not None:
            self.say_once(*problem)

    def make_timer(self, device: torch.device) -> NodeTimer:
        """For one node of a GPU."""
        return NodeTimer(self.roots.timer, device.index)

    def tunable(self, device: torch.device) -> Place | None:
        """Where a node's decisions belong, None where nothing can be tuned for the device."""
        return None if self.backends.problem(device) else self.backends.place(device)

    def prepare_generator(self) -> None:
        """Dropout's masks from our generator, once it has proved itself bit-equal to aten's."""
        if self._generator_ready or self.toolchain is None:
            return
        self._generator_ready = True
        try:
            with _disable_current_modes():  # capture runs under a fake-tensor mode; the proof needs real tensors
                use_generator(make_bernoulli(self.toolchain))
        except Exception as error:
            self.report_fallback("generator_unusable", "dropout masks come from aten", error)

    def draws_as_eager(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether kernels may draw a dropout's mask on a device: only where eager's numbers are known bit by bit."""
        key = (device, dtype)
        if key not in self._draws:
            self._draws[key] = False
            try:
                with _disable_current_modes():  # the proof needs real tensors
                    self._draws[key] = philox.draws_as_expected(device, dtype)
            except Exception as error:
                self.report_fallback("random_unknown", f"dropout on {device} stays eager's own kernel", error)
            if not self._draws[key]:
                kind = "random_differs"
                self.backstage.post_event(
                    Event(kind, f"eager draws other numbers than expected on {device} in {dtype}")
                )
        return self._draws[key]

    @property
    def threads(self) -> int:
        """Threads torch computes with now on the CPU."""
        return self.backends.cpu.threads()

    # ---- the catalogue, as the router sees it -------------------------------------------------------

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        place = self.backends.place(device)
        if place is None:
            return UNKNOWN
        try:
            choice = choose(self.table, self.shelf, fusion_id, values, place)
        except Exception as error:
            self.report_fallback("kernel_unusable", "a stored kernel could not be loaded; its node runs eager", error)
            return UNKNOWN
        if choice.entry is not None and self._fuel is not None:
            allowed = self._fuelled.setdefault(fusion_id, len([v for v in self._fuelled.values() if v]) < self._fuel)
            return choice if allowed else Choice(known=True)
        return choice

    def node_failed(self, node: NodeState, problem: str) -> None:
        self.say_once("node_failed", f"{node.slot.node.label} runs eager in this run: {problem}")

    def new_plan(self, plan: Plan) -> None:
        """Not a disturbance: where shapes vary without end, new ones are what a run consists of."""

    def settle_plan(self, plan: Plan) -> bool:
        return self.tuning.settle(plan)

    def sample_due(self) -> bool:
        self._graph_calls += 1
        return self._graph_calls % SAMPLE_EVERY == 0

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall:
        if not self.settings.run.check:
            return fused
        return check_against(node, fused, node.unfused, self.say_once)

    # ---- the background thread ------------------------------------------------------------------------

    def _absorb(self, store: Store) -> bool:
        """Read new decisions and the kernels they name, then let the plans follow. On the background thread."""
        if not self._knows_roots:
            self._knows_roots = True
            self.roots.known.update(store.roots())
        self._prepare_launcher(store)
        rows = []
        for key in self.backends.models():
            found = store.decisions(key, self.versions, self._absorbed.get(key, 0))
            if found:
                self._absorbed[key] = max(number for number, _ in found)
                rows += found
        self.table.update(d for _, d in rows)
        wanted = [key for key in self.table.kernels() if not self.shelf.has(key)]
        load_missing(store, wanted, self.shelf.add)
        if rows or wanted:
            self.tuning.news_at = time.perf_counter()
            late = set(wanted) - {d.compile_key for _, d in rows}  # kernels of decisions that were known before
            self.refresh_plans(None if late else {d.key.fusion_id for _, d in rows})
        return bool(rows)

    def mark_plans(self) -> None:
        """A step begins in which fused nodes are counted."""
        for router in list(self.routers):
            for plan in list(router.plans.values()):
                plan.seen = plan.count

    def fused_since_mark(self) -> int:
        """Nodes on fused kernels, in all graphs that have run since then."""
        plans = [plan for router in self.routers for plan in list(router.plans.values())]
        return sum(plan.fused_nodes for plan in plans if plan.count != plan.seen)

    def refresh_plans(self, fusion_ids: Collection[str] | None = None) -> None:
        """Let plans follow what is decided anew on these nodes, on all where None."""
        for router in list(self.routers):
            concerned = router.concerned(fusion_ids)
            for plan in router.all_plans() if concerned else ():
                if router.refresh(plan, concerned):
                    self.disturbances += 1
                breathe()

    def _prepare_launcher(self, store: Store) -> None:
        """The launcher of GPU kernels in C, from the store or compiled; without one they go through ctypes."""
        if self._launcher_ready or self.toolchain is None or not self.backends.in_use("cuda"):
            return
        self._launcher_ready = True
        try:
            record = store.get_kernel(launcher.launcher_key(self.toolchain).digest)
            if record is None:
                record = launcher.compile_launcher(self.toolchain)
                store.put_kernel(record)
            launcher.install(record.binary)
        except (CompilerError, StoreError, OSError) as error:
            self.report_fallback("slow_launcher", "GPU kernels are launched through ctypes, some us slower", error)

    def _collect(self, store: Store, run_id: int, final: bool) -> None:
        """Write what was counted since the last time. On the background thread."""
        if not final:
            self.tuning.post_new_work()
        steps, self.steps = self.steps, []
        if steps:
            store.add_step_samples(run_id, (StepSample(*fields) for fields in steps))
        if final or self._pace.is_due():
            with self._pace.measured():
                self._collect_uses(store, run_id, final)
        new = self.refusals[self._written_refusals :]
        if new:
            self._written_refusals += len(new)
            store.add_refusals(run_id, new)
        for record in self.roots.changed_records(final):
            store.put_root(run_id, record)
        if final:
            store.put_op_profiles(run_id, self.roots.observer.profiles())
            store.put_dim_histograms(run_id, self.roots.observer.histograms())
            store.finish_run(run_id, self.totals())

    def _collect_uses(self, store: Store, run_id: int, final: bool) -> None:
        uses = [*node_uses(self), *self.optimizers.uses()]
        if not final:  # shares of the run's time change all the time; at its end they are written
            uses = [use for use in uses if self._written_calls.get((use.fusion_id, use.bucket)) != use.calls]
        self._written_calls |= {(use.fusion_id, use.bucket): use.calls for use in uses}
        if uses:
            store.put_node_uses(run_id, uses)
        if not final:
            store.update_totals(run_id, self.totals())

    def totals(self) -> RunTotals:
        fused = unfused = 0
        for router in list(self.routers):
            for plan in router.all_plans():
                breathe()
                for node in plan.nodes:
                    done = plan.fused_calls(node)
                    fused += done
                    unfused += 0 if node.slot.is_group else plan.calls_of(node) - done
        return RunTotals(
            steps=self.roots.steps(),
            fused_calls=fused,
            unfused_calls=unfused,
            observer_seconds=self.roots.observer.cost_seconds,
            run_seconds=time.perf_counter() - self.started,
            capture_seconds=self.capture_seconds,
            held_out_calls=self.roots.held_out_calls,
            exit_code=self._exit_code,
        )

    @property
    def is_stored(self) -> bool:
        """Whether this run's results are in the store."""
        return self.backstage.usable and self.backstage.run_id is not None

    # ---- the end ---------------------------------------------------------------------------------------

    def finish(self, exit_code: int | None) -> None:
        """Stop observing, write everything, hand over what is still to be tuned."""
        global _current
        if self._finished:
            return
        self._finished = True
        self._exit_code = exit_code if exit_code is not None else 0
        self.roots.uninstall()
        self.optimizers.uninstall()
        self.graphs.post(self.backstage.post_event)
        self.tuning.hand_over()
        self.backstage.stop()
        with _lock:
            if _current is self:
                _current = None


def start_session(settings: Settings, command: str) -> Session:
    """Begin to watch this process."""
    global _current
    with _lock:
        if _current is not None:
            return _current
        _current = Session(settings, command)
        session = _current
    session.start()
    session.say_problem(CPU)
    return session


def current_session() -> Session | None:
    """The session of this process; made from the environment where `autofuse run` did not, None if disabled."""
    if _current is not None:
        return _current
    try:
        settings = load()
    except AutofuseError as error:
        say(str(error))
        return None
    if settings.run.disable:
        return None
    session = start_session(settings, " ".join(sys.argv) or "python")
    atexit.register(session.finish, None)
    return session
