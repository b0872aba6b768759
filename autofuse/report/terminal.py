"""A report for people: totals in sentences, tables of nodes, steps, modules and settings, notes, the next command.

In: a ``Report`` and a rich console. Out: text on it. Guarantee: readable from 80 columns on; a missing gain, or one
that was not measured, is said in words; every printed number is in the JSON report too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autofuse.ir.reasons import decision_words, in_words
from autofuse.ir.steps import PAIR_WINDOW, held_out_one_in
from autofuse.report import wording
from autofuse.report.find import cut
from autofuse.report.metrics import fusion_text, graph_table
from autofuse.report.operators import operator_table
from autofuse.report.report import NodeLine, Report, tuning_cost
from autofuse.report.statistics import MIN_PAIRS_FOR_INTERVAL, StepRow
from autofuse.report.strictness import StrictCost
from autofuse.report.table import PlainTable, plain_table, say

MAX_NODES = 15  # rows of the table of nodes; the JSON report has all
MAX_STEPS = 8
MAX_EVENTS = 10
MAX_REFUSALS = 8
MAX_MEMORY = 4


def render_report(report: Report, console: Console, verbose: bool = False) -> None:
    """Print a report; a store without runs prints what to do about it. ``verbose``: eager's operators too."""
    if report.run is None:
        say(console, f"The store {report.store} holds no runs yet.")
        console.print(_command("Fill it", "autofuse run SCRIPT.py"))
        return
    for part in _parts(report, verbose):
        console.print(part, highlight=False)
        console.print()
    console.print(_command("Next", next_command(report)), highlight=False)


def next_command(report: Report) -> str:
    """The command to type after this report."""
    assert report.run is not None
    if report.queue.open:
        return "autofuse daemon status"
    if report.run.mode == "off" and not report.totals.fused_calls:
        return "autofuse run --tune wait SCRIPT.py"
    if report.nodes:
        return f"autofuse explain {cut(report.nodes[0].node)}"
    if report.roots:
        return f"autofuse explain {report.roots[0].name}"
    return "autofuse doctor"


def _parts(report: Report, verbose: bool) -> Iterator[RenderableType]:
    yield _header(report)
    yield _totals(report)
    if report.nodes:
        yield _nodes(report)
    if verbose and report.operators:
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
    totals = report.totals
    verdict, style = gain_in_words(report)
    table = PlainTable.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("steps", f"{totals.steps:,} ({_measured(report)})")
    calls = totals.fused_calls + totals.unfused_calls
    table.add_row(
        "node calls",
        f"{totals.fused_calls:,} of {calls:,} ran fused kernels ({wording.percent(totals.fused_share)})"
        if calls
        else "none: no graph was captured",
    )
    table.add_row("cost", _cost(report))
    table.add_row("saved", _saved(report))
    overhead = totals.observer_overhead_percent
    table.add_row("observer", "–" if overhead is None else f"{overhead:.2f} % of the run's time")
    if report.strict is not None:
        table.add_row("strict", _strict(report.strict))
    table.add_row("memory", _memory(report))
    return Panel(Group(Text(verdict, style), "", table), title="Totals", box=box.ROUNDED, padding=(0, 1))


def gain_in_words(report: Report) -> tuple[str, str]:
    """The verdict on a run in a sentence, and its style."""
    totals, speedup = report.totals, report.totals.speedup
    if not totals.fused_calls:
        steps = [line for line in report.nodes if line.fused_calls]  # an optimizer's, which belong to no graph
        said = _steps_alone(steps) if steps else "Nothing ran fused."
        return f"{said} {_why_nothing_fused(report)}", "bold yellow"
    if speedup.median is None:
        return (
            f"Gain not measured: no held-out eager step of a hot shape lies within {PAIR_WINDOW} calls of a routed "
            "one. A longer run measures it.",
            "bold yellow",
        )
    span = wording.interval(speedup.low, speedup.high)
    said = f" (95 % interval {span}, {wording.plural(speedup.pairs, 'comparison')})" if span else ""
    if not span:
        said = f" (only {wording.plural(speedup.pairs, 'comparison')}: {MIN_PAIRS_FOR_INTERVAL} make an interval)"
    if speedup.is_gain:
        return f"{wording.times(speedup.median)} faster steps than eager{said}", "bold green"
    if speedup.high is not None and speedup.high < 1.0:
        return f"No gain: steps run at {wording.times(speedup.median)} of eager's speed{said}", "bold red"
    return f"No gain: {wording.times(speedup.median)} is not distinguishable from eager{said}", "bold yellow"


def _steps_alone(steps: Sequence[NodeLine]) -> str:
    """Which optimizers' steps ran fused in a run in which no node of a graph did."""
    some = ", ".join(f"{line.operations} ({wording.times(line.speedup)} when it was tuned)" for line in steps)
    return f"Only the optimizer's step ran fused: {some}."


def _why_nothing_fused(report: Report) -> str:
    """Of the nodes of graphs."""
    run = report.run
    assert run is not None
    for row in report.events:
        if row.event.kind in ("no_compiler", "no_triton", "store_unusable", "daemon_unusable"):
            return row.event.message
    if report.queue.open:
        return (
            f"{wording.plural(report.queue.open, 'request')} still wait to be tuned; the next run uses their winners."
        )
    if report.queue.failed:
        failed = wording.plural(report.queue.failed, "request")
        return f"{failed} for tuning failed; autofuse explain NODE says why, autofuse tune --again tries anew."
    if any(not line.fused_calls for line in report.nodes):
        if run.mode == "off":
            return "Tuning was off, and the store has no winner for this run's nodes."
        return "Eager's own kernels won for every node that was tuned."
    if any(root.state == "captured" for root in report.roots):
        return "The captured graphs hold no operators that can be fused."
    if report.roots:
        root = report.roots[0]
        return f"No module was captured; {root.name}: {in_words(root.reason, wording.ROOT_REASONS)}."
    return "No call of an nn.Module was seen."


def _measured(report: Report) -> str:
    totals = report.totals
    if not totals.routed_steps:
        return "none timed with fused kernels"
    one_in = report.run.steps_one_in if report.run is not None else 1
    routed = f"{_about(one_in)}{totals.routed_steps:,} with fused kernels"
    return f"timed: {routed}, {_about(held_out_one_in(one_in))}{totals.held_out_steps:,} held out in eager"


def _about(one_in: int) -> str:
    return "about " if one_in > 1 else ""


def _cost(report: Report) -> str:
    run = report.run
    assert run is not None
    totals = report.totals
    how = {"background": " beside the script", "wait": " while the script waited", "after": " after the script"}
    seconds = tuning_cost(run.mode, totals.tuning_seconds, totals.paused_seconds) or totals.tuning_seconds
    tuning = f"tuning {wording.seconds(seconds)}" if seconds else "no tuning"
    causes: dict[str, float] = {}
    for root in report.roots:
        for cause, seconds in root.capture_causes:
            causes[cause] = causes.get(cause, 0.0) + seconds
    capture = f"capture {wording.seconds(totals.capture_seconds)}{wording.causes(causes.items())}"
    return f"{capture}, {tuning}" + (how.get(run.mode, "") if seconds else "")


def _saved(report: Report) -> str:
    totals = report.totals
    if totals.seconds_saved is None:
        return "not measurable"
    if totals.seconds_saved <= 0:
        return f"nothing: {wording.seconds(-totals.seconds_saved)} lost"
    when = (
        f"paid for its cost by step {totals.break_even_step:,}"
        if totals.break_even_step is not None
        else "has not paid for its cost yet"
    )
    return f"{wording.seconds(totals.seconds_saved)}, {when}"


def _strict(cost: StrictCost) -> str:
    if not cost.refused_nodes:
        return "no faster kernel was refused for its bits"
    them = wording.plural(cost.refused_nodes, "node")
    saved = "" if cost.step_us is None else f", {wording.microseconds(cost.step_us)} a step are given up for that"
    return f"faster kernels of {them} were refused, as they are not eager's to the bit{saved}"


def _memory(report: Report) -> str:
    if not report.memory:
        if (report.run.settings if report.run else {}).get("observe.memory"):
            return "no two steps of one shape, in eager and with settled kernels, could be compared"
        return "not measured; autofuse run --set observe.memory=on measures a step's peak"
    names = len(report.memory) > 1
    return "\n".join(
        f"{line.name + ': ' if names else ''}a step's tensors peak at {wording.nbytes(line.routed_bytes)}, "
        f"{line.ratio:.2f} of eager's {wording.nbytes(line.eager_bytes)}"
        for line in report.memory[:MAX_MEMORY]
    )


# ---- tables -------------------------------------------------------------------------------------------


def _nodes(report: Report) -> Table:
    more = len(report.nodes) - MAX_NODES
    caption = f"and {wording.plural(more, 'node')} more: autofuse report --json" if more > 0 else ""
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
            wording.percent(line.time_share), name, f"{line.calls:,}", wording.microseconds(line.unfused_us),
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
        text = Text({"queued": "queued", "running": "in work", "failed": "failed"}.get(line.decision, "open"), style)
    if line.reason != "won":
        text.append("\n" + decision_words(line.reason), "dim")
    return text


def _steps(report: Report) -> Table:
    rows = [row for row in report.steps if row.routed]
    more = len(rows) - MAX_STEPS
    caption = "* hot: these make up 80 % of the routed time and the speedup above"
    if more > 0:
        caption += f"; and {wording.plural(more, 'shape')} more: autofuse report --json"
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


def _command(lead: str, command: str) -> Text:
    text = Text(f"{lead}: ", "dim")
    text.append(command, "bold")
    return text
