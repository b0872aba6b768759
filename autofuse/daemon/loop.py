"""The tuning loop: takes requests from the store, runs jobs, writes what they found. It never imports torch.

In: requests in the store. Out: measurements, decisions and kernels in the store.
Guarantee: the request that is expected to save most for its time goes first; a kernel is stored before the decision
that names it, and the decision before its request is done, so that ``kill -9`` loses only the job at hand; beside a
running script the loop keeps to its share of a core, while a script waits for it (or none runs) it does not. Where a
device cannot be used just now, its requests fail at once, so that nobody waits for them, and the next daemon tries
again.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, NamedTuple

from autofuse.daemon.devices import Devices
from autofuse.daemon.expectations import Expectations
from autofuse.daemon.files import DaemonFiles
from autofuse.daemon.fleet import Fleet
from autofuse.daemon.open_runs import OpenRuns
from autofuse.daemon.peers import Peers, peers_folder
from autofuse.daemon.recheck import Rechecks
from autofuse.daemon.request_queue import Heartbeat, RequestQueue
from autofuse.daemon.request_tuner import RequestTuner, is_genuine
from autofuse.daemon.scheduler import Scheduler
from autofuse.daemon.tuning_results import TuningResults
from autofuse.db.old_decisions import OldDecision
from autofuse.db.rows import RequestEnd
from autofuse.db.store import Store
from autofuse.db.tune_queue import NOT_READY, WaitingRequest
from autofuse.errors import CompilerNotReady, StoreError
from autofuse.ir.device import cpu_device
from autofuse.ir.reasons import decision_words
from autofuse.ir.records import DecisionKey, TuneRequest
from autofuse.settings.layers import Settings
from autofuse.tuner.ipc import Interrupted
from autofuse.tuner.outcome import Outcome
from autofuse.tuner.strategy_provider import STRATEGY
from autofuse.tuner.worker_process import Lost, NotReady

log = logging.getLogger("autofuse.daemon")

POLL_SECONDS = 0.05  # shortly after work, when more may follow
IDLE_POLL_SECONDS = 0.2  # 0.3 % of a core
IDLE_AFTER_SECONDS = 2.0
WORKER_IDLE_SECONDS = 60.0  # without work; then the workers end, which frees their memory


Finish = Callable[[DecisionKey, RequestEnd, str], None]  # stores how a request has ended


class Drained(NamedTuple):
    """How many requests of a queue were done, failed, or are left."""

    done: int
    failed: int
    left: int  # for other devices or versions, or because the budget was spent


class TuningLoop:
    """Works off requests, one at a time: makes the daemon's parts and calls them in order."""

    def __init__(
        self,
        settings: Settings,
        *,
        is_urgent: Callable[[], bool],
        worker_log: IO[bytes] | int | None = None,
    ) -> None:
        """``is_urgent``: whether a script or a person waits for the results. Raises StoreError."""
        self.settings = settings
        self.is_stopping = False
        self._store = Store.open(settings.run.store)
        self._store.kernels.limit_bytes = settings.cache.max_bytes
        peers = Peers(peers_folder(settings))
        self.runs = OpenRuns(self._store.runs, self._store.nodes, peers)
        self._scheduler = Scheduler(
            settings.tuner,
            peers,
            is_urgent=is_urgent,
            is_stopping=lambda: self.is_stopping,
            saved=self.runs.saved,
        )
        self._devices = Devices(settings, self._store.kernels, self._scheduler, self.runs, worker_log)
        self.results = TuningResults(self._store, self._devices, self.runs)
        self._expectations = Expectations(self._store.results)
        self.queue = RequestQueue(settings, self._store, self._scheduler, self._devices.keys, self._preference)
        self._tuner = RequestTuner(settings.tuner, self._devices, self._scheduler, self.results)
        self._fleet = Fleet(
            settings.fleet, settings.run.store, cpu_device(), self.queue.versions, lent=self._devices.lent
        )
        days, kind = settings.tuner.recheck_days, DaemonFiles(settings).kind
        self._rechecks = Rechecks(self._store, days, self._devices.keys, self.queue.versions, kind)
        self._heartbeat = Heartbeat(self._store.daemon, self.queue, lambda: self._fleet.state)

    # ---- loops ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Work until told to stop, or idle for ``tuner.idle_exit_seconds``. Raises StoreError."""
        requeued = self.queue.take_up()
        cache = self.settings.cache
        self._store.history.prune(cache.history_days, cache.history_bytes, cache.history_runs)
        self._store.proposals.forget(self.settings.fleet.keep_days, self.settings.fleet.keep_keys)
        log.info("serving %s as process %d; %d requests taken up again", self._store.path, os.getpid(), requeued)
        self._heartbeat.beat("idle", at_once=True)
        self._begin_exchange()
        idle_since = time.monotonic()
        while not self.is_stopping:
            if self._has_worked():
                idle_since = time.monotonic()
                continue
            if not self._scheduler.may_begin():
                idle_since = time.monotonic()  # there may be work, but it is another daemon's turn
            self._scheduler.end()
            if self._store.was_moved:
                log.info("the store was put aside, ending")
                return
            idle_seconds = time.monotonic() - idle_since
            if idle_seconds >= self.settings.tuner.idle_exit_seconds and not self.settings.fleet.worker:
                log.info("nothing to do for %.0f s, ending", idle_seconds)
                return
            if idle_seconds >= WORKER_IDLE_SECONDS:
                self._devices.kill_workers()
            self._heartbeat.beat("idle")
            time.sleep(POLL_SECONDS if idle_seconds < IDLE_AFTER_SECONDS else IDLE_POLL_SECONDS)

    def drain(self, on_progress: Callable[[int, int], None], again: bool = False) -> Drained:
        """Work until the queue is empty or ``tuner.budget_seconds`` are spent; ``again``: also on failed requests."""
        self.queue.take_up()
        if again:
            self._store.queue.requeue_failed()
        self._begin_exchange()
        deadline = time.monotonic() + self.settings.tuner.budget_seconds
        while not self.is_stopping and time.monotonic() < deadline:
            request = self.queue.take()
            if request is None:
                break
            ended = self.queue.done + self.queue.failed
            on_progress(ended, ended + self.queue.queued + 1)
            self.work(request)
        return Drained(self.queue.done, self.queue.failed, self._store.queue.length().open)

    def close(self) -> None:
        """End the workers, queue parked requests again, and close the store."""
        self._devices.kill_workers()
        self._scheduler.end()
        self._fleet.close()
        self._devices.close()
        try:
            self.queue.unpark()
            self._heartbeat.beat("stopped", at_once=True)
        except StoreError as error:
            log.error("%s", error)
        self._store.close()

    def _begin_exchange(self) -> None:
        """Ask the fleet's server, if there is one, what other hosts have found."""
        self._fleet.start()
        self._fleet.wait()

    # ---- one request ----------------------------------------------------------------------------

    def _preference(self, waiting: WaitingRequest) -> float:
        """What saves most for its time goes first; what another host works on last: it may be a proposal by then."""
        return -1.0 if self._fleet.is_elsewhere(waiting.key) else self._expectations.saving_a_second(waiting)

    def _has_worked(self) -> bool:
        """Work on a request of this host; where there is none and no script runs, on another's, or a decision that is
        old or was undecided."""
        request = self.queue.next()
        if request is not None:
            self.work(request)
            return True
        if self._scheduler.scripts() or self._store.was_moved:
            return False
        request = self._fleet.borrow() if self._fleet.may_help else None
        if request is not None:
            self.help(request)
            return True
        old = self._rechecks.next()
        if old is not None:
            self.race_again(old)
        return old is not None

    def work(self, request: TuneRequest) -> None:
        """Tune a request and store the results. Raises StoreError."""
        self._fleet.begin_own(request.key)
        try:
            self._work(request, self.queue.finish, self._tuner.tune)
        finally:
            self._rechecks.look_again()
            self._fleet.end_own()
            self._scheduler.end()

    def help(self, request: TuneRequest) -> None:
        """Tune a request of another host: the results are stored here, and sent from here. Raises StoreError."""
        if not is_genuine(request):
            log.warning("a request of another host was refused: it does not name the node that it holds")
            self._fleet.give_back(request.key, "failed", "it does not name the node that it holds")
            return
        if self.results.last_decision(request.key, request.bucket) is not None:
            self._fleet.give_back(request.key, "done")
            return

        def finish(key: DecisionKey, status: RequestEnd, message: str) -> None:
            if message.startswith(NOT_READY):  # this host's fault: another one may be able to do it
                status, message = "requeued", ""
            self._fleet.give_back(key, status, message)

        try:
            self._work(replace(request, run_id=None), finish, self._tuner.tune)
        finally:
            self._devices.leave_gpus()
            self._scheduler.end()

    def race_again(self, old: OldDecision) -> None:
        """Race an old decision again and store what comes of it; it stands until then. Raises StoreError."""

        def finish(key: DecisionKey, status: RequestEnd, message: str) -> None:
            self.queue.finish(key, "done", message)

        began = self._scheduler.clock()
        try:
            self._work(old.request, finish, lambda _: self._tuner.race_again(old))
        finally:
            self._rechecks.charge(self._scheduler.clock() - began)
            self._scheduler.end()

    def _work(self, request: TuneRequest, finish: Finish, tune: Callable[[TuneRequest], Outcome]) -> None:
        if self._tuner.was_answered(request.key):
            finish(request.key, "done", "")
            return
        job = self._heartbeat.job = f"{request.key.fusion_id[:12]} [{request.bucket.label}]"
        self._heartbeat.beat("tuning", at_once=not self._scheduler.is_urgent())
        began = self._scheduler.clock()
        self.runs.asking = request.run_id
        try:
            self._devices.check_ready(request.key.device)
            outcome = tune(request)
        except Interrupted:
            finish(request.key, "requeued", "the daemon was stopped")
            return
        except StoreError:
            raise
        except (NotReady, CompilerNotReady, OSError, MemoryError) as error:  # may pass; no fault of the request
            problem = str(error) or type(error).__name__
            self._devices.note_not_ready(request.key.device, problem)
            log.warning("%s: %s", job, problem)
            finish(request.key, "failed", f"{NOT_READY}{problem}")
            return
        except Exception as error:
            log.exception("%s failed", job)
            problem = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
            finish(request.key, "failed", problem)
            return
        seconds = self._scheduler.clock() - began
        self.queue.charge(request.run_id, seconds)
        self.results.write(request, outcome)
        self._expectations.note(outcome.decisions)
        finish(request.key, "done", "")
        _log_decisions(job, outcome, seconds)


def _log_decisions(job: str, outcome: Outcome, seconds: float) -> None:
    for decision in outcome.decisions:
        why = f"{decision_words(decision.reason)}: {decision.detail}"
        variant = decision.candidate.variant
        variant = "strategy" if variant == STRATEGY else variant  # it is stored under an older name
        log.info("%s %s %.2fx, %s (%.2f s)", job, variant, decision.speedup, why, seconds)
