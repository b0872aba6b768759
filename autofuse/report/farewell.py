"""The line at the end of a run: the gain or why there is none, the cost, what to type next.

In: the store and a run that is about to end. Out: one line of text. Guarantee: reads only. `cli.launch` has it called
in the process that keeps the store, so that the script's imports nothing for it.
"""

from __future__ import annotations

from autofuse.db.store import Store
from autofuse.ir.reasons import in_words
from autofuse.report import wording
from autofuse.report.report import Report, load_report, run_of
from autofuse.report.verdict import MISSING_PARTS, balance, verdict


def farewell(store: Store, run_id: int, options: str = "") -> str:
    """``1.51x faster steps. Cost 54.0 s, saved 83.2 s. Next: autofuse report``; ``options``: those of that command."""
    newest = run_of(store, None)
    report = load_report(store, run_id)
    totals = report.totals
    cost = f" {wording.sentence(balance(report))}" if totals.fused_calls or totals.capture_seconds >= 0.05 else ""
    missing = [row.event.kind for row in report.events if row.event.kind in MISSING_PARTS]
    if missing and not totals.fused_calls:  # the run has said more about it
        return f"Nothing ran fused: {in_words(missing[0], wording.NOTICES)}.{cost} Next: autofuse doctor{options}"
    claim = " ".join(verdict(report).claim.split()).rstrip(".")  # names may have lines
    # A report is of the newest run with steps where it is not told which one.
    which = "" if newest is not None and newest.id == run_id else f" --run {run_id}"
    return f"{claim}.{cost}{_still_tuned(report, options)} Next: autofuse report{which}{options}"


def _still_tuned(report: Report, options: str) -> str:
    """That the daemon goes on when the script has ended, and how to end it."""
    count = report.queue.open
    if not count or report.run is None or report.run.mode != "background":
        return ""
    if not report.totals.fused_calls:  # the claim says how many
        return f" To end the tuning: autofuse daemon stop{options}."
    what = wording.plural(count, "kernel is", "kernels are")
    return f" {what} still to be tuned in the background (autofuse daemon stop{options} ends that)."
