"""``autofuse daemon``: the process that tunes in the background, one per store; the work is in ``autofuse.tuner``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autofuse.cli.options import effort_options, load_settings, store_option
from autofuse.cli.output import out_console
from autofuse.errors import SettingsError
from autofuse.stderr import plain

if TYPE_CHECKING:
    from rich.console import Console

    from autofuse.db.rows import DaemonState

EPILOG = """\
\b
Examples:
  autofuse daemon status       is it running, what is it doing?
  autofuse daemon logs -n 20   the last lines of its log
  autofuse daemon stop         end it; queued work stays queued
"""


@click.group("daemon", epilog=EPILOG)
def command() -> None:
    """Start, stop or look at the background tuner.

    'autofuse run' starts it when there is work, and it ends by itself when it has had nothing to do for a while. It
    runs at low priority, one process for each store.
    """


@command.command("start", epilog="\b\nExample:\n  autofuse daemon start --profile thorough\n")
@store_option
@effort_options
def start(store: Path | None, profile: str | None, assignments: tuple[str, ...]) -> None:
    """Start the daemon, unless it is running."""
    from autofuse.daemon import control  # here and below: imported when the command runs, not for its help

    settings = load_settings(assignments, store=store, profile=profile)
    running = control.status(settings) is not None
    pid = control.ensure_running(settings)
    if pid is None:
        click.echo("A daemon of another container or machine serves this store.")
        return
    click.echo(f"The daemon {'was already running' if running else 'has started'} (process {pid}).")


@command.command("stop", epilog="\b\nExample:\n  autofuse daemon stop\n")
@store_option
def stop(store: Path | None) -> None:
    """End the daemon; queued work stays queued."""
    from autofuse.daemon import control

    stopped = control.stop(load_settings(store=store))
    click.echo("The daemon has ended." if stopped else "No daemon was running.")


@command.command("status", epilog="\b\nExample:\n  autofuse daemon status --store ./tuned.sqlite3\n")
@store_option
def status(store: Path | None) -> int:
    """Tell whether the daemon runs and what it does. Exit code 1 when it does not run."""
    from autofuse.daemon import control

    settings = load_settings(store=store)
    states = control.statuses(settings)
    if not states:
        click.echo(f"No daemon serves {settings.run.store}. 'autofuse run' starts one when there is work.")
        return 1
    from autofuse.db.store import Store
    from autofuse.report.watch import look, queue_line, work_of

    console = out_console()
    with Store.open(settings.run.store, readonly=True) as stored:
        moment = look(stored, time.time())
    for state in states:
        is_latest = moment.daemon is not None and moment.daemon.pid == state.pid
        _print_state(console, state, work_of(moment) if is_latest else state.state)
    console.print(queue_line(moment.queue), soft_wrap=True)
    console.print(f"store {settings.run.store}", soft_wrap=True)
    return 0


def _print_state(console: Console, state: DaemonState, work: str) -> None:
    console.print(f"process {state.pid}: {work}", soft_wrap=True, markup=False, highlight=False)
    if state.heartbeat_at:
        age = max(0.0, time.time() - state.heartbeat_at)
        console.print(f"started {_ago(time.time() - state.started_at)}, last sign of life {_ago(age)}")
    if state.data.get("fleet"):
        console.print(plain(f"fleet: {state.data['fleet']}"), soft_wrap=True, markup=False, highlight=False)


@command.command("logs", epilog="\b\nExample:\n  autofuse daemon logs -n 50\n")
@click.option(
    "-n", "lines", metavar="N", type=click.IntRange(min=1), default=20, show_default=True, help="How many lines."
)
@store_option
def logs(lines: int, store: Path | None) -> int:
    """Print the last lines of the daemon's log."""
    from autofuse.daemon import control

    path = Path(control.log_path(load_settings(store=store)))
    if not path.exists():
        click.echo(f"There is no log yet: {path}", err=True)
        return 1
    click.echo(plain("\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])))
    return 0


@command.command("serve", epilog="\b\nExample:\n  autofuse daemon serve --fleet-worker\n")
@click.option("--fleet-worker", is_flag=True, help="Stay, and tune what other hosts of the fleet ask for.")
@store_option
@effort_options
def serve(store: Path | None, profile: str | None, assignments: tuple[str, ...], fleet_worker: bool) -> None:
    """Be the daemon, in the foreground; 'autofuse daemon start' runs this in a process of its own.

    With --fleet-worker it does not end when it has nothing to do: for a host to spare. docs/guides/fleet.md.
    """
    from autofuse.daemon import control

    settings = load_settings(assignments, store=store, profile=profile)
    if fleet_worker:
        if not settings.fleet.url:
            raise SettingsError("expected a server in fleet.url for --fleet-worker, found none; docs/guides/fleet.md")
        settings = settings.with_values({"fleet.worker": True}, "command line")
    control.serve(settings)


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
