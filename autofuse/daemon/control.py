"""The tuning daemon from outside: start, stop, look, and work the queue off in the foreground.

In: settings, which name the store. Out: a detached process, no child of ours, or the same loop in this process.
Guarantee: one process at a time works on requests of one kind (`files`: a lock that ends with its holder); many
starters at once start one; a daemon that was killed leaves nothing that keeps the next from starting; none but this
user's own processes are ended. Never imports torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
from filelock import Timeout

from autofuse.daemon.files import DaemonFiles
from autofuse.daemon.process_id import ProcessId, process_id
from autofuse.daemon.throttle import lower_priority
from autofuse.db.rows import DaemonState
from autofuse.debug import set_level
from autofuse.detached import python_module, spawn
from autofuse.errors import AutofuseError, DaemonError, StoreError
from autofuse.ir.device import usable_cores
from autofuse.private_files import Untrusted
from autofuse.settings.layers import Settings

if TYPE_CHECKING:
    from autofuse.daemon.loop import Drained, TuningLoop

log = logging.getLogger("autofuse.daemon")

START_SECONDS = 30.0  # without CPU progress; beside a script that fills all cores, the daemon's imports take minutes
STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL, which loses only the job in work
POLL_SECONDS = 0.05
URGENT_SECONDS = 3.0  # a waiting script touches the urgent file more often than this
LOG_BYTES = 4 << 20  # a longer log is moved aside when the next daemon starts
LOCK_TAKEN_SECONDS = 3.0
LOCK_TAKEN = 75  # exit code of a daemon that found another one (EX_TEMPFAIL)


# ---- files beside the store -----------------------------------------------------------------------------


def log_path(settings: Settings) -> Path:
    """The daemon's log."""
    return DaemonFiles(settings).log


def urgent_path(settings: Settings) -> Path:
    """The file that a waiting script touches: while it is younger than URGENT_SECONDS, the daemon does not yield."""
    return DaemonFiles(settings).urgent


# ---- from outside ---------------------------------------------------------------------------------------


def running_pid(settings: Settings) -> int | None:
    """The process number of the daemon that serves this process's requests; None where none runs."""
    found = DaemonFiles(settings).running()
    return found.pid if found is not None else None


def is_served(settings: Settings) -> bool:
    """Whether a daemon serves this process's requests, here or in another container."""
    files = DaemonFiles(settings)
    return files.running() is not None or files.is_served(files.kind)


def status(settings: Settings) -> DaemonState | None:
    """The state of the daemon that serves this process, else of another one of the store; None where none runs."""
    found = statuses(settings)
    pid = running_pid(settings)
    return next((state for state in found if state.pid == pid), found[0] if found else None)


def statuses(settings: Settings) -> list[DaemonState]:
    """The states of all running daemons of the store, at most one of each kind (`files`).

    Only the daemon with the latest heartbeat has details; the others are reported as idle.
    """
    running = DaemonFiles(settings).all_running()
    state: DaemonState | None = None
    if running:
        from autofuse.db.store import Store  # scripts only start daemons, and need no more

        with contextlib.suppress(StoreError), Store.open(settings.run.store, readonly=True) as store:
            state = store.daemon.state()
    here = socket.gethostname()
    return [
        state
        if state is not None and (state.pid, state.host) == (found.pid, here)
        else DaemonState(pid=found.pid, host=here, started_at=time.time(), state="idle")
        for found in running
    ]


def ensure_running(settings: Settings) -> int | None:
    """Start the daemon unless one runs; its process number, None where one of another container or machine serves.

    Raises DaemonError where the daemon does not start.
    """
    pid = running_pid(settings)
    if pid is not None:
        return pid
    files = DaemonFiles(settings)
    try:
        files.check()
        with files.start_lock(START_SECONDS):
            return running_pid(settings) or _start(settings)
    except Timeout:
        raise DaemonError(
            f"expected the tuning daemon to start within {START_SECONDS:.0f} s{_look(settings)}"
        ) from None
    except (OSError, NotImplementedError, Untrusted) as error:  # NotImplementedError: a file system without locks
        raise DaemonError(f"expected to start the tuning daemon, found {error}") from error


def launch(settings: Settings) -> None:
    """Start a daemon unless one runs, without waiting for it: for a process that is about to end.

    The daemon's process number is written at once, so that `stop` also finds a daemon that has not begun to serve.
    Raises DaemonError.
    """
    files = DaemonFiles(settings)
    try:
        files.check()
        with files.start_lock(0):
            if running_pid(settings) is None:
                files.announce(spawn_daemon(settings))
    except Timeout:
        return  # another process is starting one
    except (OSError, NotImplementedError, Untrusted) as error:
        raise DaemonError(f"expected to start the tuning daemon, found {error}") from error


def _start(settings: Settings) -> int | None:
    files = DaemonFiles(settings)
    process = process_id(spawn_daemon(settings))
    deadline, used = time.monotonic() + START_SECONDS, 0.0
    has_ended = False
    while time.monotonic() < deadline:
        pid = running_pid(settings)
        if pid is not None:
            return pid
        if not has_ended and not process.is_alive:
            if not files.is_served(files.kind):
                raise DaemonError(f"expected the tuning daemon to run, found that it ended{_look(settings)}")
            has_ended = True  # another daemon took the lock first, and has not written its number yet
            deadline = min(deadline, time.monotonic() + LOCK_TAKEN_SECONDS)
        elif (now_used := _cpu_seconds(process.pid)) > used:
            deadline, used = time.monotonic() + START_SECONDS, now_used
        time.sleep(POLL_SECONDS)
    if has_ended:
        return None
    if process.is_alive:
        os.kill(process.pid, signal.SIGKILL)
    raise DaemonError(f"expected the tuning daemon to start within {START_SECONDS:.0f} s{_look(settings)}")


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process; 0 where they cannot be read."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def spawn_daemon(settings: Settings) -> int:
    """Start a daemon process; its process number. Raises OSError and Untrusted."""
    command, environment = python_module("autofuse")
    with DaemonFiles(settings).open_log(LOG_BYTES) as output:
        environment |= settings.as_variables()
        pid = spawn([*command, "daemon", "serve", *settings.as_arguments()], environment, output)
    lower_priority(settings.tuner.nice, pid)  # at once: the daemon's imports take a core for seconds
    with contextlib.suppress(OSError):
        os.sched_setaffinity(pid, usable_cores())  # the script may have pinned this thread since
    return pid


def _look(settings: Settings) -> str:
    return f"; the reason is in its log, type: tail {log_path(settings)}"


def stop(settings: Settings) -> bool:
    """End all daemons of the store; True if any was running. Queued requests stay queued. Raises DaemonError."""
    running = DaemonFiles(settings).all_running()
    for process in running:
        end_process(process)
    return bool(running)


def end_process(process: ProcessId) -> None:
    """End a daemon, by SIGKILL where SIGTERM does not. Raises DaemonError if it is another user's or does not end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not process.is_alive:
            return
        if not process.is_ours:
            raise DaemonError(f"expected a daemon of your own, found that process {process.pid} is another user's")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if not process.is_alive:
                return
            time.sleep(POLL_SECONDS)
    raise DaemonError(f"expected process {process.pid} to end, found that not even SIGKILL ends it")


# ---- the process itself ---------------------------------------------------------------------------------


def serve(settings: Settings) -> None:
    """Run as the daemon until stopped or idle; exit with LOCK_TAKEN where another daemon serves, with 1 on an error."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    set_level(settings.run.debug)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.getpriority(os.PRIO_PROCESS, 0) < settings.tuner.nice:  # started by hand, not by `spawn_daemon`
        lower_priority(settings.tuner.nice)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited from a script that ignores it
    try:
        files = DaemonFiles(settings)
        files.check()
        with files.lock():
            from autofuse.daemon.loop import TuningLoop  # scripts only start daemons, and need no more

            loop = TuningLoop(settings, is_urgent=lambda: someone_waits(settings))
            with _announced(files, loop):
                loop.serve()
    except Timeout:
        log.info("another daemon serves %s", settings.run.store)
        sys.exit(LOCK_TAKEN)
    except (AutofuseError, OSError) as error:
        log.error("%s", error)
        sys.exit(1)


def drain(
    settings: Settings, on_progress: Callable[[int, int], None] = lambda done, total: None, *, again: bool = False
) -> Drained:
    """Work off the queue in this process, at full speed, until it is empty or ``tuner.budget_seconds`` are spent.

    ``on_progress(done, total)``; ``again``: also tune requests that failed before. Running daemons are ended first: a
    store has one writer of decisions. Raises DaemonError, StoreError and CompilerError.
    """
    stop(settings)
    files = DaemonFiles(settings)
    try:
        files.check()
        with files.lock(), files.open_log(LOG_BYTES) as output:
            from autofuse.daemon.loop import TuningLoop

            loop = TuningLoop(settings, is_urgent=lambda: True, worker_log=output)
            with _announced(files, loop):
                return loop.drain(on_progress, again)
    except Timeout:
        raise DaemonError("expected to work on the store alone, found that another process has its lock") from None
    except (OSError, Untrusted) as error:
        raise DaemonError(f"expected a store beside which files can be written, found {error}") from error


@contextlib.contextmanager
def _announced(files: DaemonFiles, loop: TuningLoop) -> Iterator[None]:
    """Announce this process beside the store, and let SIGTERM and SIGINT stop the loop; at the end close it."""

    def ask(number: int, frame: FrameType | None) -> None:
        log.info("asked to stop by signal %d", number)
        loop.is_stopping = True

    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, ask) for n in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        files.announce(os.getpid())
        yield
    finally:
        loop.close()
        files.withdraw()
        for number, handler in before.items():
            signal.signal(number, handler)


def someone_waits(settings: Settings) -> bool:
    """Whether a script has touched the urgent file within URGENT_SECONDS."""
    try:
        return abs(time.time() - urgent_path(settings).stat().st_mtime) < URGENT_SECONDS  # abs: clocks may differ
    except OSError:
        return False
