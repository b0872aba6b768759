"""All roots of a session: the root of each module, findings of earlier runs, records.

In: calls of outermost modules. Out: calls of their `Root`; root records. Guarantee: if autofuse fails, the original
module computes the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autofuse.capture.python_speed import slowness
from autofuse.ir.records import RootRecord
from autofuse.observer.capture_cost import learn_factor
from autofuse.observer.capture_policy import Budget
from autofuse.observer.config import ObserverConfig
from autofuse.observer.module_table import ModuleTable
from autofuse.observer.observer import Observer
from autofuse.observer.root_tracker import RootTracker, Target, function_key, root_key
from autofuse.preserve_rng import untouched
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.roots.root import Root
from autofuse.runtime.roots.services import USUAL_TOOLS, RootBackend, RootServices, RootTools
from autofuse.runtime.roots.step_clock import BackwardClock
from autofuse.runtime.roots.swap_tensors import Swaps
from autofuse.runtime.roots.unwatched import SAMPLING_SHARE
from autofuse.runtime.roots.user_graphs import Sizes, UserGraph, graph_key
from autofuse.runtime.run_context import RunContext
from autofuse.runtime.tuning_client import TuningClient

if TYPE_CHECKING:
    from autofuse.runtime.graphs.plan_cache import PlanCache
    from autofuse.runtime.roots.peak_memory import AllocationLog, RootPeaks


class RootRegistry:
    """All roots of a session, and the observer that watches them."""

    def __init__(
        self,
        context: RunContext,
        kernels: DeviceKernels,
        tuning: TuningClient,
        backend: RootBackend,
        plan_cache: Callable[[], PlanCache],
        tools: RootTools = USUAL_TOOLS,
    ) -> None:
        self.context = context
        settings = context.settings
        self.timer = tools.event_timer()
        self.observer = Observer(
            ObserverConfig.of(
                settings.observe, max_overhead_percent=SAMPLING_SHARE * settings.observe.max_overhead_percent
            ),
            self.timer,
        )
        self.tracker = RootTracker(self._handle)
        self._swaps = Swaps(self._let_traces_go)
        self.services = RootServices(
            context,
            kernels,
            tuning,
            backend,
            plan_cache,
            self.observer,
            self.tracker,
            self.timer,
            budget=self.budget,
            cost_factor=self.cost_factor,
            tools=tools,
            backwards=BackwardClock(tools.clock),
        )
        self.known = self.services.known
        self.groups: dict[str, Root] = {}
        self.graphs: dict[str, UserGraph] = {}
        self.allocations = self._allocations() if settings.observe.memory else None
        self._by_module: ModuleTable[Root] = ModuleTable()
        self._written: dict[str, RootRecord] = {}

    def _allocations(self) -> AllocationLog | None:
        """The log of allocations, only where requested: it needs private names of torch."""
        try:
            with untouched():
                from autofuse.runtime.roots.peak_memory import AllocationLog

            return AllocationLog()
        except ImportError as error:
            self.context.report_fallback("no_peaks", "peak memory is not measured with this torch", error)
            return None

    def _peaks(self, key: str, name: str) -> RootPeaks | None:
        if self.allocations is None:
            return None
        with untouched():
            from autofuse.runtime.roots.peak_memory import RootPeaks

        return RootPeaks(self.allocations, key, name, self.context.store_thread.post_event)

    def install(self) -> None:
        self.tracker.install()
        self._swaps.install()

    def uninstall(self) -> None:
        self.tracker.uninstall()
        self._swaps.uninstall()
        for root in list(self.groups.values()):
            root.close()
        for watched in self.watched().values():
            watched.trial.late.close()
            watched.trial.conclude()
        if self.allocations is not None:
            self.allocations.give_up()
        self.observer.stop()

    def end(self) -> None:
        """After `uninstall`, once all records are written."""
        for root in list(self.groups.values()):
            root.traces.end()

    def root_of(self, module: torch.nn.Module) -> Root:
        root = self._by_module.get(module)
        if root is None:
            key = root_key(module)
            root = self.groups.get(key)
            if root is None:
                root = self.groups[key] = self._new_root(key, type(module).__name__)
            self._by_module.set(module, root)
            if self.tracker.is_installed:
                self.tracker.attach(module).takes = root.takes
        return root

    def _new_root(self, key: str, name: str) -> Root:
        return Root(self.services, key, name, self._peaks(key, name))

    def root_of_function(self, function: Target) -> Root:
        """The root of a function that was named as one."""
        key, name = function_key(function)
        root = self.groups.get(key)
        if root is None:
            root = self.groups[key] = self._new_root(key, name)
        return root

    def user_graph(self, module: fx.GraphModule, inputs: Sequence[Any], sizes: Sizes) -> UserGraph:
        """The record of a graph that Dynamo has made for the user's own torch.compile."""
        key, name = graph_key(module, inputs)
        found = self.graphs.get(key)
        if found is None:
            found = self.graphs[key] = UserGraph(self.services, key, name, sizes.is_static)
        return found

    def _handle(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            root = self.root_of(module)
        except Exception as error:
            self.context.report_fallback("root_unknown", f"{type(module).__name__} stays eager", error)
            self.tracker.release(module).is_final = True
            return self.tracker.call_original(module, args, kwargs)
        return root.call(module, args, kwargs)

    def steps(self) -> int:
        """Calls of the root that took the most time; without roots, of the graph that did."""
        if self.groups:
            return max(self.groups.values(), key=lambda root: root.trial.total_us).all_calls
        if self.graphs:
            return max(graph.calls for graph in self.graphs.values())
        counts = [r.calls() // r.times for r in self.context.routers if r.phase != "backward"]
        return max(counts, default=0)

    def _let_traces_go(self) -> None:
        """Drop all traces, with all references to parameters."""
        dropped = [root.traces.drop() for root in list(self.groups.values())]
        if any(dropped):
            with untouched():
                from autofuse.capture.dynamo import let_tensors_go  # is imported where there are traces
            let_tensors_go()

    def watched(self) -> dict[str, Root | UserGraph]:
        return {**self.groups, **self.graphs}

    def changed_records(self, final: bool) -> Iterator[RootRecord]:
        """Records of roots that changed since the last call."""
        for key, watched in self.watched().items():
            record = watched.record()
            before = self._written.get(key)
            if before is None or final or (before.state, before.reason) != (record.state, record.reason):
                self._written[key] = record
                yield record

    def lost_seconds(self) -> float:
        """Seconds that captures of roots have cost the script so far."""
        return sum(root.account.ledger.lost_seconds for root in list(self.groups.values()))

    def budget(self) -> Budget:
        """Seconds that captures may cost so far."""
        ledgers = [root.account.ledger for root in list(self.groups.values())]
        spent = sum(ledger.equal_seconds for ledger in ledgers)
        # The script has requested its own calls of torch.compile, so their time does not count.
        others = self.context.capture_seconds - sum(graph.capture_seconds for graph in list(self.graphs.values()))
        lost = others + sum(ledger.lost_seconds + ledger.behind_seconds for ledger in ledgers)
        return Budget(spent, lost, self.context.settings.capture.max_slowdown)

    def cost_factor(self) -> float:
        """The slowness factor of captures on this machine."""
        captured = [root.record() for root in list(self.groups.values()) if root.state == "captured"]
        return learn_factor([*self.known.values(), *captured], slowness())
