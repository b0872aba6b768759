"""The tuning loop: takes requests from the store, runs jobs, writes what they found. It never imports torch.

In: requests in the store. Out: measurements, decisions and kernels in the store.
Guarantee: the request with the largest expected saving goes first; a kernel is stored before the decision that names
it, and the decision before its request is done, so that ``kill -9`` loses only the job at hand; beside a running
script the loop keeps to its share of a core, while a script waits for it (or none runs) it does not. Where a device
cannot be used just now, its requests fail at once, so that nobody waits for them, and the next daemon tries again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, NamedTuple

import psutil

from autofuse.codegen.c.build import find_toolchain
from autofuse.codegen.c.templates.matmul import c_matmul_flops
from autofuse.codegen.templates import LOOP, MATMUL
from autofuse.codegen.triton.key import find_triton
from autofuse.codegen.version import versions
from autofuse.daemon.files import DaemonFiles
from autofuse.daemon.peers import Peers, Script, peers_folder
from autofuse.daemon.process_id import this_machine
from autofuse.daemon.scheduler import Scheduler
from autofuse.daemon.visible_devices import as_seen_by
from autofuse.db.rows import DaemonState, RunRow
from autofuse.db.store import Store
from autofuse.db.tune_queue import NOT_READY, NOT_READY_SECONDS
from autofuse.errors import CompilerNotReady, StoreError
from autofuse.ir.buckets import distance
from autofuse.ir.device import cpu_device
from autofuse.ir.operation import NodeForm
from autofuse.ir.reasons import decision_words
from autofuse.ir.records import (
    EAGER,
    IN_ONE,
    Bucket,
    Candidate,
    Config,
    Decision,
    KernelRecord,
    ObservedShape,
    TuneRequest,
)
from autofuse.ir.shape import Dim, evaluate
from autofuse.optim.form import OPTIMIZER
from autofuse.optim.tune_step import StepTuning
from autofuse.settings.layers import Settings
from autofuse.strategies.enumeration import (
    GENERATED,
    LEAST_FLOPS,
    PARTS,
    WHOLE,
    cut_strategies,
    is_group,
    strategies_of,
)
from autofuse.strategies.strategy import Strategy, kernel_id
from autofuse.tuner.backends import Backend, CBackend, InterpreterBackend, TritonBackend
from autofuse.tuner.benchmark_provider import LETHAL, BenchmarkProvider
from autofuse.tuner.cases import CASE_BYTES, GPU_CASE_BYTES
from autofuse.tuner.ipc import Interrupted
from autofuse.tuner.strategy_provider import STRATEGY, StrategyBenchmarks
from autofuse.tuner.triton_compiler import TritonCompiler
from autofuse.tuner.tune_node import Job, JobLimits, Outcome
from autofuse.tuner.worker_process import Main, NotReady, WorkerProcess

log = logging.getLogger("autofuse.daemon")

POLL_SECONDS = 0.05  # just after work, when more may follow
IDLE_POLL_SECONDS = 0.2  # 0.3 % of a core
IDLE_AFTER_SECONDS = 2.0
HEARTBEAT_SECONDS = 5.0
UNPARK_SECONDS = 60.0
WORKER_START_SECONDS = 3.0  # of CPU time, to import torch
WORKER_IDLE_SECONDS = 60.0  # then its memory is given back
RECENT_RUNS = 32
NEIGHBOURS = 3  # winners of other buckets that a search starts from
OTHER_DEVICES = ("cuda:", "interpreter:")  # beginnings of keys: every GPU of this machine
CUT_BELOW = 1.15  # speedup of one kernel below which it is also tried as two
PATIENT = 4.0  # beside a running script, a job may take this many times as long


class Drained(NamedTuple):
    """What became of the requests of a queue."""

    done: int
    failed: int
    left: int  # for other devices and versions, or beyond the budget


class TuningLoop:
    """Works requests off, one at a time."""

    def __init__(
        self,
        settings: Settings,
        *,
        is_urgent: Callable[[], bool],
        worker_log: IO[bytes] | int | None = None,
    ) -> None:
        """``is_urgent``: whether someone waits for the result. Raises StoreError."""
        self.settings = settings
        self.is_stopping = False
        self.done = self.failed = 0
        self._store = Store.open(settings.run.store)
        self._store.kernel_limit_bytes = settings.cache.max_bytes
        self._is_urgent = is_urgent
        self._files = DaemonFiles(settings)
        self._cpu = cpu_device().key
        self._devices = (self._cpu, *OTHER_DEVICES)
        self._worker_log = worker_log
        self._workshops: dict[str, BenchmarkProvider] = {}  # by device
        self._compiler: TritonCompiler | None = None
        self._versions = versions()
        self._started_at = time.time()
        self._neighbours = Peers(peers_folder(settings))
        self._yielding = Scheduler(
            settings.tuner,
            self._neighbours,
            is_urgent=is_urgent,
            is_stopping=lambda: self.is_stopping,
            saved=self._saved,
        )
        self._gains: dict[tuple[str, str], tuple[float, float]] = {}  # by node and bucket: when decided, us a call
        self._winners: dict[str, dict[Bucket, Config]] = {}
        self._spent: dict[int, float] = {}  # seconds of work by run
        self._parked: list[TuneRequest] = []  # of runs whose budget is spent
        self._parked_at = 0.0
        self._seen_version = -1
        self._looked_at = 0.0
        self._beat_at = 0.0
        self._job = ""
        self._run_id: int | None = None  # whose request is in work
        self._answered: set[str] = set()  # requests that a group has asked for as one of its parts
        self._not_ready: dict[str, tuple[float, str]] = {}  # by device: until when, and why

    # ---- loops ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Work until told to stop, or idle for ``tuner.idle_exit_seconds``. Raises StoreError."""
        requeued = self._take_up()
        cache = self.settings.cache
        self._store.prune(cache.history_days, cache.history_bytes)
        log.info("serving %s as process %d; %d requests taken up again", self._store.path, os.getpid(), requeued)
        idle_since = time.monotonic()
        self._heartbeat("idle")
        while not self.is_stopping:
            request = self._next()
            if request is not None:
                self.work(request)
                idle_since = time.monotonic()
                continue
            if not self._yielding.may_begin():
                idle_since = time.monotonic()  # there may be work, but it is another daemon's turn
            self._yielding.end()
            if self._store.was_moved:
                log.info("the store was put aside, ending")
                return
            idle_seconds = time.monotonic() - idle_since
            if idle_seconds >= self.settings.tuner.idle_exit_seconds:
                log.info("nothing to do for %.0f s, ending", idle_seconds)
                return
            if idle_seconds >= WORKER_IDLE_SECONDS:
                self._kill_workers()
            self._beat("idle")
            time.sleep(POLL_SECONDS if idle_seconds < IDLE_AFTER_SECONDS else IDLE_POLL_SECONDS)

    def drain(self, on_progress: Callable[[int, int], None], again: bool = False) -> Drained:
        """Work until the queue is empty or ``tuner.budget_seconds`` are spent; ``again``: on what has failed, too."""
        self._take_up()
        if again:
            self._store.requeue_failed()
        deadline = time.monotonic() + self.settings.tuner.budget_seconds
        while not self.is_stopping and time.monotonic() < deadline:
            request = self._store.next_request(*self._devices, versions=self._versions, kind=self._files.kind)
            if request is None:
                break
            queued = self._store.queue_length(*self._devices).queued
            on_progress(self.done + self.failed, self.done + self.failed + queued + 1)
            self.work(request)
        return Drained(self.done, self.failed, self._store.queue_length().open)

    def _take_up(self) -> int:
        """Queue again what daemons before us had in work or could not do where they ran; how many requests."""

        def is_served(kind: str) -> bool:
            return kind != self._files.kind and self._files.is_served(kind)  # our own lock is held by us

        return self._store.requeue_stale(is_served) + self._store.requeue_failed(NOT_READY)

    def close(self) -> None:
        """Give everything back: requests, workers, store."""
        self._kill_workers()
        self._yielding.end()
        try:
            self._unpark()
            self._heartbeat("stopped")
        except StoreError as error:
            log.error("%s", error)
        self._store.close()

    def _next(self) -> TuneRequest | None:
        """The next request whose run has budget left; None where there is none. Cheap while nothing changes."""
        if self._store.was_moved:
            return None  # nobody asks for what is queued there
        now = time.monotonic()
        version = self._store.data_version()
        if version == self._seen_version and now - self._looked_at < HEARTBEAT_SECONDS:
            return None
        if self._parked and (now - self._parked_at > UNPARK_SECONDS or self._is_urgent()):
            self._unpark()
        while not self.is_stopping and self._yielding.may_begin():
            request = self._store.next_request(*self._devices, versions=self._versions, kind=self._files.kind)
            if request is None:
                self._seen_version, self._looked_at = version, now
                return None
            if self._spent.get(request.run_id or 0, 0.0) < self.settings.tuner.budget_seconds:
                return request
            self._parked.append(request)
            self._parked_at = now
        return None

    def _unpark(self) -> None:
        """Queue again what was put aside: its run may be another one by now, with a budget of its own."""
        while self._parked:
            self._store.finish_request(self._parked[-1].key, "requeued", "the run's tuning budget was spent")
            self._parked.pop()

    # ---- one request ----------------------------------------------------------------------------

    def work(self, request: TuneRequest) -> None:
        """Run the job of a request and store what it found. Raises StoreError."""
        try:
            self._work(request)
        finally:
            self._yielding.end()

    def _work(self, request: TuneRequest) -> None:
        if request.key.digest in self._answered:
            self._answered.discard(request.key.digest)
            self._store.finish_request(request.key, "done")
            self.done += 1
            return
        self._job = f"{request.key.fusion_id[:12]} [{request.bucket.label}]"
        self._beat("tuning", at_once=self._is_urgent() is False)
        began = self._clock()
        self._run_id = request.run_id
        try:
            self._check_ready(request.key.device)
            outcome = self._tune(request)
        except Interrupted:
            self._store.finish_request(request.key, "requeued", "the daemon was stopped")
            return
        except StoreError:
            raise
        except (NotReady, CompilerNotReady, OSError, MemoryError) as error:  # of this moment, not of the request
            problem = str(error) or type(error).__name__
            self._not_ready.setdefault(request.key.device, (time.monotonic() + NOT_READY_SECONDS, problem))
            log.warning("%s: %s", self._job, problem)
            self._store.finish_request(request.key, "failed", f"{NOT_READY}{problem}")
            self.failed += 1
            return
        except Exception as error:
            log.exception("%s failed", self._job)
            self._store.finish_request(request.key, "failed", f"{type(error).__name__}: {error}")
            self.failed += 1
            return
        seconds = self._clock() - began
        self._spent[request.run_id or 0] = self._spent.get(request.run_id or 0, 0.0) + seconds
        self._keep(request, outcome)
        self.done += 1
        for decision in outcome.decisions:
            why = f"{decision_words(decision.reason)}: {decision.detail}"
            text = f"{decision.candidate.variant} {decision.speedup:.2f}x, {why}"
            log.info("%s %s (%.2f s)", self._job, text, seconds)

    def _check_ready(self, device: str) -> None:
        """Raises NotReady for a device that has been tried in vain a moment ago."""
        until, problem = self._not_ready.get(device, (0.0, ""))
        if time.monotonic() < until:
            raise NotReady(problem)
        self._not_ready.pop(device, None)

    def _tune(self, request: TuneRequest) -> Outcome:
        worker = self._workshop(request.key.device).worker
        if worker.pid is None:
            self._rest(WORKER_START_SECONDS)
        worker.start()  # imports torch while the first kernels compile
        if OPTIMIZER in request.node:
            provider = self._workshop(request.key.device)
            limits, compilers = self._limits(request), provider.compilers()
            return StepTuning(request, provider.backend, provider.worker, limits, self._rest, compilers).run()
        form = NodeForm.from_json(dict(request.node))
        if is_group(form):
            strategies = strategies_of(form, request.key.device != self._cpu)
            return self._tune_ways(
                request, form, [strategy for strategy in strategies if _is_large(strategy, request, form)]
            )
        outcome = self._tune_kernel(request, form)
        if self._may_cut(outcome.decisions):
            strategies = cut_strategies(form)
            if strategies:
                outcome = _with_cuts(outcome, self._tune_ways(request, form, strategies, outcome))
        return outcome

    @staticmethod
    def _may_cut(decisions: Sequence[Decision]) -> bool:
        """Whether one kernel gains so little that two might gain more."""
        known = [d for d in decisions if d.reason in ("won", "no_gain", "below_margin")]
        return bool(known) and known[0].speedup < CUT_BELOW

    def _tune_ways(
        self, request: TuneRequest, form: NodeForm, strategies: Sequence[Strategy], whole: Outcome | None = None
    ) -> Outcome:
        """Race programs of several kernels. ``whole``: what is known of the node as one kernel."""
        provider = self._workshop(request.key.device)

        def tune_part(part: NodeForm, printer: str, sizes: Sequence[Dim]) -> KernelRecord | None:
            if whole is not None and part.text() == form.text():
                return next((k for k in whole.kernels), None)
            return self._part_winner(request, form, part, printer, sizes)

        bench = StrategyBenchmarks(
            provider, request.key.fusion_id, form, request.key.threads, request.bucket, strategies, tune_part
        )
        # Few, and built already: all are tried, in one wave. What comes after the first wave has to promise to pay,
        # and beside four rewrites to a vendor's kernels a generated product would hardly ever be seen.
        limits = replace(self._limits(request), trials=len(strategies), wave=len(strategies))
        outcome = Job(request, bench, limits, (), self._clock).run()
        outcome.decisions = [replace(d, detail=_ways_detail(d, outcome, strategies)) for d in outcome.decisions]
        if whole is None and _parts_lost(outcome):
            stays = Candidate(EAGER, IN_ONE)
            outcome.decisions = [
                replace(d, candidate=stays) if d.candidate.variant == EAGER else d for d in outcome.decisions
            ]
        return outcome

    def _part_winner(
        self, request: TuneRequest, form: NodeForm, part: NodeForm, printer: str, sizes: Sequence[Dim]
    ) -> KernelRecord | None:
        """The kernel of a part in the request's bucket: a known decision's, else tuned now; None where eager wins."""

        def at(values: Sequence[int]) -> tuple[int, ...]:
            named = dict(zip(form.symbols, values, strict=True))
            return tuple(evaluate(size, named) for size in sizes)

        # Sizes grow with the symbols, so the ends of the ranges are those of the part's.
        ends = zip(at([r[0] for r in request.bucket.ranges]), at([r[1] for r in request.bucket.ranges]), strict=True)
        bucket = Bucket(tuple(ends))
        calls: dict[tuple[int, ...], int] = {}
        for shape in request.shapes:
            values = at(shape.symbol_values)
            calls[values] = calls.get(values, 0) + shape.calls
        key = replace(request.key, fusion_id=kernel_id(part, printer), bucket=bucket.label)
        known = [
            stored.decision
            for stored in self._store.decision_history(key.fusion_id)
            if stored.decision.key == key and stored.decision.bucket == bucket
        ]
        kernel = self._store.get_kernel(known[-1].compile_key) if known and known[-1].compile_key else None
        if not known or (known[-1].compile_key and kernel is None):
            shapes = tuple(ObservedShape(values, n) for values, n in sorted(calls.items(), key=lambda i: -i[1]))
            own = replace(request, key=key, node=part.to_json(), bucket=bucket, shapes=shapes)
            outcome = self._tune_kernel(own, part, printer)
            self._write(own, outcome)
            self._answered.add(key.digest)
            known = [d for d in outcome.decisions if d.bucket == bucket]
            winner = known[-1].compile_key if known else None
            kernel = self._store.get_kernel(winner) if winner else None
        return kernel

    def _clock(self) -> float:
        """Seconds of work."""
        return time.monotonic() - self._yielding.rested_seconds

    def _tune_kernel(self, request: TuneRequest, form: NodeForm, printer: str = LOOP) -> Outcome:
        """One node as one kernel."""
        provider = self._workshop(request.key.device)
        winners = self._known_winners(request)
        bench = provider.bench(request.key.fusion_id, form, request.key.threads, request.bucket, printer)
        nearest = sorted(winners, key=lambda bucket: distance(bucket, request.bucket))
        seeds = list(dict.fromkeys(winners[bucket] for bucket in nearest))[:NEIGHBOURS]
        return Job(request, bench, self._limits(request), seeds, self._clock).run()

    def _limits(self, request: TuneRequest) -> JobLimits:
        tuner = self.settings.tuner
        # Beside a script most of the time is spent waiting for a core.
        seconds = tuner.job_seconds * (1.0 if self._is_urgent() else PATIENT)
        is_gpu = request.key.device.startswith("cuda:")
        return JobLimits(
            tuner.trials,
            tuner.rounds,
            tuner.margin,
            seconds,
            self._memory_bytes(request.key.device),
            GPU_CASE_BYTES if is_gpu else CASE_BYTES,
        )

    def _keep(self, request: TuneRequest, outcome: Outcome) -> None:
        self._write(request, outcome)
        self._store.finish_request(request.key, "done")

    def _write(self, request: TuneRequest, outcome: Outcome) -> None:
        for kernel in outcome.kernels:
            self._store.put_kernel(kernel)
        self._store.put_measurements(request.key, outcome.measurements)
        for decision in outcome.decisions:
            self._store.put_decision(decision)
            if decision.reason == "won":
                gain = decision.unfused_us - decision.fused_us
                self._gains[decision.key.fusion_id, decision.bucket.label] = time.time(), gain
            self._note_winner(self._winners.setdefault(self._family(request), {}), decision)

    def _known_winners(self, request: TuneRequest) -> dict[Bucket, Config]:
        """The winner of each bucket of the node so far; read from the store once, with the kernels that kill."""
        family = self._family(request)
        if family not in self._winners:
            self._winners[family] = {}
            for stored in self._store.decision_history(request.key.fusion_id):
                same = (stored.decision.key.device, stored.decision.key.threads)
                if same == (request.key.device, request.key.threads):
                    self._note_winner(self._winners[family], stored.decision)
            for row in self._store.measurements(request.key.fusion_id):
                if row.measurement.status in LETHAL and row.measurement.compile_key:
                    self._workshop(request.key.device).lethal.add(row.measurement.compile_key)
        return self._winners[family]

    def _family(self, request: TuneRequest) -> str:
        return f"{request.key.fusion_id}/{request.key.threads}/{request.key.device}"

    def _note_winner(self, winners: dict[Bucket, Config], decision: Decision) -> None:
        if decision.reason == "won" and decision.candidate.variant != STRATEGY:
            winners[decision.bucket] = decision.candidate.config

    # ---- devices --------------------------------------------------------------------------------

    def _workshop(self, device: str) -> BenchmarkProvider:
        """The workshop for a device, with a worker of its own. Raises CompilerError for one without a compiler."""
        if device not in self._workshops:
            backend = self._backend(device)
            tuner = self.settings.tuner
            worker = WorkerProcess(
                memory_bytes=self._memory_bytes(device),
                timeout_seconds=tuner.worker_timeout_seconds,
                is_stopping=lambda: self.is_stopping,
                stderr=self._worker_log,
                main=Main(
                    backend.worker_module,
                    backend.worker_arguments,
                    lambda variables: as_seen_by(self._asking_pid(), variables),
                ),
                tend=self._yielding.tend,
            )
            # One compilation of Triton at a time: its process has one conversation.
            cores = len(os.sched_getaffinity(0)) if isinstance(backend, CBackend) else 1
            self._workshops[device] = BenchmarkProvider(
                backend,
                worker,
                compilers=lambda: cores if self._is_urgent() else 1,
                stored=self._store.get_kernel,
                rest=self._rest,
            )
        return self._workshops[device]

    def _backend(self, device: str) -> Backend:
        if device == self._cpu:
            toolchain = find_toolchain(self.settings.run.cc or None)
            return CBackend(toolchain, self.settings.tuner.compile_timeout_seconds, self._yielding.tend)
        if device.startswith("interpreter:"):
            return InterpreterBackend()
        find_triton()
        if self._compiler is None:
            self._compiler = TritonCompiler(
                self._store.get_triton_files,
                self._store.put_triton_files,
                is_stopping=lambda: self.is_stopping,
                stderr=self._worker_log,
                tend=self._yielding.tend,
            )
        return TritonBackend(device, self._compiler.compile)

    def _asking_pid(self) -> int | None:
        """The process whose request is in work, None where it has ended or runs on another machine."""
        here = {script.pid for script in self._neighbours.scripts()}
        return next((run.pid for run in self._open_runs() if run.id == self._run_id and run.pid in here), None)

    def _open_runs(self) -> list[RunRow]:
        """Of scripts that may be running on this machine: elsewhere their numbers are other processes'."""
        here = this_machine()
        return [run for run in self._store.runs(RECENT_RUNS) if run.finished_at is None and run.machine == here]

    def _memory_bytes(self, device: str) -> int:
        tuner = self.settings.tuner
        return tuner.gpu_memory_bytes if device.startswith("cuda:") else tuner.memory_bytes

    def _kill_workers(self) -> None:
        for shop in self._workshops.values():
            shop.worker.kill()
        if self._compiler is not None:
            self._compiler.close()

    # ---- manners --------------------------------------------------------------------------------

    def _rest(self, ahead_seconds: float = 0.0) -> None:
        self._yielding.rest(ahead_seconds)
        if self.is_stopping:
            raise Interrupted

    def _saved(self, scripts: Sequence[Script]) -> dict[int, float]:
        """Seconds that kernels decided beside them have saved scripts of this store, by their races."""
        began = {script.pid: script.began for script in scripts}
        found = {}
        for run in self._open_runs() if self._gains else ():
            if run.pid in began:
                calls = self._store.fused_calls(run.id)
                late = {key: gain for key, (at, gain) in self._gains.items() if at > began[run.pid]}
                found[run.pid] = sum(calls.get(key, 0) * gain for key, gain in late.items()) / 1e6
        return found

    def _beat(self, state: str, at_once: bool = False) -> None:
        if at_once or time.monotonic() - self._beat_at > HEARTBEAT_SECONDS:
            self._heartbeat(state)

    def _heartbeat(self, state: str) -> None:
        self._beat_at = time.monotonic()
        self._store.heartbeat(
            DaemonState(
                pid=os.getpid(),
                host=socket.gethostname(),
                started_at=self._started_at,
                state=state,
                job=self._job if state == "tuning" else "",
                queued=self._store.queue_length(*self._devices).queued + len(self._parked),
                done=self.done,
                failed=self.failed,
                data={"rss_bytes": psutil.Process().memory_info().rss},
            )
        )


def _is_large(strategy: Strategy, request: TuneRequest, form: NodeForm) -> bool:
    """Whether the request's sizes are worth a strategy: several blocks of rows, or a matmul that takes its time."""
    largest = dict(zip(form.symbols, (high for _, high in request.bucket.ranges), strict=True))
    if strategy.name == GENERATED:
        products = [k for part, k in zip(strategy.parts, strategy.kernels, strict=True) if part.printer == MATMUL]
        sizes = [[evaluate(size, largest) for size in kernel.sizes] for kernel in products]
        flops = [c_matmul_flops(k.node.form, values) for k, values in zip(products, sizes, strict=True)]
        return max(flops) >= LEAST_FLOPS
    return strategy.rows is None or evaluate(strategy.rows.total, largest) > strategy.rows.count


def _parts_lost(outcome: Outcome) -> bool:
    """Whether the members' kernels, with the products between them, are slower than eager's operations for certain."""
    parts = [m for m in outcome.measurements if dict(m.candidate.config).get(STRATEGY) == PARTS]
    return any(m.speedup_high is not None and m.speedup_high < 1.0 for m in parts)


def _ways_detail(decision: Decision, outcome: Outcome, strategies: Sequence[Strategy]) -> str:
    """The reason for a choice among strategies: what each of them gained."""
    gains = {str(dict(m.candidate.config)[STRATEGY]): m.speedup for m in outcome.measurements if m.speedup is not None}
    seen = ", ".join(f"{name} {gain:.2f}x" for name, gain in sorted(gains.items(), key=lambda item: -item[1]))
    chosen = dict(decision.candidate.config).get(STRATEGY)
    words = next((strategy.detail for strategy in strategies if strategy.name == chosen), "")
    return "; ".join(part for part in (words, f"measured: {seen}" if seen else "", decision.detail) if part)


def _with_cuts(whole: Outcome, cut: Outcome) -> Outcome:
    """One kernel stays unless a strategy has won; what was measured of the strategies is kept, and the reason."""
    merged = Outcome(list(whole.decisions), [*whole.measurements, *cut.measurements], list(whole.kernels))
    first = cut.decisions[0]
    chosen = dict(first.candidate.config).get(STRATEGY)
    if first.reason == "won" and chosen != WHOLE:
        merged.kernels += cut.kernels
        merged.decisions = [first]
    else:
        merged.decisions[0] = replace(merged.decisions[0], detail=f"{merged.decisions[0].detail}; cuts: {first.detail}")
    return merged
