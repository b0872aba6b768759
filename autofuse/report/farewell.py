"""The line at the end of a run: the gain or why there is none, the cost, what to type next.

In: the store and a run that is about to end. Out: one line of text. Guarantee: reads only. `cli.launch` has it called
in the process that keeps the store, so that the script's imports nothing for it.
"""

from __future__ import annotations

from autofuse.db.store import Store
from autofuse.report import wording
from autofuse.report.report import load_report, run_of
from autofuse.report.verdict import MISSING_PARTS, balance, verdict


def farewell(store: Store, run_id: int, options: str = "") -> str:
    """``1.51x faster steps. Cost 54.0 s, saved 83.2 s. Next: autofuse report``; ``options``: those of that command."""
    newest = run_of(store, None)
    report = load_report(store, run_id)
    totals = report.totals
    cost = f" {wording.sentence(balance(report))}" if totals.fused_calls or totals.capture_seconds >= 0.05 else ""
    if not totals.fused_calls and any(row.event.kind in MISSING_PARTS for row in report.events):
        command = "autofuse doctor"
    else:  # which shows the newest run with steps where it is not told which one
        which = "" if newest is not None and newest.id == run_id else f" --run {run_id}"
        command = f"autofuse report{which}"
    claim = " ".join(verdict(report).claim.split()).rstrip(".")  # messages and names may have lines
    return f"{claim}.{cost} Next: {command}{options}"
