"""The shared state of one run: its settings, its graphs, its costs so far, and messages to the user.

In: settings and the thread of the store. Out: records that all parts read, and counters that some parts increase.
Guarantee: it does not refer to the parts that are built on it; nothing here raises into the script. Each kind of
trouble is reported once, in one line on stderr, and stored as an event.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from autofuse.capture.traced import Keeper, is_of_another_version, trace_prefix
from autofuse.debug import Level, tell
from autofuse.ir.records import Event, Refusal, RunStart
from autofuse.private_files import PrivateFolder
from autofuse.runtime.graphs.metrics_log import GraphMetricsLog
from autofuse.runtime.kernels.snapshot import Snapshot
from autofuse.runtime.roots.steps import PlanLog, RanPlans, TimedStep
from autofuse.runtime.store_thread import StoreThread
from autofuse.script_signals import is_of_handler
from autofuse.settings.layers import Settings
from autofuse.stderr import say

if TYPE_CHECKING:
    from autofuse.runtime.graphs.router import GraphRouter

log = logging.getLogger(__name__)


class RunContext:
    """Of one session."""

    def __init__(
        self, settings: Settings, start: RunStart, store_thread: StoreThread, started: float, launched: float
    ) -> None:
        self.settings = settings
        self.command = start.command
        self.device = start.device  # the run's device: the machine's CPU; nodes have places of their own
        self.versions = start.versions  # versions that a decision depends on besides the device
        self.mode = "off" if settings.run.is_frozen else settings.run.tune
        path = settings.run.snapshot
        self.snapshot = Snapshot(path, start.device.key, start.versions) if path is not None else None
        self.store_thread = store_thread
        self.started = started  # by ``perf_counter``
        self.launched = launched  # when the process of the script began
        self.disturbances = 0  # captures, pauses and swaps so far; a step with one of them is not a sample
        self.timed_calls = 0  # of graphs on a CPU, node by node; a short step with one of them is no sample
        self.held_calls = 0  # those of which nodes ran eager's operations; a step with one of them is none
        self.steps_in_autocast = False  # an optimizer has stepped inside of an autocast region: see `kept_casts`
        self.paused_seconds = 0.0  # for tuning
        self.capture_seconds = 0.0  # seconds that are on no root's account
        self.noted_seconds = 0.0  # seconds lost to captures of roots, where the cause is known at once
        self.planning_seconds = 0.0  # of those
        self.step_us_total = 0.0  # of all timed steps
        self.untimed_steps = 0  # on a GPU, whose times are unknown
        self.held_out_calls = 0
        self.steps: list[TimedStep] = []  # until they are written
        self.routers: list[GraphRouter] = []
        self.refusals: list[Refusal] = []
        self.notes = GraphMetricsLog()
        self._logs: dict[object, PlanLog] = {}  # of the steps that are open, by who asked for them
        self.said: Counter[str] = Counter()  # how often each kind of notice came, whether or not it was printed

    # ---- messages to the user ---------------------------------------------------------------------

    def say_once(self, kind: str, message: str) -> None:
        """One line on stderr for each kind of trouble, and an event in the store."""
        self.said[kind] += 1
        self.store_thread.post_event(Event(kind, message))
        if self.said[kind] == 1 and not self.settings.run.quiet:
            say(message)

    def report_fallback(self, kind: str, what: str, error: BaseException) -> None:
        """Tell of a failure of ours. What a signal handler of the script has raised meanwhile is none, and raised."""
        if is_of_handler(error):
            raise error
        first_line = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
        self.say_once(kind, f"{what} ({type(error).__name__}: {first_line})")
        tell(Level.PLAN, lambda: "".join(traceback.format_exception(error)).rstrip())

    # ---- routed graphs ----------------------------------------------------------------------------

    def add_router(self, router: GraphRouter) -> None:
        for log in list(self._logs.values()):
            if not log.is_full:
                router.note_plans(log)
        self.routers.append(router)
        self.disturbances += 1

    def disturb(self) -> None:
        """Steps that this moment is part of are not compared."""
        self.disturbances += 1

    def graph_calls(self) -> int:
        """Calls of all graphs so far."""
        return sum(router.calls() for router in list(self.routers))

    def mark_plans(self, whose: object) -> None:
        """Begin to record which plans run in a step of a root."""
        self.plans_since_mark(whose)
        log = self._logs[whose] = PlanLog()
        for router in list(self.routers):
            router.note_plans(log)

    def plans_since_mark(self, whose: object) -> RanPlans | None:
        """The plans of all graphs that have run since then; None where that is no step any more."""
        log = self._logs.pop(whose, None)
        if log is None:
            return None
        for router in list(self.routers):
            router.stop_noting(log)
        return log.ran

    # ---- files beside the store -------------------------------------------------------------------

    @property
    def graphs_folder(self) -> Path | None:
        """The folder of traced graphs, another one for strict runs, which simplify less; None where none are kept."""
        settings = self.settings
        if not settings.capture.keep_graphs or not self.store_thread.usable:
            return None
        suffix = ".strict.graphs" if settings.run.strict else ".graphs"
        return settings.run.store.with_name(settings.run.store.name + suffix)

    @property
    def notes_folder(self) -> PrivateFolder | None:
        """The folder for other notes with which later runs start sooner."""
        folder = self.graphs_folder
        return PrivateFolder(folder) if folder is not None else None

    @property
    def keeper(self) -> Keeper | None:
        """The `Keeper` for traced graphs in `graphs_folder`."""
        folder = self.notes_folder
        return Keeper(folder, self.say_once) if folder is not None else None

    def trace_bytes(self, root: str) -> int:
        """Bytes of an earlier run's largest trace of a root, 0 where there is none.

        Whether a trace fits is known only when it is read.
        """
        folder = self.graphs_folder
        names = PrivateFolder(folder).names() if folder is not None else []
        found = [name for name in names if name.startswith(trace_prefix(root))]
        if folder is not None and found:
            return max(_bytes_of(folder / name) for name in found)
        if any(is_of_another_version(name, root) for name in names):
            log.info("traces of an earlier run are of another autofuse, torch or Python, and are made anew")
        return 0


def _bytes_of(path: Path) -> int:
    try:
        return max(path.stat().st_size, 1)
    except OSError:  # another process has tidied up
        return 0
