"""``autofuse tune``: empties the queue of a store in the foreground, or measures process settings on a script."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofuse.cli.options import effort_options, load_settings, script_arguments, store_option
from autofuse.cli.output import err_console, out_console
from autofuse.report.wording import plural
from autofuse.settings.layers import Settings
from autofuse.startup.script import Target, check_target

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EPILOG = """\
\b
Examples:
  autofuse tune                                      work until nothing is queued
  autofuse tune --profile thorough                   the same with more effort
  autofuse tune --process-settings train.py          does malloc's tuning pay for train.py?
"""


@click.command("tune", epilog=EPILOG, context_settings={"allow_interspersed_args": False})
@store_option
@effort_options
@click.option("--again", is_flag=True, help="Work on requests that have failed before, too.")
@click.option(
    "--process-settings",
    is_flag=True,
    help="Measure settings of the whole process on SCRIPT instead: some of its first steps, in two processes.",
)
@click.option(
    "--steps", metavar="N", type=click.IntRange(min=10), default=60, show_default=True, help="How many steps."
)
@script_arguments(is_required=False)
def command(
    store: Path | None,
    profile: str | None,
    assignments: tuple[str, ...],
    again: bool,
    process_settings: bool,
    steps: int,
    target: Target | None,
) -> int:
    """Work off the tuning queue now, in the foreground.

    'autofuse run' queues the operators it meets; the daemon tunes them beside your script. This command does the same
    work at full speed, with a progress bar, and ends when the queue is empty. Exit code 1 where a request failed.
    """
    settings = load_settings(assignments, store=store, profile=profile)
    if not process_settings:
        if target is not None:
            raise click.UsageError(
                f"SCRIPT is only for --process-settings. To run it, type: autofuse run {target.name}"
            )
        return _drain(settings, again)
    if target is None:
        raise click.UsageError("--process-settings needs a SCRIPT, for example: autofuse tune --process-settings x.py")
    check_target(target)
    _measure(settings, target, steps)
    return 0


def _drain(settings: Settings, again: bool) -> int:
    # Here and below: imports are done when the command runs, not for its help.
    from autofuse.daemon import control

    with _progress("tuning", None) as (progress, task):
        found = control.drain(
            settings, lambda done, total: progress.update(task, completed=done, total=total), again=again
        )
    left = f"{found.left} wait for another device, version or budget" if found.left else "the queue is empty"
    failed = f"; {found.failed} failed, try anew with: autofuse tune --again" if found.failed else ""
    click.echo(f"{plural(found.done, 'request')} tuned{failed}; {left}. Next: autofuse report")
    return 1 if found.failed else 0


@contextlib.contextmanager
def _progress(what: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on stderr with an estimate of the time left; nothing where stderr is no terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = err_console()
    columns = (TextColumn(f"autofuse: {what}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield progress, progress.add_task(what, total=total)


def _measure(settings: Settings, target: Target, steps: int) -> None:
    from autofuse.db.store import Store
    from autofuse.ir.device import cpu_device
    from autofuse.process.trial import measure_malloc

    with _progress("measuring", steps) as (progress, task):
        trial, pairs = measure_malloc(
            target,
            steps=steps,
            margin=settings.tuner.margin,
            device_key=cpu_device().key,
            on_progress=lambda done: progress.update(task, completed=done),
        )
    with Store.open(settings.run.store) as store:
        store.trials.put(trial)
    faults = [statistics.fmean(values) for values in zip(*((p.off_faults, p.on_faults) for p in pairs), strict=True)]
    out = out_console()
    out.print(f"Keeping freed memory (malloc thresholds) for {target.command}, eager steps in separate processes:")
    out.print(f"  step      {trial.baseline_us / 1000:.1f} ms -> {trial.with_us / 1000:.1f} ms")
    out.print(f"  faults    {faults[0]:.0f} -> {faults[1]:.0f} per step")
    out.print(f"  speedup   {trial.ratio:.2f}x ({trial.low:.2f} to {trial.high:.2f}), not counted as fusion")
    verdict = "switched on in later runs of this script" if trial.decision == "on" else "left off: no clear gain"
    out.print(f"  decision  {verdict}")
