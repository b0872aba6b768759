"""A report that fits a screen of 80 columns: verdict, cost and saving, ten nodes of one line each, what else there is.

In: a ``Report`` and a rich console. Out: at most 24 lines of text on 80 columns. Guarantee: no row of the table takes a
second line; trouble that was noted is named; what is left out is counted, with the command that shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autofuse.ir.reasons import in_words
from autofuse.report import wording
from autofuse.report.report import NodeLine, Report
from autofuse.report.table import plain_table, say
from autofuse.report.terminal import STYLES, command_line, next_command
from autofuse.report.verdict import balance, verdict, whole_share

MAX_NODES = 10
WIDE = 64  # columns from which times and sizes have room
_SYMBOL = re.compile(r"\b\w+=")  # "s0=8 s1=65..128" is 8 65..128
_SHORT = {"fused": "fused", "eager": "eager", "queued": "queued", "running": "tuning", "failed": "failed"}


def render_brief(report: Report, console: Console) -> None:
    """Print a report in brief; a store without runs prints what to do about it."""
    run = report.run
    if run is None:
        say(console, f"The store {report.store} holds no runs yet.")
        console.print(command_line("Fill it", "autofuse run SCRIPT.py"))
        return
    head = Text(f"Run {run.id}: ", "bold")
    head.append(run.command, "bold cyan")
    head.truncate(console.width, overflow="ellipsis")
    console.print(head, highlight=False)
    gain = verdict(report)
    console.print(Text(gain.sentence, STYLES[gain.kind]), highlight=False)
    console.print(Text(_sums(report)), highlight=False)
    if report.nodes:
        console.print()
        console.print(_nodes(report, console.width), highlight=False)
    console.print()
    for line in _rest(report):
        console.print(Text(line, "dim"), highlight=False)
    console.print(command_line("Next", next_command(report)), highlight=False)


def _sums(report: Report) -> str:
    """Steps, the share of fused calls, cost and saving, in a sentence."""
    totals = report.totals
    paid = f", paid back at step {totals.break_even_step:,}" if totals.break_even_step is not None else ""
    fused = f"{wording.percent(totals.fused_share)} of node calls fused" if totals.fused_calls else "no node call fused"
    return f"{wording.plural(totals.steps, 'step')}, {fused}; {balance(report)}{paid}"


def _nodes(report: Report, width: int) -> Table:
    """One line a node; a narrow terminal has no times and sizes."""
    table = plain_table("")
    table.title = None
    is_wide = width >= WIDE
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("node", no_wrap=True)
    table.add_column("operations", ratio=3, no_wrap=True, overflow="ellipsis")
    if is_wide:
        table.add_column("sizes", ratio=2, no_wrap=True, overflow="ellipsis")
        table.add_column("eager", justify="right", no_wrap=True)
        table.add_column("fused", justify="right", no_wrap=True)
    table.add_column("gain", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for line in report.nodes[:MAX_NODES]:
        times = (wording.microseconds(line.unfused_us), wording.microseconds(line.fused_us))
        table.add_row(
            wording.share_of_time(line.time_share), Text(line.node.rsplit("_", 1)[-1], "dim"),
            line.operations.replace("native_", "") or "?",
            *((Text(_SYMBOL.sub("", line.bucket), "dim"), *times) if is_wide else ()),
            wording.times(line.speedup), _state(line),
        )  # fmt: skip
    return table


def _state(line: NodeLine) -> Text:
    style = {"fused": "green", "failed": "red", "queued": "yellow", "running": "yellow"}.get(line.decision, "")
    return Text(_SHORT.get(line.decision, "open"), style)


def _rest(report: Report) -> Iterator[str]:
    """What the table has not, what trouble there was, and what a longer report shows."""
    if share := whole_share(report):
        yield share
    if report.events:
        event = report.events[-1].event
        count = wording.plural(len(report.events), "note")
        yield wording.shorten(f"{count}, the last: {in_words(event.kind, wording.NOTICES)}: {event.message}", 160)
    counts = (
        (max(0, len(report.nodes) - MAX_NODES), "more node"),
        (len(report.steps), "input shape"),
        (len(report.roots), "module"),
        (sum(line.count for line in report.refusals if not line.accepted), "fusion not made"),
        (len(report.settings), "process setting"),
    )
    parts = [wording.plural(count, one, _many(one)) for count, one in counts if count]
    if parts:
        yield f"Not shown: {', '.join(parts)}. They are in: autofuse report --verbose"


def _many(one: str) -> str:
    return "fusions not made" if one == "fusion not made" else f"{one}s"
