"""Runs a script once to see its graphs: every module is captured at its first call, nothing is tuned, nothing is kept.

In: what to run and the settings. Out: the report of that run and the script's exit code.
Guarantee: the user's store is neither read nor written; the script runs in a process of its own, as under
``autofuse run``, with its output and its input where the user has them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from autofuse.db.store import Store
from autofuse.report.report import Report, load_report
from autofuse.settings.layers import Settings
from autofuse.startup.script import Target

# Without tuning, and with an empty store, the graphs are as planned, before anything is measured.
_VALUES = {"run.tune": "off", "run.frozen": False, "run.quiet": True, "observe.enabled": True, "capture.at_once": True}


def explain_script(target: Target, settings: Settings) -> tuple[Report, int]:
    """Run ``target`` once; its report, which is empty where no run was recorded, and its exit code."""
    with tempfile.TemporaryDirectory(prefix="autofuse-explain-") as folder:
        store = Path(folder) / "store.sqlite3"
        child = settings.with_values(_VALUES | {"run.store": str(store)}, "autofuse explain")
        command = [sys.executable, "-m", "autofuse", "run", *child.as_arguments(), target.name, *target.arguments]
        exit_code = _run(command)
        if not store.exists():
            return Report(str(store)), exit_code
        with Store.open(store, readonly=True) as opened:
            return load_report(opened), exit_code


def _run(command: list[str]) -> int:
    """Run a command; its exit code as a shell shows it. At an interrupt, wait on: it reaches the script too."""
    process = subprocess.Popen(command)
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue
        return code if code >= 0 else 128 - code
