"""The runs of a store, one a line, and two of them side by side.

In: a store. Out: lines of text, and tables on a console. Reads only. Errors: StoreError for a run that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from autofuse.db.rows import RunRow
from autofuse.db.store import Store
from autofuse.report import wording
from autofuse.report.report import NodeLine, Report, load_report
from autofuse.report.statistics import Gain, measure_gain
from autofuse.report.table import plain_table, say
from autofuse.report.verdict import facts, verdict

MAX_CHANGES = 10


@dataclass(frozen=True)
class RunLine:
    """One run beside the others."""

    id: int
    command: str
    started: str
    took: str
    mode: str
    steps: str
    speedup: str
    saved: str


def run_lines(store: Store, limit: int | None = None) -> list[RunLine]:
    """The newest first."""
    return [_line(store, run) for run in store.runs.recent(limit)]


def _line(store: Store, run: RunRow) -> RunLine:
    gain = measure_gain(store.steps.of_run(run.id), 0.0, run.steps_one_in) if run.totals.steps else Gain()
    return RunLine(
        id=run.id,
        command=run.command,
        started=wording.moment(run.started_at),
        took="not ended" if run.finished_at is None else wording.seconds(run.finished_at - run.started_at),
        mode=run.mode,
        steps=f"{run.totals.steps:,}",
        speedup=wording.times(gain.speedup.median),
        saved=wording.seconds(gain.seconds_saved),
    )


def render_runs(store: Store, console: Console, limit: int) -> None:
    """The list of runs."""
    lines = run_lines(store, limit)
    if not lines:
        say(console, f"The store {store.path} holds no runs yet.")
        say(console, "Fill it: autofuse run SCRIPT.py")
        return
    table = plain_table("Runs")
    table.add_column("run", justify="right", no_wrap=True)
    table.add_column("command", ratio=1, overflow="fold")
    table.add_column("started", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("speedup", justify="right", no_wrap=True)
    for line in lines:
        started = line.started.rpartition(":")[0]  # to the minute
        table.add_row(str(line.id), line.command, started, line.took, line.steps, line.speedup)
    console.print(table, highlight=False)
    console.print()
    newest = lines[0].id
    follow = f"autofuse runs compare {lines[1].id} {newest}" if len(lines) > 1 else f"autofuse report --run {newest}"
    say(console, f"Next: {follow}")


def render_comparison(store: Store, console: Console, first: int, second: int) -> None:
    """Two runs side by side, then the nodes that were decided otherwise."""
    reports = load_report(store, first), load_report(store, second)
    table = plain_table(f"Runs {first} and {second}")
    table.add_column("", style="dim", no_wrap=True)
    for report in reports:
        assert report.run is not None
        table.add_column(f"run {report.run.id}", ratio=1, overflow="fold")
    columns = [dict(_told(report)) for report in reports]
    for name in dict.fromkeys(key for column in columns for key in column):
        table.add_row(name, *(column.get(name, "–") for column in columns))
    console.print(table, highlight=False)
    console.print()
    changes = list(_changes(*reports))
    for change in changes[:MAX_CHANGES]:
        say(console, change)
    if len(changes) > MAX_CHANGES:
        say(console, f"and {wording.plural(len(changes) - MAX_CHANGES, 'node')} more")
    if not changes:
        say(console, "All nodes that both runs used are decided alike.")


def _told(report: Report) -> Iterator[tuple[str, str]]:
    run = report.run
    assert run is not None
    yield "command", run.command
    yield "started", wording.moment(run.started_at)
    yield "tune mode", run.mode
    yield "device", run.device.name
    yield "versions", run.versions
    yield "gain", verdict(report).sentence
    yield from facts(report)


def _changes(first: Report, second: Report) -> Iterator[str]:
    """The nodes that ran otherwise, by the second run's share of the time."""
    before = {(line.fusion_id, line.bucket): line for line in first.nodes}
    for line in second.nodes:
        earlier = before.get((line.fusion_id, line.bucket))
        if earlier is not None and _how(earlier) != _how(line):
            yield f"{line.node}, {line.bucket}: {_how(earlier)}, then {_how(line)}"


def _how(line: NodeLine) -> str:
    if not line.calls:
        return "no calls"
    return f"{wording.percent(line.fused_calls / line.calls)} of its calls fused"
