"""A part of a process under autofuse: the session of a block, a notebook's cell or a trainer's run.

In: settings. Out: `Watched`, which is entered and left, and tells what the part gained. Guarantee: where autofuse is
switched off, or fails to begin, the part runs as it is; where a session of the process goes on already (``autofuse
run``), it is used and left as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autofuse.preserve_rng import untouched
from autofuse.settings.layers import Settings, load
from autofuse.stderr import say

if TYPE_CHECKING:
    from autofuse.report.report import Report
    from autofuse.runtime.session import Session
    from autofuse.runtime.store_thread import StoreThread

WIDTH = 80  # columns of a report's text


class Watched:
    """``with Watched(load()) as part: ...``, then ``part.report()``; see `autofuse.session`."""

    def __init__(self, settings: Settings, command: str) -> None:
        self._settings = settings
        self._command = command
        self._session: Session | None = None
        self._is_ours = False
        self._store_thread: StoreThread | None = None

    @property
    def run_id(self) -> int | None:
        """The number of the run in the store; known once something of it has been written, at the latest at its end."""
        return None if self._store_thread is None else self._store_thread.run_id

    def __enter__(self) -> Watched:
        if self._settings.run.disable:
            return self
        with untouched():
            from autofuse import sessions
            from autofuse.runtime import session as running

        before = running.running_session()
        try:
            self._session = before or sessions.start_session(self._settings, self._command)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            say(f"the code runs without autofuse ({reason}); 'autofuse doctor' looks for the cause")
            return self
        self._is_ours = before is None
        self._store_thread = self._session.context.store_thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            if self._is_ours:
                self._session.finish(0 if error is None else 1)
            self._session = None

    def report(self) -> str:
        """What was gained, as ``autofuse report`` prints it. Inside of the block: what has been written so far."""
        with untouched():  # rich draws where it is imported, and for some of its styles
            from rich.console import Console

            from autofuse.report.brief import render_brief

            found = self._load()
            if found is None:
                return "Nothing was watched: autofuse is switched off, or its store could not be used.\n"
            out = StringIO()
            render_brief(found, Console(file=out, width=WIDTH, highlight=False))
        return out.getvalue()

    def metrics(self) -> dict[str, float]:
        """The totals of the run as numbers by name, for trackers; empty where nothing was watched."""
        found = self._load()
        return {} if found is None else metrics_of(found)

    def _load(self) -> Report | None:
        run_id = self.run_id
        if run_id is None:
            return None
        with untouched():
            from autofuse.db.store import Store
            from autofuse.report.report import load_report

        with Store.open(self._settings.run.store, readonly=True) as opened:
            return load_report(opened, run_id)


def metrics_of(report: Report) -> dict[str, float]:
    """Of a run, what was measured: ``autofuse/speedup``, ``autofuse/seconds_saved`` and so on."""
    totals = report.totals
    told: Mapping[str, float | None] = {
        "steps": totals.steps,
        "fused_share": totals.fused_share,
        "speedup": totals.speedup.median,
        "speedup_low": totals.speedup.low,
        "speedup_high": totals.speedup.high,
        "seconds_saved": totals.seconds_saved,
        "capture_seconds": totals.capture_seconds,
        "tuning_seconds": totals.tuning_seconds,
        "paused_seconds": totals.paused_seconds,
    }
    return {f"autofuse/{name}": float(value) for name, value in told.items() if value is not None}


def watched(store: str | Path | None = None, tune: str | None = None, **assignments: Any) -> Watched:
    """As `autofuse.session`."""
    given: dict[str, Any] = {name.replace("__", "."): value for name, value in assignments.items()}
    given |= {"run.store": store} if store is not None else {}
    given |= {"run.tune": tune} if tune is not None else {}
    settings = load(given)
    for line in settings.warnings:
        say(line)
    return Watched(settings, " ".join(sys.argv) or "python")
