"""The whole report for people: totals in sentences, tables of nodes, steps, modules and settings, notes, what to type.

In: a ``Report`` and a rich console. Out: text on it. Guarantee: readable from 80 columns on; a missing gain, or one
that was not measured, is said in words; every printed number is in the JSON report too.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autofuse.ir.reasons import RootReason, decision_words, in_words
from autofuse.report import wording
from autofuse.report.find import cut
from autofuse.report.metrics import fusion_text, graph_table
from autofuse.report.operators import operator_table
from autofuse.report.report import NodeLine, Report
from autofuse.report.statistics import StepRow
from autofuse.report.table import PlainTable, plain_table, say
from autofuse.report.verdict import facts, is_uncaptured, verdict, whole_share

MAX_NODES = 15  # rows of the table of nodes; the JSON report has all
MAX_STEPS = 8
MAX_EVENTS = 10
MAX_REFUSALS = 8
# Why a module was not captured in a run that might have waited for it.
SHORT_OF_TIME = (RootReason.NOT_YET, RootReason.NOT_OBSERVED, RootReason.TOO_EXPENSIVE)
STYLES = {"gain": "bold green", "loss": "bold red", "none": "bold yellow"}  # of a verdict


def render_report(report: Report, console: Console) -> None:
    """Print all of a report; a store without runs prints what to do about it."""
    if report.run is None:
        say(console, f"The store {report.store} holds no runs yet.")
        console.print(command_line("Fill it", "autofuse run SCRIPT.py"))
        return
    for part in _parts(report):
        console.print(part, highlight=False)
        console.print()
    console.print(command_line("Next", next_command(report)), highlight=False)


def next_command(report: Report) -> str:
    """The command to type after this report."""
    assert report.run is not None
    is_short = is_uncaptured(report) and report.roots[0].reason in SHORT_OF_TIME and report.run.mode != "wait"
    if is_short or (report.run.mode == "off" and not report.totals.fused_calls):
        return f"autofuse run --tune wait {wording.shorten(report.run.command, 60)}"
    if report.queue.open:
        return "autofuse daemon status"
    if report.nodes:
        return f"autofuse explain {cut(report.nodes[0].node)}"
    if report.roots:
        return f"autofuse explain {report.roots[0].name}"
    return "autofuse doctor"


def _parts(report: Report) -> Iterator[RenderableType]:
    yield _header(report)
    yield _totals(report)
    if report.nodes:
        yield _nodes(report)
    if report.operators:
        yield operator_table(report.operators)
    if any(row.routed for row in report.steps):
        yield _steps(report)
    if report.graphs:
        yield graph_table(report.graphs)
        if planned := fusion_text(report.graphs):
            yield Text(planned)
    if report.roots:
        yield _roots(report)
    if report.settings:
        yield _settings(report)
    if any(not line.accepted for line in report.refusals):
        yield _refusals(report)
    if report.events:
        yield _events(report)


# ---- header and totals --------------------------------------------------------------------------------


def _header(report: Report) -> Text:
    run = report.run
    assert run is not None
    device = run.device
    ended = "still running" if run.finished_at is None else f"took {wording.seconds(run.finished_at - run.started_at)}"
    code = "" if run.totals.exit_code is None else f", exit code {run.totals.exit_code}"
    text = Text()
    text.append(f"Run {run.id}: ", "bold")
    text.append(run.command, "bold cyan")
    text.append(f"\nstarted {wording.moment(run.started_at)}, {ended}{code} · tune mode: {run.mode}", "dim")
    text.append(
        f"\n{device.name}, {wording.plural(device.cores, 'core')}, {device.isa.partition('-')[0]} · {run.versions}",
        "dim",
    )
    return text


def _totals(report: Report) -> Panel:
    gain = verdict(report)
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, words in facts(report):
        table.add_row(name, words)
    shown = Group(Text(gain.sentence, STYLES[gain.kind]), "", table)
    return Panel(shown, title="Totals", box=box.ROUNDED, padding=(0, 1))


# ---- tables -------------------------------------------------------------------------------------------


def _nodes(report: Report) -> Table:
    more = len(report.nodes) - MAX_NODES
    left_out = f"and {wording.plural(more, 'more node')}: autofuse report --json" if more > 0 else ""
    caption = "\n".join(text for text in (left_out, whole_share(report)) if text)
    table = plain_table("Fusion nodes by share of step time", caption)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("operations, node and bucket", ratio=5, overflow="fold")
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("eager", justify="right", no_wrap=True)
    table.add_column("fused", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("decision", ratio=3, overflow="fold")
    for line in report.nodes[:MAX_NODES]:
        name = Text(wording.shorten(line.operations.replace("native_", ""), 120) or "?")
        # The end of a node's name is enough for `autofuse explain`, and fits.
        name.append(f"\n{line.node.rsplit('_', 1)[-1]}", "bold dim")
        name.append(f"\n{line.bucket}", "dim cyan")
        speedup = Text(wording.times(line.speedup), _speedup_style(line))
        span = wording.interval(line.speedup_low, line.speedup_high)
        if span and line.variant != "eager":
            speedup.append("\n" + span.replace(" to ", "–"), "dim")
        table.add_row(
            wording.share_of_time(line.time_share), name, f"{line.calls:,}", wording.microseconds(line.unfused_us),
            wording.microseconds(line.fused_us), speedup, decision_in_words(line),
        )  # fmt: skip
    return table


def _speedup_style(line: NodeLine) -> str:
    return "green" if line.decision == "fused" else ""


def decision_in_words(line: NodeLine) -> Text:
    """The decision for a node, and on a line below the reason."""
    style = {"fused": "green", "failed": "red", "queued": "yellow", "running": "yellow"}.get(line.decision, "")
    if line.decision == "fused":
        text = Text(f"fused ({in_words(line.variant or '', wording.VARIANTS)})", style)
    elif line.decision == "eager":
        text = Text("stays eager")
    else:
        text = Text({"queued": "queued", "running": "tuning", "failed": "failed"}.get(line.decision, "open"), style)
    if line.reason != "won":
        text.append("\n" + decision_words(line.reason), "dim")
    return text


def _steps(report: Report) -> Table:
    rows = [row for row in report.steps if row.routed]
    more = len(rows) - MAX_STEPS
    caption = "* hot: these make up 80 % of the routed time and the speedup above"
    if more > 0:
        caption += f"; and {wording.plural(more, 'more shape')}: autofuse report --json"
    table = plain_table("Steps by shape of the input", caption)
    names = {root.root: root.name for root in report.roots}
    several = len({row.root for row in rows}) > 1
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("input", ratio=3, overflow="fold")
    table.add_column("routed", justify="right", no_wrap=True)
    table.add_column("held out", justify="right", no_wrap=True)
    table.add_column("eager", justify="right", no_wrap=True)
    table.add_column("fused", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    for row in rows[:MAX_STEPS]:
        label = wording.signature(row.signature)
        root = f"{names.get(row.root, row.root)} " if several else ""
        table.add_row(
            wording.percent(row.time_share), f"{root}{wording.shorten(label, 80)}{' *' if row.hot else ''}",
            f"{row.routed:,}", f"{row.held_out:,}", wording.microseconds(row.held_out_us),
            wording.microseconds(row.routed_us), _step_speedup(row),
        )  # fmt: skip
    return table


def _step_speedup(row: StepRow) -> Text:
    text = Text(wording.times(row.speedup.median), "green" if row.speedup.is_gain else "")
    span = wording.interval(row.speedup.low, row.speedup.high)
    if span:
        text.append("\n" + span.replace(" to ", "–"), "dim")
    return text


def _roots(report: Report) -> Table:
    table = plain_table("Modules")
    table.add_column("module", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("capture", justify="right", no_wrap=True)
    table.add_column("why", ratio=1, overflow="fold")
    styles = {"captured": "green", "observing": "yellow"}
    for root in report.roots:
        why = Text(in_words(root.reason, wording.ROOT_REASONS))
        if root.detail:
            why.append(f"\n{wording.shorten(root.detail, 200)}", "dim")
        if root.dynamic_dims:
            dims = ", ".join(f"{argument} dim {dim}" for argument, dim in root.dynamic_dims)
            why.append(f"\ndynamic: {wording.shorten(dims, 120)}", "dim")
        if root.kept_graphs:
            why.append(f"\n{wording.plural(root.kept_graphs, 'graph')} traced by an earlier run", "dim")
        capture = wording.seconds(root.capture_seconds) if root.capture_seconds else "–"
        table.add_row(root.name, Text(root.state, styles.get(root.state, "")), f"{root.calls:,}", capture, why)
    return table


def _settings(report: Report) -> Table:
    table = plain_table("Process settings", "measured in separate processes; not part of the speedup above")
    table.add_column("setting", ratio=3, overflow="fold")
    table.add_column("without", justify="right", no_wrap=True)
    table.add_column("with", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    table.add_column("decision", ratio=2, overflow="fold")
    for trial in report.settings:
        name = Text(trial.setting)
        name.append(f"\n{trial.value}", "dim")
        speedup = Text(wording.times(trial.ratio), "green" if trial.decision == "on" else "")
        speedup.append("\n" + wording.interval(trial.low, trial.high).replace(" to ", "–"), "dim")
        decision = Text(trial.decision, "green" if trial.decision == "on" else "")
        decision.append("\n" + in_words(trial.reason, wording.SETTING_REASONS), "dim")
        table.add_row(
            name, wording.microseconds(trial.baseline_us), wording.microseconds(trial.with_us), speedup, decision
        )
    return table


def _refusals(report: Report) -> Table:
    table = plain_table("Fusions not made")
    table.add_column("times", justify="right", no_wrap=True)
    table.add_column("why", ratio=2, overflow="fold")
    table.add_column("for example", ratio=3, overflow="fold", style="dim")
    for line in [line for line in report.refusals if not line.accepted][:MAX_REFUSALS]:
        example = line.example
        shown = wording.shorten(example.operations, 60) + (
            f"\n{wording.shorten(example.source, 100)}" if example.source else ""
        )
        table.add_row(f"{line.count:,}", in_words(line.code, wording.REFUSALS), shown)
    return table


def _events(report: Report) -> Group:
    lines: list[RenderableType] = [Text("Notes", "bold")]
    counts: dict[tuple[str, str], int] = {}
    for row in report.events:
        counts[row.event.kind, row.event.message] = counts.get((row.event.kind, row.event.message), 0) + 1
    for (kind, message), count in list(counts.items())[:MAX_EVENTS]:
        repeats = f" ({count} times)" if count > 1 else ""
        text = Text("• ")
        text.append(in_words(kind, wording.NOTICES), "yellow")
        text.append(f"{repeats}: {wording.shorten(message, 400)}")
        lines.append(text)
    if len(counts) > MAX_EVENTS:
        lines.append(Text(f"and {len(counts) - MAX_EVENTS} more: autofuse report --json", "dim"))
    return Group(*lines)


def command_line(lead: str, command: str) -> Text:
    """A command for the reader to type."""
    text = Text(f"{lead}: ", "dim")
    text.append(command, "bold")
    return text
