"""Runs a ``RunJob``: process settings, session, script, farewell.

Guarantee: whatever fails on our side is one line on stderr; the script runs all the same, and its exit code is the
command's. A child that the script forked passes through here too, and leaves without touching the session.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from functools import partial
from typing import TYPE_CHECKING

from autofuse.cli.job import RunJob
from autofuse.cli.output import one_line, say
from autofuse.detached import adopts_orphans
from autofuse.errors import UsageError
from autofuse.ir.device import usable_cores
from autofuse.preserve_rng import untouched
from autofuse.settings.layers import Settings
from autofuse.startup import deferred_imports, gc_pause
from autofuse.startup.script import Ending, Target, first_on_path, run_target

if TYPE_CHECKING:
    from autofuse.db.client import StoreClient
    from autofuse.runtime.session import Session

FAREWELL = "autofuse.report.farewell:farewell"  # called where the store is kept
ERROR_IS_OURS = (
    "the error came out of code that autofuse runs for the script. "
    "Put AUTOFUSE_DISABLE=1 before the command to see whether the script fails without it, too."
)
TRIALS_SECONDS = 2.0  # for the store to answer which trials of process settings stand


def launch(job: RunJob) -> int:
    """Run the script to its end, and end the process as the script did; returns only where there was nothing to run."""
    with gc_pause.paused():
        session = _begin(job.settings, job.target) if job.settings else None
    try:
        ending = run_target(job.target)
    except UsageError as error:
        say(str(error))
        ending = Ending(error.exit_code)
        _finish(session, ending)
        return ending.exit_code
    if session is not None and job.settings is not None and not ending.in_forked_child:
        if ending.error_is_ours:
            say(ERROR_IS_OURS)
        _finish(session, ending, job.settings)
    # Frames live on in exceptions that modules keep of their imports: nothing here may lead to the script's objects.
    del session
    ending.leave()


def _begin(settings: Settings, target: Target) -> Session | None:
    launched, store, command = time.perf_counter(), None, target.command
    first = first_on_path(target)
    hidden = deferred_imports.shadowed(first, deferred_imports.TRACING) if first is not None else []
    if hidden:
        if not settings.run.quiet:
            say(
                f"the script runs without autofuse: torch imports {hidden[0]} to trace, and would find the module of "
                f"that name in {first}. Rename that module."
            )
        return None
    try:
        with untouched():
            store = _store(settings)  # first: its process starts while the rest goes on
            # Imported here, because they import torch, which no other command may load.
            from autofuse.ir.device import cpu_device
            from autofuse.process.apply import apply_process_settings, resolve
            from autofuse.sessions import start_session

            trials = partial(store.ask, "trials.standing", within_seconds=TRIALS_SECONDS) if store is not None else None
            settings = resolve(settings, command, cpu_device().key, trials)
            apply_process_settings(settings)
            # Before there is a session: it leads to the script's objects, which the last collection shall find.
            gc_pause.freeze()
            return start_session(settings, command, store, launched)
    except Exception as error:
        if store is not None:
            store.close()
        if not settings.run.quiet:
            say(f"the script runs without autofuse: {one_line(error)}. 'autofuse doctor' looks for the cause.")
        return None


def _store(settings: Settings) -> StoreClient | None:
    """The store in a process of its own, if there is a core for it; None: open the store in this process."""
    if len(usable_cores()) < 2 or adopts_orphans():
        return None
    from autofuse.db.client import StoreClient
    from autofuse.runtime.store_thread import BUSY_SECONDS

    with contextlib.suppress(OSError):  # no more processes are allowed, or there is no shell
        return StoreClient(settings.run.store, BUSY_SECONDS)
    return None


def _finish(session: Session | None, ending: Ending, settings: Settings | None = None) -> None:
    """End the session; with ``settings`` one line says what the run brought, unless these are for a quiet one."""
    if session is None:
        return
    is_told = settings is not None and not settings.run.quiet
    options = _store_option(settings) if settings is not None else ""
    try:
        session.finish(ending.exit_code, (FAREWELL, options) if is_told else None)
    except (Exception, KeyboardInterrupt) as error:
        say(f"the results of this run are incomplete: {one_line(error)}")
    if is_told and session.is_stored:
        say(session.last_answer or f"Next: autofuse report{options}")


def _store_option(settings: Settings) -> str:
    """The option with which a later command finds the store; empty where it does by itself."""
    given = settings.origin("run.store") == "command line"
    return f" --store {shlex.quote(str(settings.run.store))}" if given else ""
