"""The tuning daemon: one process for each store, the only writer of decisions. It never imports torch.

In: requests in the store. Out: measurements, decisions, kernels in the store.
Guarantee: one daemon at a time (a lock file beside the store); low priority, within its share of a core
while a script runs, at full speed while a script waits; ``kill -9`` at any time loses only the job at hand,
which the next daemon takes up again; ends by itself when idle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import psutil
from filelock import FileLock, Timeout

from autofuse.codegen.build import find_toolchain
from autofuse.db.rows import DaemonState
from autofuse.db.store import Store
from autofuse.errors import DaemonError, StoreError
from autofuse.ir.device import cpu_device
from autofuse.ir.records import Config, Decision, TuneRequest
from autofuse.settings import Settings
from autofuse.tuner.job import Job, JobLimits, KernelMaker, Outcome
from autofuse.tuner.worker import Worker

log = logging.getLogger("autofuse.daemon")

POLL_SECONDS = 0.2
START_SECONDS = 20.0
STOP_SECONDS = 15.0
URGENT_SECONDS = 3.0  # a script that waits renews its mark more often than this


# ---- files beside the store ---------------------------------------------------------------------------


def log_path(settings: Settings) -> Path:
    """The daemon's log."""
    return _beside(settings, ".daemon.log")


def urgent_path(settings: Settings) -> Path:
    """Touched by a script that waits: the daemon need not yield while its age is below URGENT_SECONDS."""
    return _beside(settings, ".urgent")


def _beside(settings: Settings, suffix: str) -> Path:
    store = Path(settings.run.store)
    return store.with_name(store.name + suffix)


def _lock(settings: Settings) -> FileLock:
    return FileLock(_beside(settings, ".daemon.lock"))


def _pid_path(settings: Settings) -> Path:
    return _beside(settings, ".daemon.pid")


# ---- from outside ----------------------------------------------------------------------------------------


def running_pid(settings: Settings) -> int | None:
    """The daemon's process, None where none serves the store."""
    lock = _lock(settings)
    if not Path(lock.lock_file).exists():
        return None
    try:
        with lock.acquire(timeout=0):
            return None  # nobody holds it
    except Timeout:
        with contextlib.suppress(OSError, ValueError):
            return int(_pid_path(settings).read_text())
        return 0  # somebody does, but has not written its number yet
    except OSError:
        return None


def status(settings: Settings) -> DaemonState | None:
    """What the running daemon said last; None where none runs."""
    pid = running_pid(settings)
    if pid is None:
        return None
    with contextlib.suppress(StoreError), Store.open(settings.run.store, readonly=True) as store:
        state = store.daemon_state()
        if state is not None and state.pid == pid:
            return state
    return DaemonState(pid=pid, host=socket.gethostname(), started_at=time.time(), state="idle")


def ensure_running(settings: Settings) -> int:
    """The daemon's process number, started where there was none. Raises DaemonError where it does not start."""
    pid = running_pid(settings)
    if pid:
        return pid
    Path(settings.run.store).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "autofuse", "daemon", "serve", "--store", str(settings.run.store)]
    with open(log_path(settings), "ab") as output:
        process = subprocess.Popen(
            [*command, *settings.as_arguments()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # outlives the script and its terminal
            cwd="/",
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        pid = running_pid(settings)
        if pid:
            return pid
        if process.poll() not in (None, 0):  # 0: another one was faster
            raise DaemonError(
                f"expected the tuning daemon to start, found that it ended with exit code {process.returncode}; "
                f"see {log_path(settings)}"
            )
        time.sleep(0.05)
    raise DaemonError(f"expected the tuning daemon within {START_SECONDS:.0f} s; see {log_path(settings)}")


def stop(settings: Settings) -> bool:
    """End the daemon; whether one was running. Raises DaemonError where it does not end."""
    pid = running_pid(settings)
    if not pid:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        if running_pid(settings) is None:
            return True
        time.sleep(0.05)
    raise DaemonError(f"expected process {pid} to end within {STOP_SECONDS:.0f} s; to force it, type: kill -9 {pid}")


# ---- the daemon itself -----------------------------------------------------------------------------------


def serve(settings: Settings) -> None:
    """Be the daemon until stopped or idle; returns at once where the store has one."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    lock = _lock(settings)
    try:
        with lock.acquire(timeout=0):
            _pid_path(settings).write_text(str(os.getpid()))
            try:
                _Daemon(settings).run()
            finally:
                _pid_path(settings).unlink(missing_ok=True)
    except Timeout:
        log.info("another daemon serves %s", settings.run.store)


def drain(settings: Settings, on_progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Work the queue off in this process, at full speed; returns how many requests were handled.

    A running daemon is stopped first, for a store has one writer of decisions.
    """
    stop(settings)
    with _lock(settings).acquire(timeout=STOP_SECONDS):
        daemon = _Daemon(settings, foreground=True)
        return daemon.drain(on_progress)


class _Daemon:
    def __init__(self, settings: Settings, foreground: bool = False) -> None:
        self.settings = settings
        self.foreground = foreground
        self.store = Store.open(settings.run.store)
        self.store.kernel_limit_bytes = settings.cache.max_bytes
        self.toolchain = find_toolchain(settings.run.cc or None)
        self.maker = KernelMaker(self.toolchain)
        self.maker.stored = self.store.get_kernel
        tuner = settings.tuner
        self.worker = Worker(
            memory_bytes=tuner.memory_bytes,
            timeout_seconds=tuner.worker_timeout_seconds,
            nice=0 if foreground else tuner.nice,
        )
        self.device = cpu_device().key
        self.lethal: set[str] = set()
        self.winners: dict[str, list[Config]] = {}
        self.spent: dict[int, float] = {}  # tuning seconds by run
        self.started_at = time.time()
        self.stopping = False
        self.done = self.failed = 0

    # ---- loops ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped or idle for long enough."""
        self._lower_priority()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        requeued = self.store.requeue_stale(psutil.pid_exists)
        log.info("serving %s as process %d, %d requests taken up again", self.settings.run.store, os.getpid(), requeued)
        idle_since = time.monotonic()
        self._heartbeat("idle")
        try:
            while not self.stopping:
                request = self._next()
                if request is None:
                    if time.monotonic() - idle_since > self.settings.tuner.idle_exit_seconds:
                        log.info("idle, ending")
                        return
                    time.sleep(POLL_SECONDS)
                    continue
                began = time.monotonic()
                self._work(request)
                idle_since = time.monotonic()
                self._yield(idle_since - began)
        except StoreError as error:
            log.error("the store cannot be used any more: %s", error)
        finally:
            self.worker.kill()
            with contextlib.suppress(StoreError):
                self._heartbeat("stopped")
                self.store.close()

    def drain(self, on_progress: Callable[[int, int], None]) -> int:
        """Work off everything that is queued."""
        self.store.requeue_stale(psutil.pid_exists)
        try:
            while (request := self._next()) is not None:
                left = self.store.queue_length().queued
                on_progress(self.done + self.failed, self.done + self.failed + left + 1)
                self._work(request)
            return self.done + self.failed
        finally:
            self.worker.kill()
            self._heartbeat("stopped")
            self.store.close()

    def _next(self) -> TuneRequest | None:
        return self.store.next_request(self.device, pid=os.getpid())

    # ---- one request ---------------------------------------------------------------------------------------

    def _work(self, request: TuneRequest) -> None:
        settings = self.settings.tuner
        run = request.run_id or 0
        label = f"{request.key.fusion_id} [{request.bucket.label}]"
        self._heartbeat("tuning", label)
        if self.spent.get(run, 0.0) > settings.budget_seconds and not self.foreground:
            self.store.finish_request(request.key, "failed", "the run's tuning budget was spent")
            self.failed += 1
            return
        began = time.monotonic()
        urgent = self._urgent()
        limits = JobLimits(
            trials=settings.trials,
            rounds=settings.rounds,
            margin=settings.margin,
            job_seconds=settings.job_seconds,
            compile_timeout_seconds=settings.compile_timeout_seconds,
            compile_jobs=len(os.sched_getaffinity(0)) if urgent else 1,
        )
        fusion_id = request.key.fusion_id
        try:
            job = Job(request, self.maker, self.worker, limits, self._neighbours(request), self.lethal)
            outcome = job.run()
        except Exception as error:
            log.exception("%s failed", label)
            self.store.finish_request(request.key, "failed", f"{type(error).__name__}: {error}")
            self.failed += 1
            return
        if self.stopping:  # the worker was taken away from the job: what it found says nothing
            self.store.finish_request(request.key, "requeued", "the daemon was stopped")
            return
        self._keep(request, outcome)
        self.done += 1
        seconds = time.monotonic() - began
        self.spent[run] = self.spent.get(run, 0.0) + seconds
        for decision in outcome.decisions:
            text = f"{decision.candidate.variant} {decision.speedup:.2f}x {decision.reason} ({seconds:.2f} s)"
            log.info("%s %s", label, text)
            if decision.reason == "won":
                self.winners.setdefault(fusion_id, []).insert(0, decision.candidate.config)

    def _keep(self, request: TuneRequest, outcome: Outcome) -> None:
        """Kernels first: whoever reads the decision finds its kernel."""
        for kernel in outcome.kernels:
            self.store.put_kernel(kernel)
        self.store.put_measurements(request.key, outcome.measurements)
        for decision in outcome.decisions:
            self.store.put_decision(decision)
        self.store.finish_request(request.key, "done")

    def _neighbours(self, request: TuneRequest) -> list[Config]:
        """Winning configurations of the node in other buckets, to start from."""
        fusion_id = request.key.fusion_id
        if fusion_id not in self.winners:
            decisions: list[Decision] = [d.decision for d in self.store.decision_history(fusion_id=fusion_id)]
            found = [d.candidate.config for d in decisions if d.reason == "won"]
            self.winners[fusion_id] = list(dict.fromkeys(reversed(found)))
        return self.winners[fusion_id][:3]

    # ---- manners -------------------------------------------------------------------------------------------

    def _urgent(self) -> bool:
        """Whether someone waits for us, so that nobody is disturbed."""
        if self.foreground:
            return True
        try:
            return time.time() - urgent_path(self.settings).stat().st_mtime < URGENT_SECONDS
        except OSError:
            return False

    def _yield(self, busy_seconds: float) -> None:
        """Rest long enough to stay within the share of a core, unless someone waits."""
        rest = busy_seconds * (100.0 / self.settings.tuner.cpu_percent - 1.0)
        deadline = time.monotonic() + rest
        if rest > 1.0:
            self._heartbeat("yielding")
        while time.monotonic() < deadline and not self.stopping and not self._urgent():
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))

    def _lower_priority(self) -> None:
        with contextlib.suppress(OSError):
            os.nice(self.settings.tuner.nice)
        with contextlib.suppress(OSError, AttributeError, psutil.Error):
            psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)

    def _heartbeat(self, state: str, job: str = "") -> None:
        queue = self.store.queue_length()
        self.store.heartbeat(
            DaemonState(
                pid=os.getpid(),
                host=socket.gethostname(),
                started_at=self.started_at,
                state=state,
                job=job,
                queued=queue.queued,
                done=self.done,
                failed=self.failed,
            )
        )

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        log.info("asked to stop by signal %d", number)
        self.stopping = True
        self.worker.kill()  # a job in progress ends as lost and stays queued
