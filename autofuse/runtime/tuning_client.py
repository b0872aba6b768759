"""The script's side of tuning: what is requested from the daemon, when, and whether the script waits for it.

In: plans with undecided nodes. Out: requests in the store, a running daemon, in ``wait`` mode a pause with a progress
bar. Guarantee: a dead daemon or a spent budget never blocks the script. Nothing is requested without a store, nor for a
device whose nodes cannot be compiled.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from autofuse.daemon import control
from autofuse.daemon.peers import Peers, Script, peers_folder
from autofuse.daemon.throttle import MachineLoad, room_beside
from autofuse.errors import AutofuseError
from autofuse.ir.records import Bucket, DecisionKey, ObservedShape, TuneRequest
from autofuse.locks import make_rlock
from autofuse.preserve_rng import untouched
from autofuse.report.progress import TuningProgress
from autofuse.runtime.graphs.usage import usage_of
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.run_context import RunContext
from autofuse.runtime.store_thread import yield_gil

if TYPE_CHECKING:
    from autofuse.db.store import Store
    from autofuse.runtime.graphs.plans import NodeState, Plan
    from autofuse.runtime.kernels.device_backends import Place
    from autofuse.settings.layers import Settings

# Calls in a bucket. A graph's first call may be its only one: a static graph that the next shape replaces, a warm-up.
CALLS_BEFORE_TUNING = {"wait": 1, "background": 3, "after": 2, "off": 3}
POLL_SECONDS = 0.05
MIDDLING_US = 100.0  # of a node that was never timed
START_CPU_SECONDS = 5.0  # seconds for the imports of daemon and worker, and a first result
LOOK_SECONDS = 5.0  # how long the machine's load is watched


class _Asked(NamedTuple):
    """The key of one decision."""

    fusion_id: str
    bucket: Bucket
    device: str
    threads: int


class TuningClient:
    """Asks for tuning on behalf of one context."""

    def __init__(
        self,
        context: RunContext,
        kernels: DeviceKernels,
        optimizer_requests: Callable[[], list[TuneRequest]],
        has_begun: Callable[[], bool],
    ) -> None:
        """``optimizer_requests()``: optimizer steps to be tuned; ``has_begun()``: whether the script has made its first
        step."""
        self._context = context
        self._kernels = kernels
        self._optimizer_requests = optimizer_requests
        self._has_begun = has_begun
        self._posted: set[_Asked] = set()  # keys that have been requested
        self._leaving: list[TuneRequest] = []  # requests of evicted plans, for the end of the run
        self.lacks_daemon = False  # requests were written for which no daemon was started
        self.script: Script | None = None  # our entry, as daemons read it
        self.neighbours: Peers | None = None  # from the moment on at which the store is open
        self._machine: MachineLoad | None = None  # from the script's first step on: its imports fill one core only
        self.news_at = time.perf_counter()  # something was requested or decided
        self._pausing = 0  # threads
        self._counted_until = 0.0  # by ``perf_counter``
        self._lock = make_rlock()  # held to count pauses; a handler of a signal may come here meanwhile

    @property
    def enabled(self) -> bool:
        """Whether requests make sense at all."""
        context = self._context
        return context.mode != "off" and context.store_thread.usable

    # ---- called on the script's path ---------------------------------------------------------------

    def settle(self, plan: Plan) -> bool:
        """True once the plan needs no more requests; in ``wait`` mode the script pauses here."""
        if self._context.mode != "wait" or not self.enabled:
            return True
        if plan.is_decided or not self._open_nodes(plan):
            return True
        if self._calls_in_bucket(plan) < CALLS_BEFORE_TUNING["wait"]:
            return False
        left = self._budget_left()
        if left > 0:
            self._pause(left)
        return True

    def wait_for(self, requests: list[TuneRequest]) -> None:
        """Pause the script until these requests are done too, within the remaining budget."""
        left = self._budget_left()
        if self.enabled and left > 0 and requests:
            self._pause(left, requests)

    def _budget_left(self) -> float:
        """Seconds."""
        self._count_pauses(0, time.perf_counter())
        return self._context.settings.tuner.budget_seconds - self._context.paused_seconds

    def _pause(self, budget_seconds: float, requests: Sequence[TuneRequest] = ()) -> None:
        """Write all open requests and wait until they are done or the budget is spent."""
        context = self._context
        began = time.perf_counter()
        context.disturbances += 1
        self._count_pauses(1, began)
        try:
            with untouched():
                plans = self._hot_plans("wait")
                requests = [*requests, *self.requests_for(plans)]
                if requests:
                    ticket = context.store_thread.post_requests(requests)
                    context.store_thread.wait_written(ticket, 10.0)
                    self._wait_for_daemon(len(requests), began + budget_seconds, plans)
        except (AutofuseError, OSError) as error:
            context.report_fallback("tuning_stopped", "tuning stopped, the script goes on", error)
        finally:
            self._count_pauses(-1, time.perf_counter())

    def _count_pauses(self, change: int, now: float) -> None:
        """One thread more, or one less, pauses from now on. What several wait at once counts once."""
        with self._lock:
            if self._pausing:
                self._context.paused_seconds += now - self._counted_until
            self._pausing += change
            self._counted_until = now

    def _wait_for_daemon(self, total: int, deadline: float, plans: Sequence[Plan]) -> None:
        context = self._context
        restarts = 0
        self._touch()
        self._ensure_daemon()
        checked = time.perf_counter()
        with TuningProgress(total, quiet=context.settings.run.quiet) as progress:
            while context.store_thread.usable:
                left = context.store_thread.open_work()
                progress.update(total - left if left is not None else 0, lambda: self._saving_us(plans))
                self._touch()
                if left == 0:
                    return
                now = time.perf_counter()
                if now >= deadline:
                    self._count_pauses(0, now)
                    context.say_once(
                        "budget_spent",
                        f"tuning has paused the script for {context.paused_seconds:.0f} s, all its "
                        "budget; nodes not tuned yet stay on eager's kernels (tuner.budget_seconds sets the budget)",
                    )
                    return
                if now - checked > 1.0:
                    checked = now
                    if not control.is_served(context.settings):
                        restarts += 1
                        if restarts > 2:
                            context.say_once("daemon_lost", "the tuning daemon ended three times; tuning stops here")
                            return
                        context.say_once("daemon_restarted", "the tuning daemon ended unexpectedly and was restarted")
                        self._ensure_daemon()
                time.sleep(POLL_SECONDS)

    def _saving_us(self, plans: Iterable[Plan]) -> float:
        """What the kernels decided on so far save in a call of each plan, by their races."""
        chosen = [node for plan in plans for node in plan.nodes if node.tag and not node.covered]
        found = [self._kernels.decision(node.fusion_id, node.values, node.slot.device) for node in chosen]
        return sum(max(0.0, won.unfused_us - won.fused_us) for won in found if won is not None)

    def _touch(self) -> None:
        """Tell the daemon that a script waits, so that it need not yield."""
        with contextlib.suppress(OSError):
            control.urgent_path(self._context.settings).touch(mode=0o600)

    def expects_more(self) -> bool:
        """Whether kernels for captured graphs are still to come, in this run or in the next one.

        In background mode not for ever: a dead daemon, or one with a spent budget, decides nothing any more.
        """
        context = self._context
        silence = 0.0 if self.lacks_daemon else time.perf_counter() - self.news_at
        if not self.enabled or (context.mode != "after" and silence > context.settings.tuner.budget_seconds):
            return False
        return self.has_open()

    def has_open(self) -> bool:
        """Whether hot nodes are still to be tuned, now or later."""
        return any(self._open_nodes(plan) for plan in self._hot_plans(self._context.mode))

    # ---- called on the background thread ---------------------------------------------------------------

    def post_new_work(self) -> None:
        """In background mode, request what has become hot since the last call.

        A daemon's first seconds are imports, which slow a script that fills all cores, and a script that ends soon
        gains nothing. So no daemon is started beside a young script, beside one whose time cannot pay for it yet, or
        before its steps have shown whether they fill all cores.
        """
        context = self._context
        if context.mode != "background" or not self.enabled:
            return
        requests = self.requests_for(self._hot_plans("background"))
        requests += self._optimizer_requests()
        if requests:
            self.news_at = time.perf_counter()
            context.store_thread.post_requests(requests)
            self.lacks_daemon = True
        age = time.perf_counter() - context.started
        # Open requests of an earlier run: its daemon ended with it, as in a container.
        is_late = context.store_thread.has_leftovers or age >= context.settings.tuner.start_after_seconds
        if self.lacks_daemon and is_late and self._can_afford_daemon():
            self.lacks_daemon = False
            self._ensure_daemon()
            self.news_at = time.perf_counter()

    def _can_afford_daemon(self) -> bool:
        """Whether a daemon that is started now can work, on idle cores or on the script's account."""
        if self.script is None or self.neighbours is None or control.running_pid(self._context.settings):
            return True
        if self._machine is None:
            if not self._has_begun():
                return False
            self._machine = MachineLoad(lambda: 0.0, look_seconds=LOOK_SECONDS)
        is_full = self._machine.is_full()
        if not self._machine.has_looked:
            return False
        if not is_full:
            return True
        percent = self._context.settings.tuner.busy_percent
        return room_beside([self.script], time.time(), self.neighbours.spent(), percent) >= START_CPU_SECONDS

    def announce(self, store: Store) -> None:
        """Tell this user's daemons that a script runs, and for how long it is expected to run."""
        with contextlib.suppress(OSError):
            peers = self.neighbours = Peers(peers_folder(self._context.settings))
            expected = store.runs.last_seconds(self._context.command)
            age = time.perf_counter() - self._context.started
            self.script = peers.announce(expected, time.time() - age)

    def withdraw(self) -> None:
        """Tell the daemons that the script has ended."""
        if self.neighbours is not None:
            with contextlib.suppress(OSError):
                self.neighbours.withdraw()

    def hand_over(self) -> None:
        """At the end of the script: in ``after`` mode tuning begins now; a frozen run reports what it missed."""
        context = self._context
        if context.settings.run.is_frozen:
            self._report_misses()
        if not self.enabled:
            return
        if context.mode != "after":
            return
        requests = self._leaving + self.requests_for(self._hot_plans("after"))
        requests += self._optimizer_requests()
        if requests:
            context.store_thread.wait_written(context.store_thread.post_requests(requests), 10.0)
            self._ensure_daemon()

    def note_leaving(self, plans: Sequence[Plan]) -> None:
        """Record the requests of plans about to be evicted, which are made at the end. On the script's path."""
        if self._context.mode == "after" and self.enabled:
            leaving = set(plans)
            self._leaving += self.requests_for([plan for plan in self._hot_plans("after") if plan in leaving])

    def leave_to_daemon(self) -> None:
        """After all is written, start the daemon for requests of a script that was too short for one beside it."""
        if self.lacks_daemon and self.enabled:
            self._ensure_daemon(control.launch)

    def _report_misses(self) -> None:
        sums = usage_of(self._context.routers, in_haste=True).nodes.values()
        # Nodes that a group covers are not called, and so not missing.
        eager = [total.node for total in sums if total.calls > total.fused_calls]
        missed = sum(not self._kernels.choose(n.fusion_id, n.values, n.slot.device).known for n in eager)
        if missed:
            frozen_by = "--frozen" if self._context.settings.run.frozen else "AUTOFUSE_SNAPSHOT"
            self._context.say_once(
                "frozen_miss",
                f"{missed} nodes had no stored decision and ran on eager's kernels, since the run was frozen; "
                f"without {frozen_by} they would be tuned",
            )

    # ---- requests ----------------------------------------------------------------------------------------

    def _hot_plans(self, mode: str) -> list[Plan]:
        """Undecided plans whose bucket has been called often enough; a single shape may come only once."""
        found: list[Plan] = []
        for router in list(self._context.routers):
            plans = list(router.all_plans())
            undecided = [plan for plan in plans if plan.count and not plan.is_decided]
            if not undecided:
                continue
            calls = Counter(router.past.calls_by_bucket)
            for plan in plans:
                calls[plan.bucket] += plan.count
            found += [plan for plan in undecided if calls[plan.bucket] >= CALLS_BEFORE_TUNING[mode]]
        return found

    def _calls_in_bucket(self, plan: Plan) -> int:
        """Calls of a plan and of those in its bucket: where every step has another shape, no plan is called twice."""
        if plan.count >= CALLS_BEFORE_TUNING["wait"]:
            return plan.count
        for router in list(self._context.routers):
            plans = list(router.all_plans())
            if plan in plans:
                return router.past.calls_by_bucket.get(plan.bucket, 0) + sum(
                    other.count for other in plans if other.bucket == plan.bucket
                )
        return plan.count

    def _ensure_daemon(self, start: Callable[[Settings], object] | None = None) -> None:
        try:
            (start or control.ensure_running)(self._context.settings)
        except (AutofuseError, OSError) as error:
            self._context.report_fallback("daemon_unusable", "no tuning daemon; nodes stay on eager's kernels", error)

    def _is_undecided(self, node: NodeState) -> bool:
        if node.broken or node.covered:
            return False
        return not self._kernels.choose(node.fusion_id, node.values, node.slot.device).known

    def _open_nodes(self, plan: Plan) -> list[tuple[int, NodeState, Place]]:
        """The undecided nodes of devices that can be tuned for."""
        undecided = [(index, node) for index, node in enumerate(plan.nodes) if self._is_undecided(node)]
        places = [(index, node, self._kernels.tunable(node.slot.device)) for index, node in undecided]
        return [(index, node, place) for index, node, place in places if place is not None]

    def requests_for(self, plans: list[Plan]) -> list[TuneRequest]:
        """One request for each undecided, unrequested node and bucket, with the calls so far."""
        context = self._context
        found: dict[_Asked, TuneRequest] = {}
        for plan in plans:
            if plan.is_asked:
                continue
            yield_gil()
            siblings = self._siblings(plan)
            for index, node, place in self._open_nodes(plan):
                known = _Asked(node.fusion_id, node.bucket, place.key, place.threads)
                if known in self._posted:
                    continue
                request = TuneRequest(
                    key=DecisionKey(node.fusion_id, node.bucket.label, place.key, place.threads, context.versions),
                    node=node.slot.node.to_json(),
                    bucket=node.bucket,
                    shapes=(ObservedShape(node.values, plan.count),),
                    calls=plan.count,
                    unfused_us=plan.live_us(index) or _live_us(siblings, index) or MIDDLING_US,
                    estimated_speedup=context.notes.estimates.get(node.fusion_id, 1.0),
                    run_id=context.store_thread.run_id,
                )
                found[known] = _merge(found.get(known), request)
            plan.is_asked = True
        self._posted |= set(found)
        return list(found.values())

    def _siblings(self, plan: Plan) -> list[Plan]:
        """All plans of the same graph."""
        routers = [list(router.all_plans()) for router in list(self._context.routers)]
        return next((plans for plans in routers if plan in plans), [])


def _live_us(plans: Iterable[Plan], index: int) -> float:
    """What a node takes at sizes at which it was timed; 0.0 where it never was."""
    return max((plan.live_us(index) for plan in plans), default=0.0)


def _merge(first: TuneRequest | None, second: TuneRequest) -> TuneRequest:
    """Merge two requests for the same node and bucket, from other layers or shapes."""
    if first is None:
        return second
    calls = {shape.symbol_values: shape.calls for shape in first.shapes}
    for shape in second.shapes:
        calls[shape.symbol_values] = calls.get(shape.symbol_values, 0) + shape.calls
    shapes = tuple(ObservedShape(values, n) for values, n in sorted(calls.items(), key=lambda item: -item[1]))
    return TuneRequest(
        key=first.key,
        node=first.node,
        bucket=first.bucket,
        shapes=shapes,
        calls=first.calls + second.calls,
        unfused_us=max(first.unfused_us, second.unfused_us),
        estimated_speedup=first.estimated_speedup,
        run_id=first.run_id,
    )
