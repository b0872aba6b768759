"""The tuning daemon from outside: start, stop, look, and work the queue off in the foreground.

In: settings, which name the store. Out: one detached process for each store, or the same loop in this process.
Guarantee: one process at a time works on a store (a lock that ends with its holder); many starters at once start
one; a daemon that was killed leaves nothing that keeps the next from starting. Never imports torch.
Files beside the store: ``.daemon.lock``, ``.daemon.pid``, ``.daemon.log``; ``.urgent`` is touched by scripts that wait.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from autofuse.db.rows import DaemonState
from autofuse.db.store import Store
from autofuse.errors import AutofuseError, DaemonError, StoreError
from autofuse.settings import Settings
from autofuse.tuner.manners import is_alive, lower_priority
from autofuse.tuner.worker_process import python_module

if TYPE_CHECKING:
    from autofuse.tuner.serving import Drained, TuningLoop

log = logging.getLogger("autofuse.daemon")

START_SECONDS = 30.0  # without progress: beside a script that fills all cores, its imports take minutes
STOP_SECONDS = 10.0  # then it is killed, which loses nothing but the job at hand
POLL_SECONDS = 0.05
URGENT_SECONDS = 3.0  # a script that waits renews its mark more often than this
LOG_BYTES = 4 << 20  # a log this long is put aside when the next daemon starts
SAME_START_SECONDS = 3.0  # process start times are derived from a clock that may be adjusted
LOCK_TAKEN_SECONDS = 3.0
LOCK_TAKEN = 75  # exit code of a daemon that found another one (EX_TEMPFAIL)


# ---- files beside the store -----------------------------------------------------------------------------


def log_path(settings: Settings) -> Path:
    """The daemon's log."""
    return _beside(settings, ".daemon.log")


def urgent_path(settings: Settings) -> Path:
    """Touched by a script that waits: the daemon need not yield while its age is below URGENT_SECONDS."""
    return _beside(settings, ".urgent")


def _pid_path(settings: Settings) -> Path:
    return _beside(settings, ".daemon.pid")


def _beside(settings: Settings, suffix: str) -> Path:
    store = Path(settings.run.store)
    return store.with_name(store.name + suffix)


# ---- from outside ---------------------------------------------------------------------------------------


def running_pid(settings: Settings) -> int | None:
    """The process that works on the store, None where there is none. Takes no lock, so it disturbs no start."""
    try:
        found = json.loads(_pid_path(settings).read_text())
        process = psutil.Process(int(found["pid"]))
        started = abs(process.create_time() - float(found["created_at"])) < SAME_START_SECONDS
        return process.pid if started and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, ValueError, TypeError, KeyError, psutil.Error):
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
    """The daemon's process number; started where there was none. Raises DaemonError where it does not start."""
    pid = running_pid(settings)
    if pid is not None:
        return pid
    try:
        _beside(settings, "").parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_beside(settings, ".start.lock"), timeout=START_SECONDS):
            return running_pid(settings) or _start(settings)
    except Timeout:
        raise DaemonError(
            f"expected the tuning daemon to start within {START_SECONDS:.0f} s{_look(settings)}"
        ) from None
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise DaemonError(f"expected to start the tuning daemon, found {error}") from error


def launch(settings: Settings) -> None:
    """Start a daemon where there is none, and do not wait for it: for a process that is about to end.

    Raises DaemonError. It is announced at once, so that whoever wants to end it before it has begun finds it.
    """
    try:
        _beside(settings, "").parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_beside(settings, ".start.lock"), timeout=0):
            if running_pid(settings) is None:
                process = _spawn(settings)
                _announce(settings, process.pid)
                process.returncode = 0  # it outlives this process on purpose: no warning that it still runs
    except Timeout:
        return  # somebody starts one
    except (OSError, NotImplementedError, psutil.Error) as error:
        raise DaemonError(f"expected to start the tuning daemon, found {error}") from error


def _start(settings: Settings) -> int:
    path = log_path(settings)
    process = _spawn(settings)
    deadline, used = time.monotonic() + START_SECONDS, 0.0
    while time.monotonic() < deadline:
        pid = running_pid(settings)
        if pid is not None:
            # Whoever started it is its parent as long as it lives, and must not leave a zombie.
            threading.Thread(target=process.wait, name="autofuse-daemon", daemon=True).start()
            return pid
        code = process.poll()
        if code == LOCK_TAKEN:  # another one was faster, and has not said so yet
            deadline = min(deadline, time.monotonic() + LOCK_TAKEN_SECONDS)
        elif code is not None:
            raise DaemonError(
                f"expected the tuning daemon to run, found that it ended with code {code}{_look(settings)}"
            )
        elif (now_used := _cpu_seconds(process.pid)) > used:
            deadline, used = time.monotonic() + START_SECONDS, now_used
        time.sleep(POLL_SECONDS)
    if process.poll() == LOCK_TAKEN:
        raise DaemonError(f"expected a store without a daemon, found that another container or user serves it: {path}")
    process.kill()
    raise DaemonError(f"expected the tuning daemon to start within {START_SECONDS:.0f} s{_look(settings)}")


def _cpu_seconds(pid: int) -> float:
    """How long a process has worked; 0 where that is not told."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    return 0.0


def _spawn(settings: Settings) -> subprocess.Popen[bytes]:
    path = log_path(settings)
    if path.exists() and path.stat().st_size > LOG_BYTES:
        os.replace(path, path.with_name(path.name + ".old"))
    command, environment = python_module("autofuse")
    with open(path, "ab") as output:
        process = subprocess.Popen(
            [*command, "daemon", "serve", *settings.as_arguments()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # outlives the script and its terminal
            cwd="/",
            env=environment,
        )
    lower_priority(settings.tuner.nice, process.pid)  # from its first moment: its imports take a core for seconds
    return process


def _look(settings: Settings) -> str:
    return f"; the reason is in its log, type: tail {log_path(settings)}"


def stop(settings: Settings) -> bool:
    """End the daemon; whether one was running. Its queued work stays queued. Raises DaemonError."""
    pid = running_pid(settings)
    if pid is None:
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            process = psutil.Process(pid)  # remembers its start, so no later process of that number is hit
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            raise DaemonError(f"expected a daemon of your own, found that process {pid} is another user's") from None
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline:
            if not is_alive(pid):
                return True
            time.sleep(POLL_SECONDS)
    raise DaemonError(f"expected process {pid} to end, found that not even SIGKILL ends it")


# ---- the process itself ---------------------------------------------------------------------------------


def serve(settings: Settings) -> None:
    """Be the daemon until stopped or idle. Ends the process with an exit code where there is nothing to serve."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if os.getpriority(os.PRIO_PROCESS, 0) < settings.tuner.nice:  # started by hand: otherwise its starter did it
        lower_priority(settings.tuner.nice)
    try:
        with _lock(settings):
            from autofuse.tuner.serving import TuningLoop  # not for scripts, which only start daemons

            loop = TuningLoop(settings, is_urgent=lambda: _someone_waits(settings))
            with _announced(settings, loop):
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
    """Work the queue off in this process, at full speed, until it is empty or ``tuner.budget_seconds`` are spent.

    ``on_progress(done, total)``; ``again``: work on what has failed before too. A running daemon is ended first: a
    store has one writer of decisions. Raises DaemonError, StoreError and CompilerError.
    """
    stop(settings)
    try:
        with _lock(settings), open(log_path(settings), "ab") as output:
            from autofuse.tuner.serving import TuningLoop

            loop = TuningLoop(settings, is_urgent=lambda: True, worker_log=output)
            with _announced(settings, loop):
                return loop.drain(on_progress, again)
    except Timeout:
        raise DaemonError("expected to work on the store alone, found that another process has its lock") from None
    except OSError as error:
        raise DaemonError(f"expected a store beside which files can be written, found {error}") from error


def _lock(settings: Settings) -> FileLock:
    """The store's lock, to be held while working on it. Entering raises Timeout where another process holds it."""
    Path(settings.run.store).parent.mkdir(parents=True, exist_ok=True)
    return FileLock(_beside(settings, ".daemon.lock"), timeout=1.0)


def _announce(settings: Settings, pid: int) -> None:
    path = _pid_path(settings)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps({"pid": pid, "created_at": psutil.Process(pid).create_time()}))
    os.replace(fresh, path)


@contextlib.contextmanager
def _announced(settings: Settings, loop: TuningLoop) -> Iterator[None]:
    """While it runs, the loop has its process number beside the store, and ends at SIGTERM and SIGINT."""

    def ask(number: int, frame: FrameType | None) -> None:
        log.info("asked to stop by signal %d", number)
        loop.is_stopping = True

    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, ask) for n in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        _announce(settings, os.getpid())
        yield
    finally:
        loop.close()
        _pid_path(settings).unlink(missing_ok=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _someone_waits(settings: Settings) -> bool:
    try:
        return time.time() - urgent_path(settings).stat().st_mtime < URGENT_SECONDS
    except OSError:
        return False
